"""A follower as tests use it: what it gives, gathered by stream, and waited for."""

import logging
from collections import defaultdict, deque
from collections.abc import Callable
from threading import Condition
from typing import Any, Self, TypeVar

from relatum.following import Event, Failed, FollowerStatistics, Records, StreamFollower
from relatum.reading import AnyBroker, Position
from relatum.waiting import ComponentLoop, Outages
from tests.support._waiting import wait_until

TAKE_S = 0.2
"""Seconds of one take: nothing depends on it."""

TAKE_BYTES = 4 << 20
"""Bytes that are taken at once, about."""

_Event = TypeVar("_Event")


class Follower:
    """A `StreamFollower` on a loop of its own, called by a test's thread, which takes what came.

    Args:
        broker: The broker.
        outages: Where to tell what waits.
        options: Of `StreamFollower`.
    """

    def __init__(self, broker: AnyBroker, *, outages: Outages | None = None, **options: Any) -> None:
        self._loop = ComponentLoop("relatum-test-follower", logging.getLogger("relatum.test-follower"))
        self._streams = StreamFollower(self._loop, broker, self._put, outages=outages, **options)
        self._came = Condition()
        self._events: deque[Event] = deque()

    def open(self) -> None:
        """Begin."""
        self._loop.start()

    def _put(self, event: Event) -> None:
        with self._came:
            self._events.append(event)
            self._came.notify()

    def _do(self, call: Callable[..., _Event], *args: Any, **named: Any) -> _Event:
        async def answer() -> _Event:
            return call(*args, **named)

        future = self._loop.run(answer)
        return call(*args, **named) if future is None else future.result(60)

    def follow(self, stream: str, next_offset: int, *, known: Position | None = None) -> int:
        """Follow a stream."""
        return self._do(self._streams.follow, stream, next_offset, known=known)

    def leave(self, stream: str) -> None:
        """Follow it no more; what came of it and was not taken is dropped."""
        self._do(self._streams.leave, stream)
        with self._came:
            gone = [event for event in self._events if event.stream == stream]
            self._events = deque(event for event in self._events if event.stream != stream)
        self.done(*gone)

    def take(self, timeout_s: float) -> list[Event]:
        """What came, or comes in so many seconds: about 4 MiB at most."""
        taken, bytes_ = list[Event](), 0
        with self._came:
            self._came.wait_for(lambda: self._events, timeout_s)
            while self._events and bytes_ < TAKE_BYTES:
                event = self._events.popleft()
                taken.append(event)
                bytes_ += sum(map(len, event.batch.records)) if isinstance(event, Records) else 0
        return taken

    def done(self, *events: Event) -> None:
        """Hold these no more."""
        self._do(self._streams.done, *events)

    @property
    def is_let_in(self) -> bool:
        """Whether the broker takes its login."""
        return self._streams.is_let_in

    def statistics(self) -> FollowerStatistics:
        """How it stands."""
        return self._do(self._streams.statistics)

    def close(self) -> None:
        """End all."""
        closing = self._loop.run(self._streams.close)
        if closing is not None:
            closing.result(60)
        assert self._loop.stop(60)


class Taker:
    """Takes from a follower, and is done with all at once. A context manager.

    Args:
        follower: The follower; opened and closed here.
    """

    def __init__(self, follower: Follower) -> None:
        self.follower = follower
        self.events: dict[str | None, list[Event]] = defaultdict(list)

    def take(self) -> None:
        """Take what has come."""
        events = self.follower.take(TAKE_S)
        for event in events:
            self.events[event.stream].append(event)
        self.follower.done(*events)

    def until(self, condition: Callable[[], Any], *, what: str) -> None:
        """Take until a condition holds."""

        def holds() -> bool:
            self.take()
            return bool(condition())

        wait_until(holds, what=what)

    def of(self, stream: str | None, kind: type[_Event]) -> list[_Event]:
        """The events of a kind."""
        return [event for event in self.events[stream] if isinstance(event, kind)]

    def kinds(self, stream: str) -> list[type]:
        """The kinds of a stream's events, records of several batches in a row counted once."""
        kinds: list[type] = []
        for event in self.events[stream]:
            if not isinstance(event, Records) or kinds[-1:] != [Records]:
                kinds.append(type(event))
        return kinds

    def offsets(self, stream: str) -> list[int]:
        """The offsets that came, in the order in which they did."""
        return [offset for event in self.of(stream, Records) for offset in event.batch.offsets]

    def bodies(self, stream: str) -> list[bytes]:
        """The bodies that came."""
        return [each.body for event in self.of(stream, Records) for each in event.batch.each_message()]

    def wait_event(self, stream: str | None, kind: type[_Event], count: int = 1) -> _Event:
        """The so manieth event of a kind, once it came."""
        self.until(lambda: len(self.of(stream, kind)) >= count, what=f"{kind.__name__} of {stream!r}")
        return self.of(stream, kind)[count - 1]

    def wait_bodies(self, stream: str, bodies: list[bytes]) -> None:
        """Wait until as many bodies came; they must be these."""
        self.until(lambda: len(self.bodies(stream)) >= len(bodies), what=f"{len(bodies)} messages of {stream!r}")
        assert self.bodies(stream) == bodies

    def wait_failed(self, stream: str | None, kind: type[Exception]) -> Failed:
        """A failure for a reason, once it came."""

        def found() -> list[Failed]:
            return [event for event in self.of(stream, Failed) if isinstance(event.error, kind)]

        self.until(found, what=f"{kind.__name__} of {stream!r}")
        return found()[0]

    def __enter__(self) -> Self:
        self.follower.open()
        return self

    def __exit__(self, *_: object) -> None:
        self.follower.close()


class Owner:
    """Owns a loop, and a follower on it; done with all at once. A context manager.

    Args:
        broker: The broker.
        on_event: Called with each event before it is kept; what it raises is the follower's to bear.
        outages: Where to tell what waits.
        options: Of `StreamFollower`.

    Attributes:
        events: What was given, by stream.
    """

    def __init__(
        self,
        broker: AnyBroker,
        on_event: Callable[[Event], object] = lambda _event: None,
        *,
        outages: Outages | None = None,
        **options: Any,
    ) -> None:
        self.events: dict[str | None, list[Event]] = defaultdict(list)
        self.loop = ComponentLoop("relatum-test-owner", logging.getLogger("relatum.test-owner"))
        self.follower = StreamFollower(self.loop, broker, self._keep, outages=outages, **options)
        self._on_event = on_event

    def _keep(self, event: Event) -> None:
        self._on_event(event)
        self.events[event.stream].append(event)
        self.follower.done(event)

    def follow(self, *streams: str) -> None:
        """Follow streams from their beginning."""
        for stream in streams:
            self.loop.call(self.follower.follow, stream, 0)

    def of(self, stream: str | None, kind: type[_Event]) -> list[_Event]:
        """The events of a kind."""
        return [event for event in self.events[stream] if isinstance(event, kind)]

    def offsets(self, stream: str) -> list[int]:
        """The offsets that came, in the order in which they did."""
        return [offset for event in self.of(stream, Records) for offset in event.batch.offsets]

    def close(self, timeout_s: float) -> bool:
        """End all; whether it had ended by then."""
        for _ in range(2):
            closing = self.loop.run(self.follower.close)
            assert closing is not None, "it runs"
            closing.result(timeout_s)
        return self.loop.stop(timeout_s)

    def __enter__(self) -> Self:
        self.loop.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.loop.call(lambda: None):
            assert self.close(30)
