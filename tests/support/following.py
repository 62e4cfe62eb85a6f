"""A follower as tests use it: on a loop of its own, with what it gave by stream."""

import logging
from collections import defaultdict
from collections.abc import Callable
from typing import Any, Self, TypeVar

from relatum.common.waiting import ComponentLoop, Outages
from relatum.reading import AnyBroker, Position
from relatum.reading.following import Event, Failed, FollowerStatistics, Records, StreamFollower
from tests.support._waiting import wait_until

T = TypeVar("T")


class Owner:
    """Owns a loop, and a follower on it; `holds`: is done with nothing before `release`. `events` are by stream."""

    def __init__(
        self,
        broker: AnyBroker,
        on_event: Callable[[Event], object] = lambda _event: None,
        *,
        holds: bool = False,
        outages: Outages | None = None,
        **options: Any,
    ) -> None:
        self.events: dict[str | None, list[Event]] = defaultdict(list)
        self.loop = ComponentLoop("relatum-test-owner", logging.getLogger("relatum.test-owner"))
        self.follower = StreamFollower(self.loop, broker, self._keep, outages=outages, **options)
        self._on_event = on_event
        self._holds = holds

    def _keep(self, event: Event) -> None:
        self._on_event(event)
        self.events[event.stream].append(event)
        if not self._holds:
            self.follower.done(event)

    def _do(self, call: Callable[..., T], *args: Any, **named: Any) -> T:
        async def answer() -> T:
            return call(*args, **named)

        future = self.loop.run(answer)
        assert future is not None, "it runs"
        return future.result(60)

    def follow(self, *streams: str, start: int = 0, known: Position | None = None) -> None:
        for stream in streams:
            self._do(self.follower.follow, stream, start, known=known)

    def leave(self, stream: str) -> None:
        self._do(self.follower.leave, stream)

    def release(self) -> None:
        """Be done with all, and with each event at once from now on."""
        self._holds = False
        self._do(lambda: self.follower.done(*(event for events in self.events.values() for event in events)))

    def statistics(self) -> FollowerStatistics:
        return self._do(self.follower.statistics)

    def of(self, stream: str | None, kind: type[T]) -> list[T]:
        return [event for event in self.events[stream] if isinstance(event, kind)]

    def kinds(self, stream: str) -> list[type]:
        """The kinds of a stream's events, records of several batches in a row counted once."""
        kinds: list[type] = []
        for event in self.events[stream]:
            if not isinstance(event, Records) or kinds[-1:] != [Records]:
                kinds.append(type(event))
        return kinds

    def offsets(self, stream: str) -> list[int]:
        return [offset for event in self.of(stream, Records) for offset in event.batch.offsets]

    def bodies(self, stream: str) -> list[bytes]:
        return [each.body for event in self.of(stream, Records) for each in event.batch.each_message()]

    def wait_event(self, stream: str | None, kind: type[T]) -> T:
        return wait_until(lambda: self.of(stream, kind), what=f"{kind.__name__} of {stream!r}")[0]

    def wait_bodies(self, stream: str, bodies: list[bytes]) -> None:
        wait_until(lambda: len(self.bodies(stream)) >= len(bodies), what=f"{len(bodies)} messages of {stream!r}")
        assert self.bodies(stream) == bodies

    def wait_failed(self, stream: str | None, kind: type[Exception]) -> Failed:
        def found() -> list[Failed]:
            return [event for event in self.of(stream, Failed) if isinstance(event.error, kind)]

        return wait_until(found, what=f"{kind.__name__} of {stream!r}")[0]

    def close(self, timeout_s: float) -> bool:
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
