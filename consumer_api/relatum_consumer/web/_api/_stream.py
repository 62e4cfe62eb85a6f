"""One stream: its ends, its coverage by key, what was skipped, and what happened to it."""

import time
from dataclasses import dataclass, replace
from typing import Annotated

from relatum.errors import StreamNotFound
from relatum.recording import CoveragePiece, StreamEvent, coverage_bar
from relatum_consumer.web._api._stream_shown import StreamRow, stream_row
from relatum_consumer.web._endpoint import Endpoint, Known, ms_since
from relatum_consumer.web._parameters import Parameter
from relatum_consumer.web._site import Site


@dataclass(frozen=True, slots=True)
class StreamAsked:
    """Which stream."""

    stream: Annotated[str, Parameter("The stream, or a super stream, for its partitions.", in_path=True)]


@dataclass(frozen=True, slots=True)
class StreamAskedByQuery:
    """The same, for names that cannot stand in a path."""

    stream: Annotated[str, Parameter("The stream, or a super stream, for its partitions.")]


@dataclass(frozen=True, slots=True)
class KeyCoverage:
    """What is recorded of a key, or of `time`: ranges [from, to), and drawn."""

    key: str
    ranges: tuple[tuple[int, int], ...]
    bar: tuple[CoveragePiece, ...]


@dataclass(frozen=True, slots=True)
class Skipped:
    """Values that were not recorded: of which key (empty: whole messages), why, and how many."""

    key: str
    reason: str
    count: int


@dataclass(frozen=True, slots=True)
class StreamDetail:
    """A stream with all that is known of it. `first_href` and `last_href` lead to its messages."""

    row: StreamRow
    generation: int
    first_href: str | None
    last_href: str | None
    covered: tuple[KeyCoverage, ...]
    skipped: tuple[Skipped, ...]
    events: tuple[StreamEvent, ...]


@dataclass(frozen=True, slots=True)
class StreamAnswer:
    """The stream; of a super stream, its partitions."""

    name: str
    streams: tuple[StreamDetail, ...]
    took_ms: float


async def stream(site: Site, asked: StreamAsked | StreamAskedByQuery) -> StreamAnswer:
    """Answer for one name."""
    began = time.perf_counter()
    found = await site.statuses([asked.stream])
    if not found:
        bounds = await (await site.reader()).bounds(asked.stream)
        ends = "it is empty" if bounds.last is None else f"it has the offsets {bounds.first:,} to {bounds.last:,}"
        message = f"the stream {asked.stream!r} is there ({ends}), and nobody has recorded it"
        raise StreamNotFound(message, stream=asked.stream)
    details = []
    for each in found:
        within = None if each.first is None or each.last is None else (each.first, each.last + 1)
        covered = [
            KeyCoverage(key, tuple(ranges), coverage_bar(within, {key: ranges}, each.holes) if within else ())
            for key, ranges in each.covered.items()
        ]
        details.append(
            StreamDetail(
                row=stream_row(site, each),
                generation=each.generation,
                first_href=None if each.first is None else site.links.message(each.stream, each.first),
                last_href=None if each.last is None else site.links.message(each.stream, each.last),
                covered=tuple(covered),
                skipped=tuple(
                    Skipped(key, reason, count)
                    for key, reasons in each.skipped.items()
                    for reason, count in reasons.items()
                ),
                events=tuple(reversed(each.events)),
            )
        )
    return StreamAnswer(asked.stream, tuple(details), ms_since(began))


async def ends(site: Site, asked: StreamAsked | StreamAskedByQuery) -> tuple[Known, ...]:
    """The ends of the stream: all that the broker knows of it."""
    found = await (await site.reader()).bounds(asked.stream)
    if found.first is None or found.last is None:
        return (("The stream is there, and empty.", None),)
    return (
        (f"The broker holds its messages {found.first:,} to {found.last:,}.", None),
        (f"The first message, {found.first:,}", site.links.message(asked.stream, found.first)),
        (f"The last message, {found.last:,}", site.links.message(asked.stream, found.last)),
    )


STREAM = Endpoint(
    "/streams/{stream:name}",
    "A stream: coverage by key, what was skipped, what happened.",
    StreamAsked,
    StreamAnswer,
    stream,
    template="stream.html",
    page="streams",
    known=ends,
)

STREAM_BY_QUERY = replace(STREAM, path="/stream", asked=StreamAskedByQuery)
