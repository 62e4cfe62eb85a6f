"""What all pages share: lookups, a stream reader, a read-only database, and cached results."""

import math
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, TypeVar
from urllib.parse import parse_qsl, quote, urlencode

import anyio
import anyio.to_thread

from relatum.errors import BrokerUnavailable, ReadTimeout
from relatum.keys import KeyDefinition
from relatum.reading import AsyncStreamReader, BrokerAddress, Message
from relatum.store.catalog import mask_secret
from relatum.store.database import Database
from relatum.store.translation import translated_errors
from relatum.waiting import within
from relatum_consumer import AsyncRelations
from relatum_consumer.web.links import Links
from relatum_consumer.web.masking import Masking
from relatum_consumer.web.options import WebOptions
from relatum_consumer.web.servers import Server, Servers

_READ_ONLY: Final = "-c default_transaction_read_only=on"
"""An option of all sessions: the page cannot write, whatever the role may do."""

_ORPHANED_S: Final = 5.0
"""Seconds that PostgreSQL waits beyond `timeout_s` before it ends a statement: for pages that were killed or hang."""

_TIMEOUT_MS_MAX: Final = (1 << 31) - 1
"""The largest `statement_timeout` of PostgreSQL."""

KEPT_S: Final = 1.0
"""Seconds for which common results are cached: viewers of the same page share one query."""

SECRET_KEPT_S: Final = 30.0
"""Seconds for which the secret of digests is cached."""

_THREADS: Final = 3
"""The most concurrent blocking calls: each uses its own session and connection."""

KEPT_MAX: Final = 256

_Value = TypeVar("_Value")


@dataclass(slots=True)
class _CacheEntry:
    value: Any = None
    until: float = 0.0
    lock: anyio.Lock = field(default_factory=anyio.Lock)


class Site:
    """Both servers for all pages; made when the application starts, closed when it ends.

    Attributes:
        database: The database for blocking calls of other packages; see `in_thread`.
        engine: The database's engine, for statements of the page itself.
        servers: The state of both servers.
    """

    def __init__(self, options: WebOptions, links: Links) -> None:
        self.options = options
        self.links = links
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
        self.database = Database(database, refusing=None, connections_max=_THREADS, statement_s=options.timeout_s)
        self.engine = self.database.engine
        self._reader: AsyncStreamReader | None = None
        self._opening = anyio.Lock()
        self._threads = anyio.CapacityLimiter(_THREADS)
        self._kept: dict[Any, _CacheEntry] = {}

    async def close(self) -> None:
        """Close all connections."""
        await self.servers.close()
        await self.relations.close()
        if self._reader is not None:
            await self._reader.close()
        self.database.close()

    async def reader(self) -> AsyncStreamReader:
        """Return the stream reader, which the first call opens."""
        async with self._opening:
            if self._reader is None:
                self._reader = await AsyncStreamReader.open(self.options.broker, timeout_s=self.options.timeout_s)
            return self._reader

    async def scan(self, stream: str, start: int, stop: int) -> list[Message]:
        """Read the messages of a stream from an offset to before another."""
        return await (await self.reader()).scan(stream, start, stop, lambda message: message)

    async def keys(self) -> tuple[KeyDefinition, ...]:
        """Return the key definitions in force, and mask what they mask from now on."""
        definitions = await self.relations.keys()
        if self.masking.lacks_secret(definitions):
            self.masking.secret = await self.cached("secret", SECRET_KEPT_S, partial(self.in_thread, self._secret))
        self.masking.take(definitions)
        return definitions

    @property
    def definitions(self) -> Mapping[str, KeyDefinition]:
        """The keys that `keys` returned last, by name."""
        return self.masking.definitions

    async def keys_last_known(self) -> None:
        """Load the keys as `keys` does; while the database is unavailable, keep the last known keys, if any."""
        if not (self.servers.database.error and self.masking.is_known):
            await self.keys()

    def _secret(self) -> bytes:
        with translated_errors(), self.engine.connect() as connection:
            return mask_secret(connection)

    async def away(self, *, now: bool = False) -> tuple[Server, ...]:
        """Return the unavailable servers. While one is known to be unavailable, it is checked again only with `now`.

        Do not call this within the time limit of something else: a server would look unavailable.
        """
        if now or not self.servers.away:
            await self.cached("servers", KEPT_S, self.servers.ask)
        return self.servers.away

    async def with_broker(
        self, about: Any, kept_s: float, both: Callable[[], _Value], database_alone: Callable[[], _Value]
    ) -> _Value:
        """Return and cache the result of a blocking call; while the broker is unavailable, use the database alone."""
        if not self.servers.broker.error:
            try:
                with within(self.options.timeout_s):
                    return await self.cached(about, kept_s, partial(self.in_thread, both))
            except (BrokerUnavailable, ReadTimeout):
                pass
        return await self.in_thread(database_alone)

    async def cached(self, about: Any, kept_s: float, ask: Callable[[], Awaitable[_Value]]) -> _Value:
        """Return a cached result, or get it now, once for all concurrent callers. Errors are not cached."""
        if len(self._kept) > KEPT_MAX:
            now = time.monotonic()
            self._kept = {each: kept for each, kept in self._kept.items() if kept.until > now or kept.lock.locked()}
        kept = self._kept.setdefault(about, _CacheEntry())
        async with kept.lock:
            if kept.until < time.monotonic():
                kept.value = await ask()
                kept.until = time.monotonic() + kept_s
            return kept.value  # type: ignore[no-any-return]

    async def in_thread(self, function: Callable[..., _Value], *arguments: Any, **options: Any) -> _Value:
        """Run a blocking call in a thread; at most a few run concurrently."""
        return await anyio.to_thread.run_sync(partial(function, *arguments, **options), limiter=self._threads)


def read_only(database: str, statement_s: float) -> str:
    """Return the URL with options for read-only sessions and a limit for each statement, in seconds."""
    base, _, query = database.partition("?")
    given = parse_qsl(query.replace("+", "%2B"), keep_blank_values=True)
    others = [(name, value) for name, value in given if name != "options"]
    ours = f"{_READ_ONLY} -c statement_timeout={min(math.ceil(1e3 * statement_s), _TIMEOUT_MS_MAX)}"
    options = " ".join([*(value for name, value in given if name == "options"), ours])
    return f"{base}?{urlencode([*others, ('options', options)], quote_via=quote)}"
