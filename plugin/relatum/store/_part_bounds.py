"""Conditions that leave out the parts of `relationships` which cannot hold what is sought: see docs/adr/0023.

What a closed part holds was written down when it was closed, and nothing is added to it. A condition is of one
statement with the rows, so of one snapshot with them: it leaves out nothing that is there. PostgreSQL evaluates it
before it asks an index; values in the order of time, as group ids and UUIDs of version 7, are in one or two parts.
"""

from typing import Any, Final

import sqlalchemy as sa

from relatum.store._tables import part_keys, part_streams, relationships, table_parts

_FIRST: Final[Any] = sa.literal_column("0")


def may_hold_values(key_id: Any, low: Any, high: Any) -> sa.ColumnElement[bool]:
    """Whether a part may have rows of a key with values from one to another, both included."""
    return _open_or(part_keys, part_keys.c.key_id == key_id, part_keys.c.low <= high, part_keys.c.high >= low)


def may_hold_offsets(stream_id: Any, low: Any, high: Any) -> sa.ColumnElement[bool]:
    """Whether a part may have rows of a stream with offsets from one to another, both included."""
    held = part_streams.c
    return _open_or(part_streams, held.stream_id == stream_id, held.first_offset <= high, held.last_offset >= low)


def part_may_hold_values(row: str, key_id: str, low: str, high: str) -> str:
    """The condition of `may_hold_values` as SQL; `row` is the alias of `relationships`, the others are expressions."""
    held = f"FROM relatum.part_keys held WHERE held.key_id = {key_id} AND held.low <= {high} AND held.high >= {low}"
    return part_is_between(row, f"(SELECT min(held.part) {held})", f"(SELECT max(held.part) {held})")


def part_may_hold_offsets(row: str, stream_id: str, low: str, high: str) -> str:
    """The condition of `may_hold_offsets` as SQL."""
    among = f"held.stream_id = {stream_id} AND held.first_offset <= {high} AND held.last_offset >= {low}"
    held = f"FROM relatum.part_streams held WHERE {among}"
    return part_is_between(row, f"(SELECT min(held.part) {held})", f"(SELECT max(held.part) {held})")


def part_is_between(row: str, first: str, last: str) -> str:
    """SQL: whether a row's part is not closed, or lies between two closed ones, both included."""
    is_open = "(SELECT min(part) FROM relatum.table_parts WHERE part > 0 AND closed_at IS NULL)"
    return f"({row}.part = 0 OR {row}.part >= {is_open} OR {row}.part >= {first} AND {row}.part <= {last})"


def _bound(which: Any, table: sa.Table, *conditions: sa.ColumnElement[bool]) -> Any:
    return sa.select(which(table.c.part)).where(*conditions).correlate_except(table).scalar_subquery()


def _open_or(of: sa.Table, *holds: sa.ColumnElement[bool]) -> sa.ColumnElement[bool]:
    """Those that are not closed, and all from the first to the last closed one that holds it."""
    first, last = _bound(sa.func.min, of, *holds), _bound(sa.func.max, of, *holds)
    part = relationships.c.part
    is_open = _bound(sa.func.min, table_parts, table_parts.c.part > _FIRST, table_parts.c.closed_at.is_(None))
    return sa.or_(part == _FIRST, part >= is_open, sa.and_(part >= first, part <= last))
