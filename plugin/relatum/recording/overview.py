"""Reports on recording: the status of each stream, the size of each key, and the recorders."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

import sqlalchemy as sa

from relatum.common.checks import checked_names
from relatum.errors import (
    AccessRefused,
    AnotherBroker,
    NotFound,
    RelatumError,
    StreamNotFound,
    Transient,
)
from relatum.keys import KeyDefinition
from relatum.reading import (
    Broker,
    BrokerAddress,
    BrokerIdentity,
    StreamBounds,
    StreamReader,
    bounds_or_error,
    concerns_broker,
)
from relatum.recording.own_broker import errors_of_others
from relatum.recording.pruning import EVENTS_MAX
from relatum.recording.ranges import gaps
from relatum.store.catalog import StreamRow, check_recorded, key_definitions, streams_named
from relatum.store.coverage import TIME, CoverageRow, Range, coverage_by_stream, covered
from relatum.store.database import STATEMENT_S, AnyDatabase, as_engine, sql, transaction
from relatum.store.members import RECORDERS, holders_of
from relatum.store.parts import Part, table_parts_of

# --- sizes, recorders and ends ----------------------------------------------------------------------------------------

EXACT_BYTES_MAX: Final = 400 << 20
"""Up to this many bytes, the rows of parts that are not closed are counted; more bytes are sampled."""

SAMPLE_BYTES_MAX: Final = 64 << 20
"""Up to this many bytes, the rows of each key are counted in all parts; more bytes are sampled."""

_CLOSED_ROWS: Final = sql("SELECT stream_id, sum(row_count) FROM relatum.part_streams GROUP BY stream_id")

_TABLE_BYTES: Final = sql("SELECT sum(pg_total_relation_size(relid)) FROM pg_partition_tree('relatum.relationships')")

_MEMBERS: Final = sql("""
    SELECT m.holder, m.name, m.lease_expires_at >= clock_timestamp(), m.lease_expires_at, held.vhosts, held.names
    FROM relatum.recorder_members m CROSS JOIN LATERAL (
        SELECT array_agg(vhost ORDER BY vhost, name) AS vhosts, array_agg(name ORDER BY vhost, name) AS names
        FROM relatum.streams WHERE lease_holder = m.holder AND replaced_at IS NULL) AS held
    ORDER BY m.name, m.holder""")

_COUNTS: Final = {
    (column, is_exact): sql(f"""
        SELECT {column}, count(*) FROM relatum.relationships {"" if is_exact else "TABLESAMPLE SYSTEM (:share::real)"}
        WHERE part = ANY (:parts::integer[]) GROUP BY 1""")
    for column in ("stream_id", "key_id")
    for is_exact in (True, False)
}


def row_counts(connection: sa.Connection) -> Counter[int]:
    """Return the numbers of rows by stream id: stored for closed parts, and counted or estimated for others."""
    open_parts = [part for part in table_parts_of(connection) if part.is_opened and not part.is_closed]
    counts, _ = _counts_by(connection, "stream_id", open_parts, EXACT_BYTES_MAX)
    counts.update({stream_id: int(count) for stream_id, count in connection.execute(_CLOSED_ROWS)})
    return counts


def _counts_by(
    connection: sa.Connection, column: str, parts: Sequence[Part], bytes_max: int
) -> tuple[Counter[int], bool]:
    """Return the numbers of rows by a column, and whether they are exact: more than `bytes_max` bytes are sampled."""
    share = min(100.0, 100.0 * bytes_max / max(1, sum(part.size for part in parts)))
    rows = connection.execute(_COUNTS[column, share == 100.0], {"parts": [part.part for part in parts], "share": share})
    return Counter({value: round(count * 100.0 / share) for value, count in rows}), share == 100.0


def _bytes_per_row(connection: sa.Connection, rows: int) -> float:
    return float(connection.execute(_TABLE_BYTES).scalar_one() or 0) / max(1, rows)


@dataclass(frozen=True, slots=True)
class KeySize:
    """The size of one key in the table: its rows (counted, or estimated from a sample) and their estimated bytes."""

    definition: KeyDefinition
    rows: int
    bytes: int
    is_exact: bool


@dataclass(frozen=True, slots=True)
class RecorderMember:
    """A recorder that is running, or ran until its lease expired.

    Recorders with the same `name` share their streams. `streams`: (virtual host, name) of each stream that it holds.
    """

    holder: str
    name: str
    is_alive: bool
    lease_expires_at: datetime
    streams: tuple[tuple[str, str], ...]


def key_sizes(database: AnyDatabase) -> list[KeySize]:
    """Return the size of each key in the table, ordered by name. A large table is sampled in less than a second."""
    with as_engine(database, statement_s=STATEMENT_S) as engine, transaction(engine) as connection:
        rows, is_exact = _counts_by(connection, "key_id", table_parts_of(connection), SAMPLE_BYTES_MAX)
        bytes_per_row = _bytes_per_row(connection, rows.total())
        return [
            KeySize(each, rows[each.key_id], round(rows[each.key_id] * bytes_per_row), is_exact)
            for each in sorted(key_definitions(connection), key=lambda definition: definition.name)
        ]


def recorder_list(database: AnyDatabase) -> list[RecorderMember]:
    """Return the recorders with a lease, valid or expired, and their streams, ordered by name and holder."""
    with as_engine(database, statement_s=STATEMENT_S) as engine, transaction(engine) as connection:
        return [
            RecorderMember(holder, name, is_alive, expires_at, tuple(zip(vhosts or (), names or (), strict=True)))
            for holder, name, is_alive, expires_at, vhosts, names in connection.execute(_MEMBERS)
        ]


def recorded_tails(database: AnyDatabase, vhost: str, names: Sequence[str]) -> dict[str, CoverageRow]:
    """Return the tails of streams by name, the most recently recorded first. Empty `names`: all streams."""
    with as_engine(database, statement_s=STATEMENT_S) as engine, transaction(engine) as connection:
        check_recorded(connection, vhost, names)
        streams = streams_named(connection, vhost, names or None)
        ranges = coverage_by_stream(connection, [stream.stream_id for stream in streams])
    tails = {stream.name: row for stream in streams for row in ranges[stream.stream_id] if row.is_tail}
    return dict(sorted(tails.items(), key=lambda item: item[1].recorded_at, reverse=True))


# --- the status of streams --------------------------------------------------------------------------------------------

_EVENTS_OF: Final = sql(f"""
    SELECT stream_id, at, kind, from_offset, to_offset, detail
    FROM unnest(:ids::integer[]) AS wanted(id) CROSS JOIN LATERAL (
        SELECT * FROM relatum.events WHERE stream_id = id ORDER BY event_id DESC LIMIT {EVENTS_MAX}) AS newest
    ORDER BY event_id""")
"""Selects the newest events of each stream, in order."""

_SKIPS_OF: Final = sql(
    "SELECT stream_id, key_id, reason, count FROM relatum.skips WHERE stream_id = ANY (:ids::integer[])"
)

_BROKERS: Final = sql("SELECT broker_id, cluster_name FROM relatum.brokers")


@dataclass(frozen=True, slots=True)
class StreamEvent:
    """An event of a stream, with offsets [from_offset, to_offset), or None if it concerns no offsets.

    `kind` is `replaced`, `tail_lost`, `hole`, `missing`, or `unreadable` (batches that could not be unpacked).
    """

    at: datetime
    kind: str
    from_offset: int | None
    to_offset: int | None
    detail: str

    @property
    def words(self) -> str:
        """The event's name for users, in a word or two."""
        return _EVENTS.get(self.kind, (self.kind, ""))[0]

    @property
    def remedy(self) -> str:
        """What a user can do about the event; empty if there is nothing to do."""
        return _EVENTS.get(self.kind, ("", ""))[1]


_EVENTS: Final = {
    "replaced": ("declared again", "relatum prune removes what was recorded before"),
    "tail_lost": ("tail lost", "ask its publishers which messages were lost"),
    "missing": ("deleted", "declare it again, or relatum forget removes what was recorded"),
    "hole": ("hole", "retention was faster than recording: keep the stream longer, or record sooner"),
    "unreadable": ("unreadable", "install the codec of these batches"),
}
"""An event's name for users, and what they can do about it."""


@dataclass(frozen=True, slots=True)
class StreamStatus:
    """The status of one stream, in the broker and in the table.

    `state` is `recording`, `unattended` (no recorder runs: new messages stay unrecorded), `not_recorded` (no offset is
    recorded), or says why the stream cannot be read: `missing` (the broker has no such stream), `deleted` (it was
    recorded, but the broker no longer has it), `not_a_stream` (a queue of another kind), `refused` (this user may not
    read it), `another_broker` (it was recorded from another broker), `unavailable` (temporary: no leader, or a starting
    node) or `unreadable` (bad data). `error` is the error in these cases, else None. `first` and `last` are the first
    and last retained offset, None if the stream is empty or cannot be read. `covered` holds the recorded ranges by key
    name, and those of messages' times as `time`, unless a key has that name. `holes` are ranges that retention dropped
    before they were recorded; `gaps` are retained ranges that are recorded for no key; a recorder closes them.
    `lag_offsets` counts the offsets in gaps and after the recorded end; `lag_s` is the age of the oldest unrecorded
    message in seconds; each is None if unknown. `rows` is estimated in a large table, and `bytes` (with indexes)
    always. `skipped` counts unrecorded values by key and reason. `recorder` is the holder of the lease, or None.
    `broker` names the broker that the stream was recorded from, by cluster name and the beginning of its id; None if
    unknown.
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
    lag_offsets: int | None
    lag_s: float | None
    rows: int
    bytes: int
    skipped: dict[str, dict[str, int]]
    events: list[StreamEvent]
    recorder: str | None
    gaps: list[Range]
    error: RelatumError | None = None
    broker: str | None = None


def status(
    broker: str | Broker,
    database: AnyDatabase,
    names: Sequence[str] | None = None,
) -> list[StreamStatus]:
    """Return the status of streams, ordered by name.

    Args:
        broker: The broker's URL, or a `Broker`.
        database: PostgreSQL's URL, or a `Database`.
        names: Streams and super streams. None (default): all streams in the database.

    Returns:
        The status of each stream in the database. If one cannot be read, its `state` says why; the others are reported.

    Raises:
        BrokerUnavailable, DatabaseUnavailable: a server did not answer; safe to repeat.
    """
    if names is not None:
        names = checked_names("names", names)
    address = BrokerAddress.of(broker)
    with as_engine(database, statement_s=STATEMENT_S) as engine, StreamReader.open(address) as reader:
        return recorded_status(engine, address.vhost, names, reader)


def recorded_status(
    engine: sa.Engine, vhost: str, names: Sequence[str] | None, reader: StreamReader | RelatumError
) -> list[StreamStatus]:
    """Return what `status` returns. An error given instead of a reader becomes each stream's `error`."""
    with transaction(engine) as connection:
        known = streams_named(connection, vhost, names)
        facts = _Facts(connection, known)
    if isinstance(reader, RelatumError):
        return [_status_of(stream, facts, None, reader) for stream in known]
    # A stream is shown as it is if its broker's identity cannot be read now.
    others = errors_of_others(engine, reader, known)
    found = {name: error for name, error in others.items() if isinstance(error, AnotherBroker)}
    return [
        _status_of(stream, facts, reader, found.get(stream.name) or bounds_or_error(reader, stream.name))
        for stream in known
    ]


class _Facts:
    """The database's data about streams, read in one transaction."""

    def __init__(self, connection: sa.Connection, known: Sequence[StreamRow]) -> None:
        ids = [stream.stream_id for stream in known]
        self.definitions: list[KeyDefinition] = key_definitions(connection)
        self.rows = row_counts(connection)
        self.row_bytes = _bytes_per_row(connection, self.rows.total())
        self.holders = holders_of(connection, RECORDERS, ids)
        self.brokers = {row[0]: str(BrokerIdentity(*row)) for row in connection.execute(_BROKERS)}
        self.coverage = coverage_by_stream(connection, ids)
        self.events: dict[int, list[StreamEvent]] = {stream_id: [] for stream_id in ids}
        for stream_id, *event in connection.execute(_EVENTS_OF, {"ids": ids}):
            self.events[stream_id].append(StreamEvent(*event))
        names = {definition.key_id: definition.name for definition in self.definitions} | {0: ""}
        self.skipped: dict[int, dict[str, dict[str, int]]] = {stream_id: {} for stream_id in ids}
        for stream_id, key_id, reason, count in connection.execute(_SKIPS_OF, {"ids": ids}):
            self.skipped[stream_id].setdefault(names.get(key_id, f"#{key_id}"), {})[reason] = count


def _status_of(
    stream: StreamRow, facts: _Facts, reader: StreamReader | None, found: StreamBounds | RelatumError
) -> StreamStatus:
    rows = facts.coverage[stream.stream_id]
    recorded_to = max((row.to_offset for row in rows), default=None)
    bounds, error = (found, None) if isinstance(found, StreamBounds) else (StreamBounds(None, None), found)
    ranges = {definition.name: covered(rows, definition.key_id) for definition in facts.definitions}
    open_gaps = [] if bounds.first is None else gaps(rows, max(bounds.first, stream.retained_from or 0))  # not pruned
    lag_offsets: int | None = None
    lag_s: float | None = None
    if error is None and reader is not None:
        lag_offsets, lag_s, error = _lag(reader, stream.name, bounds, recorded_to, open_gaps)
    recorder = facts.holders.get(stream.stream_id)
    return StreamStatus(
        stream=stream.name,
        super_stream=stream.super_stream,
        generation=stream.generation,
        state=_state_of(error, rows, recorder),
        first=bounds.first,
        last=bounds.last,
        recorded_to=recorded_to,
        covered={**ranges, "time": ranges.get("time", covered(rows, TIME))},
        holes=[(row.from_offset, row.to_offset) for row in rows if row.kind == "hole"],
        lag_offsets=lag_offsets,
        lag_s=lag_s,
        rows=facts.rows[stream.stream_id],
        bytes=round(facts.rows[stream.stream_id] * facts.row_bytes),
        skipped=facts.skipped[stream.stream_id],
        events=facts.events[stream.stream_id],
        recorder=recorder,
        gaps=open_gaps,
        error=error,
        broker=None if stream.broker_id is None else facts.brokers.get(stream.broker_id),
    )


_STATES: Final[tuple[tuple[type[RelatumError], str], ...]] = (
    (StreamNotFound, "missing"),
    (NotFound, "not_a_stream"),
    (AccessRefused, "refused"),
    (AnotherBroker, "another_broker"),
    (Transient, "unavailable"),
    (RelatumError, "unreadable"),
)
"""The state of a stream that cannot be read, by its error; the first match counts."""


def _state_of(error: RelatumError | None, rows: Sequence[CoverageRow], recorder: str | None) -> str:
    if error is not None:
        is_deleted = bool(rows) and isinstance(error, StreamNotFound)
        return "deleted" if is_deleted else next(state for kind, state in _STATES if isinstance(error, kind))
    if not rows:
        return "not_recorded"
    return "unattended" if recorder is None else "recording"


def _lag(
    reader: StreamReader, stream: str, bounds: StreamBounds, recorded_to: int | None, open_gaps: Sequence[Range]
) -> tuple[int, float | None, RelatumError | None]:
    """Return the lag: offsets, and seconds since the oldest unrecorded message was written.

    The third value is the error if that message cannot be read.
    """
    lacking = list(open_gaps)
    if bounds.last is not None and bounds.last >= (start := max(bounds.first or 0, recorded_to or 0)):
        lacking.append((start, bounds.last + 1))
    if not lacking:
        return 0, 0.0, None
    count = sum(end - start for start, end in lacking)
    try:
        oldest = next(reader.iterate(stream, lacking[0][0]), None)
    except RelatumError as error:
        if concerns_broker(error):
            raise
        return count, None, error
    if oldest is None or oldest.chunk_ms is None:
        return count, None, None
    return count, max(0.0, datetime.now(UTC).timestamp() - oldest.chunk_ms / 1000), None
