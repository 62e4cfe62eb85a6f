"""The parts of `relationships`: made ahead of time, filled one after the other, made compact, dropped whole.

One index over all rows grows past what memory holds, and each row then goes to a page of its own on the disk. A part's
index does not. See docs/adr/0023.

What changes the schema is done by functions in the database, with its owner's rights (`relatum_migrations`): a
recorder may write rows and nothing else. Any number of processes may do this at the same time.
"""

from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

import sqlalchemy as sa

from relatum.store._arrays import array, arrays
from relatum.store._connection import patient
from relatum.store._rows import copy_into
from relatum.store._tables import part_streams, streams, table_parts
from relatum.store._translation import translated_errors

PART_BYTES: Final = 240 << 20
"""Bytes of rows after which the next part is begun, at least: 3,500,000 rows of short values. Their index is as large,
twice PostgreSQL's memory as it comes: a row costs a third more then than in a part that was just begun, and twice as
much at 320 MiB."""

PARTS: Final = 30
"""Parts a table that grows has, about: of a larger table each is larger. A look-up asks each of them."""

UNKNOWN_BYTES: Final = 1 << 20
"""Bytes of rows that PostgreSQL may read through where it should use an index: half a millisecond."""

KNOWN_TIMES: Final = 4
"""How much larger than when it was analysed a part may be: ten times are enough for one."""

KEPT_SHARE: Final = 0.25
"""Up to which share of a part is rewritten so that the rest can go."""

CLOSING_S: Final = 21_600.0
"""Seconds that closing a part may take: its index is built anew, at some 300,000 rows a second, and a part of a table
of 100,000,000,000 rows has 4,000,000,000. It ends with the component that does it."""

_COLUMNS: Final = "(key_id, value, stream_id, time_us, stream_offset)"
"""As the index has them: lines sorted as text are, but for numbers of other lengths, in its order."""

_FOR_ROWS: Final = (
    sa.select(table_parts.c.part)
    .where(table_parts.c.opened_at.is_not(None), table_parts.c.closed_at.is_(None))
    .order_by(table_parts.c.part.desc())
    .limit(1)
    .with_for_update(read=True, key_share=True)
)
"""Held until the transaction ends: a part whose row is held is not closed. Part 0 is always open."""


class Part(NamedTuple):
    """A part of the table, as it is now.

    `size` is its rows' bytes, without the index, and `known` what they were when it was last analysed. Rows of one that
    is leaving may be in another soon.
    """

    part: int
    is_opened: bool
    is_closed: bool
    is_compact: bool
    size: int
    is_leaving: bool
    known: int


_TABLE: Final = sa.func.to_regclass(sa.func.concat("relatum.relationships_", table_parts.c.part))
_CLASS: Final = sa.table("pg_class", sa.column("oid"), sa.column("relpages", sa.BigInteger))
_KNOWN: Final = sa.select(_CLASS.c.relpages).where(_CLASS.c.oid == _TABLE).scalar_subquery()
_STATE: Final = sa.select(
    table_parts.c.part,
    table_parts.c.opened_at.is_not(None),
    table_parts.c.closed_at.is_not(None),
    table_parts.c.compact_at.is_not(None),
    sa.func.coalesce(sa.func.pg_relation_size(_TABLE), 0),
    table_parts.c.leaving_at.is_not(None),
    sa.func.coalesce(_KNOWN * sa.cast(sa.func.current_setting("block_size"), sa.BigInteger), 0),
).order_by(table_parts.c.part)


def copy_rows(connection: sa.Connection, lines: Iterable[str]) -> None:
    """Write rows into the open part, in the connection's transaction; all of them into one.

    They are written in the order of keys and values. PostgreSQL then comes to each page of the index once, where
    values in no order have it read and write pages again and again that it has no room for in its memory.

    `lines`: Finished lines of COPY's text format, any number in each text: key id, value, stream id, time, offset.
    """
    rows = "".join(lines).split("\n")
    # What is behind the last line's end comes first.
    rows.sort()
    data = "\n".join(rows[1:]).encode()
    if not data:
        return
    part = connection.execute(_FOR_ROWS).scalar_one()
    # Not by the table above: what drops another part has to wait for all that hold that one.
    copy_into(connection, f"relatum.relationships_{part} {_COLUMNS}", data)


def table_parts_of(connection: sa.Connection) -> list[Part]:
    """All parts, oldest first."""
    return [Part(*row) for row in connection.execute(_STATE)]


def turn_parts(engine: sa.Engine, part_bytes: int = PART_BYTES) -> list[Part]:
    """Make the next part where there is none, and begin it where the open one is full; gives the parts.

    The open one is analysed as it grows: a statement that was planned while it was empty would read all of it.

    Args:
        engine: The database.
        part_bytes: Bytes of rows after which the next one is begun, at least.
    """
    with translated_errors(), engine.begin() as connection:
        found = table_parts_of(connection)
        last = max(part.part for part in found if part.is_opened)
        full = max(part_bytes, sum(part.size for part in found) // PARTS)
        if next(part.size for part in found if part.part == last) >= full:
            # By who comes first: another one finds that it is not the last any more.
            begun = sa.update(table_parts).where(table_parts.c.part == last + 1, table_parts.c.opened_at.is_(None))
            connection.execute(begun.values(opened_at=sa.func.now()))
            found = table_parts_of(connection)
    if all(part.is_opened for part in found):
        _call(engine, sa.func.relatum.make_part())
    for part in found:
        if part.is_opened and not part.is_closed and part.size > UNKNOWN_BYTES + KNOWN_TIMES * part.known:
            _call(engine, sa.func.relatum.analyze_part(part.part))
    return found


def close_parts(engine: sa.Engine, found: Iterable[Part]) -> None:
    """Close the parts that others came after, and give each a dense index in place of the one that grew with it.

    A part is read all the time; what deletes rows of it waits while its index is built. One that somebody writes still,
    or reads when the old index is to go, is left to the next call.
    """
    parts = [part for part in found if part.is_opened]
    for part in parts:
        if 0 < part.part < parts[-1].part and not part.is_closed:
            _call(engine, sa.func.relatum.close_part(part.part))
        if part.part > 0 and not part.is_compact:
            _call(engine, sa.func.relatum.finish_part(part.part))


def retain_from(connection: sa.Connection, firsts: Mapping[int, int]) -> None:
    """Say from which offsets on streams retain their messages, by stream id.

    Rows of offsets before are of messages that are gone. A stream that somebody has locked is left out: retention goes
    on, and it is said again.
    """
    first = arrays("first", stream_id=array(firsts, sa.Integer), first=array(firsts.values(), sa.BigInteger))
    before = sa.func.coalesce(streams.c.retained_from, -1)
    free = sa.select(streams.c.stream_id).where(streams.c.stream_id.in_(firsts))
    connection.execute(
        sa.update(streams)
        .where(streams.c.stream_id == first.c.stream_id, before < first.c.first)
        .where(streams.c.stream_id.in_(free.with_for_update(key_share=True, skip_locked=True)))
        .values(retained_from=first.c.first)
    )


_LEAVING: Final = sa.text(
    """
    UPDATE relatum.table_parts SET leaving_at = now() WHERE leaving_at IS NULL AND part = ANY (ARRAY(
      SELECT lying.part FROM relatum.part_streams lying JOIN relatum.table_parts part USING (part)
      LEFT JOIN relatum.streams stream ON stream.stream_id = lying.stream_id AND stream.replaced_at IS NULL
        AND (stream.retained_from IS NULL OR lying.last_offset >= stream.retained_from)
      WHERE part.leaving_at IS NULL
      GROUP BY lying.part
      HAVING sum(row_count) FILTER (WHERE stream.stream_id IS NOT NULL) <= sum(row_count) * :share
    ))
    """
)
_DUE: Final = sa.select(table_parts.c.part).where(
    table_parts.c.emptied_at.is_(None), table_parts.c.leaving_at <= sa.func.now() - sa.text("interval '1 day'")
)


def empty_parts(engine: sa.Engine) -> None:
    """Move the rows that are retained out of parts that hold little else: a stream kept for long keeps no other's rows.

    A part of which at most `KEPT_SHARE` is retained is marked, and emptied a day later: who reads the table by places,
    as Spark does in tasks of different moments, reads such a part by offsets.
    """
    with translated_errors(), engine.begin() as connection:
        connection.execute(_LEAVING, {"share": KEPT_SHARE})
        due = list(connection.scalars(_DUE))
    for part in due:
        _call(engine, sa.func.relatum.empty_part(part))


_LYING: Final = (
    sa.select(part_streams.c.part)
    .join(streams, streams.c.stream_id == part_streams.c.stream_id)
    .where(
        streams.c.replaced_at.is_(None),
        streams.c.retained_from.is_(None) | (part_streams.c.last_offset >= streams.c.retained_from),
    )
)
_GONE: Final = (
    sa.select(table_parts.c.part)
    .where(table_parts.c.closed_at.is_not(None), table_parts.c.part.not_in(_LYING))
    .where(sa.func.coalesce(table_parts.c.emptied_at <= sa.func.now() - sa.text("interval '1 day'"), sa.true()))
    .order_by(table_parts.c.part)
)
_ROWS: Final = sa.select(part_streams.c.stream_id, part_streams.c.row_count)


def drop_parts(engine: sa.Engine) -> dict[int, int]:
    """Drop the parts of which no message is retained: rows by stream id. One that somebody reads is left for later."""
    with translated_errors(), engine.begin() as connection:
        gone = list(connection.scalars(_GONE))
    dropped: dict[int, int] = {}
    for part in gone:
        with translated_errors(), engine.begin() as connection:
            rows = connection.execute(_ROWS.where(part_streams.c.part == part)).all()
            if connection.execute(sa.select(sa.func.relatum.drop_part(part))).scalar_one():
                for stream_id, count in rows:
                    dropped[stream_id] = dropped.get(stream_id, 0) + count
    return dropped


def _call(engine: sa.Engine, function: sa.Function[object]) -> None:
    # Whatever the database's default is: what is written down of a part is of all that was committed into it.
    engine = engine.execution_options(isolation_level="READ COMMITTED")
    with translated_errors(), engine.begin() as connection, patient(connection, CLOSING_S):
        connection.execute(sa.select(function))
