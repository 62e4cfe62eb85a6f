"""Forgetting streams: everything derived goes, in bounded transactions; what somebody keeps for good stops it."""

import pytest
import sqlalchemy as sa

import relatum
from relatum.errors import CoverageConflict, NothingRecorded, StreamInUse, StreamNotFound
from relatum.membership import GROUP_KEY
from relatum.recording import ForgottenStream, forget, prune, status
from relatum.store import Position, TailMove, add_keys, advance_all, current_stream, lock_stream, metadata, receipts
from relatum.superstreams import declare_super_stream, delete_super_stream
from relatum_consumer import GroupConsumer, Relations
from tests.support import publish_plain, record, recording, unique_name, wait_recorded
from tests.support._recording import add_checkpoints, open_streams
from tests.support.groups import whole_group
from tests.support.place import Place


def rows_by_table(engine: sa.Engine) -> dict[str, int]:
    """How many rows the tables have that name streams by their id; those without any left out."""
    counts = {}
    with engine.connect() as connection:
        for table in metadata.sorted_tables:
            if "stream_id" in table.c:
                counts[table.name] = connection.execute(sa.select(sa.func.count()).select_from(table)).scalar_one()
    return {name: count for name, count in counts.items() if count}


def fill(amqp_url: str, engine: sa.Engine, stream: str, count: int = 60) -> None:
    """Record a stream, with a row in each table that is derived from streams."""
    publish_plain(amqp_url, stream, [(b"", {"order_id": f"o{n}", "relatum_receipt": f"r{n}"}) for n in range(count)])
    publish_plain(amqp_url, stream, [(b"", {"order_id": "x" * 1025}), *whole_group(1, 3)])
    record(amqp_url, engine, stream, keys=["order_id", GROUP_KEY])
    with engine.begin() as connection:
        row = current_stream(connection, "/", stream)
        assert row is not None
        for statement in (
            "INSERT INTO relatum.events (stream_id, kind) VALUES (:id, 'hole')",
            "INSERT INTO relatum.receipts (message_id, stream_id, stream_offset) VALUES ('r', :id, 1)",
            "INSERT INTO relatum.checkpoints (stream_id, last_offset, fingerprint) VALUES (:id, 0, 0)",
        ):
            connection.execute(sa.text(statement), {"id": row.stream_id})


@pytest.mark.differs
def test_everything_derived_is_deleted_and_other_streams_are_left_alone(place: Place, other_stream: str) -> None:
    """No table that names streams by their id has a row of it, and look-ups do not know it; it can be recorded anew."""
    fill(place.amqp, place.engine, other_stream)
    others = rows_by_table(place.engine)
    fill(place.amqp, place.engine, place.stream)
    with Relations(place.amqp, place.database) as relations:
        with relations.groups(consumer="billing") as groups:
            for group in groups:
                group.acknowledge()
        filled = rows_by_table(place.engine)
        assert filled.keys() >= others.keys() | {"events", "receipts", "checkpoints", "skips", "group_scans"}
        told: list[int] = []
        (dry,) = forget(place.database, [place.stream], dry_run=True)
        assert rows_by_table(place.engine) == filled
        (done,) = forget(place.database, [place.stream], batch_rows=7, progress=lambda each: told.append(each.total))
        steps = [after - before for before, after in zip([0, *told], told, strict=False)]
        assert max(steps) <= 7
        assert (done.stream, done.rows["relationships"]) == (place.stream, 63)
        assert {name: count for name, count in dry.rows.items() if count} == {
            name: count for name, count in done.rows.items() if count and name != "group_states"
        }
        left = rows_by_table(place.engine)
        assert {name: left[name] for name in others} == others
        assert [each.stream for each in status(place.amqp, place.database)] == [other_stream]
        assert [each.stream for each in relations.find("order_id", "o1").ids] == [other_stream]
        with pytest.raises(StreamNotFound, match=place.stream):
            forget(place.database, [place.stream])
        forget(place.database, [other_stream])
        assert rows_by_table(place.engine) == {}
        with pytest.raises(NothingRecorded):
            relations.find("order_id", "o1")
    place.record()
    assert len(place.rows()) == 63


class Killed(BaseException):
    """Ends a `forget` where it stands."""


@pytest.mark.parametrize("is_pruned", [False, True], ids=["repeated", "pruned"])
@pytest.mark.parametrize("steps", [1, 12])
@pytest.mark.differs
def test_what_a_kill_left_is_deleted_by_the_next_one(place: Place, steps: int, is_pruned: bool) -> None:
    """From the first transaction on nobody answers from the stream; a repetition, or `prune`, deletes the rest."""
    fill(place.amqp, place.engine, place.stream)
    left = steps

    def kill(_: ForgottenStream) -> None:
        nonlocal left
        left -= 1
        if not left:
            raise Killed

    with pytest.raises(Killed):
        forget(place.database, [place.stream], batch_rows=7, progress=kill)
    assert status(place.amqp, place.database) == []
    assert rows_by_table(place.engine)
    if is_pruned:
        prune(place.amqp, place.database)
    else:
        forget(place.database, [place.stream])
    assert rows_by_table(place.engine) == {}


@pytest.mark.differs
def test_it_is_not_forgotten_while_a_recorder_works(place: Place) -> None:
    """The recorder is named, nothing is deleted, and a dry run counts all the same; once it has stopped, it is."""
    place.put((b"", {"order_id": 1}))
    with place.recording(keys=["order_id"]):
        place.wait_recorded()
        (seen,) = status(place.amqp, place.database)
        assert seen.recorder
        with pytest.raises(StreamInUse, match=seen.recorder) as caught:
            forget(place.database, [place.stream])
        assert caught.value.stream == place.stream
        (dry,) = forget(place.database, [place.stream], dry_run=True)
        assert (dry.rows["relationships"], dry.needed) == (1, caught.value.reason)
        assert len(place.rows()) == 1
    (dry,) = forget(place.database, [place.stream], dry_run=True)
    assert dry.needed is None
    forget(place.database, [place.stream])
    assert rows_by_table(place.engine) == {}


@pytest.mark.differs
def test_who_was_about_to_write_is_refused(place: Place) -> None:
    """A recorder without its lease, and a back-fill, write nothing more of a stream that was forgotten meanwhile."""
    place.put((b"", {"order_id": 1}))
    add_keys(place.engine, ["order_id"])
    place.backfill()
    with place.engine.begin() as connection:
        row = current_stream(connection, "/", place.stream)
    assert row is not None
    (opened,) = open_streams(place.engine, [row])
    tail = opened.tail
    forget(place.database, [place.stream])
    with place.engine.connect() as connection:
        with pytest.raises(CoverageConflict):
            lock_stream(connection, row.stream_id)
        assert advance_all(connection, [TailMove(tail, tail.to_offset + 1, Position(tail.to_offset, 0, None))]) == (
            set(),
            set(),
        )


@pytest.mark.differs
def test_what_a_recorder_commits_in_its_midst_is_deleted(place: Place) -> None:
    """A recorder that stood still for longer than its lease, and goes on before the coverage goes, leaves nothing."""
    fill(place.amqp, place.engine, place.stream)
    with place.engine.begin() as connection:
        row = current_stream(connection, "/", place.stream)
    assert row is not None
    (opened,) = open_streams(place.engine, [row])
    tail = opened.tail

    def go_on(done: ForgottenStream) -> None:
        if done.rows["events"] and not done.rows["coverage"]:
            with place.engine.begin() as connection:
                move = TailMove(tail, tail.to_offset + 1, Position(tail.to_offset, 0, None))
                if advance_all(connection, [move])[0]:
                    add_checkpoints(connection, [move])
                    receipt = {"message_id": "late", "stream_id": tail.stream_id, "stream_offset": tail.to_offset}
                    connection.execute(sa.insert(receipts), [receipt])
                    gone_on.append(1)

    gone_on: list[int] = []
    forget(place.database, [place.stream], progress=go_on)
    assert gone_on
    assert rows_by_table(place.engine) == {}


@pytest.mark.differs
def test_primary_data_that_refers_to_it_stops_it(place: Place) -> None:
    """Collectors, consumers of groups and partitions with contexts are named, and nothing is deleted."""
    fill(place.amqp, place.engine, place.stream)

    def refused(match: str) -> None:
        with pytest.raises(StreamInUse, match=match):
            forget(place.database, [place.stream])
        assert len(place.rows()) == 63

    with Relations(place.amqp, place.database) as relations:
        with relations.groups(place.stream, consumer="by-name") as groups:
            next(iter(groups)).acknowledge()
            refused("by-name")
        refused("by-name")
        with place.engine.begin() as connection:
            connection.execute(sa.text("DELETE FROM relatum.group_consumers"))
        with relations.groups(consumer=GroupConsumer("all")) as groups:
            group = next(iter(groups))
            refused("'all' has not finished")
            group.acknowledge()
    with place.engine.begin() as connection:
        collector = connection.execute(
            sa.text("INSERT INTO relatum.collectors (name) VALUES ('mail') RETURNING collector_id")
        ).scalar_one()
        of_collector = {"collector": collector, "stream": place.stream}
        source = connection.execute(
            sa.text(
                "INSERT INTO relatum.collector_sources (collector_id, stream) VALUES (:collector, :stream)"
                " RETURNING source_id"
            ),
            of_collector,
        ).scalar_one()
        connection.execute(
            sa.text(
                "INSERT INTO relatum.collected_messages (source_id, stream_offset, size, message_id, type)"
                " VALUES (:source, 0, 0, 'm', 't')"
            ),
            {"source": source},
        )
    refused("collector 'mail'")
    with place.engine.begin() as connection:
        connection.execute(sa.text("UPDATE relatum.collected_messages SET state = 'succeeded', finished_at = now()"))
    forget(place.database, [place.stream])
    assert rows_by_table(place.engine) == {}


@pytest.mark.differs
def test_a_super_stream_stands_for_its_partitions(amqp_url: str, engine: sa.Engine, database_url: str) -> None:
    """They are forgotten together, or none of them: while contexts are placed in one, nothing is deleted."""
    name = unique_name("forgotten")
    declare_super_stream(amqp_url, name, 2)
    try:
        for partition in (f"{name}-0", f"{name}-1"):
            publish_plain(amqp_url, partition, [(b"", {"order_id": 1})])
        with recording(amqp_url, engine, name, keys=["order_id"]):
            for partition in (f"{name}-0", f"{name}-1"):
                wait_recorded(amqp_url, engine, partition)
        with relatum.ContextRouter(name, database_url) as router:
            router.open(amqp_url)
            with pytest.raises(StreamInUse, match=f"{name!r} are placed"):
                forget(engine.url, [name])
        assert len(status(amqp_url, engine.url)) == 2
        with engine.begin() as connection:
            connection.execute(sa.text("DELETE FROM relatum.super_streams"))
        assert [each.stream for each in forget(engine.url, [name])] == [f"{name}-0", f"{name}-1"]
        assert rows_by_table(engine) == {}
    finally:
        delete_super_stream(amqp_url, name)
