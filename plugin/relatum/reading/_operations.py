"""What readers do over one stream-protocol connection, as steps that both faces drive. No I/O.

The broker handles a connection's commands in order: a Subscribe with a few credits and an Unsubscribe written
together are answered by the Subscribe's answer, at most that many chunks, and the Unsubscribe's answer. Chunks
that did not come before the latter are not there. So every question of the kind "what lies at or after" is one
round trip without a time-out, and many may be in flight. That nothing came is no proof that nothing is there, though:
see `_leading`.
"""

from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import index
from typing import Any, Final, TypeAlias

from relatum.checks import shown
from relatum.errors import (
    AccessRefused,
    BrokerUnavailable,
    InvalidInput,
    NotFound,
    OffsetExpired,
    OffsetNotFound,
    ProtocolError,
    RelatumError,
    StreamNotFound,
    StreamNotHere,
    StreamUnavailable,
)
from relatum.headers import BROKERS_OWN, NAME_BYTES_MAX
from relatum.limits import INTEGER_MAX
from relatum.reading._batches import RecordBatch, StreamBounds
from relatum.reading._leading import LedElsewhere, NotSettled
from relatum.reading._message import Message
from relatum.reading._start import Beginning
from relatum.steps import Request
from relatum.wire import (
    FIRST,
    LAST,
    NEXT,
    Answer,
    Broker,
    Chunk,
    Code,
    CreditRefused,
    Event,
    Exchange,
    Start,
    StartSpec,
    Steps,
    StreamMoved,
    StreamPlaces,
    StreamSession,
    code_name,
    frames,
    is_before,
    record_at,
    split,
)

ATTACHES_MAX: Final = 500
"""Attaches after which a connection to a broker that leaks is replaced; a new one takes as long as a few."""

CLOSES_SINCE: Final = (3, 12)
"""Version from which Unsubscribe surely closes the file it read. RabbitMQ 3.10.8 keeps one open for each attach until
the connection ends, up to the node's limit, and then the node fails. Source: rabbitmq-server issue 6317, mended in
patch releases of 3.10 and 3.11 that came after November 2022; those are taken for leaking, too, which costs little."""

STATS_SINCE: Final = (3, 11)
"""Version from which StreamStats is answered."""

ROUTE_SINCE: Final = (4, 3)
"""Version from which Route is known to be safe. In 3.10.8 the one process that serves all stream connections of a node
evaluates it, with a message that has no content: any exchange that looks into messages (headers, hash by header, recent
history, JMS topic) crashes it, reached directly, as alternate exchange or through a binding between exchanges. 4.3.6
evaluates it in the process of the connection, with an empty message. Versions between were not tried."""

PLACES_AT_ONCE: Final = 128
"""Streams of one question where they lie: 33 kB of names at most."""

SHORT_SCAN_CREDIT: Final = 2
"""Chunks a scan with a stop is granted at first."""


@dataclass(frozen=True, slots=True)
class Watch(Request[list[Event] | None]):
    """As `Exchange`; answered with None where nothing came for as long as the caller wants to wait."""


Chunks: TypeAlias = Generator[Watch | Chunk | None, Any, None]
"""Gives chunks, and None where nothing came."""


class Attach:
    """One subscription for a few chunks, and what it brought.

    After a Subscribe, or a Credit, the answer to the next command is a barrier: all chunks that were granted and are
    there have come by then. The Unsubscribe of a pair is such a command; a subscription that may go on has an empty
    Metadata there, which costs the broker nothing.
    """

    __slots__ = (
        "answer",
        "barrier",
        "chunks",
        "chunks_seen",
        "code",
        "granted",
        "is_at_barrier",
        "is_done",
        "reached",
        "stream",
        "subscribed",
        "subscription",
    )

    def __init__(self, stream: str, subscription: int, subscribed: int, barrier: int, granted: int) -> None:
        self.stream = stream
        self.subscription = subscription
        self.subscribed = subscribed
        self.barrier = barrier
        self.granted = granted
        self.chunks: list[Chunk] = []
        self.code: int = Code.OK
        self.answer = b""
        self.reached: int | None = None
        self.chunks_seen = 0
        self.is_at_barrier = self.is_done = False

    def take(self, event: Event) -> None:
        """Take one event, of this pair or not."""
        if type(event) is Chunk:
            if event.subscription == self.subscription:
                self.chunks.append(event)
        elif type(event) is Answer:
            if event.correlation == self.subscribed:
                self.code = event.code
            elif event.correlation == self.barrier:
                self.is_at_barrier, self.answer = True, event.body
        elif type(event) is StreamMoved and event.stream == self.stream:
            raise StreamUnavailable(f"The stream {self.stream!r} moved or was deleted.", stream=self.stream)

    def check(self) -> None:
        """Raise what the answer to Subscribe amounts to."""
        if self.code != Code.OK:
            raise refusal(self.stream, self.code)


def _answers_routes(version: str) -> bool:
    """Whether Route is known to do no harm there; a version that cannot be read is not known."""
    parts = version.split(".")[:2]
    return len(parts) == 2 and all(part.isdecimal() for part in parts) and tuple(map(int, parts)) >= ROUTE_SINCE


def other_nodes(places: StreamPlaces, own: Broker) -> list[Broker]:
    """The nodes with a replica of a stream, other than one: replicas first, they have less to do than leaders."""
    if places.code != Code.OK:
        return []
    leader = (places.leader,) if places.leader is not None else ()
    return [node for node in dict.fromkeys((*places.replicas, *leader)) if node != own]


def refusal(stream: str, code: int) -> RelatumError:
    """The error for a stream a command was refused for."""
    if code == Code.STREAM_DOES_NOT_EXIST:
        return StreamNotFound(f"There is no stream {stream!r}.", stream=stream)
    if code == Code.ACCESS_REFUSED:
        return AccessRefused(f"The broker refuses this user to read the stream {stream!r}.", stream=stream)
    if code == Code.STREAM_NOT_AVAILABLE:
        message = f"The stream {stream!r} has no replica on this node, or none that answers."
        return StreamNotHere(message, stream=stream)
    return BrokerUnavailable(f"Reading the stream {stream!r} failed: {code_name(code)}.", stream=stream)


class StreamOperations:
    """The operations of one open session.

    Args:
        session: A session that is logged in. One operation at a time, except pairs started with `attach`.
    """

    def __init__(self, session: StreamSession) -> None:
        self.session = session
        self._attaches = 0

    @property
    def is_worn(self) -> bool:
        """True where the connection should be replaced: the broker holds too many files open for it."""
        return self._attaches >= ATTACHES_MAX and is_before(self._version, CLOSES_SINCE)

    @property
    def _version(self) -> str:
        return self.session.server_properties.get("version", "")

    def _next_subscription(self) -> int:
        self._attaches += 1
        return self.session.take_subscription()

    def attach(self, stream: str, start: StartSpec, chunks: int = 1) -> Attach:
        """Ask for at most that many chunks from a start on, and end there; does not wait."""
        pair = self._subscribe(stream, start, chunks)
        self.session.unsubscribe(pair.subscription, pair.barrier)
        pair.is_done = True
        return pair

    def attach_to_go_on(self, stream: str, start: StartSpec, chunks: int) -> Attach:
        """As `attach`, but the subscription stays at its barrier until `go_on` or `end`."""
        # RabbitMQ 4 sends for a Credit only when half of the first credit is there again: so the first is the least,
        # else the chunks would not come before the barrier.
        attach = self._subscribe(stream, start, 1)
        if chunks > 1:
            self.go_on(attach, chunks - 1)
        else:
            self.session.send(frames.metadata(attach.barrier, []))
        return attach

    def _subscribe(self, stream: str, start: StartSpec, chunks: int) -> Attach:
        session, subscription = self.session, self._next_subscription()
        attach = Attach(stream, subscription, session.next_correlation(), session.next_correlation(), chunks)
        session.send(frames.subscribe(attach.subscribed, subscription, stream, start, chunks))
        return attach

    def go_on(self, attach: Attach, chunks: int) -> None:
        """Ask for so many chunks more; does not wait."""
        attach.barrier = self.session.next_correlation()
        attach.granted += chunks
        attach.is_at_barrier = False
        self.session.send(frames.credit(attach.subscription, chunks) + frames.metadata(attach.barrier, []))

    def end(self, attach: Attach) -> None:
        """Ask for no more; does not wait: what comes of it is for a number nobody has any more."""
        if not attach.is_done:
            attach.is_done = True
            self.session.unsubscribe(attach.subscription)

    def _until_barriers(self, *pairs: Attach) -> Steps[None]:
        while not all(pair.is_at_barrier for pair in pairs):
            for event in (yield from Exchange()):
                for pair in pairs:
                    pair.take(event)

    def _finish(self, pair: Attach) -> Steps[None]:
        yield from self._until_barriers(pair)
        pair.check()

    # --- single questions ---------------------------------------------------------------------------------

    def find(self, stream: str, offset: int) -> Steps[Message | None]:
        """The message at an offset, in one round trip; None where this node has none there."""
        check_offset(stream, offset)
        pair = self.attach(stream, StartSpec(Start.OFFSET, offset))
        yield from self._finish(pair)
        for chunk in pair.chunks:
            record = record_at(chunk, offset)
            if record is not None:
                return Message.from_record(stream, offset, record, chunk.time_ms)
        return None

    def bounds(self, stream: str, *, any_node: bool = False) -> Steps[StreamBounds]:
        """The first and the last offset, in one round trip where this node leads.

        Args:
            stream: The stream's name.
            any_node: True takes this node's word though it does not lead: they are not proven then.

        Raises:
            LedElsewhere: this node does not lead the stream.
            NotSettled: it does, and has nothing to show yet: ask again.
        """
        first, last = self.attach(stream, FIRST), self._attach_at_end(stream)
        yield from self._until_barriers(first, last)
        self._check_leading(last, any_node=any_node)
        first.check()
        last.check()
        if first.chunks and last.chunks:
            offsets = first.chunks[0].first_offset, last.chunks[-1].last_offset
            return StreamBounds(*offsets, is_proven=not any_node)
        if not first.chunks and not any_node and (yield from self._has_nothing_written(stream)):
            return StreamBounds(None, None, is_proven=True)
        raise _not_settled(last, may_be_empty=not first.chunks)

    def _attach_at_end(self, stream: str) -> Attach:
        """Ask for the last chunk, and who leads the stream; does not wait."""
        last = self._subscribe(stream, LAST, 1)
        self.end(last)
        self.session.send(frames.metadata(last.barrier, [stream]))
        return last

    def _check_leading(self, last: Attach, *, any_node: bool) -> None:
        """See that this node leads the stream, by what came of `_attach_at_end`.

        Raises:
            LedElsewhere: it does not.
        """
        if last.code not in (Code.OK, Code.STREAM_NOT_AVAILABLE):
            last.check()
        places = _places_in(last.answer, last.stream)
        if not any_node and (places.code != Code.OK or places.leader != self.own_node()):
            message = f"The stream {last.stream!r} is led by another node, or by none at present."
            raise LedElsewhere(message, stream=last.stream, leader=places.leader)

    def _has_nothing_written(self, stream: str) -> Steps[bool]:
        """Whether the leader's log has no message at all, committed or not; False where it cannot be asked."""
        if is_before(self._version, STATS_SINCE):
            return False
        correlation = self.session.next_correlation()
        self.session.send(frames.stream_stats(correlation, stream))
        answer = yield from self.session.answer_to(correlation)
        if answer.code != Code.OK:
            return False
        return frames.decode_stats(answer.body).get("first_chunk_id", 0) < 0

    def routes(self, exchange: str, routing_key: str) -> Steps[list[str] | None]:
        """The streams that an exchange routes a key to; None where this broker cannot be asked without harm."""
        if exchange == "":
            return (yield from self._named(routing_key))
        if exchange.startswith(BROKERS_OWN) or not _answers_routes(self.session.server_properties.get("version", "")):
            return None
        yield from self._prove_alive()
        correlation = self.session.next_correlation()
        self.session.send(frames.route(correlation, routing_key, exchange))
        answer = yield from self.session.answer_to(correlation)
        if answer.code == Code.STREAM_DOES_NOT_EXIST:
            raise NotFound(f"There is no exchange {exchange!r}.")
        return self._strings(answer, exchange)

    def _named(self, name: str) -> Steps[list[str]]:
        """The stream of that name, if it is one: all that the default exchange can lead to.

        Never by Route: RabbitMQ 3.10 delivers an empty message where the key is an address of direct reply-to.
        """
        if name.startswith(BROKERS_OWN) or not 1 <= len(name.encode(errors="replace")) <= NAME_BYTES_MAX:
            return []
        places = yield from self.places(name)
        return [] if places.code == Code.STREAM_DOES_NOT_EXIST else [name]

    def partitions(self, super_stream: str) -> Steps[list[str]]:
        """The streams bound to an exchange, in order: a super stream's; none where there is no such exchange.

        It lists bindings and routes nothing, so exchanges of every kind may be asked about.
        """
        if not super_stream or super_stream.startswith(BROKERS_OWN):
            return []
        yield from self._prove_alive()
        correlation = self.session.next_correlation()
        self.session.send(frames.partitions(correlation, super_stream))
        answer = yield from self.session.answer_to(correlation)
        if answer.code == Code.STREAM_DOES_NOT_EXIST:
            return []
        return self._strings(answer, super_stream)

    def _prove_alive(self) -> Steps[None]:
        """Exchange something harmless: a connection that is lost afterwards was lost over the question itself.

        So nobody takes it for an idle connection that had been closed, and asks once more.
        """
        correlation = self.session.next_correlation()
        self.session.send(frames.metadata(correlation, []))
        yield from self.session.answer_to(correlation)

    def _strings(self, answer: Answer, name: str) -> list[str]:
        if answer.code != Code.OK:
            raise refusal(name, answer.code)
        return frames.decode_strings(answer.body)

    def own_node(self) -> Broker:
        """The node this connection leads to, as it advertises itself."""
        properties = self.session.connection_properties
        port = properties.get("advertised_port", "")
        return Broker(properties.get("advertised_host", ""), int(port) if port.isdecimal() else 0)

    def other_nodes(self, stream: str) -> Steps[list[Broker]]:
        """Where else a stream lies."""
        return other_nodes((yield from self.places(stream)), self.own_node())

    def places(self, stream: str) -> Steps[StreamPlaces]:
        """On which nodes a stream lies."""
        correlation = self.session.next_correlation()
        self.session.send(frames.metadata(correlation, [stream]))
        answer = yield from self.session.answer_to(correlation)
        return _places_in(answer.body, stream)

    def missing(self, streams: Sequence[str]) -> Steps[list[str]]:
        """Those of the streams that the broker does not know, in few round trips; it says so of other queues, too."""
        found: list[str] = []
        for start in range(0, len(streams), PLACES_AT_ONCE):
            correlation = self.session.next_correlation()
            self.session.send(frames.metadata(correlation, list(streams[start : start + PLACES_AT_ONCE])))
            answer = yield from self.session.answer_to(correlation)
            known = frames.decode_metadata(answer.body)
            found += [places.stream for places in known if places.code == Code.STREAM_DOES_NOT_EXIST]
        return found

    # --- scanning -----------------------------------------------------------------------------------------

    def chunks(self, stream: str, scan: "Scan") -> Chunks:
        """The chunks of a scan; a chunk is granted anew after it was handled.

        Raises:
            StreamNotFound, AccessRefused: The broker refuses the subscription.
            StreamUnavailable: The stream moved or was deleted.
            LedElsewhere, NotSettled: Before the first chunk, without `follow`: where it ends cannot be said here, or
                not yet.
        """
        end = scan.stop - 1 if scan.follow and scan.stop is not None else None
        if end is not None and end < scan.begin.offset:
            return
        # Asked first, so that the end is known before the first chunk comes; both go out in one write.
        tail = None if scan.follow else self._attach_at_end(stream)
        subscription = _Subscription(self.session, self._next_subscription(), stream, scan)
        try:
            while True:
                events = yield from Watch()
                if events is None:
                    yield None
                    continue
                for event in events:
                    if tail is not None:
                        tail.take(event)
                        if tail.is_at_barrier:
                            self._check_leading(tail, any_node=scan.any_node)
                            end, tail = scan.end(tail), None
                            if end is None:
                                return
                    chunk = subscription.take(event)
                    if chunk is not None:
                        if scan.wants(chunk):
                            yield chunk
                        if end is not None and chunk.last_offset >= end:
                            return
                        subscription.handled()
        finally:
            subscription.close()


@dataclass(frozen=True, slots=True)
class Scan:
    """What a scan reads.

    Attributes:
        begin: Where it begins.
        stop: The offset it ends before; None for none.
        follow: True goes on with what is published later; False ends at what is there.
        credit: Chunks the broker may send ahead of those handled.
        any_node: True ends, without `follow`, where a node ends that does not lead the stream.
    """

    begin: Beginning
    stop: int | None
    follow: bool
    credit: int
    any_node: bool = False

    def end(self, tail: Attach) -> int | None:
        """The last offset to read, given the last chunk; None where nothing is to be read."""
        tail.check()
        if self.begin.spec == NEXT:
            return None
        if not tail.chunks:
            raise _not_settled(tail, may_be_empty=True)
        chunk = tail.chunks[-1]
        end = chunk.last_offset if self.stop is None else min(chunk.last_offset, self.stop - 1)
        is_past = end < self.begin.offset or not self.wants(chunk)
        return None if is_past else end

    def wants(self, chunk: Chunk) -> bool:
        """True where a chunk is not before the beginning."""
        begin = self.begin
        return chunk.last_offset >= begin.offset and (begin.time_ms is None or chunk.time_ms >= begin.time_ms)


class _Subscription:
    """A subscription that lasts, and its credit."""

    def __init__(self, session: StreamSession, number: int, stream: str, scan: Scan) -> None:
        self._session = session
        self._number = number
        self._stream = stream
        self._correlation = session.next_correlation()
        self._credit_max = scan.credit
        # A scan with a stop is mostly short: what is sent beyond it is wasted, so its credit grows on the way.
        self._credit = scan.credit if scan.stop is None else min(SHORT_SCAN_CREDIT, scan.credit)
        self._outstanding = self._credit
        session.send(frames.subscribe(self._correlation, number, stream, scan.begin.spec, self._credit))

    def take(self, event: Event) -> Chunk | None:
        """The chunk in an event, if it is one of this subscription's."""
        if type(event) is Chunk:
            return event if event.subscription == self._number else None
        stream = self._stream
        if type(event) is Answer:
            if event.correlation == self._correlation and event.code != Code.OK:
                raise refusal(stream, event.code)
        elif type(event) is StreamMoved:
            if event.stream == stream:
                raise StreamUnavailable(f"The stream {stream!r} moved or was deleted.", stream=stream)
        elif type(event) is CreditRefused and event.subscription == self._number:
            raise StreamUnavailable(f"The broker dropped the subscription to {stream!r}.", stream=stream)
        return None

    def handled(self) -> None:
        """Grant anew what was handled, several chunks together: a frame for each would cost a system call each."""
        self._outstanding -= 1
        if self._outstanding * 2 <= self._credit:
            self._credit = min(self._credit_max, self._credit * 2)
            self._session.send(frames.credit(self._number, self._credit - self._outstanding))
            self._outstanding = self._credit

    def close(self) -> None:
        """End it. What is still under way is for a number nobody has any more: it is dropped as it comes."""
        self._session.unsubscribe(self._number)


def check_integers(offsets: Iterable[int]) -> None:
    """Raise for an offset that is no integer; what counts as one in Python (a number of numpy) is taken.

    Raises:
        InvalidInput: One is none.
    """
    for offset in offsets:
        try:
            is_integer = index(offset) is not None and not isinstance(offset, bool)
        except TypeError:
            is_integer = False
        if not is_integer:
            raise InvalidInput(f"An offset is an integer, not {shown(offset)}.")


def check_offset(stream: str, offset: int) -> None:
    """Raise for a number that no message can lie at.

    Raises:
        InvalidInput: It is no integer.
        OffsetNotFound: It is none of 0 to 2^63 - 1.
    """
    if type(offset) is not int:
        check_integers((offset,))
    if not 0 <= offset <= INTEGER_MAX:
        raise OffsetNotFound(f"{offset} is no offset.", stream=stream, offset=offset, last=None, is_proven=True)


def _not_settled(last: Attach, *, may_be_empty: bool) -> NotSettled:
    message = f"The stream {last.stream!r} is starting, or what it has is not committed yet."
    places = _places_in(last.answer, last.stream)
    is_alone = not set(places.replicas) - {places.leader}
    return NotSettled(message, stream=last.stream, may_be_empty=may_be_empty, is_alone=is_alone)


def _places_in(body: bytes, stream: str) -> StreamPlaces:
    for places in frames.decode_metadata(body):
        if places.stream == stream:
            return places
    raise ProtocolError(f"The broker did not answer for the stream {stream!r}.")


def not_there(stream: str, offset: int, bounds: StreamBounds) -> OffsetNotFound:
    """The error for an offset without a message: expired, past the end, or one the broker used itself."""
    first, last = bounds
    proven = bounds.is_proven
    if first is not None and offset < first:
        message = f"Offset {offset} of {stream!r} has expired: the stream now begins at {first}."
        return OffsetExpired(message, stream=stream, offset=offset, first=first, last=last, is_proven=proven)
    where = "is empty" if last is None else f"ends at {last}" if offset > last else "has none there"
    message = f"There is no message at offset {offset}: the stream {stream!r} {where}."
    return OffsetNotFound(message, stream=stream, offset=offset, last=last, is_proven=proven)


def is_inside(offset: int, bounds: StreamBounds) -> bool:
    """Whether an offset lies between a stream's ends."""
    return bounds.first is not None and bounds.last is not None and bounds.first <= offset <= bounds.last


def proven_not_there(stream: str, offset: int, bounds: StreamBounds) -> OffsetNotFound | StreamUnavailable:
    """As `not_there`, after the leader was asked; where it could not be, a node that lags is no proof of an end."""
    error = not_there(stream, offset, bounds)
    if bounds.is_proven or isinstance(error, OffsetExpired):
        return error
    message = f"This node has no message at offset {offset} of {stream!r}, and the leader cannot be asked from here."
    return StreamUnavailable(message, stream=stream)


def batches_of(stream: str, chunk: Chunk, scan: Scan) -> Iterator[RecordBatch]:
    """A chunk's records within the scan, in one batch unless unpacking makes it large."""
    begin = scan.begin.offset
    for first, records in split(chunk):
        end = first + len(records)
        if scan.stop is not None and end > scan.stop:
            records, end = records[: max(0, scan.stop - first)], scan.stop
        if first < begin:
            records, first = records[begin - first :], begin
        if records:
            yield RecordBatch(stream, first, range(first, end), records, chunk.time_ms, chunk.epoch)
