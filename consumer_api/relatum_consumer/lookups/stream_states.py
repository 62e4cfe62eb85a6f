"""What is asked of streams: their ends, what is recorded of them, and whether they are what was recorded."""

import time
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Final

from relatum.errors import AccessRefused, NotFound, StreamReplaced, StreamUnavailable
from relatum.reading import Agreement, KeptChunks, Position, StreamBounds
from relatum.store.coverage import CoverageRow, last_position
from relatum.store.database import sql
from relatum.waiting import pause
from relatum_consumer.lookups.answer import UnreadableStream
from relatum_consumer.lookups.catalog import Catalog, PresentStream
from relatum_consumer.lookups.limits import IDENTITY_POLL_S_MAX, POLL_S_MIN
from relatum_consumer.lookups.servers import Servers

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


def ends_of(servers: Servers, stream: str, *, is_named: bool) -> StreamBounds | UnreadableStream | None:
    """A stream's ends; None where the broker surely has no such stream; or why this user cannot read it.

    Where it was asked for by name, that is an error (`StreamNotFound`, `NotAStream`, `AccessRefused`).
    """
    try:
        bounds: StreamBounds = servers.bounds(stream)
    except (NotFound, AccessRefused) as error:
        if is_named:
            raise
        return UnreadableStream(stream, str(error)) if isinstance(error, AccessRefused) else None
    return bounds


def all_ends(
    servers: Servers,
    streams: Sequence[str],
    *,
    is_named: bool,
    kept: KeptChunks | None = None,
    lasts: Collection[str] = (),
) -> dict[str, StreamBounds | UnreadableStream | None]:
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
    found: dict[str, StreamBounds | UnreadableStream | None] = {}
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
