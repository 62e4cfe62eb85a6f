"""Taking away what consumers know of groups whose messages are gone."""

from collections.abc import Iterator, Mapping
from typing import Any, Final

import sqlalchemy as sa

from relatum.membership import GROUP_KEY, value_bounds
from relatum.store import array, arrays, group_scans, group_states, keys, relationships, streams, translated_errors

_FINAL: Final = group_states.c.state.in_(["open", "done", "dead"])
"""A group that is ready or claimed stays: whoever gets it learns that its messages are gone."""

_REPLACED: Final = sa.select(streams.c.stream_id).where(streams.c.replaced_at.is_not(None))


def prune_groups(engine: sa.Engine, floors: Mapping[int, int], *, replaced: bool, batch_rows: int) -> Iterator[int]:
    """Delete the states of groups of which no message is retained, in one pass; gives the rows of each transaction.

    What was acknowledged is kept as long as the table names a message of the group, so that a late duplicate of one
    does not open it again; and as long as its first message may be recorded again.
    """
    if replaced:
        with translated_errors(), engine.begin() as connection:
            yield connection.execute(sa.delete(group_scans).where(group_scans.c.stream_id.in_(_REPLACED))).rowcount
    after: tuple[int, str] | None = (-1, "")
    while after is not None:
        with translated_errors(), engine.begin() as connection:
            rows = connection.execute(_candidates(after, floors, replaced=replaced).limit(batch_rows)).all()
            after = tuple(rows[-1]) if len(rows) == batch_rows else None
            yield connection.execute(_unnamed(), _bounds(rows)).rowcount if rows else 0


def _candidates(after: tuple[int, str], floors: Mapping[int, int], *, replaced: bool) -> sa.Select[Any]:
    states = group_states.c
    floor = arrays("floor", stream_id=array(floors, sa.Integer), first=array(floors.values(), sa.BigInteger))
    is_gone: sa.ColumnElement[bool] = sa.exists().where(
        floor.c.stream_id == states.stream_id, floor.c.first > states.first_offset
    )
    if replaced:
        is_gone = is_gone | states.stream_id.in_(_REPLACED)
    place = sa.tuple_(states.consumer_id, states.group_id)
    query = sa.select(states.consumer_id, states.group_id).where(place > sa.tuple_(*after), _FINAL, is_gone)
    return query.order_by(states.consumer_id, states.group_id)


def _bounds(rows: Any) -> dict[str, Any]:
    lows, highs = zip(*(value_bounds(group_id) for _, group_id in rows), strict=True)
    return {
        "consumer_ids": [row.consumer_id for row in rows],
        "group_ids": [row.group_id for row in rows],
        "lows": list(lows),
        "highs": list(highs),
    }


def _unnamed() -> sa.Delete:
    """Delete those groups of which the table names no message; asked of the rows themselves, which may have changed."""
    chosen = arrays("chosen", consumer_id=sa.Integer, group_id=sa.Text, low=sa.Text, high=sa.Text)
    key_ids = sa.select(keys.c.key_id).where(keys.c.name == GROUP_KEY.name, keys.c.removed_at.is_(None))
    named = sa.exists().where(
        relationships.c.key_id == key_ids.scalar_subquery(),
        relationships.c.value >= chosen.c.low.collate("C"),
        relationships.c.value < chosen.c.high.collate("C"),
    )
    return sa.delete(group_states).where(
        group_states.c.consumer_id == chosen.c.consumer_id,
        group_states.c.group_id == chosen.c.group_id.collate("C"),
        _FINAL,
        ~named,
    )
