"""Live: messages as they are recorded. The page and `/live` show the latest; `/live/events` goes on from there."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Final, Literal

from relatum.errors import InvalidInput, KeyNotDefined, NotFound
from relatum.keys import InvalidValue, KeyDefinition, described
from relatum.reading import Agreement, Message, agreement_of
from relatum.recording import RecordedEnd
from relatum_consumer.web._api._shown import MessageRow, message_row
from relatum_consumer.web._endpoint import Endpoint, ms_since
from relatum_consumer.web._live._filter import Filter
from relatum_consumer.web._parameters import Parameter
from relatum_consumer.web._site import Site

STREAMS_LOOKED: Final = 20
"""Streams of which the latest messages are read: those that were recorded last."""

OFFSETS_LOOKED: Final = 200
"""Offsets that are read of each, from the end of what is recorded back."""

STREAMS_MAX: Final = 2_000
"""Streams that are followed at once at most; where there are more, one names those that one wants."""

ROWS: Final = 10
"""Messages of an event that the page asks for: fifty a second, which is more than anybody reads."""

_STREAM: Final = Parameter("Streams and super streams; all where left out.")
_KEY: Final = Parameter("Only messages that have a value of this key …")
_VALUE: Final = Parameter("… and this one; of a composite key, its values in order.")


@dataclass(frozen=True, slots=True)
class LiveAsked:
    """Which messages."""

    key: Annotated[str, _KEY] = ""
    value: Annotated[tuple[str, ...], _VALUE] = ()
    stream: Annotated[tuple[str, ...], _STREAM] = ()
    limit: Annotated[int, Parameter("Messages at most.", least=1, most=500)] = 50


@dataclass(frozen=True, slots=True)
class LiveAnswer:
    """The recorded messages that arrived last at the broker, the newest first, whatever times they carry themselves.

    They are of the twenty `streams` that were recorded last, of `streams_count`, and of the last offsets of each:
    what is rare may not be among them. `events_href` tells of those that are recorded from now on.
    """

    results: tuple[MessageRow, ...]
    streams: tuple[str, ...]
    streams_count: int
    events_href: str
    took_ms: float


@dataclass(frozen=True, slots=True)
class EventsAsked:
    """Which messages, and how they are told."""

    key: Annotated[str, _KEY] = ""
    value: Annotated[tuple[str, ...], _VALUE] = ()
    stream: Annotated[tuple[str, ...], _STREAM] = ()
    form: Annotated[str, Parameter("JSON, or rows of HTML as the page has them.", choices=("json", "rows"))] = "json"
    most: Annotated[int, Parameter("Messages of an event at most, the newest.", least=1, most=1_000)] = 1_000
    after: Annotated[str, Parameter("The id of the last event seen, as `Last-Event-ID`.")] = ""


@dataclass(frozen=True, slots=True)
class LiveMessages:
    """The data of an event `messages`, five of which come a second at most.

    `shown` of them are in `results`, oldest first; `more` were wanted, too, and `passed` were not looked at, since too
    many came at once. Other events: `state` (`live`, `behind`, `partly`, `away`, `connecting`, with `words`), at the
    latest after ten seconds; `lost` (`count` messages of events that the client was too slow for); `missed` (`since`
    when it was away, where nobody knows what came); `end` (`why`: `renew`, ask again; `stopping`).
    """

    results: tuple[MessageRow, ...]
    shown: int
    more: int
    passed: int


async def filter_of(site: Site, asked: LiveAsked | EventsAsked) -> Filter:
    """What is wanted, checked.

    Raises:
        KeyNotDefined: there is no such key.
        InvalidValue: no message can have that value.
        StreamNotFound: a stream is not recorded.
        InvalidInput: a value without a key, or more streams than can be followed.
    """
    _, _, by = await _checked(site, asked)
    return by


async def _checked(
    site: Site, asked: LiveAsked | EventsAsked
) -> tuple[Sequence[KeyDefinition], list[RecordedEnd], Filter]:
    definitions = await site.keys()
    value = None
    if asked.key:
        definition = next((each for each in definitions if each.name == asked.key), None)
        if definition is None:
            raise KeyNotDefined(f"no key {asked.key!r} is defined", key=asked.key)
        if asked.value:
            try:
                value = definition.canonical_query(asked.value if definition.is_composite else asked.value[0])
            except InvalidValue as error:
                raise InvalidInput(
                    f"no message can carry this value of the key {asked.key!r}: {described(error.reason)}"
                ) from error
    elif asked.value:
        raise InvalidInput("key is missing: the name of the key whose value it is")
    ends = await site.recorded_ends(asked.stream)
    if len(ends) > STREAMS_MAX:
        raise InvalidInput(f"{len(ends):,} streams are too many to follow at once: name those that you want to see")
    form: Literal["json", "rows"] = "rows" if isinstance(asked, EventsAsked) and asked.form == "rows" else "json"
    most = asked.most if isinstance(asked, EventsAsked) else asked.limit
    return definitions, ends, Filter(frozenset(asked.stream), asked.key, value, form, most)


async def live(site: Site, asked: LiveAsked) -> LiveAnswer:
    """The latest messages."""
    began = time.perf_counter()
    definitions, ends, by = await _checked(site, asked)
    looked = ends[:STREAMS_LOOKED]
    definition = next((each for each in definitions if each.name == asked.key), None)
    read = await asyncio.gather(*(_latest(site, end) for end in looked))
    found = [
        message
        for messages in read
        for message in messages
        if by.has_value([] if definition is None else definition.values_of(message))
    ]
    found.sort(key=lambda message: (message.chunk_ms or 0, message.stream, message.offset), reverse=True)
    query = {"key": asked.key, "value": asked.value, "stream": asked.stream}
    return LiveAnswer(
        results=tuple(message_row(site, definitions, message) for message in found[: asked.limit]),
        streams=tuple(end.stream for end in looked),
        streams_count=len(ends),
        events_href=site.links.to("/api/live/events", **query),
        took_ms=ms_since(began),
    )


async def _latest(site: Site, end: RecordedEnd) -> list[Message]:
    """A stream's last recorded messages; none where it is not the one that was recorded."""
    if end.position is None:
        return []
    reader = await site.reader()
    begin = max(0, end.next_offset - OFFSETS_LOOKED)
    try:
        messages = await reader.scan(end.stream, begin, end.next_offset, lambda message: message)
    except NotFound:
        return []
    last = next((each for each in messages if each.offset == end.position.offset), None)
    is_same = last is not None and agreement_of(end.position, last) is Agreement.SAME
    return messages if is_same else []


LIVE: Final = Endpoint(
    "/live",
    "The recorded messages that arrived last.",
    LiveAsked,
    LiveAnswer,
    live,
    template="live.html",
    page="live",
    messages=lambda answer: len(answer.results),
)

EVENTS: Final = Endpoint(
    "/live/events",
    "Messages as they are recorded, as server-sent events.",
    EventsAsked,
    LiveMessages,
    filter_of,
    media_type="text/event-stream",
)
