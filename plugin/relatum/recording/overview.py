"""An overview of the whole table: the size of each key, the recorders, and how far streams are recorded."""

from collections import Counter
from collections.abc import Sequence
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
"""Up to so many bytes, rows outside closed parts are counted; more rows are sampled."""

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
    SELECT s.name, c.to_offset, c.last_offset, c.last_fingerprint, c.last_chunk_ms
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
    """Return rows by stream: as counted when parts were closed; in other parts counted now, or estimated."""
    rest = [part for part in table_parts_of(connection) if part.is_opened and not part.is_closed]
    counts, _ = counts_by(connection, "stream_id", rest, EXACT_BYTES_MAX)
    for stream_id, count in connection.execute(_CLOSED_ROWS):
        counts[stream_id] += int(count)
    return counts


def counts_by(
    connection: sa.Connection, column: str, parts: Sequence[Part], bytes_max: int
) -> tuple[Counter[int], bool]:
    """Return rows of some parts by the values of a column, and whether they were counted, not estimated from a sample.

    `bytes_max`: Up to so many bytes, rows are counted; otherwise the sample has this size.
    """
    share = min(100.0, 100.0 * bytes_max / max(1, sum(part.size for part in parts)))
    rows = connection.execute(_COUNTS[column, share == 100.0], {"parts": [part.part for part in parts], "share": share})
    return Counter({value: round(count * 100.0 / share) for value, count in rows}), share == 100.0


def bytes_of_a_row(connection: sa.Connection, rows: int) -> float:
    """Return the bytes per row in the table and its indexes; `rows` is the number of all rows."""
    return float(connection.execute(_TABLE_BYTES).scalar_one() or 0) / max(1, rows)


SAMPLE_BYTES_MAX: Final = 64 << 20
"""Up to so many bytes, rows are counted; otherwise a random sample of this size is read."""


@dataclass(frozen=True, slots=True)
class KeySize:
    """The size of one key in the table: its rows, counted or estimated from a sample, and their estimated bytes."""

    definition: KeyDefinition
    rows: int
    bytes: int
    is_exact: bool


@dataclass(frozen=True, slots=True)
class RecorderMember:
    """A recorder that is running, or ran until its lease expired.

    Recorders with the same `name` share their streams. `streams` are those that it holds, by virtual host and name.
    """

    holder: str
    name: str
    is_alive: bool
    lease_expires_at: datetime
    streams: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class RecordedEnd:
    """How far a stream is recorded: its next offset, and the position of the last recorded message, if there is one."""

    stream: str
    next_offset: int
    position: Position | None


def key_sizes(database: AnyDatabase) -> list[KeySize]:
    """Return the size of each key in the table, ordered by name. A large table is sampled, within a second."""
    with as_engine(database, statement_s=STATEMENT_S) as engine, transaction(engine) as connection:
        rows, is_exact = counts_by(connection, "key_id", table_parts_of(connection), SAMPLE_BYTES_MAX)
        of_one = bytes_of_a_row(connection, rows.total())
        return [
            KeySize(each, rows[each.key_id], round(rows[each.key_id] * of_one), is_exact)
            for each in sorted(key_definitions(connection), key=lambda definition: definition.name)
        ]


def recorder_list(database: AnyDatabase) -> list[RecorderMember]:
    """Return the recorders with a lease, valid or expired, and their streams, ordered by name and holder."""
    with as_engine(database, statement_s=STATEMENT_S) as engine, transaction(engine) as connection:
        by_holder: dict[str, list[tuple[str, str]]] = {}
        for holder, vhost, name in connection.execute(_HELD):
            by_holder.setdefault(holder, []).append((vhost, name))
        return [
            RecorderMember(holder, name, is_alive, expires_at, tuple(by_holder.get(holder, ())))
            for holder, name, is_alive, expires_at in connection.execute(_MEMBERS)
        ]


def recorded_ends(database: AnyDatabase, vhost: str, names: Sequence[str]) -> list[RecordedEnd]:
    """Return how far streams are recorded, the most recently recorded ones first; without names, all.

    Raises:
        StreamNotFound: a name is not recorded.
    """
    with as_engine(database, statement_s=STATEMENT_S) as engine, transaction(engine) as connection:
        check_recorded(connection, vhost, names)
        rows = connection.execute(_ENDS, {"vhost": vhost, "names": list(names), "is_all": not names})
        return [
            RecordedEnd(name, next_offset, None if None in last[:2] else Position(*last))
            for name, next_offset, *last in rows
        ]
