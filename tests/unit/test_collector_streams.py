"""A followed stream of a collector that cannot be read, or is another's: nothing of it is kept. No I/O, no clock.

What a stream's messages come to is told in `tests/integration/test_collector_shared.py`.
"""

import pytest

from relatum.collecting import ExecutorOptions
from relatum.collecting._collector_core import CollectorLimits, Followed
from relatum.collecting._streams import Begin, CollectedStream, Leave, Shared
from relatum.errors import BrokerUnavailable, Conflict
from relatum.following import Attached, Event, Failed, Records
from relatum.reading import Position, RecordBatch

TYPED = b"\0\0\0\x15\0\0\0\x02\xa3\x0cx-basic-type\xa1\x01a"
"""A map of message annotations: the type."""
ID = b"\xc0\x06\x01\xa1\x03m%02d"
"""A list of properties: the message id, of two digits."""


class Store:
    """What is asked of the store here."""

    name = "billing"
    server = ""


class World:
    """What reads a stream, as far as it is told to; and the stream, whose questions are answered by the test."""

    def __init__(self) -> None:
        self.shared = Shared(Store(), CollectorLimits())  # type: ignore[arg-type]
        self.shared.member = 1
        self.shared.core.register("a", ExecutorOptions())
        self.given_back: list[Event] = []
        self.number = 0
        self.stream = CollectedStream(self.shared, "orders", self, lambda message: message.properties.type)

    def follow(self, stream: str, next_offset: int, *, known: Position | None = None) -> int:
        """Read from now on."""
        self.number += 1
        return self.number

    def leave(self, stream: str) -> None:
        """Read no more."""

    def done(self, *events: Event) -> None:
        """Note what is given back."""
        self.given_back += events

    def records(self, *offsets: int) -> Records:
        """Messages that are read."""
        records = [b"\0\x53\x72\xd1" + TYPED + b"\0\x53\x73" + ID % n + b"\0\x53\x75\xa0\x04body" for n in offsets]
        return Records("orders", self.number, RecordBatch("orders", offsets[0], offsets, records), None)

    def begin(self) -> None:
        """Have the stream followed, and attached."""
        question = self.stream.step(0.0)
        assert question == Begin(1, None)
        self.stream.answered(question, (0, Followed(0)), 0.0)
        self.stream.came(Attached("orders", self.number, 0))
        assert self.stream.step(0.0) is None


@pytest.mark.parametrize("of_all", [False, True])
def test_a_stream_that_cannot_be_read_is_another_member_s_to_try(
    of_all: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """It is left, which is said, and tried again after pauses that grow; what came behind that is given back."""
    world, pauses = World(), []
    for _ in range(3):
        world.stream.due_at = 0.0
        world.begin()
        error = BrokerUnavailable("away")
        world.stream.came(Failed(None if of_all else "orders", 0 if of_all else world.number, error))
        world.stream.came(records := world.records(10))
        assert world.stream.step(0.0) == Leave(1)
        assert world.given_back[-1] is records
        world.stream.answered(Leave(1), None, 0.0)
        pauses.append(world.stream.due_at)
    assert pauses[0] < pauses[2]
    assert "RabbitMQ is away" in caplog.text


def test_a_position_that_another_member_moved_is_begun_anew() -> None:
    """What is still to come of the old following is nobody's; the stream is asked for again at once."""
    world = World()
    world.begin()
    world.stream.came(world.records(0))
    assert world.stream.step(0.0) is None
    [gathered] = world.shared.intake.next()
    world.shared.intake.lost(gathered)
    assert world.shared.intake.lost_streams == {"orders": None}
    world.stream.came(late := world.records(1))
    assert world.stream.step(0.0) is None
    world.stream.lost(None)
    assert world.stream.step(0.0) == Leave(1)
    assert late in world.given_back
    world.stream.answered(Leave(1), Conflict("another member's"), 0.0)
    assert world.stream.is_resting
