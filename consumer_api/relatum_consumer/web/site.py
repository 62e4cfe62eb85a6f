"""What all pages stand on: look-ups, a reader, a database that is only read, and what is kept for a moment."""

import logging
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, TypeVar
from urllib.parse import parse_qsl, quote, urlencode

import anyio
import anyio.to_thread

from relatum.errors import BrokerUnavailable, ReadTimeout, RelatumError
from relatum.keys import KeyDefinition
from relatum.reading import AsyncStreamReader, BrokerAddress
from relatum.recording import (
    KeySize,
    RecordedEnd,
    RecorderMember,
    StreamStatus,
    key_sizes,
    recorded_ends,
    recorded_status,
    recorder_list,
    status,
)
from relatum.store.catalog import mask_secret
from relatum.store.database import Database
from relatum.store.tables import writable_tables
from relatum.store.translation import translated_errors
from relatum.waiting import within
from relatum_consumer import AsyncRelations
from relatum_consumer.web.links import Links
from relatum_consumer.web.masking import Masking
from relatum_consumer.web.options import WebOptions
from relatum_consumer.web.rates import Rates
from relatum_consumer.web.servers import Server, Servers

log = logging.getLogger(__name__)

_READ_ONLY: Final = "-c default_transaction_read_only=on"
"""Of each session: whatever the role may do, the page writes nothing."""

_ORPHANED_S: Final = 5.0
"""Seconds after its own time-out until PostgreSQL ends a statement of a page that was killed, or stands still."""

_TIMEOUT_MS_MAX: Final = (1 << 31) - 1
"""PostgreSQL's greatest."""

_MAY_WRITE: Final = (
    "the page's user may write %d tables of the database (%s, …): its sessions are read-only, and nothing else keeps "
    "it from that. Let it ask as one who may not: CREATE ROLE page_user LOGIN PASSWORD '…' IN ROLE relatum_reader"
)

RIGHTS_AGAIN_S: Final = 5.0
"""Seconds until a database that did not answer is asked again what the page's user may."""

KEPT_S: Final = 1.0
"""Seconds for which what all ask for is kept: many who look at the same page ask the servers once."""

SIZES_KEPT_S: Final = 30.0
"""Seconds for which the sizes of keys are kept: they are sampled, which takes longer."""

_THREADS: Final = 3
"""Questions asked by blocking calls at the same time: each has a session and a connection of its own."""

KEPT_MAX: Final = 256

_Value = TypeVar("_Value")


@dataclass(slots=True)
class _Kept:
    value: Any = None
    until: float = 0.0
    lock: anyio.Lock = field(default_factory=anyio.Lock)


class Site:
    """The servers as the pages use them; made when the application starts, closed when it ends.

    Attributes:
        database: The database, for what rooms tell by blocking calls (`in_thread`).
        engine: The same, for statements of its own.
        servers: Which of the two answers.
    """

    def __init__(self, options: WebOptions, links: Links) -> None:
        self.options = options
        self.links = links
        self.rates = Rates()
        self.masking = Masking(options.masked_keys, bodies=options.mask_bodies, show_bodies=options.show_bodies)
        self.address = BrokerAddress.of(options.broker)
        database = read_only(options.database, options.timeout_s + _ORPHANED_S)
        self.relations = AsyncRelations(
            options.broker,
            database,
            timeout_s=options.timeout_s,
            database_connections_max=options.database_connections_max,
        )
        self.servers = Servers(options.broker, database)
        # One for what is live.
        self.database = Database(database, refusing=None, connections_max=_THREADS + 1, statement_s=options.timeout_s)
        self.engine = self.database.engine
        self._reader: AsyncStreamReader | None = None
        self._opening = anyio.Lock()
        self._threads = anyio.CapacityLimiter(_THREADS)
        self._kept: dict[Any, _Kept] = {}

    async def tell_rights(self) -> None:
        """Warn, once the database answers, where the page's user may write: no page needs that."""
        while True:
            try:
                tables = await anyio.to_thread.run_sync(self._writable, abandon_on_cancel=True)
                break
            except RelatumError:
                await anyio.sleep(RIGHTS_AGAIN_S)
        if tables:
            log.warning(_MAY_WRITE, len(tables), tables[0])

    def _writable(self) -> list[str]:
        with translated_errors(), self.engine.connect() as connection:
            return writable_tables(connection)

    async def close(self) -> None:
        """Close all connections."""
        await self.servers.close()
        await self.relations.close()
        if self._reader is not None:
            await self._reader.close()
        self.database.close()

    async def reader(self) -> AsyncStreamReader:
        """The reader of streams, opened by who first needs it."""
        async with self._opening:
            if self._reader is None:
                self._reader = await AsyncStreamReader.open(self.options.broker, timeout_s=self.options.timeout_s)
            return self._reader

    async def keys(self) -> tuple[KeyDefinition, ...]:
        """The key definitions in force; and from now on what they mask is masked."""
        definitions = await self.relations.keys()
        if self.masking.lacks_secret(definitions):
            self.masking.secret = await self.lately("secret", SIZES_KEPT_S, partial(self.in_thread, self._secret))
        self.masking.take(definitions)
        return definitions

    @property
    def definitions(self) -> Mapping[str, KeyDefinition]:
        """The keys by name, as `keys` read them last."""
        return self.masking.definitions

    async def keys_last_known(self) -> None:
        """As `keys`; while the database is away, it keeps to what it said last, where that is known."""
        if not (self.servers.database.error and self.masking.is_known):
            await self.keys()

    def _secret(self) -> bytes:
        with translated_errors(), self.engine.connect() as connection:
            return mask_secret(connection)

    async def away(self, *, now: bool = False) -> tuple[Server, ...]:
        """The servers that do not answer. One that is known to be away is not waited for again, unless `now`.

        It is not asked within a limit of time for something else: a server would look as if it were away.
        """
        if now or not self.servers.away:
            await self.lately("servers", KEPT_S, self.servers.ask)
        return self.servers.away

    async def statuses(self, names: Sequence[str]) -> list[StreamStatus]:
        """What is recorded of some streams, as it was within the last second."""
        wanted = tuple(names)
        away = BrokerUnavailable("RabbitMQ does not answer now")
        return await self.with_broker(
            ("status", wanted),
            KEPT_S,
            partial(status, self.options.broker, self.database, wanted),
            partial(recorded_status, self.engine, self.address.vhost, wanted, away),
        )

    async def with_broker(
        self, about: Any, kept_s: float, both: Callable[[], _Value], database_alone: Callable[[], _Value]
    ) -> _Value:
        """What both servers know by blocking calls, kept for a while; while the broker is away, the database's part."""
        if not self.servers.broker.error:
            try:
                with within(self.options.timeout_s):
                    return await self.lately(about, kept_s, partial(self.in_thread, both))
            except (BrokerUnavailable, ReadTimeout):
                pass
        return await self.in_thread(database_alone)

    async def sizes(self) -> list[KeySize]:
        """What the table holds of each key."""
        return await self.lately("sizes", SIZES_KEPT_S, partial(self.in_thread, partial(key_sizes, self.database)))

    async def recorders(self) -> list[RecorderMember]:
        """Who records."""
        return await self.lately("recorders", KEPT_S, partial(self.in_thread, partial(recorder_list, self.database)))

    async def recorded_ends(self, names: Sequence[str]) -> list[RecordedEnd]:
        """How far streams are recorded, those that are named or all."""
        wanted = tuple(names)
        ask = partial(recorded_ends, self.database, self.address.vhost, wanted, check=True)
        return await self.lately(("ends", wanted), KEPT_S, partial(self.in_thread, ask))

    async def lately(self, about: Any, kept_s: float, ask: Callable[[], Awaitable[_Value]]) -> _Value:
        """What was found out lately, or is found out now, by one for all who ask; a failure is not kept."""
        if len(self._kept) > KEPT_MAX:
            now = time.monotonic()
            self._kept = {each: kept for each, kept in self._kept.items() if kept.until > now or kept.lock.locked()}
        kept = self._kept.setdefault(about, _Kept())
        async with kept.lock:
            if kept.until < time.monotonic():
                kept.value = await ask()
                kept.until = time.monotonic() + kept_s
            return kept.value  # type: ignore[no-any-return]

    async def in_thread(self, ask: Callable[[], _Value]) -> _Value:
        """What a blocking call gives; a few of them at once."""
        return await anyio.to_thread.run_sync(ask, limiter=self._threads)


def read_only(database: str, statement_s: float) -> str:
    """The same URL, whose sessions write nothing, and of whose statements none goes on for longer."""
    base, _, query = database.partition("?")
    given = parse_qsl(query.replace("+", "%2B"), keep_blank_values=True)
    others = [(name, value) for name, value in given if name != "options"]
    ours = f"{_READ_ONLY} -c statement_timeout={min(math.ceil(1e3 * statement_s), _TIMEOUT_MS_MAX)}"
    options = " ".join([*(value for name, value in given if name == "options"), ours])
    return f"{base}?{urlencode([*others, ('options', options)], quote_via=quote)}"
