"""Back-fills beside each other and beside recorders, and what they leave of the coverage."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import sqlalchemy as sa

from relatum.errors import CoverageConflict
from relatum.reading import StreamReader
from relatum.recording import Filler, Segment, backfill, plan_backfill, status, verify
from relatum.store import add_keys, streams_named
from tests.support import (
    declare_stream,
    delete_stream,
    publish_plain,
    record,
    unique_name,
    wait_until,
)
from tests.support.leases import let_lapse, record_as
from tests.support.place import Place

BIG = b"x" * 10_000


def orders(count: int, start: int = 0) -> list[tuple[bytes, dict[str, Any]]]:
    """Numbered orders on three hosts, of which each tenth has no usable number."""
    return [
        (b"", {"order_id": "x" * 2000 if n % 10 == 5 else f"o{n}", "host": f"h{n % 3}"})
        for n in range(start, start + count)
    ]


def coverage_rows(engine: sa.Engine) -> list[tuple[Any, ...]]:
    """All ranges: from, to, how many keys, whether it is the tail, kind."""
    query = "SELECT from_offset, to_offset, cardinality(key_ids), is_tail, kind FROM relatum.coverage ORDER BY 1, 2, 4"
    with engine.connect() as connection:
        return [tuple(row) for row in connection.execute(sa.text(query))]


def skipped(engine: sa.Engine) -> int:
    """How many values were counted as skipped."""
    with engine.connect() as connection:
        return int(connection.execute(sa.text("SELECT coalesce(sum(count), 0) FROM relatum.skips")).scalar_one())


def together(*calls: Callable[[], object]) -> list[BaseException]:
    """Run calls in threads of their own, at once; gives what they raised."""
    raised: list[BaseException] = []
    barrier = threading.Barrier(len(calls))

    def run(call: Callable[[], object]) -> None:
        barrier.wait()
        try:
            call()
        except BaseException as error:
            raised.append(error)

    threads = [threading.Thread(target=run, args=[call]) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not any(thread.is_alive() for thread in threads), "nobody waits for ever"
    return raised


def test_slices_filled_in_any_order_by_many_leave_one_range(place: Place) -> None:
    """Eight fillers take twenty slices twice each, while a recorder and a whole back-fill run: each row once."""
    publish_plain(place.amqp, place.stream, orders(2000), confirm=False)
    add_keys(place.engine, ["order_id", "host"])
    with StreamReader.open(place.amqp) as reader:
        wait_until(lambda: reader.bounds(place.stream).last == 1999, what="all published")
        plan = plan_backfill(place.engine, reader, "/", place.stream, None)
        (segment,) = plan.segments
        slices = [Segment(start, start + 100, segment.key_ids) for start in range(0, 2000, 100)]
        order = [slices[(number * 7) % 20] for number in range(40)]

        def fill(worker: int) -> None:
            filler = Filler(place.engine, reader, plan.stream, plan.definitions)
            for part in order[worker::8]:
                filler.complete(part)

        with place.recording():
            # Before there is a lease, the back-fill takes the end of the stream too.
            wait_until(lambda: status(place.amqp, place.database, [place.stream])[0].recorder, what="a lease")
            raised = together(
                *[lambda worker=worker: fill(worker) for worker in range(8)],  # type: ignore[misc]
                lambda: place.put(*orders(300, start=2000)),
                lambda: place.backfill(),
            )
            place.wait_recorded()
    assert raised == []
    assert len(place.rows()) == 2300 + 2300 - 230
    assert skipped(place.engine) == 230
    closed = [row for row in coverage_rows(place.engine) if not row[3]]
    assert closed == [(0, 2000, 2, False, "recorded")]


def test_a_part_that_another_covered_meanwhile_is_not_written_again(place: Place) -> None:
    """Two fillers have read the same messages; who commits second rolls its rows back and finds nothing left."""
    place.put(*orders(50))
    add_keys(place.engine, ["order_id", "host"])
    with StreamReader.open(place.amqp) as reader:
        plan = plan_backfill(place.engine, reader, "/", place.stream, None)
        (segment,) = plan.segments
        fillers = [Filler(place.engine, reader, plan.stream, plan.definitions) for _ in range(6)]
        assert together(*[lambda filler=filler: filler.complete(segment) for filler in fillers]) == []  # type: ignore[misc]
    assert len(place.rows()) == 95
    assert skipped(place.engine) == 5


def test_new_streams_back_filled_at_once_get_one_tail(place: Place) -> None:
    """Back-fills that all find a stream nobody recorded agree on its tail."""
    place.put(*orders(20))
    add_keys(place.engine, ["order_id"])
    calls = [lambda: place.backfill() for _ in range(6)]
    assert together(*calls) == []
    assert [row[3] for row in coverage_rows(place.engine)] == [False, True]
    assert len(place.rows()) == 18


def test_retention_that_overtakes_a_back_fill_is_recorded_as_a_hole(amqp_url: str, engine: sa.Engine) -> None:
    """What was planned and is gone when it is read is not recorded, and said so; the rest is."""
    name = unique_name()
    declare_stream(amqp_url, name, x_max_length_bytes=200_000, x_stream_max_segment_size_bytes=50_000)
    try:
        publish_plain(amqp_url, name, orders(10))
        add_keys(engine, ["order_id"])
        with StreamReader.open(amqp_url) as reader:
            plan = plan_backfill(engine, reader, "/", name, None)
            (segment,) = plan.segments
            publish_plain(amqp_url, name, [(BIG, {"order_id": f"big{n}"}) for n in range(100)])
            wait_until(lambda: (reader.bounds(name).first or 0) > 10, what="retention past the plan")
            Filler(engine, reader, plan.stream, plan.definitions).complete(segment)
        assert [row for row in coverage_rows(engine) if not row[3]] == [(0, 10, 0, False, "hole")]
        (seen,) = status(amqp_url, engine.url, [name])
        assert [event.kind for event in seen.events] == ["hole"]
        record(amqp_url, engine, name)
        backfill(amqp_url, engine.url, name)
        assert verify(amqp_url, engine.url, [name]).ok
    finally:
        delete_stream(amqp_url, name)


@pytest.mark.differs
def test_a_stream_that_was_replaced_between_plan_and_fill_is_refused(place: Place) -> None:
    """The rows of one stream are never written in the name of another."""
    place.put(*orders(10))
    add_keys(place.engine, ["order_id"])
    place.backfill()
    add_keys(place.engine, ["host"])
    with StreamReader.open(place.amqp) as reader:
        plan = plan_backfill(place.engine, reader, "/", place.stream, ["host"])
        delete_stream(place.amqp, place.stream)
        declare_stream(place.amqp, place.stream)
        place.put(*orders(10, start=100))
        with pytest.raises(CoverageConflict, match="not the one that was recorded"):
            Filler(place.engine, reader, plan.stream, plan.definitions).complete(plan.segments[0])
    assert {key for key, _, _ in place.rows()} == {"order_id"}


def test_partitions_are_known_by_their_super_stream(place: Place) -> None:
    """Look-ups by the super stream's name find what was back-filled."""
    place.put(*orders(3))
    add_keys(place.engine, ["order_id"])
    place.backfill(super_stream="all orders")
    with place.engine.connect() as connection:
        assert [row.name for row in streams_named(connection, "/", ["all orders"])] == [place.stream]


def test_a_repeated_back_fill_reaches_the_streams_end(place: Place) -> None:
    """Without a recorder each run records what was published since; a recorder that starts goes on behind it."""
    add_keys(place.engine, ["order_id"])
    assert place.backfill().messages == 0
    for start in (0, 10, 20):
        place.put(*[(b"", {"order_id": f"o{n}"}) for n in range(start, start + 10)])
        assert place.backfill().messages == 10
    place.put((b"", {"order_id": "o30"}))
    place.record()
    assert place.rows() == [("order_id", f"o{n}", n) for n in range(31)]
    assert [row[:2] for row in coverage_rows(place.engine)] == [(0, 30), (30, 31)]


def test_a_back_fill_leaves_the_end_to_a_recorder_that_runs(place: Place) -> None:
    """While somebody holds the stream's lease, its tail stays where it is; so it does where only one key is asked."""
    add_keys(place.engine, ["order_id"])
    with place.recording():
        wait_until(lambda: bool(coverage_rows(place.engine)), what="the recorder opens the stream")
    before = coverage_rows(place.engine)
    place.put((b"", {"order_id": "o"}))
    assert place.backfill(keys=["order_id"]).messages == 0
    record_as(place.engine, "x")
    assert place.backfill().messages == 0
    assert coverage_rows(place.engine) == before
    let_lapse(place.engine)
    assert place.backfill().messages == 1
