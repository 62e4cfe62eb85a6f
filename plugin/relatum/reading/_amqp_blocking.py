# Generated from _amqp_asyncio.py by tools/make-twins: edit that, then "make twins".
"""Reading streams over AMQP 0.9.1, blocking."""

import contextlib
import time
from collections.abc import Callable, Collection, Generator, Iterable, Sequence
from typing import Any, TypeVar

from relatum.errors import ConfigurationError, ConnectionLost, UsedAfterClose
from relatum.reading._address import BrokerAddress
from relatum.reading._amqp_operations import AmqpOperations, Command
from relatum.reading._batches import RecordBatch, StreamBounds
from relatum.reading._kept import KeptChunks
from relatum.reading._message import Message
from relatum.reading._opening import HEARTBEAT_S
from relatum.reading._pika_links import PikaLinks as Links
from relatum.reading._scan import Scan
from relatum.reading._turns import CONNECTIONS_MAX, ReaderStatistics, Use
from relatum.reading._window import Result, Window
from relatum.steps import each, run
from relatum.waiting import Patience

_Result = TypeVar("_Result")


class Amqp:
    """The blocking face over AMQP 0.9.1. Threads may share it: each call has a link to itself, and a turn for that."""

    _timeout_s = Patience("_limit_s")

    def __init__(
        self,
        address: BrokerAddress,
        *,
        timeout_s: float,
        heartbeat_s: int = HEARTBEAT_S,
        connections: int = CONNECTIONS_MAX,
    ) -> None:
        if address.amqp_port is None:
            raise ConfigurationError("AMQP 0.9.1 needs an amqp:// URL.")
        self._limit_s = timeout_s
        self._operations = AmqpOperations(timeout_s)
        self._links = Links(address, timeout_s, heartbeat_s, connections)
        self._is_closed = False
        self.server_properties: dict[str, Any] = {}

    def open(self, connect_s: float | None = None) -> None:
        """Connect once, so that what is wrong shows at once; within `connect_s` seconds, or those of each call."""
        self.server_properties = self._links.open(connect_s or self._limit_s)

    def statistics(self) -> ReaderStatistics:
        """The connections; over one connection, its channels."""
        return self._links.statistics()

    def close(self) -> None:
        """Close all that is idle; what is in use closes when it is given back."""
        self._is_closed = True
        self._links.close()

    def _ask(self, make: Callable[[], Generator[Command, Any, _Result]]) -> _Result:
        """Run one operation; once more over another connection where an idle one turns out to be closed."""
        deadline = time.monotonic() + self._timeout_s
        with self._links.turn(Use.ANSWER, deadline):
            while True:
                self._check_open()
                try:
                    with self._links.link(Use.ANSWER) as link:
                        return run(make(), link.perform)
                except ConnectionLost:
                    if link.has_received or time.monotonic() >= deadline:
                        raise

    def _each(
        self, make: Callable[[], Generator[Command | _Result, Any, None]], use: Use
    ) -> Generator[_Result, None, None]:
        """What an operation gives; begun once more, as for `_ask`, if nothing had come."""
        deadline = time.monotonic() + self._timeout_s
        with self._links.turn(use, deadline):
            while True:
                self._check_open()
                has_given = False
                try:
                    with (
                        self._links.link(use) as link,
                        contextlib.closing(each(make(), link.perform)) as items,
                    ):
                        for item in items:
                            has_given = True
                            yield item
                except ConnectionLost:
                    if has_given or link.has_received or time.monotonic() >= deadline:
                        raise
                else:
                    return

    def _check_open(self) -> None:
        if self._is_closed:
            raise UsedAfterClose("the reader was closed: open another one")

    def probe(self, name: str) -> None:
        """Return where there is a stream of that name; raises `NotAStream`, `StreamNotFound`, `StreamUnavailable`."""
        self._ask(lambda: self._operations.probe(name))

    def read(self, stream: str, offset: int) -> Message:
        return self._ask(lambda: self._operations.read(stream, offset))

    def bounds(self, stream: str) -> StreamBounds:
        return self._ask(lambda: self._operations.bounds(stream))

    def all_bounds(self, streams: Sequence[str], kept: KeptChunks, lasts: Collection[str]) -> dict[str, StreamBounds]:
        """AMQP 0.9.1 asks for one after the other: none is had at once."""
        return {}

    def missing(self, streams: Sequence[str]) -> list[str]:
        """AMQP 0.9.1 closes a channel over each that is: none is said."""
        return []

    def partitions(self, super_stream: str) -> list[str]:
        """AMQP 0.9.1 cannot say: none."""
        return []

    def routes(self, exchange: str, routing_key: str) -> None:
        """AMQP 0.9.1 cannot say."""
        return

    def read_many(
        self, ids: Iterable[tuple[str, int]], window: int, use: Use, kept: KeptChunks | None = None
    ) -> Generator[Result, None, None]:
        return self._each(lambda: self._operations.read_many(Window(ids, window)), use)

    def batches(self, stream: str, scan: Scan, idle_s: float, use: Use) -> Generator[RecordBatch | None, None, None]:
        return self._each(lambda: self._operations.scan(stream, scan, idle_s), use)
