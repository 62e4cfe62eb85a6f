"""The proof that no message matches: every message that the streams retain was recorded for the searched keys.

The proof depends on the order of the requests. First the broker is queried for the streams' ends, then the database for
the coverage, then the index again. A message that was in the streams at the first request is then in the index, or in
an unrecorded range. The first offset of one of several streams is queried last, because that takes as long as querying
the end; and only if retention may have dropped an unrecorded range of a stream that was never pruned.

The rules for the status; the first rule that applies decides:

- A message was found: `found`. This covers the recorded messages; with `complete=True` all messages, and then the
  status is `unproven` if a stream proves nothing or was left out. It is also `unproven` if an indexed message could not
  be read and may exist, or a recorded stream was left out as unusable (another broker's, or not the recorded one).
- None was found, and a range is not recorded and was not read: `not_recorded_yet`.
- None was found, and an indexed message could not be read, or a stream proves nothing: `unproven`. The stream's leader
  is unreachable, so its end is unknown; it has a batch that cannot be unpacked; or it is unusable or unreadable.
- None was found, but rows of messages that retention has certainly dropped: `expired`.
- None was found, but rows of messages whose streams were certainly deleted: `deleted`.
- None was found, and at least one stream was searched: `absent`. Without any stream, `NothingRecorded` is raised.
"""

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby
from operator import attrgetter
from typing import Final, NoReturn

from relatum.common.waiting import pause
from relatum.errors import AccessRefused, NotFound, StreamReplaced, StreamUnavailable, Transient
from relatum.reading import Agreement, ChunkCache, Message, Position, StreamBounds, UnreadableRecord
from relatum.store.coverage import (
    COVERAGE_OF,
    TIME,
    CoverageRow,
    Range,
    above,
    covered,
    last_position,
    merged,
    missing,
    proven,
)
from relatum.store.database import sql
from relatum.store.members import RECORDERS
from relatum_consumer.lookups.answer import NewKey, Status, UnreadableStream, union_of
from relatum_consumer.lookups.catalog import Catalog, PresentStream, replaced
from relatum_consumer.lookups.servers import Servers


@dataclass(frozen=True, slots=True)
class Uncovered:
    """Offsets of a stream, from `start` to before `stop`, that are retained and not recorded for all keys."""

    stream: str
    start: int
    stop: int


@dataclass(slots=True)
class Evidence:
    """What was known of the searched streams before the index was queried.

    Attributes:
        streams: The names of the existing streams, in order. The proof covers these streams.
        gone: Recorded streams that the broker certainly no longer has, so they have no messages.
        refused: Recorded streams that this user may not read.
        unusable: Without named streams: streams of other brokers, and streams that are not the recorded ones. The index
            may have rows of these streams, which cannot be checked.
        held: The coverage of each existing stream.
        uncovered: Ranges that are retained and not recorded for all keys, ordered by stream and offset.
        unproven: Streams for which nothing can be proven, regardless of what is recorded or read.
        behind: The end of the last range that is recorded for no key, or without the searched time, by stream.
        new_keys: By key, the streams with recorded offsets that lack the key, because it was defined later.
    """

    streams: tuple[str, ...]
    gone: tuple[str, ...] = ()
    refused: tuple[UnreadableStream, ...] = ()
    unusable: tuple[UnreadableStream, ...] = ()
    recorded: Sequence[PresentStream] = ()
    ends: dict[str, StreamBounds] = field(default_factory=dict)
    held: Mapping[str, Sequence[CoverageRow]] = field(default_factory=dict)
    uncovered: list[Uncovered] = field(default_factory=list)
    unproven: set[str] = field(default_factory=set)
    behind: dict[str, int] = field(default_factory=dict)
    new_keys: dict[int, dict[str, None]] = field(default_factory=dict)

    @property
    def unreadable_streams(self) -> tuple[UnreadableStream, ...]:
        """The recorded streams that were left out of this evidence."""
        return (*self.unusable, *self.refused)

    def nothing_searched(self, catalog: Catalog) -> NoReturn:
        """Raise the error of a search that would leave out all streams, or for which no stream is recorded."""
        if self.unreadable_streams:
            stream, reason = self.unreadable_streams[0]
            raise catalog.left_out().get(stream) or AccessRefused(reason, stream=stream)
        catalog.nothing_recorded(self.gone)

    def scan(self, servers: Servers, consider: Callable[[Message], object]) -> None:
        """Read the unrecorded messages."""
        reached: dict[str, int] = {}

        def check(message: Message) -> None:
            reached[message.stream] = message.offset
            if isinstance(message.raw, UnreadableRecord):
                self.unproven.add(message.stream)
            else:
                consider(message)

        for each in self.uncovered:
            servers.scan(each.stream, each.start, each.stop, check)
            # Another node than the one that knew the end may have answered, or the stream was declared again since.
            if reached.get(each.stream, -1) < each.stop - 1 == self.ends[each.stream].last:
                self.unproven.add(each.stream)

    def unrecorded_streams(self, catalog: Catalog) -> tuple[str, ...]:
        """Return the streams in `behind` that no recorder records now. None records offsets below `retained_from`."""
        floors = {stream.name: stream.retained_from for stream in self.recorded}
        behind = {stream for stream, end in self.behind.items() if end > floors.get(stream, 0)}
        if not behind:
            return ()
        try:
            rows = catalog.servers.rows(RECORDED_NOW, {"vhost": catalog.vhost, "streams": sorted(behind)})
        except Transient:
            return ()  # A hint must not fail the lookup.
        return tuple(sorted(behind.difference(name for (name,) in rows)))

    def named_new_keys(self, catalog: Catalog, sought: Collection[int] | None = None) -> tuple[NewKey, ...]:
        """Return the new keys, or only those in `sought`, ordered by name."""
        definitions = catalog.keys() if self.new_keys else ()
        return tuple(
            NewKey(key.name, tuple(self.new_keys[key.key_id]))
            for key in definitions
            if key.key_id in self.new_keys and (sought is None or key.key_id in sought)
        )

    def check_present(self, catalog: Catalog, names: Sequence[str] | None, key_ids: Iterable[int]) -> None:
        """Check, after the index query, that its rows were not deleted: keys are in force, and streams unchanged."""
        catalog.check_in_force(key_ids)
        present = {stream.stream_id: stream for stream in catalog.streams(names)}
        for known in self.recorded:
            if (ends := self.ends.get(known.name)) is None:
                continue
            now = present.get(known.stream_id)
            if now is None or now.retained_from > max(known.retained_from, ends.first or 0):
                message = f"the stream {known.name!r} was re-recorded, forgotten or pruned: repeat the lookup"
                raise StreamReplaced(message, stream=known.name)

    def is_open(self, required: Collection[int] | None = None) -> bool:
        """Whether messages are not recorded for one of the required keys (None: any key), which changes the status."""
        if required is None:
            return bool(self.uncovered)
        return bool(self.behind or self.new_keys.keys() & set(required))

    def status(
        self, outcome: Status, *, was_read: bool, is_whole: bool, required: Collection[int] | None = None
    ) -> Status:
        """Return the status by the rules above; `outcome`: what was found (`FOUND`, `EXPIRED`, `DELETED`, `ABSENT`)."""
        is_proven = is_whole and not (self.unusable or (was_read and (self.unproven or self.refused)))
        if outcome is not Status.FOUND:
            if self.is_open(required) and not was_read:
                return Status.NOT_RECORDED_YET
            is_proven = is_proven and not (self.unproven or self.refused)
        return outcome if is_proven else Status.UNPROVEN

    def _add_gaps(self, stream: str, keys: Sequence[int], *, is_proof: bool) -> None:
        """Add a stream's ranges that are not recorded for all of the keys to `uncovered`, `behind` and `new_keys`."""
        uncovered = self._gaps(stream, keys, is_proof=is_proof)
        self.uncovered += [Uncovered(stream, *gap) for gap in uncovered]
        if not uncovered:
            return
        needs_proof = is_proof and self.ends[stream].is_proven
        rows = [row for row in self.held[stream] if not (row.over_amqp and needs_proof)]
        at_all = merged((row.from_offset, row.to_offset) for row in rows if row.kind == "recorded")
        for key_id in keys:
            for gap in self._gaps(stream, [key_id], is_proof=is_proof):
                unrecorded = [gap] if key_id == TIME else missing(gap, at_all)
                if unrecorded:
                    self.behind[stream] = max(self.behind.get(stream, 0), unrecorded[-1][1])
                if unrecorded != [gap]:
                    self.new_keys.setdefault(key_id, {})[stream] = None

    def _gaps(self, stream: str, keys: Sequence[int], *, is_proof: bool) -> list[Range]:
        bounds = self.ends[stream]
        # Without the leader's answer where a stream ends, reading it proves nothing: accept any coverage.
        recorded_as = proven if is_proof and bounds.is_proven else covered
        return gaps(bounds, self.held[stream], keys, recorded_as=recorded_as)


def evidence(
    catalog: Catalog,
    names: Sequence[str] | None,
    key_ids: Iterable[int],
    *,
    chunks: ChunkCache | None = None,
    needs_firsts: bool = False,
    is_proof: bool = True,
) -> Evidence:
    """Return what is known of the streams: which exist, and which ranges are not recorded for all keys (or `TIME`).

    `chunks`: A cache for the chunks that are read. `needs_firsts`: Query the first offset of each stream. Without
    `is_proof`, ranges that release 0.4 recorded over AMQP 0.9.1 count as recorded, although they may lack rows.
    """
    servers, keys, chunks = catalog.servers, tuple(key_ids), chunks or ChunkCache()
    # Before and after the query: during it, a stream may be left out or tried again.
    before, recorded = catalog.unreadable_streams(names), catalog.streams(names)
    unusable = union_of(before, catalog.unreadable_streams(names))
    searched = all_names(servers, recorded, names)
    never_pruned = {stream.name for stream in recorded if not stream.retained_from}
    lasts = never_pruned if len(searched) > 1 and not needs_firsts else set()
    found = all_ends(servers, searched, is_named=names is not None, chunks=chunks, lasts=lasts)
    ends = {stream: bounds for stream, bounds in found.items() if isinstance(bounds, StreamBounds)}
    ranges = coverage_by_stream(servers, recorded)
    held: dict[str, Sequence[CoverageRow]] = dict.fromkeys(ends, ())
    for each in recorded:
        held[each.name] = above(ranges.get(each.stream_id, ()), each.retained_from)
    checked = check_identity(catalog, held, ends, chunks)
    result = Evidence(
        tuple(ends),
        tuple(stream for stream, bounds in found.items() if bounds is None),
        tuple(bounds for bounds in found.values() if isinstance(bounds, UnreadableStream)),
        unusable,
        recorded,
        ends,
        held,
        unproven={stream for stream, bounds in ends.items() if not bounds.is_proven},
    )
    # Retention may have dropped a gap unless it begins after the message that was checked, which exists.
    undecided = [
        stream
        for stream in lasts.intersection(ends)
        if ends[stream].first == 0
        and any(start <= checked.get(stream, start) for start, _ in result._gaps(stream, keys, is_proof=is_proof))
    ]
    # Failures are ignored here; the next request reports them.
    for stream, now in all_ends(servers, undecided, is_named=False).items():
        if isinstance(now, StreamBounds) and now.first is not None and now.is_proven:
            ends[stream] = StreamBounds(now.first, ends[stream].last, is_proven=True)
    for stream in ends:
        result._add_gaps(stream, keys, is_proof=is_proof)
    return result


def evidence_together(catalog: Catalog, names: Sequence[str] | None, key_ids: Iterable[int]) -> Evidence:
    """Like `evidence`, but concurrent callers share the requests."""
    streams, keys = None if names is None else tuple(names), tuple(sorted(set(key_ids)))
    known: Evidence = catalog.servers.flights.run((streams, keys), partial(evidence, catalog, streams, keys))
    # Each caller gets a copy of `unproven`, because scans change it.
    return replace(known, unproven=set(known.unproven))


def gaps(
    bounds: StreamBounds,
    rows: Sequence[CoverageRow],
    key_ids: Iterable[int],
    recorded_as: Callable[[Iterable[CoverageRow], int], list[Range]] = proven,
) -> list[Range]:
    """Return the retained ranges of a stream that are not recorded for all of the keys."""
    first, last = bounds
    if first is None or last is None:
        return []
    retained = (first, last + 1)
    return merged(gap for key_id in key_ids for gap in missing(retained, recorded_as(rows, key_id)))


IDENTITY_POLL_S: Final = (0.005, 0.5)
"""First and longest pause between two checks whether a stream is the recorded one, in seconds."""


def coverage_by_stream(servers: Servers, recorded: Sequence[PresentStream]) -> dict[int, list[CoverageRow]]:
    """Read the coverage of streams: rows by stream id, ordered by offset."""
    rows = servers.rows(COVERAGE_OF, {"stream_ids": [stream.stream_id for stream in recorded]})
    ranges = groupby(map(CoverageRow._make, rows), key=attrgetter("stream_id"))
    return {stream_id: list(of_stream) for stream_id, of_stream in ranges}


RECORDED_NOW: Final = sql(f"""
    SELECT name FROM relatum.streams
    WHERE vhost = :vhost::text AND name = ANY (:streams::text[]) AND replaced_at IS NULL AND {RECORDERS.is_held}""")


def all_ends(
    servers: Servers,
    streams: Sequence[str],
    *,
    is_named: bool,
    chunks: ChunkCache | None = None,
    lasts: Collection[str] = (),
) -> dict[str, StreamBounds | UnreadableStream | None]:
    """Return each stream's bounds (`lasts`: the first may be 0). Unless named, None if it is gone, or the refusal."""
    # A single query of a deleted stream takes an AMQP 0.9.1 connection and a channel, which the broker closes. Unnamed
    # deleted streams may be many, so one request finds them all.
    found: dict[str, StreamBounds | UnreadableStream | None] = {}
    if len(streams) > 1:
        found.update(servers.all_bounds(streams, chunks or ChunkCache(), lasts))
    others = [stream for stream in streams if stream not in found]
    gone: set[str] = set(servers.missing(others)) if others and not is_named else set()
    for stream in others:
        try:
            found[stream] = None if stream in gone else servers.bounds(stream)
        except (NotFound, AccessRefused) as error:
            if is_named:
                raise
            found[stream] = UnreadableStream(stream, str(error)) if isinstance(error, AccessRefused) else None
    return {stream: found[stream] for stream in streams}


def all_names(servers: Servers, recorded: Sequence[PresentStream], names: Sequence[str] | None) -> list[str]:
    """Return the names of the streams to search: recorded streams, and named streams or partitions that are not."""
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
    chunks: ChunkCache | None = None,
) -> dict[str, int]:
    """Check that the streams are the recorded ones, by the messages at the last recorded offsets.

    Returns these offsets, for the streams that retain them. Field `also` of the error has those of further streams.
    """
    positions: dict[str, Position] = {}
    for stream, bounds in ends.items():
        position = last_position(held[stream])
        # If retention has dropped the last recorded offset, it has dropped all recorded messages: nothing to check.
        if position is not None and (bounds.first is None or position.offset >= bounds.first):
            positions[stream] = position
    checked: dict[str, int] = {}
    deadline, pause_s = time.monotonic() + catalog.servers.timeout_s, IDENTITY_POLL_S[0]
    while positions:
        agreed: dict[str, Agreement] = catalog.servers.agreements(positions, chunks or ChunkCache())
        others = [stream for stream, each in agreed.items() if each is Agreement.OTHER]
        if others:
            first, *also = [replaced(stream, positions[stream].offset) for stream in others]
            first.also = tuple(also)
            raise first
        checked |= {stream: positions[stream].offset for stream, each in agreed.items() if each is Agreement.SAME}
        # Unproven streams are not checked again: they make the answer unproven anyway.
        undecided = [stream for stream, each in agreed.items() if each is Agreement.UNKNOWN and ends[stream].is_proven]
        positions = {stream: positions[stream] for stream in undecided}
        if not positions:
            break
        left = deadline - time.monotonic()
        if left <= 0:
            message = f"it is unknown whether {undecided[0]!r} is the recorded stream"
            raise StreamUnavailable(f"{message}: its leader does not answer; retry later", stream=undecided[0])
        pause(min(pause_s, left))
        pause_s = min(2 * pause_s, IDENTITY_POLL_S[1])
    return checked
