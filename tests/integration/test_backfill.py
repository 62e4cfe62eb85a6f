"""Back-fills beside each other and beside recorders, and what they leave of the coverage."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import sqlalchemy as sa

from relatum.common.limits import INTEGER_MAX
from relatum.errors import CoverageConflict, StreamUnavailable
from relatum.reading import StreamReader
from relatum.recording import forget, upkeep
from relatum.recording.backfilling import plan_backfill
from relatum.recording.filler import Filler
from relatum.recording.ranges import Segment, lock_ranges
from relatum.recording.tails import skip_hole
from relatum.store.catalog import add_keys, ensure_stream, lock_stream, streams_named
from relatum.store.coverage import TIME, add_ranges, close_tails, coverage_of, new_tail, tail_of
from tests.contract._node import OneChunk
from tests.support import wait_until
from tests.support.leases import let_lapse, record_as
from tests.support.place import Place
from tests.support.standstill import end_first_scan, somebody_waits


def orders(count: int, start: int = 0) -> list[tuple[bytes, dict[str, Any]]]:
    """Numbered orders on three hosts, of which each tenth has no usable number."""
    return [
        (b"", {"order_id": "x" * 2000 if n % 10 == 5 else f"o{n}", "host": f"h{n % 3}"})
        for n in range(start, start + count)
    ]


def coverage_rows(place: Place) -> list[tuple[Any, ...]]:
    """All ranges: from, to, how many keys, whether it is the tail, kind."""
    query = "SELECT from_offset, to_offset, cardinality(key_ids), is_tail, kind FROM relatum.coverage ORDER BY 1, 2, 4"
    return [tuple(row) for row in place.sql(query)]


def skipped(place: Place) -> int:
    return int(place.sql("SELECT coalesce(sum(count), 0) FROM relatum.skips")[0][0])


@contextmanager
def planned(
    place: Place, keys: list[str] | None = None
) -> Iterator[tuple[Callable[[], Filler], Segment, StreamReader]]:
    """What makes fillers of the stream, all that is to be filled, and the reader."""
    with StreamReader.open(place.amqp) as reader:
        plan = plan_backfill(place.engine, reader, "/", place.stream, keys)
        (segment,) = plan.segments
        yield lambda: Filler(place.engine, reader, plan.stream, plan.definitions), segment, reader


def together(*calls: Callable[[], object]) -> None:
    barrier = threading.Barrier(len(calls))

    def run(call: Callable[[], object]) -> None:
        barrier.wait()
        call()

    with ThreadPoolExecutor(len(calls)) as pool:
        for ended in [pool.submit(run, call) for call in calls]:
            ended.result(120)


def test_slices_filled_in_any_order_by_many_leave_one_range(place: Place) -> None:
    """Eight fillers take twenty slices twice each, while a recorder and a whole back-fill run: each row once."""
    place.put(*orders(1000))
    add_keys(place.engine, ["order_id", "host"])
    with planned(place) as (make_filler, segment, _):
        slices = [Segment(start, start + 50, segment.key_ids) for start in range(0, 1000, 50)]
        order = [slices[(number * 7) % 20] for number in range(40)]

        def fill(worker: int) -> None:
            filler = make_filler()
            for part in order[worker::8]:
                filler.complete(part)

        with place.recording():
            # While no recorder has a lease, the back-fill also records the end of the stream.
            wait_until(lambda: place.status().recorder, what="a lease")
            together(
                *[partial(fill, worker) for worker in range(8)],
                lambda: place.put(*orders(300, start=1000)),
                place.backfill,
            )
            place.wait_recorded()
    assert len(place.rows()) == 1300 + 1300 - 130
    assert skipped(place) == 130
    closed = [row for row in coverage_rows(place) if not row[3]]
    assert closed == [(0, 1000, 2, False, "recorded")]


def test_a_part_that_another_covered_meanwhile_is_not_written_again(place: Place) -> None:
    """Two fillers have read the same messages; the second to commit rolls its rows back and finds nothing left."""
    place.put(*orders(50))
    add_keys(place.engine, ["order_id", "host"])
    with planned(place) as (make_filler, segment, _):
        together(*[partial(make_filler().complete, segment) for _ in range(6)])
    assert len(place.rows()) == 95
    assert skipped(place) == 5


def test_a_part_is_written_once_whatever_the_databases_isolation_level(place: Place) -> None:
    """Two fillers that have read the same messages write them once, also if the database's default level is higher."""
    place.sql(f'ALTER DATABASE "{place.engine.url.database}" SET default_transaction_isolation = "repeatable read"')
    place.engine.dispose()
    place.put(*orders(5))
    add_keys(place.engine, ["order_id"])
    waiting = "SELECT FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
    with planned(place) as (make_filler, segment, _), ThreadPoolExecutor(2) as pool:
        with place.engine.begin() as holder:
            holder.execute(sa.text("SELECT FROM relatum.streams FOR UPDATE"))
            fills = [pool.submit(make_filler().complete, segment) for _ in range(2)]
            wait_until(lambda: len(place.sql(waiting)) == 2, what="both have written rows, and wait to cover them")
        assert sorted(fill.result(60) for fill in fills) == [False, True]
    assert len(place.rows()) == 5


def test_new_streams_back_filled_at_once_get_one_tail(place: Place) -> None:
    """Back-fills that all find a stream nobody recorded agree on its tail, and on which one writes which key."""
    place.put(*orders(20))
    add_keys(place.engine, ["order_id", "host"])
    keys = [["order_id"], None, ["host", "order_id"]]
    together(*[partial(place.backfill, keys=keys[number % 3]) for number in range(6)])
    assert sum(row[3] for row in coverage_rows(place)) == 1
    assert len(place.rows()) == 18 + 20


def test_a_back_fill_and_a_recorder_that_opens_the_tail_do_not_deadlock(place: Place) -> None:
    """A back-fill that waits for a recorder's new tail does not keep the recorder from adding it."""
    place.put(*orders(3))
    add_keys(place.engine, ["order_id"])
    place.backfill()
    place.put(*orders(2))
    with ThreadPoolExecutor(1) as pool:
        with place.engine.begin() as recorder:
            tail = tail_of(recorder, streams_named(recorder, "/", [place.stream])[0].stream_id)
            assert tail is not None
            close_tails(recorder, [tail])
            filling = pool.submit(place.backfill)
            somebody_waits(place.database)
            add_ranges(recorder, [tail._replace(from_offset=tail.to_offset)])
        filling.result(60)


def test_a_repair_and_a_recorder_at_a_hole_do_not_deadlock(place: Place) -> None:
    """A recorder that skips a hole locks the stream before its tail, as repairs do."""
    place.put_recorded(*orders(3), keys=["order_id"])
    with ThreadPoolExecutor(1) as pool:
        with place.engine.begin() as repair:
            (stream,) = streams_named(repair, "/", [place.stream])
            lock_stream(repair, stream.stream_id, key_share=True)
            skipping = pool.submit(skip_hole, place.engine, stream, 10)
            somebody_waits(place.database)
            lock_ranges(repair, stream.stream_id, (0, INTEGER_MAX))
        assert skipping.result(60) == 7
    # There is no such hole.
    forget(place.database, [place.stream])


def test_retention_that_overtakes_a_back_fill_is_recorded_as_a_hole(fleeting: Place) -> None:
    """What was planned and is gone when it is read is not recorded, and said so; the rest is."""
    fleeting.put(*orders(10))
    add_keys(fleeting.engine, ["order_id"])
    with planned(fleeting) as (make_filler, segment, reader):
        fleeting.put(*[(b"x" * 10_000, {"order_id": f"big{n}"}) for n in range(100)])
        wait_until(lambda: (reader.bounds(fleeting.stream).first or 0) > 10, what="retention past the plan")
        make_filler().complete(segment)
    assert [row for row in coverage_rows(fleeting) if not row[3]] == [(0, 10, 0, False, "hole")]
    assert [event.kind for event in fleeting.status().events] == ["hole"]
    fleeting.record()
    fleeting.backfill()
    assert fleeting.verify().ok


def test_a_scan_that_a_lagging_node_ends_early_covers_nothing_unread(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The leader is away while a filler scans, and back when the filler compares the stream's end."""
    place.put(*orders(10))
    add_keys(place.engine, ["host"])
    end_first_scan(monkeypatch)
    assert place.backfill().rows == len(place.rows()) == 10


def test_only_the_leader_is_read_for_a_back_fill(engine: sa.Engine) -> None:
    """Another node may have dropped messages that the leader has: while it is unreachable, nothing is covered."""
    with engine.begin() as connection:
        stream = ensure_stream(connection, "/", "orders")
        add_ranges(connection, [new_tail(stream.stream_id, 101, (), with_time=True)])
    with (
        OneChunk(100, 1, leader_port=1) as node,
        StreamReader.open(f"rabbitmq-stream://u:p@127.0.0.1:{node.port}", timeout_s=2) as reader,
        pytest.raises(StreamUnavailable),
    ):
        Filler(engine, reader, stream, ()).complete(Segment(0, 101, frozenset({TIME})))
    with engine.connect() as connection:
        assert [row.kind for row in coverage_of(connection, [stream.stream_id]) if not row.is_tail] == []


@pytest.mark.differs
def test_a_stream_that_was_replaced_between_plan_and_fill_is_refused(place: Place) -> None:
    """The rows of one stream are never written in the name of another."""
    place.put(*orders(10))
    add_keys(place.engine, ["order_id"])
    place.backfill()
    add_keys(place.engine, ["host"])
    with planned(place, ["host"]) as (make_filler, segment, _):
        place.declare_again()
        place.put(*orders(10, start=100))
        with pytest.raises(CoverageConflict):
            make_filler().complete(segment)
    assert {key for key, _, _ in place.rows()} == {"order_id"}


@pytest.mark.differs
def test_a_stream_that_is_replaced_during_a_fill_is_refused(place: Place) -> None:
    """What another scan reads of another stream is not covered in the name of the recorded one."""
    place.put(*orders(10))
    add_keys(place.engine, ["order_id"])
    place.backfill()
    add_keys(place.engine, ["host"])

    def replace(*_: int) -> None:
        place.declare_again()
        place.put(*orders(10, start=100))

    with StreamReader.open(place.amqp) as reader:
        plan = plan_backfill(place.engine, reader, "/", place.stream, ["host"])
        (segment,) = plan.segments
        make_filler = partial(Filler, place.engine, reader, plan.stream, plan.definitions)
        make_filler().complete(Segment(5, 6, segment.key_ids))
        with pytest.raises(CoverageConflict):
            make_filler(on_commit=replace).complete(segment)
    assert [offset for key, _, offset in place.rows() if key == "host"] == list(range(6))


def test_a_stream_that_was_replaced_before_it_was_filled_is_recorded(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stream declared again is recorded from its start, though a back-fill that wrote nothing planned to its end."""
    monkeypatch.setattr(upkeep, "ENDS_S", 0.2)
    add_keys(place.engine, ["order_id"])
    place.put(*orders(5))
    with planned(place):
        place.declare_again()
    place.put(*orders(2))
    with place.recording():
        wait_until(lambda: len(place.rows()) == 2, what="the stream's rows")


@pytest.mark.differs
def test_offsets_whose_rows_were_pruned_are_not_filled_again(place: Place) -> None:
    """Pruned rows that are left in closed parts are not doubled where a new leader retains older messages."""
    place.put_recorded(*orders(4), keys=["order_id"])
    place.sql("UPDATE relatum.streams SET retained_from = 2")
    place.sql("UPDATE relatum.coverage SET from_offset = 2")
    assert place.backfill().messages == 0
    assert len(place.rows()) == 4


def test_a_repeated_back_fill_reaches_the_streams_end(place: Place) -> None:
    """Each run records what was published since, by the super stream's name, too; a recorder continues behind it."""
    add_keys(place.engine, ["order_id"])
    assert place.backfill(super_stream="all orders").messages == 0
    with place.engine.connect() as connection:
        assert [row.name for row in streams_named(connection, "/", ["all orders"])] == [place.stream]
    for start in (0, 10, 20):
        place.put(*[(b"", {"order_id": f"o{n}"}) for n in range(start, start + 10)])
        assert place.backfill().messages == 10
    place.put_recorded((b"", {"order_id": "o30"}))
    assert place.rows() == [("order_id", f"o{n}", n) for n in range(31)]
    assert [row[:2] for row in coverage_rows(place)] == [(0, 30), (30, 31)]


def test_a_back_fill_leaves_the_end_to_a_recorder_that_runs(place: Place) -> None:
    """While somebody holds the stream's lease, its tail stays where it is; so it does where only one key is asked."""
    add_keys(place.engine, ["order_id"])
    with place.recording():
        wait_until(lambda: bool(coverage_rows(place)), what="the recorder opens the stream")
    before = coverage_rows(place)
    place.put((b"", {"order_id": "o"}))
    assert place.backfill(keys=["order_id"]).messages == 0
    record_as(place.engine, "x")
    assert place.backfill().messages == 0
    assert coverage_rows(place) == before
    let_lapse(place.engine)
    assert place.backfill().messages == 1
