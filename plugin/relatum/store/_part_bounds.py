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


def parts_of_value(key_id: Any, value: Any) -> Any:
    """The first and the last closed part that may have rows of a value, as a table to join for each of many values.

    What `may_hold_values` asks twice for each is asked once so. `in_parts` is the condition.
    """
    part, held = part_keys.c.part, part_keys.c
    bounds = sa.select(sa.func.min(part).label("first"), sa.func.max(part).label("last"))
    holds = held.key_id == key_id, held.low <= value, held.high >= value
    return bounds.where(*holds).correlate_except(part_keys).lateral("parts")


def in_parts(parts: Any) -> sa.ColumnElement[bool]:
    """Whether a part is not closed, or one of those of `parts_of_value`, or lies between them."""
    return _open_or_from(parts.c.first, parts.c.last)


def _bound(which: Any, table: sa.Table, *conditions: sa.ColumnElement[bool]) -> Any:
    return sa.select(which(table.c.part)).where(*conditions).correlate_except(table).scalar_subquery()


def _open_or(of: sa.Table, *holds: sa.ColumnElement[bool]) -> sa.ColumnElement[bool]:
    """Those that are not closed, and all from the first to the last closed one that holds it."""
    return _open_or_from(_bound(sa.func.min, of, *holds), _bound(sa.func.max, of, *holds))


def _open_or_from(first: Any, last: Any) -> sa.ColumnElement[bool]:
    part = relationships.c.part
    is_open = _bound(sa.func.min, table_parts, table_parts.c.part > _FIRST, table_parts.c.closed_at.is_(None))
    return sa.or_(part == _FIRST, part >= is_open, sa.and_(part >= first, part <= last))
