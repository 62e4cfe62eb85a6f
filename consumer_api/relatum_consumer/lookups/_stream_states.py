"""The state of streams: their ends, what is recorded of them, and whether they are what was recorded.

The order of the questions is the argument of every proof. The streams' ends are taken from the broker first, the
coverage from the database after that: whatever lay in the streams when the ends were taken is then either in a range
that is not recorded, or in the index, which is probed after both.
"""

import time
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from relatum.errors import AccessRefused, NotFound, StreamReplaced, StreamUnavailable
from relatum.reading import Agreement, KeptChunks, Position, StreamBounds
from relatum.store.coverage import CoverageRow, last_position
from relatum.store.database import sql
from relatum.waiting import pause
from relatum_consumer.lookups._answer import LeftOut
from relatum_consumer.lookups._catalog import Catalog, PresentStream
from relatum_consumer.lookups._limits import IDENTITY_POLL_S_MAX, POLL_S_MIN
from relatum_consumer.lookups._servers import Servers

COVERAGE: Final = sql(
    f"""
    SELECT {", ".join(CoverageRow.__dataclass_fields__)}
    FROM relatum.coverage
    WHERE stream_id = ANY (:stream_ids::int[])
    ORDER BY stream_id, from_offset
    """
)


def coverage_by_stream(servers: Servers, recorded: Sequence[PresentStream]) -> dict[int, list[CoverageRow]]:
    """What is recorded of streams, by their numbers, in the order of offsets."""
    rows = servers.rows(COVERAGE, {"stream_ids": [stream.stream_id for stream in recorded]})
    ranges: dict[int, list[CoverageRow]] = defaultdict(list)
    for values in rows:
        row = CoverageRow(*values)
        ranges[row.stream_id].append(row)
    return ranges


ATTENDED: Final = sql(
    """
    SELECT s.name
    FROM relatum.streams s
    WHERE s.vhost = :vhost::text AND s.name = ANY (:streams::text[]) AND s.replaced_at IS NULL
      AND EXISTS (
        SELECT * FROM relatum.recorder_members m
        WHERE m.holder = s.lease_holder AND m.lease_expires_at >= clock_timestamp()
      )
    """
)


def attended(catalog: Catalog, streams: Sequence[str]) -> set[str]:
    """Those of the streams that some process records now."""
    if not streams:
        return set()
    rows = catalog.servers.rows(ATTENDED, {"vhost": catalog.vhost, "streams": list(streams)})
    return {name for (name,) in rows}


@dataclass(frozen=True, slots=True)
class StreamStates:
    """Where the streams meant end, and what is recorded of them, which was asked after that.

    Attributes:
        recorded: Those that are recorded.
        ends: The ends of those that are there, in the order of their names.
        gone: Those that were recorded and that the broker surely has no more. They hold nothing, and prove nothing.
        refused: Those that were recorded and that this user may not read.
        unusable: Where none is named, those of other brokers, and those that are not what was recorded.
        held: What is recorded, of each that is there.
        there: The last offset that is recorded, of those that have it still.
        lasts: Those of which nobody was asked where they begin: their first offset is 0.
    """

    recorded: list[PresentStream]
    ends: dict[str, StreamBounds]
    gone: list[str]
    refused: list[LeftOut]
    unusable: tuple[LeftOut, ...]
    held: dict[str, list[CoverageRow]]
    there: dict[str, int]
    lasts: set[str]


def stream_states(
    catalog: Catalog, names: Sequence[str] | None, *, kept: KeptChunks | None = None, lasts_only: bool = False
) -> StreamStates:
    """The state of the streams meant, each of which is the one that was recorded.

    Args:
        catalog: Keys and streams.
        names: Streams and super streams, which stand for their partitions; None for all that are recorded.
        kept: Chunks that are read join these.
        lasts_only: Where several are meant, do not ask where those that are recorded begin.

    Raises:
        StreamNotFound, NotAStream, AccessRefused: a named stream is unknown to the database and to the broker, or was
            deleted; or this user may not read it.
        StreamReplaced: what lies at the last recorded offset is not what was recorded there.
    """
    recorded = catalog.streams(names)
    unusable = catalog.leaves_out(names)
    ends: dict[str, StreamBounds] = {}
    gone: list[str] = []
    refused: list[LeftOut] = []
    kept = kept or KeptChunks()
    meant = all_names(catalog.servers, recorded, names)
    lasts = {stream.name for stream in recorded} if lasts_only and len(meant) > 1 else set()
    for stream, found in all_ends(catalog.servers, meant, is_named=names is not None, kept=kept, lasts=lasts).items():
        if isinstance(found, StreamBounds):
            ends[stream] = found
        elif found is None:
            gone.append(stream)
        else:
            refused.append(found)
    ranges = coverage_by_stream(catalog.servers, recorded)
    numbers = {stream.name: stream.stream_id for stream in recorded}
    held = {stream: ranges.get(numbers.get(stream, 0), []) for stream in ends}
    there = check_identity(catalog, held, ends, kept)
    return StreamStates(recorded, ends, gone, refused, unusable, held, there, lasts)


def ends_of(servers: Servers, stream: str, *, is_named: bool) -> StreamBounds | LeftOut | None:
    """A stream's ends; None where the broker surely has no such stream; or why this user cannot read it.

    Where it was asked for by name, that is an error (`StreamNotFound`, `NotAStream`, `AccessRefused`).
    """
    try:
        bounds: StreamBounds = servers.bounds(stream)
    except (NotFound, AccessRefused) as error:
        if is_named:
            raise
        return LeftOut(stream, str(error)) if isinstance(error, AccessRefused) else None
    return bounds


def all_ends(
    servers: Servers,
    streams: Sequence[str],
    *,
    is_named: bool,
    kept: KeptChunks | None = None,
    lasts: Collection[str] = (),
) -> dict[str, StreamBounds | LeftOut | None]:
    """What `ends_of` says of each of many streams, in their order: together, and one by one what is not had so.

    Of `lasts` the first offset need not be known, and may be 0 for that.

    One that is gone, asked for by itself, costs a connection of AMQP 0.9.1 and a channel that the broker closes. So
    those are found together, too, where nobody named them and many may have been recorded once and deleted.
    """
    bounds: dict[str, StreamBounds] = {}
    if len(streams) > 1:
        bounds = servers.all_bounds(streams, kept or KeptChunks(), lasts)
    others = [stream for stream in streams if stream not in bounds]
    gone: set[str] = set(servers.missing(others)) if others and not is_named else set()
    found: dict[str, StreamBounds | LeftOut | None] = {}
    for stream in streams:
        if stream in bounds:
            found[stream] = bounds[stream]
        else:
            found[stream] = None if stream in gone else ends_of(servers, stream, is_named=is_named)
    return found


def all_names(servers: Servers, recorded: Sequence[PresentStream], names: Sequence[str] | None) -> list[str]:
    """The streams meant: those recorded, and named ones or partitions of named super streams that are not."""
    found = {stream.name for stream in recorded}
    for name in names or ():
        if name not in found:
            partitions = servers.partitions(name)
            supers = {stream.super_stream for stream in recorded}
            found.update(partitions or (() if name in supers else (name,)))
    return sorted(found)


def check_identity(
    catalog: Catalog,
    held: Mapping[str, Sequence[CoverageRow]],
    ends: Mapping[str, StreamBounds],
    kept: KeptChunks | None = None,
) -> dict[str, int]:
    """See that each stream is the one that was recorded, by what lies at the last recorded offset; all together.

    Returns:
        That offset, of streams that have it still.

    Raises:
        StreamReplaced: one is another; field `also` has the errors of others that are.
        StreamUnavailable: nobody can say now.
    """
    positions: dict[str, Position] = {}
    for stream, bounds in ends.items():
        position = last_position(held[stream])
        # What lies before the first one retention has dropped; then it has dropped all that was recorded, and nothing
        # is answered from that.
        if position is not None and (bounds.first is None or position.offset >= bounds.first):
            positions[stream] = position
    there: dict[str, int] = {}
    deadline, pause_s = time.monotonic() + catalog.servers.timeout_s, POLL_S_MIN
    while positions:
        agreed: dict[str, Agreement] = catalog.servers.agreements(positions, kept or KeptChunks())
        others = [stream for stream, each in agreed.items() if each in (Agreement.OTHER, Agreement.ENDS_BEFORE)]
        if others:
            first, *also = [replaced(stream, positions[stream].offset) for stream in others]
            first.also = tuple(also)
            raise first
        there |= {stream: positions[stream].offset for stream, each in agreed.items() if each is Agreement.SAME}
        # Of one without a proof nobody can say from here, and the answer will say so.
        doubted = [stream for stream, each in agreed.items() if each is Agreement.UNKNOWN and ends[stream].is_proven]
        positions = {stream: positions[stream] for stream in doubted}
        if not positions:
            break
        left = deadline - time.monotonic()
        if left <= 0:
            message = f"nobody can say whether {doubted[0]!r} is the stream that was recorded"
            raise StreamUnavailable(f"{message}: its leader does not answer; repeat it later", stream=doubted[0])
        pause(min(pause_s, left))
        pause_s = min(2 * pause_s, IDENTITY_POLL_S_MAX)
    return there


def replaced(stream: str, offset: int) -> StreamReplaced:
    """The error for a stream that is not the one that was recorded."""
    return StreamReplaced(
        f"the stream {stream!r} is not the one that was recorded: at offset {offset} lies something else, or nothing. "
        "It was declared again, or lost its tail; a recorder puts that right",
        stream=stream,
        offset=offset,
    )
