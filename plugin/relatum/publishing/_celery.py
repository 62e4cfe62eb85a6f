"""Celery: intercepts an app in each process that publishes.

Celery sends tasks by the producers of `app.producer_or_acquire`. The signal `before_task_publish` does not suffice:
Celery suppresses errors of its receivers, and does not say which app publishes.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Final

from celery.local import Proxy

from relatum.errors import ConfigurationError
from relatum.publishing._attributes import Replacement, put, put_back
from relatum.publishing._interception import ATTRIBUTE, ProcessInterceptions
from relatum.publishing._stamp import is_copied, with_copy

NAME: Final = "celery"
"""The client's name in metrics."""


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
                return
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


def intercept(app: Any, interceptions: ProcessInterceptions) -> None:
    """Intercept the app's producers. This opens no connection and does not read the app's settings."""
    if type(app) is Proxy:
        # `celery.current_app` is a proxy, on which no attributes can be set.
        app = app._get_current_object()
    if any(definition.from_body is not None for definition in interceptions.options.definitions):
        raise ConfigurationError("kombu makes a task's body: take keys from headers, properties, or body:$.… paths")
    put(app, "producer_or_acquire", _Producers(app.producer_or_acquire, interceptions))
    setattr(app, ATTRIBUTE, interceptions)


def release(app: Any) -> None:
    """Restore the original method."""
    put_back(app, "producer_or_acquire")
    delattr(app, ATTRIBUTE)
