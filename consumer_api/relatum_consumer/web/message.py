"""A message: headers, properties, body, what belongs to it by each key, and its neighbours in the stream."""

import asyncio
import re
import sys
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Annotated, Any, Final, Literal

from starlette.responses import Response

from relatum.checks import size_text
from relatum.errors import RelatumError
from relatum.keys import KeyDefinition, bases_of, preset
from relatum.membership import membership
from relatum.outcomes import OutcomeStatus
from relatum.reading import Message
from relatum_consumer.web.bodies import (
    TEXT_CHARACTERS_MAX,
    BodyKind,
    Node,
    hex_lines,
    image_type,
    kind_of,
    text_of,
    tree,
)
from relatum_consumer.web.collectors import message_id_of, outcome_of
from relatum_consumer.web.endpoint import Known, endpoint, file_of, gathered, words_of
from relatum_consumer.web.masking import Masking
from relatum_consumer.web.messages import (
    KeyValue,
    MessageRow,
    Named,
    key_values,
    message_rows,
    named_values,
    properties_of,
    values_of,
)
from relatum_consumer.web.options import TRACE_ID
from relatum_consumer.web.parameters import Parameter
from relatum_consumer.web.problems import Problem, Refused
from relatum_consumer.web.site import Site

RELATED_SHOWN: Final = 6
"""Messages of each key up to which all are shown; of more, those nearest in time, and a link leads to the others."""

NEAREST_SHOWN: Final = 2
"""Of those, messages of each part: of other streams and of its own, each earlier and later."""

_STRIDES: Final = (1, 16, 256, 4_096)
"""How far before a message its neighbour is looked for, in offsets: streams have gaps, mostly small ones."""

STREAMS_ASKED_MAX: Final = 50
"""Other streams up to which they are asked for apart."""

_MICROSECOND: Final = timedelta(microseconds=1)

Where = Literal["elsewhere", "earlier", "later"]


@dataclass(frozen=True, slots=True)
class MessageAsked:
    stream: Annotated[str, Parameter("The stream.")]
    offset: Annotated[int, Parameter("Its offset.")]
    view: Annotated[Literal["", "json", "text", "hex", "image"], Parameter("How the body is shown.")] = ""


@dataclass(frozen=True, slots=True)
class Body:
    """A body. `text`, `hex` or `json` is there by `view`, cut where `is_cut`; `views` are those that fit it."""

    kind: BodyKind
    bytes: int
    view: str = ""
    views: tuple[str, ...] = ()
    is_cut: bool = False
    text: str = ""
    hex: tuple[str, ...] = ()
    json: Node | None = None
    image_type: str | None = None


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
class MessageFacts:
    """A message. `previous_offset` and `next_offset` are its neighbours in the stream: offsets have gaps."""

    stream: str
    offset: int
    time: datetime | None
    time_source: str
    keys: tuple[KeyValue, ...]
    headers: tuple[Named, ...]
    properties: tuple[Named, ...]
    previous_offset: int | None
    next_offset: int | None


@dataclass(frozen=True, slots=True)
class MessageAnswer(MessageFacts):
    """A message, and what belongs to it by each key.

    `chunk_time` is when the broker wrote it, `outcome` its state in the collectors that took it, the least advanced;
    None where none did. `trace_url` is where its trace is shown, if somebody said where.
    """

    chunk_time: datetime | None
    body: Body
    related: tuple[RelatedByKey, ...]
    is_in_group: bool
    outcome: OutcomeStatus | None
    trace_url: str | None


async def facts_of(site: Site, found: Message) -> dict[str, Any]:
    """The fields of `MessageFacts`."""
    previous, following = await gathered([partial(_preceding, site, found), partial(_following, site, found)])
    return {
        "stream": found.stream,
        "offset": found.offset,
        "time": found.time,
        "time_source": found.time_source.value,
        "keys": key_values(site, found),
        "headers": named_values(site, "header", dict(found.headers)),
        "properties": named_values(site, "property", properties_of(found)),
        "previous_offset": previous,
        "next_offset": following,
    }


async def message(site: Site, asked: MessageAsked) -> MessageAnswer:
    """Read a message, and look for what belongs to it."""
    found = await site.relations.read(asked.stream, asked.offset)
    await site.keys_last_known()
    # Once for each key, whose values are all asked for.
    sought = [key for key in key_values(site, found) if not key.of_value]

    async def related() -> list[RelatedByKey]:
        rows = await gathered([partial(_related, site, found, key) for key in sought])
        # What few share says more.
        return sorted(rows, key=lambda row: row.has_more)

    rows, outcome, facts = await asyncio.gather(related(), _became(site, found), facts_of(site, found))
    return MessageAnswer(
        **facts,
        chunk_time=None if found.chunk_ms is None else datetime.fromtimestamp(found.chunk_ms / 1000, UTC),
        body=_body(site, found, asked.view),
        related=tuple(rows),
        is_in_group=membership(found.headers) is not None,
        outcome=outcome,
        trace_url=trace_url(site.options.trace_url, site.masking, found),
    )


async def _became(site: Site, found: Message) -> OutcomeStatus | None:
    """What collectors made of the message, another one of the same id aside; where nobody can say, nothing is said."""
    try:
        outcome = await site.in_thread(partial(outcome_of, site, message_id_of(found)))
    except RelatumError:
        return None
    both = (outcome, *outcome.others)
    return next((each.status for each in both if (each.stream, each.offset) == tuple(found.id)), None)


async def _related(site: Site, found: Message, key: KeyValue) -> RelatedByKey:
    """What belongs to it by one key; that it could not be found out spoils no other key's."""
    try:
        answer = await site.relations.related(found, by=key.key, limit=RELATED_SHOWN + 1)
    except RelatumError as error:
        return RelatedByKey(key, "failed", words_of(site, error), (), has_more=False)
    has_more = len(answer) > RELATED_SHOWN
    messages: Sequence[Message] = answer.messages
    if has_more:
        messages = await _nearest(site, site.definitions[key.key], found) or answer[:RELATED_SHOWN]
    parts: dict[Where, list[Message]] = {"elsewhere": [], "earlier": [], "later": []}
    for each in messages:
        is_later = _place(each) > _place(found)
        parts["elsewhere" if each.stream != found.stream else "later" if is_later else "earlier"].append(each)
    for some in parts.values():
        some.sort(key=lambda each: (_distance_us(found, each), abs(each.offset - found.offset)))
    shown = tuple(RelatedPart(where, message_rows(site, some)) for where, some in parts.items() if some)
    return RelatedByKey(key, answer.status.value, answer.words, shown, has_more)


async def _nearest(site: Site, definition: KeyDefinition, found: Message) -> tuple[Message, ...]:
    """Of many that share a value those nearest in time, of its own stream and of others; none where nobody can say."""
    at, values = found.time, values_of(definition, found)
    if at is None or len(values) > 1:
        return ()
    near: list[Message] = []
    try:
        others = tuple(name for name in await site.relations.streams() if name != found.stream)
        for streams in (others, (found.stream,)):
            if not streams or len(streams) > STREAMS_ASKED_MAX:
                continue
            ask = partial(site.relations.find, definition.name, values[0], streams=streams)
            # Itself is among those of its own stream.
            near += await ask(until=at + _MICROSECOND, order="newest", limit=NEAREST_SHOWN + (streams is not others))
            near += await ask(since=at + _MICROSECOND, limit=NEAREST_SHOWN)
    except RelatumError:
        return ()
    return tuple(each for each in near if each.id != found.id)


def _place(message: Message) -> tuple[int, int]:
    return (0 if message.time_us is None else message.time_us, message.offset)


def _distance_us(one: Message, other: Message) -> int:
    return sys.maxsize if one.time_us is None or other.time_us is None else abs(one.time_us - other.time_us)


def _body(site: Site, found: Message, view: str) -> Body:
    body = found.body
    if site.masking.hides_body(found):
        return Body("masked", len(body))
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
    shown = Body(kind, len(body), chosen, views, image_type=image_type(body))
    parsed = tree(body) if chosen == "json" else None
    if parsed is not None:
        return replace(shown, json=parsed)
    if chosen == "hex":
        lines = tuple(hex_lines(body))
        return replace(shown, hex=lines, is_cut=16 * len(lines) < len(body))
    if chosen in ("text", "json"):
        # JSON may be more than a tree is good for; and HTML has no NUL.
        visible = (text or "")[:TEXT_CHARACTERS_MAX].replace("\0", "⟨0⟩")
        return replace(shown, view="text", text=visible, is_cut=len(text or "") > TEXT_CHARACTERS_MAX)
    return shown


async def _known(site: Site, asked: MessageAsked) -> tuple[Known, ...]:
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


(_TRACE,) = preset("traceparent")

_TRACE_ID: Final = re.compile(r"[0-9a-f]{16}|[0-9a-f]{32}")
"""A trace's id, of 64 or 128 bits. What a header has in its place is anybody's, and no part of an address."""


def trace_url(pattern: str | None, masking: Masking, message: Message) -> str | None:
    """Where the trace of a message is shown; None where nobody said where, or the message carries no id to show."""
    if pattern is None or masking.is_masked(_TRACE):
        return None
    values, _ = _TRACE.read(bases_of(message))
    return pattern.replace(TRACE_ID, values[0]) if values and _TRACE_ID.fullmatch(values[0]) else None


async def _following(site: Site, found: Message) -> int | None:
    """The message after it, where the stream has one; None also where nobody can say now."""
    try:
        reader = await site.reader()
        async with aclosing(reader.iterate(found.stream, found.offset + 1)) as later:
            async for each in later:
                return each.offset
    except RelatumError:
        pass
    return None


async def _preceding(site: Site, found: Message) -> int | None:
    """The message before it. Offsets have gaps: where the one before is none, those before that are read."""
    try:
        reader = await site.reader()
        for stride in _STRIDES:
            start = max(0, found.offset - stride)
            before = await reader.scan(found.stream, start, found.offset, lambda each: each.offset)
            if before:
                return max(before)
            if start == 0:
                break
    except RelatumError:
        pass
    return None


# --- its body as a file -----------------------------------------------------------------------------------

_MASKED: Final = Problem(403, "bodies_masked", "this body is not shown here", "Who set up the page can allow it.")
_NO_IMAGE: Final = Problem(404, "no_image", "this body is no image of a kind that is shown", "Download it instead.")


async def _body_file(site: Site, asked: MessageAsked) -> Response:
    # No part of the stream's name: it may be anything.
    name = f"message-{asked.offset}.bin"
    return file_of(await _shown_body(site, asked), "application/octet-stream", name)


async def _image(site: Site, asked: MessageAsked) -> Response:
    body = await _shown_body(site, asked)
    kind = image_type(body)
    if kind is None:
        raise Refused(_NO_IMAGE)
    return file_of(body, kind)


async def _shown_body(site: Site, asked: MessageAsked) -> bytes:
    await site.keys()
    found = await site.relations.read(asked.stream, asked.offset)
    if site.masking.hides_body(found):
        raise Refused(_MASKED)
    return found.body


endpoint(
    "/message",
    "A message, with what belongs to it by each key.",
    template="message.html",
    page="message",
    known=_known,
    files={"body": _body_file, "image": _image},
)(message)
