"""Streams: what is recorded of each, by key; how much each key takes; who records."""

from dataclasses import dataclass, field
from datetime import datetime
from typing import Annotated, Any, Final

from relatum.errors import InvalidInput, StreamNotFound
from relatum.recording import CoveragePiece, RecorderMember, StreamEvent, StreamStatus, coverage_bar
from relatum.store.coverage import Range
from relatum_consumer.web.cursors import WRONG_CURSOR
from relatum_consumer.web.documents import FOR_PAGES, copied
from relatum_consumer.web.endpoint import Known, endpoint
from relatum_consumer.web.messages import hue_of
from relatum_consumer.web.parameters import Nothing, Parameter
from relatum_consumer.web.site import Site

_CURSOR_DIGITS: Final = 10


@dataclass(frozen=True, slots=True)
class StreamRow:
    """A stream: what the broker holds, and what is recorded of it.

    `rate_per_s` is how many messages a second came in the last minute that somebody looked; None where nobody looked
    before. Of what the broker holds and nobody records now, `state` is `complete` where all is recorded, else
    `unattended`; `error` says why a stream cannot be read. `recorded_to` is the offset behind the last that is
    recorded. `holes` and `gaps` are ranges [from, to).
    """

    stream: str
    super_stream: str | None
    state: str
    error: str
    first: int | None
    last: int | None
    recorded_to: int | None
    rate_per_s: float | None
    lag_offsets: int | None
    lag_s: float | None
    rows: int
    bytes: int
    recorder: str | None
    holes: list[Range]
    gaps: list[Range]
    bar: tuple[CoveragePiece, ...] = field(metadata=FOR_PAGES)


def _row(site: Site, kind: type[Any], found: StreamStatus, **given: Any) -> Any:
    """A row, or a kind of row that has more."""
    bar: tuple[CoveragePiece, ...] = ()
    if found.first is not None and found.last is not None:
        bar = coverage_bar((found.first, found.last + 1), found.covered, found.holes)
    is_whole = found.lag_offsets == 0 and all(piece.kind in ("recorded", "hole") for piece in bar)
    return copied(
        kind,
        found,
        state="complete" if found.state == "unattended" and is_whole else found.state,
        error="" if found.error is None else str(found.error),
        rate_per_s=site.rates.of(found.stream, found.last),
        bar=bar,
        **given,
    )


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
    hue: int = field(metadata=FOR_PAGES)


@dataclass(frozen=True, slots=True)
class KeysAnswer:
    """The keys, by name."""

    keys: tuple[KeyRow, ...]


async def _key_rows(site: Site) -> tuple[KeyRow, ...]:
    masked = {each.name for each in await site.keys() if site.masking.is_masked(each)}
    return tuple(
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
            hue=hue_of(each.definition),
        )
        for each in await site.sizes()
    )


@endpoint("/keys", "The keys that are defined, with their sizes.")
async def keys(site: Site, _: Nothing) -> KeysAnswer:
    """Answer with all of them."""
    return KeysAnswer(await _key_rows(site))


# --- all streams ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StreamsAsked:
    """Which streams, by a part of their names."""

    q: Annotated[str, Parameter("A part of the streams' names.")] = ""
    limit: Annotated[int, Parameter("Streams of a page.", least=1, most=200)] = 50
    cursor: Annotated[str, Parameter("`next` of the page before: a number.")] = ""


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
    vhost: str = field(metadata=FOR_PAGES)


async def stream_list(site: Site, asked: StreamsAsked) -> StreamList:
    """List the streams, page by page."""
    named = [name for name in await site.relations.streams() if asked.q.casefold() in name.casefold()]
    if asked.cursor and not (asked.cursor.isascii() and asked.cursor.isdigit() and len(asked.cursor) < _CURSOR_DIGITS):
        raise InvalidInput(WRONG_CURSOR)
    start = int(asked.cursor or 0)
    page = named[start : start + asked.limit]
    found = {each.stream: each for each in await site.statuses(page)} if page else {}
    return StreamList(
        streams=tuple(_row(site, StreamRow, found[name]) for name in page if name in found),
        total=len(named),
        next=str(start + asked.limit) if start + asked.limit < len(named) else None,
    )


@endpoint(
    "/streams",
    "The recorded streams: ends, rate, lag, coverage; keys with their sizes; recorders.",
    template="streams.html",
    page="streams",
)
async def streams(site: Site, asked: StreamsAsked) -> StreamsAnswer:
    """Answer with them, and with keys and recorders."""
    return copied(
        StreamsAnswer,
        await stream_list(site, asked),
        recorded=len(await site.relations.streams()),
        keys=await _key_rows(site),
        recorders=tuple(await site.recorders()),
        vhost=site.address.vhost,
    )


# --- one stream -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StreamAsked:
    """Which stream."""

    stream: Annotated[str, Parameter("The stream, or a super stream, for its partitions.")]


@dataclass(frozen=True, slots=True)
class StreamDetail(StreamRow):
    """A stream with all that is known of it.

    `covered` has what is recorded of each key, and of `time`, as ranges [from, to). `skipped` counts values that were
    not recorded, by key (empty: whole messages) and reason.
    """

    generation: int
    covered: dict[str, list[Range]]
    skipped: dict[str, dict[str, int]]
    events: list[StreamEvent]
    bars: dict[str, tuple[CoveragePiece, ...]] = field(metadata=FOR_PAGES)


@dataclass(frozen=True, slots=True)
class StreamAnswer:
    """The stream; of a super stream, its partitions."""

    name: str
    streams: tuple[StreamDetail, ...]


async def stream(site: Site, asked: StreamAsked) -> StreamAnswer:
    """Answer for one name."""
    found = await site.statuses([asked.stream])
    if not found:
        bounds = await (await site.reader()).bounds(asked.stream)
        ends = "it is empty" if bounds.last is None else f"it has the offsets {bounds.first:,} to {bounds.last:,}"
        message = f"the stream {asked.stream!r} is there ({ends}), and nobody has recorded it"
        raise StreamNotFound(message, stream=asked.stream)
    details = []
    for each in found:
        bars: dict[str, tuple[CoveragePiece, ...]] = {}
        if each.first is not None and each.last is not None:
            ends_ = (each.first, each.last + 1)
            bars = {key: coverage_bar(ends_, {key: ranges}, each.holes) for key, ranges in each.covered.items()}
        details.append(_row(site, StreamDetail, each, events=each.events[::-1], bars=bars))
    return StreamAnswer(asked.stream, tuple(details))


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


endpoint(
    "/stream",
    "A stream: coverage by key, what was skipped, what happened.",
    template="stream.html",
    page="streams",
    known=_ends,
)(stream)
