"""Taking rows away whose messages are gone: dropped by retention, of a replaced or forgotten stream, of a removed key.

Many rows are deleted in bounded transactions, so that nobody waits long for a lock or for vacuum.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any, Final

import sqlalchemy as sa

from relatum.checks import checked_count, checked_names
from relatum.errors import RelatumError, StreamNotFound
from relatum.membership import GROUP_KEY, value_bounds
from relatum.reading import BrokerAddress, StreamBounds, StreamReader, bounds_or_error
from relatum.store.catalog import FORGOTTEN, StreamRow, check_recorded, streams_named
from relatum.store.coverage import Range, coverage_of
from relatum.store.database import AnyDatabase, as_engine, sql
from relatum.store.parts import drop_parts, retain_from
from relatum.store.tables import (
    checkpoints,
    coverage,
    events,
    group_scans,
    group_states,
    keys,
    receipts,
    relationships,
    skips,
    streams,
    time_blocks,
)
from relatum.store.translation import translated_errors

BATCH_ROWS: Final = 10_000
"""Rows deleted in one transaction: a fraction of a second."""


def delete_batch(engine: sa.Engine, table: sa.Table, gone: sa.ColumnElement[bool], batch_rows: int) -> int:
    """Delete a bounded number of rows. They are named by their places, since no table needs a key of its own."""
    place: sa.ColumnElement[Any] = sa.literal_column("ctid")
    chosen = sa.select(place).select_from(table).where(gone).limit(batch_rows)
    # Asked again of the row itself: a range of the coverage may have grown since it was chosen.
    statement = sa.delete(table).where(place == sa.any_(sa.func.array(chosen.scalar_subquery())), gone)
    with translated_errors(), engine.begin() as connection:
        return connection.execute(statement).rowcount


def delete_between(
    engine: sa.Engine,
    column: sa.Column[int],
    of_stream: sa.ColumnElement[bool],
    span: Range,
    batch_rows: int,
    tell: Callable[[int], None],
) -> None:
    """Delete a stream's rows from one offset up to before another, window by window.

    An index by blocks would show the same pages for each batch, those that were emptied before among them: a window
    shows each page about once. Windows grow where little lies and shrink where much does.
    """
    start, stop = span
    width = batch_rows
    while start < stop:
        end = min(stop, start + width)
        deleted = delete_batch(engine, column.table, of_stream & (column >= start) & (column < end), batch_rows)
        if deleted:
            tell(deleted)
        if deleted >= batch_rows:
            width = max(1, width // 2)  # There may be more in this window.
            continue
        start = end
        if deleted < batch_rows // 4:
            width *= 2


_IS_FINAL: Final = "g.state IN ('open', 'done', 'dead')"
"""A group that is ready or claimed stays: whoever gets it learns that its messages are gone."""


def _candidates(also: str = "") -> sa.TextClause:
    """Groups that began in messages which are gone, page by page."""
    return sql(f"""
    SELECT g.consumer_id, g.group_id FROM relatum.group_states g
    WHERE (g.consumer_id, g.group_id) > (:consumer_id::integer, :group_id::text) AND {_IS_FINAL}
        AND (EXISTS (
            SELECT FROM unnest(:stream_ids::integer[], :firsts::bigint[]) AS floor(stream_id, first)
            WHERE floor.stream_id = g.stream_id AND floor.first > g.first_offset){also})
    ORDER BY g.consumer_id, g.group_id LIMIT :most::integer""")


_EXPIRED: Final = _candidates()
_EXPIRED_OR_REPLACED: Final = _candidates("""
            OR g.stream_id IN (SELECT stream_id FROM relatum.streams WHERE replaced_at IS NOT NULL)""")

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
            yield connection.execute(_DELETE_SCANS).rowcount
    candidates = _EXPIRED_OR_REPLACED if replaced else _EXPIRED
    wanted = {"stream_ids": list(floors), "firsts": list(floors.values()), "most": batch_rows}
    after: Mapping[str, Any] | None = {"consumer_id": -1, "group_id": ""}
    while after is not None:
        with translated_errors(), engine.begin() as connection:
            rows = connection.execute(candidates, {**wanted, **after}).all()
            is_last = len(rows) < batch_rows
            after = None if is_last else {"consumer_id": rows[-1].consumer_id, "group_id": rows[-1].group_id}
            yield connection.execute(_DELETE_UNNAMED, _bounds(rows)).rowcount if rows else 0


def _bounds(rows: Any) -> dict[str, Any]:
    lows, highs = zip(*(value_bounds(group_id) for _, group_id in rows), strict=True)
    return {
        "key": GROUP_KEY.name,
        "consumer_ids": [row.consumer_id for row in rows],
        "group_ids": [row.group_id for row in rows],
        "lows": list(lows),
        "highs": list(highs),
    }


RECEIPTS_S: Final = 3600
"""Seconds a receipt is kept."""


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
    broker: str | BrokerAddress,
    database: AnyDatabase,
    names: Sequence[str] | None = None,
    *,
    stream_url: str | None = None,
    batch_rows: int = BATCH_ROWS,
    progress: Callable[[PruneReport], None] | None = None,
) -> PruneReport:
    """Delete rows of messages that are gone, in bounded transactions. Look-ups are right before, during and after.

    Args:
        broker: The broker's URL or address.
        database: PostgreSQL's URL, or a `Database`.
        names: Streams and super streams; None: all that are recorded, and what belongs to none in force.
        stream_url: The stream protocol's URL, where it cannot be told from the broker's.
        batch_rows: Rows deleted in one transaction at most.
        progress: Called after each transaction.

    Returns:
        What was deleted. A stream that cannot be read stops no other; the report names it.

    Raises:
        StreamNotFound: nothing of that name is recorded; nothing was deleted.
        BrokerUnavailable, DatabaseUnavailable: what was deleted before is; safe to repeat.
    """
    if names is not None:
        names = checked_names("names", names)
    checked_count("batch_rows", batch_rows)
    address = BrokerAddress.of(broker, stream_url)
    report = PruneReport()
    with as_engine(database) as engine, StreamReader.open(address) as reader:
        with translated_errors(), engine.begin() as connection:
            check_recorded(connection, address.vhost, names or ())
            known = streams_named(connection, address.vhost, names)
            # Of others the broker is not asked: one that is declared anew is only told by what was recorded before.
            recorded = {
                row.stream_id for row in coverage_of(connection, [each.stream_id for each in known]) if row.position
            }
            known = [stream for stream in known if stream.stream_id in recorded]
        found = {stream: _first_retained(reader, stream.name, report) for stream in known}
        floors = {stream.stream_id: first for stream, first in found.items() if first is not None}
        with translated_errors(), engine.begin() as connection:
            retain_from(connection, floors)
        # Whole parts first: what is left of closed ones then lies beside rows of messages that are retained.
        names_of = {stream.stream_id: stream.name for stream in known}
        for stream_id, rows in drop_parts(engine).items():
            _tell(report, names_of.get(stream_id, ""), rows, progress)
        for stream, first in found.items():
            while first is not None and (deleted := prune_expired(engine, stream, first, batch_rows)):
                _tell(report, stream.name, deleted, progress)
        if names is None:
            for condition in _orphans():
                while deleted := delete_batch(engine, *condition, batch_rows):
                    _tell(report, "", deleted, progress)
        # After the rows, which say of which groups there still is a message.
        for deleted in prune_groups(engine, floors, replaced=names is None, batch_rows=batch_rows):
            if deleted:
                _tell(report, "", deleted, progress)
        if names is None:
            # What a `forget` that was killed has left.
            finish_forgotten(engine, lambda _, rows: _tell(report, "", rows, progress), batch_rows=batch_rows)
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


def _tell(report: PruneReport, stream: str, rows: int, progress: Callable[[PruneReport], None] | None) -> None:
    report.rows[stream] += rows
    if progress is not None:
        progress(report)


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
    of_parts = sa.true() if parts is None else relationships.c.part.in_(parts)
    for table, gone in (
        (relationships, (relationships.c.stream_offset < first) & of_parts),
        (time_blocks, time_blocks.c.last_offset < first),
        (checkpoints, checkpoints.c.last_offset < first),
        (receipts, receipts.c.stream_offset < first),
        (coverage, (coverage.c.to_offset <= first) & ~coverage.c.is_tail),
    ):
        if deleted := delete_batch(engine, table, (table.c.stream_id == stream.stream_id) & gone, batch_rows):
            return deleted
    return 0


def _orphans() -> list[tuple[sa.Table, sa.ColumnElement[bool]]]:
    """What belongs to replaced streams and removed keys, and receipts nobody asks for any more."""
    replaced = sa.select(streams.c.stream_id).where(streams.c.replaced_at.is_not(None))
    removed = sa.select(keys.c.key_id).where(keys.c.removed_at.is_not(None))
    age = sa.func.now() - timedelta(seconds=RECEIPTS_S)
    of_replaced = [
        (table, table.c.stream_id.in_(replaced)) for table in (relationships, time_blocks, checkpoints, coverage)
    ]
    return [
        *of_replaced,
        (relationships, relationships.c.key_id.in_(removed)),
        (receipts, receipts.c.recorded_at < age),
    ]


def prune_receipts(engine: sa.Engine) -> int:
    """Delete one batch of receipts that are too old for anybody to wait for them."""
    return delete_batch(engine, *_orphans()[-1], BATCH_ROWS)


# --- what a forgotten stream has left ---------------------------------------------------------------------------------

FORGOTTEN_TABLES: Final = (time_blocks, checkpoints, receipts, skips, events, group_scans, coverage)
"""The tables that are derived from streams, but for the largest."""

Listener = Callable[[str, int], None]
"""Told of a table, and how many of its rows a transaction deleted."""


def finish_forgotten(
    engine: sa.Engine, tell: Listener, *, batch_rows: int = BATCH_ROWS, name: tuple[str, str] | None = None
) -> None:
    """Delete what is left of streams that were forgotten, in bounded transactions."""
    mine = streams.c.state == FORGOTTEN
    if name is not None:
        mine &= (streams.c.vhost == name[0]) & (streams.c.name == name[1])
    with translated_errors(), engine.begin() as connection:
        ids = list(connection.scalars(sa.select(streams.c.stream_id).where(mine).order_by(streams.c.stream_id)))
    for stream_id in ids:
        _delete_rows(engine, stream_id, tell, batch_rows)
    if not ids:
        return
    # After the rows, which say of which groups there still is a message.
    for deleted in prune_groups(engine, {}, replaced=True, batch_rows=batch_rows):
        if deleted:
            tell(group_states.name, deleted)
    # A group that has messages in other streams may have begun here: what is left to say where is this one row.
    unnamed = ~sa.exists().where(group_states.c.stream_id == streams.c.stream_id)
    with translated_errors(), engine.begin() as connection:
        gone = sa.delete(streams).where(streams.c.stream_id.in_(ids), streams.c.state == FORGOTTEN, unnamed)
        if deleted := connection.execute(gone).rowcount:
            tell(streams.name, deleted)


def _delete_rows(engine: sa.Engine, stream_id: int, tell: Listener, batch_rows: int) -> None:
    """Delete one generation's rows but the last one, in `streams`."""
    offset: sa.Column[Any] = relationships.c.stream_offset
    of_stream = relationships.c.stream_id == stream_id
    start, stop = _span(engine, stream_id)
    delete_between(engine, offset, of_stream, (start, stop), batch_rows, partial(tell, relationships.name))
    # Once the coverage is gone, a recorder that was stopped for longer than its lease cannot commit. What it did commit
    # meanwhile is deleted behind it; of the rows it lies behind the span, and before that nothing should be.
    for table in (*FORGOTTEN_TABLES, *FORGOTTEN_TABLES):
        while deleted := delete_batch(engine, table, table.c.stream_id == stream_id, batch_rows):
            tell(table.name, deleted)
    beside = of_stream & ((offset >= stop) | (offset < start))
    while deleted := delete_batch(engine, relationships, beside, batch_rows):
        tell(relationships.name, deleted)


def _span(engine: sa.Engine, stream_id: int) -> tuple[int, int]:
    """The offsets that the coverage spans; empty where it is gone already."""
    query = sa.select(sa.func.min(coverage.c.from_offset), sa.func.max(coverage.c.to_offset))
    with translated_errors(), engine.begin() as connection:
        start, stop = connection.execute(query.where(coverage.c.stream_id == stream_id)).one()
    return (0, 0) if start is None else (start, stop)
