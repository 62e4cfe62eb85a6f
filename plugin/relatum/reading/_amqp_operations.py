"""What readers do over AMQP 0.9.1, as steps that both faces drive. No I/O.

A consumer is ended by closing its channel: RabbitMQ up to 3.12 closes the whole connection on a nack or reject of a
stream's message, and client libraries send those by themselves on `basic.cancel`. Those versions also deliver the
whole chunk whatever the prefetch. There is no mark of the stream's end: it is where nothing comes for `QUIET_S`.
"""

import time
from collections.abc import Generator
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, TypeAlias, TypeVar

from relatum.checks import seconds_text
from relatum.errors import (
    AccessRefused,
    BrokerUnavailable,
    NotAStream,
    NotFound,
    ReadTimeout,
    RelatumError,
    StreamNotFound,
    StreamUnavailable,
)
from relatum.reading._batches import RecordBatch, StreamBounds
from relatum.reading._message import Message
from relatum.reading._scan import Scan
from relatum.reading._stream_errors import check_offset, not_there
from relatum.reading._window import Result, Window
from relatum.steps import Request
from relatum.waiting import Patience

QUIET_S: Final = 0.5
"""Seconds without a delivery that mean the end of a stream. A local broker delivers within milliseconds."""

SECOND_LOOK_S: Final = 1.0
"""Seconds without a delivery, on a second look, that mean an empty stream; it is no proof."""

LAST_S: Final = 2.0
"""Seconds of reading from the last chunk on after which a stream that never falls quiet is past the end it had when
asked: a chunk has a few thousand messages, which take a fraction of that."""

PREFETCH: Final = 256
"""Messages delivered ahead while scanning."""

GAP_MAX: Final = 100
"""The widest gap that is read across: attaching takes 4 ms, a message 20 to 40 us, both measured with pika."""

NO_QUEUE: Final = "no queue"
"""In the text of a 404: the broker knows the name of no queue."""

EXCLUSIVE: Final = "exclusive"
"""In the text of a 405: another connection's own queue, which no stream can be."""

BATCH_MESSAGES: Final = 256
"""Messages of one batch at most."""


@dataclass(frozen=True, slots=True)
class Delivery:
    """A delivered message."""

    offset: int
    properties: Any
    body: bytes


@dataclass(frozen=True, slots=True)
class Consume(Request[None]):
    """Open a channel and consume from a start with a prefetch; what was open is closed first."""

    stream: str
    argument: int | str | datetime
    prefetch: int


@dataclass(frozen=True, slots=True)
class Next(Request[list[Delivery]]):
    """Wait so long for deliveries; answered with those that came, none after that time.

    They are acknowledged when the next ones are asked for, with which the broker sends more.
    """

    timeout_s: float


@dataclass(frozen=True, slots=True)
class Count(Request[int]):
    """Ask how many messages a stream has, by `queue.declare` passive; up to 5 s old."""

    stream: str


Command = Consume | Next | Count
Answer = list[Delivery] | int | None

_Answer = TypeVar("_Answer")
_Steps: TypeAlias = Generator[Command, Any, _Answer]
_Giving: TypeAlias = Generator[Command | _Answer, Any, None]


def refused(stream: str, code: int, text: str) -> RelatumError:
    """The error for a channel that the broker closed.

    Only "no queue" says that there is none: a node that starts, or whose cluster does, answers 404 of streams that are
    there, too ("home node ... is down or inaccessible"). Texts seen with RabbitMQ 3.10.8 and 4.3.6.
    """
    if code == 404 and NO_QUEUE in text:
        return StreamNotFound(f"There is no stream {stream!r}.", stream=stream)
    if code == 404:
        message = f"The stream {stream!r} is starting, or the node that has it is away."
        return StreamUnavailable(message, stream=stream)
    if code == 403:
        return AccessRefused(f"The broker refuses this user to read the stream {stream!r}.", stream=stream)
    if (code == 406 and "x-stream-offset" in text) or (code == 405 and EXCLUSIVE in text):
        return not_a_stream(stream)
    if code in (406, 405):
        message = f"The stream {stream!r} has no running replica on this node."
        return StreamUnavailable(message, stream=stream)
    return BrokerUnavailable(f"The broker ended reading {stream!r} with {code}.", stream=stream)


def not_a_stream(name: str) -> NotAStream:
    """The error for a queue of another kind."""
    return NotAStream(f"{name!r} is a queue, not a stream.", stream=name)


class AmqpOperations:
    """The operations.

    Args:
        timeout_s: Seconds until a wait for what must come ends as `ReadTimeout`.
    """

    _timeout_s = Patience("_limit_s")

    def __init__(self, timeout_s: float) -> None:
        self._limit_s = timeout_s

    def read(self, stream: str, offset: int) -> _Steps[Message]:
        """The message at an offset."""
        check_offset(stream, offset)
        found = yield from self._at_or_after(stream, offset)
        if found is not None and found.offset == offset:
            return _message(stream, found)
        raise not_there(stream, offset, (yield from self.bounds(stream)))

    def _at_or_after(self, stream: str, offset: int) -> _Steps[Delivery | None]:
        """The first message from an offset on; None where the stream ends before it."""
        yield from Consume(stream, offset, 1)
        deliveries = yield from Next(QUIET_S)
        if not deliveries:
            last = yield from self._last(stream)
            if last is None or last < offset:
                return None
            yield from Consume(stream, offset, 1)
            deliveries = yield from self._must_come(stream)
        return deliveries[0]

    def _must_come(self, stream: str) -> _Steps[list[Delivery]]:
        deliveries = yield from Next(self._timeout_s)
        if not deliveries:
            raise ReadTimeout(f"The stream {stream!r} gave nothing for {seconds_text(self._timeout_s)}.")
        return deliveries

    def probe(self, name: str) -> _Steps[None]:
        """Return where there is a stream of that name, else raise what there is: the queue itself is asked."""
        yield from Consume(name, "next", 1)

    def bounds(self, stream: str) -> _Steps[StreamBounds]:
        """The first and the last offset."""
        deliveries = yield from self._look(stream, "first", 1)
        if not deliveries:
            return StreamBounds(None, None)
        first = deliveries[0].offset
        # There is a last one, then: a broker that does not show it is busy, and is asked for as long as others are.
        limit = time.monotonic() + self._timeout_s
        while (last := (yield from self._last(stream))) is None:
            if time.monotonic() >= limit:
                raise StreamUnavailable(f"The stream {stream!r} does not show its end yet.", stream=stream)
        return StreamBounds(first, last)

    def _look(self, stream: str, argument: str, prefetch: int) -> _Steps[list[Delivery]]:
        """What comes first from the first or the last chunk on; nothing for an empty stream, as far as can be seen."""
        yield from Consume(stream, argument, prefetch)
        deliveries = yield from Next(QUIET_S)
        if deliveries:
            return deliveries
        # A broker that is busy, or a chunk that is not committed yet, is no end: whoever looks for something up to the
        # end must not miss it. The count says 0 for a while after a node's start, too, so a second look is longer.
        count = yield from Count(stream)
        yield from Consume(stream, argument, prefetch)
        deliveries = yield from Next(self._timeout_s if count else SECOND_LOOK_S)
        if count and not deliveries:
            raise ReadTimeout(
                f"The stream {stream!r} showed nothing for {seconds_text(self._timeout_s)}, though RabbitMQ counts "
                f"{count} in it. Either a new leader is slow, or retention dropped every message and what is counted "
                "are RabbitMQ's own records: then the next message ends it, and reading by the stream protocol tells "
                "at once."
            )
        return deliveries

    def _last(self, stream: str) -> _Steps[int | None]:
        """The last offset: from the last chunk on, until nothing comes, or long enough. None for an empty stream."""
        deliveries = yield from self._look(stream, "last", PREFETCH)
        last: int | None = None
        enough = time.monotonic() + LAST_S
        while deliveries:
            last = deliveries[-1].offset
            if time.monotonic() > enough:
                break
            deliveries = yield from Next(QUIET_S)
        return last

    def scan(self, stream: str, scan: Scan, idle_s: float) -> _Giving[RecordBatch | None]:
        """Batches of a scan; None when nothing came for `idle_s`."""
        begin, end = scan.begin, None if scan.stop is None else scan.stop - 1
        if not scan.follow:
            last = None if begin.argument == "next" else (yield from self._last(stream))
            if last is None:
                # "next" has nothing to give either, but a stream that is missing must show.
                yield from Count(stream)
                return
            end = last if end is None else min(end, last)
        if end is not None and end < begin.offset:
            return
        waited_for = QUIET_S if isinstance(begin.argument, datetime) and not scan.follow else idle_s
        yield from Consume(stream, begin.argument, PREFETCH)
        while True:
            deliveries = yield from Next(waited_for)
            wanted = [each for each in deliveries if end is None or each.offset <= end]
            if wanted:
                messages = [_message(stream, each) for each in wanted]
                offsets = [each.offset for each in wanted]
                yield RecordBatch(stream, offsets[0], offsets, (), messages=messages)
            if end is not None and deliveries and deliveries[-1].offset >= end:
                return
            if not deliveries:
                if waited_for != idle_s:
                    return
                yield None
            waited_for = idle_s

    def read_many(self, window: Window) -> _Giving[Result]:
        """The results of a window, in the order asked for."""
        while wanted := window.open():
            for stream, offsets in window.valid(wanted).items():
                try:
                    yield from self._runs(stream, offsets, window)
                except (NotFound, AccessRefused) as error:
                    for offset in offsets:
                        window.put(stream, offset, error)
            yield from window.ready()
            window.close()

    def _runs(self, stream: str, offsets: list[int], window: Window) -> _Giving[Result]:
        bounds: StreamBounds | None = None
        at = 0
        while at < len(offsets) and not window.is_full:
            end = at + 1
            while end < len(offsets) and offsets[end] - offsets[end - 1] <= GAP_MAX:
                end += 1
            run = offsets[at:end]
            at = end
            missing = yield from self._run(stream, run, window)
            yield from window.ready()
            if missing and not window.is_full:
                bounds = bounds or (yield from self.bounds(stream))
                for offset in missing:
                    window.put(stream, offset, not_there(stream, offset, bounds))

    def _run(self, stream: str, run: list[int], window: Window) -> _Steps[list[int]]:
        """Read neighbouring offsets; those without a message."""
        wanted = set(run)
        first = yield from self._at_or_after(stream, run[0])
        deliveries = [first] if first is not None else []
        if len(run) > 1 and first is not None:
            yield from Consume(stream, run[0], min(PREFETCH, run[-1] - run[0] + 1))
        while deliveries and not window.is_full:
            for each in deliveries:
                if each.offset in wanted:
                    wanted.discard(each.offset)
                    window.put_message(_message(stream, each))
            if deliveries[-1].offset >= run[-1] or not wanted:
                break
            deliveries = yield from Next(QUIET_S)
        return sorted(wanted)


def _message(stream: str, delivery: Delivery) -> Message:
    return Message.from_amqp(stream, delivery.offset, delivery.properties, delivery.body)


def offset_of(headers: dict[str, Any] | None) -> int | None:
    """The offset in a delivery's headers; None where there is none."""
    offset = (headers or {}).get("x-stream-offset")
    return int(offset) if isinstance(offset, int) else None
