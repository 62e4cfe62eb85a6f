"""What tools answer that no page shows alike: a message in parts, what belongs to it, and what was around a moment."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Annotated, Final

import anyio

from relatum.errors import InvalidInput, KeyNotDefined, RelatumError
from relatum.reading import Message
from relatum_consumer import Status
from relatum_consumer.web.bodies import BodyKind, kind_of, text_of, whole_characters
from relatum_consumer.web.documents import copied
from relatum_consumer.web.endpoint import problem_met
from relatum_consumer.web.message import MessageFacts, facts_of
from relatum_consumer.web.messages import HoldsOver, MessageRow, held_over, key_values, message_row
from relatum_consumer.web.parameters import Parameter
from relatum_consumer.web.search import SearchAnswer, SearchAsked, search
from relatum_consumer.web.site import Site

BODY_BYTES_MAX: Final = 16_384
"""Bytes of a body in one answer."""

_BODY_BYTES: Final = 4_096

_KEYS_ASKED: Final = 8
"""Values of a message that are asked by in one answer."""

_AT_ONCE: Final = 4

_SPAN_S: Final = 30.0

# --- read -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ReadAsked:
    """Which message, and which part of its body."""

    stream: Annotated[str, Parameter("The stream.")]
    offset: Annotated[int, Parameter("Its offset.", least=0)]
    body_from: Annotated[int, Parameter("The first byte of the body to show.", least=0)] = 0
    body_bytes: Annotated[int, Parameter("Bytes of the body at most.", least=0, most=BODY_BYTES_MAX)] = _BODY_BYTES


@dataclass(frozen=True, slots=True)
class BodyPart:
    """Bytes `start` to before `end` of a body of `bytes`: `part` is text, or hexadecimal where `is_hex`.

    `kind` is masked, with no part, where the body may hold a value that is not to be seen.
    """

    kind: BodyKind
    bytes: int
    start: int
    end: int
    is_hex: bool
    part: str


@dataclass(frozen=True, slots=True)
class ReadAnswer(MessageFacts):
    """A message. `previous_offset` and `next_offset` are its neighbours in the stream: offsets have gaps."""

    body: BodyPart


async def read(site: Site, asked: ReadAsked) -> ReadAnswer:
    """Read a message."""
    found = await site.relations.read(asked.stream, asked.offset)
    facts = await facts_of(site, await site.keys(), found)
    return copied(ReadAnswer, facts, body=_part(site, found, asked))


def _part(site: Site, found: Message, asked: ReadAsked) -> BodyPart:
    body = found.body
    if site.masking.hides_body(found):
        return BodyPart("masked", len(body), 0, 0, is_hex=False, part="")
    start, is_hex = min(asked.body_from, len(body)), text_of(body) is None
    # Two digits a byte.
    end = min(len(body), start + (asked.body_bytes // 2 if is_hex else asked.body_bytes))
    if is_hex:
        part = body[start:end].hex()
    else:
        start, end = (whole_characters(body, at) for at in (start, end))
        part = body[start:end].decode()
    return BodyPart(kind_of(body), len(body), start, end, is_hex=is_hex, part=part)


# --- related ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RelatedAsked:
    """Which message, by which of its keys, and where."""

    stream: Annotated[str, Parameter("The stream of the message …")]
    offset: Annotated[int, Parameter("… and its offset.", least=0)]
    key: Annotated[str, Parameter("The key by which others belong to it; each that it has where left out.")] = ""
    of_value: Annotated[int, Parameter("Which of its values, where it has several of the key.", least=0)] = 0
    to: Annotated[tuple[str, ...], Parameter("Streams and super streams to look in; all where left out.")] = ()
    order: Annotated[str, Parameter("Which come first.", choices=("oldest", "newest"))] = "oldest"
    complete: Annotated[bool, Parameter("Also read what is not recorded yet.")] = False
    limit: Annotated[int, Parameter("Messages at most, of each key.", least=1, most=100)] = 10
    cursor: Annotated[str, Parameter("`next` of the answer before, of the same key.")] = ""


@dataclass(frozen=True, slots=True)
class RelatedByValue:
    """What shares a value with the message: an answer, or why there is none, which spoils no other key's."""

    key: str
    of_value: int
    answer: SearchAnswer | None
    failed: str


@dataclass(frozen=True, slots=True)
class RelatedAnswer:
    """What belongs to a message by the values that it has; the message itself is left out.

    `not_asked` are keys for which there was no room: ask by each.
    """

    stream: str
    offset: int
    words: str
    by: tuple[RelatedByValue, ...]
    not_asked: tuple[str, ...]


async def related(site: Site, asked: RelatedAsked) -> RelatedAnswer:
    """Look for what belongs to a message, by one of its keys or by each."""
    if asked.cursor and not asked.key:
        raise InvalidInput("key is missing: a cursor goes on with one key")
    found = await site.relations.read(asked.stream, asked.offset)
    definitions = await site.keys()
    if asked.key and asked.key not in {each.name for each in definitions}:
        raise KeyNotDefined(f"no key {asked.key!r} is defined", key=asked.key)
    values = key_values(site, definitions, found)
    numbered = [(each.key, [one.key for one in values[:place]].count(each.key)) for place, each in enumerate(values)]
    chosen = [each for each in numbered if each == (asked.key, asked.of_value)] if asked.key else numbered
    rows: list[RelatedByValue | None] = [None] * len(chosen[:_KEYS_ASKED])
    limiter = anyio.CapacityLimiter(_AT_ONCE)

    async def look(place: int, key: str, number: int) -> None:
        async with limiter:
            rows[place] = await _by_value(site, asked, key, number)

    async with anyio.create_task_group() as group:
        for place, (key, number) in enumerate(chosen[:_KEYS_ASKED]):
            group.start_soon(look, place, key, number)
    lacks = f"no such value of the key {asked.key!r}" if asked.key else "no value of any key"
    return RelatedAnswer(
        stream=found.stream,
        offset=found.offset,
        words="the message was read: see each key" if chosen else f"absent: it has {lacks}, so nothing was looked for",
        by=tuple(row for row in rows if row is not None),
        not_asked=tuple(dict.fromkeys(key for key, _ in chosen[_KEYS_ASKED:])),
    )


async def _by_value(site: Site, asked: RelatedAsked, key: str, number: int) -> RelatedByValue:
    of_message = SearchAsked(
        key=key,
        of_stream=asked.stream,
        of_offset=asked.offset,
        of_value=number,
        stream=asked.to,
        order=asked.order,
        complete=asked.complete,
        limit=asked.limit,
        cursor=asked.cursor,
    )
    try:
        return RelatedByValue(key, number, await search(site, of_message), "")
    except RelatumError as error:
        if asked.key:
            raise
        return RelatedByValue(key, number, None, problem_met(error).words)


# --- around -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AroundAsked:
    """Which moment, or that of which message, and how far from it."""

    moment: Annotated[datetime | None, Parameter("The moment; UTC where no zone is given. Or …")] = None
    stream: Annotated[str, Parameter("… the stream of a message, for its time …")] = ""
    offset: Annotated[int | None, Parameter("… and its offset.", least=0)] = None
    streams: Annotated[tuple[str, ...], Parameter("Streams and super streams to look in; all where left out.")] = ()
    before_s: Annotated[float, Parameter("Seconds before it.", least=0, most=1_000_000)] = _SPAN_S
    after_s: Annotated[float, Parameter("Seconds after it.", least=0, most=1_000_000)] = _SPAN_S
    complete: Annotated[bool, Parameter("Also read what is not recorded yet.")] = False
    limit: Annotated[int, Parameter("Messages at most, those nearest to the moment.", least=1, most=100)] = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class AroundAnswer(HoldsOver):
    """What happened around a moment, in all streams, by time. Where `has_more`, others lie further from the moment."""

    status: Status
    words: str
    moment: datetime
    since: datetime
    until: datetime
    results: tuple[MessageRow, ...]
    has_more: bool


async def around(site: Site, asked: AroundAsked) -> AroundAnswer:
    """Look for what happened around a moment."""
    given = [asked.moment is not None, bool(asked.stream), asked.offset is not None]
    if given not in ([True, False, False], [False, True, True]):
        raise InvalidInput("give a moment, or stream and offset of a message for its time; streams says where to look")
    start: Message | datetime = asked.moment or await site.relations.read(asked.stream, asked.offset or 0)
    moment = start if isinstance(start, datetime) else start.time
    if moment is None:
        raise InvalidInput("this message has no time: give a moment")
    try:
        since, until = moment - timedelta(seconds=asked.before_s), moment + timedelta(seconds=asked.after_s)
    except OverflowError:
        raise InvalidInput("the moment is too near to where time ends") from None
    answer = await site.relations.around(
        start,
        asked.streams or None,
        before_s=asked.before_s,
        after_s=asked.after_s,
        limit=asked.limit + 1,
        complete=asked.complete,
    )
    nearest = _nearest(answer.messages, moment, asked.limit)
    definitions = await site.keys()
    return AroundAnswer(
        status=answer.status,
        words=f"{answer.words}. {answer.explanation}" if answer.unattended else answer.words,
        moment=moment.astimezone(UTC),
        since=since.astimezone(UTC),
        until=until.astimezone(UTC),
        results=tuple(message_row(site, definitions, each) for each in nearest),
        has_more=len(answer) > asked.limit,
        **held_over(answer),
    )


def _nearest(messages: Sequence[Message], moment: datetime, most: int) -> list[Message]:
    """Those nearest to a moment, as they stand."""
    places = sorted(range(len(messages)), key=lambda place: abs((messages[place].time or moment) - moment))
    return [messages[place] for place in sorted(places[:most])]
