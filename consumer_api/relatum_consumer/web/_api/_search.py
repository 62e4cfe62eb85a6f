"""Search: the messages that carry a key's value, or share that of another message; page by page, by time."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, Final, Literal

from relatum.errors import InvalidInput
from relatum.keys import KeyDefinition
from relatum.reading import Message
from relatum_consumer import Answer
from relatum_consumer.web._api._cursors import cursor_of, read_cursor
from relatum_consumer.web._api._latest import LatestAsked, latest
from relatum_consumer.web._api._shown import (
    MessageRow,
    Place,
    Reason,
    held_over,
    message_row,
    sought_text,
    values_of,
)
from relatum_consumer.web._endpoint import Endpoint, ms_since
from relatum_consumer.web._parameters import Parameter
from relatum_consumer.web._site import Site

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


@dataclass(frozen=True, slots=True)
class SearchAnswer:
    """Messages, and how sure it is that there are no more.

    `status` is found, absent, not_recorded_yet, expired, deleted or unproven, `words` says so for a person, and
    `advice` what to do. It holds over `streams`, the first hundred of `streams_count`. `next` asks for the next page,
    None where there is none; `next_href` is that page. `complete_href` asks the same with what is not recorded yet,
    where that may help.
    """

    status: Literal["found", "absent", "not_recorded_yet", "expired", "deleted", "unproven"]
    words: str
    advice: str
    key: str
    value: str
    results: tuple[MessageRow, ...]
    next: str | None
    next_href: str | None
    complete_href: str | None
    streams: tuple[str, ...]
    streams_count: int
    expired: tuple[Place, ...]
    deleted: tuple[Place, ...]
    unread: tuple[Place, ...]
    left_out: tuple[Reason, ...]
    unattended: tuple[str, ...]
    new_keys: tuple[str, ...]
    took_ms: float


@dataclass(frozen=True, slots=True)
class _Cursor:
    """Where the next page begins: after a message, and how many of the pages before it have its time."""

    stream: str
    offset: int
    time: str | None
    same: int
    shown: int

    @classmethod
    def read(cls, text: str) -> "_Cursor | None":
        given = read_cursor(text, str, int, str, int, int)
        if given is None:
            return None
        stream, offset, moment, same, shown = given
        try:
            if moment:
                datetime.fromisoformat(moment)
        except ValueError:
            raise InvalidInput("this cursor is none that a page before gave") from None
        return cls(stream, offset, moment or None, same, shown)

    @property
    def text(self) -> str:
        return cursor_of(self.stream, self.offset, self.time or "", self.same, self.shown)


async def search(site: Site, asked: SearchAsked) -> SearchAnswer:
    """Answer one page."""
    began = time.perf_counter()
    if not asked.key:
        raise InvalidInput("key is missing: the name of the key to search by")
    definitions = await site.keys()
    value, beside = await value_sought(site, asked, definitions)
    cursor = _Cursor.read(asked.cursor)
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
        status=answer.status.value,
        words=_words(answer, page, beside),
        advice=_advice(answer, asked),
        key=asked.key,
        value=sought_text(site, definitions, asked.key, parts),
        results=tuple(message_row(site, definitions, message) for message in page),
        next=following,
        next_href=None if following is None else search_href(site, replace(asked, cursor=following)),
        complete_href=search_href(site, replace(asked, complete=True, cursor="")) if _may_help(answer, asked) else None,
        **held_over(site, answer),
        took_ms=ms_since(began),
    )


async def value_sought(
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
            since = datetime.fromisoformat(cursor.time)
        elif cursor.time is not None:
            until = datetime.fromisoformat(cursor.time) + _MICROSECOND
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


def _rank(message: Message) -> tuple[bool, datetime, str, int]:
    """A message's place in the order of answers: one of unknown time counts as later than all."""
    return (message.time is None, message.time or datetime.max.replace(tzinfo=UTC), message.stream, message.offset)


def _after(messages: Sequence[Message], cursor: _Cursor | None, order: str) -> list[Message]:
    """Those that no page before has shown."""
    if cursor is None:
        return list(messages)
    moment = None if cursor.time is None else datetime.fromisoformat(cursor.time)
    last = (moment is None, moment or datetime.max.replace(tzinfo=UTC), cursor.stream, cursor.offset)
    if order == "newest":
        return [message for message in messages if _rank(message) < last]
    return [message for message in messages if _rank(message) > last]


async def _next(
    site: Site, asked: SearchAsked, value: Any, page: Sequence[Message], cursor: _Cursor | None, *, has_more: bool
) -> str | None:
    """Where the page after this one begins; None where there is none."""
    if not page:
        return None
    last, shown = page[-1], len(page) + (cursor.shown if cursor else 0)
    if not has_more and not await _has_untimed(site, asked, value, last, cursor):
        return None
    moment = None if last.time is None else last.time.isoformat()
    same = sum(message.time == last.time for message in page)
    if cursor is not None and cursor.time == moment:
        same += cursor.same
    return _Cursor(last.stream, last.offset, moment, same, shown).text


async def _has_untimed(site: Site, asked: SearchAsked, value: Any, last: Message, cursor: _Cursor | None) -> bool:
    """Whether messages of unknown time come after the last that has one: pages go on by time, which leaves them out."""
    is_by_time = cursor is not None and cursor.time is not None and asked.order == "oldest"
    if not is_by_time or last.time is None or asked.since or asked.until:
        return False
    newest = await site.relations.find(asked.key, value, streams=asked.stream or None, limit=1, order="newest")
    return bool(newest) and newest[0].time is None


def _may_help(answer: Answer, asked: SearchAsked) -> bool:
    return answer.status in ("not_recorded_yet", "unproven") and not asked.complete


def search_href(site: Site, asked: SearchAsked) -> str:
    """The page of a search."""
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


SEARCH = Endpoint(
    "/search",
    "The messages whose key has a value, page by page.",
    SearchAsked,
    SearchAnswer,
    search,
    template="search.html",
    page="search",
    is_asked=lambda asked: bool(asked.value or asked.of_stream),
    unasked=lambda site: latest(site, LatestAsked()),
)
