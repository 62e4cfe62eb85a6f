"""A message: headers, properties, body, related messages by key, and neighbours in the stream."""

import asyncio
from collections.abc import Sequence
from contextlib import aclosing, suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from operator import attrgetter
from typing import Final, Literal

from pydantic import Field
from starlette.responses import Response

from relatum.errors import RelatumError, UndecodableMessage
from relatum.keys import KeyDefinition
from relatum.membership import membership
from relatum.outcomes import Outcome
from relatum.reading import Message
from relatum.store.database import sql
from relatum_consumer.lookups.by_key import rows_of, span_parameters, streams_with
from relatum_consumer.lookups.catalog import streams_meant
from relatum_consumer.web.collectors import outcomes_of
from relatum_consumer.web.endpoint import Form, endpoint, failure_text, gather, optional_part
from relatum_consumer.web.messages import (
    BodyKind,
    KeyValue,
    MessageRow,
    Named,
    character_start,
    key_values,
    kind_of,
    message_rows,
    named_values,
    text_of,
    values_of,
)
from relatum_consumer.web.parameters import Number, just_after, parsed
from relatum_consumer.web.problems import Problem
from relatum_consumer.web.site import Site
from relatum_consumer.web.streams import StreamParameters, ends

RELATED_SHOWN: Final = 6
"""Maximum related messages shown for a key. If there are more, the nearest in time are shown, with a link to all."""

NEAREST_SHOWN: Final = 2
"""Maximum nearest messages before and after the message, each for other streams and for its own stream."""

COUNTED_MAX: Final = 1_000
"""Maximum recorded messages of a value to count, which takes a few milliseconds."""

_COUNT: Final = sql(
    f"""
    WITH RECURSIVE {streams_with(":key_id::smallint", ":value::text", "")}
    SELECT count(*) FROM (SELECT FROM with_value JOIN relatum.streams s USING (stream_id)
      CROSS JOIN LATERAL {rows_of("oldest", ("key_id", "value", "stream_id"), floor="coalesce(s.retained_from, 0)")} r
      WHERE {streams_meant(None)} LIMIT :limit::bigint) AS counted
    """
)
"""Counts, up to `limit`, the rows of a value in current streams of `vhost` whose messages retention has not dropped."""

_STRIDES: Final = (16, 4_096)
"""Offsets to search before a message for its predecessor, step by step: most gaps are small."""

NEAREST_STREAMS_MAX: Final = 50
"""Maximum other streams in which the nearest messages are looked up; if there are more, none is searched."""


class MessageParameters(StreamParameters):
    offset: Number = Field(description="The message's offset.")
    view: Literal["", "json", "text", "hex"] = Field("", description="How to show the body; hex applies to any body.")
    body_from: Number = Field(0, description="The first byte of the body to show.")
    body_bytes: int = Field(16_384, ge=0, le=65_536, description="Maximum bytes of the body to return.")


@dataclass(frozen=True, slots=True)
class Body:
    """The bytes [`start`, `end`) of a body of `bytes` bytes: `part` is text, or hexadecimal if `is_hex`.

    `kind` is `masked`, without a part, if the body may contain a masked value; `unreadable` if it cannot be unpacked.
    """

    kind: BodyKind
    bytes: int
    start: int = 0
    end: int = 0
    is_hex: bool = False
    part: str = ""


@dataclass(frozen=True, slots=True)
class RelatedByKey:
    """The messages that share a key's value with this message, by time; if there are many, only the nearest in time.

    `status` and `words` are as in a search. If the lookup failed, `status` is `failed`. If `has_more`, `recorded` is
    the number of recorded messages with the value, up to 1,001; None if they were not counted.
    """

    key: KeyValue
    status: Literal["found", "absent", "not_recorded_yet", "expired", "deleted", "unproven", "failed"]
    words: str
    results: tuple[MessageRow, ...]
    has_more: bool
    recorded: int | None = None


@dataclass(frozen=True, slots=True)
class MessageAnswer:
    """A message, and the messages related to it by each key.

    `chunk_time` is the time when the broker wrote it. `previous_offset` and `next_offset` are the offsets of its
    neighbours in the stream, which has gaps. `outcomes` has its outcomes in collectors, least advanced first, with
    reasons unless these may contain masked values.
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
    outcomes: tuple[Outcome, ...]


@endpoint(
    "/message",
    "A message: time, keys, headers, properties, a part of its body, and its related messages by each key.",
    tool="read",
    facts=ends,
)
async def message(site: Site, query: MessageParameters) -> MessageAnswer:
    found = await site.relations.read(query.stream, query.offset)
    keys = key_values(site, found)
    # One lookup for each key covers all its values.
    related = gather([partial(_related, site, found, key) for key in keys if not key.of_value])
    rows, outcomes, (previous, following) = await asyncio.gather(
        related, optional_part(site.in_thread(outcomes_of, site, found)), _neighbours(site, found)
    )
    return MessageAnswer(
        stream=found.stream,
        offset=found.offset,
        time=found.time,
        time_source=found.time_source.value,
        chunk_time=None if found.chunk_ms is None else datetime.fromtimestamp(found.chunk_ms / 1000, UTC),
        keys=keys,
        headers=named_values(site, "header", dict(found.headers)),
        properties=named_values(
            site, "property", {name: each for name, each in asdict(found.properties).items() if each is not None}
        ),
        body=_body_part(site, found, query),
        previous_offset=previous,
        next_offset=following,
        # Values that few messages share come first: they are more specific.
        related=tuple(sorted(rows, key=lambda row: row.has_more)),
        is_in_group=membership(found.headers) is not None,
        outcomes=outcomes or (),
    )


async def _related(site: Site, found: Message, key: KeyValue) -> RelatedByKey:
    """Return the messages related by one key. An error becomes a part of the answer, so other keys still answer."""
    try:
        answer = await site.relations.related(found, by=key.key, limit=RELATED_SHOWN + 1)
    except RelatumError as error:
        return RelatedByKey(key, "failed", failure_text(site, error), (), has_more=False)
    messages: Sequence[Message] = answer.messages
    recorded, has_more = None, len(answer) > RELATED_SHOWN
    if has_more:
        definition = site.masking.definitions[key.key]
        messages = await optional_part(_nearest(site, definition, found)) or answer[:RELATED_SHOWN]
        recorded = await optional_part(site.in_thread(_recorded, site, definition, found))
    by_time = sorted(messages, key=lambda each: (each.time_us or 0, each.stream, each.offset))
    return RelatedByKey(key, answer.status.value, answer.words, message_rows(site, by_time), has_more, recorded)


def _recorded(site: Site, definition: KeyDefinition, found: Message) -> int | None:
    """Return how many recorded messages have the message's value; None if it has several."""
    (value, *others) = definition.values_of(found)
    wanted = {"vhost": site.address.vhost, "key_id": definition.key_id, "value": value, "limit": COUNTED_MAX + 1}
    return None if others else site.database.rows(_COUNT, wanted | span_parameters(None, None))[0][0]


async def _nearest(site: Site, definition: KeyDefinition, found: Message) -> tuple[Message, ...]:
    """Return the nearest messages in time with the same value; none if the message has no time or several values."""
    at, values = found.time, values_of(definition, found)
    if at is None or len(values) > 1:
        return ()
    nearest: list[Message] = []
    others = [name for name in await site.relations.streams() if name != found.stream]
    # A lookup with the name of a deleted stream is an error.
    deleted = await site.reader.missing(others) if 0 < len(others) <= NEAREST_STREAMS_MAX else others
    others = [name for name in others if name not in deleted]
    for streams in filter(None, (others, [found.stream])):
        find = partial(site.relations.find, definition.name, values[0], streams=streams)
        # One more from the message's own stream, since the lookup returns the message itself.
        later = just_after(at)
        nearest += await find(until=later, order="newest", limit=NEAREST_SHOWN + (streams is not others))
        nearest += await find(since=later, limit=NEAREST_SHOWN) if later else ()
    return tuple(each for each in nearest if each.id != found.id)


def _body_part(site: Site, found: Message, query: MessageParameters) -> Body:
    try:
        body = found.body
    except UndecodableMessage:
        return Body("unreadable", 0)
    if site.masking.hides_body(found):
        return Body("masked", len(body))
    start, is_hex = min(query.body_from, len(body)), query.view == "hex" or text_of(body) is None
    end = min(len(body), start + (query.body_bytes // 2 if is_hex else query.body_bytes))
    if not is_hex:
        start, end = (character_start(body, at) for at in (start, end))
    part = body[start:end].hex() if is_hex else body[start:end].decode()
    return Body(kind_of(body), len(body), start, end, is_hex, part)


async def _neighbours(site: Site, found: Message) -> tuple[int | None, int | None]:
    """Return the offsets of the messages before and after; None if there is none, or the broker cannot answer."""
    previous = following = None
    stream, offset = found.id
    with suppress(RelatumError, StopAsyncIteration):
        # Offsets have gaps, so the search widens.
        for stride in _STRIDES:
            start = max(0, offset - stride)
            previous = max(await site.reader.scan(stream, start, offset, attrgetter("offset")), default=None)
            if previous is not None or not start:
                break
        async with aclosing(site.reader.iterate(stream, offset + 1)) as later:
            following = (await anext(later)).offset
    return previous, following


# --- the body as a file -----------------------------------------------------------------------------------

_FILE_POLICY: Final = "sandbox; default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'"
"""The security policy of the file: opened in a browser, it has its own origin, and loads and runs nothing."""


async def body_file(site: Site, form: Form) -> Response:
    query = parsed(MessageParameters, form)
    await site.keys_last_known()
    found = await site.relations.read(query.stream, query.offset)
    if site.masking.hides_body(found):
        raise Problem(403, "bodies_masked", "this body is not shown here", "The page's administrator can allow it.")
    # The file's name omits the stream's name, which may have any characters.
    disposition = f'attachment; filename="message-{query.offset}.bin"'
    headers = {"Content-Security-Policy": _FILE_POLICY, "Content-Disposition": disposition}
    return Response(found.body, headers=headers, media_type="application/octet-stream")
