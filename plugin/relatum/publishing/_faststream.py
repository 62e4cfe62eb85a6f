"""FastStream: intercepts a RabbitMQ broker object, which has one aio-pika connection at a time.

The broker object opens a new connection at each start. Middleware runs before each message is published, and intercepts
the current connection.
"""

from collections.abc import Awaitable, Callable
from typing import Any, Final

from aio_pika.abc import AbstractConnection
from faststream import BaseMiddleware

from relatum.publishing import _aio_pika as aio_pika_connections
from relatum.publishing._apps import ProcessInterceptions
from relatum.publishing._interception import ATTRIBUTE, interception_of

NAME: Final = "faststream"
"""The client's name in metrics."""


class _InterceptingMiddleware(BaseMiddleware[Any, Any]):
    """Intercepts a broker object's connection before it publishes. One instance serves all messages."""

    def __init__(self, broker: Any) -> None:
        self._broker = broker

    def __call__(self, _message: Any, *, context: Any) -> "_InterceptingMiddleware":
        return self

    async def publish_scope(self, call_next: Callable[[Any], Awaitable[Any]], cmd: Any) -> Any:
        interceptions, connection = interception_of(self._broker), self._broker._connection
        # FastStream's test broker has no connection.
        if interceptions is not None and isinstance(connection, AbstractConnection):
            interceptions.intercept_connection(connection, aio_pika_connections)
        return await call_next(cmd)


def intercept(broker: Any, interceptions: ProcessInterceptions) -> None:
    setattr(broker, ATTRIBUTE, interceptions)
    if not any(isinstance(middleware, _InterceptingMiddleware) for middleware in broker.middlewares):
        broker.add_middleware(_InterceptingMiddleware(broker))


def release(broker: Any) -> None:
    """Detach the interception: the middleware stays, without effect. `ProcessInterceptions.release` does the rest."""
    delattr(broker, ATTRIBUTE)
