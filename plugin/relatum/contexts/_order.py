"""The order of serialization contexts, read out of the partitions, and what contradicts it. Nothing is written.

A context's order is that of its messages by epoch, and within one by offset: an epoch is in one partition. What is
behind its context's fence does not count there; it counts where its publisher has adopted it. The same rules as those
of consumers say what counts: `PartitionLog`.

Only the streams say what is in them; PostgreSQL is asked for what they cannot say any more: which partitions were
retired, and which fences and markers retention has dropped.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, TypeAlias

from relatum.checks import checked_name
from relatum.contexts._entries import Adoption, Data, Entry, Fence, Marker, Placed, entry_of
from relatum.contexts._move_store import floors_before
from relatum.contexts._partition_log import PartitionLog, Verdict
from relatum.contexts._super_stream_rows import open_super_stream
from relatum.errors import OffsetExpired, OffsetNotFound, StreamNotFound, SuperStreamNotFound
from relatum.headers import CONTEXT_HEADER
from relatum.ids import MessageId
from relatum.reading import Broker, BrokerAddress, StreamReader
from relatum.store.database import ONCE_STATEMENT_S, AnyDatabase, Database

FINDINGS_MAX: Final = 1_000
"""Findings listed of one kind; more are counted."""

PROGRESS_MESSAGES: Final = 20_000
"""Messages between two calls of `progress`."""


class FindingKind(StrEnum):
    """What was found."""

    DISORDER = "disorder"
    """A message of a publisher counts behind a later one of it, or counts twice."""
    SPLIT = "split"
    """Messages of one context and one epoch count in two partitions."""
    EARLY = "early"
    """A message is before the fence, or the marker, that begins its epoch."""
    FALSE_ADOPTION = "false adoption"
    """An adoption names what is no message of its context, or a message that counts in its own place."""
    STRAY = "stray"
    """A message behind the fence of its context that nobody has adopted: its publish has not returned."""

    @property
    def is_notice(self) -> bool:
        """Whether it contradicts no order: a publisher's death leaves such things."""
        return self is FindingKind.STRAY


@dataclass(frozen=True, slots=True)
class Finding:
    """Something a reader should know of.

    Attributes:
        kind: What kind of thing.
        stream: The partition it was found in.
        offset: The offset there.
        context: The context it is about; None for none.
        text: What was found, in words.
    """

    kind: FindingKind
    stream: str
    offset: int
    context: str | None
    text: str


@dataclass(slots=True)
class SerialReport:
    """What the partitions of a super stream hold, and what contradicts its contexts' order.

    Attributes:
        super_stream: Its name.
        header: The header that names its contexts.
        partitions: Where reading began and ended in each: first offset, and the offset behind the last.
        messages: Messages of the application that count, adopted ones included.
        unplaced: Those of them that no router published. They have no place in any order.
        contexts: How many contexts have messages that count.
        strays: Messages behind the fence of their context.
        adopted: Those of them that were adopted.
        moves: Moves whose fence was seen.
        findings: What was found, at most 1,000 of each kind.
        counts: How many of each kind were found.
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
        """Whether nothing contradicts the order. Strays nobody adopted do not."""
        return not any(count for kind, count in self.counts.items() if not kind.is_notice)

    def add(self, finding: Finding) -> None:
        """Count a finding, and list it while there is room."""
        count = self.counts[finding.kind] = self.counts.get(finding.kind, 0) + 1
        if count <= FINDINGS_MAX:
            self.findings.append(finding)


class Unreadable(StrEnum):
    """Why there is no entry at an offset."""

    MISSING = "missing"
    """There is none."""
    OUT_OF_REACH = "out of reach"
    """Retention has dropped it, or it was published after reading began."""


Look: TypeAlias = Callable[[str, int], Entry | Unreadable]
"""Gives the entry at an offset of a partition."""


@dataclass(frozen=True, slots=True)
class ContextMessage:
    """A message of an application that counts.

    Attributes:
        context: Its context; None for none.
        at: The partition and offset where it counts: its own, or its adoption's.
        message: The partition and offset where it is stored.
        epoch: The epoch it counts under; 0 where no router published it and nothing was ever moved here.
        placed: Under which placement it was published; None where no router published it.
    """

    context: str | None
    at: MessageId
    message: MessageId
    epoch: int
    placed: Placed | None


class PartitionsReading:
    """What counts in the partitions of a super stream, one partition after the other."""

    def __init__(self, look: Look, found: Callable[[Finding], None]) -> None:
        self._look = look
        self._found = found
        self._log = PartitionLog()
        self._stream = ""
        self._latest: dict[str, int] = {}
        self.strays: dict[MessageId, Data] = {}
        self.adopted: dict[MessageId, ContextMessage] = {}
        self.fences: dict[int, MessageId] = {}

    def begin(self, stream: str, floors: Mapping[str, int]) -> None:
        """Go on with another partition; the floors are those at the offset where reading begins."""
        self._stream = stream
        self._log = PartitionLog(floors)
        self._latest = {}

    def add(self, offset: int, entry: Entry) -> ContextMessage | None:
        """The message that counts at an offset; None where there is none."""
        at = MessageId(self._stream, offset)
        if isinstance(entry, (Fence, Marker)):
            self._control(at, entry)
            return None
        if self._log.judge(offset, entry) is Verdict.STRAY:
            if isinstance(entry, Data):
                self.strays[at] = entry
            return None
        counted = self._adoption(at, entry) if isinstance(entry, Adoption) else self._data(at, entry)
        if counted is not None and counted.context is not None:
            self._latest[counted.context] = max(counted.epoch, self._latest.get(counted.context, 0))
        return counted

    def _control(self, at: MessageId, entry: Fence | Marker) -> None:
        for context in entry.contexts:
            # Only the first of repeated ones, which is the one that raises the floor, begins anything.
            if self._log.floors.get(context, 0) < entry.epoch == self._latest.get(context, 0):
                what = f"epoch {entry.epoch} was used before move {entry.move_id} let it"
                self._found(Finding(FindingKind.EARLY, *at, context, what))
        self._log.judge(at.offset, entry)
        if isinstance(entry, Fence):
            self.fences.setdefault(entry.move_id, at)
        for move_id in list(self._log.holds):
            # Holding changes when a message is delivered, not whether it counts.
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
        if seen is Unreadable.OUT_OF_REACH:
            return None
        if not isinstance(seen, Data) or seen.context != entry.context or seen.placed is None:
            self._false_adoption(at, entry.context, f"{message} is no message of the context")
            return None
        counted = self.adopted[message] = ContextMessage(entry.context, at, message, entry.epoch, seen.placed)
        return counted

    def _false_adoption(self, at: MessageId, context: str | None, text: str) -> None:
        self._found(Finding(FindingKind.FALSE_ADOPTION, *at, context, text))

    def finish(self, read: Mapping[str, tuple[int, int]]) -> None:
        """Find what takes all partitions to know."""
        for message, counted in self.adopted.items():
            first, end = read.get(message.stream, (0, 0))
            if first <= message.offset < end and message not in self.strays:
                self._false_adoption(counted.at, counted.context, f"{message} counts where it lies")
        for at, entry in self.strays.items():
            if at not in self.adopted:
                self._found(Finding(FindingKind.STRAY, *at, entry.context, f"{entry.placed} is behind its fence"))


@dataclass(slots=True)
class _Run:
    """What one epoch of a context has in its partition: of each session, its first and its last message."""

    stream: str
    first: dict[str, ContextMessage] = field(default_factory=dict)
    last: dict[str, ContextMessage] = field(default_factory=dict)


class OrderCheck:
    """Whether each publisher's messages count in the order in which it published them, context by context.

    Holds two messages' places for each context, epoch and publisher; not those of all messages.
    """

    def __init__(self, found: Callable[[Finding], None]) -> None:
        self._found = found
        self._runs: defaultdict[str, dict[int, _Run]] = defaultdict(dict)

    @property
    def contexts(self) -> int:
        """How many contexts have messages."""
        return len(self._runs)

    def add(self, counted: ContextMessage) -> None:
        """Check a message of a context; offsets ascend within a partition."""
        context, placed = counted.context, counted.placed
        if context is None or placed is None:
            return
        run = self._runs[context].setdefault(counted.epoch, _Run(counted.at.stream))
        if run.stream != counted.at.stream:
            text = f"epoch {counted.epoch} of the context is in {run.stream!r}, too"
            self._found(Finding(FindingKind.SPLIT, *counted.at, context, text))
            return
        before = run.last.get(placed.session)
        if before is not None:
            self._compare(before, counted)
        run.first.setdefault(placed.session, counted)
        run.last[placed.session] = counted

    def finish(self) -> None:
        """Compare messages of different epochs."""
        for runs in self._runs.values():
            last: dict[str, ContextMessage] = {}
            for _, run in sorted(runs.items()):
                for session, first in run.first.items():
                    if session in last:
                        self._compare(last[session], first)
                last |= run.last

    def _compare(self, before: ContextMessage, counted: ContextMessage) -> None:
        assert before.placed is not None
        assert counted.placed is not None
        if before.placed.number >= counted.placed.number:
            text = f"{counted.placed} counts behind {before.placed} at {before.at}"
            self._found(Finding(FindingKind.DISORDER, *counted.at, counted.context, text))


def verify(
    super_stream: str,
    *,
    broker: str | Broker,
    database: AnyDatabase | None = None,
    header: str | None = None,
    progress: Callable[[SerialReport], None] | None = None,
) -> SerialReport:
    """Read all partitions, up to where they end now, and check the order of the contexts in them.

    For each context and each router that published it, its messages must count once and in the order in which they
    were published. Publishers, consumers and moves may go on. What is held grows with the contexts and the
    routers, not with the messages.

    Args:
        super_stream: Its name.
        broker: The broker's URL, or a `Broker`.
        database: PostgreSQL's URL, or a `Database`. None reads the streams alone: then the partitions are those that
            are bound now, and where retention has dropped fences, what they made strays seems to count.
        header: The header that names contexts; None takes the database's word, and "serialization_context" without one.
        progress: Called with what is known so far, about every 20,000 messages.

    Raises:
        SuperStreamNotFound: there is no such super stream.
    """
    checked_name("super_stream", super_stream)
    if header is not None:
        checked_name("header", header)
    address = BrokerAddress.of(broker)
    with StreamReader.open(address) as reader:
        header, ranges, floors = _begin(reader, address, database, super_stream, header)

        def look(stream: str, offset: int) -> Entry | Unreadable:
            try:
                message = reader.read(stream, offset)
            except (OffsetExpired, StreamNotFound):
                return Unreadable.OUT_OF_REACH
            except OffsetNotFound:
                return Unreadable.MISSING
            return entry_of(message.headers, message.body, header)

        report = SerialReport(super_stream, header, dict(ranges))
        order, reading = OrderCheck(report.add), PartitionsReading(look, report.add)

        def tell() -> None:
            report.strays, report.moves = len(reading.strays), len(reading.fences)
            report.adopted = len(reading.strays.keys() & reading.adopted.keys())
            if progress is not None:
                progress(report)

        seen = 0
        for stream, (first, end) in ranges.items():
            reading.begin(stream, floors.get(stream, {}))
            for message in reader.iterate(stream, first, stop=end) if end > first else ():
                counted = reading.add(message.offset, entry_of(message.headers, message.body, header))
                if counted is not None:
                    report.messages += 1
                    report.unplaced += counted.placed is None
                    order.add(counted)
                seen += 1
                if seen % PROGRESS_MESSAGES == 0:
                    tell()
        tell()
    reading.finish(ranges)
    order.finish()
    report.contexts = order.contexts
    return report


def _begin(
    reader: StreamReader,
    address: BrokerAddress,
    database: AnyDatabase | None,
    super_stream: str,
    header: str | None,
) -> tuple[str, dict[str, tuple[int, int]], dict[str, dict[str, int]]]:
    """The header, from where to where each partition is read, and the floors of contexts there."""
    if database is not None:
        # Nothing is stored where nothing was ever placed in it.
        with suppress(SuperStreamNotFound), closing(Database(database, statement_s=ONCE_STATEMENT_S)) as shared:
            known = shared.run(lambda found: open_super_stream(found, (address.vhost, super_stream), None, None))
            ids = {row.stream: row.partition_id for row in known.partitions}
            ranges = dict(_ranges(reader, ids))
            floors = {stream: floors_before(shared, ids[stream], first) for stream, (first, _) in ranges.items()}
            return header or known.header, ranges, floors
    # The empty name is the default exchange's, to which every stream is bound.
    streams = reader.bound(super_stream) if super_stream else ()
    if not streams:
        raise SuperStreamNotFound(f"there is no super stream {super_stream!r}", super_stream=super_stream)
    return header or CONTEXT_HEADER, dict(_ranges(reader, streams)), {}


def _ranges(reader: StreamReader, streams: Iterable[str]) -> Iterator[tuple[str, tuple[int, int]]]:
    """From where to where each stream is there; one that was retired and deleted is left out."""
    for stream in streams:
        try:
            bounds = reader.bounds(stream)
        except StreamNotFound:
            continue
        first = bounds.first or 0
        yield stream, (first, first if bounds.last is None else bounds.last + 1)
