"""What it takes to say that there is none: every message the streams retain was recorded for the keys asked by.

The streams' state is asked first (`_stream_states`), and the index is probed once more after that: whatever lay in the
streams when their ends were taken is then either in an uncovered range or in the index. Where one of several streams
begins is asked after the coverage, and only where a range is not recorded of which it is not known that it is retained:
it takes as long as the end.

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

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from relatum.errors import StreamReplaced, Transient
from relatum.reading import KeptChunks, Message, StreamBounds, UnreadableRecord
from relatum.store.coverage import TIME, CoverageRow, Range, covered, merged, missing, proven
from relatum_consumer.lookups._answer import LeftOut, NewKey, Status
from relatum_consumer.lookups._catalog import Catalog
from relatum_consumer.lookups._servers import Servers
from relatum_consumer.lookups._stream_states import StreamStates, all_ends, attended, stream_states


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

    def scan(self, servers: Servers, consider: Callable[[Message], object]) -> None:
        """Read what is not recorded. What cannot be unpacked makes its stream unproven."""

        def look(message: Message) -> None:
            if isinstance(message.raw, UnreadableRecord):
                self.unproven.add(message.stream)
            else:
                consider(message)

        for each in self.uncovered:
            servers.scan(each.stream, each.start, each.stop, look)

    def note_gaps(self, stream: str, key_id: int, uncovered: Iterable[Range], recorded: Sequence[Range]) -> None:
        """Tell what was recorded, but not looked at for this key, from what nobody recorded."""
        for gap in uncovered:
            unrecorded = [gap] if key_id == TIME else missing(gap, recorded)
            if unrecorded:
                self.behind.add(stream)
            if unrecorded != [gap]:
                self.new_keys.setdefault(key_id, {})[stream] = None

    def unattended(self, catalog: Catalog) -> tuple[str, ...]:
        """Those of the streams that are behind and that nobody records now."""
        names = sorted(self.behind)
        try:
            recorded = attended(catalog, names)
        except Transient:
            return ()  # A hint is no reason to fail.
        return tuple(name for name in names if name not in recorded)

    def named_new_keys(self, catalog: Catalog, sought: Collection[int] | None = None) -> tuple[NewKey, ...]:
        """The new keys, or those of them that were sought, by name."""
        definitions = catalog.keys() if self.new_keys else ()
        return tuple(
            NewKey(key.name, tuple(self.new_keys[key.key_id]))
            for key in definitions
            if key.key_id in self.new_keys and (sought is None or key.key_id in sought)
        )

    def check_present(self, catalog: Catalog, names: Sequence[str] | None) -> None:
        """See, after the index was asked, that each stream still was the one of which this is the evidence.

        Raises:
            StreamReplaced: a recorder has begun it anew meanwhile: then the index left out what was recorded of it.
        """
        present = {stream.name: stream.stream_id for stream in catalog.streams(names)}
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
    kept: KeptChunks | None = None,
) -> Evidence:
    """What is known of the streams meant: which there are, and what of them is not recorded for each of the keys.

    For times, the key is `relatum.store.TIME`. `names`, `kept` and errors are those of `stream_states`.
    """
    return evidence_of(catalog.servers, stream_states(catalog, names, kept=kept, lasts_only=True), key_ids)


def evidence_of(servers: Servers, streams: StreamStates, key_ids: Iterable[int], *, is_proof: bool = True) -> Evidence:
    """The same of streams whose state is known.

    Without `is_proof`, what release 0.4 recorded over AMQP 0.9.1 counts, too: its rows count, but some may lack.
    """
    ends, held, keys = streams.ends, streams.held, tuple(key_ids)
    result = Evidence(
        tuple(ends),
        tuple(streams.gone),
        (*streams.unusable, *streams.refused),
        {stream.name: stream.stream_id for stream in streams.recorded},
        unproven={stream for stream, bounds in ends.items() if not bounds.is_proven},
        is_partial=bool(streams.unusable),
    )
    # Where no leader says where a stream ends, nothing is proven of it, however often it is read.
    needs_proof = {stream: is_proof and bounds.is_proven for stream, bounds in ends.items()}

    def uncovered_of(stream: str, of_keys: Sequence[int] = keys) -> list[Range]:
        ranges_held = proven if needs_proof[stream] else covered
        return gaps(ends[stream], held[stream], of_keys, recorded_as=ranges_held)

    # What lies behind a message that is there is retained, too.
    unsure = [
        stream
        for stream in streams.lasts.intersection(ends)
        if ends[stream].first == 0
        and any(start <= streams.there.get(stream, start) for start, _ in uncovered_of(stream))
    ]
    ends |= _begun(servers, unsure, ends) if unsure else {}
    for stream in ends:
        uncovered = uncovered_of(stream)
        result.uncovered += [Uncovered(stream, *gap) for gap in uncovered]
        if uncovered:
            rows = [row for row in held[stream] if not (row.over_amqp and needs_proof[stream])]
            recorded_at_all = merged((row.from_offset, row.to_offset) for row in rows if row.kind == "recorded")
            for key_id in keys:
                result.note_gaps(stream, key_id, uncovered_of(stream, [key_id]), recorded_at_all)
    return result


def _begun(servers: Servers, streams: Sequence[str], ends: Mapping[str, StreamBounds]) -> dict[str, StreamBounds]:
    """The same ends, with the first offsets retained, as far as they can be had; the next answer will say why not."""
    found = all_ends(servers, streams, is_named=False)
    return {
        stream: StreamBounds(bounds.first, ends[stream].last, is_proven=True)
        for stream, bounds in found.items()
        if isinstance(bounds, StreamBounds) and bounds.first is not None and bounds.is_proven
    }


def evidence_together(catalog: Catalog, names: Sequence[str] | None, key_ids: Iterable[int]) -> Evidence:
    """The same, asked once for all who ask for it at the same time."""
    streams, keys = None if names is None else tuple(names), tuple(sorted(set(key_ids)))
    known: Evidence = catalog.servers.flights.run(
        ("evidence", streams, keys), partial(evidence, catalog, streams, keys)
    )
    # What is read from the streams is noted in it.
    return replace(known, uncovered=list(known.uncovered), unproven=set(known.unproven))


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
