"""The asyncio reader: the same interface as the blocking one, over both transports."""

import asyncio
import contextlib
import ssl
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from functools import partial
from types import TracebackType
from typing import Literal, Protocol, Self, TypeVar

from relatum.checks import checked_count, checked_name, checked_names, checked_seconds, checked_text
from relatum.errors import BrokerUnavailable, ProtocolError, ReadTimeout
from relatum.ids import MessageId
from relatum.processes import of_one_process
from relatum.reading._address import BrokerAddress
from relatum.reading._batches import RecordBatch, StreamBounds
from relatum.reading._choice import Choice, ConnectingTime, TransportName, choose
from relatum.reading._cluster import cluster_meant, forget_cluster
from relatum.reading._login import AuthMechanism
from relatum.reading._message import Message
from relatum.reading._operations import Scan, check_offset
from relatum.reading._reader import CREDIT, IDLE_S, NOT_BY_STREAMS, checked_ids, checked_scan
from relatum.reading._socket import HEARTBEAT_S
from relatum.reading._start import Start
from relatum.reading._stream_asyncio import AsyncStreams
from relatum.reading._turns import CONNECTIONS_MAX, ReaderStatistics, Use, check_limit
from relatum.reading._window import WINDOW_MAX, WINDOW_MESSAGES, Result
from relatum.waiting import current, has_passed, left_s
from relatum.wire import AnotherCluster

_Taken = TypeVar("_Taken")


class AsyncTransport(Protocol):
    """What a transport offers the asyncio reader."""

    async def read(self, stream: str, offset: int) -> Message: ...
    async def bounds(self, stream: str) -> StreamBounds: ...
    async def missing(self, streams: Sequence[str]) -> list[str]: ...
    async def partitions(self, super_stream: str) -> list[str]: ...
    async def routes(self, exchange: str, routing_key: str) -> list[str] | None: ...
    def read_many(self, ids: Iterable[MessageId], window: int, use: Use) -> AsyncGenerator[Result, None]: ...
    def batches(self, stream: str, scan: Scan, idle_s: float, use: Use) -> AsyncGenerator[RecordBatch | None, None]: ...
    def statistics(self) -> ReaderStatistics: ...
    async def close(self) -> None: ...


class AsyncStreamReader:
    """Reads streams with asyncio; arguments, results and errors as of `StreamReader`. Tasks may share one.

    A cancelled call leaves the reader usable. Use `async with contextlib.aclosing(...)` around iterations that end
    early.
    """

    def __init__(self, transport: AsyncTransport, name: Literal["stream", "amqp"], timeout_s: float) -> None:
        self._transport = transport
        self._timeout_s = timeout_s
        self.transport: Literal["stream", "amqp"] = name
        of_one_process(self, "a reader for asyncio")

    @classmethod
    async def open(
        cls,
        address: BrokerAddress | str,
        *,
        transport: TransportName = "auto",
        timeout_s: float = 10.0,
        ssl_context: ssl.SSLContext | None = None,
        auth_mechanism: AuthMechanism | None = None,
        mechanism: AuthMechanism | None = None,
        heartbeat_s: int = HEARTBEAT_S,
        connections_max: int = CONNECTIONS_MAX,
    ) -> Self:
        """A reader that is connected; see `StreamReader.open`. AMQP 0.9.1 needs the extra `aio`."""
        auth_mechanism = mechanism if auth_mechanism is None else auth_mechanism
        address = BrokerAddress.of(address, ssl_context=ssl_context, auth_mechanism=auth_mechanism)
        choice = choose(address, transport)
        check_limit(connections_max)
        checked_seconds("timeout_s", timeout_s)
        checked_count("heartbeat_s", heartbeat_s, least=0)
        within = ConnectingTime(left_s(timeout_s))
        meant: str | None = None
        if choice is not Choice.AMQP and address.stream_port_guessed:
            ask = partial(cluster_meant, address, choice, timeout_s=left_s(timeout_s))
            meant = await asyncio.to_thread(ask)
            choice = choice if meant is not None else Choice.AMQP
        if choice is not Choice.AMQP:
            streams = AsyncStreams(
                address,
                timeout_s=timeout_s,
                heartbeat_s=heartbeat_s,
                cluster_name=meant,
                connect_s=within.of_streams(choice),
                connections=connections_max,
            )
            try:
                await streams.open()
                return cls(streams, "stream", timeout_s)
            except (BrokerUnavailable, ProtocolError, ReadTimeout, *NOT_BY_STREAMS) as error:
                if isinstance(error, AnotherCluster):
                    forget_cluster(address)
                if choice is Choice.STREAM:
                    raise
        # Imported here: aio-pika is an extra, and the stream protocol does without.
        from relatum.reading._amqp_asyncio import AsyncAmqp

        amqp = AsyncAmqp(
            address,
            timeout_s=timeout_s,
            heartbeat_s=heartbeat_s,
            connections=connections_max,
        )
        await amqp.open(within.left_s)
        return cls(amqp, "amqp", timeout_s)

    async def read(self, stream: str, offset: int) -> Message:
        """The message at an offset; see `StreamReader.read`."""
        checked_name("stream", stream)
        check_offset(stream, offset)
        return await self._transport.read(stream, offset)

    def read_many(self, ids: Iterable[MessageId], *, window: int = WINDOW_MESSAGES) -> AsyncGenerator[Result, None]:
        """The messages of many ids, in the order of the ids; see `StreamReader.read_many`."""
        checked_count("window", window, most=WINDOW_MAX)
        return self._transport.read_many(checked_ids(ids), window, Use.LENT)

    async def read_all(self, ids: Iterable[MessageId]) -> list[Result]:
        """As `read_many`, all at once; see `StreamReader.read_all`."""
        async with contextlib.aclosing(
            self._transport.read_many(checked_ids(ids), WINDOW_MESSAGES, Use.ANSWER)
        ) as results:
            return [result async for result in results]

    async def iterate(
        self,
        stream: str,
        start: Start = "first",
        *,
        stop: int | None = None,
        follow: bool = False,
        idle_timeout_s: float | None = None,
    ) -> AsyncGenerator[Message, None]:
        """The messages of a stream from a point on; see `StreamReader.iterate`."""
        scan = checked_scan(stream, start, stop, follow=follow, idle_s=idle_timeout_s)
        use = Use.FOLLOW if follow else Use.LENT
        async with contextlib.aclosing(self._iterate(stream, scan, idle_timeout_s, use)) as messages:
            async for message in messages:
                yield message

    async def _iterate(
        self, stream: str, scan: Scan, idle_timeout_s: float | None, use: Use
    ) -> AsyncGenerator[Message, None]:
        idle_s = left_s(self._timeout_s) if not scan.follow else IDLE_S if idle_timeout_s is None else idle_timeout_s
        async with contextlib.aclosing(self._transport.batches(stream, scan, idle_s, use)) as batches:
            async for batch in batches:
                if batch is not None:
                    for message in batch.each_message():
                        yield message
                    if has_passed():
                        raise ReadTimeout(f"The stream {stream!r} was not read to the end in time ({current()}).")
                elif not scan.follow:
                    raise ReadTimeout(f"The stream {stream!r} gave nothing for {idle_s:g} s.")
                elif idle_timeout_s is not None:
                    return

    async def scan(self, stream: str, start: int, stop: int, take: Callable[[Message], _Taken | None]) -> list[_Taken]:
        """What a function makes of the messages from an offset to before another; see `StreamReader.scan`."""
        scan = checked_scan(stream, start, stop, follow=False)
        async with contextlib.aclosing(self._iterate(stream, scan, None, Use.ANSWER)) as messages:
            return [taken async for message in messages if (taken := take(message)) is not None]

    async def bounds(self, stream: str) -> StreamBounds:
        """The first and the last offset of a stream; both None while it is empty."""
        return await self._transport.bounds(checked_name("stream", stream))

    async def missing(self, streams: Sequence[str]) -> list[str]:
        """Those of many streams that the broker surely has not; see `StreamReader.missing`."""
        return await self._transport.missing(checked_names("streams", streams))

    async def partitions(self, super_stream: str) -> list[str]:
        """The streams of a super stream in their order; see `StreamReader.partitions`."""
        return await self._transport.partitions(checked_name("super_stream", super_stream))

    async def routes(self, exchange: str, routing_key: str) -> list[str] | None:
        """The streams an exchange routes a key to; see `StreamReader.routes`."""
        checked_text("exchange", exchange)
        return await self._transport.routes(exchange, checked_text("routing_key", routing_key))

    def batches(
        self,
        stream: str,
        start: Start = "first",
        *,
        stop: int | None = None,
        follow: bool = True,
        credit: int = CREDIT,
        idle_s: float = 1.0,
    ) -> AsyncGenerator[RecordBatch | None, None]:
        """The stream's records in batches, undecoded; see `StreamReader.batches`."""
        use = Use.FOLLOW if follow else Use.LENT
        scan = checked_scan(stream, start, stop, follow=follow, credit=credit, idle_s=checked_seconds("idle_s", idle_s))
        return self._transport.batches(stream, scan, idle_s, use)

    def statistics(self) -> ReaderStatistics:
        """The connections to the broker; see `StreamReader.statistics`."""
        return self._transport.statistics()

    async def close(self) -> None:
        """Close all connections."""
        await self._transport.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
