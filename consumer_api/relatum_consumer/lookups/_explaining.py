"""What look-ups did for their answer, noted where their requests are carried out: so each look-up has it."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from relatum.reading import Message, StreamBounds, Traffic
from relatum_consumer.lookups._requests import (
    Agree,
    AllBounds,
    Bounds,
    Breathe,
    Identify,
    LookupRequest,
    Missing,
    Partitions,
    Pause,
    Reach,
    Read,
    Select,
    Sift,
    Watch,
)

_CURRENT: ContextVar["Explanation | None"] = ContextVar("relatum_explanation", default=None)

STREAMS_MAX: Final = 100
"""Streams of an answer whose ends are asked for, to say what a scan would read."""

_KINDS: Final[Mapping[type, str]] = {
    Select: "statement",
    Read: "read",
    Sift: "scan",
    Bounds: "ends",
    AllBounds: "ends",
    Agree: "identity",
    Identify: "identity",
    Missing: "gone",
    Partitions: "partitions",
    Reach: "reach",
    Pause: "pause",
    Watch: "wait",
    Breathe: "others",
}


@dataclass(frozen=True, slots=True)
class Asked:
    """One thing that was asked of a server.

    Attributes:
        kind: "statement"; "read"; "scan" (of what is not recorded); "ends" of streams; "identity": whether streams are
            those that were recorded; "gone": which of them there are no more; "partitions" of a super stream; "reach"
            the broker; "pause", "wait", or "others" had their turn.
        about: The statement's text, or the streams.
        count: Rows of a statement, messages of a read, records that came for a scan, else streams asked about.
        bytes: Of the messages; 0 where they came over AMQP 0.9.1.
        ms: Milliseconds until the answer.
        traffic: What came over the stream protocol: how often it attached, chunks (those beyond one for each attach
            were read on), their records, and their bytes. Nothing over AMQP 0.9.1, which does not tell.
    """

    kind: str
    about: str
    count: int
    bytes: int
    ms: float
    traffic: Traffic = field(default_factory=Traffic)


class StreamCoverage(NamedTuple):
    """How much of what a stream retained was recorded for all keys asked by, in offsets, as an answer was proven."""

    retained: int
    recorded: int


@dataclass(slots=True)
class Explanation:
    """What the look-ups of an `explaining` block asked for.

    Attributes:
        asked: All of it, in order.
        streams: The streams that the last answer holds over.
        retained: How many offsets those retain: what a scan would read; of the first 100 of them.
        coverage: By stream; of those alone whose coverage was asked for: messages that were found need no proof. Of
            streams beyond the first 100, what retention took before may count as recorded: no proof asks for it.
    """

    asked: list[Asked] = field(default_factory=list)
    streams: tuple[str, ...] = ()
    retained: int = 0
    coverage: dict[str, StreamCoverage] = field(default_factory=dict)
    _from_0: set[str] = field(default_factory=set, init=False, repr=False, compare=False)

    @property
    def ms(self) -> float:
        """Milliseconds of all that was asked, together."""
        return sum(each.ms for each in self.asked)

    @property
    def messages(self) -> int:
        """Messages that were read."""
        return sum(each.count for each in self.asked if each.kind in ("read", "scan"))

    @property
    def bytes(self) -> int:
        """Their bytes."""
        return sum(each.bytes for each in self.asked)

    @property
    def traffic(self) -> Traffic:
        """What came over the stream protocol for all of it: ends and identities of streams, too."""
        total = Traffic()
        for each in self.asked:
            total.add(each.traffic)
        return total

    @property
    def scan_bytes(self) -> int:
        """Bytes that a scan would read, about: all that is retained, at the size of the records that came.

        Over AMQP 0.9.1: of the messages that were read.
        """
        came = self.traffic
        size, count = (came.bytes, came.records) if came.records else (self.bytes, self.messages)
        return self.retained * size // count if count else 0

    def note(self, request: LookupRequest, answer: Any, began: float, traffic: Traffic) -> None:
        """Note what was carried out since a moment, as of `time.perf_counter`, and what came for it."""
        ms = (time.perf_counter() - began) * 1e3
        kind, size = _KINDS[type(request)], 0
        if isinstance(request, Select):
            # Of one that has two forms, the one that says what is asked for.
            about = request.sql if isinstance(request.sql, str) else request.sql.prepared
            count = len(answer or ())
        elif isinstance(request, Read | Sift):
            found = [each for each in answer or () if isinstance(each, Message)]
            size = sum(len(each.raw) for each in found if isinstance(each.raw, bytes))
            # Of what is scanned nothing is handed on but what fits.
            about, count = ", ".join(_streams(request)), traffic.records if isinstance(request, Sift) else len(found)
        else:
            streams = _streams(request)
            about, count = ", ".join(streams), len(streams)
            if not streams and ms < 1:
                return
        self.asked.append(Asked(kind, about, count, size, ms, traffic))

    def note_ends(self, stream: str, bounds: StreamBounds) -> None:
        """Note what a stream of the answer retains."""
        self.retained += _retained(bounds)
        if (held := self.coverage.get(stream)) is not None and stream in self._from_0:
            self.coverage[stream] = StreamCoverage(*(max(0, each - (bounds.first or 0)) for each in held))
            self._from_0.remove(stream)

    def note_coverage(self, stream: str, bounds: StreamBounds, uncovered: int) -> None:
        """Note how much of what a stream retains is not recorded."""
        retained = _retained(bounds)
        self.coverage[stream] = StreamCoverage(retained, retained - uncovered)
        if bounds.first == 0:
            self._from_0.add(stream)


def _retained(bounds: StreamBounds) -> int:
    return 0 if bounds.first is None or bounds.last is None else bounds.last - bounds.first + 1


def _streams(request: LookupRequest) -> list[str]:
    """The streams that a request is about, in order."""
    match request:
        case Read():
            return sorted({where.stream for where in request.ids})
        case Sift() | Bounds():
            return [request.stream]
        case AllBounds() | Missing():
            return list(request.streams)
        case Agree():
            return sorted(request.positions)
        case Partitions():
            return [request.super_stream]
        case _:
            return []


@contextmanager
def explaining() -> Iterator[Explanation]:
    """Note what the look-ups in the block ask of servers, in this thread or task.

    with explaining() as explanation:
        relations.find("order_id", 17)
    print(explanation.messages, explanation.ms)

    It asks for the ends of the answer's streams, too, after the answer.
    """
    explanation = Explanation()
    before = _CURRENT.set(explanation)
    try:
        yield explanation
    finally:
        _CURRENT.reset(before)


def explanation_now() -> Explanation | None:
    """What the look-ups here are noted in; None where nobody asks for it."""
    return _CURRENT.get()
