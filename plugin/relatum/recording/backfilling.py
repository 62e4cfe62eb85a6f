"""Back-fills record offsets before the tail, for streams and keys that were not recorded from the start.

The coverage says which offsets lack a key. A back-fill reads them again, and each batch adds a range to the coverage.
To resume a killed back-fill, run it again. A recorder may run at the same time: the two never write the same offsets
for the same key. If no recorder runs, the back-fill continues to the stream's end.
"""

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import sqlalchemy as sa

from relatum.common.checks import checked_name, checked_names
from relatum.errors import CoverageConflict, KeyNotDefined
from relatum.keys import KeyDefinition
from relatum.reading import Broker, BrokerAddress, StreamReader
from relatum.recording.filler import Filler, check_same
from relatum.recording.own_broker import check_broker
from relatum.recording.ranges import Segment, unrecorded
from relatum.recording.tails import set_tail
from relatum.store.catalog import (
    StreamRow,
    current_stream,
    ensure_stream,
    key_definitions,
    lock_stream,
    present_streams,
)
from relatum.store.coverage import TIME, coverage_of, tail_of
from relatum.store.database import IDLE_S, AnyDatabase, as_engine, transaction
from relatum.store.members import RECORDERS, holders_of


@dataclass(frozen=True, slots=True)
class BackfillProgress:
    """A back-fill has reached `at_offset` in the part [from_offset, to_offset). Counts include all earlier parts."""

    stream: str
    at_offset: int
    from_offset: int
    to_offset: int
    messages: int
    rows: int


@dataclass(frozen=True, slots=True)
class BackfillReport:
    """The result of a back-fill. All offsets that lacked a key when it began are within [from_offset, to_offset)."""

    stream: str
    messages: int
    rows: int
    from_offset: int
    to_offset: int
    seconds: float


def backfill(
    broker: str | Broker,
    database: AnyDatabase,
    stream: str,
    *,
    keys: Sequence[str] | None = None,
    super_stream: str | None = None,
    progress: Callable[[BackfillProgress], None] | None = None,
    stop: threading.Event | None = None,
) -> BackfillReport:
    """Record a stream's retained messages for all keys that lack them. Safe to repeat, and to run during recording.

    A running recorder records new messages. If no recorder runs and `keys` is None, the back-fill continues to the
    stream's end as of the call.

    Args:
        broker: The broker's URL, or a `Broker`.
        database: PostgreSQL's URL, or a `Database`.
        stream: The stream. For a super stream, call `backfill` for each partition.
        keys: Names of defined keys. None (default): all keys in force, and the time unless it is switched off.
        super_stream: The super stream that the stream is a partition of. Lookups by its name then search the stream.
        progress: Called after each transaction.
        stop: Set this event to end the back-fill after the current transaction. The report counts its work until then.

    Raises:
        KeyNotDefined: a name in `keys` is not that of a defined key; nothing was written.
        StreamNotFound: the broker has no such stream.
        AnotherBroker: the stream was recorded from another broker; nothing was written.
        CoverageConflict: the stream was declared again or lost its tail, or other processes keep changing its coverage.
        StreamUnavailable, ReadTimeout: the broker does not deliver messages that it should have; safe to repeat.
    """
    checked_name("stream", stream)
    if keys is not None:
        keys = checked_names("keys", keys)
    if super_stream is not None:
        checked_name("super_stream", super_stream)
    address = BrokerAddress.of(broker)
    stop = stop or threading.Event()
    started = time.perf_counter()
    messages = rows = 0
    edges: list[int] = []

    def fill(plan: Plan, segment: Segment) -> bool:
        def count(new_messages: int, new_rows: int, at_offset: int) -> None:
            nonlocal messages, rows
            messages += new_messages
            rows += new_rows
            if progress is not None:
                progress(BackfillProgress(stream, at_offset, segment.from_offset, segment.to_offset, messages, rows))

        return Filler(engine, reader, plan.stream, plan.definitions, on_commit=count, stop=stop).complete(segment)

    with as_engine(database, idle_s=IDLE_S) as engine, StreamReader.open(address) as reader:
        while not stop.is_set():
            plan = plan_backfill(engine, reader, address.vhost, stream, keys, super_stream, to_end=not edges)
            edges += edges_of(plan.segments)
            has_covered = [fill(plan, segment) for segment in plan.segments]
            if not any(has_covered):
                break  # The remaining messages cannot be unpacked here.
    edges = edges or [0]
    return BackfillReport(stream, messages, rows, min(edges), max(edges), time.perf_counter() - started)


@dataclass(frozen=True, slots=True)
class Plan:
    """The segments of a stream that lack some key, and the definitions to fill them."""

    stream: StreamRow
    definitions: tuple[KeyDefinition, ...]
    segments: tuple[Segment, ...]


def plan_backfill(
    engine: sa.Engine,
    reader: StreamReader,
    vhost: str,
    name: str,
    keys: Sequence[str] | None,
    super_stream: str | None = None,
    *,
    to_end: bool = True,
) -> Plan:
    """Find the retained offsets of a stream that lack some key. Adds a tail to a stream that was never recorded.

    With `to_end` and all keys, the plan reaches the stream's end if no recorder runs; otherwise it ends at the tail.
    Set `to_end` only once in a run: otherwise the run would follow the publishers forever.
    """
    bounds = reader.bounds(name)
    with transaction(engine) as connection:
        before = current_stream(connection, vhost, name)
    if before is not None:
        check_broker(engine, reader, before)
    with transaction(engine) as connection:
        definitions = key_definitions(connection)
        names = {definition.name for definition in definitions}
        for key in keys or ():
            if key not in names:
                raise KeyNotDefined(f"no key {key!r} is defined: `relatum keys add` defines one", key=key)
        wanted = {each.key_id for each in definitions if keys is None or each.name in keys}
        stream = ensure_stream(connection, vhost, name, super_stream)
        rows = coverage_of(connection, [stream.stream_id])
    check_same(reader, name, rows)
    end = 0 if bounds.last is None else bounds.last + 1
    if (to_end and keys is None) or not any(row.is_tail for row in rows):
        _advance_tail(engine, stream, end)
    with transaction(engine) as connection:
        rows = coverage_of(connection, [stream.stream_id])
        # After the coverage: a prune stores its limit before it reduces the coverage.
        stream = present_streams(connection, [stream.stream_id]).get(stream.stream_id, stream)
    if keys is None and stream.record_time:
        wanted.add(TIME)
    # Of pruned rows, those in closed parts are left: a leader that retains older messages must not double them.
    first = max(bounds.first or 0, stream.retained_from or 0)
    end = min(end, max((row.to_offset for row in rows if row.is_tail), default=0))
    segments = unrecorded(rows, (first, max(first, end)), wanted)
    return Plan(stream, tuple(definitions), tuple(segments))


def _advance_tail(engine: sa.Engine, stream: StreamRow, end: int) -> None:
    """Move the tail to the stream's end, unless a recorder runs, which records up to there. Add a missing tail."""
    with transaction(engine) as connection:
        # `key_share`: a recorder that starts now has locked the tail, and adds the next one.
        lock_stream(connection, stream.stream_id, key_share=True)
        tail = tail_of(connection, stream.stream_id)
        if tail is None or (tail.to_offset < end and not holders_of(connection, RECORDERS, [stream.stream_id])):
            # Safe if a recorder starts now: either process gets a conflict, and retries.
            with suppress(CoverageConflict), connection.begin_nested():
                set_tail(connection, stream, tail, end, None)


def edges_of(segments: Iterable[Segment]) -> list[int]:
    """Return the offsets at which segments begin and end."""
    return [edge for segment in segments for edge in (segment.from_offset, segment.to_offset)]
