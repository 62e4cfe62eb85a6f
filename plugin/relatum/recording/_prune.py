"""Taking rows away whose messages are gone: dropped by retention, of a replaced stream, of a removed key."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import sqlalchemy as sa

from relatum.checks import checked_count, checked_names
from relatum.errors import RelatumError, StreamNotFound
from relatum.reading import BrokerAddress, StreamBounds, StreamReader, bounds_or_error
from relatum.recording._deleting import BATCH_ROWS, delete_batch
from relatum.recording._forget import finish_forgotten
from relatum.recording._prune_groups import prune_groups
from relatum.store import (
    AnyDatabase,
    StreamRow,
    as_engine,
    check_recorded,
    checkpoints,
    coverage,
    coverage_of,
    drop_parts,
    interval,
    keys,
    receipts,
    relationships,
    retain_from,
    streams,
    streams_named,
    time_blocks,
    translated_errors,
)

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
    age = sa.func.now() - interval(RECEIPTS_S)
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
