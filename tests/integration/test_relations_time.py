"""Lookups by time against real streams and a real database."""

import itertools
import random
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import sqlalchemy as sa

from relatum.errors import StreamNotFound, StreamReplaced, TimeNotRecorded
from relatum.keys import moment as moment_of
from relatum.recording import backfill, set_record_time
from relatum.store.database import Database
from relatum_consumer import Relations, Status
from relatum_consumer.lookups.time_index import BLOCKS_BETWEEN, BLOCKS_NEIGHBOUR, WIDTH_CLASSES, WIDTHS_US, Block
from tests.support import delete_stream, new_streams, publish_plain, unique_name
from tests.support import times as slow
from tests.support._recording import time_blocks, width_class
from tests.support.place import Place
from tests.support.super_streams import super_stream

SECOND = 1_000_000
KEYS = ["host"]


def publish(place: Place, times: list[int], to: str | None = None) -> None:
    messages = [(b"", {"relatum_time": time, "host": f"h{n % 3}"}) for n, time in enumerate(times)]
    publish_plain(place.amqp, to or place.stream, messages, confirm=False)


def shapes() -> dict[str, list[int]]:
    """Times in order, in none, in some, with many that are equal, and some far away."""
    chance = random.Random(7)
    count = 300
    return {
        "in order": [n * SECOND // 3 for n in range(count)],
        "in no order": [chance.randrange(200 * SECOND) for _ in range(count)],
        "late by up to three seconds": [n * SECOND // 3 + chance.randrange(3 * SECOND) for n in range(count)],
        "few different ones": [chance.randrange(12) * SECOND for _ in range(count)],
        "some far away": [n * SECOND if n % 50 else chance.randrange(10**14) for n in range(count)],
    }


def test_every_look_up_by_time_is_exact(place: Place, chance: random.Random) -> None:
    """From messages and from datetimes, in any stream, with and without a key, against looking at every message."""
    with new_streams(place.amqp, len(shapes())) as streams, Relations(place.amqp, place.database) as relations:
        times = dict(zip(streams, shapes().values(), strict=True))
        for stream, each in times.items():
            publish(place, each, stream)
        place.record(*streams)
        for own in streams * 3:
            message = relations.read(own, chance.randrange(len(times[own])))
            for stream, is_by_host in itertools.product((own, chance.choice(streams)), (False, True)):
                at: Any = message if is_by_host or chance.random() < 0.6 else message.time
                is_own = at is message and stream == own
                assert message.time_us is not None
                moment: slow.Moment = (message.time_us, 0 if is_own else None, message.offset if is_own else 0)
                places = [
                    (time, 0, offset)
                    for offset, time in enumerate(times[stream])
                    if not is_by_host or offset % 3 == message.offset % 3
                ]
                options: dict[str, Any] = {"by": "host"} if is_by_host else {}
                for inclusive in (False, True):
                    for look_up, slowly in ((relations.after, slow.after), (relations.before, slow.before)):
                        expected = slowly(places, moment, inclusive=inclusive)
                        found = look_up(at, stream, inclusive=inclusive, **options)
                        assert [m.offset for m in found] == ([] if expected is None else [expected[2]])
                expected = slow.nearest(places, moment)
                found = relations.nearest(at, stream, **options)
                assert [m.offset for m in found] == ([] if expected is None else [expected[2]])
                assert found.status is (Status.FOUND if expected else Status.ABSENT)
                found = relations.window(at, stream, before_s=2.5, after_s=1, **options)
                around = slow.window(places, moment, 2 * SECOND + SECOND // 2, SECOND)
                assert [m.offset for m in found] == [place[2] for place in around]


def test_the_statements_find_the_blocks_that_looking_at_every_block_finds(place: Place, database: Database) -> None:
    """The statements find the retained blocks of any width between two moments, and from one to the next message."""
    chance = random.Random(3)
    times = [chance.choice([n * 100, chance.randrange(10**5), chance.randrange(10**12), 5000]) for n in range(6000)]
    parts = [(range(6000)[n : n + 700], times[n : n + 700]) for n in range(0, 6000, 700)]
    rows = [block for offsets, of_part in parts for block in time_blocks(offsets, of_part, None)[0]]
    with place.engine.begin() as connection:
        connection.execute(
            sa.text("INSERT INTO relatum.time_blocks VALUES (:min_us, :max_us, :first_offset, :last_offset, 1, :c)"),
            [block._asdict() | {"c": width_class(block.max_us - block.min_us)} for block in rows],
        )
    fixed = {"stream_id": 1, "classes": list(WIDTH_CLASSES), "widths": list(WIDTHS_US)}

    def select(sql: Any, **given: int) -> list[Block]:
        return sorted(Block(*row) for row in database.rows(sql, fixed | given))

    for _ in range(150):
        t = chance.choice([chance.randrange(10**5), chance.randrange(10**12), chance.choice(times)])
        floor = chance.choice([0, 0, 3000])
        known = [Block(*row) for row in rows if row.last_offset >= floor]
        witness = min((block.min_us for block in known if block.min_us > t), default=t)
        found = select(BLOCKS_NEIGHBOUR["after"], t=t, floor=floor)
        assert found == sorted(block for block in known if block.min_us <= witness and block.max_us >= t)
        # Backwards, the next message beyond need not be the nearest.
        found = select(BLOCKS_NEIGHBOUR["before"], t=t, floor=floor)
        beyond = [block.max_us for block in found if block.max_us < t]
        assert bool(beyond) == any(block.max_us < t for block in known)
        low = min(beyond, default=t)
        assert found == sorted(block for block in known if block.min_us <= t and block.max_us >= low)
        high = t + chance.randrange(10**5)
        between = fixed | {"stream_ids": [7, 1], "low": t, "high": high, "floor": floor}
        found = sorted(Block(*row[1:]) for row in database.rows(BLOCKS_BETWEEN, between))
        assert found == sorted(block for block in known if block.min_us <= high and block.max_us >= t)


def test_what_is_not_recorded_yet_is_left_out_unless_it_is_asked_for(place: Place, relations: Relations) -> None:
    """Lookups are exact over what is recorded, and with `complete` over all that is in the stream."""
    publish(place, [10 * SECOND, 20 * SECOND])
    assert relations.after(moment_of(0), place.stream).status is Status.NOT_RECORDED_YET
    assert relations.after(moment_of(0), place.stream, complete=True).ids == ((place.stream, 0),)
    with pytest.raises(StreamNotFound):
        relations.after(moment_of(0), unique_name())
    place.record()
    first, second = relations.read(place.stream, 0), relations.read(place.stream, 1)
    assert relations.after(second, place.stream).status is Status.ABSENT
    assert relations.before(first, place.stream).status is Status.ABSENT
    publish(place, [15 * SECOND, 5 * SECOND])
    assert relations.after(first, place.stream).ids == ((place.stream, 1),)
    assert relations.after(first, place.stream, complete=True).ids == ((place.stream, 2),)
    assert relations.before(first, place.stream).status is Status.NOT_RECORDED_YET
    assert relations.before(first, place.stream, complete=True).ids == ((place.stream, 3),)
    assert relations.after(second, place.stream).status is Status.NOT_RECORDED_YET
    assert relations.after(second, place.stream, complete=True).status is Status.ABSENT
    assert relations.nearest(first, place.stream).ids == ((place.stream, 1),)
    assert relations.nearest(first, place.stream, complete=True).ids == ((place.stream, 3),)
    assert relations.window(first, place.stream, after_s=60).ids == ((place.stream, 1),)
    found = relations.window(first, place.stream, after_s=60, complete=True)
    assert found.ids == ((place.stream, 2), (place.stream, 1))
    assert relations.window(first, place.stream, before_s=5).status is Status.NOT_RECORDED_YET
    assert relations.window(first, place.stream, before_s=5, complete=True).ids == ((place.stream, 3),)
    by = {"by": "host", "complete": True}
    assert relations.after(first, place.stream, **by).ids == ((place.stream, 2),)  # type: ignore[arg-type]
    place.record()
    assert relations.after(first, place.stream).ids == ((place.stream, 2),)


def test_what_happened_around_a_moment_is_merged_over_streams(
    place: Place, relations: Relations, other_stream: str
) -> None:
    """All recorded streams or some, by time; the nearest where a limit is given; and what is not recorded if asked."""
    publish(place, [10 * SECOND, 20 * SECOND, 30 * SECOND])
    publish(place, [12 * SECOND, 19 * SECOND, 22 * SECOND, 40 * SECOND], other_stream)
    place.record(place.stream, other_stream)
    at = moment_of(20 * SECOND)
    own, other = [(place.stream, n) for n in range(3)], [(other_stream, n) for n in range(4)]
    found = relations.around(at, before_s=8, after_s=10)
    assert found.ids == (other[0], other[1], own[1], other[2], own[2])
    assert (found.status, set(found.streams)) == (Status.FOUND, {place.stream, other_stream})
    assert relations.around(at, before_s=10, after_s=20, limit=3).ids == (other[1], own[1], other[2])
    assert relations.around(at, [other_stream], before_s=60, after_s=60).ids == tuple(other)
    assert relations.around(relations.read(*own[1])).ids == (own[1],)
    none = relations.around(at + timedelta(hours=1), before_s=1)
    assert (none.status, len(none)) == (Status.ABSENT, 0)
    publish(place, [21 * SECOND])
    assert relations.around(at, after_s=1).ids == (own[1],)
    assert relations.around(at, after_s=1, complete=True).ids == (own[1], (place.stream, 3))
    assert relations.around(at, after_s=1, complete=True, limit=1).ids == (own[1],)
    place.record()
    # Recorded messages of a deleted stream are reported as deleted; the others are found.
    delete_stream(place.amqp, other_stream)
    gone = relations.around(at, before_s=1)
    assert (gone.ids, gone.status) == ((own[1],), Status.FOUND)
    assert relations.around(moment_of(40 * SECOND)).status is Status.DELETED
    with pytest.raises(StreamNotFound):
        relations.around(at, [other_stream], before_s=1)


def test_a_super_stream_is_one_order(place: Place, relations: Relations) -> None:
    """Continuing from each message found passes every message of every partition once."""
    times = [[3, 1, 5], [5, 5, 2], [1, 9]]
    with super_stream(place.broker, 3) as layout:
        name, partitions = layout.super_stream, [each.stream for each in layout]
        for partition, each in zip(partitions, times, strict=True):
            publish(place, [time * SECOND for time in each], partition)
        place.record_partitions(layout)
        order = sorted((t, number, o) for number, each in enumerate(times) for o, t in enumerate(each))
        ids = tuple((partitions[number], offset) for _, number, offset in order)
        seen: list[Any] = []
        at: Any = moment_of(0)
        while answer := relations.after(at, name):
            at = answer[0]
            seen.append(at.id)
        assert tuple(seen) == ids
        assert relations.window(moment_of(0), name, after_s=10).ids == ids
        assert relations.nearest(moment_of(5 * SECOND), name).ids == ((partitions[1], 1),)


def test_a_moment_may_be_any_datetime(place: Place, relations: Relations) -> None:
    """A moment without a zone is UTC, the ends of the calendar are moments, and a chunk's time is the default."""
    publish(place, [0, SECOND])
    place.record()
    naive = datetime(1970, 1, 1, 0, 0, 0)
    assert relations.after(naive, place.stream).ids == ((place.stream, 1),)
    assert relations.after(naive.replace(tzinfo=UTC), place.stream, inclusive=True).ids == ((place.stream, 0),)
    for end in (datetime.min, datetime.max):
        assert len(relations.nearest(end, place.stream)) == 1
        assert len(relations.window(end, place.stream, before_s=1e300, after_s=1e300)) == 2
    assert relations.before(datetime.min, place.stream).status is Status.ABSENT
    assert relations.after(datetime.max, place.stream).status is Status.ABSENT
    assert relations.after(naive - timedelta(days=1), place.stream).ids == ((place.stream, 0),)
    place.put_recorded(b"2", b"3")
    assert relations.after(relations.read(place.stream, 2), place.stream).ids == ((place.stream, 3),)


def test_times_switched_off_are_an_error_and_not_an_absence(
    place: Place, relations: Relations, other_stream: str
) -> None:
    """Times switched off are neither recorded nor covered, and are an error until they are back-filled."""
    set_record_time(place.amqp, place.database, other_stream, on=False)
    publish(place, [SECOND, 0], other_stream)
    place.record(other_stream)
    covered = place.status(other_stream).covered
    assert (covered["time"], covered["host"]) == ([], [(0, 2)])
    assert place.sql("SELECT FROM relatum.time_blocks") == []
    publish(place, [SECOND])
    place.record()
    message = relations.read(place.stream, 0)
    for look_up in (relations.after, relations.before, relations.nearest, relations.window):
        with pytest.raises(TimeNotRecorded) as caught:
            look_up(message, other_stream)
        assert caught.value.stream == other_stream
    assert relations.related(message).ids == ((other_stream, 0),)
    set_record_time(place.amqp, place.database, other_stream, on=True)
    start = moment_of(0) - timedelta(seconds=1)
    assert relations.after(start, other_stream).status is Status.NOT_RECORDED_YET
    backfill(place.amqp, place.database, other_stream)
    assert relations.after(start, other_stream).ids == ((other_stream, 1),)
    assert relations.after(moment_of(0), other_stream, by=None).ids == ((other_stream, 0),)
    assert relations.after(relations.read(other_stream, 0), other_stream, by="host").status is Status.ABSENT


@pytest.mark.differs
def test_a_stream_declared_again_is_never_answered_from_by_time(place: Place, relations: Relations) -> None:
    """Blocks that the messages do not confirm, or past the end, raise `StreamReplaced`."""
    publish(place, [n * SECOND for n in range(300)])
    place.record()
    place.declare_again()
    publish(place, [n * SECOND + 7 for n in range(100)])
    for at in (moment_of(5 * SECOND), moment_of(250 * SECOND), moment_of(900 * SECOND)):
        for look_up in (relations.after, relations.before, relations.nearest):
            with pytest.raises(StreamReplaced):
                look_up(at, place.stream)
        with pytest.raises(StreamReplaced):
            relations.window(at, place.stream, before_s=3, after_s=3)
