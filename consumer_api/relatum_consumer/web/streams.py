"""Streams: their coverage by key, their latest messages, the sizes of keys, and the recorders."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from typing import Final

from pydantic import Field

from relatum.errors import AccessRefused, BrokerUnavailable, NotFound, StreamNotFound, StreamUnavailable
from relatum.reading import Agreement, Message, agreement_of
from relatum.recording import StreamStatus, status
from relatum.recording.overview import RecorderMember, key_sizes, recorded_status, recorded_tails, recorder_list
from relatum.store.coverage import CoverageRow
from relatum_consumer.web.endpoint import Fact, endpoint, gather, optional_part
from relatum_consumer.web.messages import MessageRow, message_rows
from relatum_consumer.web.parameters import Number, Parameters, TextList
from relatum_consumer.web.problems import Problem
from relatum_consumer.web.rendering import bar_of
from relatum_consumer.web.site import CACHE_S, Site

_SIZES_CACHE_S: Final = 30.0
"""Seconds for which the sizes of keys are cached: sampling them is slow."""

_LATEST_SHOWN: Final = 10
"""How many of a stream's latest messages are shown."""

_LATEST_OFFSETS: Final = 200
"""Offsets at each stream's end that are read for its latest messages: streams have gaps, most of them small."""

LIVE_STREAMS_MAX: Final = 20
"""Maximum streams that `live` reads: the most recently recorded streams."""


async def statuses(site: Site, names: Sequence[str]) -> tuple[StreamStatus, ...]:
    """Return the status of streams, at most a second old.

    There is one more state, `complete`: all retained messages are recorded, and no recorder follows the stream.
    """
    wanted = tuple(names)
    unavailable = BrokerUnavailable("RabbitMQ does not answer now")
    from_both = partial(status, site.options.broker, site.database, wanted)
    from_database = partial(recorded_status, site.database.engine, site.address.vhost, wanted, unavailable)
    found = await site.with_broker(("status", wanted), CACHE_S, from_both, from_database) if wanted else []
    return tuple(replace(each, state="complete") if _is_complete(each) else each for each in found)


def _is_complete(each: StreamStatus) -> bool:
    is_whole = all(piece.kind in ("recorded", "hole") for piece in bar_of(each))
    return is_whole and each.state == "unattended" and each.lag_offsets == 0


# --- keys -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class KeyRow:
    """A key: its sources, and its rows in all streams, estimated from a sample unless `is_exact`.

    If it `names` another key, its value in a message equals that key's value in the message's cause.
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
async def keys(site: Site, _: Parameters) -> KeysAnswer:
    sizes = await site.cached("sizes", _SIZES_CACHE_S, partial(site.in_thread, key_sizes, site.database))
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
    """A page of the `total` matching streams, the keys and the recorders. `recorded` counts all recorded streams."""

    streams: tuple[StreamStatus, ...]
    total: int
    recorded: int
    keys: tuple[KeyRow, ...]
    recorders: tuple[RecorderMember, ...]
    next: int | None


@endpoint(
    "/streams", "The recorded streams: ends, lag, coverage, state; keys with their sizes; recorders.", tool="streams"
)
async def streams(site: Site, query: StreamsParameters) -> StreamsAnswer:
    recorded = await site.relations.streams()
    named = [name for name in recorded if query.q.casefold() in name.casefold()]
    stop = query.cursor + query.limit
    page = named[query.cursor : stop]
    # A name may also mean a super stream, whose partitions may be on other pages.
    found = {each.stream: each for each in await statuses(site, page)}
    recorders = await site.cached("recorders", CACHE_S, partial(site.in_thread, recorder_list, site.database))
    return StreamsAnswer(
        streams=tuple(found[name] for name in page if name in found),
        total=len(named),
        recorded=len(recorded),
        keys=(await keys(site, Parameters())).keys,
        recorders=tuple(recorders),
        next=stop if stop < len(named) else None,
    )


# --- one stream -------------------------------------------------------------------------------------------


class StreamParameters(Parameters):
    stream: str = Field(description="The stream; or a super stream, which means its partitions.")


@dataclass(frozen=True, slots=True)
class StreamAnswer:
    """A stream with its latest messages, or a super stream with its partitions."""

    name: str
    streams: tuple[StreamStatus, ...]
    latest: tuple[MessageRow, ...]


async def ends(site: Site, query: StreamParameters) -> tuple[Fact, ...]:
    """Return the ends of a stream, which the broker knows without the database."""
    found = await site.reader.bounds(query.stream)
    if found.first is None or found.last is None:
        return (("The stream exists, and is empty.", None),)
    return (
        (f"The broker has its messages {found.first:,} to {found.last:,}.", None),
        (f"The first message, {found.first:,}", site.links.message(query.stream, found.first)),
        (f"The last message, {found.last:,}", site.links.message(query.stream, found.last)),
    )


@endpoint("/stream", "A stream: its latest messages, coverage by key, skipped messages, events.", facts=ends)
async def stream(site: Site, query: StreamParameters) -> StreamAnswer:
    found = await statuses(site, [query.stream])
    if not found:
        bounds = await site.reader.bounds(query.stream)
        holds = "it is empty" if bounds.last is None else f"it has the offsets {bounds.first:,} to {bounds.last:,}"
        message = f"the stream {query.stream!r} exists ({holds}), but was never recorded"
        raise StreamNotFound(message, stream=query.stream)
    latest: list[Message] = []
    if len(found) == 1 and (last := found[0].last) is not None:
        latest = await optional_part(_latest(site, found[0].stream, last + 1, _LATEST_SHOWN)) or []
    return StreamAnswer(query.stream, found, message_rows(site, latest[::-1]))


async def _latest(site: Site, stream: str, stop: int, count: int) -> list[Message]:
    """Return the last messages before an offset, at most `count`; only these are kept in memory."""
    kept: deque[Message] = deque(maxlen=count)
    await site.reader.scan(stream, max(0, stop - _LATEST_OFFSETS), stop, kept.append)
    return [*kept]


# --- live -------------------------------------------------------------------------------------------------


class LiveParameters(Parameters):
    stream: TextList = Field((), description="Streams and super streams; all by default.")
    limit: int = Field(50, ge=1, le=500, description="Maximum messages.")


@dataclass(frozen=True, slots=True)
class LiveAnswer:
    """The recorded messages that arrived last at the broker, newest first, regardless of their own times.

    Only the last offsets of `streams` are read, the twenty most recently recorded of `streams_count`, without those
    that cannot be read now: rare messages may be left out.
    """

    results: tuple[MessageRow, ...]
    streams: tuple[str, ...]
    streams_count: int


@endpoint("/live", "The recorded messages that arrived last.")
async def live(site: Site, query: LiveParameters) -> LiveAnswer:
    """Return the latest messages; viewers of the same page share one read."""
    return await site.cached(("live", query), CACHE_S, partial(_live, site, query, query.limit))


async def newest(site: Site) -> LiveAnswer:
    """Return the latest messages of each stream, so that a busy stream does not hide the others."""
    query = LiveParameters(stream=(), limit=500)
    return await site.cached("newest", CACHE_S, partial(_live, site, query, query.limit // LIVE_STREAMS_MAX))


async def _live(site: Site, query: LiveParameters, per_stream: int) -> LiveAnswer:
    await site.keys()
    tails = await site.in_thread(recorded_tails, site.database, site.address.vhost, query.stream)
    live, is_named = list(tails)[:LIVE_STREAMS_MAX], bool(query.stream)
    calls = (partial(_latest_recorded, site, name, tails[name], per_stream, is_named=is_named) for name in live)
    read = dict(zip(live, await gather(calls, LIVE_STREAMS_MAX), strict=True))
    found = [each for messages in read.values() for each in messages or ()]
    found.sort(key=lambda message: (message.chunk_ms or 0, message.stream, message.offset), reverse=True)
    return LiveAnswer(
        results=message_rows(site, found[: query.limit]),
        streams=tuple(name for name, messages in read.items() if messages is not None),
        streams_count=len(tails),
    )


async def _latest_recorded(
    site: Site, stream: str, tail: CoverageRow, count: int, *, is_named: bool
) -> list[Message] | None:
    """Return a stream's last recorded messages; none if it was replaced since, None if it alone cannot be read."""
    if tail.position is None:
        return []
    try:
        messages = await _latest(site, stream, tail.to_offset, count)
    except NotFound:
        return []
    except (AccessRefused, StreamUnavailable):
        if is_named:
            raise
        return None
    last = next((each for each in messages if each.offset == tail.position.offset), None)
    is_same = last is not None and agreement_of(tail.position, last) is Agreement.SAME
    return messages if is_same else []


# --- health -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class HealthAnswer:
    """Both servers answer. If a server does not answer, the response is an error with status 503 instead."""

    is_well: bool


@endpoint("/health", "Whether the database and the broker answer.", is_page=False, needs_keys=False)
async def health(site: Site, _: Parameters) -> HealthAnswer:
    if unavailable := await site.unavailable(now=True):
        message = "; ".join(f"{each.name} does not answer: {each.error}" for each in unavailable)
        raise Problem(503, "not_well", message, "Try again in a moment.", {"Retry-After": "1"})
    return HealthAnswer(is_well=True)
