"""The parts of `relationships`: created in advance, filled one after the other, made compact, and dropped as a whole.

A single index over all rows would outgrow memory, so that each row would need another page from disk. The index of a
part fits into memory. See docs/adr/0023.

Functions in the database (`relatum_migrations`) change the schema with its owner's rights, so that a recorder needs
only the right to write rows. Any number of processes may call these functions at the same time.

SQL conditions exclude the parts that cannot contain the wanted rows. A part gets no rows after it is closed, and its
ranges are stored then. A condition is in the same statement as the rows, so it sees the same snapshot and never
excludes existing rows. PostgreSQL evaluates the condition before it uses an index. Values in the order of time, such as
group ids and UUIDs of version 7, are in one or two parts.
"""

from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

import sqlalchemy as sa

from relatum.store.connection import patient
from relatum.store.database import sql, transaction
from relatum.store.rows import copy_into

PART_BYTES: Final = 240 << 20
"""Bytes of rows at which the next part may be opened: 3,500,000 rows of short values. Their index has the same size,
twice PostgreSQL's default memory: a row costs a third more than in a new part, and at 320 MiB twice as much."""

PARTS: Final = 30
"""Approximate maximum number of parts, since a lookup may read all of them. A larger table has larger parts."""

UNANALYZED_BYTES: Final = 1 << 20
"""Bytes of rows that may have no statistics. PostgreSQL may scan them instead of using an index: half a millisecond."""

ANALYZE_GROWTH: Final = 4
"""Growth factor after which a part is analysed again: about ten times before the part is full."""

RETAINED_SHARE_MAX: Final = 0.25
"""Maximum share of retained rows in a part that is emptied by moving them to another part."""

CLOSING_S: Final = 21_600.0
"""Maximum seconds to close a part. Its index is rebuilt at about 300,000 rows a second, and a part of a table of
100,000,000,000 rows has 4,000,000,000. If the component that calls it ends, the call ends, too."""

_COLUMNS: Final = "(key_id, value, stream_id, time_us, stream_offset)"
"""The columns in the index's order: lines sorted as text have that order, except for numbers of different lengths."""

_OPEN_PART: Final = sql("""
    SELECT part FROM relatum.table_parts WHERE opened_at IS NOT NULL AND closed_at IS NULL
    ORDER BY part DESC LIMIT 1 FOR KEY SHARE""")
"""Selects and locks the last open part until the transaction ends: a locked part is not closed. Part 0 stays open."""


class Part(NamedTuple):
    """A part of the table.

    `size` is the bytes of its rows, without indexes; `known` is their bytes when the part was last analysed. The rows
    of a part that `is_leaving` may be moved to another part.
    """

    part: int
    is_opened: bool
    is_closed: bool
    is_compact: bool
    size: int
    is_leaving: bool
    known: int


# The part's table, or NULL.
_TABLE: Final = "to_regclass(concat('relatum.relationships_', part))"

_STATE: Final = sql(f"""
    SELECT part, opened_at IS NOT NULL, closed_at IS NOT NULL, compact_at IS NOT NULL,
        coalesce(pg_relation_size({_TABLE}), 0), leaving_at IS NOT NULL,
        coalesce((SELECT relpages FROM pg_class WHERE oid = {_TABLE}) * current_setting('block_size')::bigint, 0)
    FROM relatum.table_parts
    ORDER BY part""")
"""Selects the fields of `Part`, in order."""

_BEGIN: Final = sql("""
    UPDATE relatum.table_parts SET opened_at = now() WHERE part = :part::integer AND opened_at IS NULL""")

_RETAIN_FROM: Final = sql("""
    UPDATE relatum.streams s SET retained_from = retained.first
    FROM unnest(:ids::integer[], :firsts::bigint[]) AS retained(stream_id, first)
    WHERE s.stream_id = retained.stream_id AND coalesce(s.retained_from, -1) < retained.first
        AND s.stream_id IN (
            SELECT stream_id FROM relatum.streams WHERE stream_id = ANY (:ids::integer[])
            FOR NO KEY UPDATE SKIP LOCKED)""")


def copy_rows(connection: sa.Connection, lines: Iterable[str]) -> None:
    """Write rows into the open part, in the connection's transaction.

    The rows are sorted by key and value, so that PostgreSQL visits each page of the index once. With unsorted rows, it
    would read and write pages that do not fit into its memory again and again.

    `lines`: Rows in COPY's text format: key id, value, stream id, time and offset.
    """
    if data := "".join(sorted(lines)).encode():
        part = connection.execute(_OPEN_PART).scalar_one()
        # Not into the parent table: a session that drops another part waits for all sessions that lock the parent.
        copy_into(connection, f"relatum.relationships_{part} {_COLUMNS}", data)


def table_parts_of(connection: sa.Connection) -> list[Part]:
    """Read all parts, oldest first."""
    return [Part(*row) for row in connection.execute(_STATE)]


def advance_parts(engine: sa.Engine, part_bytes: int = PART_BYTES) -> list[Part]:
    """Create the next part if it is missing, and open it if the open part is full; return all parts.

    The open part is analysed as it grows: a statement that was planned while the part was empty would scan all rows.
    """
    with transaction(engine) as connection:
        found = table_parts_of(connection)
        last = max(part.part for part in found if part.is_opened)
        bytes_max = max(part_bytes, sum(part.size for part in found) // PARTS)
        if next(part.size for part in found if part.part == last) >= bytes_max:
            # Only the first process changes the row.
            connection.execute(_BEGIN, {"part": last + 1})
            found = table_parts_of(connection)
    if all(part.is_opened for part in found):
        _call(engine, sa.func.relatum.make_part())
    for part in found:
        if part.is_opened and not part.is_closed and part.size > UNANALYZED_BYTES + ANALYZE_GROWTH * part.known:
            _call(engine, sa.func.relatum.analyze_part(part.part))
    return found


def close_parts(engine: sa.Engine, found: Iterable[Part]) -> None:
    """Close the parts before the last open part, and replace each one's index with a dense index.

    A part stays readable; deletions wait while its index is built. The next call continues with a part that is being
    written, or that is being read when the old index is to be dropped.
    """
    parts = [part for part in found if part.is_opened]
    for part in parts:
        if 0 < part.part < parts[-1].part and not part.is_closed:
            _call(engine, sa.func.relatum.close_part(part.part))
        if part.part > 0 and not part.is_compact:
            _call(engine, sa.func.relatum.finish_part(part.part))


def retain_from(connection: sa.Connection, firsts: Mapping[int, int]) -> None:
    """Store the first retained offset of each stream, by stream id.

    Rows of lower offsets belong to dropped messages. A stream whose row is locked is left to the next call.
    """
    connection.execute(_RETAIN_FROM, {"ids": list(firsts), "firsts": list(firsts.values())})


_LEAVING: Final = sql("""
    UPDATE relatum.table_parts SET leaving_at = now() WHERE leaving_at IS NULL AND part = ANY (ARRAY (
        SELECT of_part.part FROM relatum.part_streams of_part JOIN relatum.table_parts part USING (part)
        LEFT JOIN relatum.streams stream ON stream.stream_id = of_part.stream_id AND stream.replaced_at IS NULL
            AND (stream.retained_from IS NULL OR of_part.last_offset >= stream.retained_from)
        WHERE part.leaving_at IS NULL
        GROUP BY of_part.part
        HAVING sum(row_count) FILTER (WHERE stream.stream_id IS NOT NULL)
            <= sum(row_count) * :share::double precision))""")

_EMPTYABLE: Final = sql("""
    SELECT part FROM relatum.table_parts WHERE emptied_at IS NULL AND leaving_at <= now() - interval '1 day'""")


def empty_parts(engine: sa.Engine) -> None:
    """Move retained rows out of parts that have few: otherwise, a stream with long retention would keep whole parts.

    A part is marked when at most `RETAINED_SHARE_MAX` of its rows are retained, and emptied a day later. Spark's tasks
    read the table by row locations at different moments, except for marked parts, which they read by offsets.
    """
    with transaction(engine) as connection:
        connection.execute(_LEAVING, {"share": RETAINED_SHARE_MAX})
        emptyable = list(connection.scalars(_EMPTYABLE))
    for part in emptyable:
        _call(engine, sa.func.relatum.empty_part(part))


_DROPPABLE: Final = sql("""
    SELECT part FROM relatum.table_parts
    WHERE closed_at IS NOT NULL AND coalesce(emptied_at <= now() - interval '1 day', true) AND part NOT IN (
        SELECT of_part.part FROM relatum.part_streams of_part JOIN relatum.streams s ON s.stream_id = of_part.stream_id
        WHERE s.replaced_at IS NULL AND (s.retained_from IS NULL OR of_part.last_offset >= s.retained_from))
    ORDER BY part""")

_ROWS: Final = sql("SELECT stream_id, row_count FROM relatum.part_streams WHERE part = :part::integer")


def drop_parts(engine: sa.Engine) -> dict[int, int]:
    """Drop parts without retained messages, except parts in use; return the number of dropped rows by stream id."""
    with transaction(engine) as connection:
        droppable = list(connection.scalars(_DROPPABLE))
    dropped: dict[int, int] = {}
    for part in droppable:
        with transaction(engine) as connection:
            rows = connection.execute(_ROWS, {"part": part}).all()
            if connection.execute(sa.select(sa.func.relatum.drop_part(part))).scalar_one():
                for stream_id, count in rows:
                    dropped[stream_id] = dropped.get(stream_id, 0) + count
    return dropped


def _call(engine: sa.Engine, function: sa.Function[object]) -> None:
    with transaction(engine) as connection, patient(connection, CLOSING_S):
        connection.execute(sa.select(function))


# --- conditions that exclude parts


def part_may_hold_values(row: str, key_id: str, low: str, high: str) -> str:
    """SQL: whether a row's part may have rows of a key with values from `low` to `high`, both included.

    `row` is the alias of `relationships`; the other arguments are SQL expressions.
    """
    held = f"FROM relatum.part_keys held WHERE held.key_id = {key_id} AND held.low <= {high} AND held.high >= {low}"
    return part_is_between(row, f"(SELECT min(held.part) {held})", f"(SELECT max(held.part) {held})")


def part_may_hold_offsets(row: str, stream_id: str, low: str, high: str) -> str:
    """SQL: whether a row's part may have rows of a stream with offsets from `low` to `high`, both included."""
    among = f"held.stream_id = {stream_id} AND held.first_offset <= {high} AND held.last_offset >= {low}"
    held = f"FROM relatum.part_streams held WHERE {among}"
    return part_is_between(row, f"(SELECT min(held.part) {held})", f"(SELECT max(held.part) {held})")


def part_is_between(row: str, first: str, last: str) -> str:
    """SQL: whether a row's part is open, or is one of the closed parts from `first` to `last`, both included."""
    is_open = "(SELECT min(part) FROM relatum.table_parts WHERE part > 0 AND closed_at IS NULL)"
    return f"({row}.part = 0 OR {row}.part >= {is_open} OR {row}.part >= {first} AND {row}.part <= {last})"
