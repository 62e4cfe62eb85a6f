"""Many who wait for something to appear in the database: one thread asks for all of them together.

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
from typing import Any, Final, Generic, TypeVar

from relatum.errors import Transient
from relatum.processes import after_fork, leave_to_parent
from relatum.waiting._deadline import has_passed, left_s, within

PAUSE_S: Final = (0.005, 0.05)
"""The first and the longest pause between two polls, in seconds; it doubles. The longest is about a recorder's lag."""

SHARE: Final = 2
"""How many times as long as the poll took there is none at least: many waits cost what they cost, and the database is
there for others, too."""

POLL_S: Final = 1.0
"""Seconds for one poll at most: a server that stands still is asked again, and those who wait end by their own time."""

_Question = TypeVar("_Question")
_Answer = TypeVar("_Answer")


class SharedWait(Generic[_Question, _Answer]):
    """Waits of many threads and tasks, for which one thread polls while anybody waits. Thread-safe.

    Each waiter has a future of its own, and ends by its own time. No thread is held by a task that waits.

    In a child of the process nobody waits: waits of the parent are the parent's.

    Args:
        poll: Asks for all who wait; called in the polling thread. Of the questions given it names those that have an
            answer, by their places, each with the answer. A question without one is asked again. What it raises is
            raised to all who wait, but not that the time of the poll itself was over.
        name: Of the thread.
        first_s: Seconds until a new question is asked, at most; 0 where whoever waits has not looked by himself.
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
        """A future of the answer, None where all are let go. It belongs to one waiter, who cancels it to leave."""
        future: Future[_Answer | None] = Future()
        future.add_done_callback(self._leave)
        with self._changed:
            self._questions[future] = question
            self._pause_s = self._first_s
            if self._thread is not None:
                self._changed.notify()
            else:
                # As the interpreter ends there are no threads any more: each wait then lasts for its whole time.
                with contextlib.suppress(RuntimeError):
                    thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                    thread.start()
                    self._thread = thread
        return future

    def _leave(self, future: "Future[_Answer | None]") -> None:
        with self._changed:
            if self._questions.pop(future, None) is not None and not self._questions:
                self._changed.notify()

    def wait(self, question: _Question, until: float) -> _Answer | None:
        """Wait for the answer in this thread, within the deadline of the call too; None where the time is over.

        `until`: The moment to end at, as of `time.monotonic`. What a poll raised is raised here.
        """
        return self.result(self.ask(question), until)

    async def wait_in_task(self, question: _Question, until: float) -> _Answer | None:
        """As `wait`, for a task."""
        return await self.result_in_task(self.ask(question), until)

    def result(self, future: "Future[_Answer | None]", until: float) -> _Answer | None:
        """Wait in this thread for what `ask` gave, as `wait` does. The future is done with afterwards."""
        try:
            return future.result(max(0.0, left_s(until - time.monotonic())))
        except TimeoutError:
            return None
        finally:
            future.cancel()

    async def result_in_task(self, future: "Future[_Answer | None]", until: float) -> _Answer | None:
        """As `result`, for a task."""
        loop = asyncio.get_running_loop()
        came: asyncio.Future[None] = loop.create_future()
        future.add_done_callback(partial(_tell, loop, came))
        try:
            async with asyncio.timeout(max(0.0, left_s(until - time.monotonic()))):
                await came
        except TimeoutError:
            return None
        finally:
            future.cancel()
        return future.result()

    def answer(self, future: "Future[_Answer | None]", answer: _Answer) -> None:
        """Answer what `ask` gave without a poll, from any thread. A future that is done stays as it is."""
        self._resolve(future, partial(future.set_result, answer))

    def end(self) -> None:
        """Let all who wait go, with None as the answer."""
        with self._changed:
            waiting = list(self._questions)
        for future in waiting:
            self._resolve(future, partial(future.set_result, None))

    def join(self) -> None:
        """Wait for the poll that is under way, where nobody waits for it any more."""
        thread = self._thread
        if thread is not None and not self._questions and thread is not threading.current_thread():
            thread.join(POLL_S)

    # --- the thread ---------------------------------------------------------------------------------------

    def _run(self) -> None:
        asked_at, least_s = time.monotonic(), 0.0
        while True:
            with self._changed:
                while self._questions and (left := asked_at + max(self._pause_s, least_s) - time.monotonic()) > 0:
                    self._changed.wait(left)
                if not self._questions:
                    # Decided where `ask` would see it: who comes next starts another.
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
        """Poll once, and tell those for whom there is an answer; whether there was one."""
        try:
            with within(POLL_S):
                try:
                    answers = [(futures[place], answer) for place, answer in self._poll(questions)]
                except Transient:
                    if has_passed():
                        return False
                    raise
        except Exception as error:  # noqa: BLE001 - raised to each who waits
            for future in futures:
                mine = copy(error)
                mine.__cause__ = error
                self._resolve(future, partial(future.set_exception, mine))
            return True
        for future, answer in answers:
            self._resolve(future, partial(future.set_result, answer))
        return bool(answers)

    def _resolve(self, future: "Future[_Answer | None]", resolve: Callable[[], None]) -> None:
        """Tell one who waits, unless it was told or has left."""
        with self._changed:
            is_waiting = self._questions.pop(future, None) is not None
        if is_waiting and future.set_running_or_notify_cancel():
            resolve()


def _tell(loop: asyncio.AbstractEventLoop, came: "asyncio.Future[None]", _: "Future[Any]") -> None:
    def tell() -> None:
        if not came.done():
            came.set_result(None)

    # A loop that has ended has nobody to tell.
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(tell)
