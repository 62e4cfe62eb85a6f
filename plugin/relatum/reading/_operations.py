"""What readers do over one stream-protocol connection, as steps that both faces drive. No I/O.

The broker handles a connection's commands in order: a Subscribe with a few credits and an Unsubscribe written
together are answered by the Subscribe's answer, at most that many chunks, and the Unsubscribe's answer. Chunks
that did not come before the latter are not there. So every question of the kind "what lies at or after" is one
round trip without a time-out, and many may be in flight. That nothing came is no proof that nothing is there, though:
see `_leading`.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

from relatum.errors import AccessRefused, NotFound, StreamUnavailable
from relatum.headers import BROKERS_OWN, NAME_BYTES_MAX
from relatum.reading._attach import Attach, not_settled, other_nodes, places_in
from relatum.reading._batches import StreamBounds
from relatum.reading._leading import LedElsewhere
from relatum.reading._message import Message
from relatum.reading._scan import Chunks, Scan, Subscription, Watch
from relatum.reading._stream_errors import check_offset, refusal
from relatum.wire import (
    FIRST,
    LAST,
    Answer,
    Broker,
    Chunk,
    Code,
    Exchange,
    Start,
    StartSpec,
    Steps,
    StreamPlaces,
    StreamSession,
    frames,
    is_before,
    record_at,
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

RECOVERED_SINCE: Final = (4, 3)
"""Version from which a broker is known to have its bindings before it lets anybody in. 3.10.8 answers while it recovers
them: of 40 there were none for up to 0.6 s, then some for 20 to 50 ms, never the same for over 20. Versions between
were not tried."""

RECOVERING_S: Final = 0.1
"""Seconds in which a broker that recovers bindings surely recovers another one."""

BOUNDS_AT_ONCE: Final = 8
"""Streams whose ends are asked for in one write: two chunks come of each."""

BOUNDS_OF_LANE: Final = 2
"""Of so many of them the ends are asked for over one connection, where others can be had: up to two attaches each."""

PLACES_AT_ONCE: Final = 128
"""Streams of one question where they lie: 33 kB of names at most."""


def _answers_routes(version: str) -> bool:
    """Whether Route is known to do no harm there; a version that cannot be read is not known."""
    parts = version.split(".")[:2]
    return len(parts) == 2 and all(part.isdecimal() for part in parts) and tuple(map(int, parts)) >= ROUTE_SINCE


class StreamOperations:
    """The operations of one open session.

    Args:
        session: A session that is logged in. One operation at a time, except pairs started with `attach`.
    """

    def __init__(self, session: StreamSession) -> None:
        self.session = session
        self._attaches = 0
        self._settled: set[str] = set()
        """Exchanges of which all bindings are recovered."""

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

    def _answer(self, request: Callable[..., bytes], *arguments: Any) -> Steps[Answer]:
        """Ask one question, and wait for its answer; what else comes meanwhile is dropped."""
        correlation = self.session.next_correlation()
        self.session.send(request(correlation, *arguments))
        return (yield from self.session.answer_to(correlation))

    def _finish(self, pair: Attach) -> Steps[None]:
        while not pair.is_at_barrier:
            for event in (yield from Exchange()):
                pair.take(event)
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

        `any_node`: True takes this node's word though it does not lead: they are not proven then.

        Raises:
            LedElsewhere: this node does not lead the stream.
            NotSettled: it does, and has nothing to show yet: ask again.
        """
        first, last = self.attach(stream, FIRST), self._attach_at_end(stream)
        yield from self._until_barriers(first, last)
        self._check_leading(last, any_node=any_node)
        shown = self._shown(first, last, is_proven=not any_node)
        if shown is not None:
            return shown
        may_be_empty = not first.chunks
        if may_be_empty and not any_node and not is_before(self._version, STATS_SINCE):
            if (yield from self._has_no_message(stream)):
                return StreamBounds(None, None, is_proven=True)
            # A leader shows nothing until another replica has answered it, however long that takes after an election.
            may_be_empty = False
        raise not_settled(last, may_be_empty=may_be_empty)

    def ask_bounds(self, streams: Sequence[str], lasts: Collection[str]) -> dict[str, tuple[Attach | None, Attach]]:
        """Ask for the ends of a few streams, of `lasts` for the last one alone; does not wait: see `all_bounds`."""
        return {
            stream: (None if stream in lasts else self.attach(stream, FIRST), self._attach_at_end(stream))
            for stream in streams
        }

    def all_bounds(
        self, pairs: Mapping[str, tuple[Attach | None, Attach]], keep: Callable[[str, Chunk], object]
    ) -> Steps[dict[str, StreamBounds]]:
        """The first and the last offset of those of the streams that this node leads and that have messages to show.

        All in one round trip. The first is 0 where it was not asked for. `keep` is shown the chunks that came.
        """
        yield from self._until_barriers(*(attach for pair in pairs.values() for attach in pair if attach is not None))
        found: dict[str, StreamBounds] = {}
        for stream, (first, last) in pairs.items():
            # What it is that is wrong with a stream is found out by asking for that one alone.
            with suppress(NotFound, AccessRefused, StreamUnavailable):
                self._check_leading(last, any_node=False)
                shown = self._shown(last if first is None else first, last, is_proven=True)
                if shown is not None:
                    is_first_known = first is not None or shown.last is None
                    found[stream] = shown if is_first_known else StreamBounds(0, shown.last, is_proven=True)
                    for chunk in (*(first.chunks if first is not None else ()), *last.chunks):
                        keep(stream, chunk)
        return found

    def _shown(self, first: Attach, last: Attach, *, is_proven: bool) -> StreamBounds | None:
        """A stream's first and last offset, by its first and its last chunk; None where one of them did not come."""
        first.check()
        last.check()
        if not (first.chunks and last.chunks):
            return None
        end = last.chunks[-1].last_offset
        # A chunk of batches without a record has none, and may be all there is.
        return StreamBounds(*((first.chunks[0].first_offset, end) if end >= 0 else (None, None)), is_proven=is_proven)

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
        places = places_in(last.answer, last.stream)
        if not any_node and (places.code != Code.OK or places.leader != self.own_node()):
            message = f"The stream {last.stream!r} is led by another node, or by none at present."
            raise LedElsewhere(message, stream=last.stream, leader=places.leader)

    def _has_no_message(self, stream: str) -> Steps[bool]:
        """Whether the leader's log has no message at all, committed or not; from RabbitMQ 3.11 on.

        The broker keeps notes of its own in the log (offsets that readers stored, for example), and retention may
        leave nothing else. They are counted, and no reader is given them.
        """
        before = yield from self._stats(stream)
        if before.get("first_chunk_id", 0) < 0:
            return True
        if before.get("committed_chunk_id", -1) != before.get("last_chunk_id"):
            return False
        # All that is written is committed. So this attach is given the first message, if there is one, unless the
        # leader was elected anew just now, which sets the committed chunk back.
        first = self.attach(stream, FIRST)
        yield from self._finish(first)
        return not first.chunks and before == (yield from self._stats(stream))

    def _stats(self, stream: str) -> Steps[dict[str, int]]:
        """What the leader says of its log; empty where it says nothing."""
        answer = yield from self._answer(frames.stream_stats, stream)
        return frames.decode_stats(answer.body) if answer.code == Code.OK else {}

    def routes(self, exchange: str, routing_key: str) -> Steps[list[str] | None]:
        """The streams that an exchange routes a key to; None where this broker cannot be asked without harm."""
        if exchange == "":
            return (yield from self._named(routing_key))
        if exchange.startswith(BROKERS_OWN) or not _answers_routes(self._version):
            return None
        yield from self._prove_alive()
        answer = yield from self._answer(frames.route, routing_key, exchange)
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

    def partitions(self, super_stream: str, before: list[str] | None = None) -> Steps[tuple[list[str], bool]]:
        """The streams bound to an exchange, in order: a super stream's; none where there is no such exchange.

        It lists bindings and routes nothing, so exchanges of every kind may be asked about.

        Args:
            super_stream: The exchange.
            before: What it was a moment ago, where that might have been too few.

        Returns:
            The streams, and whether they may be too few: the broker may be recovering the others. Ask again then.
        """
        if not super_stream or super_stream.startswith(BROKERS_OWN):
            return [], False
        yield from self._prove_alive()
        answer = yield from self._answer(frames.partitions, super_stream)
        if answer.code == Code.STREAM_DOES_NOT_EXIST:
            return [], False
        found = self._strings(answer, super_stream)
        if found == before:
            self._settled.add(super_stream)
        may_lack = super_stream not in self._settled and is_before(self._version, RECOVERED_SINCE)
        return found, bool(found) and may_lack

    def _prove_alive(self) -> Steps[None]:
        """Exchange something harmless: a connection that is lost afterwards was lost over the question itself.

        So nobody takes it for an idle connection that had been closed, and asks once more.
        """
        yield from self._answer(frames.metadata, [])

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
        answer = yield from self._answer(frames.metadata, [stream])
        return places_in(answer.body, stream)

    def missing(self, streams: Sequence[str]) -> Steps[list[str]]:
        """Those of the streams that the broker does not know, in few round trips; it says so of other queues, too."""
        found: list[str] = []
        for start in range(0, len(streams), PLACES_AT_ONCE):
            answer = yield from self._answer(frames.metadata, list(streams[start : start + PLACES_AT_ONCE]))
            known = frames.decode_metadata(answer.body)
            found += [places.stream for places in known if places.code == Code.STREAM_DOES_NOT_EXIST]
        return found

    # --- scanning -----------------------------------------------------------------------------------------

    def chunks(self, stream: str, scan: Scan) -> Chunks:
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
        subscription = Subscription(self.session, self._next_subscription(), stream, scan)
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
