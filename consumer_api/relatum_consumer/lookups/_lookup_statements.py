"""The statements of look-ups: built with SQLAlchemy, compiled to text once each, parameters bound.

The text goes to the driver as it is. Building it anew for each look-up, or letting the engine find it in its cache of
compiled statements, takes as long as the index probe itself.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final, Literal

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql

from relatum.store import (
    KEYS_IN_FORCE,
    RECORDERS,
    arrays,
    brokers,
    compiled,
    coverage,
    may_hold_values,
    relationships,
    streams,
    time_blocks,
)

Order = Literal["oldest", "newest", "offset"]
Direction = Literal["after", "before"]

WIDTH_CLASSES: Final = tuple(range(31))
"""All width classes of time blocks: 4**30 microseconds span more than the years 1 to 9999."""

WIDTHS_US: Final = tuple(4**width_class for width_class in WIDTH_CLASSES)
"""The widest block of each class, in microseconds."""

BLOCK_PAGE: Final = 16
"""Blocks asked for at once beyond those that hold the moment itself; one is nearly always enough."""

FEW_STREAMS: Final = 4
"""Streams up to which each is asked for a value, in each part of the table; of more, those are found that have it."""


_VHOST: Final = sa.bindparam("vhost", type_=sa.Text)
_STREAM_ID: Final = sa.bindparam("stream_id", type_=sa.Integer)


def big(name: str) -> sa.BindParameter[int]:
    return sa.bindparam(name, type_=sa.BigInteger)


_T: Final = big("t")
_U: Final = big("u")
_O: Final = big("o")
_FLOOR: Final = big("floor")
_PAGE: Final[Any] = sa.literal_column(str(BLOCK_PAGE))
_BY_ITSELF: Final[Any] = sa.literal_column("0")
"""As the offset of a subquery, keeps PostgreSQL from joining it in another way than class by class."""


# --- the catalog ------------------------------------------------------------------------------------------


@lru_cache
def definitions() -> str:
    """Key definitions in force, as `definitions_of` takes them."""
    return compiled(KEYS_IN_FORCE)


@lru_cache(maxsize=512)
def present_streams(names: int | None) -> str:
    """Present generations of the streams meant, each with what a `PresentStream` has."""
    columns = [streams.c.stream_id, streams.c.name, streams.c.super_stream, streams.c.record_time]
    with_broker = streams.outerjoin(brokers, brokers.c.broker_id == streams.c.broker_id)
    found = sa.select(*columns, streams.c.broker_id, brokers.c.cluster_name).select_from(with_broker)
    return compiled(found.where(*meant_streams(names)).order_by(streams.c.name))


@lru_cache
def attended() -> str:
    """Those of the streams of these names that some process records now: their names."""
    names = sa.bindparam("streams", type_=postgresql.ARRAY(sa.Text))
    statement = sa.select(streams.c.name).where(
        streams.c.vhost == _VHOST, streams.c.name == sa.any_(names), streams.c.replaced_at.is_(None)
    )
    return compiled(statement.where(sa.text(RECORDERS.is_held)))


@lru_cache
def other_vhosts() -> str:
    """Virtual hosts other than `vhost` that have recorded streams: name, number of streams; a few at most."""
    statement = sa.select(streams.c.vhost, sa.func.count()).where(
        streams.c.vhost != _VHOST, streams.c.replaced_at.is_(None)
    )
    return compiled(statement.group_by(streams.c.vhost).order_by(streams.c.vhost).limit(sa.literal_column("5")))


COVERAGE_COLUMNS: Final = (
    "coverage_id",
    "stream_id",
    "from_offset",
    "to_offset",
    "key_ids",
    "with_time",
    "kind",
    "is_tail",
    "last_offset",
    "last_fingerprint",
    "last_chunk_ms",
    "recorded_at",
    "over_amqp",
)


@lru_cache
def coverage_rows() -> str:
    """Every range of the streams `stream_ids`, in the order of `COVERAGE_COLUMNS`."""
    ids = sa.bindparam("stream_ids", type_=postgresql.ARRAY(sa.Integer))
    statement = sa.select(*(coverage.c[name] for name in COVERAGE_COLUMNS)).where(coverage.c.stream_id == sa.any_(ids))
    return compiled(statement.order_by(coverage.c.stream_id, coverage.c.from_offset))


# --- by key -----------------------------------------------------------------------------------------------


def meant_streams(names: int | None) -> list[sa.ColumnElement[bool]]:
    """The streams meant: of this virtual host, in their present generation, and, if named, of those names."""
    conditions = [streams.c.vhost == _VHOST, streams.c.replaced_at.is_(None)]
    if names is not None:
        given = [sa.bindparam(f"name_{n}", type_=sa.Text) for n in range(names)]
        conditions.append(sa.or_(*(streams.c[column] == name for column in ("name", "super_stream") for name in given)))
    return conditions


def named(names: Sequence[str] | None) -> dict[str, str]:
    """The parameters for names."""
    return {f"name_{n}": name for n, name in enumerate(names or ())}


@lru_cache
def keyed_beside(direction: Direction) -> str:
    """Rows of one key value in one stream next to (`t`, `o`) in the order of (time, offset): offset, time."""
    rows = relationships.c
    place, at = sa.tuple_(rows.time_us, rows.stream_offset), sa.tuple_(_T, _O)
    after = direction == "after"
    order = (rows.time_us, rows.stream_offset) if after else (rows.time_us.desc(), rows.stream_offset.desc())
    statement = _one_value().where(place > at if after else place < at, rows.stream_offset >= _FLOOR)
    return compiled(statement.order_by(*order).limit(big("limit")))


@lru_cache
def keyed_between() -> str:
    """Rows of one key value in one stream with times from `low` to `high`, both included: offset, time."""
    rows = relationships.c
    statement = _one_value().where(rows.time_us >= big("low"), rows.time_us <= big("high"))
    return compiled(statement.order_by(rows.time_us, rows.stream_offset).limit(big("limit")))


def _one_value() -> sa.Select[Any]:
    rows = relationships.c
    key_id, value = sa.bindparam("key_id", type_=sa.SmallInteger), sa.bindparam("value", type_=sa.Text)
    return sa.select(rows.stream_offset, rows.time_us).where(
        rows.key_id == key_id,
        rows.value == value,
        rows.stream_id == _STREAM_ID,
        may_hold_values(key_id, value, value),
    )


# --- by time ----------------------------------------------------------------------------------------------
#
# A block of class c spans at most 4**c microseconds, so one that holds the moment t begins after t - 4**c: each class
# is one short range of the index `time_blocks_lookup`.

_BLOCK: Final = [time_blocks.c[name] for name in ("min_us", "max_us", "first_offset", "last_offset")]


def _classes() -> Any:
    classes = sa.bindparam("classes", type_=postgresql.ARRAY(sa.SmallInteger))
    return arrays("classes", width_class=classes, width=sa.BigInteger)


def _in_class(blocks: Any, classes: Any, stream_id: Any = _STREAM_ID) -> list[sa.ColumnElement[bool]]:
    return [
        blocks.stream_id == stream_id,
        blocks.width_class == classes.c.width_class,
        blocks.last_offset >= _FLOOR,
    ]


@lru_cache
def blocks_between() -> str:
    """Blocks of streams that have times between `low` and `high`, both included: the stream's number, and the block."""
    of = arrays("of", stream_id=sa.Integer)
    found = _reaching(big("low"), big("high"), of)
    return compiled(found.order_by(sa.text("stream_id"), sa.text("first_offset"), sa.text("last_offset")))


@lru_cache
def blocks_page() -> str:
    """The first `blocks_max` blocks of a stream that have times between `low` and `high`, both included, by offsets."""
    found = _reaching(big("low"), big("high"))
    found = found.order_by(sa.text("first_offset"), sa.text("last_offset"))
    return compiled(found.limit(big("blocks_max")))


@lru_cache
def blocks_beside(direction: Direction) -> str:
    """Blocks that hold the moment `t`, and the first page of those beyond it, in no order."""
    beyond = _following() if direction == "after" else _preceding()
    return compiled(sa.union_all(_reaching(_T, _T), beyond))


@lru_cache
def blocks_beyond(direction: Direction) -> str:
    """The next page of blocks beyond `t`, from the place (`u`, `o`) on in their order, in no order.

    A page is not empty while there are any, has no gap, and at most `BLOCK_PAGE` blocks.
    """
    return compiled(_following() if direction == "after" else _preceding())


def _reaching(low: Any, high: Any, of: Any = None) -> sa.Select[Any]:
    """Blocks that reach into a span of time, of one stream, or of those in a table, whose numbers come first."""
    classes, blocks = _classes(), time_blocks.c
    inner = (
        sa.select(*_BLOCK)
        .where(
            *_in_class(blocks, classes, _STREAM_ID if of is None else of.c.stream_id),
            blocks.min_us >= low - classes.c.width,
            blocks.min_us <= high,
            blocks.max_us >= low,
        )
        .offset(_BY_ITSELF)
        .lateral("reaching")
    )
    if of is None:
        return sa.select(*inner.c).select_from(classes.join(inner, sa.true()))
    held = of.join(classes, sa.true()).join(inner, sa.true())
    return sa.select(of.c.stream_id, *inner.c).select_from(held)


def _following() -> sa.Select[Any]:
    """The first blocks that begin after `t`, by (begin, first offset), beyond the place (`u`, `o`) in that order."""
    classes, blocks = _classes(), time_blocks.c
    inner = (
        sa.select(*_BLOCK)
        .where(
            *_in_class(blocks, classes),
            blocks.min_us > _T,
            sa.tuple_(blocks.min_us, blocks.first_offset) > sa.tuple_(_U, _O),
        )
        .order_by(blocks.min_us, blocks.first_offset)
        .limit(_PAGE)
        .lateral("following")
    )
    return _page(sa.select(*inner.c).select_from(classes.join(inner, sa.true())), inner.c.min_us, inner.c.first_offset)


def _preceding() -> sa.Select[Any]:
    """The last blocks that end before `t`, by (end, last offset) downwards, beyond the place (`u`, `o`) in that order.

    The index has the blocks' beginnings. One that ends at or after some end began after that end minus its class's
    width. So: of each class the block that begins last; the latest of their ends; and all blocks that end no earlier,
    of which there is at least one. What is not given ends before all that is given, or is cut off by the page's size.
    """
    classes, blocks, last = _classes(), time_blocks.c, time_blocks.alias("last").c
    latest = (
        sa.select(last.max_us.label("ends"))
        .where(*_in_class(last, classes), *_ends_beyond(last))
        .order_by(last.min_us.desc())
        .limit(sa.literal_column("1"))
        .lateral("latest")
    )
    begun = (
        sa.select(classes.c.width_class, classes.c.width, latest.c.ends)
        .select_from(classes.join(latest, sa.true()))
        .cte("begun")
    )
    ends = sa.select(sa.func.max(begun.c.ends)).scalar_subquery()
    inner = (
        sa.select(*_BLOCK)
        .where(
            *_in_class(blocks, begun),
            blocks.min_us >= ends - begun.c.width,
            blocks.max_us >= ends,
            *_ends_beyond(blocks),
        )
        .offset(_BY_ITSELF)
        .lateral("preceding")
    )
    found = sa.select(*inner.c).select_from(begun.join(inner, sa.true()))
    return _page(found, inner.c.max_us.desc(), inner.c.last_offset.desc())


def _ends_beyond(blocks: Any) -> list[sa.ColumnElement[bool]]:
    # That a block begins before it ends is said so that the index, which has the beginnings, has an upper end too.
    return [
        blocks.min_us < _T,
        blocks.min_us <= _U,
        blocks.max_us < _T,
        sa.tuple_(blocks.max_us, blocks.last_offset) < sa.tuple_(_U, _O),
    ]


def _page(found: sa.Select[Any], *order: Any) -> sa.Select[Any]:
    page = found.order_by(*order).limit(_PAGE).subquery("page")
    return sa.select(*page.c)
