"""Search: the messages that carry a key's value, or share that of another message; page by page, by time."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, Final, NamedTuple

from relatum.errors import InvalidInput
from relatum.keys import KeyDefinition
from relatum.reading import Message
from relatum_consumer import Answer, Status
from relatum_consumer.web.cursors import cursor_of, read_cursor
from relatum_consumer.web.documents import FOR_PAGES, copied
from relatum_consumer.web.endpoint import Known, endpoint
from relatum_consumer.web.live import latest
from relatum_consumer.web.messages import (
    HoldsOver,
    MessageRow,
    held_over,
    message_row,
    sought_text,
    values_of,
)
from relatum_consumer.web.parameters import Nothing, Parameter
from relatum_consumer.web.site import Site

PAGE_MESSAGES: Final = 25
"""Messages of a page, if no other number is asked for: each may have to be read at a place of its own."""

_MICROSECOND: Final = timedelta(microseconds=1)


@dataclass(frozen=True, slots=True)
class SearchAsked:
    """What is searched for: a key's value, given, or that of a message."""

    key: Annotated[str, Parameter("The key's name.")] = ""
    value: Annotated[tuple[str, ...], Parameter("Its value; of a composite key, its values in order.")] = ()
    of_stream: Annotated[str, Parameter("Instead of a value: the stream of a message that has it …")] = ""
    of_offset: Annotated[int | None, Parameter("… and its offset. The message itself is left out.")] = None
    of_value: Annotated[int, Parameter("Which of its values, where it has several of the key.", least=0)] = 0
    stream: Annotated[tuple[str, ...], Parameter("Streams and super streams to look in; all where left out.")] = ()
    since: Annotated[datetime | None, Parameter("Only of this moment or later; UTC where no zone is given.")] = None
    until: Annotated[datetime | None, Parameter("Only before this moment.")] = None
    order: Annotated[str, Parameter("Which come first.", choices=("oldest", "newest"))] = "oldest"
    complete: Annotated[bool, Parameter("Also read what is not recorded yet.")] = False
    limit: Annotated[int, Parameter("Messages of a page.", least=1, most=1_000)] = PAGE_MESSAGES
    cursor: Annotated[str, Parameter("`next` of the page before.")] = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchAnswer(HoldsOver):
    """Messages, and how sure it is that there are no more.

    `status` is found, absent, not_recorded_yet, expired, deleted or unproven, `words` says so for a person, and
    `advice` what to do. It holds over `streams`, the first hundred of `streams_count`. `next` asks for the next page,
    None where there is none.
    """

    status: Status
    words: str
    advice: str
    key: str
    value: str
    results: tuple[MessageRow, ...]
    next: str | None
    complete_href: str | None = field(metadata=FOR_PAGES)


class _Cursor(NamedTuple):
    """Where the next page begins: after a message, and how many of the pages before it have its time."""

    stream: str
    offset: int
    time: datetime | None
    same: int
    shown: int


async def search(site: Site, asked: SearchAsked) -> SearchAnswer:
    """Answer one page."""
    if not asked.key:
        raise InvalidInput("key is missing: the name of the key to search by")
    definitions = await site.keys()
    value, beside = await _value_sought(site, asked, definitions)
    after = read_cursor(asked.cursor, str, int, datetime, int, int)
    cursor = None if after is None else _Cursor(*after)
    answer = await _page(site, asked, value, cursor, beside)
    found = _after(answer.messages, cursor, asked.order)
    found = [message for message in found if beside is None or message.id != beside.id]
    if beside is not None and answer and not (found or cursor or asked.since or asked.until):
        # That it was found itself proves nothing of others.
        answer = await _of_others(site, asked, answer, beside)
    page = found[: asked.limit]
    following = await _next(site, asked, value, page, cursor, has_more=len(found) > asked.limit)
    parts = [str(part) for part in (value if isinstance(value, tuple) else (value,))]
    return SearchAnswer(
        status=answer.status,
        words=_words(answer, page, beside),
        advice=_advice(answer, asked),
        key=asked.key,
        value=sought_text(site, definitions, asked.key, parts),
        results=tuple(message_row(site, definitions, message) for message in page),
        next=following,
        complete_href=_href(site, replace(asked, complete=True, cursor="")) if _may_help(answer, asked) else None,
        **held_over(answer),
    )


async def _value_sought(
    site: Site, asked: SearchAsked, definitions: Sequence[KeyDefinition]
) -> tuple[Any, Message | None]:
    """The value that is searched for, and the message that it is of."""
    if not asked.of_stream or asked.of_offset is None:
        if not asked.value:
            raise InvalidInput("value is missing: the value to search for")
        return (asked.value[0] if len(asked.value) == 1 else asked.value), None
    message = await site.relations.read(asked.of_stream, asked.of_offset)
    definition = next((each for each in definitions if each.name == asked.key), None)
    values = [] if definition is None else values_of(definition, message)
    if asked.of_value >= len(values):
        raise InvalidInput(f"the message {message.id} has no such value of the key {asked.key!r}")
    return values[asked.of_value], message


async def _page(site: Site, asked: SearchAsked, value: Any, cursor: _Cursor | None, beside: Message | None) -> Answer:
    """What is found from the page's beginning on: what was shown of its first moment, the page, and one more."""
    since, until = asked.since, asked.until
    already = 0
    if cursor is not None:
        already = cursor.shown if cursor.time is None else cursor.same
        if cursor.time is not None and asked.order == "oldest":
            since = cursor.time
        elif cursor.time is not None:
            until = cursor.time + _MICROSECOND
    return await site.relations.find(
        asked.key,
        value,
        streams=asked.stream or None,
        since=since,
        until=until,
        limit=already + asked.limit + 1 + (beside is not None),
        order="newest" if asked.order == "newest" else "oldest",
        complete=asked.complete,
    )


async def _of_others(site: Site, asked: SearchAsked, answer: Answer, beside: Message) -> Answer:
    """What is known of other messages, where none was found."""
    others = await site.relations.related(beside, asked.stream or None, by=asked.key, limit=1, complete=asked.complete)
    # One that has several values of the key may share another of them.
    return answer if others else others


def _rank(place: Message | _Cursor) -> tuple[bool, datetime, str, int]:
    """A message's place in the order of answers: one of unknown time counts as later than all."""
    return (place.time is None, place.time or datetime.max.replace(tzinfo=UTC), place.stream, place.offset)


def _after(messages: Sequence[Message], cursor: _Cursor | None, order: str) -> list[Message]:
    """Those that no page before has shown."""
    if cursor is None:
        return list(messages)
    last = _rank(cursor)
    return [each for each in messages if (_rank(each) < last if order == "newest" else _rank(each) > last)]


async def _next(
    site: Site, asked: SearchAsked, value: Any, page: Sequence[Message], cursor: _Cursor | None, *, has_more: bool
) -> str | None:
    """Where the page after this one begins; None where there is none."""
    if not page:
        return None
    last, shown = page[-1], len(page) + (cursor.shown if cursor else 0)
    if not has_more and not await _has_untimed(site, asked, value, last, cursor):
        return None
    same = sum(message.time == last.time for message in page)
    if cursor is not None and cursor.time == last.time:
        same += cursor.same
    return cursor_of(last.stream, last.offset, last.time, same, shown)


async def _has_untimed(site: Site, asked: SearchAsked, value: Any, last: Message, cursor: _Cursor | None) -> bool:
    """Whether messages of unknown time come after the last that has one: pages go on by time, which leaves them out."""
    is_by_time = cursor is not None and cursor.time is not None and asked.order == "oldest"
    if not is_by_time or last.time is None or asked.since or asked.until:
        return False
    newest = await site.relations.find(asked.key, value, streams=asked.stream or None, limit=1, order="newest")
    return bool(newest) and newest[0].time is None


def _may_help(answer: Answer, asked: SearchAsked) -> bool:
    return answer.status in ("not_recorded_yet", "unproven") and not asked.complete


def _href(site: Site, asked: SearchAsked) -> str:
    return site.links.asked("/", asked)


def _words(answer: Answer, page: Sequence[Message], beside: Message | None) -> str:
    if answer and not page:
        return "found: no other message has it" if beside is not None else "found: all were shown"
    if answer and answer.status == "unproven":
        return "unproven: there may be more, which nobody can prove or rule out"
    return answer.words


def _advice(answer: Answer, asked: SearchAsked) -> str:
    if answer.explanation and not (answer.lacking or answer.new_keys):
        return answer.explanation
    if _may_help(answer, asked):
        return "It may be in what is not recorded yet, which can be read from the streams."
    return "" if answer.lacking else answer.explanation


# --- when they were ---------------------------------------------------------------------------------------

_SPANS: Final = 60


@dataclass(frozen=True, slots=True)
class TimesSpan:
    """Messages from a moment to before another; `number` is its place among all spans."""

    number: int
    since: datetime
    until: datetime
    count: int
    href: str = field(metadata=FOR_PAGES)


@dataclass(frozen=True, slots=True)
class TimesAnswer:
    """The spans that have messages, of one length, in order; `spans_count` with those between that have none.

    It is counted by the index: `count` are recorded. Where it is not `is_whole`, there are more, and each count is one
    at least. Messages without a time are left out.
    """

    spans: tuple[TimesSpan, ...]
    spans_count: int
    most: int
    count: int
    is_whole: bool


@endpoint("/search/times", "How many messages a search would find, by spans of time; it takes what a search takes.")
async def times(site: Site, asked: SearchAsked) -> TimesAnswer:
    """Count them by spans of time, each a narrower search."""
    if not asked.key:
        raise InvalidInput("key is missing: the name of the key to search by")
    value, _ = await _value_sought(site, asked, await site.keys())
    found = await site.relations.times(
        asked.key,
        value,
        streams=asked.stream or None,
        since=asked.since,
        until=asked.until,
        spans=_SPANS,
        order="newest" if asked.order == "newest" else "oldest",
    )
    spans = tuple(
        copied(TimesSpan, each, href=_href(site, replace(asked, since=each.since, until=each.until, cursor="")))
        for each in found.spans
    )
    return TimesAnswer(
        spans=spans,
        spans_count=spans[-1].number + 1 if spans else 0,
        most=max((each.count for each in spans), default=0),
        count=found.count,
        is_whole=found.is_whole,
    )


async def _known(site: Site, asked: SearchAsked) -> tuple[Known, ...]:
    """What the index alone knows of a search."""
    if site.servers.database.error:
        return ()
    found = await times(site, asked)
    if not found.spans:
        return (("PostgreSQL has recorded no message with this value and a time.", None),)
    first, last = (f"{each:%Y-%m-%d %H:%M:%S} UTC" for each in (found.spans[0].since, found.spans[-1].until))
    many = f"{'' if found.is_whole else 'at least '}{found.count:,}"
    return ((f"PostgreSQL has recorded {many} with this value, from {first} to before {last}.", None),)


endpoint(
    "/search",
    "The messages whose key has a value, page by page.",
    template="search.html",
    page="search",
    is_asked=lambda asked: bool(asked.value or asked.of_stream),
    unasked=lambda site: latest(site, Nothing()),
    beside=times,
    known=_known,
)(search)


# --- values of a key --------------------------------------------------------------------------------------

_OFFERED: Final = 10


@dataclass(frozen=True, slots=True)
class ValuesAsked:
    """What was typed of a key's value."""

    key: Annotated[str, Parameter("The key's name.")] = ""
    prefix: Annotated[str, Parameter("What its values begin with, as they are stored; all where left out.")] = ""
    limit: Annotated[int, Parameter("Values at most.", least=1, most=100)] = _OFFERED


@dataclass(frozen=True, slots=True)
class ValuesAnswer:
    """The first values, in order. `reason` says why there are none where that is not for want of any."""

    values: tuple[str, ...]
    reason: str


@endpoint("/values", "Values of a key that begin with a prefix.")
async def values(site: Site, asked: ValuesAsked) -> ValuesAnswer:
    """List them, unless they are masked, or of several parts."""
    if not asked.key:
        raise InvalidInput("key is missing: the name of the key")
    definition = next((each for each in await site.keys() if each.name == asked.key), None)
    if definition is not None and site.masking.is_masked(definition):
        return ValuesAnswer((), "values of a masked key are not listed")
    if definition is not None and definition.is_composite:
        return ValuesAnswer((), "values of several parts are not listed")
    return ValuesAnswer(await site.relations.values(asked.key, asked.prefix, limit=asked.limit), "")
