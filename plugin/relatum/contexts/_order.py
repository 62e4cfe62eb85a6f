"""Verifies the order of serialization contexts by reading the partitions. Writes nothing.

docs/contexts-protocol.md has the order, and `PartitionLog` its rules. PostgreSQL only adds facts that the streams have
lost: retired partitions, and fences and markers that retention has dropped.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, NamedTuple, TypeAlias

from relatum.common.checks import checked_name
from relatum.common.headers import CONTEXT_HEADER
from relatum.common.ids import MessageId
from relatum.contexts._move_store import FLOORS
from relatum.contexts._partition_log import (
    NO_ENTRY,
    Adoption,
    Data,
    Entry,
    Fence,
    Marker,
    PartitionLog,
    Placed,
    Verdict,
    entry_of,
)
from relatum.contexts._placement_store import PlacementStore
from relatum.errors import OffsetExpired, OffsetNotFound, StreamNotFound, SuperStreamNotFound
from relatum.reading import Broker, BrokerAddress, StreamReader
from relatum.store.database import ONCE_STATEMENT_S, AnyDatabase, Database
from relatum.superstreams.administration import no_super_stream

FINDINGS_MAX: Final = 1_000
"""How many findings of one kind a report lists. It only counts the others."""

PROGRESS_MESSAGES: Final = 20_000
"""Messages between two calls of `progress`."""


class FindingKind(StrEnum):
    """The kind of a finding."""

    DISORDER = "disorder"
    """A router's message follows a later message of that router, or is valid twice."""
    SPLIT = "split"
    """Messages of one context and epoch are valid in two partitions."""
    EARLY = "early"
    """A message precedes the fence or marker that begins its epoch."""
    FALSE_ADOPTION = "false adoption"
    """An adoption names no message of its context, or a message that is valid where it is stored."""
    STRAY = "stray"
    """A message behind its context's fence was not adopted: its publish has not returned."""

    @property
    def is_notice(self) -> bool:
        """Whether the order is intact despite the finding: publishers that died leave strays."""
        return self is FindingKind.STRAY


@dataclass(frozen=True, slots=True)
class Finding:
    """One finding of `verify`.

    Attributes:
        kind: The finding's kind.
        stream: The partition's stream.
        offset: The offset in the partition.
        context: The context, or None.
        text: The description.
    """

    kind: FindingKind
    stream: str
    offset: int
    context: str | None
    text: str


@dataclass(slots=True)
class SerialReport:
    """The result of `verify`.

    Attributes:
        super_stream: The super stream's name.
        header: The header that names contexts.
        partitions: The range of offsets read, by partition: the first offset, and the offset after the last.
        messages: Valid messages of the application, including adopted ones.
        unplaced: Valid messages published without a router or without a context; they have no order.
        contexts: Contexts with valid messages from routers.
        strays: Messages behind the fence of their context.
        adopted: Strays that were adopted.
        moves: Moves whose fence was read.
        findings: The findings, at most 1,000 of each kind.
        counts: The number of findings of each kind.
    """

    super_stream: str
    header: str
    partitions: dict[str, tuple[int, int]] = field(default_factory=dict)
    messages: int = 0
    unplaced: int = 0
    contexts: int = 0
    strays: int = 0
    adopted: int = 0
    moves: int = 0
    findings: list[Finding] = field(default_factory=list)
    counts: dict[FindingKind, int] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether the order is intact. Strays that were not adopted do not break it."""
        return not any(count for kind, count in self.counts.items() if not kind.is_notice)

    def add(self, finding: Finding) -> None:
        """Count a finding, and add it to the list, which has at most 1,000 of each kind."""
        count = self.counts[finding.kind] = self.counts.get(finding.kind, 0) + 1
        if count <= FINDINGS_MAX:
            self.findings.append(finding)


Look: TypeAlias = Callable[[str, int], Entry | None]
"""Returns the entry at an offset of a partition: `NO_ENTRY` without a message, None if it was dropped or deleted."""


class ValidMessage(NamedTuple):
    """A valid message of the application. For an adopted message, `at` is the position of the adoption."""

    context: str | None
    at: MessageId
    epoch: int
    """For a message that no router published: the latest epoch of its context here, or 0."""
    placed: Placed | None


class OrderCheck:
    """Finds the valid messages of a super stream, one partition after the other, and checks their order.

    The messages of each context and router must be valid in the order of publishing. The check stores two messages for
    each context, epoch and router, so memory does not grow with the number of messages.
    """

    def __init__(self, look: Look, report: SerialReport) -> None:
        self._look = look
        self._report = report
        self._log = PartitionLog()
        self._stream = ""
        self._latest: dict[str | None, int] = {}
        self._strays: dict[MessageId, Data] = {}
        self._adopted: dict[MessageId, ValidMessage] = {}
        self._fences: set[int] = set()
        self._runs: defaultdict[str, dict[int, dict[str, tuple[ValidMessage, ValidMessage]]]] = defaultdict(dict)
        """For each context and epoch: the first and last message of each session."""

    def begin(self, stream: str, floors: Mapping[str, int]) -> None:
        """Begin the next partition. `floors`: the floors at the first offset read."""
        self._stream = stream
        self._log = PartitionLog(floors)
        self._latest = {}

    def add(self, offset: int, entry: Entry) -> ValidMessage | None:
        """Return the message that is valid at an offset, or None."""
        at = MessageId(self._stream, offset)
        if isinstance(entry, (Fence, Marker)):
            self._control(at, entry)
            return None
        if self._log.judge(offset, entry) is Verdict.STRAY:
            if isinstance(entry, Data):
                self._strays[at] = entry
                self._report.strays += 1
                self._report.adopted += at in self._adopted
            return None
        if isinstance(entry, Adoption):
            counted = self._adoption(at, entry)
        else:
            epoch = self._latest.get(entry.context, 0) if entry.placed is None else entry.placed.epoch
            counted = ValidMessage(entry.context, at, epoch, entry.placed)
        if counted is not None:
            self._report.messages += 1
            self._report.unplaced += counted.placed is None
            self._order(counted)
        return counted

    def _order(self, counted: ValidMessage) -> None:
        """Check the next message of a context. Offsets rise within a partition."""
        context, at, epoch, placed = counted
        if context is None:
            return
        self._latest[context] = max(epoch, self._latest.get(context, 0))
        if placed is None:
            return
        run = self._runs[context].setdefault(epoch, {})
        first, before = run.get(placed.session, (counted, None))
        stream = next((earliest.at.stream for earliest, _ in run.values()), at.stream)
        if stream != at.stream:
            self._add_finding(FindingKind.SPLIT, at, context, f"epoch {epoch} of the context is also in {stream!r}")
            return
        if before is not None:
            self._compare(before, counted)
        run[placed.session] = first, counted

    def _control(self, at: MessageId, entry: Fence | Marker) -> None:
        for context in entry.contexts:
            # Of repeated fences and markers, only the first one raises the floor.
            if self._log.floors.get(context, 0) < entry.epoch == self._latest.get(context, 0):
                what = f"a message has epoch {entry.epoch} before move {entry.move_id} begins the epoch"
                self._add_finding(FindingKind.EARLY, at, context, what)
        self._log.judge(at.offset, entry)
        if isinstance(entry, Fence):
            self._fences.add(entry.move_id)
            self._report.moves = len(self._fences)
        for move_id in list(self._log.holds):
            # A hold delays messages, but does not change whether they are valid.
            self._log.end(move_id)

    def _adoption(self, at: MessageId, entry: Adoption) -> ValidMessage | None:
        message = MessageId(entry.stream, entry.offset)
        target = self._look(entry.stream, entry.offset)
        if target is None:
            return None
        if not isinstance(target, Data) or target.context != entry.context or target.placed is None:
            what = f"{message} is not a message of the context"
            self._add_finding(FindingKind.FALSE_ADOPTION, at, entry.context, what)
            return None
        self._report.adopted += message in self._strays and message not in self._adopted
        counted = self._adopted[message] = ValidMessage(entry.context, at, entry.epoch, target.placed)
        return counted

    def finish(self, read: Mapping[str, tuple[int, int]]) -> None:
        for message, counted in self._adopted.items():
            first, end = read.get(message.stream, (0, 0))
            if first <= message.offset < end and message not in self._strays:
                what = f"{message} is valid where it is stored"
                self._add_finding(FindingKind.FALSE_ADOPTION, counted.at, counted.context, what)
        for at, entry in self._strays.items():
            if at not in self._adopted:
                self._add_finding(FindingKind.STRAY, at, entry.context, f"{entry.placed} is behind its fence")
        for runs in self._runs.values():
            last: dict[str, ValidMessage] = {}
            for _, run in sorted(runs.items()):
                for session, (earliest, latest) in run.items():
                    if session in last:
                        self._compare(last[session], earliest)
                    last[session] = latest
        self._report.contexts = len(self._runs)

    def _compare(self, before: ValidMessage, counted: ValidMessage) -> None:
        assert before.placed is not None
        assert counted.placed is not None
        if before.placed.number >= counted.placed.number:
            text = f"{counted.placed} follows {before.placed} at {before.at}"
            self._add_finding(FindingKind.DISORDER, counted.at, counted.context, text)

    def _add_finding(self, kind: FindingKind, at: MessageId, context: str | None, text: str) -> None:
        self._report.add(Finding(kind, *at, context, text))


def verify(
    super_stream: str,
    *,
    broker: str | Broker,
    database: AnyDatabase | None = None,
    header: str | None = None,
    progress: Callable[[SerialReport], None] | None = None,
) -> SerialReport:
    """Return a report on the order of all contexts, after reading all partitions up to their current ends.

    The messages of each context and router must be valid exactly once, in the order of publishing. Publishers,
    consumers and moves may run at the same time. Memory grows with contexts and routers, not with messages.

    Args:
        super_stream: The super stream's name.
        broker: The broker's URL, or a `Broker`.
        database: PostgreSQL's URL, or a `Database`. None (default) uses the streams alone: only bound partitions are
            read, and strays seem valid if retention has dropped their fence.
        header: The header that names contexts. None (default): the stored header, or "serialization_context".
        progress: Called with the report so far, about every 20,000 messages and at the end. None (default): no calls.

    Raises:
        SuperStreamNotFound: the super stream does not exist.
        BrokerUnavailable, DatabaseUnavailable: a server does not answer.
    """
    checked_name("super_stream", super_stream)
    if header is not None:
        checked_name("header", header)
    address = BrokerAddress.of(broker)
    with StreamReader.open(address) as reader:
        header, ranges, floors = _begin(reader, address, database, super_stream, header)

        def look(stream: str, offset: int) -> Entry | None:
            try:
                message = reader.read(stream, offset)
            except (OffsetExpired, StreamNotFound):
                return None
            except OffsetNotFound:
                return NO_ENTRY
            return entry_of(message, header)

        report = SerialReport(super_stream, header, dict(ranges))
        check, messages_read = OrderCheck(look, report), 0
        for stream, (first, end) in ranges.items():
            check.begin(stream, floors.get(stream, {}))
            for message in reader.iterate(stream, first, stop=end) if end > first else ():
                check.add(message.offset, entry_of(message, header))
                messages_read += 1
                if progress is not None and messages_read % PROGRESS_MESSAGES == 0:
                    progress(report)
        if progress is not None:
            progress(report)
    check.finish(ranges)
    return report


def _begin(
    reader: StreamReader,
    address: BrokerAddress,
    database: AnyDatabase | None,
    super_stream: str,
    header: str | None,
) -> tuple[str, dict[str, tuple[int, int]], dict[str, dict[str, int]]]:
    """Return the header, and by partition the range of offsets to read and the floors of contexts at its start."""
    if database is not None:
        # A super stream without placements has no rows in the database.
        with suppress(SuperStreamNotFound), closing(Database(database, statement_s=ONCE_STATEMENT_S)) as shared:
            known = PlacementStore(shared, address.vhost, super_stream)
            ids = {row.stream: row.partition_id for row in known.open()}
            ranges = _ranges(reader, ids)
            starts = {stream: {"partition_id": ids[stream], "offset": first} for stream, (first, _) in ranges.items()}
            floors = {stream: dict(shared.rows(FLOORS, start)) for stream, start in starts.items()}
            return header or known.header, ranges, floors
    # The empty name is the default exchange, to which every stream is bound.
    streams = reader.bound(super_stream) if super_stream else ()
    if not streams:
        raise no_super_stream(super_stream)
    return header or CONTEXT_HEADER, _ranges(reader, streams), {}


def _ranges(reader: StreamReader, streams: Iterable[str]) -> dict[str, tuple[int, int]]:
    """Return the current range of offsets of each stream, without streams that were retired and deleted."""
    ranges = {}
    for stream in streams:
        with suppress(StreamNotFound):
            bounds = reader.bounds(stream)
            ranges[stream] = bounds.first or 0, bounds.end
    return ranges
