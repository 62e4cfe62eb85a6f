# The blocking face of this, _amqp_blocking.py, is made by tools/make-twins.
"""Reading streams over AMQP 0.9.1, with asyncio."""

import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Collection, Generator, Iterable, Sequence
from typing import Any, TypeVar

from relatum.errors import ConfigurationError, ConnectionLost, UsedAfterClose
from relatum.reading._address import BrokerAddress

# asyncio only:
from relatum.reading._aio_pika_links import AioPikaLinks as AsyncLinks

# both:
from relatum.reading._amqp_operations import AmqpOperations, Command
from relatum.reading._batches import RecordBatch, StreamBounds
from relatum.reading._kept import KeptChunks
from relatum.reading._message import Message
from relatum.reading._opening import HEARTBEAT_S

# blocking only:
# from relatum.reading._pika_links import PikaLinks as Links
# both:
from relatum.reading._scan import Scan
from relatum.reading._turns import CONNECTIONS_MAX, ReaderStatistics, Use
from relatum.reading._window import Result, Window
from relatum.steps import async_each, async_run
from relatum.waiting import Patience

_Result = TypeVar("_Result")


class AsyncAmqp:
    """The asyncio face over AMQP 0.9.1. Tasks may share it: each call has a link to itself, and a turn for that."""

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
        self._links = AsyncLinks(address, timeout_s, heartbeat_s, connections)
        self._is_closed = False
        self.server_properties: dict[str, Any] = {}

    async def open(self, connect_s: float | None = None) -> None:
        """Connect once, so that what is wrong shows at once; within `connect_s` seconds, or those of each call."""
        self.server_properties = await self._links.open(connect_s or self._limit_s)

    def statistics(self) -> ReaderStatistics:
        """The connections; over one connection, its channels."""
        return self._links.statistics()

    async def close(self) -> None:
        """Close all that is idle; what is in use closes when it is given back."""
        self._is_closed = True
        await self._links.close()

    async def _ask(self, make: Callable[[], Generator[Command, Any, _Result]]) -> _Result:
        """Run one operation; once more over another connection where an idle one turns out to be closed."""
        deadline = time.monotonic() + self._timeout_s
        async with self._links.turn(Use.ANSWER, deadline):
            while True:
                self._check_open()
                try:
                    async with self._links.link(Use.ANSWER) as link:
                        return await async_run(make(), link.perform)
                except ConnectionLost:
                    if link.has_received or time.monotonic() >= deadline:
                        raise

    async def _each(
        self, make: Callable[[], Generator[Command | _Result, Any, None]], use: Use
    ) -> AsyncGenerator[_Result, None]:
        """What an operation gives; begun once more, as for `_ask`, if nothing had come."""
        deadline = time.monotonic() + self._timeout_s
        async with self._links.turn(use, deadline):
            while True:
                self._check_open()
                has_given = False
                try:
                    async with (
                        self._links.link(use) as link,
                        contextlib.aclosing(async_each(make(), link.perform)) as items,
                    ):
                        async for item in items:
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

    # blocking only:
    # def probe(self, name: str) -> None:
    #     """Return where there is a stream of that name; raises `NotAStream`, `StreamNotFound`, `StreamUnavailable`."""
    #     self._ask(lambda: self._operations.probe(name))
    # both:

    async def read(self, stream: str, offset: int) -> Message:
        return await self._ask(lambda: self._operations.read(stream, offset))

    async def bounds(self, stream: str) -> StreamBounds:
        return await self._ask(lambda: self._operations.bounds(stream))

    async def all_bounds(
        self, streams: Sequence[str], kept: KeptChunks, lasts: Collection[str]
    ) -> dict[str, StreamBounds]:
        """AMQP 0.9.1 asks for one after the other: none is had at once."""
        return {}

    async def missing(self, streams: Sequence[str]) -> list[str]:
        """AMQP 0.9.1 closes a channel over each that is: none is said."""
        return []

    async def partitions(self, super_stream: str) -> list[str]:
        """AMQP 0.9.1 cannot say: none."""
        return []

    async def routes(self, exchange: str, routing_key: str) -> None:
        """AMQP 0.9.1 cannot say."""
        return

    def read_many(
        self, ids: Iterable[tuple[str, int]], window: int, use: Use, kept: KeptChunks | None = None
    ) -> AsyncGenerator[Result, None]:
        return self._each(lambda: self._operations.read_many(Window(ids, window)), use)

    def batches(self, stream: str, scan: Scan, idle_s: float, use: Use) -> AsyncGenerator[RecordBatch | None, None]:
        return self._each(lambda: self._operations.scan(stream, scan, idle_s), use)
