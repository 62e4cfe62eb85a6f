"""Search: messages by a key's value, by the value of another message, or around a moment, ordered by time."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from difflib import get_close_matches
from functools import partial
from typing import Any, Final, Literal

from pydantic import Field

from relatum.errors import InvalidInput
from relatum.reading import Message
from relatum_consumer import Answer, Status
from relatum_consumer.lookups.answer import Covered
from relatum_consumer.web.endpoint import endpoint, gather, optional_part
from relatum_consumer.web.messages import MessageRow, covered, message_rows, query_text, query_value, values_of
from relatum_consumer.web.parameters import Moment, Number, Parameters, TextList, cursor_of, just_after, read_cursor
from relatum_consumer.web.site import Site
from relatum_consumer.web.streams import newest

_OTHER_KEYS_MAX: Final = 20
"""Maximum other keys in which a value without messages is looked up."""


class SearchParameters(Parameters):
    key: str = Field("", description="The key's name.")
    value: TextList = Field((), description="Its value; for a composite key, its values in order.")
    of_stream: str = Field("", description="Instead of a value: the stream of a message that has it …")
    of_offset: Number | None = Field(None, description="… and its offset. The message itself is left out.")
    of_value: Number = Field(0, description="The value's index, if the message has several values of the key.")
    stream: TextList = Field((), description="Streams and super streams to look in; all by default.")
    since: Moment | None = Field(None, description="Only messages of this moment or later; UTC without a zone.")
    until: Moment | None = Field(None, description="Only messages before this moment.")
    order: Literal["oldest", "newest"] = Field("oldest", description="Which messages come first.")
    complete: bool = Field(False, description="Also read messages that are not recorded yet.")
    limit: int = Field(25, ge=1, le=1_000, description="Messages on a page.")
    cursor: str = Field("", description="`next` of the previous page.")


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchAnswer(Covered):
    """The messages found, and whether there may be more.

    `status` is found, absent, not_recorded_yet, expired, deleted or unproven; `words` explains it to people, and
    `advice` says what to do. The status applies to `streams`, which has the first hundred of `streams_count`. `next` is
    the cursor of the next page; None on the last page. If the status is absent, `similar` has recorded values of the
    key that begin alike, and `other_keys` has other keys with the value.
    """

    status: Status
    words: str
    advice: str
    key: str
    value: str
    results: tuple[MessageRow, ...]
    next: str | None
    streams_count: int
    similar: tuple[str, ...] = ()
    other_keys: tuple[str, ...] = ()


@endpoint(
    "/search",
    "The messages that carry a key's value, or share it with a message (of_stream, of_offset), by time, and "
    "whether there may be others (`status`). To follow a masked value, give a message that has it.",
    tool="find",
    is_submitted=lambda query: bool(query.value or query.of_stream),
    start=newest,
)
async def search(site: Site, query: SearchParameters) -> SearchAnswer:
    value, origin = await _searched_value(site, query)
    answer, page, cursor = await _page(site, query, value, origin)
    if origin is not None and answer and not (page or query.cursor or query.since or query.until):
        # Only the message itself was found, which proves nothing about others; they may share another of its values.
        others = await site.relations.related(
            origin, query.stream or None, by=query.key, limit=1, complete=query.complete
        )
        answer = answer if others else others
    is_absent = answer.status is Status.ABSENT and len(query.value) == 1
    return SearchAnswer(
        status=answer.status,
        words=_words(answer, page, origin),
        advice=_advice(answer, query),
        key=query.key,
        value=query_text(site, query.key, value if isinstance(value, tuple) else (value,)),
        results=message_rows(site, page),
        next=cursor,
        streams_count=len(answer.streams),
        **(await _suggestions(site, query.key, *query.value) if is_absent else {}),
        **covered(answer),
    )


async def _suggestions(site: Site, key: str, value: str) -> dict[str, Any]:
    """Return recorded values of the key that resemble a value, and other keys that have it; none of masked keys."""

    async def values_with(of_key: str, prefix: str, limit: int) -> tuple[str, ...]:
        found = await optional_part(values(site, ValuesParameters(key=of_key, prefix=prefix, limit=limit)))
        return () if found is None else found.values

    similar: list[str] = []
    for prefix in (value, value[:-1], value[: len(value) // 2]):
        similar = similar or get_close_matches(value, {*await values_with(key, prefix, 100)} - {value})
    others = [each for each in site.masking.definitions if each != key][:_OTHER_KEYS_MAX]
    # Values are sorted: a value is the first of those that begin with it.
    first = await gather([partial(values_with, each, value, 1) for each in others])
    other_keys = tuple(each for each, found in zip(others, first, strict=True) if value in found)
    return {"similar": tuple(similar), "other_keys": other_keys}


async def _searched_value(site: Site, query: SearchParameters) -> tuple[Any, Message | None]:
    """Return the value to search for, and the message that it comes from, or None."""
    if not query.key:
        raise InvalidInput("key is missing: give the name of the key to search by")
    if not query.of_stream or query.of_offset is None:
        return query_value(query.value), None
    message = await site.relations.read(query.of_stream, query.of_offset)
    definition = site.masking.definitions.get(query.key)
    values = [] if definition is None else values_of(definition, message)
    if not values:
        raise InvalidInput(f"the message {message.id} has no value of the key {query.key!r}")
    if query.of_value >= len(values):
        text = f"the message {message.id} has {len(values)} values of the key {query.key!r}"
        raise InvalidInput(f"of_value={query.of_value} is too high: {text}, numbered from 0")
    return values[query.of_value], message


async def _page(
    site: Site, query: SearchParameters, value: Any, origin: Message | None
) -> tuple[Answer, Sequence[Message], str | None]:
    """Return the answer, the page, and the next cursor: a moment, and how many of its messages earlier pages have."""
    moment, shown = read_cursor(query.cursor, tuple[Moment, Number]) or (None, 0)
    since, until = query.since, query.until
    if moment is not None and query.order == "oldest":
        since = moment
    elif moment is not None:
        until = just_after(moment)
    answer = await site.relations.find(
        query.key,
        value,
        streams=query.stream or None,
        since=since,
        until=until,
        order=query.order,
        limit=shown + query.limit + 1 + (origin is not None),
        complete=query.complete,
    )
    found = [each for each in answer.messages if origin is None or each.id != origin.id][shown:]
    page = found[: query.limit]
    if len(found) == len(page):
        return answer, page, None
    last = page[-1].time
    return answer, page, cursor_of(last, sum(each.time == last for each in page) + (shown if last == moment else 0))


def _words(answer: Answer, page: Sequence[Message], origin: Message | None) -> str:
    if answer and not page:
        return "found: no other message has it" if origin is not None else "found: all were shown"
    return answer.words


def _advice(answer: Answer, query: SearchParameters) -> str:
    # The words have the explanation of missing and new keys.
    if answer.explanation and not (answer.missing_keys or answer.new_keys):
        return answer.explanation
    is_open = answer.status in ("not_recorded_yet", "unproven") and not query.complete
    return "The part that is not recorded yet may have it, and can be read from the streams." if is_open else ""


# --- around a moment --------------------------------------------------------------------------------------


class AroundParameters(Parameters):
    moment: Moment | None = Field(None, description="The moment; UTC without a zone. Or …")
    stream: str = Field("", description="… the stream of a message, for its time …")
    offset: Number | None = Field(None, description="… and its offset.")
    streams: TextList = Field((), description="Streams and super streams to look in; all by default.")
    before_s: float = Field(30.0, ge=0, le=1_000_000, description="Seconds before the moment.")
    after_s: float = Field(30.0, ge=0, le=1_000_000, description="Seconds after the moment.")
    complete: bool = Field(False, description="Also read messages that are not recorded yet.")
    limit: int = Field(20, ge=1, le=100, description="Maximum messages; the nearest to the moment are returned.")


@dataclass(frozen=True, slots=True, kw_only=True)
class AroundAnswer(Covered):
    """The messages around a moment, by time. If `may_be_more`, there may be more of them, further from the moment."""

    status: Status
    words: str
    moment: datetime
    results: tuple[MessageRow, ...]
    may_be_more: bool


@endpoint(
    "/around",
    "The messages around a moment, or around a message's time, ordered by time.",
    is_page=False,
    tool="around",
)
async def around(site: Site, query: AroundParameters) -> AroundAnswer:
    given = [query.moment is not None, bool(query.stream), query.offset is not None]
    if given not in ([True, False, False], [False, True, True]):
        raise InvalidInput(
            "give either moment, or stream and offset of a message with that time; streams limits the search"
        )
    start: Message | datetime = query.moment or await site.relations.read(query.stream, query.offset or 0)
    moment = start if isinstance(start, datetime) else start.time
    if moment is None:
        raise InvalidInput("the message has no time: give a moment")
    answer = await site.relations.around(
        start,
        query.streams or None,
        before_s=query.before_s,
        after_s=query.after_s,
        limit=query.limit,
        complete=query.complete,
    )
    return AroundAnswer(
        status=answer.status,
        words=f"{answer.words}. {answer.explanation}" if answer.unrecorded_streams else answer.words,
        moment=moment.astimezone(UTC),
        results=message_rows(site, answer.messages),
        may_be_more=len(answer) == query.limit,
        **covered(answer),
    )


# --- values of a key --------------------------------------------------------------------------------------


class ValuesParameters(Parameters):
    key: str = Field(description="The key's name.")
    prefix: str = Field("", description="The beginning of the values, as they are stored; all by default.")
    limit: int = Field(10, ge=1, le=100, description="Maximum values.")


@dataclass(frozen=True, slots=True)
class ValuesAnswer:
    """The first values, in order. `reason` says why a key's values are not listed; empty otherwise."""

    values: tuple[str, ...]
    reason: str


@endpoint("/values", "The first recorded values of a key that begin with a prefix.", is_page=False, tool="values")
async def values(site: Site, query: ValuesParameters) -> ValuesAnswer:
    if definition := site.masking.definitions.get(query.key):
        if site.masking.is_masked(definition):
            return ValuesAnswer((), "values of a masked key are not listed")
        if definition.is_composite:
            return ValuesAnswer((), "values of several parts are not listed")
    return ValuesAnswer(await site.relations.values(query.key, query.prefix, limit=query.limit), "")
