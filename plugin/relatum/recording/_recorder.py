"""Recording many streams in one process: `relatum record`, and the recorder beside an interceptor."""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Final

import sqlalchemy as sa
from prometheus_client import CollectorRegistry

from relatum._failures import QUESTION_S, backoff, ended
from relatum._ids import MessageId
from relatum.errors import (
    AccessRefused,
    ConfigurationError,
    DatabaseUnavailable,
    NotFound,
    RelatumError,
    StreamNotFound,
    Transient,
)
from relatum.keys import KeyDefinition, as_definitions
from relatum.reading import BrokerAddress, StreamReader
from relatum.recording._group import STOP_S, RecorderGroup
from relatum.recording._lease import LEASE_S
from relatum.recording._outages import Outages
from relatum.store import add_keys, key_definitions, make_engine, translated_errors

logger = logging.getLogger("relatum.recorder")

PARTITIONS_S: Final = 30.0
"""How often a super stream is asked for new partitions."""

ROUTES_S: Final = 10.0
"""How often a route that is published to is asked for new streams."""

DRAIN_S: Final = 2.0
"""How long a recorder beside a publisher goes on for what was published last. What it leaves, the next one records."""

DATABASE_CONNECTIONS_MAX: Final = 8
"""Connections to PostgreSQL of a recorder, unless it is told otherwise: a dozen recorders fit into its default of 100.
"""

EMBEDDED_CONNECTIONS_MAX: Final = 2
"""Connections to PostgreSQL of the recorder beside a publisher, of which there may be hundreds."""

_NAMES: Final = "names of streams"


class Recorder:
    """Records streams and super streams until it is told to stop.

    Args:
        broker: The broker's URL or address.
        database: PostgreSQL's URL, or an engine, whose pool then says how many connections there are.
        streams: Names of streams and super streams; each partition of a super stream is recorded, new ones too. A
            stream that does not exist yet is waited for.
        stream_url: The stream protocol's URL, where it cannot be told from the broker's.
        keys: Keys to define before recording, where they are not defined yet.
        holder: Who takes the leases; by default a name made of host and process.
        database_connections_max: Connections to PostgreSQL at most, whatever the number of streams; at least 1. Who
            needs one while all are busy waits.
        lease_s: Seconds a lease holds without renewal: a recorder that dies is replaced after one to two of them.
    """

    def __init__(
        self,
        broker: str | BrokerAddress,
        database: str | sa.Engine,
        streams: Sequence[str],
        *,
        stream_url: str | None = None,
        keys: Iterable[str | KeyDefinition] = (),
        holder: str | None = None,
        database_connections_max: int = DATABASE_CONNECTIONS_MAX,
        lease_s: float = LEASE_S,
    ) -> None:
        if database_connections_max < 1:
            raise ConfigurationError(f"a recorder needs a connection to its database, not {database_connections_max}")
        self._address = broker if isinstance(broker, BrokerAddress) else BrokerAddress.parse(broker, stream_url)
        self._owns_engine = not isinstance(database, sa.Engine)
        self._engine = _engine(database, database_connections_max)
        self._names = list(streams)
        self._keys = as_definitions(keys)
        self._group = RecorderGroup(
            self._address,
            self._engine,
            holder=holder,
            committers_max=_committers(database_connections_max),
            lease_s=lease_s,
        )
        self._plain: set[str] = set()
        """Names that are streams, and no super streams: a broker writes an error to its log when it is asked that."""
        self._super: set[str] = set()

    @property
    def metrics(self) -> CollectorRegistry:
        """What Prometheus scrapes."""
        return self._group.registry

    def run(self, stop: threading.Event) -> None:
        """Record until `stop` is set, then finish the batches under way.

        Broker and database may be away, at the start too: they are waited for.

        Raises:
            ConfigurationError, AccessRefused: waiting would not cure it.
            KeyDefinitionConflict: a key of `keys` is defined with another source or type.
            SchemaMissing: the database has no schema: run `relatum migrate`.
        """
        try:
            define_keys(self._engine, self._keys, stop, self._group.outages)
            pauses = backoff(QUESTION_S)
            while not stop.is_set():
                if not self._find_streams():
                    stop.wait(next(pauses))
                else:
                    stop.wait(PARTITIONS_S if self._super else None)
        finally:
            self._group.stop()
            if self._owns_engine:
                self._engine.dispose()

    def _find_streams(self) -> bool:
        """Start a recorder for each stream and each partition; False where a name is not known for what it is yet."""
        try:
            reader = self._group.reader.get()
            for name in self._names:
                if name not in self._plain:
                    self._find(reader, name)
        except (ConfigurationError, AccessRefused):
            raise
        except RelatumError as error:
            self._group.outages.failed(_NAMES, error)
            return False
        self._group.outages.over(_NAMES)
        return self._plain.union(self._super).issuperset(self._names)

    def _find(self, reader: StreamReader, name: str) -> None:
        """Record what a name stands for; names nobody knows are taken for streams to come."""
        partitions = reader.partitions(name)
        for partition in partitions:
            self._group.add(partition, super_stream=name)
        if partitions:
            self._super.add(name)
        elif name not in self._super:
            self._group.add(name)
            # Over AMQP 0.9.1 nobody can say what is a super stream.
            if reader.transport == "stream" and _exists(reader, name):
                self._plain.add(name)


def _exists(reader: StreamReader, stream: str) -> bool:
    try:
        reader.bounds(stream)
    except StreamNotFound:
        return False
    return True


def _engine(database: str | sa.Engine, connections_max: int) -> sa.Engine:
    """The engine itself, or one for a URL that opens so many connections and no more."""
    if isinstance(database, sa.Engine):
        return database
    return make_engine(database, pool_size=connections_max, connections_max=connections_max)


def _committers(connections_max: int) -> int:
    """How many threads commit: two connections are left to renew leases and open streams, if there are so many."""
    return max(1, connections_max - 2)


def define_keys(engine: sa.Engine, keys: Sequence[KeyDefinition], stop: threading.Event, outages: Outages) -> None:
    """Define keys, if any, waiting for a database that is away; errors that waiting does not cure are raised."""
    pauses = backoff()
    while not stop.is_set():
        try:
            if keys:
                add_keys(engine, keys)
            with translated_errors(), engine.begin() as connection:
                key_definitions(connection)
        except DatabaseUnavailable as error:
            outages.failed(_NAMES, error)
            stop.wait(next(pauses))
        else:
            outages.over(_NAMES)
            return


class EmbeddedRecorder:
    """The recorder beside a publisher, in its process: it records the streams that are published to.

    None of its methods waits for a broker or a database.

    Args:
        address: The broker.
        database: PostgreSQL's URL, or an engine.
        definitions: Keys to define where they are not defined yet.
    """

    def __init__(
        self, address: BrokerAddress, database: str | sa.Engine, definitions: Sequence[KeyDefinition] = ()
    ) -> None:
        self._address = address
        self._owns_engine = not isinstance(database, sa.Engine)
        self._engine = _engine(database, EMBEDDED_CONNECTIONS_MAX)
        self._definitions = definitions
        self._group = RecorderGroup(
            address, self._engine, on_recorded=self._tell, committers_max=_committers(EMBEDDED_CONNECTIONS_MAX)
        )
        self._changed = threading.Condition()
        self._watched: set[tuple[str, str]] = set()
        self._wanted: list[tuple[str, str]] = []
        self._is_resolved = True
        """Whether the streams of all routes are recorded, or could not be looked up the last time."""
        self._listeners: dict[str, list[Callable[[MessageId], None]]] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="relatum-embedded", daemon=True)
        self._thread.start()

    def watch(self, exchange: str, routing_key: str) -> None:
        """Record the streams this exchange and routing key lead to, from now on. Cheap where already known."""
        route = (exchange, routing_key)
        if route in self._watched:
            return
        with self._changed:
            if len(self._watched) >= ROUTES_MAX:
                # Routing keys may be without number; those known are looked up again, which costs little.
                self._watched.clear()
            self._watched.add(route)
            self._wanted.append(route)
            self._is_resolved = False
            self._changed.notify_all()

    def record(self, stream: str) -> None:
        """Record a stream by name, from now on."""
        self.watch("", stream)

    def subscribe(self, receipt: str, listener: Callable[[MessageId], None]) -> Callable[[], None]:
        """Call `listener`, in a recorder's thread, for each place where that AMQP `message_id` is recorded.

        Returns:
            What ends the subscription.
        """
        with self._changed:
            self._listeners.setdefault(receipt, []).append(listener)

        def unsubscribe() -> None:
            with self._changed:
                listeners = self._listeners.get(receipt, [])
                if listener in listeners:
                    listeners.remove(listener)
                if not listeners:
                    self._listeners.pop(receipt, None)

        return unsubscribe

    def _tell(self, stream: str, receipts: list[tuple[str, int]]) -> None:
        for message_id, offset in receipts:
            with self._changed:
                listeners = list(self._listeners.get(message_id, ()))
            for listener in listeners:
                listener(MessageId(stream, offset))

    def close(self) -> None:
        """Record what was published until now, for two seconds at most, and stop.

        Nothing is waited for where the broker or the database does not answer, or another process records.
        """
        self._drain(time.monotonic() + DRAIN_S)
        self._stop.set()
        with self._changed:
            self._changed.notify_all()
        self._thread.join(STOP_S)
        self._group.stop()
        if self._owns_engine:
            self._engine.dispose()

    def _drain(self, until: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._is_resolved, max(0.0, until - time.monotonic()))
        self._group.drain(until)

    def _run(self) -> None:
        keys_defined = not self._definitions
        forgotten_at = time.monotonic()
        while not self._stop.is_set():
            with self._changed:
                if time.monotonic() - forgotten_at >= ROUTES_S:
                    # Streams are declared and bound while publishers run: what is still published to is asked again.
                    self._watched.clear()
                    forgotten_at = time.monotonic()
                if not self._wanted and keys_defined:
                    self._changed.wait(1.0)
                routes, self._wanted = self._wanted, []
            if not keys_defined:
                keys_defined = self._define_keys()
            unresolved = self._resolve(routes)
            with self._changed:
                self._is_resolved = bool(unresolved) or not self._wanted
                self._wanted[:0] = unresolved
                self._changed.notify_all()
            if unresolved or not keys_defined:
                self._stop.wait(0.5)

    def _define_keys(self) -> bool:
        """Define the publisher's keys; False where the database is away and it must be tried again."""
        try:
            add_keys(self._engine, self._definitions)
        except RelatumError as error:
            logger.warning("keys not defined: %s", ended(error))
            return not isinstance(error, Transient)
        return True

    def _resolve(self, routes: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
        """Start recorders for what routes lead to; gives back those that could not be looked up."""
        if not routes:
            return []
        try:
            with StreamReader.open(self._address) as reader:
                partitions = {exchange: _partitions_of(reader, exchange) for exchange, _ in routes if exchange}
                for exchange, routing_key in routes:
                    for stream in _streams_of(reader, exchange, routing_key):
                        if stream not in partitions.get(exchange, ()):
                            self._group.add(stream)
                            continue
                        # All of them: a look-up by the super stream's name covers those that others publish to.
                        for partition in partitions[exchange]:
                            self._group.add(partition, super_stream=exchange)
        except RelatumError as error:
            logger.warning("streams not looked up: %s", ended(error))
            return list(routes)
        return []


ROUTES_MAX: Final = 10_000
"""Routes an embedded recorder remembers."""


def _partitions_of(reader: StreamReader, exchange: str) -> list[str]:
    """The partitions of the super stream that an exchange is; none where it is no super stream.

    A super stream is the exchange of its name, and clients name its partitions after it. Streams bound to any other
    exchange look the same to the broker, but not by name.
    """
    return [stream for stream in reader.partitions(exchange) if stream.startswith(f"{exchange}-")]


def _streams_of(reader: StreamReader, exchange: str, routing_key: str) -> list[str]:
    """The streams a route leads to; over AMQP 0.9.1 only the default exchange's are known, by name."""
    try:
        found = reader.routes(exchange, routing_key)
        if found is None and exchange == "":
            reader.bounds(routing_key)
            return [routing_key]
    except NotFound:
        return []
    return found or []
