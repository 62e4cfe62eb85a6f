"""Intercepts the apps and broker objects of Celery, dramatiq and FastStream, which exist before their processes fork.

Each process that publishes has its own interception, which its first publishing connection creates.

- Celery sends tasks with the producers of `app.producer_or_acquire`. The signal `before_task_publish` does not suffice:
  Celery suppresses errors of its receivers, and does not say which app publishes.
- dramatiq's RabbitMQ broker object opens a pika connection when a thread first publishes, and adds it to a public set
  before it uses the connection. Relatum replaces that set. Middleware does not suffice: dramatiq suppresses its errors.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from inspect import signature
from types import ModuleType
from typing import Any
from weakref import WeakKeyDictionary

from pika import BlockingConnection

from relatum.common.processes import after_fork, leave_to_parent
from relatum.errors import ConfigurationError
from relatum.publishing import _pika as pika_connections
from relatum.publishing._interception import (
    ATTRIBUTE,
    Interception,
    Options,
    PublisherCounts,
    install,
    installed,
    uninstall,
)
from relatum.publishing._stamp import is_copied, with_copy
from relatum.superstreams.connections import address_of, ensure_stream


class ProcessInterceptions:
    """The interceptions of an app or a broker object, one for each process that publishes.

    `lock` protects counts and intercepted connections: an app's threads publish concurrently. `nodes` are pika
    parameters of the cluster's nodes: a connection has only those of its own node.
    """

    def __init__(self, options: Options, client: str) -> None:
        self.options = options
        self.active = True
        self.lock = threading.Lock()
        self.nodes: Sequence[Any] = ()
        self._client = client
        self._creation_lock = threading.Lock()
        self._interception: Interception | None = None
        self._connections: WeakKeyDictionary[Any, ModuleType] = WeakKeyDictionary()
        after_fork(self, ProcessInterceptions._renew)
        if options.database is not None:
            # Import before the process forks: otherwise each child would spend half a second on it.
            import_module("relatum.recording.embedded")

    def _renew(self) -> None:
        self.lock, self._creation_lock = threading.Lock(), threading.Lock()
        leave_to_parent(self._interception)
        self._interception = None

    @property
    def counts(self) -> PublisherCounts:
        return PublisherCounts() if self._interception is None else self._interception.counts

    def current(self, connection: Any) -> Interception | None:
        """Return this process's interception, which the first call creates; None after `release`."""
        with self._creation_lock:
            if self.active and self._interception is None:
                address = address_of(self.options.broker or connection, self.nodes)
                if self.options.copy_to is not None:
                    ensure_stream(address, self.options.copy_to)
                self._interception = Interception(self.options, address, self._client)
            interception = self._interception
        if interception is None or not self.active:
            self.release()  # It may have been created while `release` ran.
            return None
        # FastStream publishes in an event loop.
        interception.await_agreement(may_wait=self._client != "faststream")
        return interception

    def intercept_connection(self, connection: Any, client: ModuleType) -> None:
        """Intercept a connection with this process's interception until `release`. `client`: the client's adapter."""
        if not hasattr(connection, ATTRIBUTE):
            interception = self.current(connection)
            with self.lock:
                if interception is not None and self.active:
                    client.intercept(connection, interception)
                    self._connections[connection] = client

    def release(self) -> None:
        """Restore all connections and release this process's interception. See `Interception.release`."""
        self.active = False
        with self.lock:
            connections, self._connections = list(self._connections.items()), WeakKeyDictionary()
            interception, self._interception = self._interception, None
        for connection, client in connections:
            if hasattr(connection, ATTRIBUTE):
                client.release(connection)
        if interception is not None:
            interception.release()


class Celery:
    """The adapter of Celery apps."""

    NAME = "celery"

    @staticmethod
    def intercept(app: Any, interceptions: ProcessInterceptions) -> None:
        """Intercept the app's producers. Opens no connection and reads no settings of the app."""
        if hasattr(type(app), "_get_current_object"):
            # `celery.current_app` is a proxy, on which no attributes can be set.
            app = app._get_current_object()
        if any(definition.from_body is not None for definition in interceptions.options.definitions):
            raise ConfigurationError(
                "a function cannot read a key from a Celery task's body, which kombu encodes: use a header, a property "
                "or a body:$.… path"
            )

        @contextmanager
        def producer_or_acquire(original: Callable[[], Any], _app: Any, producer: Any = None) -> Iterator[Any]:
            with original()(producer) as acquired:
                # In tests, the broker may be in memory.
                if not interceptions.active or acquired.connection.get_transport_cls().driver_type != "amqp":
                    yield acquired
                    return
                with interceptions.lock:
                    # A caller may pass the same producer several times.
                    if installed(acquired, "publish") is None:
                        install(acquired, "publish", partial(_publish, interceptions))
                    replacement: Any = installed(acquired, "publish")
                    replacement.users += 1
                try:
                    yield acquired
                finally:
                    with interceptions.lock:
                        replacement.users -= 1
                        if not replacement.users:
                            uninstall(acquired, "publish")

        install(app, "producer_or_acquire", producer_or_acquire)
        setattr(app, ATTRIBUTE, interceptions)

    @staticmethod
    def release(app: Any) -> None:
        uninstall(app, "producer_or_acquire")
        delattr(app, ATTRIBUTE)


def _publish(
    interceptions: ProcessInterceptions,
    original: Callable[[], Any],
    producer: Any,
    body: Any,
    routing_key: Any = None,
    *more: Any,
    exchange: Any = None,
    **options: Any,
) -> Any:
    """Publish a stamped message. With the option `copy_to`, the broker also copies it to that stream."""
    publish, copy_to = original(), interceptions.options.copy_to
    if more:
        names = list(signature(publish).parameters)[2:]
        options.update(zip(names[: len(more)], more, strict=True))
        exchange = options.pop("exchange", exchange)
    interception = interceptions.current(producer.connection)
    if interception is None:
        return publish(body, routing_key, exchange=exchange, **options)
    # If the connection is not open, kombu opens it, possibly with retries.
    frame_bytes_max = producer.channel.connection.frame_max if producer.connection.connected else 0
    name = getattr(exchange, "name", exchange) or ""
    headers = options.get("headers")
    if copy_to is not None and is_copied(copy_to, name, routing_key, options.get("mandatory")):
        headers = with_copy(headers, copy_to)
    stamper = interception.stamper(frame_bytes_max, read_property=dict.get)
    stamp = stamper.stamp(headers, options.get("message_id"), options.get("timestamp"), options, b"")
    options |= {"headers": stamp.headers, "message_id": stamp.message_id}
    interception.watch(name, routing_key)
    result = publish(body, routing_key, exchange=exchange, **options)
    with interceptions.lock:
        interception.counts.published += 1
    return result


class Dramatiq:
    """The adapter of dramatiq's RabbitMQ broker objects."""

    NAME = "dramatiq"

    @staticmethod
    def intercept(broker: Any, interceptions: ProcessInterceptions) -> None:
        if interceptions.options.copy_to is not None and broker.confirm_delivery:
            raise ConfigurationError(
                "copy_to= cannot be used with confirm_delivery=True: a message to a deleted queue would count as "
                "delivered because of its copy, and dramatiq would not declare the queue again"
            )
        given = broker.parameters
        interceptions.nodes = given if isinstance(given, list) else [given]
        for connection in list(broker.connections):
            _intercept_if_open(connection, interceptions)
        broker.connections = _Connections(broker.connections, interceptions)
        setattr(broker, ATTRIBUTE, interceptions)

    @staticmethod
    def release(broker: Any) -> None:
        """Restore the set of connections. `ProcessInterceptions.release` releases the connections themselves."""
        if isinstance(broker.connections, _Connections):
            broker.connections = set(broker.connections)
        delattr(broker, ATTRIBUTE)


class _Connections(set[Any]):
    def __init__(self, connections: Iterable[Any], interceptions: ProcessInterceptions) -> None:
        super().__init__(connections)
        self._interceptions = interceptions

    def add(self, connection: Any) -> None:
        super().add(connection)
        try:
            _intercept_if_open(connection, self._interceptions)
        except BaseException:
            # Close it even on an actor's time limit: the thread would use the connection without interception.
            connection.close()
            raise


def _intercept_if_open(connection: Any, interceptions: ProcessInterceptions) -> None:
    if isinstance(connection, BlockingConnection) and connection.is_open:
        interceptions.intercept_connection(connection, pika_connections)
