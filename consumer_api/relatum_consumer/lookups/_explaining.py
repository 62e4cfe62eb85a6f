"""What look-ups did for their answer, noted where their requests are carried out: so each look-up has it."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Final

from relatum.reading import Message, StreamBounds
from relatum_consumer.lookups._requests import Bounds, LookupRequest, Missing, Partitions, Read, Select, Sift

_CURRENT: ContextVar["Explanation | None"] = ContextVar("relatum_explanation", default=None)

STREAMS_MAX: Final = 100
"""Streams of an answer whose ends are asked for, to say what a scan would read."""


@dataclass(frozen=True, slots=True)
class Asked:
    """One thing that was asked of a server.

    Attributes:
        kind: "statement", "read", "scan" (of what is not recorded), "ends", or the name of another request.
        about: The statement's text, or the streams.
        count: Rows of a statement, messages of a read.
        bytes: Of the messages; 0 where they came over AMQP 0.9.1.
        ms: Milliseconds until the answer.
    """

    kind: str
    about: str
    count: int
    bytes: int
    ms: float


@dataclass(slots=True)
class Explanation:
    """What the look-ups of an `explaining` block asked for.

    Attributes:
        asked: All of it, in order.
        streams: The streams that the last answer holds over.
        retained: How many offsets those retain: what a scan would read; of the first 100 of them.
    """

    asked: list[Asked] = field(default_factory=list)
    streams: tuple[str, ...] = ()
    retained: int = 0

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
    def scan_bytes(self) -> int:
        """Bytes that a scan would read, about: all that is retained, at the size of the messages that were read."""
        return self.retained * self.bytes // self.messages if self.messages else 0

    def note(self, request: LookupRequest, answer: Any, began: float) -> None:
        """Note what was carried out since a moment, as of `time.perf_counter`."""
        ms = (time.perf_counter() - began) * 1e3
        if isinstance(request, Select):
            self.asked.append(Asked("statement", str(request.sql), len(answer or ()), 0, ms))
        elif isinstance(request, Read | Sift):
            found = [each for each in answer or () if isinstance(each, Message)]
            size = sum(len(each.raw) for each in found if isinstance(each.raw, bytes))
            streams = {where.stream for where in request.ids} if isinstance(request, Read) else {request.stream}
            kind = "read" if isinstance(request, Read) else "scan"
            self.asked.append(Asked(kind, ", ".join(sorted(streams)), len(found), size, ms))
        elif isinstance(request, Bounds | Missing | Partitions):
            about = {Bounds: "stream", Missing: "streams", Partitions: "super_stream"}[type(request)]
            streams_meant = getattr(request, about)
            text = streams_meant if isinstance(streams_meant, str) else ", ".join(streams_meant)
            self.asked.append(Asked("ends" if isinstance(request, Bounds) else about, text, 0, 0, ms))
        elif ms >= 1:
            self.asked.append(Asked(type(request).__name__.lower(), "", 0, 0, ms))

    def note_ends(self, bounds: StreamBounds) -> None:
        """Note what a stream of the answer retains."""
        if bounds.first is not None and bounds.last is not None:
            self.retained += bounds.last - bounds.first + 1


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
