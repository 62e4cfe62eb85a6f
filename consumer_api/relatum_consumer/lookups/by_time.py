"""Lookups by time: beside a moment, and around it. What the indexes name is read and checked."""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import Any, Final, Literal, TypeAlias

import sqlalchemy as sa

from relatum.checks import checked_count, checked_name, checked_seconds
from relatum.errors import AccessRefused, InvalidInput, NotFound
from relatum.ids import MessageId
from relatum.limits import INTEGER_MAX, TIME_US_MAX
from relatum.reading import Message
from relatum.store.database import sql
from relatum.store.parts import part_may_hold_values
from relatum_consumer.lookups.answer import Answer
from relatum_consumer.lookups.answering import Find, Found, Gathered, Lost, Row, answered, verified
from relatum_consumer.lookups.arguments import Names, names_of, time_us_of
from relatum_consumer.lookups.by_key import without_values
from relatum_consumer.lookups.catalog import Catalog, PresentStream, Wanted
from relatum_consumer.lookups.consumed import Consumed, in_hand
from relatum_consumer.lookups.limits import ANSWER_MESSAGES_MAX
from relatum_consumer.lookups.proof import Evidence
from relatum_consumer.lookups.time_index import blocks_between, next_by_blocks, read_within
from relatum_consumer.lookups.time_search import Direction, Moment, Nearest, Place, Search, Side, Window, rank, time_of

Beside: TypeAlias = Literal["after", "before", "nearest"]

_SIDES: Final[Mapping[Beside, tuple[Side, ...]]] = {
    "after": (Side("after"),),
    "before": (Side("before"),),
    "nearest": (Side("before", inclusive=True), Side("after")),
}

_READ_AT_ONCE: Final = 1_000
"""Messages of a window that are asked for at once: what there are too many of, or too large, is noticed between."""


def beside(
    catalog: Catalog,
    where: Beside,
    moment: Message | Consumed | datetime,
    stream: str,
    by: str | None,
    *,
    inclusive: bool = False,
    complete: bool,
) -> Answer:
    """The next message on a side of the moment; of two sides the nearer one, and the earlier if equally near."""
    at, message = _moment(moment)
    search = _search(catalog, message, stream, by)
    if isinstance(search, Answer):
        return search
    sides = tuple(Side(side.direction, side.inclusive or inclusive) for side in _SIDES[where])
    return _answered(search, partial(_nearest, search, at, sides), complete=complete)


def window(
    catalog: Catalog,
    moment: Message | Consumed | datetime,
    stream: str,
    before_s: float,
    after_s: float,
    by: str | None,
    *,
    complete: bool,
) -> Answer:
    """All messages around a moment, by time, partition and offset."""
    at, message = _moment(moment)
    span = _span(at, before_s, after_s, beside=at.id)
    search = _search(catalog, message, stream, by)
    if isinstance(search, Answer):
        return search
    return _answered(search, partial(_within, search, span, None), complete=complete)


def around(
    catalog: Catalog,
    moment: Message | Consumed | datetime,
    streams: Names,
    before_s: float,
    after_s: float,
    limit: int | None,
    *,
    complete: bool,
) -> Answer:
    """All messages of many streams around a moment; with a limit those nearest to it."""
    names = names_of("streams", streams)
    if limit is not None:
        checked_count("limit", limit, otherwise=", or None for all")
    at, _ = _moment(moment)
    span, search = _span(at, before_s, after_s, beside=None), Search(catalog, names)
    return _answered(search, partial(_within, search, span, limit), complete=complete)


def _moment(moment: Message | Consumed | datetime) -> tuple[Moment, Message | None]:
    """When to look, and the message whose time that is; None for a datetime."""
    if isinstance(moment, datetime):
        return Moment(time_us_of(moment)), None
    held = in_hand(moment, "a datetime or a message")
    if held.message.time_us is None:
        where = f" at {held.id}" if held.id else ""
        raise InvalidInput(f"the message{where} has no time; ask with a datetime")
    return Moment(held.message.time_us, held.id), held.message


def _span(at: Moment, before_s: float, after_s: float, beside: MessageId | None) -> Window:
    """A span of time around a moment; more than the calendar holds means all of it."""
    for argument, seconds in (("before_s", before_s), ("after_s", after_s)):
        checked_seconds(argument, seconds, most=math.inf)
    before_us, after_us = (round(min(seconds * 1_000_000, 2 * TIME_US_MAX)) for seconds in (before_s, after_s))
    return Window(at.time_us, at.time_us - before_us, at.time_us + after_us, beside)


def _search(catalog: Catalog, message: Message | None, stream: str, by: str | None) -> Search | Answer:
    """Where to look; the answer where the message has no value of the key."""
    if not isinstance(stream, str):
        raise InvalidInput("a look-up by time takes the name of one stream or super stream")
    checked_name("stream", stream)
    if by is None:
        return Search(catalog, (stream,))
    if not isinstance(by, str):
        raise InvalidInput("a look-up by time takes one key by its name")
    if message is None:
        raise InvalidInput("by= takes the value from a message; with a datetime, use find(…, since=, until=)")
    wanted, missing_keys = catalog.values_of(message, [by])
    if len(wanted) > 1:
        raise InvalidInput(
            f"the message has {len(wanted)} values of the key {by!r}, and by= takes one: "
            "find(…, since=, until=) asks for one of them"
        )
    if wanted:
        return Search(catalog, (stream,), wanted[0])
    # No message can share a value that is not there; the stream must exist all the same.
    catalog.check_names([stream])
    return without_values(catalog, [stream], missing_keys)


def _answered(search: Search, find: Find, *, complete: bool) -> Answer:
    search.catalog.check_names(search.names)
    return answered(search.catalog, search.names, search.key_ids, find, complete=complete)


# --- beside a moment --------------------------------------------------------------------------------------


def _nearest(search: Search, moment: Moment, sides: Sequence[Side], known: Evidence | None) -> Found:
    lost = Lost()
    targets = search.targets()
    among = {stream.name for stream in targets}.union({each.stream for each in known.uncovered} if known else ())
    found: list[Message] = []
    for side in sides:
        candidates: list[Message] = []
        for stream in targets:
            edge = moment.edge(stream.name, among, side)
            look = next_by_blocks if search.by is None else _next_by_key
            message = look(search, stream, edge, side.direction, lost)
            candidates += [] if message is None else [message]
        if known:
            candidates += _unrecorded_beside(search, moment, side, known, among)
        if candidates:
            found.append(min(candidates, key=rank) if side.direction == "after" else max(candidates, key=rank))
    nearest = sorted(found, key=lambda message: (abs(time_of(message) - moment.time_us), rank(message)))
    return search.found(nearest[:1], lost)


def _unrecorded_beside(
    search: Search, moment: Moment, side: Side, known: Evidence, among: Collection[str]
) -> list[Message]:
    """The nearest message of each stream, of what is not recorded of it."""
    streams = {each.stream for each in known.uncovered}
    nearest = {stream: Nearest(search, moment.edge(stream, among, side), side.direction) for stream in streams}
    known.scan(search.catalog.servers, lambda message: nearest[message.stream].consider(message))
    return [each.message for each in nearest.values() if each.message is not None]


_VALUE_IN_STREAM: Final = f"""
    SELECT r.stream_offset, r.time_us
    FROM relatum.relationships r
    WHERE r.key_id = :key_id::smallint AND r.value = :value::text AND r.stream_id = :stream_id::int
      AND {part_may_hold_values("r", ":key_id::smallint", ":value::text", ":value::text")}
"""

KEYED_BESIDE: Final[Mapping[Direction, sa.TextClause]] = {
    "after": sql(
        f"""
        {_VALUE_IN_STREAM}
          AND (r.time_us, r.stream_offset) > (:t::bigint, :o::bigint) AND r.stream_offset >= :floor::bigint
        ORDER BY r.time_us, r.stream_offset
        LIMIT :limit::bigint
        """
    ),
    "before": sql(
        f"""
        {_VALUE_IN_STREAM}
          AND (r.time_us, r.stream_offset) < (:t::bigint, :o::bigint) AND r.stream_offset >= :floor::bigint
        ORDER BY r.time_us DESC, r.stream_offset DESC
        LIMIT :limit::bigint
        """
    ),
}
"""Rows of one key value in one stream next to (`t`, `o`) in the order of (time, offset): offset, time."""


def _next_by_key(
    search: Search, stream: PresentStream, edge: Place, direction: Direction, lost: Lost
) -> Message | None:
    """The next message of one key value: one row of the index names it."""
    assert search.by is not None, "only look-ups by key come here"
    while True:
        floor = lost.floors.get(stream.name, 0)
        parameters = _value_in(search.by, stream) | {"t": edge[0], "o": edge[1], "floor": floor, "limit": 1}
        rows = search.catalog.servers.rows(KEYED_BESIDE[direction], parameters)
        if not rows:
            return None
        messages = _checked(search, search.by, stream, rows, lost)
        if messages:
            return messages[0]


def _value_in(by: Wanted, stream: PresentStream) -> dict[str, Any]:
    return {"key_id": by.key_id, "value": by.value, "stream_id": stream.stream_id}


def _checked(
    search: Search, by: Wanted, stream: PresentStream, rows: Iterable[tuple[int, int]], lost: Lost
) -> list[Message]:
    """The rows' messages, each checked; those that are gone are left out."""
    places = [Row(MessageId(stream.name, offset), time_us, {by.key_id}) for offset, time_us in rows]

    def carried(_: Row, message: Message) -> Message | None:
        return message if by.is_of(message) else None

    return verified(search.catalog, places, carried, lost, is_named=True)


# --- around a moment --------------------------------------------------------------------------------------


def _within(search: Search, span: Window, limit: int | None, known: Evidence | None) -> Found:
    def first(messages: Iterable[Message]) -> list[Message]:
        return sorted(messages, key=lambda message: (abs(time_of(message) - span.at), rank(message)))[:limit]

    lost = Lost()
    found = Gathered(partial(span.holds, search), "ask for a shorter span of time", first=first, limit=limit)
    targets = search.targets()
    if search.by is None:
        _blocks_within(search, targets, span, lost, found)
    else:
        for stream in targets:
            _keyed_within(search, stream, span, lost, found)
    if known:
        known.scan(search.catalog.servers, found.consider)
    messages = found.messages if limit is None else first(found.messages)
    return search.found(sorted(messages, key=rank), lost)


KEYED_BETWEEN: Final = sql(
    f"""
    {_VALUE_IN_STREAM}
      AND r.time_us >= :low::bigint AND r.time_us <= :high::bigint
    ORDER BY r.time_us, r.stream_offset
    LIMIT :limit::bigint
    """
)


def _keyed_within(search: Search, stream: PresentStream, span: Window, lost: Lost, found: Gathered) -> None:
    assert search.by is not None, "only look-ups by key come here"
    parameters = _value_in(search.by, stream)
    parameters |= {"low": span.low, "high": span.high, "limit": ANSWER_MESSAGES_MAX + 2}
    rows = search.catalog.servers.rows(KEYED_BETWEEN, parameters)
    others = [row for row in rows if MessageId(stream.name, row[0]) != span.beside]
    # Expired ones count too: behind them there may be more than the limit let through.
    found.check(len(others))
    for start in range(0, len(others), _READ_AT_ONCE):
        for message in _checked(search, search.by, stream, others[start : start + _READ_AT_ONCE], lost):
            found.take(message)


def _blocks_within(search: Search, targets: Sequence[PresentStream], span: Window, lost: Lost, found: Gathered) -> None:
    by_stream = blocks_between(search.catalog.servers, targets, span.low, span.high)
    for stream in targets:
        try:
            read_within(search.catalog.servers, by_stream[stream.stream_id], stream, span, lost, found.consider)
        except (AccessRefused, NotFound) as error:
            if search.names is not None:
                raise
            # It was not asked for by name: what is known of it is that it had such messages.
            where = MessageId(stream.name, by_stream[stream.stream_id][0].first_offset)
            lost.take(where, INTEGER_MAX, is_sure=isinstance(error, NotFound))
