"""A message: headers, properties, body, what belongs to it by each key, and its neighbours in the stream."""

import asyncio
import re
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Final, Literal

from pydantic import Field
from starlette.responses import Response

from relatum.checks import size_text
from relatum.errors import RelatumError
from relatum.keys import KeyDefinition, bases_of, preset
from relatum.membership import membership
from relatum.outcomes import OutcomeStatus
from relatum.reading import Message
from relatum_consumer.web.bodies import BodyKind, image_type, kind_of, text_of, whole_characters
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
from relatum_consumer.web.parameters import Number
from relatum_consumer.web.problems import Problem, Refused
from relatum_consumer.web.site import Site
from relatum_consumer.web.streams import StreamAsked, ends, statuses

RELATED_SHOWN: Final = 6
"""Messages of each key up to which all are shown; of more, those nearest in time, and a link leads to the others."""

NEAREST_SHOWN: Final = 2
"""Of those, messages of other streams and of its own, each earlier and later."""

_STRIDES: Final = (1, 16, 256, 4_096)
"""How far before a message its neighbour is looked for, in offsets: streams have gaps, mostly small ones."""

STREAMS_ASKED_MAX: Final = 50
"""Other streams up to which they are asked for apart."""

_MICROSECOND: Final = timedelta(microseconds=1)


class MessageAsked(StreamAsked):
    offset: Number = Field(description="Its offset.")
    view: Literal["", "json", "text", "hex", "image"] = Field("", description="How a page shows the body.")
    body_from: Number = Field(0, description="The first byte of the body to show.")
    body_bytes: int = Field(16_384, ge=0, le=65_536, description="Bytes of the body at most.")


@dataclass(frozen=True, slots=True)
class Body:
    """Bytes `start` to before `end` of a body of `bytes`: `part` is text, or hexadecimal where `is_hex`.

    `kind` is masked, with no part, where the body may hold a value that is not to be seen.
    """

    kind: BodyKind
    bytes: int
    start: int = 0
    end: int = 0
    is_hex: bool = False
    part: str = ""


@dataclass(frozen=True, slots=True)
class RelatedByKey:
    """Messages that share a key's value with this one, by time; those nearest in time where there are more of them.

    `status` and `words` as in a search; where it could not be found out, `status` is `failed`.
    """

    key: KeyValue
    status: Literal["found", "absent", "not_recorded_yet", "expired", "deleted", "unproven", "failed"]
    words: str
    results: tuple[MessageRow, ...]
    has_more: bool


@dataclass(frozen=True, slots=True)
class MessageAnswer:
    """A message, and what belongs to it by each key.

    `chunk_time` is when the broker wrote it. `previous_offset` and `next_offset` are its neighbours in the stream:
    offsets have gaps. `outcome` is its state in the collectors that took it, the least advanced; None where none did.
    `trace_url` is where its trace is shown, if somebody said where.
    """

    stream: str
    offset: int
    time: datetime | None
    time_source: str
    chunk_time: datetime | None
    keys: tuple[KeyValue, ...]
    headers: tuple[Named, ...]
    properties: tuple[Named, ...]
    body: Body
    previous_offset: int | None
    next_offset: int | None
    related: tuple[RelatedByKey, ...]
    is_in_group: bool
    outcome: OutcomeStatus | None
    trace_url: str | None


async def message(site: Site, asked: MessageAsked) -> MessageAnswer:
    """Read a message, and look for what belongs to it."""
    found = await site.relations.read(asked.stream, asked.offset)
    await site.keys_last_known()
    keys = key_values(site, found)
    # Once for each key, whose values are all asked for.
    related = gathered([partial(_related, site, found, key) for key in keys if not key.of_value])
    rows, outcome, previous, following = await asyncio.gather(
        related, _became(site, found), _preceding(site, found), _following(site, found)
    )
    return MessageAnswer(
        stream=found.stream,
        offset=found.offset,
        time=found.time,
        time_source=found.time_source.value,
        chunk_time=None if found.chunk_ms is None else datetime.fromtimestamp(found.chunk_ms / 1000, UTC),
        keys=keys,
        headers=named_values(site, "header", dict(found.headers)),
        properties=named_values(site, "property", properties_of(found)),
        body=_body(site, found, asked),
        previous_offset=previous,
        next_offset=following,
        # What few share says more.
        related=tuple(sorted(rows, key=lambda row: row.has_more)),
        is_in_group=membership(found.headers) is not None,
        outcome=outcome,
        trace_url=trace_url(site.options.trace_url, site.masking, found),
    )


async def _became(site: Site, found: Message) -> OutcomeStatus | None:
    """What collectors made of the message, another one of the same id aside; where nobody can say, nothing is said."""
    try:
        outcome = await site.in_thread(outcome_of, site, message_id_of(found))
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
    by_time = sorted(messages, key=lambda each: (each.time_us or 0, each.stream, each.offset))
    return RelatedByKey(key, answer.status.value, answer.words, message_rows(site, by_time), has_more)


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


def _body(site: Site, found: Message, asked: MessageAsked) -> Body:
    body = found.body
    if site.masking.hides_body(found):
        return Body("masked", len(body))
    start, is_hex = min(asked.body_from, len(body)), asked.view == "hex" or text_of(body) is None
    # Two digits a byte.
    end = min(len(body), start + (asked.body_bytes // 2 if is_hex else asked.body_bytes))
    if not is_hex:
        start, end = (whole_characters(body, at) for at in (start, end))
    part = body[start:end].hex() if is_hex else body[start:end].decode()
    return Body(kind_of(body), len(body), start, end, is_hex, part)


async def _known(site: Site, asked: MessageAsked) -> tuple[Known, ...]:
    """What one server knows of a message without the other; where it is not there, the ends of its stream."""
    if not site.servers.away:
        return await ends(site, asked)
    if not site.servers.broker.error:
        found = await site.relations.read(asked.stream, asked.offset)
        words = f"RabbitMQ has the message: {size_text(len(found.body))}. Which values are masked is not known without "
        return ((words + "PostgreSQL, so its headers and its body are not shown.", None),)
    facts: list[Known] = []
    for each in await statuses(site, [asked.stream]):
        by = [key for key, ranges in each.covered.items() if any(low <= asked.offset < high for low, high in ranges)]
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
    "A message: time, keys, headers, properties, a part of its body, and what belongs to it by each key.",
    template="message.html",
    page="message",
    tool="read",
    known=_known,
    files={"body": _body_file, "image": _image},
)(message)
