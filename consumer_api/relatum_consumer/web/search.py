"""Search: the messages that carry a key's value, or share that of another message; page by page, by time."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, Final, Literal, NamedTuple

from relatum.errors import InvalidInput
from relatum.reading import Message
from relatum_consumer import Answer, Status
from relatum_consumer.lookups.values import TimeSpan
from relatum_consumer.web.cursors import cursor_of, read_cursor
from relatum_consumer.web.endpoint import Known, endpoint
from relatum_consumer.web.live import latest
from relatum_consumer.web.messages import (
    HoldsOver,
    MessageRow,
    given_value,
    held_over,
    message_rows,
    sought_text,
    values_of,
)
from relatum_consumer.web.parameters import Nothing, Parameter
from relatum_consumer.web.site import Site

_MICROSECOND: Final = timedelta(microseconds=1)


@dataclass(frozen=True, slots=True)
class SearchAsked:
    key: Annotated[str, Parameter("The key's name.")] = ""
    value: Annotated[tuple[str, ...], Parameter("Its value; of a composite key, its values in order.")] = ()
    of_stream: Annotated[str, Parameter("Instead of a value: the stream of a message that has it …")] = ""
    of_offset: Annotated[int | None, Parameter("… and its offset. The message itself is left out.")] = None
    of_value: Annotated[int, Parameter("Which of its values, where it has several of the key.")] = 0
    stream: Annotated[tuple[str, ...], Parameter("Streams and super streams to look in; all where left out.")] = ()
    since: Annotated[datetime | None, Parameter("Only of this moment or later; UTC where no zone is given.")] = None
    until: Annotated[datetime | None, Parameter("Only before this moment.")] = None
    order: Annotated[Literal["oldest", "newest"], Parameter("Which come first.")] = "oldest"
    complete: Annotated[bool, Parameter("Also read what is not recorded yet.")] = False
    limit: Annotated[int, Parameter("Messages of a page.", least=1, most=1_000)] = 25
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


class _Cursor(NamedTuple):
    """Where the next page begins: after a message, and how many of the pages before it have its time."""

    stream: str
    offset: int
    time: datetime | None
    same: int
    shown: int


async def search(site: Site, asked: SearchAsked) -> SearchAnswer:
    value, beside = await _value_sought(site, asked)
    given = read_cursor(asked.cursor, str, int, datetime, int, int)
    cursor = None if given is None else _Cursor(*given)
    answer = await _page(site, asked, value, cursor, beside)
    found = [each for each in answer.messages if beside is None or each.id != beside.id]
    if cursor is not None:
        last = _rank(cursor)
        found = [each for each in found if (_rank(each) < last if asked.order == "newest" else _rank(each) > last)]
    if beside is not None and answer and not (found or cursor or asked.since or asked.until):
        # That it was found itself proves nothing of others. One that has several values may share another of them.
        others = await site.relations.related(
            beside, asked.stream or None, by=asked.key, limit=1, complete=asked.complete
        )
        answer = answer if others else others
    page = found[: asked.limit]
    has_more = len(found) > len(page) or await _has_untimed(site, asked, value, page, cursor)
    return SearchAnswer(
        status=answer.status,
        words=_words(answer, page, beside),
        advice=_advice(answer, asked),
        key=asked.key,
        value=sought_text(site, asked.key, value if isinstance(value, tuple) else (value,)),
        results=message_rows(site, page),
        next=_next(page, cursor) if page and has_more else None,
        **held_over(answer),
    )


async def _value_sought(site: Site, asked: SearchAsked) -> tuple[Any, Message | None]:
    """The value that is searched for, and the message that it is of."""
    await site.keys()
    if not asked.key:
        raise InvalidInput("key is missing: the name of the key to search by")
    if not asked.of_stream or asked.of_offset is None:
        return given_value(asked.value), None
    message = await site.relations.read(asked.of_stream, asked.of_offset)
    definition = site.definitions.get(asked.key)
    values = [] if definition is None else values_of(definition, message)
    if asked.of_value >= len(values):
        raise InvalidInput(f"the message {message.id} has no such value of the key {asked.key!r}")
    return values[asked.of_value], message


async def _page(site: Site, asked: SearchAsked, value: Any, cursor: _Cursor | None, beside: Message | None) -> Answer:
    """What is found from the page's beginning on: what was shown of its first moment, the page, and one more."""
    since, until, already = asked.since, asked.until, 0
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
        order=asked.order,
        complete=asked.complete,
    )


def _rank(place: Message | _Cursor) -> tuple[bool, datetime, str, int]:
    """A message's place in the order of answers: one of unknown time counts as later than all."""
    return (place.time is None, place.time or datetime.max.replace(tzinfo=UTC), place.stream, place.offset)


def _next(page: Sequence[Message], cursor: _Cursor | None) -> str:
    """Where the page after this one begins."""
    last, shown = page[-1], len(page) + (cursor.shown if cursor else 0)
    same = sum(message.time == last.time for message in page)
    if cursor is not None and cursor.time == last.time:
        same += cursor.same
    return cursor_of(last.stream, last.offset, last.time, same, shown)


async def _has_untimed(
    site: Site, asked: SearchAsked, value: Any, page: Sequence[Message], cursor: _Cursor | None
) -> bool:
    """Whether messages of unknown time come after the last that has one: pages go on by time, which leaves them out."""
    is_by_time = cursor is not None and cursor.time is not None and asked.order == "oldest"
    if not is_by_time or not page or page[-1].time is None or asked.since or asked.until:
        return False
    newest = await site.relations.find(asked.key, value, streams=asked.stream or None, limit=1, order="newest")
    return bool(newest) and newest[0].time is None


def _words(answer: Answer, page: Sequence[Message], beside: Message | None) -> str:
    if answer and not page:
        return "found: no other message has it" if beside is not None else "found: all were shown"
    if answer and answer.status == "unproven":
        return "unproven: there may be more, which nobody can prove or rule out"
    return answer.words


def _advice(answer: Answer, asked: SearchAsked) -> str:
    if answer.explanation and not (answer.missing_keys or answer.new_keys):
        return answer.explanation
    if answer.status in ("not_recorded_yet", "unproven") and not asked.complete:
        return "It may be in what is not recorded yet, which can be read from the streams."
    return "" if answer.missing_keys else answer.explanation


# --- when they were ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TimesAnswer:
    """The spans that have messages, of one length, in order; `spans_count` with those between that have none.

    It is counted by the index: `count` are recorded. Where it is not `is_whole`, there are more, and each count is one
    at least. Messages without a time are left out.
    """

    spans: tuple[TimeSpan, ...]
    spans_count: int
    most: int
    count: int
    is_whole: bool


@endpoint("/search/times", "How many messages a search would find, by spans of time; it takes what a search takes.")
async def times(site: Site, asked: SearchAsked) -> TimesAnswer:
    """Count them by spans of time, each a narrower search."""
    value, _ = await _value_sought(site, asked)
    found = await site.relations.times(
        asked.key,
        value,
        streams=asked.stream or None,
        since=asked.since,
        until=asked.until,
        order=asked.order,
    )
    spans = found.spans
    most = max((each.count for each in spans), default=0)
    return TimesAnswer(spans, spans[-1].number + 1 if spans else 0, most, found.count, found.is_whole)


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


@dataclass(frozen=True, slots=True)
class ValuesAsked:
    key: Annotated[str, Parameter("The key's name.")] = ""
    prefix: Annotated[str, Parameter("What its values begin with, as they are stored; all where left out.")] = ""
    limit: Annotated[int, Parameter("Values at most.", least=1, most=100)] = 10


@dataclass(frozen=True, slots=True)
class ValuesAnswer:
    """The first values, in order. `reason` says why there are none where that is not for want of any."""

    values: tuple[str, ...]
    reason: str


@endpoint("/values", "Values of a key that begin with a prefix.")
async def values(site: Site, asked: ValuesAsked) -> ValuesAnswer:
    if not asked.key:
        raise InvalidInput("key is missing: the name of the key")
    await site.keys()
    definition = site.definitions.get(asked.key)
    if definition is not None and site.masking.is_masked(definition):
        return ValuesAnswer((), "values of a masked key are not listed")
    if definition is not None and definition.is_composite:
        return ValuesAnswer((), "values of several parts are not listed")
    return ValuesAnswer(await site.relations.values(asked.key, asked.prefix, limit=asked.limit), "")
