"""Prunes rows of messages that retention dropped, of replaced or forgotten streams, and of removed keys.

Bounded transactions delete the rows, so that no lock is held for long and vacuum keeps up.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import sqlalchemy as sa

from relatum.common.checks import checked_count, checked_names
from relatum.errors import RelatumError, StreamNotFound, StreamUnavailable
from relatum.membership import GROUP_KEY
from relatum.reading import Broker, BrokerAddress, StreamBounds, StreamReader, bounds_or_error
from relatum.recording.own_broker import errors_of_others
from relatum.store.catalog import FORGOTTEN, StreamRow, check_recorded, streams_named
from relatum.store.coverage import coverage_of
from relatum.store.database import AnyDatabase, as_engine, sql, transaction
from relatum.store.parts import drop_parts, retain_from

BATCH_ROWS: Final = 10_000
"""Default maximum rows deleted in one transaction, which takes a fraction of a second."""

EVENTS_MAX: Final = 20
"""Number of a stream's newest events that are kept and shown."""

DERIVED: Final = ("time_blocks", "checkpoints", "receipts", "skips", "events", "group_scans")
"""The tables derived from streams, except `relationships` and `coverage`."""


def delete_batch(engine: sa.Engine, table: str, condition: str, batch_rows: int = BATCH_ROWS, **values: Any) -> int:
    """Delete up to `batch_rows` rows that meet a condition with parameters `values`; return how many."""
    # By ctid, since not every table has a key. The condition is checked again for each row: a range of the coverage may
    # have grown since the subquery chose it.
    chosen = f"SELECT ctid FROM relatum.{table} WHERE {condition} LIMIT :batch_rows::integer"
    statement = sql(f"DELETE FROM relatum.{table} WHERE ctid = ANY (ARRAY ({chosen})) AND ({condition})")
    with transaction(engine) as connection:
        return connection.execute(statement, {**values, "batch_rows": batch_rows}).rowcount


def delete_all(engine: sa.Engine, table: str, condition: str, batch_rows: int = BATCH_ROWS, **values: Any) -> int:
    """Delete all rows that meet a condition, batch by batch; return how many."""
    return sum(iter(lambda: delete_batch(engine, table, condition, batch_rows, **values), 0))


# --- messages dropped by retention ------------------------------------------------------------------------------------

_OF_STREAM: Final = "stream_id = :stream_id::integer"

_RETAINED_FROM: Final = sql("SELECT retained_from FROM relatum.streams WHERE stream_id = :stream_id::integer")

_NEWEST_EVENTS: Final = (
    f"SELECT event_id FROM relatum.events WHERE {_OF_STREAM} ORDER BY event_id DESC LIMIT {EVENTS_MAX}"
)

_EXPIRED: Final = (
    ("relationships", f"{_OF_STREAM} AND stream_offset < :first::bigint"),
    ("time_blocks", f"{_OF_STREAM} AND last_offset < :first::bigint"),
    ("checkpoints", f"{_OF_STREAM} AND last_offset < :first::bigint"),
    ("receipts", f"{_OF_STREAM} AND stream_offset < :first::bigint"),
    ("coverage", f"{_OF_STREAM} AND to_offset <= :first::bigint AND NOT is_tail"),
    ("events", f"{_OF_STREAM} AND event_id NOT IN ({_NEWEST_EVENTS})"),
)


def prune_expired(
    engine: sa.Engine, stream: StreamRow, batch_rows: int = BATCH_ROWS, *, parts: Sequence[int] | None = None
) -> Iterator[int]:
    """Delete the rows below `retained_from`, and old events, batch by batch; yield the number of rows of each batch.

    `parts`: The parts of `relationships` to delete from; None: all.
    """
    values: dict[str, Any] = {"stream_id": stream.stream_id}
    with transaction(engine) as connection:
        # Only what is stored: lookups then know that these rows may be missing.
        values["first"] = connection.execute(_RETAINED_FROM, values).scalar()
    for table, condition in _EXPIRED:
        of_parts: dict[str, Any] = {}
        if table == "relationships" and parts is not None:
            condition, of_parts = f"{condition} AND part = ANY (:parts::integer[])", {"parts": list(parts)}
        while deleted := delete_batch(engine, table, condition, batch_rows, **values, **of_parts):
            yield deleted


def prune_receipts(engine: sa.Engine, batch_rows: int = BATCH_ROWS) -> Iterator[int]:
    """Delete receipts that are too old for any publisher to wait for them; yield the number of each batch."""
    while deleted := delete_batch(engine, "receipts", "recorded_at < now() - interval '1 hour'", batch_rows):
        yield deleted


# --- replaced and forgotten streams -----------------------------------------------------------------------------------

_SPANS: Final = sql("""
    SELECT stream_id, min(from_offset), max(to_offset) FROM relatum.coverage
    WHERE stream_id = ANY (:ids::integer[]) GROUP BY stream_id""")

_ENDED: Final = sql("""
    SELECT stream_id FROM relatum.streams
    WHERE replaced_at IS NOT NULL AND (:name::text IS NULL OR vhost = :vhost::text AND name = :name::text)
    ORDER BY stream_id""")

_CLOSE_TAILS: Final = sql("UPDATE relatum.coverage SET is_tail = false WHERE stream_id = ANY (:ids::integer[])")

_DELETE_FORGOTTEN: Final = sql("""
    DELETE FROM relatum.streams s WHERE stream_id = ANY (:ids::integer[]) AND state = :state::text
        AND NOT EXISTS (SELECT FROM relatum.group_states g WHERE g.stream_id = s.stream_id)
        AND NOT EXISTS (SELECT FROM relatum.coverage c WHERE c.stream_id = s.stream_id)""")
"""Keeps the row of a stream in which a remaining group began: the group may have messages in other streams. Also keeps
that of a stream to which a suspended recorder has added a tail since: its rows are deleted the next time."""


def delete_ended(engine: sa.Engine, batch_rows: int, vhost: str | None = None, name: str | None = None) -> Counter[str]:
    """Delete remaining data of replaced or forgotten streams, all or those of one name; return the rows by table."""
    rows = Counter[str]()
    with transaction(engine) as connection:
        ids = list(connection.scalars(_ENDED, {"vhost": vhost, "name": name}))
        # Without a tail, a recorder that was suspended for longer than its lease cannot commit any more.
        connection.execute(_CLOSE_TAILS, {"ids": ids})
        spans = connection.execute(_SPANS, {"ids": ids}).all()
    if not ids:
        return rows
    for stream_id, start, stop in spans:
        rows["relationships"] += _delete_span(engine, stream_id, start, stop, batch_rows)
    of_streams = "stream_id = ANY (:ids::integer[])"
    # Also rows outside the coverage.
    for table in ("relationships", *DERIVED):
        rows[table] += delete_all(engine, table, of_streams, batch_rows, ids=ids)
    # Last: a repetition needs its spans.
    rows["coverage"] += delete_all(engine, "coverage", f"{of_streams} AND NOT is_tail", batch_rows, ids=ids)
    # After the rows: a group with rows still has messages.
    rows["group_states"] = prune_groups(engine, {}, batch_rows)
    with transaction(engine) as connection:
        rows["streams"] = connection.execute(_DELETE_FORGOTTEN, {"ids": ids, "state": FORGOTTEN}).rowcount
    return +rows


def _delete_span(engine: sa.Engine, stream_id: int, start: int, stop: int, batch_rows: int) -> int:
    """Delete a stream's rows of offsets [start, stop), window by window, and return how many.

    Without windows, the BRIN index would lead every batch to the same pages, even to emptied ones. With windows, each
    page is read about once. A window grows after few deleted rows, and shrinks after many.
    """
    window = f"{_OF_STREAM} AND stream_offset >= :start::bigint AND stream_offset < :end::bigint"
    width, rows = batch_rows, 0
    while start < stop:
        end = min(stop, start + width)
        deleted = delete_batch(engine, "relationships", window, batch_rows, stream_id=stream_id, start=start, end=end)
        rows += deleted
        if deleted >= batch_rows:
            width = max(1, width // 2)  # There may be more in this window.
            continue
        start = end
        if deleted < batch_rows // 4:
            width *= 2
    return rows


# --- groups without messages ------------------------------------------------------------------------------------------

_IS_GONE: Final = """
    group_states.state IN ('open', 'done', 'dead')
    AND (EXISTS (
            SELECT FROM unnest(:stream_ids::integer[], :firsts::bigint[]) AS floor(stream_id, first)
            WHERE floor.stream_id = group_states.stream_id AND floor.first > group_states.first_offset)
        OR group_states.stream_id IN (SELECT stream_id FROM relatum.streams WHERE replaced_at IS NOT NULL))
    AND NOT EXISTS (
        SELECT FROM relatum.relationships
        WHERE key_id = (SELECT key_id FROM relatum.keys WHERE name = :key::text AND removed_at IS NULL)
            AND value >= (group_states.group_id || '|') COLLATE "C"
            AND value < (group_states.group_id || '}') COLLATE "C")"""
"""Whether a group's first message is gone, and the table has no row of the group.

Excludes ready and claimed groups: their consumer detects that the messages are gone.
"""


def prune_groups(engine: sa.Engine, floors: Mapping[int, int], batch_rows: int) -> int:
    """Delete the states of groups without retained messages, and return how many.

    An acknowledged group is kept while the table has a row of it, so that a late duplicate does not open it again, and
    while its first message may be recorded again.

    `floors`: The first retained offsets, by stream id.
    """
    wanted = {"stream_ids": list(floors), "firsts": list(floors.values()), "key": GROUP_KEY.name}
    return delete_all(engine, "group_states", _IS_GONE, batch_rows, **wanted)


# --- everything -------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class PruneReport:
    """The numbers of rows deleted, by stream.

    "" counts rows of replaced and forgotten streams, of removed keys and of groups, and old receipts.
    `failed` holds the streams whose first retained offset is unknown and those of another broker, with the errors: no
    row of these was deleted.
    """

    rows: Counter[str] = field(default_factory=Counter)
    failed: dict[str, RelatumError] = field(default_factory=dict)

    @property
    def total(self) -> int:
        """The number of rows deleted."""
        return self.rows.total()


def prune(
    broker: str | Broker,
    database: AnyDatabase,
    names: Sequence[str] | None = None,
    *,
    batch_rows: int = BATCH_ROWS,
) -> PruneReport:
    """Delete rows of messages that no longer exist, in bounded transactions. Lookups stay correct throughout.

    Args:
        broker: The broker's URL, or a `Broker`.
        database: PostgreSQL's URL, or a `Database`.
        names: Streams and super streams. None (default): all recorded streams; also deletes all rows of replaced and
            forgotten streams and of removed keys, and old receipts.
        batch_rows: Maximum rows deleted in one transaction. Default: 10,000.

    Returns:
        The numbers of rows deleted. The report names streams that cannot be read or were recorded from another broker;
        the others are pruned.

    Raises:
        StreamNotFound: no stream of a given name is recorded; nothing was deleted.
        BrokerUnavailable, DatabaseUnavailable: some rows may have been deleted; safe to repeat.
    """
    if names is not None:
        names = checked_names("names", names)
    checked_count("batch_rows", batch_rows)
    address = BrokerAddress.of(broker)
    report = PruneReport()
    with as_engine(database) as engine, StreamReader.open(address) as reader:
        with transaction(engine) as connection:
            check_recorded(connection, address.vhost, names or ())
            known = {each.stream_id: each for each in streams_named(connection, address.vhost, names)}
            # Skip streams without a recorded message: nothing shows whether they were declared again.
            recorded = {row.stream_id for row in coverage_of(connection, list(known)) if row.position}
        chosen = [each for each in known.values() if each.stream_id in recorded]
        # Also if it is unknown now whether these streams are this broker's.
        report.failed |= errors_of_others(engine, reader, chosen)
        found = {each: _first_retained(reader, each, report) for each in chosen if each.name not in report.failed}
        floors = {stream.stream_id: first for stream, first in found.items() if first is not None}
        with transaction(engine) as connection:
            retain_from(connection, floors)
        # First drop parts without retained rows. Rows of dropped messages in other parts are deleted after that.
        for stream_id, rows in drop_parts(engine).items():
            report.rows[known[stream_id].name if stream_id in known else ""] += rows
        for stream, first in found.items():
            if first is not None:
                report.rows[stream.name] += sum(prune_expired(engine, stream, batch_rows))
        if names is None:
            # Also completes a killed `forget`.
            removed = "key_id IN (SELECT key_id FROM relatum.keys WHERE removed_at IS NOT NULL)"
            report.rows[""] += delete_ended(engine, batch_rows).total()
            report.rows[""] += delete_all(engine, "relationships", removed, batch_rows)
            report.rows[""] += sum(prune_receipts(engine, batch_rows))
        # After the rows: a group with rows still has messages.
        report.rows[""] += prune_groups(engine, floors, batch_rows)
    report.rows = +report.rows
    return report


def _first_retained(reader: StreamReader, stream: StreamRow, report: PruneReport) -> int | None:
    """Return the first offset that a stream retains; None if it is empty or cannot be read."""
    found = bounds_or_error(reader, stream.name)
    if isinstance(found, StreamBounds):
        if found.is_proven:
            return found.first
        # A replica may have dropped messages that the leader retains.
        message = (
            f"the leader of the stream {stream.name!r} is unreachable, so its first offset is unknown: retry later"
        )
        found = StreamUnavailable(message, stream=stream.name)
    # Keep the rows of a missing stream: if it is declared again, the recorder detects whether it is the same.
    if not isinstance(found, StreamNotFound):
        report.failed[stream.name] = found
    return None
