"""Forgetting and pruning streams: what is derived goes, in bounded transactions; what somebody keeps stops it."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest
import sqlalchemy as sa

import relatum
from relatum.errors import CoverageConflict, DataError, NothingRecorded, StreamInUse, StreamNotFound
from relatum.local import LocalRabbitMQ
from relatum.membership import GROUP_KEY
from relatum.reading import Position
from relatum.recording import backfill, forget, prune, pruning, set_record_time, status, tails
from relatum.store.catalog import add_keys, current_stream, lock_stream, streams_named
from relatum.store.coverage import CoverageRow, advance_all
from relatum.store.database import Database
from relatum.superstreams import Layout
from relatum_consumer import GroupConsumer, Relations
from tests.support import declare_stream, publish_plain, wait_until
from tests.support._recording import open_streams
from tests.support.groups import whole_group
from tests.support.parts import Parts
from tests.support.place import Place
from tests.support.standstill import somebody_waits

KEYS = ["order_id", GROUP_KEY]

pytestmark = pytest.mark.differs

COLLECTED = """
WITH collector AS (INSERT INTO relatum.collectors (name) VALUES ('mail') RETURNING collector_id),
  source AS (
    INSERT INTO relatum.collector_sources (collector_id, stream) SELECT collector_id, :stream FROM collector
    RETURNING source_id
  )
INSERT INTO relatum.collected_messages (source_id, stream_offset, size, message_id, type)
  SELECT source_id, 0, 0, 'm', 't' FROM source
"""


def rows_by_table(place: Place) -> dict[str, int]:
    """How many rows the tables have that name streams by their id; those without any left out."""
    named = (
        "SELECT table_name FROM information_schema.columns JOIN pg_class ON oid = ('relatum.' || table_name)::regclass "
        "WHERE table_schema = 'relatum' AND column_name = 'stream_id' AND relkind IN ('r', 'p') AND NOT relispartition"
    )
    names = [name for (name,) in place.sql(named)]
    counts = {name: place.sql(f"SELECT count(*) FROM relatum.{name}")[0][0] for name in names}
    return {name: count for name, count in counts.items() if count}


def fill(place: Place) -> None:
    """Record a stream, with a row in each table that is derived from streams."""
    place.put(*[(b"", {"order_id": f"o{n}", "relatum_receipt": f"r{n}"}) for n in range(60)])
    place.put_recorded((b"", {"order_id": "x" * 1025}), *whole_group(1, 3))
    for statement in (
        "relatum.events (stream_id, kind) SELECT stream_id, 'hole'",
        "relatum.receipts (message_id, stream_id, stream_offset) SELECT 'r', stream_id, 1",
        "relatum.checkpoints (stream_id, last_offset, fingerprint) SELECT stream_id, 0, 0",
    ):
        place.sql(f"INSERT INTO {statement} FROM relatum.streams WHERE name = :name", name=place.stream)


def test_everything_derived_is_deleted_and_other_streams_are_left_alone(
    place: Place, other_stream: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A forgotten stream has no row in any table, lookups do not know it, and it can be recorded again."""
    fill(replace(place, stream=other_stream))
    others = rows_by_table(place)
    fill(place)
    with Relations(place.amqp, place.database) as relations:
        with relations.groups(consumer="billing") as groups:
            for group in groups:
                group.acknowledge()
        filled = rows_by_table(place)
        assert filled.keys() >= others.keys() | {"events", "receipts", "checkpoints", "skips", "group_scans"}
        (dry,) = forget(place.database, [place.stream], dry_run=True)
        assert rows_by_table(place) == filled
        told: list[int] = []
        after_each_batch(monkeypatch, lambda _, rows: told.append(rows))
        (done,) = forget(place.database, [place.stream], batch_rows=7)
        assert max(told) <= 7
        assert (done.stream, done.rows["relationships"]) == (place.stream, 63)
        assert {name: count for name, count in dry.rows.items() if count} == {
            name: count for name, count in done.rows.items() if count and name != "group_states"
        }
        assert rows_by_table(place).items() >= others.items()
        assert [each.stream for each in status(place.amqp, place.database)] == [other_stream]
        assert [each.stream for each in relations.find("order_id", "o1").ids] == [other_stream]
        with pytest.raises(StreamNotFound, match=place.stream):
            forget(place.database, [place.stream])
        forget(place.database, [other_stream])
        assert rows_by_table(place) == {}
        with pytest.raises(NothingRecorded):
            relations.find("order_id", "o1")
    place.record()
    assert len(place.rows()) == 63


def opened(place: Place) -> tuple[CoverageRow, Position]:
    """Open the stream as a recorder; gives what it would commit."""
    with place.engine.begin() as connection:
        row = current_stream(connection, "/", place.stream)
    assert row is not None
    (stream,) = open_streams(place.engine, [row])
    return stream.tail, Position(stream.tail.to_offset, 0, None)


def after_each_batch(monkeypatch: pytest.MonkeyPatch, then: Callable[[str, int], None]) -> None:
    """Call a function after each transaction that deleted rows of a table."""
    original = pruning.delete_batch

    def delete(engine: sa.Engine, table: str, *given: Any, **values: Any) -> int:
        if deleted := original(engine, table, *given, **values):
            then(table, deleted)
        return deleted

    monkeypatch.setattr(pruning, "delete_batch", delete)


class Killed(BaseException):
    """The process that forgets is killed."""


@pytest.mark.parametrize("is_pruned", [False, True], ids=["repeated", "pruned"])
@pytest.mark.parametrize("steps", [1, 12])
def test_what_a_kill_left_is_deleted_by_the_next_one(
    place: Place, steps: int, is_pruned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lookups ignore a stream from the first transaction of `forget` on; a repetition or `prune` deletes the rest."""
    fill(place)
    left = iter(range(steps - 1))

    def kill(_table: str, _rows: int) -> None:
        if next(left, None) is None:
            raise Killed

    with monkeypatch.context() as killing:
        after_each_batch(killing, kill)
        with pytest.raises(Killed):
            forget(place.database, [place.stream], batch_rows=7)
    assert status(place.amqp, place.database) == []
    assert rows_by_table(place)
    if is_pruned:
        prune(place.amqp, place.database)
    else:
        forget(place.database, [place.stream])
    assert rows_by_table(place) == {}


def test_it_is_not_forgotten_while_a_recorder_works(place: Place) -> None:
    """`forget` names a recorder that works, and deletes nothing until it has stopped; a dry run counts the rows."""
    place.put((b"", {"order_id": 1}))
    with place.recording():
        place.wait_recorded()
        recorder = place.status().recorder
        assert recorder
        with pytest.raises(StreamInUse, match=recorder) as caught:
            forget(place.database, [place.stream])
        assert caught.value.stream == place.stream
        (dry,) = forget(place.database, [place.stream], dry_run=True)
        assert (dry.rows["relationships"], dry.needed) == (1, caught.value.reason)
        assert len(place.rows()) == 1
    (dry,) = forget(place.database, [place.stream], dry_run=True)
    assert dry.needed is None
    forget(place.database, [place.stream])
    assert rows_by_table(place) == {}


def test_who_was_about_to_write_is_refused(place: Place) -> None:
    """Neither a recorder without its lease nor a back-fill writes to a stream that was forgotten."""
    place.put((b"", {"order_id": 1}))
    add_keys(place.engine, ["order_id"])
    place.backfill()
    move = tail, _ = opened(place)
    forget(place.database, [place.stream])
    with place.engine.connect() as connection:
        with pytest.raises(CoverageConflict):
            lock_stream(connection, tail.stream_id)
        assert advance_all(connection, [move]) == (set(), set())


def test_a_recorder_commits_nothing_in_its_midst(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """A recorder without its lease commits nothing once the rows of its stream are being deleted."""
    fill(place)
    move = opened(place)
    committed: list[set[int]] = []

    def go_on(_table: str, _rows: int) -> None:
        with place.engine.begin() as connection:
            committed.append(advance_all(connection, [move])[0])

    after_each_batch(monkeypatch, go_on)
    forget(place.database, [place.stream])
    assert committed
    assert not any(committed)
    assert rows_by_table(place) == {}


def test_what_a_recorder_is_committing_is_deleted(place: Place) -> None:
    """`forget` waits for the commit of a recorder without its lease, and deletes that range, too."""
    fill(place)
    move = opened(place)
    with ThreadPoolExecutor(1) as pool:
        with place.engine.begin() as connection:
            assert advance_all(connection, [move])[0]
            forgetting = pool.submit(forget, place.database, [place.stream])
            somebody_waits(place.database)
        forgetting.result(60)
    assert rows_by_table(place) == {}


def test_what_is_being_forgotten_is_not_opened(place: Place) -> None:
    """A recorder that opens a missing stream waits for its `forget`, and then leaves it as forgotten."""
    fill(place)
    with place.engine.begin() as connection:
        rows = streams_named(connection, "/", [place.stream])
    place.sql("UPDATE relatum.streams SET state = 'missing'")
    with ThreadPoolExecutor(1) as pool:
        with place.engine.begin() as connection:
            forgotten = "UPDATE relatum.streams SET state = 'forgotten', replaced_at = now()"
            connection.execute(sa.text(forgotten))
            opening = pool.submit(tails.open_streams, place.engine, rows)
            somebody_waits(place.database)
        assert opening.result(60) == []
    forget(place.database, [place.stream])
    assert rows_by_table(place) == {}


def test_primary_data_that_refers_to_it_stops_it(place: Place) -> None:
    """`forget` names collectors and consumers of groups that use the stream, and deletes nothing."""
    fill(place)

    def refused(match: str) -> None:
        with pytest.raises(StreamInUse, match=match):
            forget(place.database, [place.stream])
        assert len(place.rows()) == 63

    with Relations(place.amqp, place.database) as relations:
        with relations.groups(place.stream, consumer="by-name") as groups:
            next(iter(groups)).acknowledge()
            refused("by-name")
        refused("by-name")
        place.sql("DELETE FROM relatum.group_consumers")
        with relations.groups(consumer=GroupConsumer("all")) as groups:
            group = next(iter(groups))
            refused("'all' has unfinished groups")
            group.acknowledge()
    place.sql(COLLECTED, stream=place.stream)
    refused("collector 'mail'")
    place.sql("UPDATE relatum.collected_messages SET state = 'succeeded', finished_at = now()")
    forget(place.database, [place.stream])
    assert rows_by_table(place) == {}


def test_a_super_stream_stands_for_its_partitions(place: Place, layout: Layout) -> None:
    """All partitions are forgotten together, and none while contexts are placed in one."""
    name, partitions = layout.super_stream, [each.stream for each in layout.partitions]
    for partition in partitions:
        place.put((b"", {"order_id": 1}), to=partition)
    place.record_partitions(layout)
    with relatum.ContextRouter(name, place.database) as router:
        router.open(place.amqp)
        with pytest.raises(StreamInUse, match=f"{name!r} are placed"):
            forget(place.database, [name])
    assert len(status(place.amqp, place.database)) == len(partitions)
    place.sql("DELETE FROM relatum.super_streams")
    assert [each.stream for each in forget(place.database, [name])] == partitions
    assert rows_by_table(place) == {}


# As if retention had dropped all messages: the streams begin at 0.
DROP = "UPDATE relatum.relationships SET stream_offset = -1"


def test_a_stream_that_cannot_be_read_stops_no_other(own_broker: LocalRabbitMQ, engine: sa.Engine) -> None:
    """`prune` works on behind a stream that it cannot read, and reports the error of that stream."""
    url, streams = own_broker.broker_url, ("a-broken", "b-sound")
    add_keys(engine, ["order_id"])
    for stream in streams:
        declare_stream(url, stream)
        publish_plain(url, stream, [(b"the body of the first", {"order_id": 1})])
        backfill(url, engine.url, stream)
    Parts(engine).sql(DROP)
    # A changed byte of the first chunk on disk makes its checksum wrong.
    (segment,) = own_broker.data.rglob(f"*{streams[0]}*/*.segment")
    segment.write_bytes(segment.read_bytes().replace(b"the body of the first", b"the bodY of the first"))
    report = prune(url, engine.url, streams)
    assert report.rows == {streams[1]: 1}
    assert list(report.failed) == [streams[0]]
    assert isinstance(report.failed[streams[0]], DataError)


def test_a_name_that_is_not_recorded_is_refused_before_anything_is_deleted(place: Place) -> None:
    """`prune` refuses an unknown name, and deletes nothing of the streams named beside it."""
    add_keys(place.engine, ["order_id"])
    place.put((b"", {"order_id": 1}))
    place.backfill()
    place.sql(DROP)
    with pytest.raises(StreamNotFound, match="nope"):
        prune(place.amqp, place.database, [place.stream, "nope"])
    assert place.sql("SELECT count(*) FROM relatum.relationships") == [(1,)]


def test_prune_keeps_the_events_that_a_status_shows(place: Place) -> None:
    """A recorder that keeps falling behind retention adds events for ever; only the newest are shown."""
    place.put_recorded((b"", {"order_id": "a"}))
    place.sql(
        "INSERT INTO relatum.events (stream_id, kind, from_offset) SELECT stream_id, 'hole', n "
        "FROM relatum.streams, generate_series(0, 24) n"
    )
    shown = place.status().events
    assert prune(place.amqp, place.database).rows == {place.stream: 5}
    assert place.status().events == shown
    assert place.sql("SELECT min(from_offset), count(*) FROM relatum.events") == [(5, 20)]


@pytest.fixture
def dropped_front(fleeting: Place) -> Place:
    """A stream that is known, of which nothing is recorded and whose first messages retention has dropped."""
    add_keys(fleeting.engine, ["order_id"])
    fleeting.put(*[(b"x" * 10_000, {"order_id": 1})] * 60)
    wait_until(lambda: (fleeting.bounds().first or 0) > 3, what="retention")
    set_record_time(fleeting.amqp, fleeting.database, fleeting.stream, on=True)
    return fleeting


def declare_anew(place: Place) -> None:
    """The stream deleted, declared again, and recorded: three messages."""
    place.declare_again()
    place.put_recorded(*[(b"", {"order_id": number}) for number in range(3)])


def test_a_stream_that_is_declared_anew_in_its_midst_keeps_its_rows(dropped_front: Place) -> None:
    """`prune` deletes no rows of a stream that was declared again after the broker was asked."""
    done: list[str] = []

    def declare(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        if statement.startswith("DELETE FROM relatum.relationships") and not done:
            done.append(statement)
            declare_anew(dropped_front)

    with closing(Database(dropped_front.database)) as pruning:
        sa.event.listen(pruning.engine, "before_cursor_execute", declare)
        prune(dropped_front.amqp, pruning)
    assert done
    assert [offset for _, _, offset in dropped_front.rows()] == [0, 1, 2]


def test_a_part_of_a_stream_that_was_declared_anew_is_not_dropped(dropped_front: Place) -> None:
    """`prune` drops no part that holds rows of a stream that was declared again."""
    prune(dropped_front.amqp, dropped_front.database)
    parts = Parts(dropped_front.engine)
    parts.turn()
    declare_anew(dropped_front)
    parts.turn()
    parts.close()
    prune(dropped_front.amqp, dropped_front.database)
    assert [offset for _, _, offset in dropped_front.rows()] == [0, 1, 2]
