"""What is recorded of each stream, how far behind it is, and what happened to it."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

import sqlalchemy as sa

from relatum.errors import StreamNotFound
from relatum.keys import KeyDefinition
from relatum.reading import BrokerAddress, StreamBounds, StreamReader
from relatum.recording._ranges import gaps
from relatum.store import (
    TIME,
    CoverageRow,
    Range,
    StreamRow,
    as_engine,
    coverage_of,
    covered,
    events,
    key_definitions,
    relationships,
    skips,
    streams,
    streams_named,
    translated_errors,
)

EVENTS_MAX: Final = 20
"""Newest events shown for each stream."""

EXACT_PAGES_MAX: Final = 50_000
"""Pages of the table up to which its rows are counted; a larger one is sampled."""


@dataclass(frozen=True, slots=True)
class StreamEvent:
    """Something that happened to a stream; offsets [from, to).

    `kind` is `replaced`, `tail_lost`, `hole`, `missing`, or `unreadable` (batches that could not be unpacked).
    """

    at: datetime
    kind: str
    from_offset: int | None
    to_offset: int | None
    detail: str


@dataclass(frozen=True, slots=True)
class StreamStatus:
    """One stream: what the broker holds and what the table holds of it.

    `state` is `recording`, `missing` (the broker has no such stream) or `not_recorded` (the database has none). `first`
    and `last` are retained offsets, None where the stream is empty or missing. `covered` gives the recorded ranges by
    key name, `time` among them; `holes` are ranges retention took first, `gaps` ranges that are retained and of
    which nothing is recorded: a recorder closes them. `lag_offsets` counts them and what lies behind the end;
    `lag_s` is the age of the oldest unrecorded message, None where that is not known. `rows` and
    `bytes` (of table and index) are estimates in large tables. `recorder` is who holds the lease, None where nobody.
    """

    stream: str
    super_stream: str | None
    generation: int
    state: str
    first: int | None
    last: int | None
    recorded_to: int | None
    covered: dict[str, list[Range]]
    holes: list[Range]
    lag_offsets: int
    lag_s: float | None
    rows: int
    bytes: int
    skipped: dict[str, dict[str, int]]
    events: list[StreamEvent]
    recorder: str | None
    gaps: list[Range]


def status(
    broker: str | BrokerAddress,
    database: str | sa.Engine,
    names: Sequence[str] | None = None,
    *,
    stream_url: str | None = None,
) -> list[StreamStatus]:
    """The status of streams, by name.

    Args:
        broker: The broker's URL or address.
        database: PostgreSQL's URL, or an engine.
        names: Streams and super streams; None: all that the database knows.
        stream_url: The stream protocol's URL, where it cannot be told from the broker's.
    """
    address = broker if isinstance(broker, BrokerAddress) else BrokerAddress.parse(broker, stream_url)
    with as_engine(database) as engine, StreamReader.open(address) as reader:
        with translated_errors(), engine.begin() as connection:
            known = streams_named(connection, address.vhost, names)
            facts = _Facts(connection, known)
        return [_status_of(stream, facts, reader) for stream in known]


class _Facts:
    """What the database says of some streams, read once."""

    def __init__(self, connection: sa.Connection, known: Sequence[StreamRow]) -> None:
        ids = [stream.stream_id for stream in known]
        self.definitions: list[KeyDefinition] = key_definitions(connection)
        self.coverage: dict[int, list[CoverageRow]] = {stream_id: [] for stream_id in ids}
        for row in coverage_of(connection, ids):
            self.coverage[row.stream_id].append(row)
        self.skipped = self._skipped(connection, ids)
        self.events = {stream_id: _events(connection, stream_id) for stream_id in ids}
        self.rows = _row_counts(connection)
        self.row_bytes = _bytes_of_a_row(connection, sum(self.rows.values()))
        self.holders = _holders(connection, ids)

    def _skipped(self, connection: sa.Connection, ids: Sequence[int]) -> dict[int, dict[str, dict[str, int]]]:
        names = {definition.key_id: definition.name for definition in self.definitions} | {0: ""}
        found: dict[int, dict[str, dict[str, int]]] = {stream_id: {} for stream_id in ids}
        for row in connection.execute(sa.select(skips).where(skips.c.stream_id.in_(ids))):
            found[row.stream_id].setdefault(names.get(row.key_id, f"#{row.key_id}"), {})[row.reason] = row._mapping[
                "count"
            ]
        return found


def _events(connection: sa.Connection, stream_id: int) -> list[StreamEvent]:
    rows = connection.execute(
        sa.select(events.c.at, events.c.kind, events.c.from_offset, events.c.to_offset, events.c.detail)
        .where(events.c.stream_id == stream_id)
        .order_by(events.c.event_id.desc())
        .limit(EVENTS_MAX)
    )
    return [StreamEvent(*row) for row in rows][::-1]


def _row_counts(connection: sa.Connection) -> dict[int, int]:
    """Rows by stream: counted in small tables, sampled in large ones."""
    pages = connection.execute(sa.text("SELECT relpages FROM pg_class WHERE oid = 'relatum.relationships'::regclass"))
    share = min(100.0, 100.0 * EXACT_PAGES_MAX / max(1, pages.scalar_one()))
    table: Any = relationships if share == 100.0 else sa.tablesample(relationships, sa.func.system(share))
    counts = connection.execute(sa.select(table.c.stream_id, sa.func.count()).group_by(table.c.stream_id))
    return {stream_id: round(count * 100.0 / share) for stream_id, count in counts}


def _bytes_of_a_row(connection: sa.Connection, rows: int) -> float:
    size = connection.execute(sa.text("SELECT pg_total_relation_size('relatum.relationships')")).scalar_one()
    return float(size) / rows if rows else 0.0


def _holders(connection: sa.Connection, ids: Sequence[int]) -> dict[int, str | None]:
    rows = connection.execute(
        sa.select(streams.c.stream_id, streams.c.lease_holder).where(
            streams.c.stream_id.in_(ids), streams.c.lease_expires_at > sa.func.clock_timestamp()
        )
    )
    return {row.stream_id: row.lease_holder for row in rows}


def _status_of(stream: StreamRow, facts: _Facts, reader: StreamReader) -> StreamStatus:
    rows = facts.coverage[stream.stream_id]
    recorded_to = max((row.to_offset for row in rows), default=None)
    try:
        bounds, state = reader.bounds(stream.name), stream.state
    except StreamNotFound:
        bounds, state = StreamBounds(None, None), "missing"
    ranges = {definition.name: covered(rows, definition.key_id) for definition in facts.definitions}
    open_gaps = [] if bounds.first is None else gaps(rows, bounds.first)
    lag_offsets, lag_s = _lag(reader, stream.name, bounds, recorded_to, open_gaps)
    count = facts.rows.get(stream.stream_id, 0)
    return StreamStatus(
        stream=stream.name,
        super_stream=stream.super_stream,
        generation=stream.generation,
        state=state if rows or state == "missing" else "not_recorded",
        first=bounds.first,
        last=bounds.last,
        recorded_to=recorded_to,
        covered={**ranges, "time": covered(rows, TIME)},
        holes=[(row.from_offset, row.to_offset) for row in rows if row.kind == "hole"],
        lag_offsets=lag_offsets,
        lag_s=lag_s,
        rows=count,
        bytes=round(count * facts.row_bytes),
        skipped=facts.skipped[stream.stream_id],
        events=facts.events[stream.stream_id],
        recorder=facts.holders.get(stream.stream_id),
        gaps=open_gaps,
    )


def _lag(
    reader: StreamReader, stream: str, bounds: StreamBounds, recorded_to: int | None, open_gaps: Sequence[Range]
) -> tuple[int, float | None]:
    """How far the recording is behind: offsets, and seconds since the oldest unrecorded message was written."""
    if bounds.last is None or bounds.first is None:
        return 0, 0.0
    behind = (max(bounds.first, recorded_to or 0), bounds.last + 1)
    lacking = [(start, end) for start, end in [*open_gaps, behind] if start < end]
    if not lacking:
        return 0, 0.0
    count = sum(end - start for start, end in lacking)
    oldest = next(reader.iterate(stream, lacking[0][0]), None)
    if oldest is None or oldest.chunk_ms is None:
        return count, None
    return count, max(0.0, datetime.now(UTC).timestamp() - oldest.chunk_ms / 1000)
