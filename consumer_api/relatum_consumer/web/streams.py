"""Streams: their coverage by key, their latest messages, the sizes of keys, and the recorders."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from typing import Final

from pydantic import Field

from relatum.errors import BrokerUnavailable, NotFound, StreamNotFound
from relatum.reading import Agreement, Message, agreement_of
from relatum.recording import StreamStatus, status
from relatum.recording.overview import (
    RecordedEnd,
    RecorderMember,
    key_sizes,
    recorded_ends,
    recorded_status,
    recorder_list,
)
from relatum_consumer.web.endpoint import Known, endpoint, gathered, in_patience
from relatum_consumer.web.messages import MessageRow, message_rows
from relatum_consumer.web.parameters import NoParameters, Number, Parameters, Several
from relatum_consumer.web.problems import Problem
from relatum_consumer.web.rendering import bar_of
from relatum_consumer.web.site import KEPT_S, Site

_SIZES_KEPT_S: Final = 30.0
"""Seconds for which the sizes of keys are cached: sampling them is slow."""

_LATEST: Final = 10
"""How many of a stream's latest messages are shown."""

_LATEST_OFFSETS: Final = 200
"""Offsets read of each stream for the latest messages: streams have gaps, mostly small ones."""

STREAMS_LOOKED: Final = 20
"""How many streams are read for `live`: the most recently recorded ones."""


async def statuses(site: Site, names: Sequence[str]) -> tuple[StreamStatus, ...]:
    """Return the status of some streams, at most a second old.

    An additional state is `complete`: all that the broker holds is recorded, and no recorder follows the stream.
    """
    wanted = tuple(names)
    away = BrokerUnavailable("RabbitMQ does not answer now")
    both = partial(status, site.options.broker, site.database, wanted)
    database_alone = partial(recorded_status, site.database.engine, site.address.vhost, wanted, away)
    found = await site.with_broker(("status", wanted), KEPT_S, both, database_alone) if wanted else []
    return tuple(replace(each, state="complete") if _is_complete(each) else each for each in found)


def _is_complete(each: StreamStatus) -> bool:
    is_whole = all(piece.kind in ("recorded", "hole") for piece in bar_of(each))
    return is_whole and each.state == "unattended" and each.lag_offsets == 0


# --- keys -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class KeyRow:
    """A key: its sources, and its rows in all streams, estimated from a sample unless `is_exact`.

    If it `names` another key, its value in a message is that key's value in the message's cause.
    """

    name: str
    sources: tuple[str, ...]
    type: str
    names: str | None
    since: datetime | None
    is_masked: bool
    rows: int
    bytes: int
    is_exact: bool


@dataclass(frozen=True, slots=True)
class KeysAnswer:
    """The keys, ordered by name."""

    keys: tuple[KeyRow, ...]


@endpoint("/keys", "The defined keys, by which messages can be found, with their sizes.", is_page=False, tool="keys")
async def keys(site: Site, _: NoParameters) -> KeysAnswer:
    sizes = await site.cached("sizes", _SIZES_KEPT_S, partial(site.in_thread, key_sizes, site.database))
    return KeysAnswer(
        tuple(
            KeyRow(
                name=each.definition.name,
                sources=tuple(each.definition.sources),
                type=each.definition.value_type.value,
                names=each.definition.names,
                since=each.definition.since,
                is_masked=site.masking.is_masked(each.definition),
                rows=each.rows,
                bytes=each.bytes,
                is_exact=each.is_exact,
            )
            for each in sizes
        )
    )


# --- all streams ------------------------------------------------------------------------------------------


class StreamsParameters(Parameters):
    q: str = Field("", description="A part of the streams' names.")
    limit: int = Field(50, ge=1, le=200, description="Streams on a page.")
    cursor: Number = Field(0, description="`next` of the previous page.")


@dataclass(frozen=True, slots=True)
class StreamsAnswer:
    """A page of the `total` matching streams, with the keys and the recorders. `recorded` counts all streams."""

    streams: tuple[StreamStatus, ...]
    total: int
    recorded: int
    keys: tuple[KeyRow, ...]
    recorders: tuple[RecorderMember, ...]
    next: int | None


@endpoint(
    "/streams", "The recorded streams: ends, lag, coverage, state; keys with their sizes; recorders.", tool="streams"
)
async def streams(site: Site, asked: StreamsParameters) -> StreamsAnswer:
    recorded = await site.relations.streams()
    named = [name for name in recorded if asked.q.casefold() in name.casefold()]
    stop = asked.cursor + asked.limit
    page = named[asked.cursor : stop]
    found = sorted(await statuses(site, page), key=lambda each: page.index(each.stream))
    recorders = await site.cached("recorders", KEPT_S, partial(site.in_thread, recorder_list, site.database))
    return StreamsAnswer(
        streams=tuple(found),
        total=len(named),
        recorded=len(recorded),
        keys=(await keys(site, NoParameters())).keys,
        recorders=tuple(recorders),
        next=stop if stop < len(named) else None,
    )


# --- one stream -------------------------------------------------------------------------------------------


class StreamParameters(Parameters):
    stream: str = Field(description="The stream, or a super stream, for its partitions.")


@dataclass(frozen=True, slots=True)
class StreamAnswer:
    """A stream with its latest messages, or a super stream with its partitions."""

    name: str
    streams: tuple[StreamStatus, ...]
    latest: tuple[MessageRow, ...]


async def ends(site: Site, asked: StreamParameters) -> tuple[Known, ...]:
    """Return the ends of a stream, which are all that the broker knows about it."""
    found = await (await site.reader()).bounds(asked.stream)
    if found.first is None or found.last is None:
        return (("The stream exists, and is empty.", None),)
    return (
        (f"The broker holds its messages {found.first:,} to {found.last:,}.", None),
        (f"The first message, {found.first:,}", site.links.message(asked.stream, found.first)),
        (f"The last message, {found.last:,}", site.links.message(asked.stream, found.last)),
    )


@endpoint("/stream", "A stream: its latest messages, coverage by key, skipped messages, events.", known=ends)
async def stream(site: Site, asked: StreamParameters) -> StreamAnswer:
    found = await statuses(site, [asked.stream])
    if not found:
        bounds = await (await site.reader()).bounds(asked.stream)
        holds = "it is empty" if bounds.last is None else f"it has the offsets {bounds.first:,} to {bounds.last:,}"
        message = f"the stream {asked.stream!r} exists ({holds}), but was never recorded"
        raise StreamNotFound(message, stream=asked.stream)
    latest: list[Message] = []
    if len(found) == 1 and (last := found[0].last) is not None:
        start = max(found[0].first or 0, last + 1 - _LATEST_OFFSETS)
        latest = await in_patience(site.scan(found[0].stream, start, last + 1)) or []
    return StreamAnswer(asked.stream, found, message_rows(site, latest[: -_LATEST - 1 : -1]))


# --- live -------------------------------------------------------------------------------------------------


class LiveParameters(Parameters):
    stream: Several = Field((), description="Streams and super streams; all by default.")
    limit: int = Field(50, ge=1, le=500, description="The most messages.")


@dataclass(frozen=True, slots=True)
class LiveAnswer:
    """The recorded messages that arrived last at the broker, newest first, regardless of their own times.

    Only the last offsets of `streams` are read, the twenty most recently recorded of `streams_count`: rare messages
    may be left out.
    """

    results: tuple[MessageRow, ...]
    streams: tuple[str, ...]
    streams_count: int


@endpoint("/live", "The recorded messages that arrived last.")
async def live(site: Site, asked: LiveParameters) -> LiveAnswer:
    """Return the latest messages; viewers of the same page share one read."""
    return await site.cached(("live", asked), KEPT_S, partial(_live, site, asked, _LATEST_OFFSETS))


async def newest(site: Site) -> LiveAnswer:
    """Return the latest messages of each stream, so that a busy stream does not hide the others."""
    asked = LiveParameters(stream=(), limit=500)
    return await site.cached("newest", KEPT_S, partial(_live, site, asked, asked.limit // STREAMS_LOOKED))


async def _live(site: Site, asked: LiveParameters, of_each: int) -> LiveAnswer:
    await site.keys()
    ends = await site.in_thread(recorded_ends, site.database, site.address.vhost, asked.stream)
    looked = ends[:STREAMS_LOOKED]
    read = await gathered((partial(_latest_recorded, site, end) for end in looked), STREAMS_LOOKED)
    found = [each for messages in read for each in messages[-of_each:]]
    found.sort(key=lambda message: (message.chunk_ms or 0, message.stream, message.offset), reverse=True)
    return LiveAnswer(
        results=message_rows(site, found[: asked.limit]),
        streams=tuple(end.stream for end in looked),
        streams_count=len(ends),
    )


async def _latest_recorded(site: Site, end: RecordedEnd) -> list[Message]:
    """Return a stream's last recorded messages; none if the stream is not the recorded one any more."""
    if end.position is None:
        return []
    try:
        messages = await site.scan(end.stream, max(0, end.next_offset - _LATEST_OFFSETS), end.next_offset)
    except NotFound:
        return []
    last = next((each for each in messages if each.offset == end.position.offset), None)
    is_same = last is not None and agreement_of(end.position, last) is Agreement.SAME
    return messages if is_same else []


# --- health -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class HealthAnswer:
    """Both servers answer. If one does not, the response is an error with status 503 instead."""

    is_well: bool


@endpoint("/health", "Whether the database and the broker answer.", is_page=False, needs_keys=False)
async def health(site: Site, _: NoParameters) -> HealthAnswer:
    if away := await site.away(now=True):
        wrong = "; ".join(f"{each.name} does not answer: {each.error}" for each in away)
        raise Problem(503, "not_well", wrong, "It may pass: try again.", {"Retry-After": "1"})
    return HealthAnswer(is_well=True)
