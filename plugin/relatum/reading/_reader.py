"""`StreamReader`: reads streams, blocking."""

import contextlib
import math
from collections.abc import Callable, Collection, Generator, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Self, TypedDict, TypeVar, Unpack

from relatum import metrics
from relatum.common.checks import (
    checked_count,
    checked_name,
    checked_names,
    checked_seconds,
    checked_text,
    seconds_text,
    shown,
)
from relatum.common.closing import Closing
from relatum.common.ids import IDENTITY_STREAM, BrokerIdentity, broker_id_of
from relatum.common.waiting import current, has_passed
from relatum.errors import (
    AccessRefused,
    InvalidInput,
    NotFound,
    OffsetExpired,
    ReadTimeout,
    StreamNotFound,
    StreamNotHere,
    StreamUnavailable,
)
from relatum.reading import _exchanges
from relatum.reading._address import AnyBroker, BrokerAddress
from relatum.reading._bounds import StreamBounds, check_offset, offset_error
from relatum.reading._connecting import HEARTBEAT_S
from relatum.reading._connection import SocketConnection
from relatum.reading._leaders import Leaders
from relatum.reading._many import ChunkCache, ManyReader, message_at
from relatum.reading._message import Message
from relatum.reading._nodes import Node, Nodes, missing, places_in
from relatum.reading._plan import WINDOW_MAX, WINDOW_MESSAGES, Result
from relatum.reading._pool import CONNECTIONS_MAX, CONNECTIONS_MIN, REFUSING, Pool, ReaderStatistics, Turns, Use
from relatum.reading._scan import CREDIT, RecordBatch, Scan, Start, batches_of
from relatum.wire import frames
from relatum.wire.frames import StreamPlaces

_Item = TypeVar("_Item")
_Taken = TypeVar("_Taken")


class ReaderOptions(TypedDict, total=False):
    """The options of a reader; see `StreamReader.open`."""

    timeout_s: float
    heartbeat_s: int
    broker_connections_max: int


class StreamReader(Closing):
    """Reads streams, blocking. A thread-safe context manager.

    Methods that query the broker may raise `StreamNotFound`, `NotAStream`, `AccessRefused` and, after `close`,
    `UsedAfterClose`. A retry is safe after `StreamUnavailable`, `ConnectionLost`, `BrokerUnavailable`, `ReadTimeout`
    (no answer within `timeout_s`) and `ConnectionsInUse` (no connection became free within `timeout_s`).
    """

    def __init__(
        self,
        broker: AnyBroker,
        *,
        timeout_s: float = 10.0,
        heartbeat_s: int = HEARTBEAT_S,
        broker_connections_max: int = CONNECTIONS_MAX,
        refusing: str = REFUSING,
    ) -> None:
        """Create a reader that connects at its first request; see `open`. `refusing`: The text of `UsedAfterClose`."""
        address = BrokerAddress.of(broker)
        checked_count("broker_connections_max", broker_connections_max, least=CONNECTIONS_MIN)
        checked_seconds("timeout_s", timeout_s)
        checked_count("heartbeat_s", heartbeat_s, least=0)
        pool = Pool(broker_connections_max, refusing)
        self._nodes = Nodes(address, pool, timeout_s=timeout_s, heartbeat_s=heartbeat_s)
        self._leaders = Leaders(self._nodes)
        self.outer_turns: Turns | None = None
        """The turns of an asyncio reader, whose calls take one before they call this reader; None without one."""
        metrics.report(self)

    @classmethod
    def open(cls, broker: AnyBroker, **options: Unpack[ReaderOptions]) -> Self:
        """Return a connected reader. Without `open`, a new reader connects at its first request.

        Args:
            broker: The broker's URL, or a `Broker`.
            timeout_s: Seconds after which a call without an answer raises `ReadTimeout`, including the time to connect.
                Default: 10.
            heartbeat_s: The heartbeat interval to request for followed streams, in seconds. A broker that is silent for
                1.5 times as long counts as lost. Other connections have at least 60 s. 0: no heartbeats. Default: 10.
            broker_connections_max: Maximum connections in use and idle, to all nodes together; at least 2. Default: 16.
                Calls wait for one in their order, for `timeout_s` at most. Each followed stream has one more, outside
                the limit.

        Raises:
            BrokerUnavailable: Nothing answers. If RabbitMQ runs there, enable its plugin `rabbitmq_stream`.
            AccessRefused: The broker refuses the user or the virtual host.
            TlsRefused: TLS failed; the message says why.
            ConfigurationError: The stream port is unknown, belongs to another kind of server, or a TLS file is
                unusable.
            InvalidInput: `broker_connections_max` is not an integer of at least 2.
        """
        reader = cls(broker, **options)
        try:
            reader.missing([])
        except BaseException:
            reader.close()
            raise
        return reader

    def read(self, stream: str, offset: int) -> Message:
        """Return the message at an offset.

        Raises:
            OffsetExpired: Retention has dropped the message. `first` is the first retained offset.
            OffsetNotFound: The stream ends before the offset (`last`: its last offset), or the broker itself uses it.
        """
        checked_name("stream", stream)
        check_offset(stream, offset)
        message = self._nodes.query_replica(stream, partial(message_at, stream, offset))
        if message is not None:
            return message
        # The connected node may lag behind.
        bounds = self._leaders.bounds(stream)
        if bounds.is_proven and bounds.holds(offset):
            message = self._nodes.query(partial(message_at, stream, offset), self._leaders.of(stream))
            if message is not None:
                return message
            # Retention may have dropped it since.
            bounds = self._leaders.bounds(stream)
        error = offset_error(stream, offset, bounds)
        if bounds.is_proven or isinstance(error, OffsetExpired):
            raise error
        raise StreamUnavailable(
            f"This node has no message at offset {offset} of {stream!r}, and the leader is unreachable: try again.",
            stream=stream,
        )

    def read_many(
        self, ids: Iterable[tuple[str, int]], *, window: int = WINDOW_MESSAGES
    ) -> Generator[Result, None, None]:
        """Yield the messages of many ids, in the order of the ids. Neighbours are read together.

        Each id yields its message or, as a value, the `NotFound` or `AccessRefused` error that says why there is none.
        Memory is bounded: at most `window` messages or 64 MiB are held; messages beyond that are read again later.
        Between two results, this uses no connection.

        Args:
            ids: The ids to read, of any streams, in any order and number; they may repeat.
            window: How many ids are planned together, 1 to 1,000,000. Default: 1,024.
        """
        return _each(self._many(ids, window))

    def _many(
        self, ids: Iterable[tuple[str, int]], window: int, kept: ChunkCache | None = None
    ) -> Generator[list[Result], None, None]:
        checked_count("window", window, most=WINDOW_MAX)
        given: object = ids
        if isinstance(given, str | bytes) or not isinstance(given, Iterable):
            raise InvalidInput(f"ids= takes pairs of a stream's name and an offset (MessageId), not {shown(ids)}")
        return ManyReader(self._nodes, partial(self._resolved, {}), kept).run(ids, window)

    def _resolved(self, first_offsets: dict[str, int], result: Result | StreamNotHere) -> Result:
        """Return the final result for one that is not a message: query the leader, or another kind of queue.

        `first_offsets`: The known first offsets of streams. They only grow, so lower offsets have expired.
        """
        if isinstance(result, StreamNotFound):
            return self._nodes.missing_error(result)
        if not isinstance(result, StreamNotHere):
            return result
        stream, offset = result.stream, result.offset
        assert offset is not None, "it was read at an offset"
        if offset < first_offsets.get(stream, 0):
            return offset_error(stream, offset, StreamBounds(first_offsets[stream], None, is_proven=True))
        try:
            return self.read(stream, offset)
        except OffsetExpired as error:
            if error.is_proven:
                first_offsets[stream] = error.first
            return error
        except (NotFound, AccessRefused) as error:
            return error

    def read_all(self, ids: Iterable[tuple[str, int]], *, kept: ChunkCache | None = None) -> list[Result]:
        """Return what `read_many` yields: for each id, in order, its message or the error that says why there is none.

        Args:
            ids: As for `read_many`.
            kept: A cache: its chunks are not read again, and the chunks read now are added. None (default): no cache.
        """
        return list(_each(self._many(ids, WINDOW_MESSAGES, kept)))

    def iterate(
        self,
        stream: str,
        start: Start = "first",
        *,
        stop: int | None = None,
        follow: bool = False,
        idle_timeout_s: float | None = None,
    ) -> Generator[Message, None, None]:
        """Yield the messages of a stream from a start on, ascending.

        Args:
            stream: The stream's name.
            start: An offset; "first"; "last" for the last chunk; "next" for messages published from now on; or a
                datetime, for messages that the broker wrote at that time or later.
            stop: The offset to end before. None (default): no end.
            follow: False (default): end at the stream's present end. True: wait for new messages.
            idle_timeout_s: With `follow`: seconds without a message after which to end. None (default): never.

        Raises:
            ReadTimeout: Without `follow`: no message arrived for `timeout_s`, although the stream has more.
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
        """Yield the messages of a scan, in lists of those that arrived together."""
        idle_s = self._nodes.limit_s if not scan.follow else math.inf if idle_timeout_s is None else idle_timeout_s
        with contextlib.closing(batches_of(self._nodes, self._leaders, scan, idle_s, use)) as parts:
            for part in parts:
                if part:
                    yield [message for batch in part for message in batch.each_message()]
                    if has_passed():
                        raise ReadTimeout(
                            f"The stream {scan.stream!r} was not read to the end in time ({current()}): try again."
                        )
                elif not scan.follow:
                    raise ReadTimeout(
                        f"The stream {scan.stream!r} delivered nothing for {seconds_text(idle_s)}: try again."
                    )
                elif idle_timeout_s is not None:
                    return

    def scan(self, stream: str, start: int, stop: int, take: Callable[[Message], _Taken | None]) -> list[_Taken]:
        """Apply a function to the messages from one offset up to another, exclusive, and return its results.

        Args:
            stream: The stream's name.
            start: The first offset.
            stop: The offset to end before.
            take: The function. A result of None is omitted. It must not use this reader.

        Raises:
            ReadTimeout: No message arrived for `timeout_s`, although the stream has more.
            StreamUnavailable: The leader does not answer, and no other node is known to have all messages up to `stop`.
        """
        scan = Scan.of(stream, start, stop, follow=False)
        messages = _each(self._messages(scan, None, Use.ANSWER))
        with contextlib.closing(messages):
            return [taken for message in messages if (taken := take(message)) is not None]

    @property
    def cluster_name(self) -> str | None:
        """The name of the broker's cluster; None before the first request, and if the broker does not name it."""
        return self._nodes.server_properties.get("cluster_name") or None

    def bounds(self, stream: str) -> StreamBounds:
        """Return the first and last offset of a stream; both are None if it is empty."""
        return self._leaders.bounds(checked_name("stream", stream))

    def all_bounds(
        self, streams: Sequence[str], kept: ChunkCache | None = None, lasts: Collection[str] = ()
    ) -> dict[str, StreamBounds]:
        """Return the bounds of many streams, with few requests, if their leaders answer without a wait.

        Streams without a result are empty, starting, led by another node, or do not exist. Call `bounds` for them.

        Args:
            streams: The streams' names.
            kept: A cache, to which first and last chunks are added. None (default): no cache.
            lasts: Streams of which you need only the last offset, which takes half the time; their first is given as 0.
        """
        return self._leaders.all_bounds(checked_names("streams", streams), kept or ChunkCache(), lasts)

    def missing(self, streams: Sequence[str]) -> list[str]:
        """Return the names that no stream on the broker has, with few requests. Other queues may have these names."""
        names = checked_names("streams", streams)
        return self._nodes.query(lambda connection: missing(connection, list(names)))

    def identity(self) -> BrokerIdentity:
        """Return the broker's identity. Its id is None if no recorder has created one, or this user may not read it."""
        known = None
        if not self.missing([IDENTITY_STREAM]):
            with contextlib.suppress(NotFound, AccessRefused):
                known = broker_id_of(self.read(IDENTITY_STREAM, 0).body)
        return BrokerIdentity(known, self.cluster_name or "")

    def partitions(self, super_stream: str) -> list[str]:
        """Return the partitions of a super stream, in order; empty if no super stream has the name.

        Also empty if a stream has the same name, which takes precedence over an exchange. For any other exchange, the
        result is that of `bound`.
        """
        found = self.bound(checked_name("super_stream", super_stream))
        return [] if found and self.routes("", super_stream) else found

    def bound(self, exchange: str) -> list[str]:
        """Return the streams bound to an exchange, a super stream's in order; empty if there is no such exchange."""
        return _exchanges.bound(self._nodes, checked_name("exchange", exchange))

    def routes(self, exchange: str, routing_key: str) -> list[str] | None:
        """Return the streams to which an exchange routes a key; None if the broker cannot be queried safely.

        The default exchange, "", routes to the stream whose name is the key; all brokers can be queried for it. Other
        exchanges can be queried from RabbitMQ 4.3 on: in older brokers, the request crashes the stream plugin if it
        reaches an exchange that reads messages. Streams that a headers exchange selects by header are left out.

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
        """Yield a stream's records in batches, not decoded, as a recorder reads them.

        When you take the next batch, the broker may send more chunks. Offsets ascend, with gaps. If retention drops
        records that were not read yet, the next batch begins after them, without an error: compare offsets.

        Args:
            stream: The stream's name.
            start: As for `iterate`.
            stop: The offset to end before. None (default): no end.
            follow: True (default): wait for new messages. False: end at the stream's present end.
            credit: Maximum chunks that the broker sends ahead of those you have taken. Default: 16.
            idle_s: Seconds without a chunk after which None is yielded, repeatedly. Default: 1.

        Raises:
            StreamUnavailable: The stream was moved or deleted.
        """
        return _each(self._batches_in_parts(stream, start, stop=stop, follow=follow, credit=credit, idle_s=idle_s))

    def _batches_in_parts(
        self, stream: str, start: Start, *, stop: int | None, follow: bool, credit: int, idle_s: float
    ) -> Generator[list[RecordBatch | None], None, None]:
        scan = Scan.of(stream, start, stop, follow=follow, credit=credit)
        checked_seconds("idle_s", idle_s)
        parts = batches_of(self._nodes, self._leaders, scan, idle_s, Use.FOLLOW if follow else Use.LENT)
        return ([*part] if part else [None] for part in parts)

    def places(self, stream: str) -> StreamPlaces:
        """Return the nodes that have a stream, for callers that open their own connections.

        Args:
            stream: The stream's name.
        """
        return self._nodes.query(
            lambda connection: places_in(connection.answer(frames.metadata, [stream]).body, stream)
        )

    def link(self, node: Node) -> SocketConnection:
        """Return a logged-in connection of the stream protocol, which the caller must close.

        Args:
            node: The node's advertised address; None for the node that the reader is connected to.
        """
        return self._nodes.link(node)

    def statistics(self) -> ReaderStatistics:
        """Return the numbers of connections to the broker and of calls that wait for one."""
        found = self._nodes.pool.statistics()
        return found if self.outer_turns is None else replace(found, waiting=found.waiting + self.outer_turns.waiting)

    def close(self) -> None:
        """Close all connections. Other threads' running calls may raise `ConnectionLost`. Idempotent."""
        self._nodes.pool.close()
        metrics.retire(self)


def _each(parts: Generator[Iterable[_Item], None, None]) -> Generator[_Item, None, None]:
    with contextlib.closing(parts):
        for part in parts:
            yield from part
