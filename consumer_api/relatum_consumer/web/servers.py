"""The state of RabbitMQ and PostgreSQL, which each page shows at its top: names, and since when one is unavailable.

The checks use their own connections, so a busy page does not look like an unavailable server.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Final

from relatum.errors import RelatumError
from relatum.reading import AsyncStreamReader, Broker, BrokerAddress
from relatum.store.catalog import KEYS_IN_FORCE
from relatum.store.database import Database
from relatum.waiting import Threads, in_thread, within

log = logging.getLogger(__name__)

ANSWER_S: Final = 2.0
"""How long a server may take to answer a check before it counts as unavailable, in seconds."""

EVERY_S: Final = 5.0
"""Seconds between two checks, so that `since` is right even if nobody has used the page for a while."""

AGAIN_S: Final = 1.0
"""Seconds between two checks while a server is unavailable."""

_ANY_STREAM: Final = "relatum"
"""A stream that need not exist: any answer will do."""


@dataclass(frozen=True, slots=True)
class Server:
    """RabbitMQ or PostgreSQL.

    Attributes:
        name: "RabbitMQ" or "PostgreSQL".
        called: The cluster's name; empty while unknown.
        where: Host and port, and the virtual host or the database.
        error: Why the server counts as unavailable; empty if it answers.
        since: Since when it has been unavailable; None if it answers.
    """

    name: str
    called: str
    where: str
    error: str = ""
    since: datetime | None = None


class Servers:
    """Checks both servers, and remembers since when one is unavailable.

    Args:
        broker: The broker's URL, or a `Broker`.
        database: PostgreSQL's URL.
    """

    def __init__(self, broker: str | Broker, database: str) -> None:
        self._broker = broker
        self._database = Database(database, connections_max=1)
        self._threads = Threads(1, "relatum-servers")
        self._reader: AsyncStreamReader | None = None
        self._lock = asyncio.Lock()
        self.broker = Server("RabbitMQ", "", _place_of(BrokerAddress.of(broker)))
        self.database = Server("PostgreSQL", "", self._database.address.name)

    @property
    def away(self) -> tuple[Server, ...]:
        """The servers that did not answer the last check."""
        return tuple(each for each in (self.broker, self.database) if each.error)

    async def ask(self) -> None:
        """Check both servers, for at most `ANSWER_S`."""
        async with self._lock:
            asked = in_thread(self._threads, self._database.rows, KEYS_IN_FORCE, {})
            broker, database = await asyncio.gather(_error_of(self._reach_broker()), _error_of(asked))
            called = self.broker.called if self._reader is None else self._reader.cluster_name or ""
            self.broker = _found(replace(self.broker, called=called), broker)
            self.database = _found(self.database, database)

    async def watch(self) -> None:
        """Check both servers periodically, until cancelled."""
        while True:
            await self.ask()
            await asyncio.sleep(AGAIN_S if self.away else EVERY_S)

    async def close(self) -> None:
        """Close both connections."""
        if self._reader is not None:
            await self._reader.close()
        self._threads.shutdown()
        self._database.close()

    async def _reach_broker(self) -> None:
        if self._reader is None:
            self._reader = await AsyncStreamReader.open(self._broker, timeout_s=ANSWER_S, broker_connections_max=2)
        await self._reader.missing([_ANY_STREAM])


async def _error_of(asked: Awaitable[object]) -> str:
    """Return why a check failed; empty if the server answers in time."""
    began = time.monotonic()
    try:
        with within(ANSWER_S):
            await asked
    except (RelatumError, TimeoutError) as error:
        return str(error).rstrip(".") if time.monotonic() - began < ANSWER_S else f"no answer within {ANSWER_S:g} s"
    return ""


def _found(server: Server, error: str) -> Server:
    """Return the server's state after a check, and log changes."""
    if not error:
        if server.error:
            log.warning("%s at %s answers again", server.name, server.where)
        return replace(server, error="", since=None)
    if server.since is None:
        log.warning("%s at %s is unavailable: %s. The page keeps checking it", server.name, server.where, error)
    return replace(server, error=error, since=server.since or datetime.now(UTC))


def _place_of(address: BrokerAddress) -> str:
    hosts = [f"{each.host}:{each.amqp_port or each.stream_port}" for each in address.each]
    return f"{','.join(hosts)}{'' if address.vhost == '/' else f', virtual host {address.vhost}'}"
