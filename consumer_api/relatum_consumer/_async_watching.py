# The blocking face of this, _watching.py, is made by tools/make-twins.
"""Those who wait for a message, with asyncio: one of them asks the index for all."""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from copy import copy
from typing import Any

from relatum.waiting import left_s
from relatum_consumer.lookups import Select, Waits, Watch, is_of_all


class AsyncSignal:
    """Tells one task that something has changed for it."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def set(self) -> None:
        """Tell it."""
        self._event.set()

    async def wait(self, most_s: float) -> None:
        """Wait to be told, so many seconds at most and within the deadline of the call; what was told is over then."""
        # asyncio only:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(left_s(most_s)):
                await self._event.wait()
        # blocking only:
        # self._event.wait(left_s(most_s))
        # both:
        self._event.clear()


class _Waiter:
    """One who waits."""

    def __init__(self) -> None:
        self.signal = AsyncSignal()
        self.is_seen = False
        self.error: Exception | None = None

    def see(self) -> None:
        """Tell it that there may be something."""
        self.is_seen = True
        self.signal.set()

    def fail(self, error: Exception) -> None:
        """Tell it what was met by who asked."""
        self.error = error
        self.signal.set()


class AsyncWatching:
    """The waits of one object. Tasks share it.

    Args:
        vhost: The virtual host of the streams.
    """

    def __init__(self, vhost: str) -> None:
        self._waits: Waits[_Waiter] = Waits(vhost)
        # asyncio only:
        self._lock = contextlib.nullcontext()
        # blocking only:
        # self._lock = threading.Lock()
        # both:

    def __len__(self) -> int:
        return len(self._waits)

    async def wait(self, watch: Watch, select: Callable[[Select], Awaitable[list[Any]]]) -> bool:
        """Wait until the index may name something; whether it may. `select` runs a statement, maybe for all."""
        waiter = _Waiter()
        with self._lock:
            leader = self._waits.enter(waiter, watch)
        if leader is not None:
            leader.signal.set()
        try:
            while not waiter.is_seen and waiter.error is None:
                left = left_s(watch.until - time.monotonic())
                if left <= 0:
                    break
                with self._lock:
                    leads, next_at = self._waits.leads(waiter), self._waits.pace.next_at
                pause = next_at - time.monotonic()
                if not leads or pause > 0:
                    await waiter.signal.wait(min(left, pause) if leads else left)
                else:
                    await self._look(select)
        finally:
            with self._lock:
                leader = self._waits.leave(waiter)
            if leader is not None:
                leader.signal.set()
        if waiter.error is not None:
            raise copy(waiter.error) from waiter.error
        return waiter.is_seen

    async def _look(self, select: Callable[[Select], Awaitable[list[Any]]]) -> None:
        """Ask for all, and tell those for whom there may be something."""
        with self._lock:
            waiters, question = self._waits.question()
        began = time.monotonic()
        try:
            found = {number for (number,) in await select(question)}
        except Exception as error:
            # Else another asks.
            if is_of_all(error):
                for each in waiters:
                    each.fail(error)
            raise
        with self._lock:
            self._waits.pace.note(began, has_found=bool(found))
        for number in found:
            waiters[number].see()

    def end(self) -> None:
        """Let all look for themselves: it was closed."""
        with self._lock:
            waiters = list(self._waits)
        for each in waiters:
            each.see()
