"""Forgets streams: deletes the data derived from them, and keeps primary data.

First, one short transaction marks the rows in `streams` as forgotten: from then on, lookups ignore these streams, and
nothing more can be written for them. Then bounded transactions delete their data, the rows in `streams` last. The next
`forget` of the same name, or `prune`, completes a killed `forget`.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import sqlalchemy as sa

from relatum.common.checks import checked_count, checked_name, checked_names, meant
from relatum.errors import StreamInUse, StreamNotFound
from relatum.recording.overview import row_counts
from relatum.recording.pruning import BATCH_ROWS, DERIVED, delete_ended
from relatum.store.catalog import FORGOTTEN, STREAM_COLUMNS, StreamRow
from relatum.store.database import AnyDatabase, as_engine, sql, transaction
from relatum.store.members import RECORDERS, holders_of

_REASON: Final = sql("""
    SELECT format('contexts or affinity sets of %L are placed in it; retire the partition first', name)
    FROM relatum.super_streams JOIN relatum.super_stream_partitions USING (super_stream_id)
    WHERE vhost = :vhost::text AND stream = :stream::text AND state = 'active'
    UNION ALL
    SELECT format('the collector %L follows it, or has unfinished messages of it; let it finish, then stop it',
        collector.name)
    FROM relatum.collectors AS collector JOIN relatum.collector_sources AS source USING (collector_id)
    WHERE collector.vhost = :vhost::text AND source.stream = :stream::text
        AND (EXISTS (
                SELECT FROM relatum.collector_members AS member
                WHERE member.member_id = source.member_id AND member.lease_expires_at >= clock_timestamp())
            OR EXISTS (
                SELECT FROM relatum.collected_messages AS message
                WHERE message.source_id = source.source_id AND message.finished_at IS NULL))
    UNION ALL
    SELECT format('the group consumer %L reads it by name; remove the consumer first', name)
    FROM relatum.group_consumers
    WHERE vhost = :vhost::text AND streams && :names::text[]
    UNION ALL
    SELECT format('the group consumer %L has unfinished groups that began in it; acknowledge them first', name)
    FROM relatum.group_consumers JOIN relatum.group_states USING (consumer_id)
    WHERE stream_id = ANY (:ids::integer[]) AND state IN ('ready', 'claimed')
    LIMIT 1""")
"""Selects a reason why a stream is needed, as text for users."""


def reason_of(connection: sa.Connection, rows: Sequence[StreamRow]) -> str | None:
    """Return why a stream is still needed and what to do, as text; None if it is not needed."""
    ids = [row.stream_id for row in rows]
    for holder in holders_of(connection, RECORDERS, ids).values():
        return f"the recorder {holder} records it; stop the recorder first"
    names = sorted({name for row in rows for name in (row.name, row.super_stream) if name is not None})
    parameters = {"vhost": rows[0].vhost, "stream": rows[0].name, "names": names, "ids": ids}
    return connection.execute(_REASON, parameters).scalar()


_GENERATIONS: Final = sql(f"""
    SELECT {STREAM_COLUMNS} FROM relatum.streams
    WHERE vhost = :vhost::text ORDER BY stream_id""")

_OF_NAMES: Final = "vhost = :vhost::text AND name = ANY (:names::text[])"

_CLEAR_BROKER: Final = sql(f"UPDATE relatum.streams SET broker_id = NULL WHERE {_OF_NAMES}")

# Recorders skip a locked row. Back-fills and repairs wait for it, and then find the stream forgotten.
_LOCK: Final = sql(f"SELECT FROM relatum.streams WHERE {_OF_NAMES} ORDER BY stream_id FOR UPDATE")

_RETIRE: Final = sql(f"""
    UPDATE relatum.streams
    SET state = :state::text, replaced_at = coalesce(replaced_at, now()), lease_holder = NULL WHERE {_OF_NAMES}""")

_COUNTS: Final = {
    table: sql(f"SELECT count(*) FROM relatum.{table} WHERE stream_id = ANY (:ids::integer[])")
    for table in (*DERIVED, "coverage")
}


@dataclass(frozen=True, slots=True)
class ForgottenStream:
    """A stream that was forgotten, or would be. `rows` counts its rows by table, in a dry run partly estimated.

    `needed` says why the stream cannot be forgotten now, and what to do; None if it can be or was forgotten.
    """

    stream: str
    super_stream: str | None
    rows: Counter[str] = field(default_factory=Counter)
    needed: str | None = None

    @property
    def total(self) -> int:
        """The number of rows in all tables."""
        return self.rows.total()


def forget(
    database: AnyDatabase,
    names: Sequence[str],
    *,
    vhost: str = "/",
    dry_run: bool = False,
    batch_rows: int = BATCH_ROWS,
) -> list[ForgottenStream]:
    """Delete all data recorded from streams, so that no lookup finds it. Queries no broker.

    The streams themselves are not changed. If one is recorded again, its recording starts over. Safe to repeat: another
    call completes one that was killed.

    Args:
        database: PostgreSQL's URL, or a `Database`.
        names: Streams and super streams; a super stream means its recorded partitions.
        vhost: Their virtual host. Default: "/".
        dry_run: Only count the rows that would be deleted, even for streams that are needed. Default: False.
        batch_rows: Maximum rows deleted in one transaction. Default: 10,000.

    Returns:
        The streams with the numbers of rows deleted, ordered by name.

    Raises:
        StreamNotFound: no stream of a given name is recorded; nothing was deleted.
        StreamInUse: a recorder holds a stream, or contexts, affinity sets, a collector or a group consumer need it;
            nothing was deleted.
        DatabaseUnavailable: some rows may have been deleted; safe to repeat.
    """
    names = checked_names("names", names)
    checked_name("vhost", vhost)
    checked_count("batch_rows", batch_rows)
    with as_engine(database) as engine:
        with transaction(engine) as connection:
            found = _generations(connection, vhost, names)
            if dry_run:
                counts = row_counts(connection)
                return [_counted(connection, name, rows, counts) for name, rows in found.items()]
            _retire(connection, vhost, list(found))
        return [
            ForgottenStream(name, rows[-1].super_stream, delete_ended(engine, batch_rows, vhost, name))
            for name, rows in found.items()
        ]


def forget_origin(database: AnyDatabase, names: Sequence[str], *, vhost: str = "/") -> list[str]:
    """Forget which broker streams were recorded from; the next recorder assigns them to its own broker.

    If its streams contain other messages, recording starts over, as for a stream declared again.

    Args:
        database: PostgreSQL's URL, or a `Database`.
        names: Streams and super streams; a super stream means its recorded partitions.
        vhost: Their virtual host. Default: "/".

    Returns:
        The streams' names, in alphabetical order.

    Raises:
        StreamNotFound: no stream of a given name is recorded; nothing was changed.
        DatabaseUnavailable: nothing was changed; safe to repeat.
    """
    names = checked_names("names", names)
    checked_name("vhost", vhost)
    with as_engine(database) as engine, transaction(engine) as connection:
        found = list(_generations(connection, vhost, names))
        connection.execute(_CLEAR_BROKER, {"vhost": vhost, "names": found})
        return found


def _generations(connection: sa.Connection, vhost: str, names: Sequence[str]) -> dict[str, list[StreamRow]]:
    """Return all generations of the named streams, by name, oldest first."""
    rows = [StreamRow(*row) for row in connection.execute(_GENERATIONS, {"vhost": vhost})]
    # All generations of a name are one stream, even if their super streams differ.
    chosen = {row.name for row in rows if row.name in names or row.super_stream in names}
    for name in names:
        if name not in chosen and not any(row.super_stream == name for row in rows):
            hint = meant(name, (each for row in rows for each in (row.name, row.super_stream)))
            what = f"no stream {name!r} is recorded in the virtual host {vhost!r}"
            raise StreamNotFound(f"{what}{hint}", stream=name)
    return {name: [row for row in rows if row.name == name] for name in sorted(chosen)}


def check_free(name: str, needed: str | None) -> None:
    """Raise `StreamInUse` if there is a reason why the stream is needed."""
    if needed is not None:
        raise StreamInUse(f"the stream {name!r} cannot be forgotten: {needed}", stream=name, reason=needed)


def _counted(
    connection: sa.Connection, name: str, rows: Sequence[StreamRow], counts: dict[int, int]
) -> ForgottenStream:
    ids = [row.stream_id for row in rows]
    found = ForgottenStream(name, rows[-1].super_stream, needed=reason_of(connection, rows))
    found.rows["relationships"] = sum(counts.get(stream_id, 0) for stream_id in ids)
    for table, query in _COUNTS.items():
        found.rows[table] = connection.execute(query, {"ids": ids}).scalar_one()
    found.rows["streams"] = len(ids)
    return found


def _retire(connection: sa.Connection, vhost: str, names: Sequence[str]) -> None:
    """Mark streams as forgotten together: a lookup by a super stream's name must not see only some partitions."""
    parameters = {"vhost": vhost, "names": names, "state": FORGOTTEN}
    connection.execute(_LOCK, parameters)
    for name, rows in _generations(connection, vhost, names).items():
        check_free(name, reason_of(connection, rows))
    connection.execute(_RETIRE, parameters)
