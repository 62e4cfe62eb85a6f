"""Forgetting streams: what was derived of them is deleted; what somebody keeps of them for good is not.

First, in one short transaction, a stream's rows in `streams` are taken out of force: from then on no look-up answers
from it, and nobody can write anything more of it. What it left is then deleted in bounded transactions, its rows in
`streams` last. Whoever is killed in between is finished by the next `forget` of that name, or by `prune`.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import sqlalchemy as sa

from relatum.checks import checked_count, checked_name, checked_names, meant
from relatum.errors import StreamInUse, StreamNotFound
from relatum.recording._deleting import BATCH_ROWS, delete_batch, delete_between
from relatum.recording._in_use import reason_of
from relatum.recording._prune_groups import prune_groups
from relatum.recording._row_counts import row_counts
from relatum.store import (
    FORGOTTEN,
    AnyDatabase,
    StreamRow,
    as_engine,
    checkpoints,
    coverage,
    events,
    group_scans,
    group_states,
    receipts,
    relationships,
    skips,
    streams,
    time_blocks,
    translated_errors,
)

_COUNTED: Final = (time_blocks, checkpoints, receipts, skips, events, group_scans, coverage)
"""The tables that are derived from streams, but for the largest."""

_ROWS: Final = [streams.c[name] for name in StreamRow.__dataclass_fields__]


@dataclass(frozen=True, slots=True)
class ForgottenStream:
    """A stream that was forgotten, or would be, and how many rows of it, by table. Estimates in a large table.

    `needed` says why it cannot be forgotten now, and what to do; None where it can be, or was.
    """

    stream: str
    super_stream: str | None
    rows: Counter[str] = field(default_factory=Counter)
    needed: str | None = None

    @property
    def total(self) -> int:
        """All of them."""
        return self.rows.total()


Listener = Callable[[str, int], None]
"""Told of a table, and how many of its rows a transaction deleted."""


def forget(
    database: AnyDatabase,
    names: Sequence[str],
    *,
    vhost: str = "/",
    dry_run: bool = False,
    batch_rows: int = BATCH_ROWS,
    progress: Callable[[ForgottenStream], None] | None = None,
) -> list[ForgottenStream]:
    """Delete all that was recorded of streams: look-ups do not know them any more. No broker is asked.

    The streams themselves are left alone. One that is recorded again begins anew. Safe to repeat; one that was killed
    is finished by repeating it.

    Args:
        database: PostgreSQL's URL, or a `Database`.
        names: Streams and super streams, which stand for their recorded partitions.
        vhost: Their virtual host.
        dry_run: Only say what would be deleted, also of streams that are needed now.
        batch_rows: Rows deleted in one transaction at most.
        progress: Called after each transaction that deleted something.

    Returns:
        What was deleted of each stream, by name.

    Raises:
        StreamNotFound: nothing of that name is recorded; nothing was deleted.
        StreamInUse: a recorder holds its lease, or contexts, affinity sets, a collector or a consumer of groups need
            it; nothing was deleted.
        DatabaseUnavailable: what was deleted before is; safe to repeat.
    """
    names = checked_names("names", names)
    checked_name("vhost", vhost)
    checked_count("batch_rows", batch_rows)
    with as_engine(database) as engine:
        with translated_errors(), engine.begin() as connection:
            found = _generations(connection, vhost, names)
            if dry_run:
                counts = row_counts(connection)
                return [_counted(connection, name, rows, counts) for name, rows in found.items()]
            for name, rows in found.items():
                check_free(name, reason_of(connection, rows))
        done = [ForgottenStream(name, rows[-1].super_stream) for name, rows in found.items()]
        for each in done:
            # All at once, so that no look-up by a super stream's name answers from a part for long.
            _retire(engine, vhost, each.stream)
        for each in done:

            def tell(table: str, rows: int, each: ForgottenStream = each) -> None:
                each.rows[table] += rows
                if progress is not None:
                    progress(each)

            finish_forgotten(engine, tell, batch_rows=batch_rows, name=(vhost, each.stream))
        return done


def forget_origin(database: AnyDatabase, names: Sequence[str], *, vhost: str = "/") -> list[str]:
    """Forget which broker streams were recorded from: the next recorder takes them for its own broker's.

    Where that one has other messages in them, it begins them anew, as it does with one that was declared again.

    Args:
        database: PostgreSQL's URL, or a `Database`.
        names: Streams and super streams, which stand for their recorded partitions.
        vhost: Their virtual host.

    Returns:
        The streams.

    Raises:
        StreamNotFound: nothing of that name is recorded; nothing was changed.
        DatabaseUnavailable: nothing was changed; safe to repeat.
    """
    names = checked_names("names", names)
    checked_name("vhost", vhost)
    with as_engine(database) as engine, translated_errors(), engine.begin() as connection:
        found = list(_generations(connection, vhost, names))
        of_name = (streams.c.vhost == vhost) & streams.c.name.in_(found)
        connection.execute(sa.update(streams).where(of_name).values(broker_id=None))
        return found


def _generations(connection: sa.Connection, vhost: str, names: Iterable[str]) -> dict[str, list[StreamRow]]:
    """All generations of the streams that are meant, by name, oldest first.

    Raises:
        StreamNotFound: there is none of a name.
    """
    found: dict[str, list[StreamRow]] = {}
    for name in names:
        named = (streams.c.name == name) | (streams.c.super_stream == name)
        query = sa.select(streams.c.name).where(streams.c.vhost == vhost, named).distinct()
        found_of_name = sorted(connection.scalars(query))
        if not found_of_name:
            query = sa.select(streams.c.name, streams.c.super_stream).where(streams.c.vhost == vhost)
            hint = meant(name, (each for row in connection.execute(query) for each in row))
            what = f"nothing of a stream {name!r} is recorded in the virtual host {vhost!r}"
            raise StreamNotFound(f"{what}{hint}", stream=name)
        for stream in found_of_name:
            of_name = (streams.c.vhost == vhost) & (streams.c.name == stream)
            rows = connection.execute(sa.select(*_ROWS).where(of_name).order_by(streams.c.stream_id))
            found[stream] = [StreamRow(**row._mapping) for row in rows]
    return dict(sorted(found.items()))


def check_free(name: str, needed: str | None) -> None:
    """Refuse to forget a stream that somebody needs, for the reason that `reason_of` gives."""
    if needed is not None:
        raise StreamInUse(f"the stream {name!r} is not forgotten: {needed}", stream=name, reason=needed)


def _counted(
    connection: sa.Connection, name: str, rows: Sequence[StreamRow], counts: dict[int, int]
) -> ForgottenStream:
    ids = [row.stream_id for row in rows]
    found = ForgottenStream(name, rows[-1].super_stream, needed=reason_of(connection, rows))
    found.rows[relationships.name] = sum(counts.get(stream_id, 0) for stream_id in ids)
    for table in _COUNTED:
        query = sa.select(sa.func.count()).select_from(table).where(table.c.stream_id.in_(ids))
        found.rows[table.name] = connection.execute(query).scalar_one()
    found.rows[streams.name] = len(ids)
    return found


def _retire(engine: sa.Engine, vhost: str, name: str) -> None:
    """Take a stream out of force, once more after making sure that nobody needs it."""
    of_name = (streams.c.vhost == vhost) & (streams.c.name == name)
    with translated_errors(), engine.begin() as connection:
        # Recorders pass over a row that is locked; back-fills and repairs wait, and find it forgotten.
        locked = connection.execute(sa.select(*_ROWS).where(of_name).order_by(streams.c.stream_id).with_for_update())
        check_free(name, reason_of(connection, [StreamRow(**row._mapping) for row in locked]))
        connection.execute(
            sa.update(streams)
            .where(of_name)
            .values(
                state=FORGOTTEN,
                replaced_at=sa.func.coalesce(streams.c.replaced_at, sa.func.now()),
                lease_holder=None,
            )
        )


def finish_forgotten(
    engine: sa.Engine, tell: Listener, *, batch_rows: int = BATCH_ROWS, name: tuple[str, str] | None = None
) -> None:
    """Delete what is left of streams that were forgotten, in bounded transactions.

    Args:
        engine: The database.
        tell: Told of each transaction that deleted something.
        batch_rows: Rows deleted in one transaction at most.
        name: Virtual host and name of the stream; None for all that were forgotten.
    """
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

    def tell_of(table: sa.Table) -> Callable[[int], None]:
        return lambda rows: tell(table.name, rows)

    offset: sa.Column[Any] = relationships.c.stream_offset
    of_stream = relationships.c.stream_id == stream_id
    start, stop = _span(engine, stream_id)
    delete_between(engine, offset, of_stream, (start, stop), batch_rows, tell_of(relationships))
    # Once the coverage is gone, a recorder that was stopped for longer than its lease cannot commit. What it did commit
    # meanwhile is deleted behind it; of the rows it lies behind the span, and before that nothing should be.
    for table in (*_COUNTED, *_COUNTED):
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
