"""Streams: what is recorded of each, by key; how much each key takes; who records."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from datetime import datetime
from typing import Annotated

from relatum.errors import StreamNotFound
from relatum.recording import StreamStatus
from relatum.recording.overview import RecorderMember
from relatum_consumer.web.coverage_bar import coverage_bar
from relatum_consumer.web.cursors import page_of_list
from relatum_consumer.web.endpoint import Known, endpoint
from relatum_consumer.web.parameters import Nothing, Parameter
from relatum_consumer.web.problems import Problem, Refused
from relatum_consumer.web.site import Site


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamRow(StreamStatus):
    """A stream: what the broker holds, and what is recorded of it.

    `state` is also `complete`: all that the broker holds is recorded, and nobody records it now. `rate_per_s` is how
    many messages a second came in the last minute that somebody looked; None where nobody looked before. `recorded_to`
    is the offset behind the last that is recorded. `covered`, which has what is recorded of each key and of `time`,
    `holes` and `gaps` are ranges [from, to). `skipped` counts values that were not recorded, by key (empty: whole
    messages) and reason. `error` says why a stream cannot be read.
    """

    rate_per_s: float | None


async def _rows(site: Site, names: Sequence[str]) -> tuple[StreamRow, ...]:
    return tuple(_row(site, each) for each in await site.statuses(names)) if names else ()


def _row(site: Site, found: StreamStatus) -> StreamRow:
    values = {each.name: getattr(found, each.name) for each in fields(StreamStatus)}
    if found.state == "unattended" and found.lag_offsets == 0 and found.first is not None and found.last is not None:
        bar = coverage_bar((found.first, found.last + 1), found.covered, found.holes)
        if all(piece.kind in ("recorded", "hole") for piece in bar):
            values["state"] = "complete"
    return StreamRow(**values, rate_per_s=site.rates.of(found.stream, found.last))


# --- keys -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class KeyRow:
    """A key: where it comes from, and its rows of all streams; estimated from a sample unless `is_exact`.

    Where it `names` another key, a message that has it came from the one that has the same value of that key.
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
    """The keys, by name."""

    keys: tuple[KeyRow, ...]


@endpoint("/keys", "The keys that are defined, with their sizes.")
async def keys(site: Site, _: Nothing) -> KeysAnswer:
    masked = {each.name for each in await site.keys() if site.masking.is_masked(each)}
    return KeysAnswer(
        tuple(
            KeyRow(
                name=each.definition.name,
                sources=tuple(each.definition.sources),
                type=each.definition.value_type.value,
                names=each.definition.names,
                since=each.definition.since,
                is_masked=each.definition.name in masked,
                rows=each.rows,
                bytes=each.bytes,
                is_exact=each.is_exact,
            )
            for each in await site.sizes()
        )
    )


# --- all streams ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StreamsAsked:
    q: Annotated[str, Parameter("A part of the streams' names.")] = ""
    limit: Annotated[int, Parameter("Streams of a page.", least=1, most=200)] = 50
    cursor: Annotated[str, Parameter("`next` of the page before.")] = ""


@dataclass(frozen=True, slots=True)
class StreamList:
    """A page of the recorded streams, of `total` whose names fit: what the broker holds, and what is recorded."""

    streams: tuple[StreamRow, ...]
    total: int
    next: str | None


@dataclass(frozen=True, slots=True)
class StreamsAnswer(StreamList):
    """A page of streams, of `total`; `recorded` is how many there are by any name. And keys and recorders."""

    recorded: int
    keys: tuple[KeyRow, ...]
    recorders: tuple[RecorderMember, ...]


async def stream_list(site: Site, asked: StreamsAsked) -> StreamList:
    """List the streams, page by page."""
    named = [name for name in await site.relations.streams() if asked.q.casefold() in name.casefold()]
    page, cursor = page_of_list(named, asked.cursor, asked.limit)
    found = {row.stream: row for row in await _rows(site, page)}
    return StreamList(tuple(found[name] for name in page if name in found), len(named), cursor)


@endpoint(
    "/streams",
    "The recorded streams: ends, rate, lag, coverage; keys with their sizes; recorders.",
    template="streams.html",
    page="streams",
)
async def streams(site: Site, asked: StreamsAsked) -> StreamsAnswer:
    listed = await stream_list(site, asked)
    return StreamsAnswer(
        listed.streams,
        listed.total,
        listed.next,
        recorded=len(await site.relations.streams()),
        keys=(await keys(site, Nothing())).keys,
        recorders=tuple(await site.recorders()),
    )


# --- one stream -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StreamAsked:
    stream: Annotated[str, Parameter("The stream, or a super stream, for its partitions.")]


@dataclass(frozen=True, slots=True)
class StreamAnswer:
    """The stream; of a super stream, its partitions."""

    name: str
    streams: tuple[StreamRow, ...]


async def _ends(site: Site, asked: StreamAsked) -> tuple[Known, ...]:
    """The ends of the stream: all that the broker knows of it."""
    found = await (await site.reader()).bounds(asked.stream)
    if found.first is None or found.last is None:
        return (("The stream is there, and empty.", None),)
    return (
        (f"The broker holds its messages {found.first:,} to {found.last:,}.", None),
        (f"The first message, {found.first:,}", site.links.message(asked.stream, found.first)),
        (f"The last message, {found.last:,}", site.links.message(asked.stream, found.last)),
    )


@endpoint(
    "/stream",
    "A stream: coverage by key, what was skipped, what happened.",
    template="stream.html",
    page="streams",
    known=_ends,
)
async def stream(site: Site, asked: StreamAsked) -> StreamAnswer:
    found = await _rows(site, [asked.stream])
    if not found:
        bounds = await (await site.reader()).bounds(asked.stream)
        ends = "it is empty" if bounds.last is None else f"it has the offsets {bounds.first:,} to {bounds.last:,}"
        message = f"the stream {asked.stream!r} is there ({ends}), and nobody has recorded it"
        raise StreamNotFound(message, stream=asked.stream)
    return StreamAnswer(asked.stream, found)


# --- health -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class HealthAnswer:
    """Both servers answer; where one does not, there is an error with status 503 instead."""

    is_well: bool


@endpoint("/health", "Whether the database and the broker answer.")
async def health(site: Site, _: Nothing) -> HealthAnswer:
    if away := await site.away(now=True):
        wrong = "; ".join(f"{each.name} does not answer: {each.error}" for each in away)
        raise Refused(Problem(503, "not_well", wrong, "It may pass: ask again.", {"Retry-After": "1"}))
    return HealthAnswer(is_well=True)
