"""Look-ups by time against real streams and a real database."""

import random
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import pandas as pd
import pytest
import sqlalchemy as sa

from relatum.errors import InvalidInput, StreamNotFound, StreamReplaced, TimeNotRecorded
from relatum.keys import moment as moment_of
from relatum.limits import INTEGER_MAX
from relatum.recording import backfill, set_record_time
from relatum.recording._time_blocks import TimeBlock, time_blocks
from relatum.store import Database
from relatum_consumer import Relations, Status
from relatum_consumer.lookups import _lookup_statements as statements
from relatum_consumer.lookups._lookup_statements import BLOCK_PAGE, WIDTH_CLASSES, WIDTHS_US
from relatum_consumer.lookups._time_search import Block
from tests import support
from tests.support import (
    broker_connection,
    declare_stream,
    delete_stream,
    publish_plain,
    recording,
    unique_name,
    wait_recorded,
)
from tests.support import times as slow

SECOND = 1_000_000


def publish(amqp_url: str, stream: str, times: list[int], hosts: int = 3) -> None:
    """Publish messages of these times, of several hosts in turn."""
    messages = [(b"", {"relatum_time": time, "host": f"h{n % hosts}"}) for n, time in enumerate(times)]
    publish_plain(amqp_url, stream, messages, confirm=False)


record = partial(support.record, keys=["host"])
"""Records all that is in some streams."""


def shapes() -> dict[str, list[int]]:
    """Times in order, in none, in some, with many that are equal, and some far away."""
    chance = random.Random(7)
    count = 500
    return {
        "in order": [n * SECOND // 3 for n in range(count)],
        "in no order": [chance.randrange(200 * SECOND) for _ in range(count)],
        "late by up to three seconds": [n * SECOND // 3 + chance.randrange(3 * SECOND) for n in range(count)],
        "few different ones": [chance.randrange(12) * SECOND for _ in range(count)],
        "some far away": [n * SECOND if n % 50 else chance.randrange(10**14) for n in range(count)],
    }


@pytest.mark.parametrize("shape", shapes())
def test_every_look_up_by_time_is_exact(
    amqp_url: str, engine: sa.Engine, database_url: str, stream_name: str, other_stream: str, shape: str
) -> None:
    """From messages and from datetimes, in both streams, with and without a key, against looking at every message."""
    chance = random.Random(shape)
    times = {stream_name: shapes()[shape], other_stream: shapes()["few different ones"]}
    for stream, each in times.items():
        publish(amqp_url, stream, each)
    record(amqp_url, engine, stream_name, other_stream)
    with Relations(amqp_url, database_url) as relations:
        for _ in range(12):
            message = relations.read(stream_name, chance.randrange(len(times[stream_name])))
            at: Any = message.time if chance.random() < 0.4 else message
            for stream, by in (
                (stream_name, None),
                (other_stream, None),
                (stream_name, "host"),
                (other_stream, "host"),
            ):
                if by and at is not message:
                    continue
                places = [
                    (time, 0, offset)
                    for offset, time in enumerate(times[stream])
                    if by is None or offset % 3 == message.offset % 3
                ]
                is_own = at is message and stream == stream_name
                assert message.time_us is not None
                moment: slow.Moment = (message.time_us, 0 if is_own else None, message.offset if is_own else 0)
                options: dict[str, Any] = {"by": by} if by else {}
                for inclusive in (False, True):
                    found = relations.after(at, stream, inclusive=inclusive, **options)
                    expected = slow.after(places, moment, inclusive=inclusive)
                    assert [m.offset for m in found] == ([] if expected is None else [expected[2]])
                    found = relations.before(at, stream, inclusive=inclusive, **options)
                    expected = slow.before(places, moment, inclusive=inclusive)
                    assert [m.offset for m in found] == ([] if expected is None else [expected[2]])
                expected = slow.nearest(places, moment)
                found = relations.nearest(at, stream, **options)
                assert [m.offset for m in found] == ([] if expected is None else [expected[2]])
                assert found.status is (Status.FOUND if expected else Status.ABSENT)
                found = relations.window(at, stream, before_s=2.5, after_s=1, **options)
                around = slow.window(places, moment, 2 * SECOND + SECOND // 2, SECOND)
                assert [m.offset for m in found] == [place[2] for place in around]


def test_the_statements_find_the_blocks_that_looking_at_every_block_finds(engine: sa.Engine, database_url: str) -> None:
    """At, after, before and between, page by page, for blocks of every width, beyond what is retained."""
    chance = random.Random(3)
    times = [chance.choice([n * 100, chance.randrange(10**5), chance.randrange(10**12), 5000]) for n in range(6000)]
    rows = [block for n in range(0, 6000, 700) for block in _blocks(times[n : n + 700], n)]
    with engine.begin() as connection:
        connection.execute(
            sa.text("INSERT INTO relatum.time_blocks VALUES (:min_us, :max_us, :first_offset, :last_offset, 1, :c)"),
            [block._asdict() | {"c": block.width_class} for block in rows],
        )
    database = Database(database_url, pool_size=1)
    fixed = {"stream_id": 1, "classes": list(WIDTH_CLASSES), "widths": list(WIDTHS_US)}

    def select(sql: str, **given: int) -> list[Block]:
        return sorted(Block(*row) for row in database.rows(sql, fixed | given))

    try:
        for _ in range(150):
            t = chance.choice([chance.randrange(10**5), chance.randrange(10**12), chance.choice(times)])
            floor = chance.choice([0, 0, 3000])
            known = [Block(*row) for row in rows if row.last_offset >= floor]
            at = [block for block in known if block.min_us <= t <= block.max_us]
            after = sorted((b for b in known if b.min_us > t), key=lambda b: (b.min_us, b.first_offset))
            found = select(statements.blocks_beside("after"), t=t, u=t, o=INTEGER_MAX, floor=floor)
            assert found == sorted(at + after[:BLOCK_PAGE])
            if after:
                mark = after[min(9, len(after) - 1)]
                found = select(statements.blocks_beyond("after"), t=t, u=mark.min_us, o=mark.first_offset, floor=floor)
                place = mark.min_us, mark.first_offset
                assert found == sorted([b for b in after if (b.min_us, b.first_offset) > place][:BLOCK_PAGE])
            before = sorted((b for b in known if b.max_us < t), key=lambda b: (-b.max_us, -b.last_offset))
            found = select(statements.blocks_beside("before"), t=t, u=t, o=-INTEGER_MAX, floor=floor)
            beyond = len(found) - len(at)
            assert bool(beyond) == bool(before)
            assert beyond <= BLOCK_PAGE
            assert found == sorted(at + before[:beyond])
            if before:
                mark = before[min(9, len(before) - 1)]
                found = select(statements.blocks_beyond("before"), t=t, u=mark.max_us, o=mark.last_offset, floor=floor)
                place = mark.max_us, mark.last_offset
                rest = [b for b in before if (b.max_us, b.last_offset) < place]
                assert bool(found) == bool(rest)
                assert found == sorted(rest[: len(found)])
            high = t + chance.randrange(10**5)
            between = fixed | {"stream_ids": [7, 1], "low": t, "high": high, "floor": floor}
            found = sorted(Block(*row[1:]) for row in database.rows(statements.blocks_between(), between))
            assert found == sorted(block for block in known if block.min_us <= high and block.max_us >= t)
    finally:
        database.close()


def _blocks(times: list[int], start: int) -> list[TimeBlock]:
    return time_blocks(range(start, start + len(times)), times, None)[0]


@pytest.mark.parametrize("direction", ["backward", "forward", "nearest"])
def test_joining_by_time_gives_what_pandas_gives(
    amqp_url: str, engine: sa.Engine, database_url: str, stream_name: str, other_stream: str, direction: Any
) -> None:
    """`merge_asof` of two streams, equal times allowed."""
    chance = random.Random(direction)
    left = sorted(chance.randrange(60) * SECOND for _ in range(60))
    right = sorted(chance.randrange(0, 60, 3) * SECOND for _ in range(80))
    publish(amqp_url, stream_name, left)
    publish(amqp_url, other_stream, right)
    record(amqp_url, engine, stream_name, other_stream)
    frames = [pd.DataFrame({"time": each, name: range(len(each))}) for name, each in (("l", left), ("r", right))]
    joined = pd.merge_asof(*frames, on="time", direction=direction)
    expected = [None if pd.isna(offset) else int(offset) for offset in joined["r"]]
    with Relations(amqp_url, database_url) as relations:
        messages = [relations.read(stream_name, offset) for offset in range(len(left))]
        look_up: Any = {
            "backward": lambda message: relations.before(message, other_stream, inclusive=True),
            "forward": lambda message: relations.after(message, other_stream, inclusive=True),
            "nearest": lambda message: relations.nearest(message, other_stream),
        }[direction]
        found = [look_up(message).first for message in messages]
    assert [message and message.offset for message in found] == expected


def test_what_is_not_recorded_yet_is_left_out_unless_it_is_asked_for(
    amqp_url: str, engine: sa.Engine, relations: Relations, stream_name: str
) -> None:
    """Exact over what is recorded; with `complete` over all that is there."""
    publish(amqp_url, stream_name, [10 * SECOND, 20 * SECOND])
    record(amqp_url, engine, stream_name)
    first, second = relations.read(stream_name, 0), relations.read(stream_name, 1)
    assert relations.after(second, stream_name).status is Status.ABSENT
    assert relations.before(first, stream_name).status is Status.ABSENT
    publish(amqp_url, stream_name, [15 * SECOND, 5 * SECOND])
    assert relations.after(first, stream_name).ids == ((stream_name, 1),)
    assert relations.after(first, stream_name, complete=True).ids == ((stream_name, 2),)
    assert relations.before(first, stream_name).status is Status.NOT_RECORDED_YET
    assert relations.before(first, stream_name, complete=True).ids == ((stream_name, 3),)
    assert relations.after(second, stream_name).status is Status.NOT_RECORDED_YET
    assert relations.after(second, stream_name, complete=True).status is Status.ABSENT
    assert relations.nearest(first, stream_name).ids == ((stream_name, 1),)
    assert relations.nearest(first, stream_name, complete=True).ids == ((stream_name, 3),)
    assert relations.window(first, stream_name, after_s=60).ids == ((stream_name, 1),)
    assert relations.window(first, stream_name, after_s=60, complete=True).ids == ((stream_name, 2), (stream_name, 1))
    assert relations.window(first, stream_name, before_s=5).status is Status.NOT_RECORDED_YET
    assert relations.window(first, stream_name, before_s=5, complete=True).ids == ((stream_name, 3),)
    by = {"by": "host", "complete": True}
    assert relations.after(first, stream_name, **by).ids == ((stream_name, 2),)  # type: ignore[arg-type]
    publish(amqp_url, stream_name, [])
    record(amqp_url, engine, stream_name)
    assert relations.after(first, stream_name).ids == ((stream_name, 2),)


def test_what_happened_around_a_moment_is_merged_over_streams(
    amqp_url: str, engine: sa.Engine, relations: Relations, stream_name: str, other_stream: str
) -> None:
    """All recorded streams or some, by time; the nearest where a limit is given; and what is not recorded if asked."""
    publish(amqp_url, stream_name, [10 * SECOND, 20 * SECOND, 30 * SECOND])
    publish(amqp_url, other_stream, [12 * SECOND, 19 * SECOND, 22 * SECOND, 40 * SECOND])
    record(amqp_url, engine, stream_name, other_stream)
    at = moment_of(20 * SECOND)
    own, other = [(stream_name, n) for n in range(3)], [(other_stream, n) for n in range(4)]
    found = relations.around(at, before_s=8, after_s=10)
    assert found.ids == (other[0], other[1], own[1], other[2], own[2])
    assert (found.status, set(found.streams)) == (Status.FOUND, {stream_name, other_stream})
    assert relations.around(at, before_s=10, after_s=20, limit=3).ids == (other[1], own[1], other[2])
    assert relations.around(at, [other_stream], before_s=60, after_s=60).ids == tuple(other)
    assert relations.around(relations.read(*own[1])).ids == (own[1],)
    none = relations.around(at + timedelta(hours=1), before_s=1)
    assert (none.status, len(none)) == (Status.ABSENT, 0)
    publish(amqp_url, stream_name, [21 * SECOND])
    assert relations.around(at, after_s=1).ids == (own[1],)
    assert relations.around(at, after_s=1, complete=True).ids == (own[1], (stream_name, 3))
    assert relations.around(at, after_s=1, complete=True, limit=1).ids == (own[1],)
    record(amqp_url, engine, stream_name)
    # What was recorded of a stream that was deleted is said to be so; the others are found.
    delete_stream(amqp_url, other_stream)
    gone = relations.around(at, before_s=1)
    assert (gone.ids, gone.status) == ((own[1],), Status.FOUND)
    assert relations.around(moment_of(40 * SECOND)).status is Status.DELETED
    with pytest.raises(StreamNotFound):
        relations.around(at, [other_stream], before_s=1)
    for wrong in ({"before_s": -1}, {"limit": 0}, {"streams": []}):
        with pytest.raises(InvalidInput):
            relations.around(at, **wrong)  # type: ignore[arg-type]


def test_a_super_stream_is_one_order(amqp_url: str, engine: sa.Engine, relations: Relations) -> None:
    """Going on from each message found passes every message of every partition once."""
    name = unique_name()
    partitions = [f"{name}-{n}" for n in range(3)]
    times = [[3, 1, 5], [5, 5, 2], [1, 9]]
    with broker_connection(amqp_url) as connection:
        channel = connection.channel()
        channel.exchange_declare(name, "direct", durable=True, arguments={"x-super-stream": True})
        try:
            for place, partition in enumerate(partitions):
                declare_stream(amqp_url, partition)
                channel.queue_bind(partition, name, str(place), arguments={"x-stream-partition-order": place})
                publish(amqp_url, partition, [time * SECOND for time in times[place]])
            with recording(amqp_url, engine, name, keys=["host"]):
                for partition in partitions:
                    wait_recorded(amqp_url, engine, partition)
            order = sorted((t, place, o) for place, each in enumerate(times) for o, t in enumerate(each))
            ids = tuple((partitions[place], offset) for _, place, offset in order)
            seen: list[Any] = []
            at: Any = moment_of(0)
            while answer := relations.after(at, name):
                at = answer[0]
                seen.append(at.id)
            assert tuple(seen) == ids
            assert relations.window(moment_of(0), name, after_s=10).ids == ids
            assert relations.nearest(moment_of(5 * SECOND), name).ids == ((partitions[1], 1),)
        finally:
            channel.exchange_delete(name)
            for partition in partitions:
                delete_stream(amqp_url, partition)


def test_a_moment_may_be_any_datetime(amqp_url: str, engine: sa.Engine, relations: Relations, stream_name: str) -> None:
    """One without a zone is UTC; the ends of the calendar are moments too."""
    publish(amqp_url, stream_name, [0, SECOND])
    record(amqp_url, engine, stream_name)
    naive = datetime(1970, 1, 1, 0, 0, 0)
    assert relations.after(naive, stream_name).ids == ((stream_name, 1),)
    assert relations.after(naive.replace(tzinfo=UTC), stream_name, inclusive=True).ids == ((stream_name, 0),)
    for end in (datetime.min, datetime.max):
        assert len(relations.nearest(end, stream_name)) == 1
        assert len(relations.window(end, stream_name, before_s=1e300, after_s=1e300)) == 2
    assert relations.before(datetime.min, stream_name).status is Status.ABSENT
    assert relations.after(datetime.max, stream_name).status is Status.ABSENT
    assert relations.after(naive - timedelta(days=1), stream_name).ids == ((stream_name, 0),)


def test_times_switched_off_are_an_error_and_not_an_absence(
    amqp_url: str, engine: sa.Engine, relations: Relations, stream_name: str, other_stream: str
) -> None:
    """For that stream, whatever is asked by time."""
    set_record_time(amqp_url, engine.url, other_stream, on=False)
    publish(amqp_url, stream_name, [SECOND])
    publish(amqp_url, other_stream, [SECOND])
    record(amqp_url, engine, stream_name, other_stream)
    message = relations.read(stream_name, 0)
    for look_up in (relations.after, relations.before, relations.nearest, relations.window):
        with pytest.raises(TimeNotRecorded) as caught:
            look_up(message, other_stream)
        assert caught.value.stream == other_stream
    assert relations.related(message).ids == ((other_stream, 0),)


def test_times_never_recorded_are_read_when_asked_for(
    amqp_url: str, engine: sa.Engine, relations: Relations, stream_name: str
) -> None:
    """A stream that nobody records is one uncovered range."""
    publish(amqp_url, stream_name, [SECOND, 3 * SECOND])
    assert relations.after(moment_of(0), stream_name).status is Status.NOT_RECORDED_YET
    assert relations.after(moment_of(0), stream_name, complete=True).ids == ((stream_name, 0),)
    with pytest.raises(StreamNotFound):
        relations.after(moment_of(0), unique_name())


@pytest.mark.differs
def test_a_stream_declared_again_is_never_answered_from_by_time(
    amqp_url: str, engine: sa.Engine, relations: Relations, stream_name: str
) -> None:
    """Blocks that the messages do not confirm, and blocks past the end."""
    publish(amqp_url, stream_name, [n * SECOND for n in range(300)])
    record(amqp_url, engine, stream_name)
    delete_stream(amqp_url, stream_name)
    declare_stream(amqp_url, stream_name)
    publish(amqp_url, stream_name, [n * SECOND + 7 for n in range(100)])
    for at in (moment_of(5 * SECOND), moment_of(250 * SECOND), moment_of(900 * SECOND)):
        for look_up in (relations.after, relations.before, relations.nearest):
            with pytest.raises(StreamReplaced):
                look_up(at, stream_name)
        with pytest.raises(StreamReplaced):
            relations.window(at, stream_name, before_s=3, after_s=3)


def test_times_of_chunks_are_found_too(
    amqp_url: str, engine: sa.Engine, database_url: str, stream_url: str, stream_name: str
) -> None:
    """Messages that say no time have their chunk's."""
    publish_plain(amqp_url, stream_name, [b"0", b"1", b"2"])
    record(amqp_url, engine, stream_name)
    with Relations(amqp_url, database_url) as relations:
        first = relations.read(stream_name, 0)
        assert relations.after(first, stream_name).ids == ((stream_name, 1),)


def test_a_back_fill_of_times_makes_them_found(
    amqp_url: str, engine: sa.Engine, database_url: str, relations: Relations, stream_name: str
) -> None:
    """Switched off, then on again, then back-filled."""
    set_record_time(amqp_url, engine.url, stream_name, on=False)
    publish(amqp_url, stream_name, [3 * SECOND, SECOND])
    record(amqp_url, engine, stream_name)
    set_record_time(amqp_url, engine.url, stream_name, on=True)
    assert relations.after(moment_of(0), stream_name).status is Status.NOT_RECORDED_YET
    backfill(amqp_url, database_url, stream_name)
    assert relations.after(moment_of(0), stream_name).ids == ((stream_name, 1),)
    assert relations.after(moment_of(2 * SECOND), stream_name, by=None).ids == ((stream_name, 0),)
    assert relations.after(relations.read(stream_name, 1), stream_name, by="host").status is Status.ABSENT
