"""The blocking reader: one interface over both transports."""

import ssl
from collections.abc import Iterator
from types import TracebackType
from typing import Literal, Protocol, Self

from relatum.reading._address import BrokerAddress
from relatum.reading._batches import RecordBatch, StreamBounds
from relatum.reading._message import Message
from relatum.reading._start import Beginning, Start, beginning
from relatum.reading._stream_blocking import BlockingStreams
from relatum.wire._session import Mechanism

TransportName = Literal["auto", "stream", "amqp"]


class BlockingTransport(Protocol):
    """What a transport offers the blocking reader."""

    def read(self, stream: str, offset: int) -> Message: ...
    def bounds(self, stream: str) -> StreamBounds: ...
    def partitions(self, super_stream: str) -> list[str]: ...
    def routes(self, exchange: str, routing_key: str) -> list[str] | None: ...
    def batches(
        self, stream: str, begin: Beginning, *, follow: bool, credit: int, idle_s: float
    ) -> Iterator[RecordBatch | None]: ...
    def close(self) -> None: ...


class StreamReader:
    """Reads streams, blocking. A context manager; threads may share one.

    Every method may raise `StreamNotFound`, `NotAStream`, `AccessRefused`, and, safe to repeat, `StreamUnavailable`,
    `ConnectionLost`, `BrokerUnavailable` and `ReadTimeout` (no answer within `timeout_s`).
    """

    def __init__(self, transport: BlockingTransport, name: Literal["stream", "amqp"]) -> None:
        self._transport = transport
        self.transport: Literal["stream", "amqp"] = name

    @classmethod
    def open(
        cls,
        address: BrokerAddress | str,
        *,
        transport: TransportName = "auto",
        timeout_s: float = 10.0,
        ssl_context: ssl.SSLContext | None = None,
        mechanism: Literal["PLAIN", "EXTERNAL"] = "PLAIN",
    ) -> Self:
        """A reader that is connected.

        Args:
            address: The broker's address or URL.
            transport: "stream" for the stream protocol, "amqp" for AMQP 0.9.1, "auto" for the stream protocol where
                it answers and AMQP 0.9.1 otherwise.
            timeout_s: Seconds until a call without an answer ends as `ReadTimeout`; connecting included.
            ssl_context: TLS context for addresses with TLS; None makes one that verifies certificate and host name.
            mechanism: "PLAIN" logs in with user and password, "EXTERNAL" with the client certificate in
                `ssl_context`.

        Raises:
            BrokerUnavailable: Nothing answers.
            AccessRefused: The broker refuses the user or the virtual host.
            ConfigurationError: The URL does not fit the transport, or the certificate is not trusted.
        """
        if isinstance(address, str):
            address = BrokerAddress.parse(address)
        streams = BlockingStreams(address, timeout_s=timeout_s, tls=ssl_context, mechanism=Mechanism(mechanism))
        return cls(streams, "stream")

    def read(self, stream: str, offset: int) -> Message:
        """The message at an offset.

        Raises:
            OffsetExpired: Retention has dropped it; `first` is the first one retained.
            OffsetNotFound: The stream ends before it (`last` says where), or the broker used that offset itself.
        """
        return self._transport.read(stream, offset)

    def bounds(self, stream: str) -> StreamBounds:
        """The first and the last offset of a stream; both None while it is empty."""
        return self._transport.bounds(stream)

    def partitions(self, super_stream: str) -> list[str]:
        """The streams of a super stream in their order; empty where there is no super stream of that name."""
        return self._transport.partitions(super_stream)

    def routes(self, exchange: str, routing_key: str) -> list[str] | None:
        """The streams an exchange routes a key to; None over AMQP 0.9.1, which cannot say.

        "" is the default exchange. A headers exchange routes by headers, so there are none.

        Raises:
            NotFound: There is no such exchange.
        """
        return self._transport.routes(exchange, routing_key)

    def batches(
        self,
        stream: str,
        start: Start = "first",
        *,
        follow: bool = True,
        credit: int = 16,
        idle_s: float = 1.0,
    ) -> Iterator[RecordBatch | None]:
        """The stream's records in batches, undecoded: what a recorder reads.

        The broker may send new chunks only for chunks that were handled, that is, after the next batch is asked for.
        Offsets ascend; there are gaps. Where retention overtook the reader, batches go on further ahead without a
        word: compare offsets.

        Args:
            stream: The stream's name.
            start: Where to begin.
            follow: True waits for what is published later, without an end; False ends where the stream ended when
                this was called.
            credit: Chunks the broker may send ahead of those handled.
            idle_s: Seconds after which None is yielded when nothing came, and again each time.

        Raises:
            StreamUnavailable: The stream moved or was deleted meanwhile.
        """
        return self._transport.batches(stream, beginning(start), follow=follow, credit=credit, idle_s=idle_s)

    def close(self) -> None:
        """Close all connections. Calls under way in other threads may end as `ConnectionLost`."""
        self._transport.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
