"""Taking rows away whose messages are gone: dropped by retention, of a replaced or forgotten stream, of a removed key.

Many rows are deleted in bounded transactions, so that nobody waits long for a lock or for vacuum.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import sqlalchemy as sa

from relatum.checks import checked_count, checked_names
from relatum.errors import RelatumError, StreamNotFound
from relatum.membership import GROUP_KEY, value_bounds
from relatum.reading import Broker, BrokerAddress, StreamBounds, StreamReader, bounds_or_error
from relatum.store.catalog import FORGOTTEN, StreamRow, check_recorded, streams_named
from relatum.store.coverage import coverage_of
from relatum.store.database import AnyDatabase, as_engine, sql
from relatum.store.parts import drop_parts, retain_from
from relatum.store.translation import translated_errors

BATCH_ROWS: Final = 10_000
"""Rows deleted in one transaction: a fraction of a second."""

DERIVED: Final = ("time_blocks", "checkpoints", "receipts", "skips", "events", "group_scans")
"""The tables that are derived from streams, but for the largest and the coverage."""

Listener = Callable[[str, int], None]
"""Called with a table, and how many of its rows a transaction deleted."""


def delete_batch(engine: sa.Engine, table: str, gone: str, batch_rows: int = BATCH_ROWS, **values: Any) -> int:
    """Delete a bounded number of rows, and return how many; `gone` is a condition, `values` are its parameters."""
    # Rows are named by their places, since no table needs a key of its own. The condition is asked again of the row
    # itself: a range of the coverage may have grown since it was chosen.
    chosen = f"SELECT ctid FROM relatum.{table} WHERE {gone} LIMIT :batch_rows::integer"
    statement = sql(f"DELETE FROM relatum.{table} WHERE ctid = ANY (ARRAY ({chosen})) AND ({gone})")
    with translated_errors(), engine.begin() as connection:
        return connection.execute(statement, {**values, "batch_rows": batch_rows}).rowcount


def delete_all(
    engine: sa.Engine, table: str, gone: str, tell: Listener, batch_rows: int = BATCH_ROWS, **values: Any
) -> None:
    """Delete all such rows of a table, batch by batch."""
    while deleted := delete_batch(engine, table, gone, batch_rows, **values):
        tell(table, deleted)


# --- of messages that retention has dropped ---------------------------------------------------------------------------

_OF_STREAM: Final = "stream_id = :stream_id::integer"

_EXPIRED: Final = (
    ("relationships", f"{_OF_STREAM} AND stream_offset < :first::bigint"),
    ("time_blocks", f"{_OF_STREAM} AND last_offset < :first::bigint"),
    ("checkpoints", f"{_OF_STREAM} AND last_offset < :first::bigint"),
    ("receipts", f"{_OF_STREAM} AND stream_offset < :first::bigint"),
    ("coverage", f"{_OF_STREAM} AND to_offset <= :first::bigint AND NOT is_tail"),
)

_IS_LATE: Final = "recorded_at < now() - interval '1 hour'"
"""Receipts are kept for an hour."""


def prune_expired(
    engine: sa.Engine,
    stream: StreamRow,
    first: int,
    batch_rows: int = BATCH_ROWS,
    *,
    parts: Sequence[int] | None = None,
) -> int:
    """Delete one batch of rows below the first retained offset; 0 where there are none left.

    `parts`: Of `relationships` only in these; None: in all.
    """
    for table, gone in _EXPIRED:
        values: dict[str, Any] = {"stream_id": stream.stream_id, "first": first}
        if table == "relationships" and parts is not None:
            gone, values["parts"] = f"{gone} AND part = ANY (:parts::integer[])", list(parts)
        if deleted := delete_batch(engine, table, gone, batch_rows, **values):
            return deleted
    return 0


def prune_receipts(engine: sa.Engine) -> int:
    """Delete one batch of receipts that are too old for anybody to wait for them."""
    return delete_batch(engine, "receipts", _IS_LATE)


# --- of streams that are not in force ---------------------------------------------------------------------------------

_SPANS: Final = sql("""
    SELECT stream_id, min(from_offset), max(to_offset) FROM relatum.coverage
    WHERE stream_id = ANY (:ids::integer[]) GROUP BY stream_id""")

_REPLACED: Final = sql("SELECT stream_id FROM relatum.streams WHERE replaced_at IS NOT NULL ORDER BY stream_id")

_FORGOTTEN: Final = sql("""
    SELECT stream_id FROM relatum.streams
    WHERE state = :state::text AND (:name::text IS NULL OR vhost = :vhost::text AND name = :name::text)
    ORDER BY stream_id""")

_DELETE_FORGOTTEN: Final = sql("""
    DELETE FROM relatum.streams s WHERE stream_id = ANY (:ids::integer[]) AND state = :state::text
        AND NOT EXISTS (SELECT FROM relatum.group_states g WHERE g.stream_id = s.stream_id)""")
"""A group that has messages in other streams may have begun here: this one row is left to say where."""


def _delete_streams(
    engine: sa.Engine, ids: Sequence[int], tables: Sequence[str], tell: Listener, batch_rows: int
) -> None:
    """Delete what the table, the coverage and some smaller tables have of streams that are not in force any more."""
    if not ids:
        return
    with translated_errors(), engine.begin() as connection:
        spans = connection.execute(_SPANS, {"ids": ids}).all()
    for stream_id, start, stop in spans:
        _delete_span(engine, stream_id, start, stop, tell, batch_rows)
    # Once the coverage is gone, a recorder that was stopped for longer than its lease cannot commit. What it did commit
    # meanwhile is deleted behind it.
    for table in (*tables, "coverage", *tables, "relationships"):
        delete_all(engine, table, "stream_id = ANY (:ids::integer[])", tell, batch_rows, ids=ids)


def _delete_span(engine: sa.Engine, stream_id: int, start: int, stop: int, tell: Listener, batch_rows: int) -> None:
    """Delete a stream's rows from one offset up to before another, window by window.

    An index by blocks would show the same pages for each batch, those that were emptied before among them: a window
    shows each page about once. Windows grow where little lies and shrink where much does.
    """
    among = f"{_OF_STREAM} AND stream_offset >= :start::bigint AND stream_offset < :end::bigint"
    width = batch_rows
    while start < stop:
        end = min(stop, start + width)
        deleted = delete_batch(engine, "relationships", among, batch_rows, stream_id=stream_id, start=start, end=end)
        if deleted:
            tell("relationships", deleted)
        if deleted >= batch_rows:
            width = max(1, width // 2)  # There may be more in this window.
            continue
        start = end
        if deleted < batch_rows // 4:
            width *= 2


def finish_forgotten(
    engine: sa.Engine, tell: Listener, batch_rows: int, vhost: str | None = None, name: str | None = None
) -> None:
    """Delete what is left of streams that were forgotten, or of those of a name, in bounded transactions."""
    with translated_errors(), engine.begin() as connection:
        wanted = {"state": FORGOTTEN, "vhost": vhost, "name": name}
        ids = list(connection.scalars(_FORGOTTEN, wanted))
    if not ids:
        return
    _delete_streams(engine, ids, DERIVED, tell, batch_rows)
    # After the rows, which say of which groups there still is a message.
    for deleted in prune_groups(engine, {}, replaced=True, batch_rows=batch_rows):
        if deleted:
            tell("group_states", deleted)
    with translated_errors(), engine.begin() as connection:
        if deleted := connection.execute(_DELETE_FORGOTTEN, {"ids": ids, "state": FORGOTTEN}).rowcount:
            tell("streams", deleted)


# --- groups of which no message is left -------------------------------------------------------------------------------

_IS_FINAL: Final = "g.state IN ('open', 'done', 'dead')"
"""A group that is ready or claimed stays: whoever gets it learns that its messages are gone."""

_CANDIDATES: Final = sql(f"""
    SELECT g.consumer_id, g.group_id FROM relatum.group_states g
    WHERE (g.consumer_id, g.group_id) > (:consumer_id::integer, :group_id::text) AND {_IS_FINAL}
        AND (EXISTS (
                SELECT FROM unnest(:stream_ids::integer[], :firsts::bigint[]) AS floor(stream_id, first)
                WHERE floor.stream_id = g.stream_id AND floor.first > g.first_offset)
            OR :replaced::boolean
                AND g.stream_id IN (SELECT stream_id FROM relatum.streams WHERE replaced_at IS NOT NULL))
    ORDER BY g.consumer_id, g.group_id LIMIT :most::integer""")
"""Selects groups that began in messages which are gone, page by page."""

# Asked of the rows themselves, which may have changed since they were chosen.
_DELETE_UNNAMED: Final = sql(f"""
    DELETE FROM relatum.group_states g
    USING unnest(:consumer_ids::integer[], :group_ids::text[], :lows::text[], :highs::text[])
        AS chosen(consumer_id, group_id, low, high)
    WHERE g.consumer_id = chosen.consumer_id AND g.group_id = chosen.group_id COLLATE "C" AND {_IS_FINAL}
        AND NOT EXISTS (
            SELECT FROM relatum.relationships
            WHERE key_id = (SELECT key_id FROM relatum.keys WHERE name = :key::text AND removed_at IS NULL)
                AND value >= chosen.low COLLATE "C" AND value < chosen.high COLLATE "C")""")
"""Deletes those of some groups of which the table names no message."""

_DELETE_SCANS: Final = sql("""
    DELETE FROM relatum.group_scans
    WHERE stream_id IN (SELECT stream_id FROM relatum.streams WHERE replaced_at IS NOT NULL)""")


def prune_groups(engine: sa.Engine, floors: Mapping[int, int], *, replaced: bool, batch_rows: int) -> Iterator[int]:
    """Delete the states of groups of which no message is retained, in one pass; gives the rows of each transaction.

    What was acknowledged is kept as long as the table names a message of the group, so that a late duplicate of one
    does not open it again; and as long as its first message may be recorded again.
    """
    if replaced:
        with translated_errors(), engine.begin() as connection:
            deleted = connection.execute(_DELETE_SCANS).rowcount
        yield deleted
    wanted = {"stream_ids": list(floors), "firsts": list(floors.values()), "replaced": replaced, "most": batch_rows}
    after: Mapping[str, Any] | None = {"consumer_id": -1, "group_id": ""}
    while after is not None:
        with translated_errors(), engine.begin() as connection:
            rows = connection.execute(_CANDIDATES, {**wanted, **after}).all()
            after = dict(rows[-1]._mapping) if len(rows) == batch_rows else None
            bounds = [value_bounds(row.group_id) for row in rows]
            chosen = {
                "key": GROUP_KEY.name,
                "consumer_ids": [row.consumer_id for row in rows],
                "group_ids": [row.group_id for row in rows],
                "lows": [low for low, _ in bounds],
                "highs": [high for _, high in bounds],
            }
            deleted = connection.execute(_DELETE_UNNAMED, chosen).rowcount if rows else 0
        yield deleted


# --- all of it --------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class PruneReport:
    """Rows deleted, by stream; "" stands for what belongs to no stream in force.

    `failed` says of which streams it could not be told what they retain, and why: nothing of theirs was deleted.
    """

    rows: Counter[str] = field(default_factory=Counter)
    failed: dict[str, RelatumError] = field(default_factory=dict)

    @property
    def total(self) -> int:
        """All of them."""
        return self.rows.total()


def prune(
    broker: str | Broker,
    database: AnyDatabase,
    names: Sequence[str] | None = None,
    *,
    batch_rows: int = BATCH_ROWS,
) -> PruneReport:
    """Delete rows of messages that are gone, in bounded transactions. Look-ups are right before, during and after.

    Args:
        broker: The broker's URL, or a `Broker`.
        database: PostgreSQL's URL, or a `Database`.
        names: Streams and super streams; None: all that are recorded, and what belongs to none in force.
        batch_rows: Rows deleted in one transaction at most.

    Returns:
        What was deleted. A stream that cannot be read stops no other; the report names it.

    Raises:
        StreamNotFound: nothing of that name is recorded; nothing was deleted.
        BrokerUnavailable, DatabaseUnavailable: what was deleted before is; safe to repeat.
    """
    if names is not None:
        names = checked_names("names", names)
    checked_count("batch_rows", batch_rows)
    address = BrokerAddress.of(broker)
    report = PruneReport()

    def of_none(_table: str, rows: int) -> None:
        report.rows[""] += rows

    with as_engine(database) as engine, StreamReader.open(address) as reader:
        with translated_errors(), engine.begin() as connection:
            check_recorded(connection, address.vhost, names or ())
            known = streams_named(connection, address.vhost, names)
            # Of others the broker is not asked: one that is declared anew is only told by what was recorded before.
            recorded = {
                row.stream_id for row in coverage_of(connection, [each.stream_id for each in known]) if row.position
            }
        found = {each: _first_retained(reader, each.name, report) for each in known if each.stream_id in recorded}
        floors = {stream.stream_id: first for stream, first in found.items() if first is not None}
        with translated_errors(), engine.begin() as connection:
            retain_from(connection, floors)
        # Whole parts first: what is left of closed ones then lies beside rows of messages that are retained.
        names_of = {stream.stream_id: stream.name for stream in found}
        for stream_id, rows in drop_parts(engine).items():
            report.rows[names_of.get(stream_id, "")] += rows
        for stream, first in found.items():
            while first is not None and (deleted := prune_expired(engine, stream, first, batch_rows)):
                report.rows[stream.name] += deleted
        if names is None:
            with translated_errors(), engine.begin() as connection:
                replaced = list(connection.scalars(_REPLACED))
            _delete_streams(engine, replaced, ("time_blocks", "checkpoints"), of_none, batch_rows)
            removed = "key_id IN (SELECT key_id FROM relatum.keys WHERE removed_at IS NOT NULL)"
            delete_all(engine, "relationships", removed, of_none, batch_rows)
            delete_all(engine, "receipts", _IS_LATE, of_none, batch_rows)
        # After the rows, which say of which groups there still is a message.
        for deleted in prune_groups(engine, floors, replaced=names is None, batch_rows=batch_rows):
            report.rows[""] += deleted
        if names is None:
            # What a `forget` that was killed has left.
            finish_forgotten(engine, of_none, batch_rows)
    report.rows = +report.rows
    return report


def _first_retained(reader: StreamReader, stream: str, report: PruneReport) -> int | None:
    """The first offset that a stream retains; None where that cannot be told."""
    found = bounds_or_error(reader, stream)
    if isinstance(found, StreamBounds):
        return found.first
    # Whether one that is not there comes back as the same stream is for the recorder to find out.
    if not isinstance(found, StreamNotFound):
        report.failed[stream] = found
    return None
