"""A followed stream of a collector that cannot be read: nothing of it is kept. No server, no clock.

What a stream's messages come to is told in `tests/integration/test_collector_shared.py`.
"""

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from relatum.collecting import ExecutorOptions, MessageCollector
from relatum.collecting._collector_core import Followed
from relatum.collecting._following import CollectedStream
from relatum.errors import BrokerUnavailable
from relatum.following import Attached, Event, Failed, Records
from relatum.reading import Position, RecordBatch
from relatum.waiting import Deadline
from tests.support import wait_until

TYPED = b"\0\0\0\x15\0\0\0\x02\xa3\x0cx-basic-type\xa1\x01a"
"""A map of message annotations: the type."""
ID = b"\xc0\x06\x01\xa1\x03m%02d"
"""A list of properties: the message id, of two digits."""


class Store:
    """What is asked of the store here: nobody else follows the stream."""

    name = "billing"
    server = ""

    def __init__(self) -> None:
        self.ending = Deadline(None)
        self.left = 0

    def unfollow(self, member: int, stream: str) -> None:
        """Let another member have it."""
        self.left += 1

    def end_in(self, seconds: float) -> None:
        """Let go."""


class World:
    """What reads a stream, and asks for it; and the stream."""

    reach = type("Reach", (), {"is_cut_off": False})

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.store = Store()
        collector = MessageCollector("billing", database="postgresql://nobody@127.0.0.1:1/nothing")
        collector.register_executor("a", lambda bulk: None, ExecutorOptions())
        self.shared = collector._shared
        self.shared.store, self.shared.member = self.store, 1  # type: ignore[assignment]
        self.type_of = collector._type_of
        self.shared.following = self  # type: ignore[assignment]
        self.given_back: list[Event] = []
        self.number = 0
        self.rests: list[float] = []
        self.goes_on = asyncio.Event()
        self.follower = self
        self.stream = CollectedStream(self, "orders")  # type: ignore[arg-type]
        monkeypatch.setattr(self.stream, "_rest", self.rest)

    async def rest(self, seconds: float) -> None:
        """Note for how long it would rest, and go on when the test does."""
        self.rests.append(seconds)
        await self.goes_on.wait()
        self.goes_on.clear()

    def begin(self, stream: str, member: int, initial: int | None) -> tuple[int, Followed]:
        """Nobody else follows it."""
        return 0, Followed(0)

    def follow(self, stream: str, next_offset: int, *, known: Position | None = None) -> int:
        """Read from now on."""
        self.number += 1
        return self.number

    def leave(self, stream: str) -> None:
        """Read no more."""

    def wake(self) -> None:
        """Wake the stream."""
        self.stream.wake()

    def done(self, *events: Event) -> None:
        """Note what is given back."""
        self.given_back += events

    def records(self, *offsets: int) -> Records:
        """Messages that are read."""
        records = [b"\0\x53\x72\xd1" + TYPED + b"\0\x53\x73" + ID % n + b"\0\x53\x75\xa0\x04body" for n in offsets]
        return Records("orders", self.number, RecordBatch("orders", offsets[0], offsets, records), None)

    def do(self, call: Callable[..., Any], *args: Any) -> Any:
        """Call something in the loop, and wait for its answer."""

        async def answer() -> Any:
            return call(*args)

        future = self.shared.loop.run(answer)
        assert future is not None
        return future.result(60)

    def come(self, *events: Event) -> None:
        """Have events come, one behind the other at once."""
        self.do(lambda: list(map(self.stream.on_event, events)))  # type: ignore[func-returns-value]

    def wait_for_rest(self, number: int) -> None:
        """Wait until it is to be tried again, for the nth time."""
        wait_until(lambda: len(self.rests) == number, what="it is tried again later")

    def attach(self, number: int) -> None:
        """Have it attached, when it has been followed for the nth time."""
        wait_until(lambda: self.number == number, what="the stream followed")
        self.do(self.stream.on_event, Attached("orders", number, 0))
        wait_until(lambda: self.stream.is_attached, what="the stream attached")


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """A stream that is followed, in a collector's loop."""
    world = World(monkeypatch)
    world.shared.loop.start()
    world.do(world.shared.loop.spawn, world.stream.run())
    yield world
    assert world.shared.loop.stop(60)


@pytest.mark.parametrize("of_all", [False, True])
def test_a_stream_that_cannot_be_read_is_another_member_s_to_try(
    world: World, of_all: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """It is left, which is said, and tried again after pauses that grow; what came behind that is given back."""
    for number in (1, 2, 3):
        world.attach(number)
        error = BrokerUnavailable("away")
        failed = Failed(None if of_all else "orders", 0 if of_all else world.number, error)
        records = world.records(10)
        world.come(failed, records)
        world.wait_for_rest(number)
        assert (world.store.left, world.given_back[-1]) == (number, records)
        world.do(world.goes_on.set)
    assert world.rests[0] < world.rests[2]
    assert "RabbitMQ is away" in caplog.text
