"""The blocking reader."""

import contextlib
from collections.abc import Callable, Collection, Generator, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Final, Self, TypeVar

from relatum import metrics
from relatum.checks import checked_count, checked_name, checked_names, checked_seconds, checked_text, seconds_text
from relatum.closing import Closing
from relatum.errors import (
    AccessRefused,
    NotFound,
    OffsetExpired,
    ReadTimeout,
    StreamNotFound,
    StreamNotHere,
    StreamUnavailable,
)
from relatum.ids import IDENTITY_STREAM, BrokerIdentity, broker_id_of
from relatum.reading import _exchanges
from relatum.reading._address import AnyBroker, BrokerAddress
from relatum.reading._attach import Attach, until
from relatum.reading._bounds import StreamBounds, check_offset, not_there
from relatum.reading._connecting import HEARTBEAT_S
from relatum.reading._connection import SocketConnection
from relatum.reading._leaders import Leaders
from relatum.reading._many import KeptChunks, ManyReader
from relatum.reading._message import Message
from relatum.reading._nodes import Node, Nodes, missing
from relatum.reading._plan import WINDOW_MAX, WINDOW_MESSAGES, Result, Window
from relatum.reading._pool import CONNECTIONS_MAX, ReaderStatistics, Turns, Use, check_limit
from relatum.reading._scan import CREDIT, RecordBatch, Scan, Start, batches_of
from relatum.waiting import current, has_passed
from relatum.wire import (
    StartSpec,
    frames,
    record_at,
)

IDLE_S: Final = 60.0
"""Seconds after which a reader that waits for ever looks up; nothing depends on it."""

_Item = TypeVar("_Item")
_Taken = TypeVar("_Taken")


class StreamReader(Closing):
    """Reads streams, blocking. A context manager; threads may share one.

    Every method may raise `StreamNotFound`, `NotAStream`, `AccessRefused`, and, safe to repeat, `StreamUnavailable`,
    `ConnectionLost`, `BrokerUnavailable`, `ReadTimeout` (no answer within `timeout_s`) and `ConnectionsInUse` (all
    `broker_connections_max` were in use all that time).
    """

    def __init__(self, nodes: Nodes) -> None:
        self._nodes = nodes
        self._leaders = Leaders(nodes)
        self.turns_before: Turns | None = None
        """Turns that an asyncio reader has its calls wait for, before they come here."""

    @classmethod
    def open(
        cls,
        broker: AnyBroker,
        *,
        timeout_s: float = 10.0,
        heartbeat_s: int = HEARTBEAT_S,
        broker_connections_max: int = CONNECTIONS_MAX,
    ) -> Self:
        """A reader that is connected.

        Args:
            broker: The broker's URL, or a `Broker`.
            timeout_s: Seconds until a call without an answer ends as `ReadTimeout`; connecting included.
            heartbeat_s: Seconds of heartbeat asked for; a broker that is silent for 1.5 times that counts as lost
                while a reader waits.
            broker_connections_max: Connections at most, to all nodes of the broker together, in use and kept open; 2
                or more. A call waits for one, within `timeout_s`, in the order of the calls. Each stream that is
                followed has one beside that.

        Raises:
            BrokerUnavailable: Nothing answers; where the broker is there, its plugin `rabbitmq_stream` is not enabled.
            AccessRefused: The broker refuses the user or the virtual host.
            TlsRefused: TLS cannot be, for a reason that it names.
            ConfigurationError: The URL has no stream port, something else listens there, or a file of TLS cannot be
                used.
            InvalidInput: `broker_connections_max` is no number from 2 on.
        """
        address = BrokerAddress.of(broker)
        check_limit(broker_connections_max)
        checked_seconds("timeout_s", timeout_s)
        checked_count("heartbeat_s", heartbeat_s, least=0)
        nodes = Nodes(address, timeout_s=timeout_s, heartbeat_s=heartbeat_s, connections_max=broker_connections_max)
        nodes.open()
        reader = cls(nodes)
        metrics.report(reader)
        return reader

    def read(self, stream: str, offset: int) -> Message:
        """The message at an offset.

        Raises:
            OffsetExpired: Retention has dropped it; `first` is the first one retained.
            OffsetNotFound: The stream ends before it (`last` says where), or the broker used that offset itself.
        """
        checked_name("stream", stream)
        check_offset(stream, offset)
        message = self._nodes.ask_about(stream, partial(_message_at, stream, offset))
        if message is not None:
            return message
        # The connected node may lag behind.
        bounds = self._leaders.bounds(stream)
        if bounds.is_proven and bounds.holds(offset):
            message = self._nodes.ask(partial(_message_at, stream, offset), self._leaders.of(stream))
            if message is not None:
                return message
            # Retention may have taken it since.
            bounds = self._leaders.bounds(stream)
        error = not_there(stream, offset, bounds)
        if bounds.is_proven or isinstance(error, OffsetExpired):
            raise error
        raise StreamUnavailable(
            f"This node has no message at offset {offset} of {stream!r}, and the leader cannot be asked from here.",
            stream=stream,
        )

    def read_many(
        self, ids: Iterable[tuple[str, int]], *, window: int = WINDOW_MESSAGES
    ) -> Generator[Result, None, None]:
        """The messages of many ids, in the order of the ids; neighbours are read together.

        Each id gives its message, or the `NotFound` or `AccessRefused` error that says why there is none, as a value.
        Memory is bounded: at most `window` messages and 64 MiB are held. What comes past that before its turn is read
        again.

        Args:
            ids: What to read; any order, any number, from any streams; may repeat.
            window: Ids planned together.
        """
        return _each(self._many(ids, window).run())

    def _many(
        self,
        ids: Iterable[tuple[str, int]],
        window: int,
        use: Use = Use.LENT,
        kept: KeptChunks | None = None,
    ) -> ManyReader:
        checked_count("window", window, most=WINDOW_MAX)
        return ManyReader(self._nodes, use, Window(ids, window), partial(self._settled, {}), kept)

    def _settled(self, begins: dict[str, int], result: Result | StreamNotHere) -> Result:
        """What a batched read's result that is no message amounts to: the leader's answer, another name.

        `begins`: First offsets of streams, learned on the way: they only grow, so what is below one has expired.
        """
        if isinstance(result, StreamNotFound):
            return self._nodes.named(result)
        if not isinstance(result, StreamNotHere):
            return result
        stream, offset = result.stream, result.offset
        if offset < begins.get(stream, 0):
            return not_there(stream, offset, StreamBounds(begins[stream], None, is_proven=True))
        try:
            return self.read(stream, offset)
        except OffsetExpired as error:
            if error.is_proven:
                begins[stream] = error.first
            return error
        except (NotFound, AccessRefused) as error:
            return error

    def read_all(self, ids: Iterable[tuple[str, int]], *, kept: KeptChunks | None = None) -> list[Result]:
        """As `read_many`, all at once: for each id, in order, its message or the error that says why there is none.

        Unlike an iteration it holds no connection while its caller does something else.

        Args:
            ids: As for `read_many`.
            kept: Chunks that were read before and are not read again; those that are read now join them. None reads
                all.
        """
        return list(_each(self._many(ids, WINDOW_MESSAGES, Use.ANSWER, kept).run()))

    def iterate(
        self,
        stream: str,
        start: Start = "first",
        *,
        stop: int | None = None,
        follow: bool = False,
        idle_timeout_s: float | None = None,
    ) -> Generator[Message, None, None]:
        """The messages of a stream from a point on, ascending.

        Args:
            stream: The stream's name.
            start: Where to begin. "last" begins with the last chunk the broker wrote, a moment with the first message
                written at or after it.
            stop: The offset to end before; None for none.
            follow: False ends where the stream ended when this was called; True waits for what is published later.
            idle_timeout_s: With `follow`, ends when no message came for so many seconds; None waits for ever.

        Raises:
            ReadTimeout: Without `follow`: nothing came for `timeout_s`, though more is in the stream.
        """
        return _each(self._messages_in_parts(stream, start, stop=stop, follow=follow, idle_timeout_s=idle_timeout_s))

    def _messages_in_parts(
        self, stream: str, start: Start, *, stop: int | None, follow: bool, idle_timeout_s: float | None
    ) -> Generator[list[Message], None, None]:
        scan = Scan.of(stream, start, stop, follow=follow)
        if idle_timeout_s is not None:
            checked_seconds("idle_timeout_s", idle_timeout_s)
        return self._messages(scan, idle_timeout_s, Use.FOLLOW if follow else Use.LENT)

    def _messages(self, scan: Scan, idle_timeout_s: float | None, use: Use) -> Generator[list[Message], None, None]:
        """The messages that a scan brings, those that came together in one part."""
        idle_s = self._nodes.limit_s if not scan.follow else IDLE_S if idle_timeout_s is None else idle_timeout_s
        with contextlib.closing(batches_of(self._nodes, self._leaders, scan, idle_s, use)) as parts:
            for part in parts:
                if part:
                    yield [message for batch in part for message in batch.each_message()]
                    if has_passed():
                        raise ReadTimeout(f"The stream {scan.stream!r} was not read to the end in time ({current()}).")
                elif not scan.follow:
                    raise ReadTimeout(f"The stream {scan.stream!r} gave nothing for {seconds_text(idle_s)}.")
                elif idle_timeout_s is not None:
                    return

    def scan(self, stream: str, start: int, stop: int, take: Callable[[Message], _Taken | None]) -> list[_Taken]:
        """What a function makes of the messages from an offset to before another, without a wait between them.

        Args:
            stream: The stream's name.
            start: The first offset.
            stop: The offset to end before.
            take: Gives what to keep of a message, None for nothing. It asks this reader nothing.

        Raises:
            ReadTimeout: Nothing came for `timeout_s`, though more is in the stream.
        """
        scan = Scan.of(stream, start, stop, follow=False)
        messages = _each(self._messages(scan, None, Use.ANSWER))
        with contextlib.closing(messages):
            return [taken for message in messages if (taken := take(message)) is not None]

    @property
    def cluster_name(self) -> str | None:
        """The name of the broker's cluster, as it said when the reader was opened; None where it does not say."""
        return self._nodes.server_properties.get("cluster_name") or None

    def bounds(self, stream: str) -> StreamBounds:
        """The first and the last offset of a stream; both None while it is empty."""
        return self._leaders.bounds(checked_name("stream", stream))

    def all_bounds(
        self, streams: Sequence[str], kept: KeptChunks | None = None, lasts: Collection[str] = ()
    ) -> dict[str, StreamBounds]:
        """As `bounds`, of those of many streams whose leaders say so at once, asked for together.

        Ask for each of the others by itself: it is empty, or starting, or led elsewhere, or not there.

        Args:
            streams: Their names.
            kept: What came of their first and last chunks joins these.
            lasts: Those of which the last offset alone is asked for, which takes half as long; the first of these is 0.
        """
        return self._leaders.all_bounds(checked_names("streams", streams), kept or KeptChunks(), lasts)

    def missing(self, streams: Sequence[str]) -> list[str]:
        """Those of many streams, by name, that the broker surely has not, all asked for together."""
        names = checked_names("streams", streams)
        return self._nodes.ask(lambda connection: missing(connection, list(names)))

    def identity(self) -> BrokerIdentity:
        """Which broker this is; its id is None where no recorder left one, or where it cannot be read from here."""
        known = None
        if not self.missing([IDENTITY_STREAM]):
            with contextlib.suppress(NotFound, AccessRefused):
                known = broker_id_of(self.read(IDENTITY_STREAM, 0).body)
        return BrokerIdentity(known, self.cluster_name or "")

    def partitions(self, super_stream: str) -> list[str]:
        """The streams that a name stands for as a super stream, in their order; empty where it is no super stream's.

        Empty too where there is a stream of that very name: it is meant, whatever is bound to an exchange of the name.
        Of an exchange that is no super stream: as `bound`.
        """
        found = self.bound(checked_name("super_stream", super_stream))
        return [] if found and self.routes("", super_stream) else found

    def bound(self, exchange: str) -> list[str]:
        """The streams that are bound to an exchange: a super stream's in their order; empty where it is not there."""
        return _exchanges.bound(self._nodes, checked_name("exchange", exchange))

    def routes(self, exchange: str, routing_key: str) -> list[str] | None:
        """The streams an exchange routes a key to; None where that cannot be asked.

        "" is the default exchange, which leads to the stream of that name: any broker can be asked by the stream
        protocol. Other exchanges are asked about from RabbitMQ 4.3 on, since the question takes down the stream plugin
        of older ones where a headers exchange is reached. A headers exchange routes by headers, so there are none.

        Raises:
            NotFound: There is no such exchange.
        """
        checked_text("exchange", exchange)
        return _exchanges.routes(self._nodes, exchange, checked_text("routing_key", routing_key))

    def batches(
        self,
        stream: str,
        start: Start = "first",
        *,
        stop: int | None = None,
        follow: bool = True,
        credit: int = CREDIT,
        idle_s: float = 1.0,
    ) -> Generator[RecordBatch | None, None, None]:
        """The stream's records in batches, undecoded: what a recorder reads.

        The broker may send new chunks only for chunks that were handled, that is, after the next batch is asked for.
        Offsets ascend; there are gaps. Where retention overtook the reader, batches go on further ahead without a
        word: compare offsets.

        Args:
            stream: The stream's name.
            start: Where to begin.
            stop: The offset to end before; None for none.
            follow: True waits for what is published later; False ends where the stream ended when
                this was called.
            credit: Chunks the broker may send ahead of those handled.
            idle_s: Seconds after which None is yielded when nothing came, and again each time.

        Raises:
            StreamUnavailable: The stream moved or was deleted meanwhile.
        """
        return _each(self._batches_in_parts(stream, start, stop=stop, follow=follow, credit=credit, idle_s=idle_s))

    def _batches_in_parts(
        self, stream: str, start: Start, *, stop: int | None, follow: bool, credit: int, idle_s: float
    ) -> Generator[list[RecordBatch | None], None, None]:
        scan = Scan.of(stream, start, stop, follow=follow, credit=credit)
        checked_seconds("idle_s", idle_s)
        return self._batches(scan, idle_s, Use.FOLLOW if follow else Use.LENT)

    def _batches(self, scan: Scan, idle_s: float, use: Use) -> Generator[list[RecordBatch | None], None, None]:
        with contextlib.closing(batches_of(self._nodes, self._leaders, scan, idle_s, use)) as parts:
            for part in parts:
                yield [*part] if part else [None]

    def link(self, node: Node) -> SocketConnection:
        """A connection by the stream protocol for a loop of the caller's own, logged in as the reader is.

        Args:
            node: The node, as it was advertised; None for the one that the reader is connected to.
        """
        return self._nodes.link(node)

    def statistics(self) -> ReaderStatistics:
        """How many connections to the broker are in use, idle and waited for, and how many there may be."""
        found = self._nodes.statistics()
        return found if self.turns_before is None else replace(found, waiting=found.waiting + self.turns_before.waiting)

    def close(self) -> None:
        """Close all connections. Calls under way in other threads may end as `ConnectionLost`."""
        self._nodes.close()
        metrics.retire(self)


def _each(parts: Generator[Iterable[_Item], None, None]) -> Generator[_Item, None, None]:
    """What is in the parts, one by one."""
    with contextlib.closing(parts):
        for part in parts:
            yield from part


def _message_at(stream: str, offset: int, connection: SocketConnection) -> Message | None:
    """The message at an offset, in one round trip; None where this node has none there."""
    attach = Attach.once(connection, stream, StartSpec(frames.Start.OFFSET, offset))
    until(connection, attach)
    attach.check()
    for chunk in attach.chunks:
        record = record_at(chunk, offset)
        if record is not None:
            return Message.from_record(stream, offset, record, chunk.time_ms)
    return None
