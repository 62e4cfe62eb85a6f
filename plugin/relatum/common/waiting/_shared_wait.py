"""Many waits for something to appear in the database, with one thread that queries for all of them.

See docs/adr/0026 and docs/adr/0048.
"""

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from copy import copy
from functools import partial
from typing import Final, Generic, TypeVar

from relatum.common.processes import after_fork, leave_to_parent
from relatum.common.waiting._deadline import has_passed, left_s, within
from relatum.errors import Transient

PAUSE_S: Final = (0.005, 0.05)
"""The first and the longest pause between two polls, in seconds; it doubles. The longest is about a recorder's lag."""

SHARE: Final = 2
"""The least pause after a poll, as a multiple of its duration: many waits must not load the database, which has other
clients."""

POLL_S: Final = 1.0
"""Time limit of one poll in seconds: a frozen server is asked again, and waits end by their own time limits."""

_Question = TypeVar("_Question")
_Answer = TypeVar("_Answer")


class SharedWait(Generic[_Question, _Answer]):
    """Waits of many threads and tasks; one thread polls while there are any. Thread-safe.

    Each wait has its own future and time limit. A waiting task holds no thread. A forked child starts without waits.

    Args:
        poll: Queries for all waits, in the polling thread. It yields the index of each query that has an answer, with
            the answer; other queries are repeated. Its errors are raised to all waits, except a time-out of its own.
        name: The thread's name.
        first_s: The most seconds until a new query first runs; 0 if the caller has not queried by itself.
    """

    def __init__(
        self,
        poll: Callable[[Sequence[_Question]], Iterable[tuple[int, _Answer]]],
        name: str = "relatum-waits",
        *,
        first_s: float = PAUSE_S[0],
    ) -> None:
        self._poll = poll
        self._name = name
        self._first_s = first_s
        self._begin()
        after_fork(self, SharedWait._renew)

    def _begin(self) -> None:
        self._changed = threading.Condition(threading.Lock())
        self._questions: dict[Future[_Answer | None], _Question] = {}
        self._thread: threading.Thread | None = None
        self._pause_s = self._first_s

    def _renew(self) -> None:
        leave_to_parent(self._changed, self._questions)
        self._begin()

    def __len__(self) -> int:
        return len(self._questions)

    def ask(self, question: _Question) -> "Future[_Answer | None]":
        """Return a future of the answer, None at `end`. It belongs to one caller, who cancels it to leave."""
        future: Future[_Answer | None] = Future()
        future.add_done_callback(self._leave)
        with self._changed:
            self._questions[future] = question
            self._pause_s = self._first_s
            if self._thread is not None:
                self._changed.notify()
            else:
                # While the interpreter ends, no thread can start: each wait then lasts for its whole time.
                with contextlib.suppress(RuntimeError):
                    thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                    thread.start()
                    self._thread = thread
        return future

    def _leave(self, future: "Future[_Answer | None]") -> None:
        with self._changed:
            if self._questions.pop(future, None) is not None and not self._questions:
                self._changed.notify()

    def wait(self, future: "Future[_Answer | None]", until: float) -> _Answer | None:
        """Wait in this thread for a future of `ask`, also within the call's deadline; None after a time-out.

        `until`: The moment to end at, by `time.monotonic`. An error of a poll is raised here.
        """
        try:
            return future.result(max(0.0, left_s(until - time.monotonic())))
        except TimeoutError:
            return None
        finally:
            future.cancel()

    async def wait_in_task(self, future: "Future[_Answer | None]", until: float) -> _Answer | None:
        """Like `wait`, but for a task."""
        try:
            async with asyncio.timeout(max(0.0, left_s(until - time.monotonic()))):
                return await asyncio.wrap_future(future)
        except TimeoutError:
            return None
        finally:
            future.cancel()

    def hurry(self) -> None:
        """Poll soon, from any thread: there may be an answer."""
        with self._changed:
            self._pause_s = 0.0
            self._changed.notify()

    def end(self) -> None:
        """End all waits, with None as the answer."""
        with self._changed:
            waiting = list(self._questions)
        for future in waiting:
            self._resolve(future, partial(future.set_result, None))

    def join(self) -> None:
        """Wait for a running poll that no wait needs any more."""
        thread = self._thread
        if thread is not None and not self._questions and thread is not threading.current_thread():
            thread.join(POLL_S)

    def _run(self) -> None:
        asked_at, least_s = time.monotonic(), 0.0
        while True:
            with self._changed:
                while self._questions and (left := asked_at + max(self._pause_s, least_s) - time.monotonic()) > 0:
                    self._changed.wait(left)
                if not self._questions:
                    # Decided with the lock held, so that the next `ask` starts another thread.
                    self._thread = None
                    return
                waiting = list(self._questions.items())
            began = time.monotonic()
            has_found = self._ask_for([future for future, _ in waiting], [question for _, question in waiting])
            asked_at = time.monotonic()
            least_s = SHARE * (asked_at - began)
            with self._changed:
                self._pause_s = PAUSE_S[0] if has_found else min(max(PAUSE_S[0], 2 * self._pause_s), PAUSE_S[1])

    def _ask_for(self, futures: "list[Future[_Answer | None]]", questions: list[_Question]) -> bool:
        """Poll once, and answer waits. Returns whether there was an answer."""
        try:
            with within(POLL_S):
                try:
                    answers = [(futures[place], answer) for place, answer in self._poll(questions)]
                except Transient:
                    if has_passed():
                        return False
                    raise
        except Exception as error:  # noqa: BLE001 - raised to each wait
            for future in futures:
                mine = copy(error)
                mine.__cause__ = error
                self._resolve(future, partial(future.set_exception, mine))
            return True
        for future, answer in answers:
            self._resolve(future, partial(future.set_result, answer))
        return bool(answers)

    def _resolve(self, future: "Future[_Answer | None]", resolve: Callable[[], None]) -> None:
        """Finish a future, unless it is finished or cancelled."""
        with self._changed:
            is_waiting = self._questions.pop(future, None) is not None
        if is_waiting and future.set_running_or_notify_cancel():
            resolve()
