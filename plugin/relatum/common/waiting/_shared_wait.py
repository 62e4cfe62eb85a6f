"""Many waits for rows to appear in the database, with one thread that queries for all of them.

See docs/adr/0048.
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
from relatum.common.waiting._deadline import left_s, within
from relatum.errors import Transient

PAUSE_S: Final = (0.005, 0.05)
"""First and longest pause between two polls, in seconds. The pause doubles; the longest is about a recorder's lag."""

SHARE: Final = 2
"""Minimum pause after a poll, as a multiple of the poll's duration, so that many waits do not overload the database."""

POLL_S: Final = 1.0
"""Maximum seconds of one poll. The next poll retries a frozen server; each wait ends at its own time limit."""

_Query = TypeVar("_Query")
_Answer = TypeVar("_Answer")


class SharedWait(Generic[_Query, _Answer]):
    """The waits of many threads and tasks. One thread polls while there are waits. Thread-safe.

    Each wait has its own future and time limit. A waiting task needs no thread. A forked child starts without waits.
    `poll` queries for all waits, and yields the index and the answer of each query that has an answer; the others are
    repeated. All waits raise its errors, except a time-out after `POLL_S`. The first poll for a new wait follows within
    `first_s`.
    """

    def __init__(
        self,
        poll: Callable[[Sequence[_Query]], Iterable[tuple[int, _Answer]]],
        name: str = "relatum-waits",
        *,
        first_s: float = PAUSE_S[0],
    ) -> None:
        self._poll = poll
        self._name = name
        self._first_s = first_s
        self._reset()
        after_fork(self, SharedWait._renew)

    def _reset(self) -> None:
        self._changed = threading.Condition(threading.Lock())
        self._queries: dict[Future[_Answer | None], _Query] = {}
        self._thread: threading.Thread | None = None
        self._pause_s = self._first_s

    def _renew(self) -> None:
        leave_to_parent(self._changed, self._queries)
        self._reset()

    def __len__(self) -> int:
        return len(self._queries)

    def ask(self, query: _Query) -> "Future[_Answer | None]":
        """Return a future of the answer; the answer is None after `end`. Cancel the future to end the wait."""
        future: Future[_Answer | None] = Future()
        future.add_done_callback(self._remove)
        with self._changed:
            self._queries[future] = query
            self._pause_s = self._first_s
            if self._thread is not None:
                self._changed.notify()
            else:
                # No thread can start at interpreter shutdown: each wait then ends at its time limit.
                with contextlib.suppress(RuntimeError):
                    thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                    thread.start()
                    self._thread = thread
        return future

    def _remove(self, future: "Future[_Answer | None]") -> None:
        with self._changed:
            if self._queries.pop(future, None) is not None and not self._queries:
                self._changed.notify()

    def wait(self, future: "Future[_Answer | None]", until: float) -> _Answer | None:
        """Wait in this thread for a future of `ask`, within the call's deadline, and return the answer.

        `until`: The moment of the time-out, by `time.monotonic`; the answer is then None. Raises errors of `poll`.
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

    def poll_soon(self) -> None:
        """Poll soon, because there may be an answer. Call this from any thread."""
        with self._changed:
            self._pause_s = 0.0
            self._changed.notify()

    def end(self) -> None:
        """End all waits; their answer is None."""
        with self._changed:
            waiting = list(self._queries)
        for future in waiting:
            self._resolve(future, partial(future.set_result, None))

    def join(self) -> None:
        """Wait for the end of a running poll if there are no waits, for at most `POLL_S`."""
        thread = self._thread
        if thread is not None and not self._queries and thread is not threading.current_thread():
            thread.join(POLL_S)

    def _run(self) -> None:
        polled_at, min_s = time.monotonic(), 0.0
        while True:
            with self._changed:
                while self._queries and (wait_s := polled_at + max(self._pause_s, min_s) - time.monotonic()) > 0:
                    self._changed.wait(wait_s)
                if not self._queries:
                    # Set with the lock held, so that the next `ask` starts another thread.
                    self._thread = None
                    return
                waiting = list(self._queries.items())
            started_at = time.monotonic()
            has_found = self._poll_once([future for future, _ in waiting], [query for _, query in waiting])
            polled_at = time.monotonic()
            # A much longer poll means that the process was suspended.
            min_s = SHARE * min(polled_at - started_at, 10 * POLL_S)
            with self._changed:
                self._pause_s = PAUSE_S[0] if has_found else min(max(PAUSE_S[0], 2 * self._pause_s), PAUSE_S[1])

    def _poll_once(self, futures: "list[Future[_Answer | None]]", queries: list[_Query]) -> bool:
        """Poll once, and end the waits that have an answer. Return whether a wait ended."""
        try:
            with within(POLL_S) as limit:
                answers = [(futures[index], answer) for index, answer in self._poll(queries)]
        except Exception as error:  # noqa: BLE001 - raised to each wait
            if isinstance(error, Transient) and limit.has_passed:
                return False
            for future in futures:
                own_error = copy(error)
                own_error.__cause__ = error
                self._resolve(future, partial(future.set_exception, own_error))
            return True
        for future, answer in answers:
            self._resolve(future, partial(future.set_result, answer))
        return bool(answers)

    def _resolve(self, future: "Future[_Answer | None]", resolve: Callable[[], None]) -> None:
        """Resolve a future, unless it is done."""
        with self._changed:
            is_waiting = self._queries.pop(future, None) is not None
        if is_waiting and future.set_running_or_notify_cancel():
            resolve()
