"""Where a followed stream of a collector stands: begun, waited for, replaced, lost, handed over. No I/O, no clock."""

from collections.abc import Sequence
from datetime import UTC, datetime

import pytest

from relatum.collecting import ExecutorOptions, FlushReason
from relatum.collecting._collector_core import Advance, CollectorLimits, Entry, Followed, Stored
from relatum.collecting._streams import AGAIN_S, Begin, CollectedStream, FindAgain, Leave, Shared
from relatum.errors import BrokerUnavailable, Conflict
from relatum.following import Attached, Event, Failed, Records, Replaced
from relatum.reading import Agreement, Position, RecordBatch

KNOWN = Position(9, b"f" * 8, None)
TYPED = b"\0\0\0\x15\0\0\0\x02\xa3\x0cx-basic-type\xa1\x01a"
"""A map of message annotations: the type."""
ID = b"\xc0\x06\x01\xa1\x03m%02d"
"""A list of properties: the message id, of two digits."""
NOW = datetime(2026, 11, 21, tzinfo=UTC)


class AllIsStored:
    """A store that takes all it is given."""

    name = "billing"
    server = ""

    def add(self, member: int, entries: Sequence[Entry], advance: Advance | None = None) -> Stored:
        """All of it is this member's."""
        return Stored(frozenset(entry.place for entry in entries), NOW)


class World:
    """What reads a stream, as far as it is told to; and the stream, whose questions are answered by the test."""

    def __init__(self) -> None:
        self.shared = Shared(AllIsStored(), CollectorLimits())  # type: ignore[arg-type]
        self.shared.member = 1
        self.shared.core.register("a", ExecutorOptions(bulk_messages=2, queue_bulks=1))
        self.reading: tuple[int, Position | None] | None = None
        self.given_back: list[Event] = []
        self.number = 0
        self.stream = CollectedStream(self.shared, "orders", self, lambda message: message.properties.type)

    def follow(self, stream: str, next_offset: int, *, known: Position | None = None) -> int:
        """Read from now on."""
        assert stream == "orders"
        self.reading = next_offset, known
        self.number += 1
        return self.number

    def leave(self, stream: str) -> None:
        """Read no more."""
        assert stream == "orders"
        self.reading = None

    def done(self, *events: Event) -> None:
        """Note what is given back."""
        self.given_back += events

    def records(self, *offsets: int) -> Records:
        """Messages that are read."""
        records = [b"\0\x53\x72\xd1" + TYPED + b"\0\x53\x73" + ID % n + b"\0\x53\x75\xa0\x04body" for n in offsets]
        return Records("orders", self.number, RecordBatch("orders", offsets[0], offsets, records), None)

    def begin(self, next_offset: int = 0, known: Position | None = None) -> None:
        """Have the stream followed, and attached."""
        followed = Followed(next_offset, known)
        question = self.stream.step(0.0)
        assert question == Begin(1, None)
        self.stream.answered(question, (0, followed), 0.0)
        self.stream.came(Attached("orders", self.number, followed.next_offset))
        assert self.stream.step(0.0) is None

    def store(self) -> None:
        """Store what was taken."""
        for gathered in self.shared.intake.next():
            self.shared.store_gathered(gathered)


@pytest.fixture
def world() -> World:
    """A stream nobody follows yet."""
    return World()


def test_a_stream_is_taken_in_where_it_is_known_again(world: World) -> None:
    """It is read from the position that all share; what came is given back once it is taken."""
    world.begin(10, KNOWN)
    assert world.reading == (10, KNOWN)
    records = world.records(10, 11)
    world.stream.came(records)
    assert world.stream.step(0.0) is None
    assert (world.shared.core.held_messages, world.given_back) == (2, [records])


def test_another_member_s_stream_is_asked_for_again(world: World) -> None:
    """Its bounds are not asked for a second time: where to begin was found out."""
    question = world.stream.step(5.0)
    assert question is not None
    world.stream.answered(question, (7, None), 5.0)
    assert world.stream.is_standing_by
    assert world.stream.step(1e9) is None
    world.stream.freed()
    assert world.stream.step(5.0) == Begin(1, 7)


def test_what_has_no_room_waits_alone(world: World) -> None:
    """A batch is held until there is room for the rest of it, and goes on where it stood."""
    world.begin()
    records = world.records(0, 1, 2)
    world.stream.came(records)
    assert world.stream.step(0.0) is None
    assert (world.stream.is_waiting, world.shared.core.held_messages, world.given_back) == (True, 2, [])
    world.store()
    bulk = world.shared.core.take("a")
    assert bulk is not None
    assert bulk.reason is FlushReason.MESSAGES
    assert world.stream.step(0.0) is None
    assert (world.stream.is_waiting, world.shared.core.held_messages, world.given_back) == (False, 3, [records])


def test_a_stream_is_handed_over_when_all_of_it_is_stored(world: World) -> None:
    """Whoever stops lets another member follow only behind what it has stored."""
    world.begin()
    world.stream.came(world.records(0))
    assert world.stream.step(0.0) is None
    world.shared.stop()
    assert world.stream.step(0.0) is None
    assert (world.reading, world.stream.is_resting, world.stream.is_waiting) == (None, False, True)
    world.store()
    assert world.stream.step(0.0) == Leave(1)
    world.stream.answered(Leave(1), None, 0.0)
    assert world.stream.is_resting
    assert world.stream.step(1e9) is None


def test_a_stream_declared_again_is_found_again_once_it_is_consumed(world: World) -> None:
    """Places mean something else then: what lay there before is consumed first."""
    world.begin()
    world.stream.came(world.records(0))
    world.stream.came(Replaced("orders", world.number, KNOWN, Agreement.OTHER, None))
    assert world.stream.step(0.0) is None
    assert (world.reading, world.stream.is_waiting) == (None, True)
    [gathered] = world.shared.intake.next()
    world.shared.intake.add(gathered, world.shared.intake.stored(gathered, Stored(frozenset(), NOW)), 0.0)
    assert world.stream.step(0.0) == FindAgain(1)
    world.stream.answered(FindAgain(1), None, 0.0)
    assert world.stream.step(0.0) == Leave(1)
    world.stream.answered(Leave(1), None, 0.0)
    assert world.stream.due_at == AGAIN_S
    assert world.stream.step(AGAIN_S) == Begin(1, None)


@pytest.mark.parametrize("of_all", [False, True])
def test_a_stream_that_cannot_be_read_is_another_member_s_to_try(
    world: World, of_all: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """It is left, which is said, and tried again after pauses that grow; what came behind that is given back."""
    pauses = []
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


def test_a_position_that_another_member_moved_is_begun_anew(world: World) -> None:
    """What is still to come of the old following is nobody's; the stream is asked for again at once."""
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


def test_a_member_that_joined_anew_begins_anew(world: World) -> None:
    """What it followed is the old member's, which others may have taken over."""
    world.begin()
    world.shared.member = 2
    assert world.stream.step(0.0) == Leave(1)
    world.stream.answered(Leave(1), None, 0.0)
    assert world.stream.step(AGAIN_S) == Begin(2, None)
