"""An overview of the whole table: how much each key takes, which recorders there are, and how far they are."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final

import sqlalchemy as sa

from relatum.keys import KeyDefinition
from relatum.reading import Position
from relatum.store.catalog import check_recorded, key_definitions
from relatum.store.database import STATEMENT_S, AnyDatabase, as_engine, sql, transaction
from relatum.store.parts import Part, table_parts_of

EXACT_BYTES_MAX: Final = 400 << 20
"""Bytes of rows that are not in closed parts, up to which they are counted; where there are more, they are sampled."""

_CLOSED_ROWS: Final = sql("SELECT stream_id, sum(row_count) FROM relatum.part_streams GROUP BY stream_id")

_TABLE_BYTES: Final = sql("SELECT sum(pg_total_relation_size(relid)) FROM pg_partition_tree('relatum.relationships')")

_MEMBERS: Final = sql("""
    SELECT holder, name, lease_expires_at >= clock_timestamp(), lease_expires_at
    FROM relatum.recorder_members
    ORDER BY name, holder""")

_HELD: Final = sql("""
    SELECT lease_holder, vhost, name FROM relatum.streams
    WHERE replaced_at IS NULL AND lease_holder IS NOT NULL
    ORDER BY vhost, name""")

_ENDS: Final = sql("""
    SELECT s.name, s.super_stream, s.stream_id, c.to_offset, c.last_offset, c.last_fingerprint, c.last_chunk_ms
    FROM relatum.streams s JOIN relatum.coverage c ON c.stream_id = s.stream_id AND c.is_tail
    WHERE s.vhost = :vhost::text AND s.replaced_at IS NULL
        AND (:is_all::boolean OR s.name = ANY (:names::text[]) OR s.super_stream = ANY (:names::text[]))
    ORDER BY c.recorded_at DESC, s.name""")


_COUNTS: Final = {
    (column, is_exact): sql(f"""
        SELECT {column}, count(*) FROM relatum.relationships {"" if is_exact else "TABLESAMPLE SYSTEM (:share::real)"}
        WHERE part = ANY (:parts::integer[]) GROUP BY 1""")
    for column in ("stream_id", "key_id")
    for is_exact in (True, False)
}


def row_counts(connection: sa.Connection) -> Counter[int]:
    """Rows by stream: those of closed parts were counted then, of the others they are counted now, or estimated."""
    rest = [part for part in table_parts_of(connection) if part.is_opened and not part.is_closed]
    counts, _ = counts_by(connection, "stream_id", rest, EXACT_BYTES_MAX)
    for stream_id, count in connection.execute(_CLOSED_ROWS):
        counts[stream_id] += int(count)
    return counts


def counts_by(
    connection: sa.Connection, column: str, parts: Sequence[Part], bytes_max: int
) -> tuple[Counter[int], bool]:
    """Rows of some parts by the values of a column, and whether they were counted, or estimated from a sample.

    `bytes_max`: Bytes of rows up to which they are counted; where there are more, so many are looked at.
    """
    share = min(100.0, 100.0 * bytes_max / max(1, sum(part.size for part in parts)))
    rows = connection.execute(_COUNTS[column, share == 100.0], {"parts": [part.part for part in parts], "share": share})
    return Counter({value: round(count * 100.0 / share) for value, count in rows}), share == 100.0


def bytes_of_a_row(connection: sa.Connection, rows: int) -> float:
    """What each of so many rows, all there are, takes in the table and its indexes."""
    return float(connection.execute(_TABLE_BYTES).scalar_one() or 0) / max(1, rows)


SAMPLE_BYTES_MAX: Final = 64 << 20
"""Bytes of rows up to which they are counted; where there are more, so many are looked at, wherever they lie."""


@dataclass(frozen=True, slots=True)
class KeySize:
    """What the table holds of one key.

    Attributes:
        definition: The key.
        rows: Its rows, of all streams.
        bytes: What they take in the table and its index, an estimate.
        is_exact: Whether the rows were counted; else they are estimated from a sample.
    """

    definition: KeyDefinition
    rows: int
    bytes: int
    is_exact: bool


@dataclass(frozen=True, slots=True)
class RecorderMember:
    """A recorder that is up, or was until its lease ran out.

    Attributes:
        holder: Its own name, with host and process.
        name: Recorders of one name share their streams.
        is_alive: Whether its lease holds.
        lease_expires_at: Until when.
        streams: The streams that it holds, by virtual host and name.
    """

    holder: str
    name: str
    is_alive: bool
    lease_expires_at: datetime
    streams: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class RecordedEnd:
    """How far a stream is recorded.

    Attributes:
        stream: Its name.
        super_stream: That of which it is a partition; None for none.
        stream_id: Another one as soon as the stream was declared anew.
        next_offset: What lies before it is recorded.
        position: The last message recorded; None where there was none.
    """

    stream: str
    super_stream: str | None
    stream_id: int
    next_offset: int
    position: Position | None


def key_sizes(database: AnyDatabase) -> list[KeySize]:
    """How much of the table each key takes, by name. A large table is sampled: it takes a second at most.

    Raises:
        DatabaseUnavailable: safe to repeat.
    """
    with as_engine(database, statement_s=STATEMENT_S) as engine, transaction(engine) as connection:
        rows, is_exact = counts_by(connection, "key_id", table_parts_of(connection), SAMPLE_BYTES_MAX)
        of_one = bytes_of_a_row(connection, rows.total())
        return [
            KeySize(each, rows[each.key_id], round(rows[each.key_id] * of_one), is_exact)
            for each in sorted(key_definitions(connection), key=lambda definition: definition.name)
        ]


def recorder_list(database: AnyDatabase) -> list[RecorderMember]:
    """The recorders that have a lease, or had one until lately, with what they hold; by name and holder.

    Raises:
        DatabaseUnavailable: safe to repeat.
    """
    with as_engine(database, statement_s=STATEMENT_S) as engine, transaction(engine) as connection:
        by_holder: dict[str, list[tuple[str, str]]] = {}
        for holder, vhost, name in connection.execute(_HELD):
            by_holder.setdefault(holder, []).append((vhost, name))
        return [
            RecorderMember(holder, name, is_alive, expires_at, tuple(by_holder.get(holder, ())))
            for holder, name, is_alive, expires_at in connection.execute(_MEMBERS)
        ]


def recorded_ends(
    database: AnyDatabase, vhost: str, names: Iterable[str] = (), *, check: bool = False
) -> list[RecordedEnd]:
    """How far streams are recorded, those first of which something was recorded last.

    Args:
        database: PostgreSQL's URL, or a `Database`.
        vhost: Their virtual host.
        names: Streams and super streams; none for all.
        check: Whether each name must be recorded.

    Raises:
        StreamNotFound: `check`, and one is not.
        DatabaseUnavailable: safe to repeat.
    """
    wanted = list(names)
    with as_engine(database, statement_s=STATEMENT_S) as engine, transaction(engine) as connection:
        if check:
            check_recorded(connection, vhost, wanted)
        rows = connection.execute(_ENDS, {"vhost": vhost, "names": wanted, "is_all": not wanted})
        return [
            RecordedEnd(name, super_stream, stream_id, next_offset, None if None in last[:2] else Position(*last))
            for name, super_stream, stream_id, next_offset, *last in rows
        ]
