"""A follower for owners without a loop: what came is taken by a thread of theirs. It goes when all owners have one."""

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import CancelledError, wait
from contextlib import suppress
from itertools import count
from typing import Any, Final, Self

from relatum.checks import checked_count, checked_name
from relatum.closing import Closing
from relatum.errors import UsedAfterClose
from relatum.following._events import Event, Records
from relatum.following._follower import FollowerStatistics, StreamFollower
from relatum.limits import INTEGER_MAX
from relatum.processes import of_one_process
from relatum.reading import BrokerAddress, Position, StreamReader
from relatum.waiting import ComponentLoop, LoopThread, Outages

logger = logging.getLogger("relatum.follower")

TAKE_BYTES: Final = 4 << 20
"""Bytes that are given at once, about."""

TAKE_EVENTS: Final = 4096
"""Events that are given at once at most."""

CLOSE_S: Final = 10.0
"""Seconds that closing waits by default."""

SEEN_S: Final = 1.0
"""Seconds that statistics wait for what was called before."""


class Follower(Closing):
    """A `StreamFollower` with a loop of its own. A context manager; of one process.

    Args:
        broker: See `StreamFollower`.
        outages: See there.
        name: See there.
        who: See there.
        ready: Called, in the thread that reads, when there is something to take after there was nothing.
    """

    def __init__(
        self,
        broker: BrokerAddress | str,
        *,
        outages: Outages | None = None,
        ready: Callable[[], None] | None = None,
        **names: Any,
    ) -> None:
        self._loop = ComponentLoop("relatum-follower", logger)
        self._streams = StreamFollower(self._loop, broker, self._put, outages=outages, **names)
        self._ready = ready
        self._came = threading.Condition()
        self._events: deque[Event] = deque()
        self._left: dict[int, None] = {}
        """Followings of which nothing is given any more, though something may be on its way."""
        self._current: dict[str, int] = {}
        self._numbers = count(1)
        self._done: deque[Event] = deque()
        self._early: list[Callable[[], object]] | None = []
        """What is to be called as the loop begins; None from then on."""
        self._is_closed = False
        of_one_process(self, "a follower")

    def open(self) -> Self:
        """Begin; it waits for nothing."""
        with self._came:
            if self._early is not None and not self._is_closed:
                self._loop.start()
                early, self._early = self._early, None
                for function in early:
                    self._loop.call(function)
        return self

    def _call(self, function: Callable[[], object]) -> None:
        """Call in the loop, as soon as it runs; the lock is held."""
        if self._early is not None:
            self._early.append(function)
        else:
            self._loop.call(function)

    def follow(self, stream: str, next_offset: int, *, known: Position | None = None) -> int:
        """See `StreamFollower.follow`."""
        with self._came:
            if self._is_closed:
                raise UsedAfterClose("the follower was closed: open another one")
            checked_name("stream", stream)
            checked_count("next_offset", next_offset, least=0, most=INTEGER_MAX)
            # As the loop's numbers: followings begin there in the order in which they are asked for here.
            number = next(self._numbers)
            self._leave(stream)
            self._current[stream] = number
            self._call(lambda: self._streams.follow(stream, next_offset, known=known))
        return number

    def leave(self, stream: str) -> None:
        """Follow a stream no more: `take` gives nothing of it from now on. It waits for nothing."""
        with self._came:
            self._leave(stream)

    def _leave(self, stream: str) -> None:
        number = self._current.pop(stream, None)
        if number is None:
            return
        self._left[number] = None
        gone = [event for event in self._events if event.following == number]
        if gone:
            self._events = deque(event for event in self._events if event.following != number)
        self._call(lambda: self._end(stream, number, gone))

    def _end(self, stream: str, number: int, gone: list[Event]) -> None:
        self._streams.leave(stream)
        self._streams.done(*gone)
        with self._came:
            self._left.pop(number, None)

    def _put(self, event: Event) -> None:
        with self._came:
            is_left = event.following in self._left
            if not is_left:
                self._events.append(event)
            is_first = not is_left and len(self._events) == 1
        if is_left:
            self._streams.done(event)
        elif is_first:
            # Once for all that this turn of the loop brings.
            asyncio.get_running_loop().call_soon(self._announce)

    def _announce(self) -> None:
        with self._came:
            self._came.notify_all()
        if self._ready is not None:
            self._ready()

    def take(self, timeout_s: float) -> list[Event]:
        """What came, of many streams: each one's in order. For one thread at a time.

        Args:
            timeout_s: Seconds to wait for something.

        Returns:
            About 4 MiB of records at most, or one piece; nothing where nothing came in time, or it was closed.
        """
        taken, bytes_ = list[Event](), 0
        with self._came:
            self._came.wait_for(lambda: self._events or self._is_closed, max(0.0, timeout_s))
            while self._events and bytes_ < TAKE_BYTES and len(taken) < TAKE_EVENTS:
                event = self._events.popleft()
                taken.append(event)
                if isinstance(event, Records):
                    bytes_ += event.held.bytes
        return taken

    def done(self, *events: Event) -> None:
        """Hold records no more, and let their streams have more. From any thread, in any order."""
        with self._came:
            is_first = not self._done
            self._done.extend(events)
            if is_first and self._done:
                self._call(self._collect)

    def _collect(self) -> None:
        with self._came:
            done, self._done = self._done, deque()
        self._streams.done(*done)

    def reader(self) -> StreamReader:
        """See `StreamFollower.reader`."""
        return self._streams.reader()

    @property
    def is_let_in(self) -> bool:
        """See `StreamFollower.is_let_in`."""
        return self._streams.is_let_in

    @property
    def is_attached(self) -> bool:
        """See `StreamFollower.is_attached`."""
        return self._streams.is_attached

    def statistics(self) -> FollowerStatistics:
        """How it stands, after all that was called before; as it is now where a component's loop asks."""
        is_loop = isinstance(threading.current_thread(), LoopThread)
        future = None if is_loop else self._loop.run(self._seen)
        if future is not None:
            with suppress(CancelledError, TimeoutError):
                return future.result(SEEN_S)
        return self._streams.statistics()

    async def _seen(self) -> FollowerStatistics:
        return self._streams.statistics()

    def close(self, timeout_s: float = CLOSE_S) -> bool:
        """End all; who waits in `take` gets nothing.

        Args:
            timeout_s: Seconds to wait for the thread that reads.

        Returns:
            False where it had not ended by then.
        """
        until = time.monotonic() + timeout_s
        with self._came:
            self._is_closed = True
            self._came.notify_all()
        if self._ready is not None:
            self._ready()
        closing = self._loop.run(self._streams.close)
        if closing is None:
            self._streams.end()
            self._streams.questions.close()
        elif not self._loop.is_current:
            wait([closing], max(0.0, until - time.monotonic()))
        return self._loop.stop(max(0.0, until - time.monotonic()))

    def __enter__(self) -> Self:
        return self.open()
