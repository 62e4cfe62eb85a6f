"""Reading streams over the stream protocol, blocking."""

import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, TypeVar

from relatum.errors import BrokerUnavailable, ConnectionLost
from relatum.reading._address import BrokerAddress
from relatum.reading._batches import RecordBatch, StreamBounds
from relatum.reading._message import Message
from relatum.reading._operations import StreamOperations
from relatum.reading._socket import SocketConnection, login_for, tls_context_for
from relatum.reading._start import Beginning
from relatum.wire._chunk import Chunk, split
from relatum.wire._frames import StartSpec
from relatum.wire._session import Mechanism, Steps

CONNECTIONS_KEPT: Final = 8
"""Idle connections a reader keeps. Each thread that reads at the same time takes one."""

_Result = TypeVar("_Result")
Operation = Callable[[StreamOperations], Steps[_Result]]


class BlockingStreams:
    """The blocking face over the stream protocol. Threads may share it: each call has a connection to itself.

    Args:
        address: Where the broker is; it must have a stream port.
        timeout_s: Seconds until a call that got no answer ends as `ReadTimeout`.
        tls: TLS context, for stream addresses with TLS; None makes a verifying one.
        mechanism: How to log in.
    """

    def __init__(
        self,
        address: BrokerAddress,
        *,
        timeout_s: float,
        tls: ssl.SSLContext | None = None,
        mechanism: Mechanism = Mechanism.PLAIN,
    ) -> None:
        self._address = address
        self._timeout_s = timeout_s
        self._login = login_for(address, mechanism)
        self._tls = tls_context_for(address, tls)
        self._idle: list[SocketConnection] = []
        self._is_closed = False
        self._lock = threading.Lock()
        connection = self._connect()
        self.server_properties = connection.session.server_properties
        self._release(connection)

    def _connect(self) -> SocketConnection:
        return SocketConnection.open(self._address, self._login, self._tls, self._timeout_s)

    def _acquire(self) -> SocketConnection:
        if self._is_closed:
            raise BrokerUnavailable("The reader is closed.")
        try:
            connection = self._idle.pop()
        except IndexError:
            return self._connect()
        connection.has_received = False
        return connection

    def _release(self, connection: SocketConnection) -> None:
        if not connection.is_usable:
            return
        with self._lock:
            if not self._is_closed and len(self._idle) < CONNECTIONS_KEPT:
                self._idle.append(connection)
                return
        connection.close()

    def close(self) -> None:
        """Close all idle connections; those in use close when they are given back."""
        with self._lock:
            self._is_closed = True
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def _ask(self, operation: Operation[_Result]) -> _Result:
        """Run one operation; once more on a new connection if the idle one turns out to have been closed."""
        deadline = time.monotonic() + self._timeout_s
        while True:
            connection = self._acquire()
            try:
                return connection.run(operation(connection.operations), deadline)
            except ConnectionLost:
                # Reading changes nothing, so it can be asked again; but only what was lost before any answer, and
                # not for ever.
                if connection.has_received or time.monotonic() >= deadline:
                    raise
            finally:
                self._release(connection)

    # --- single questions ---------------------------------------------------------------------------------

    def read(self, stream: str, offset: int) -> Message:
        return self._ask(lambda operations: operations.read(stream, offset))

    def bounds(self, stream: str) -> StreamBounds:
        return self._ask(lambda operations: operations.bounds(stream))

    def partitions(self, super_stream: str) -> list[str]:
        return self._ask(lambda operations: operations.partitions(super_stream))

    def routes(self, exchange: str, routing_key: str) -> list[str]:
        return self._ask(lambda operations: operations.routes(exchange, routing_key))

    # --- many chunks --------------------------------------------------------------------------------------

    @contextmanager
    def _connection(self) -> Iterator[SocketConnection]:
        connection = self._acquire()
        try:
            yield connection
        finally:
            self._release(connection)

    def chunks(self, stream: str, start: StartSpec, credit: int, idle_s: float) -> Iterator[Chunk | None]:
        """The stream's chunks as they come, None when none came for `idle_s`."""
        with self._connection() as connection:
            steps = connection.operations.chunks(stream, start, credit)
            try:
                step = next(steps)
                while True:
                    if step is not None:
                        yield step
                        step = next(steps)
                        continue
                    events = connection.wait(idle_s)
                    if events is None:
                        yield None
                        events = []
                    step = steps.send(events)
            finally:
                steps.close()
                if connection.is_usable:
                    connection.flush(self._timeout_s)

    def batches(
        self, stream: str, begin: Beginning, *, follow: bool, credit: int, idle_s: float
    ) -> Iterator[RecordBatch | None]:
        """See `StreamReader.batches`."""
        last = None if follow else self._last(stream)
        if last is not None and last < begin.offset:
            return
        for chunk in self.chunks(stream, begin.spec, credit, idle_s):
            if chunk is None:
                yield None
                continue
            if chunk.last_offset >= begin.offset and (begin.time_ms is None or chunk.time_ms >= begin.time_ms):
                yield from batches_of(stream, chunk, begin.offset)
            if last is not None and chunk.last_offset >= last:
                return

    def _last(self, stream: str) -> int:
        """The last offset now; -1 where there is none."""
        last = self.bounds(stream).last
        return -1 if last is None else last


def batches_of(stream: str, chunk: Chunk, begin: int) -> Iterator[RecordBatch]:
    """A chunk's records from an offset on, in one batch unless unpacking makes it large."""
    for first, records in split(chunk):
        end = first + len(records)
        if first < begin:
            if end <= begin:
                continue
            records, first = records[begin - first :], begin
        yield RecordBatch(stream, first, range(first, end), records, chunk.time_ms, chunk.epoch)
