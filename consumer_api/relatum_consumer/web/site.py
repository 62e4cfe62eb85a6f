"""Resources that all pages share: links, the servers' state, lookups, a stream reader, a database, a cache."""

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final, TypeVar
from urllib.parse import parse_qsl, quote, urlencode

from relatum.common.waiting import Threads, in_thread, within
from relatum.errors import BrokerUnavailable, ReadTimeout, RelatumError
from relatum.keys import KeyDefinition
from relatum.reading import AsyncStreamReader, Broker, BrokerAddress, StreamReader
from relatum.store.catalog import KEYS_IN_FORCE, mask_secret
from relatum.store.database import Database
from relatum_consumer import AsyncRelations
from relatum_consumer.web.masking import Masking
from relatum_consumer.web.options import WebOptions

log = logging.getLogger(__name__)

# --- links ------------------------------------------------------------------------------------------------

MCP_PATH: Final = "/mcp"
"""The path of the tools for agents."""

PROGRAM_PATHS: Final = ("/api/", MCP_PATH)
"""Paths for programs; errors there are JSON."""


@dataclass(frozen=True, slots=True)
class Links:
    """Builds the page's paths, absolute on the host. `version` is the hash of the static files."""

    root_path: str = ""
    version: str = ""

    def to(self, path: str, /, **query: object) -> str:
        """Return a path with a query. None and empty values are left out; a list repeats the parameter."""
        lists = {name: value if isinstance(value, list | tuple) else [value] for name, value in query.items()}
        # An undefined value of a template is an empty text.
        given = [(name, each) for name, values in lists.items() for each in values if each is not None and str(each)]
        return f"{self.root_path}{path}{'?' if given else ''}{urlencode(given)}"

    def static(self, name: str) -> str:
        """Return the path of a static file, which changes when a static file does."""
        return self.to(f"/static/{self.version}/{name}")

    def search(self, **query: object) -> str:
        return self.to("/", **query)

    def stream(self, stream: str) -> str:
        return self.to("/stream", stream=stream)

    def message(self, stream: str, offset: int, **query: object) -> str:
        return self.to("/message", stream=stream, offset=offset, **query)


# --- the servers' state -----------------------------------------------------------------------------------

ANSWER_S: Final = 2.0
"""How long a server may take to answer a check before it counts as unavailable, in seconds."""

CHECK_INTERVAL_S: Final = 2.0
"""Seconds between two checks, so that `since` is right even if nobody uses the page."""

_ANY_STREAM: Final = "relatum"
"""The stream that a check asks for. It need not exist: any answer shows that the broker is available."""


@dataclass(slots=True)
class Server:
    """A server: `error` says why it is unavailable, `since` when that began; "" and None while it answers."""

    name: str
    address: str
    cluster_name: str = ""
    error: str = ""
    since: datetime | None = None

    async def check(self, request: Awaitable[object]) -> None:
        """Wait for the answer to a request for at most `ANSWER_S`, and log changes."""
        started, error = time.monotonic(), ""
        try:
            with within(ANSWER_S):
                await request
        except (RelatumError, TimeoutError) as failure:
            is_late = time.monotonic() - started >= ANSWER_S
            error = f"no answer within {ANSWER_S:g} s" if is_late else str(failure).rstrip(".")
        if error and not self.error:
            self.since = datetime.now(UTC)
            log.warning("%s at %s is unavailable: %s. The page keeps checking it", self.name, self.address, error)
        elif self.error and not error:
            self.since = None
            log.warning("%s at %s answers again", self.name, self.address)
        self.error = error


class Servers:
    """Checks both servers by connections of its own, so that a busy page does not look like an unavailable server."""

    def __init__(self, broker: str | Broker, database: str) -> None:
        self._reader = StreamReader(broker, timeout_s=ANSWER_S, broker_connections_max=2)
        self._database = Database(database, connections_max=1)
        self._threads = Threads(2, "relatum-servers")
        address = BrokerAddress.of(broker)
        vhost = "" if address.vhost == "/" else f", virtual host {address.vhost}"
        self.broker = Server("RabbitMQ", ",".join(each.where for each in address.each) + vhost)
        self.database = Server("PostgreSQL", self._database.address.name)

    @property
    def unavailable(self) -> tuple[Server, ...]:
        """The servers that did not answer the last check."""
        return tuple(each for each in (self.broker, self.database) if each.error)

    async def check(self) -> None:
        """Check both servers, for at most `ANSWER_S`."""
        reach_database = in_thread(self._threads, self._database.rows, KEYS_IN_FORCE, {})
        reach_broker = in_thread(self._threads, self._reach_broker)
        await asyncio.gather(self.broker.check(reach_broker), self.database.check(reach_database))

    async def close(self) -> None:
        await in_thread(self._threads, self._reader.close)
        self._threads.shutdown()
        self._database.close()

    def _reach_broker(self) -> None:
        self._reader.missing([_ANY_STREAM])
        self.broker.cluster_name = self._reader.cluster_name or ""


# --- the site ---------------------------------------------------------------------------------------------

_STATEMENT_GRACE_S: Final = 5.0
"""Seconds after `timeout_s` at which PostgreSQL ends a statement by itself, in case the page was killed or hangs."""

CACHE_S: Final = 1.0
"""Seconds for which common results are cached: viewers of the same page share one query."""

HUES: Final = 8
"""Number of the keys' colours, each with a letter."""

_THREADS: Final = 3
"""Maximum concurrent blocking calls: each uses its own session and connection."""

KEPT_MAX: Final = 256

_Value = TypeVar("_Value")


@dataclass(slots=True)
class _CacheEntry:
    value: Any = None
    until: float = 0.0
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class Site:
    """The connections that all pages share while the application runs; `in_thread` runs blocking `database` calls."""

    def __init__(self, options: WebOptions, links: Links) -> None:
        self.options = options
        self.links = links
        self.masking = Masking(options.masked_keys, bodies=options.mask_bodies, show_bodies=options.show_bodies)
        self.address = BrokerAddress.of(options.broker)
        database = read_only(options.database, options.timeout_s + _STATEMENT_GRACE_S)
        self.relations = AsyncRelations(
            options.broker,
            database,
            timeout_s=options.timeout_s,
            database_connections_max=options.database_connections_max,
        )
        self.reader = AsyncStreamReader(options.broker, timeout_s=options.timeout_s)
        self.servers = Servers(options.broker, database)
        self.database = Database(database, refusing=None, connections_max=_THREADS, statement_s=options.timeout_s)
        self._threads = Threads(_THREADS, "relatum-web-calls")
        self._cache: dict[Any, _CacheEntry] = {}

    async def close(self) -> None:
        await self.servers.close()
        await self.relations.close()
        await self.reader.close()
        self._threads.shutdown()
        self.database.close()

    async def keys(self) -> tuple[KeyDefinition, ...]:
        """Return the key definitions in force, and apply their masking from now on."""
        definitions = await self.relations.keys()
        if self.masking.lacks_secret(definitions):
            load = partial(self.in_thread, self.database.run, mask_secret)
            self.masking.secret = await self.cached("secret", CACHE_S, load)
        self.masking.update(definitions)
        return definitions

    async def keys_last_known(self) -> None:
        """Load the keys as `keys` does; while the database is unavailable, keep the last known keys, if any."""
        if self.servers.database.error and self.masking.is_known:
            # The check may fail for a lack of connections while lookups have some, and keys may be masked meanwhile.
            with within(ANSWER_S / 4), suppress(RelatumError):
                await self.keys()
        else:
            await self.keys()

    def hue(self, key: str) -> int:
        """Return the index of a key's colour and letter; other keys do not change it."""
        return (self.masking.definitions[key].key_id - 1) % HUES if key in self.masking.definitions else 0

    def value_link(self, each: Any, place: Any = None) -> str:
        """Return the URL of a search for a key's value: by the value, or by its message if masked, composite or empty.

        The URL is empty if the key was removed, or if the message is needed and `place` is None.
        """
        definition = self.masking.definitions.get(each.key)
        if definition is None:
            return ""
        if each.value and not self.masking.is_masked(definition) and not definition.is_composite:
            return self.links.search(key=each.key, value=each.value)
        if place is None:
            return ""
        keys = getattr(place, "keys", ())
        of_value = next((key.of_value for key in keys if (key.key, key.value) == (each.key, each.value)), 0)
        return self.links.search(
            key=each.key, of_stream=place.stream, of_offset=place.offset, of_value=of_value or None
        )

    async def unavailable(self, *, now: bool = False) -> tuple[Server, ...]:
        """Return the unavailable servers. While one is unavailable, the servers are checked again only with `now`.

        Do not call this within another time limit: a server would look unavailable.
        """
        if now or not self.servers.unavailable:
            await self.cached("servers", CACHE_S, self.servers.check)
        return self.servers.unavailable

    async def watch(self) -> None:
        while True:
            await self.unavailable(now=True)
            await asyncio.sleep(CHECK_INTERVAL_S)

    async def with_broker(
        self, key: Any, cache_s: float, from_both: Callable[[], _Value], from_database: Callable[[], _Value]
    ) -> _Value:
        """Return the result of `from_both`, cached; while the broker is unavailable, that of `from_database`."""
        if not self.servers.broker.error:
            with within(self.options.timeout_s), suppress(BrokerUnavailable, ReadTimeout):
                return await self.cached(key, cache_s, partial(self.in_thread, from_both))
        return await self.in_thread(from_database)

    async def cached(self, key: Any, cache_s: float, load: Callable[[], Awaitable[_Value]]) -> _Value:
        """Return a cached result, or load it once for all concurrent callers. Errors are not cached."""
        if len(self._cache) > KEPT_MAX:
            now = time.monotonic()
            self._cache = {each: old for each, old in self._cache.items() if old.until > now or old.lock.locked()}
        entry = self._cache.setdefault(key, _CacheEntry())
        async with entry.lock:
            if entry.until < time.monotonic():
                entry.value = await load()
                entry.until = time.monotonic() + cache_s
            return entry.value  # type: ignore[no-any-return]

    async def in_thread(self, function: Callable[..., _Value], *arguments: Any, **options: Any) -> _Value:
        """Run a blocking call in a thread, within the task's deadline; at most a few run concurrently."""
        return await in_thread(self._threads, partial(function, *arguments, **options))


def read_only(database: str, statement_s: float) -> str:
    """Return the URL for sessions that cannot write, regardless of the role's rights; statements have a time limit."""
    base, _, query = database.partition("?")
    given = parse_qsl(query.replace("+", "%2B"), keep_blank_values=True)
    others = [(name, value) for name, value in given if name != "options"]
    ours = f"-c default_transaction_read_only=on -c statement_timeout={math.ceil(1e3 * statement_s)}"
    options = " ".join([*(value for name, value in given if name == "options"), ours])
    return f"{base}?{urlencode([*others, ('options', options)], quote_via=quote)}"
