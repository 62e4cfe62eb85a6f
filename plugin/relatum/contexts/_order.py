"""Verification of the order of serialization contexts, by reading the partitions. Nothing is written.

A context's messages are ordered by epoch, then by offset: an epoch is in one partition. A message after its context's
fence (a stray) is valid only where its publisher has adopted it. `PartitionLog` has these rules, for consumers too.

The facts come from the streams. PostgreSQL adds what streams have lost: which partitions were retired, and which fences
and markers retention has dropped.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, TypeAlias

from relatum.checks import checked_name
from relatum.contexts._move_store import floors_before
from relatum.contexts._partition_log import (
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
from relatum.contexts._super_stream_rows import open_super_stream
from relatum.errors import OffsetExpired, OffsetNotFound, StreamNotFound, SuperStreamNotFound
from relatum.headers import CONTEXT_HEADER
from relatum.ids import MessageId
from relatum.reading import Broker, BrokerAddress, StreamReader
from relatum.store.database import ONCE_STATEMENT_S, AnyDatabase, Database

FINDINGS_MAX: Final = 1_000
"""How many findings of one kind are listed; the others are only counted."""

PROGRESS_MESSAGES: Final = 20_000
"""Messages between two calls of `progress`."""


class FindingKind(StrEnum):
    """The kind of a finding."""

    DISORDER = "disorder"
    """A publisher's message follows a later message of that publisher, or is valid twice."""
    SPLIT = "split"
    """Messages of one context and epoch are valid in two partitions."""
    EARLY = "early"
    """A message precedes the fence or marker that begins its epoch."""
    FALSE_ADOPTION = "false adoption"
    """An adoption names no message of its context, or one that is valid where it is stored."""
    STRAY = "stray"
    """A message after its context's fence was not adopted: its publish has not returned."""

    @property
    def is_notice(self) -> bool:
        """Whether the order is intact all the same: publishers that died leave strays."""
        return self is FindingKind.STRAY


@dataclass(frozen=True, slots=True)
class Finding:
    """One finding.

    Attributes:
        kind: Its kind.
        stream: The partition.
        offset: The offset in the partition.
        context: The context, or None.
        text: A description.
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
        partitions: The offsets read of each partition: the first, and the one after the last.
        messages: Valid messages of the application, adopted ones included.
        unplaced: Messages that no router published; they have no order.
        contexts: Contexts with valid messages.
        strays: Messages after the fence of their context.
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
        """Count a finding, and list it if the list is not full."""
        count = self.counts[finding.kind] = self.counts.get(finding.kind, 0) + 1
        if count <= FINDINGS_MAX:
            self.findings.append(finding)


Look: TypeAlias = Callable[[str, int], Entry | None]
"""Returns the entry at an offset of a partition: `NO_ENTRY` if there is no message, None if that is not known.

Retention may have dropped the message, or it was published after reading began.
"""

NO_ENTRY: Final = Data(None, None)


@dataclass(frozen=True, slots=True)
class ContextMessage:
    """A valid message of the application.

    Attributes:
        context: Its context, or None.
        at: The partition and offset where it is valid: its own, or those of its adoption.
        message: The partition and offset where it is stored.
        epoch: The epoch it is valid in; 0 if no router published it and no context was moved here.
        placed: The placement it was published with; None if no router published it.
    """

    context: str | None
    at: MessageId
    message: MessageId
    epoch: int
    placed: Placed | None


@dataclass(slots=True)
class _Run:
    """One epoch of a context in its partition: the first and last message of each session."""

    stream: str
    first: dict[str, ContextMessage] = field(default_factory=dict)
    last: dict[str, ContextMessage] = field(default_factory=dict)


class OrderCheck:
    """Finds the valid messages of a super stream, one partition after the other, and checks their order.

    The messages of each context and publisher must be valid in the order of publishing. Keeps two positions for each
    context, epoch and publisher, so memory does not grow with the messages.
    """

    def __init__(self, look: Look, report: SerialReport) -> None:
        self._look = look
        self._report = report
        self._log = PartitionLog()
        self._stream = ""
        self._latest: dict[str, int] = {}
        self._strays: dict[MessageId, Data] = {}
        self._adopted: dict[MessageId, ContextMessage] = {}
        self._fences: set[int] = set()
        self._runs: defaultdict[str, dict[int, _Run]] = defaultdict(dict)

    def begin(self, stream: str, floors: Mapping[str, int]) -> None:
        """Begin the next partition; `floors` are those at the first offset read."""
        self._stream = stream
        self._log = PartitionLog(floors)
        self._latest = {}

    def add(self, offset: int, entry: Entry) -> ContextMessage | None:
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
        counted = self._adoption(at, entry) if isinstance(entry, Adoption) else self._data(at, entry)
        if counted is not None:
            self._report.messages += 1
            self._report.unplaced += counted.placed is None
            self._order(counted)
        return counted

    def _order(self, counted: ContextMessage) -> None:
        """Check the next message of a context; offsets ascend within a partition."""
        context, placed = counted.context, counted.placed
        if context is None:
            return
        self._latest[context] = max(counted.epoch, self._latest.get(context, 0))
        if placed is None:
            return
        run = self._runs[context].setdefault(counted.epoch, _Run(counted.at.stream))
        if run.stream != counted.at.stream:
            text = f"epoch {counted.epoch} of the context is in {run.stream!r}, too"
            self._report.add(Finding(FindingKind.SPLIT, *counted.at, context, text))
            return
        before = run.last.get(placed.session)
        if before is not None:
            self._compare(before, counted)
        run.first.setdefault(placed.session, counted)
        run.last[placed.session] = counted

    def _control(self, at: MessageId, entry: Fence | Marker) -> None:
        for context in entry.contexts:
            # Fences and markers may be repeated: only the first one raises the floor.
            if self._log.floors.get(context, 0) < entry.epoch == self._latest.get(context, 0):
                what = f"epoch {entry.epoch} was used before move {entry.move_id} began it"
                self._report.add(Finding(FindingKind.EARLY, *at, context, what))
        self._log.judge(at.offset, entry)
        if isinstance(entry, Fence):
            self._fences.add(entry.move_id)
            self._report.moves = len(self._fences)
        for move_id in list(self._log.holds):
            # Holding delays a message's delivery; it does not change its validity.
            self._log.end(move_id)

    def _data(self, at: MessageId, entry: Data) -> ContextMessage:
        epoch = 0
        if entry.placed is not None:
            epoch = entry.placed.epoch
        elif entry.context is not None:
            epoch = self._latest.get(entry.context, 0)
        return ContextMessage(entry.context, at, at, epoch, entry.placed)

    def _adoption(self, at: MessageId, entry: Adoption) -> ContextMessage | None:
        message = MessageId(entry.stream, entry.offset)
        seen = self._look(entry.stream, entry.offset)
        if seen is None:
            return None
        if not isinstance(seen, Data) or seen.context != entry.context or seen.placed is None:
            self._false_adoption(at, entry.context, f"{message} is not a message of the context")
            return None
        self._report.adopted += message in self._strays and message not in self._adopted
        counted = self._adopted[message] = ContextMessage(entry.context, at, message, entry.epoch, seen.placed)
        return counted

    def _false_adoption(self, at: MessageId, context: str | None, text: str) -> None:
        self._report.add(Finding(FindingKind.FALSE_ADOPTION, *at, context, text))

    def finish(self, read: Mapping[str, tuple[int, int]]) -> None:
        for message, counted in self._adopted.items():
            first, end = read.get(message.stream, (0, 0))
            if first <= message.offset < end and message not in self._strays:
                self._false_adoption(counted.at, counted.context, f"{message} is valid where it is stored")
        for at, entry in self._strays.items():
            if at not in self._adopted:
                self._report.add(Finding(FindingKind.STRAY, *at, entry.context, f"{entry.placed} follows its fence"))
        for runs in self._runs.values():
            last: dict[str, ContextMessage] = {}
            for _, run in sorted(runs.items()):
                for session, earliest in run.first.items():
                    if session in last:
                        self._compare(last[session], earliest)
                last |= run.last
        self._report.contexts = len(self._runs)

    def _compare(self, before: ContextMessage, counted: ContextMessage) -> None:
        assert before.placed is not None
        assert counted.placed is not None
        if before.placed.number >= counted.placed.number:
            text = f"{counted.placed} follows {before.placed} at {before.at}"
            self._report.add(Finding(FindingKind.DISORDER, *counted.at, counted.context, text))


def verify(
    super_stream: str,
    *,
    broker: str | Broker,
    database: AnyDatabase | None = None,
    header: str | None = None,
    progress: Callable[[SerialReport], None] | None = None,
) -> SerialReport:
    """Read all partitions up to their present ends, and check the order of their contexts.

    The messages of each context and router must be valid exactly once, in the order of publishing. Publishers,
    consumers and moves may run at the same time. Memory grows with contexts and routers, not with messages.

    Args:
        super_stream: The super stream's name.
        broker: The broker's URL, or a `Broker`.
        database: PostgreSQL's URL, or a `Database`. None uses the streams alone: only bound partitions are read, and
            strays whose fences retention has dropped look valid.
        header: The header that names contexts; None: the stored one, or "serialization_context".
        progress: Called with the report so far, about every 20,000 messages.

    Raises:
        SuperStreamNotFound: the super stream does not exist.
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
            return entry_of(message.headers, message.body, header)

        report = SerialReport(super_stream, header, dict(ranges))
        check, seen = OrderCheck(look, report), 0
        for stream, (first, end) in ranges.items():
            check.begin(stream, floors.get(stream, {}))
            for message in reader.iterate(stream, first, stop=end) if end > first else ():
                check.add(message.offset, entry_of(message.headers, message.body, header))
                seen += 1
                if progress is not None and seen % PROGRESS_MESSAGES == 0:
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
    """Return the header, the offsets to read of each partition, and the floors of contexts at their beginning."""
    if database is not None:
        # A super stream without placements has no rows.
        with suppress(SuperStreamNotFound), closing(Database(database, statement_s=ONCE_STATEMENT_S)) as shared:
            known = shared.run(lambda found: open_super_stream(found, (address.vhost, super_stream), None, None))
            ids = {row.stream: row.partition_id for row in known.partitions}
            ranges = dict(_ranges(reader, ids))
            floors = {stream: floors_before(shared, ids[stream], first) for stream, (first, _) in ranges.items()}
            return header or known.header, ranges, floors
    # The empty name is the default exchange, which every stream is bound to.
    streams = reader.bound(super_stream) if super_stream else ()
    if not streams:
        raise SuperStreamNotFound(f"there is no super stream {super_stream!r}", super_stream=super_stream)
    return header or CONTEXT_HEADER, dict(_ranges(reader, streams)), {}


def _ranges(reader: StreamReader, streams: Iterable[str]) -> Iterator[tuple[str, tuple[int, int]]]:
    """Return the present offsets of each stream; deleted ones, which were retired, are left out."""
    for stream in streams:
        try:
            bounds = reader.bounds(stream)
        except StreamNotFound:
            continue
        first = bounds.first or 0
        yield stream, (first, first if bounds.last is None else bounds.last + 1)
