"""Apps and broker objects, which are made before their processes fork: Celery's, dramatiq's, and FastStream's.

Each process that publishes has its own interception, which its first publishing connection makes.

- Celery sends tasks with the producers of `app.producer_or_acquire`. The signal `before_task_publish` does not suffice:
  Celery suppresses errors of its receivers, and does not say which app publishes.
- dramatiq's RabbitMQ broker object has a pika connection for each thread. It connects when the thread first publishes,
  and adds the connection to its public set before using it. So that set is replaced. Middleware does not suffice:
  dramatiq suppresses its errors.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from importlib import import_module
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
    Replacement,
    put,
    put_back,
)
from relatum.publishing._stamp import is_copied, with_copy
from relatum.superstreams.connections import address_of, ensure_stream


class ProcessInterceptions:
    """The interceptions of an app or a broker object, one for each process that publishes.

    `lock` protects counts and covered connections: an app's threads publish concurrently. `nodes` are pika parameters
    of the cluster's nodes, if the connections do not know them.
    """

    def __init__(self, options: Options, client: str) -> None:
        self.options = options
        self.active = True
        self.lock = threading.Lock()
        self.nodes: Sequence[Any] = ()
        self._client = client
        self._starting = threading.Lock()
        self._present: Interception | None = None
        self._covered: WeakKeyDictionary[Any, ModuleType] = WeakKeyDictionary()
        after_fork(self, ProcessInterceptions._renew)
        if options.database is not None:
            # Before the process forks: each child would spend half a second on it.
            import_module("relatum.recording.embedded")

    def _renew(self) -> None:
        self.lock, self._starting = threading.Lock(), threading.Lock()
        leave_to_parent(self._present)
        self._present = None

    @property
    def counts(self) -> PublisherCounts:
        return PublisherCounts() if self._present is None else self._present.counts

    def current(self, connection: Any, *, may_wait: bool = True) -> Interception | None:
        """Return this process's interception, which its first publishing connection makes; None once released."""
        with self._starting:
            if self.active and self._present is None:
                address = address_of(self.options.broker or connection, self.nodes)
                if self.options.copy_to is not None:
                    ensure_stream(address, self.options.copy_to)
                self._present = Interception(self.options, address, self._client)
            present = self._present
        if present is None or not self.active:
            self._give_back()  # It was made while `release` ran.
            return None
        present.await_agreement(may_wait=may_wait)
        return present

    def cover(self, connection: Any, client: ModuleType) -> None:
        """Intercept a connection with this process's interception until `release`. `client`: Its adapter."""
        if not hasattr(connection, ATTRIBUTE):
            interception = self.current(connection, may_wait=client.may_wait(connection))
            with self.lock:
                if interception is not None and self.active:
                    client.intercept(connection, interception)
                    self._covered[connection] = client

    def release(self) -> None:
        """Restore all connections and release this process's interception. See `Interception.release`."""
        self.active = False
        with self.lock:
            covered, self._covered = list(self._covered.items()), WeakKeyDictionary()
        for connection, client in covered:
            if hasattr(connection, ATTRIBUTE):
                client.release(connection)
        self._give_back()

    def _give_back(self) -> None:
        with self.lock:
            present, self._present = self._present, None
        if present is not None:
            present.release()


class Celery:
    """The adapter of Celery apps."""

    NAME = "celery"

    @staticmethod
    def intercept(app: Any, interceptions: ProcessInterceptions) -> None:
        """Intercept the app's producers. This opens no connection and does not read the app's settings."""
        if hasattr(type(app), "_get_current_object"):
            # `celery.current_app` is a proxy, on which no attributes can be set.
            app = app._get_current_object()
        if any(definition.from_body is not None for definition in interceptions.options.definitions):
            raise ConfigurationError(
                "kombu makes a task's body, so a function cannot read a key from it: use a header, a property or a "
                "body:$.… path"
            )
        put(app, "producer_or_acquire", _Producers(app.producer_or_acquire, interceptions))
        setattr(app, ATTRIBUTE, interceptions)

    @staticmethod
    def release(app: Any) -> None:
        put_back(app, "producer_or_acquire")
        delattr(app, ATTRIBUTE)


class _Producers(Replacement):
    def __init__(
        self, wrapped: Callable[..., AbstractContextManager[Any]], interceptions: ProcessInterceptions
    ) -> None:
        self.__wrapped__ = wrapped
        self._interceptions = interceptions

    @contextmanager
    def __call__(self, producer: Any = None) -> Iterator[Any]:
        with self.__wrapped__(producer) as acquired:
            # In tests, the broker may be in memory. A task that sends tasks may pass on our producer.
            is_bare = not isinstance(acquired, _Producer) and self._interceptions.active
            if not is_bare or acquired.connection.get_transport_cls().driver_type != "amqp":
                yield acquired
            else:
                yield _Producer(acquired, self._interceptions)


class _Producer:
    def __init__(self, producer: Any, interceptions: ProcessInterceptions) -> None:
        self._producer = producer
        self._interceptions = interceptions

    def __getattr__(self, name: str) -> Any:
        return getattr(self._producer, name)

    def publish(self, body: Any, routing_key: Any = None, *, exchange: Any = None, **options: Any) -> Any:
        """Publish with an id, a time and, with `copy_to`, a copy."""
        producer, copy_to = self._producer, self._interceptions.options.copy_to
        interception = self._interceptions.current(producer.connection)
        if interception is None:
            return producer.publish(body, routing_key, exchange=exchange, **options)
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
        result = producer.publish(body, routing_key, exchange=exchange, **options)
        with self._interceptions.lock:
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
            _cover(connection, interceptions)
        broker.connections = _Connections(broker.connections, interceptions)
        setattr(broker, ATTRIBUTE, interceptions)

    @staticmethod
    def release(broker: Any) -> None:
        """Restore the set. `ProcessInterceptions.release` releases the connections."""
        if isinstance(broker.connections, _Connections):
            broker.connections = set(broker.connections)
        delattr(broker, ATTRIBUTE)


class _Connections(set[Any]):
    def __init__(self, present: Iterable[Any], interceptions: ProcessInterceptions) -> None:
        super().__init__(present)
        self._interceptions = interceptions

    def add(self, connection: Any) -> None:
        super().add(connection)
        try:
            _cover(connection, self._interceptions)
        except BaseException:
            # Also on an actor's time limit. The thread would otherwise use the connection without interception.
            connection.close()
            raise


def _cover(connection: Any, interceptions: ProcessInterceptions) -> None:
    if isinstance(connection, BlockingConnection) and connection.is_open:
        interceptions.cover(connection, pika_connections)
