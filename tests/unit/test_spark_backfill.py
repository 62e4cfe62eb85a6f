"""How a back-fill's work is cut for Spark."""

import pickle
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relatum.keys import KeyDefinition
from relatum.recording import Plan, Segment
from relatum.store import StreamRow

pytest.importorskip("pyspark")

from relatum_spark import Broker
from relatum_spark._backfill import Filling, cut

NOW = datetime(2026, 1, 1, tzinfo=UTC)
segments = st.lists(st.tuples(st.integers(0, 1000), st.integers(1, 500), st.integers(1, 3)), max_size=5)


def stream(name: str) -> StreamRow:
    """A stream as the database would give it."""
    return StreamRow(1, "/", name, None, 1, "recording", True, 0, NOW, None)


@given(st.lists(segments, max_size=3), st.integers(1, 20), st.integers(1, 700))
def test_slices_are_the_segments_in_order_and_small_enough(
    found: list[list[tuple[int, int, int]]], at_once: int, slice_offsets: int
) -> None:
    """Every offset that lacks a key is in one slice with the same keys; there are enough slices for all slots."""
    plans = [
        Plan(stream(f"s{number}"), (), tuple(Segment(at, at + size, frozenset([key])) for at, size, key in parts))
        for number, parts in enumerate(found)
    ]
    slices = cut(plans, at_once=at_once, slice_offsets=slice_offsets)
    wanted = [
        (plan.stream.name, offset, part.key_ids)
        for plan in plans
        for part in plan.segments
        for offset in range(part.from_offset, part.to_offset)
    ]
    got = [
        (name, offset, segment.key_ids)
        for name, segment in slices
        for offset in range(segment.from_offset, segment.to_offset)
    ]
    assert got == wanted
    assert all(segment.to_offset - segment.from_offset <= slice_offsets for _, segment in slices)
    assert len(slices) >= min(at_once, len(wanted))


def test_the_work_of_the_tasks_can_be_pickled_and_shows_no_credentials() -> None:
    """It travels to executors; nobody prints a password with it."""
    plan = Plan(stream("s"), (KeyDefinition("a"),), (Segment(0, 5, frozenset([1])),))
    tasks = [[part] for part in cut([plan], at_once=2, slice_offsets=1)]
    broker = Broker.of("amqp://me:secret@broker/")
    work = Filling(broker, "postgresql://me:secret@db/x", {"s": plan}, tasks, 50.0)
    assert pickle.loads(pickle.dumps(work)) == work
    assert "secret" not in repr(work)
