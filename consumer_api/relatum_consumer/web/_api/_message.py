"""A message: headers, properties, body, what belongs to it by each key, and its neighbours in the stream."""

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Annotated, Final, Literal

import anyio

from relatum.errors import RelatumError
from relatum.keys import KeyDefinition
from relatum.membership import membership
from relatum.reading import Message
from relatum.terminal import size_text
from relatum_consumer.web._api._collectors import message_id_of, outcome_of
from relatum_consumer.web._api._neighbours import Neighbour, following, preceding
from relatum_consumer.web._api._shown import (
    KeyValue,
    MessageRow,
    Named,
    key_values,
    message_row,
    named_values,
    properties_of,
    values_of,
)
from relatum_consumer.web._bodies import (
    TEXT_CHARACTERS_MAX,
    BodyKind,
    Node,
    hex_lines,
    image_type,
    kind_of,
    text_of,
    tree,
)
from relatum_consumer.web._endpoint import Endpoint, Known, ms_since, words_of
from relatum_consumer.web._parameters import Parameter
from relatum_consumer.web._site import Site
from relatum_consumer.web._traces_elsewhere import trace_href

RELATED_SHOWN: Final = 6
"""Messages of each key up to which all are shown; of more, those nearest in time, and a link leads to the others."""

NEAREST_SHOWN: Final = 2
"""Of those, messages of each part: of other streams and of its own, each earlier and later."""

_ASKED_AT_ONCE: Final = 4

STREAMS_ASKED_MAX: Final = 50
"""Other streams up to which they are asked for apart."""

_MICROSECOND: Final = timedelta(microseconds=1)

Where = Literal["elsewhere", "earlier", "later"]


@dataclass(frozen=True, slots=True)
class MessageAsked:
    """Which message, and how its body is shown."""

    stream: Annotated[str, Parameter("The stream.", in_path=True)]
    offset: Annotated[int, Parameter("Its offset.", least=0, in_path=True)]
    view: Annotated[str, Parameter("How the body is shown.", choices=("json", "text", "hex", "image"))] = ""


@dataclass(frozen=True, slots=True)
class MessageAskedByQuery:
    """The same, for a form: which message, and how its body is shown."""

    stream: Annotated[str, Parameter("The stream.")]
    offset: Annotated[int, Parameter("Its offset.", least=0)]
    view: Annotated[str, Parameter("How the body is shown.", choices=("json", "text", "hex", "image"))] = ""


@dataclass(frozen=True, slots=True)
class Body:
    """A body. `text`, `hex` or `json` is there by `view`, cut where `is_cut`; `views` are those that fit it."""

    kind: BodyKind
    bytes: int
    view: str
    views: tuple[str, ...]
    is_cut: bool
    text: str
    hex: tuple[str, ...]
    json: Node | None
    image_type: str | None
    href: str


@dataclass(frozen=True, slots=True)
class RelatedPart:
    """Messages of other streams, or of this one before or after it."""

    where: Where
    results: tuple[MessageRow, ...]


@dataclass(frozen=True, slots=True)
class RelatedByKey:
    """Messages that share a key's value with this one, nearest in time first; `has_more` where there are others.

    `status` and `words` as in a search; where it could not be found out, `status` is `failed`.
    """

    key: KeyValue
    status: Literal["found", "absent", "not_recorded_yet", "expired", "deleted", "unproven", "failed"]
    words: str
    parts: tuple[RelatedPart, ...]
    has_more: bool


@dataclass(frozen=True, slots=True)
class OutcomeLink:
    """The state of the message in the collectors that took it, the least advanced, and the page that has all of it."""

    state: str
    href: str


@dataclass(frozen=True, slots=True)
class MessageAnswer:
    """A message.

    `chunk_time` is when the broker wrote it. `trace_href` leads to another page, `group_href` to
    the group that it is in, `outcome` to what became of it in a collector; None where there is none.
    """

    stream: str
    offset: int
    href: str
    stream_href: str
    time: datetime | None
    time_source: str
    chunk_time: datetime | None
    headers: tuple[Named, ...]
    properties: tuple[Named, ...]
    body: Body
    keys: tuple[KeyValue, ...]
    related: tuple[RelatedByKey, ...]
    trace_href: str | None
    group_href: str | None
    outcome: OutcomeLink | None
    previous: Neighbour | None
    next: Neighbour | None
    took_ms: float


async def message(site: Site, asked: MessageAsked | MessageAskedByQuery) -> MessageAnswer:
    """Read a message, and look for what belongs to it."""
    began = time.perf_counter()
    found = await site.relations.read(asked.stream, asked.offset)
    definitions = await site.keys_last_known()
    keys = key_values(site, definitions, found)
    # Once for each key, whose values are all asked for.
    sought = list({key.key: key for key in reversed(keys)}.values())[::-1]
    related: list[RelatedByKey | None] = [None] * len(sought)
    beside: list[Neighbour | None] = [None, None]
    became: list[OutcomeLink | None] = []
    limiter = anyio.CapacityLimiter(_ASKED_AT_ONCE)

    async def look(place: int, key: KeyValue) -> None:
        async with limiter:
            related[place] = await _related(site, definitions, found, key)

    async def step(place: int) -> None:
        beside[place] = await (following(site, found) if place else preceding(site, found))

    async def collect() -> None:
        became.append(await _became(site, found))

    async with anyio.create_task_group() as group:
        for place, key in enumerate(sought):
            group.start_soon(look, place, key)
        group.start_soon(collect)
        group.start_soon(step, 0)
        group.start_soon(step, 1)
    return MessageAnswer(
        stream=found.stream,
        offset=found.offset,
        href=site.links.message(found.stream, found.offset),
        stream_href=site.links.stream(found.stream),
        time=found.time,
        time_source=found.time_source.value,
        chunk_time=None if found.chunk_ms is None else datetime.fromtimestamp(found.chunk_ms / 1000, UTC),
        headers=named_values(site, "header", dict(found.headers)),
        properties=named_values(site, "property", properties_of(found)),
        body=_body(site, found, asked.view),
        keys=keys,
        # What few share says more.
        related=tuple(sorted((each for each in related if each is not None), key=lambda each: each.has_more)),
        trace_href=trace_href(site.options.trace_url, site.masking, found),
        group_href=None if membership(found.headers) is None else _group_href(site, found),
        outcome=became[0],
        previous=beside[0],
        next=beside[1],
        took_ms=ms_since(began),
    )


def _group_href(site: Site, found: Message) -> str:
    """By the message: the group's id may be masked."""
    return site.links.to("/groups/group", of_stream=found.stream, of_offset=str(found.offset))


async def _became(site: Site, found: Message) -> OutcomeLink | None:
    """What collectors made of the message, another one of the same id aside; where nobody can say, nothing is said."""
    try:
        outcome = await site.in_thread(partial(outcome_of, site, message_id_of(found)))
    except RelatumError:
        return None
    at = next((each for each in (outcome, *outcome.others) if (each.stream, each.offset) == tuple(found.id)), None)
    if at is None:
        return None
    href = site.links.to("/collectors/outcome", of_stream=found.stream, of_offset=str(found.offset))
    return OutcomeLink(at.status.value, href)


async def _related(site: Site, definitions: Sequence[KeyDefinition], found: Message, key: KeyValue) -> RelatedByKey:
    """What belongs to it by one key; that it could not be found out spoils no other key's."""
    try:
        answer = await site.relations.related(found, by=key.key, limit=RELATED_SHOWN + 1)
    except RelatumError as error:
        return RelatedByKey(key, "failed", words_of(site, error), (), has_more=False)
    has_more = len(answer) > RELATED_SHOWN
    messages = await _nearest(site, definitions, found, key) if has_more else answer.messages
    parts = _parts(site, definitions, found, messages or answer[:RELATED_SHOWN])
    return RelatedByKey(key, answer.status.value, answer.words, parts, has_more)


async def _nearest(
    site: Site, definitions: Sequence[KeyDefinition], found: Message, key: KeyValue
) -> tuple[Message, ...]:
    """Of many that share a value those nearest in time, of its own stream and of others; none where nobody can say."""
    definition = next(each for each in definitions if each.name == key.key)
    at = found.time
    if at is None:
        return ()
    near: list[Message] = []
    values = values_of(definition, found)
    if len(values) > 1:
        return ()
    try:
        others = tuple(name for name in await site.relations.streams() if name != found.stream)
        for streams in (others, (found.stream,)):
            if not streams or len(streams) > STREAMS_ASKED_MAX:
                continue
            ask = partial(site.relations.find, key.key, values[0], streams=streams)
            # Itself is among those of its own stream.
            near += await ask(until=at + _MICROSECOND, order="newest", limit=NEAREST_SHOWN + (streams is not others))
            near += await ask(since=at + _MICROSECOND, limit=NEAREST_SHOWN)
    except RelatumError:
        return ()
    return tuple(each for each in near if each.id != found.id)


def _parts(
    site: Site, definitions: Sequence[KeyDefinition], found: Message, messages: Sequence[Message]
) -> tuple[RelatedPart, ...]:
    """The same, by where they lie from it, nearest first."""
    parts: dict[Where, list[Message]] = {"elsewhere": [], "earlier": [], "later": []}
    for each in messages:
        is_later = _place(each) > _place(found)
        parts["elsewhere" if each.stream != found.stream else "later" if is_later else "earlier"].append(each)
    for some in parts.values():
        some.sort(key=lambda each: (_distance_us(found, each), abs(each.offset - found.offset)))
    return tuple(
        RelatedPart(where, tuple(message_row(site, definitions, each) for each in some))
        for where, some in parts.items()
        if some
    )


def _place(message: Message) -> tuple[int, int]:
    return (0 if message.time_us is None else message.time_us, message.offset)


def _distance_us(one: Message, other: Message) -> int:
    return sys.maxsize if one.time_us is None or other.time_us is None else abs(one.time_us - other.time_us)


def _body(site: Site, found: Message, view: str) -> Body:
    body, href = found.body, site.links.message(found.stream, found.offset, "body")
    if site.masking.hides_body(found):
        return Body("masked", len(body), "", (), False, "", (), None, None, "")
    kind = kind_of(body)
    text = text_of(body)
    fits = {
        "json": kind == "json",
        "image": kind == "image",
        "text": text is not None and bool(body),
        "hex": bool(body),
    }
    views = tuple(name for name, is_fit in fits.items() if is_fit)
    chosen = view if view in views else (views[0] if views else "")
    shown = Body(kind, len(body), chosen, views, False, "", (), None, image_type(body), href)
    if chosen == "json":
        parsed = tree(body)
        # More than a tree is good for.
        return _as_text(replace(shown, view="text"), text or "") if parsed is None else replace(shown, json=parsed)
    if chosen == "text":
        return _as_text(shown, text or "")
    if chosen == "hex":
        lines = tuple(hex_lines(body))
        return replace(shown, hex=lines, is_cut=16 * len(lines) < len(body))
    return shown


def _as_text(shown: Body, text: str) -> Body:
    # HTML has no NUL.
    visible = text[:TEXT_CHARACTERS_MAX].replace("\0", "⟨0⟩")
    return replace(shown, text=visible, is_cut=len(text) > TEXT_CHARACTERS_MAX)


async def _known(site: Site, asked: MessageAsked | MessageAskedByQuery) -> tuple[Known, ...]:
    """What one server knows of a message without the other."""
    if not site.servers.broker.error:
        found = await site.relations.read(asked.stream, asked.offset)
        words = f"RabbitMQ has the message: {size_text(len(found.body))}. Which values are masked is not known without "
        return ((words + "PostgreSQL, so its headers and its body are not shown.", None),)
    facts: list[Known] = []
    for each in await site.statuses([asked.stream]):
        by = [
            key for key, ranges in each.covered.items() if any(start <= asked.offset < stop for start, stop in ranges)
        ]
        words = f"recorded by {', '.join(by)}" if by else "not recorded"
        facts.append((f"PostgreSQL says that the offset {asked.offset:,} is {words}.", None))
        facts.append((f"What is recorded of {each.stream}", site.links.stream(each.stream)))
    return tuple(facts) or ((f"Nothing is recorded of {asked.stream}.", None),)


_SUMMARY: Final = "A message, with what belongs to it by each key."

MESSAGE = Endpoint(
    "/streams/{stream:name}/{offset:offset}",
    _SUMMARY,
    MessageAsked,
    MessageAnswer,
    message,
    template="message.html",
    page="message",
    known=_known,
)

MESSAGE_BY_QUERY = replace(MESSAGE, path="/message", asked=MessageAskedByQuery)
