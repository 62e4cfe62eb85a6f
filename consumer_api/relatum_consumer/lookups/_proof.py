"""What it takes to say that there is none: every message the streams retain was recorded for the keys asked by.

The order of the steps is the argument. The streams' ends are taken from the broker first, the coverage from the
database after that, and the index is probed once more after both: whatever lay in the streams when the ends were taken
is then either in an uncovered range or in the index. Where one of several streams begins is asked after the coverage,
and only where a range is not recorded of which it is not known that it is retained: it takes as long as the end.

The rule of statuses, the first line that fits:

- A message was found: `found`; that is what is recorded. Where what is not recorded was read as well (`complete=True`),
  `found` says that it is all, and is `unproven` where a stream proves nothing. It is `unproven`, too, where the index
  names a message that could not be read and is not surely gone: what was found may be a part.
- None, and a range is not recorded and was not read: `not_recorded_yet`.
- None, and a stream proves nothing: `unproven`. That is one whose end no leader told (it cannot be reached), or one
  in which a batch was met that cannot be unpacked. Or a recorded stream was left out: this user may not read it.
- A recorded stream was left out that is another broker's, or not the one that was recorded: `unproven`, found or not.
- None, but rows of messages that retention surely took: `expired`.
- None, but rows of messages whose streams were surely deleted: `deleted`.
- None, and at least one stream: `absent`. Without any stream there is no answer: `NothingRecorded`.
"""

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

from relatum.errors import AccessRefused, NotFound, StreamReplaced, StreamUnavailable, Transient
from relatum.reading import Agreement, KeptChunks, Message, Position, StreamBounds, UnreadableRecord
from relatum.store.coverage import TIME, CoverageRow, Range, covered, last_position, merged, missing, proven
from relatum_consumer.lookups._answer import LeftOut, NewKey, Status
from relatum_consumer.lookups._catalog import Catalog, PresentStream
from relatum_consumer.lookups._coverage import attended, coverage_by_stream
from relatum_consumer.lookups._limits import IDENTITY_POLL_S_MAX, POLL_S_MIN
from relatum_consumer.lookups._requests import (
    Agree,
    AllBounds,
    Bounds,
    Missing,
    Partitions,
    Pause,
    Sift,
    Steps,
    Together,
)

_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class Uncovered:
    """Offsets from `start` to before `stop` of a stream that are retained and not recorded as asked."""

    stream: str
    start: int
    stop: int


@dataclass(slots=True)
class Evidence:
    """What is known of the streams meant, from before the index was asked.

    Attributes:
        streams: Those that are there, in order of their names. What is proven is proven of these.
        gone: Those that were recorded and that the broker surely has no more.
        left_out: Those that were recorded and that this user may not read; and, where none is named, those of other
            brokers, and those that are not what was recorded.
        generations: Of each stream that is recorded its number, which is another once it was declared again.
        uncovered: The ranges that are retained and not recorded as asked, by stream and offset.
        unproven: Streams of which nobody can prove what they hold, whatever is recorded or read.
        behind: Those of which something is recorded for no key, or not for the time.
        new_keys: By key, the streams of which recorded offsets were not looked at for it: it was defined later.
    """

    streams: tuple[str, ...]
    gone: tuple[str, ...] = ()
    left_out: tuple[LeftOut, ...] = ()
    generations: Mapping[str, int] = field(default_factory=dict)
    uncovered: list[Uncovered] = field(default_factory=list)
    unproven: set[str] = field(default_factory=set)
    behind: set[str] = field(default_factory=set)
    new_keys: dict[int, dict[str, None]] = field(default_factory=dict)
    is_partial: bool = False
    """Whether the index has rows of streams that are left out, and nobody may look which."""

    def scan(self, consider: Callable[[Message], object]) -> Steps[None]:
        """Read what is not recorded. What cannot be unpacked makes its stream unproven."""

        def look(message: Message) -> None:
            if isinstance(message.raw, UnreadableRecord):
                self.unproven.add(message.stream)
            else:
                consider(message)

        for each in self.uncovered:
            yield from Sift(each.stream, each.start, each.stop, look)

    def note_gaps(self, stream: str, key_id: int, uncovered: Iterable[Range], recorded: Sequence[Range]) -> None:
        """Tell what was recorded, but not looked at for this key, from what nobody recorded."""
        for gap in uncovered:
            unrecorded = [gap] if key_id == TIME else missing(gap, recorded)
            if unrecorded:
                self.behind.add(stream)
            if unrecorded != [gap]:
                self.new_keys.setdefault(key_id, {})[stream] = None

    def unattended(self, catalog: Catalog) -> Steps[tuple[str, ...]]:
        """Those of the streams that are behind and that nobody records now."""
        names = sorted(self.behind)
        try:
            recorded = yield from attended(catalog, names)
        except Transient:
            return ()  # A hint is no reason to fail.
        return tuple(name for name in names if name not in recorded)

    def named_new_keys(self, catalog: Catalog, sought: Collection[int] | None = None) -> Steps[tuple[NewKey, ...]]:
        """The new keys, or those of them that were sought, by name."""
        definitions = (yield from catalog.keys()) if self.new_keys else ()
        return tuple(
            NewKey(key.name, tuple(self.new_keys[key.key_id]))
            for key in definitions
            if key.key_id in self.new_keys and (sought is None or key.key_id in sought)
        )

    def check_present(self, catalog: Catalog, names: Sequence[str] | None) -> Steps[None]:
        """See, after the index was asked, that each stream still was the one of which this is the evidence.

        Raises:
            StreamReplaced: a recorder has begun it anew meanwhile: then the index left out what was recorded of it.
        """
        present = {stream.name: stream.stream_id for stream in (yield from catalog.streams(names))}
        for stream in self.streams:
            if stream in self.generations and present.get(stream) != self.generations[stream]:
                message = f"the stream {stream!r} was begun anew, or forgotten, while it was asked about: repeat it"
                raise StreamReplaced(message, stream=stream)

    def is_open(self, required: Collection[int] | None = None) -> bool:
        """Whether something is not recorded for one of the keys required, or for any key of which it is the evidence.

        A new key that is not required leaves an answer as it is without it, and has to be named beside it.
        """
        if required is None:
            return bool(self.uncovered)
        return bool(self.behind or self.new_keys.keys() & set(required))

    def status(
        self,
        *,
        is_found: bool,
        was_read: bool,
        is_whole: bool,
        has_expired: bool = False,
        was_deleted: bool = False,
        required: Collection[int] | None = None,
    ) -> Status:
        """What an answer may say; the rule is told where this module begins, and `required` in `is_open`."""
        is_proven = is_whole and not (self.is_partial or (was_read and (self.unproven or self.left_out)))
        if is_found:
            return Status.FOUND if is_proven else Status.UNPROVEN
        if self.is_open(required) and not was_read:
            return Status.NOT_RECORDED_YET
        if not is_proven or self.unproven or self.left_out:
            return Status.UNPROVEN
        if has_expired:
            return Status.EXPIRED
        return Status.DELETED if was_deleted else Status.ABSENT


def evidence(
    catalog: Catalog,
    names: Sequence[str] | None,
    key_ids: Iterable[int],
    *,
    is_proof: bool = True,
    kept: KeptChunks | None = None,
) -> Steps[Evidence]:
    """What is known of the streams meant: which there are, and what of them is not recorded for each of the keys.

    Names are of streams and super streams, which stand for their partitions; None means all that are recorded. For
    times, the key is `relatum.store.TIME`. Without `is_proof`, what release 0.4 recorded over AMQP 0.9.1 counts, too:
    its rows count, but some may lack. Chunks that are read join those that are kept.

    Raises:
        StreamNotFound, NotAStream, AccessRefused: a named stream is unknown to the database and to the broker, or was
            deleted; or this user may not read it.
        StreamReplaced: what lies at the last recorded offset is not what was recorded there.
    """
    kept = kept or KeptChunks()
    recorded = yield from catalog.streams(names)
    ends: dict[str, StreamBounds] = {}
    # A stream that was recorded once and is gone holds nothing, and proves nothing either.
    gone: list[str] = []
    unusable = catalog.leaves_out(names)
    left_out = list(unusable)
    meant = yield from all_names(recorded, names)
    lasts = {stream.name for stream in recorded} if len(meant) > 1 else set()
    for stream, found in (yield from all_ends(meant, is_named=names is not None, kept=kept, lasts=lasts)).items():
        if isinstance(found, StreamBounds):
            ends[stream] = found
        elif found is None:
            gone.append(stream)
        else:
            left_out.append(found)
    unproven = {stream for stream, bounds in ends.items() if not bounds.is_proven}
    ranges = yield from coverage_by_stream(recorded)
    keys = tuple(key_ids)
    generations = {stream.name: stream.stream_id for stream in recorded}
    result = Evidence(tuple(ends), tuple(gone), tuple(left_out), generations, unproven=unproven)
    result.is_partial = bool(unusable)
    held = {stream: ranges.get(generations.get(stream, 0), []) for stream in ends}
    there = yield from check_identity(catalog, held, ends, kept)

    # Where no leader says where a stream ends, nothing is proven of it, however often it is read.
    needs_proof = {stream: is_proof and bounds.is_proven for stream, bounds in ends.items()}

    def uncovered_of(stream: str, of_keys: Sequence[int] = keys) -> list[Range]:
        ranges_held = proven if needs_proof[stream] else covered
        return gaps(ends[stream], held[stream], of_keys, recorded_as=ranges_held)

    # What lies behind a message that is there is retained, too.
    unsure = [
        stream
        for stream in lasts.intersection(ends)
        if ends[stream].first == 0 and any(start <= there.get(stream, start) for start, _ in uncovered_of(stream))
    ]
    ends |= (yield from _begun(unsure, ends)) if unsure else {}
    for stream in ends:
        uncovered = uncovered_of(stream)
        result.uncovered += [Uncovered(stream, *gap) for gap in uncovered]
        if uncovered:
            rows = [row for row in held[stream] if not (row.over_amqp and needs_proof[stream])]
            recorded_at_all = merged((row.from_offset, row.to_offset) for row in rows if row.kind == "recorded")
            for key_id in keys:
                result.note_gaps(stream, key_id, uncovered_of(stream, [key_id]), recorded_at_all)
    return result


def _begun(streams: Sequence[str], ends: Mapping[str, StreamBounds]) -> Steps[dict[str, StreamBounds]]:
    """The same ends, with the first offsets retained, as far as they can be had; the next answer will say why not."""
    found = yield from all_ends(streams, is_named=False)
    return {
        stream: StreamBounds(bounds.first, ends[stream].last, is_proven=True)
        for stream, bounds in found.items()
        if isinstance(bounds, StreamBounds) and bounds.first is not None and bounds.is_proven
    }


def evidence_together(catalog: Catalog, names: Sequence[str] | None, key_ids: Iterable[int]) -> Steps[Evidence]:
    """The same, of steps that are taken once for all who ask for it at the same time."""
    streams, keys = None if names is None else tuple(names), tuple(sorted(set(key_ids)))
    known: Evidence = yield from Together(("evidence", streams, keys), partial(evidence, catalog, streams, keys))
    # What is read from the streams is noted in it.
    return replace(known, uncovered=list(known.uncovered), unproven=set(known.unproven))


def ends_of(stream: str, *, is_named: bool) -> Steps[StreamBounds | LeftOut | None]:
    """A stream's ends; None where the broker surely has no such stream; or why this user cannot read it.

    Where it was asked for by name, that is an error (`StreamNotFound`, `NotAStream`, `AccessRefused`).
    """
    try:
        bounds: StreamBounds = yield from Bounds(stream)
    except (NotFound, AccessRefused) as error:
        if is_named:
            raise
        return LeftOut(stream, str(error)) if isinstance(error, AccessRefused) else None
    return bounds


def all_ends(
    streams: Sequence[str], *, is_named: bool, kept: KeptChunks | None = None, lasts: Collection[str] = ()
) -> Steps[dict[str, StreamBounds | LeftOut | None]]:
    """What `ends_of` says of each of many streams, in their order: together, and one by one what is not had so.

    Of `lasts` the first offset need not be known, and may be 0 for that.

    One that is gone, asked for by itself, costs a connection of AMQP 0.9.1 and a channel that the broker closes. So
    those are found together, too, where nobody named them and many may have been recorded once and deleted.
    """
    bounds: dict[str, StreamBounds] = {}
    if len(streams) > 1:
        bounds = yield from AllBounds(streams, kept or KeptChunks(), lasts)
    others = [stream for stream in streams if stream not in bounds]
    gone: set[str] = set((yield from Missing(others))) if others and not is_named else set()
    found: dict[str, StreamBounds | LeftOut | None] = {}
    for stream in streams:
        if stream in bounds:
            found[stream] = bounds[stream]
        else:
            found[stream] = None if stream in gone else (yield from ends_of(stream, is_named=is_named))
    return found


def gaps(
    bounds: StreamBounds,
    rows: Sequence[CoverageRow],
    key_ids: Iterable[int],
    recorded_as: Callable[[Iterable[CoverageRow], int], list[Range]] = proven,
) -> list[Range]:
    """The retained offsets that are not recorded for every one of the keys."""
    first, last = bounds
    if first is None or last is None:
        return []
    retained = (first, last + 1)
    return merged(gap for key_id in key_ids for gap in missing(retained, recorded_as(rows, key_id)))


def all_names(recorded: Sequence[PresentStream], names: Sequence[str] | None) -> Steps[list[str]]:
    """The streams meant: those recorded, and named ones or partitions of named super streams that are not."""
    found = {stream.name for stream in recorded}
    for name in names or ():
        if name not in found:
            partitions = yield from Partitions(name)
            supers = {stream.super_stream for stream in recorded}
            found.update(partitions or (() if name in supers else (name,)))
    return sorted(found)


def check_identity(
    catalog: Catalog,
    held: Mapping[str, Sequence[CoverageRow]],
    ends: Mapping[str, StreamBounds],
    kept: KeptChunks | None = None,
) -> Steps[dict[str, int]]:
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
    deadline, pause = time.monotonic() + catalog.patience_s, POLL_S_MIN
    while positions:
        agreed: dict[str, Agreement] = yield from Agree(positions, kept or KeptChunks())
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
        yield from Pause(min(pause, left))
        pause = min(2 * pause, IDENTITY_POLL_S_MAX)
    return there


def replaced(stream: str, offset: int) -> StreamReplaced:
    """The error for a stream that is not the one that was recorded."""
    return StreamReplaced(
        f"the stream {stream!r} is not the one that was recorded: at offset {offset} lies something else, or nothing. "
        "It was declared again, or lost its tail; a recorder puts that right",
        stream=stream,
        offset=offset,
    )
