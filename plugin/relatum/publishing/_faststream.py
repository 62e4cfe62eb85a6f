"""FastStream: a RabbitMQ broker, which has one aio-pika connection at a time. Imported only with such a broker.

The broker connects when it is started, and again when it is started once more. So middleware, which sees each message
before it is published, intercepts the connection that the broker has then.
"""

import copy
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

from aio_pika.abc import AbstractConnection, AbstractMessage
from faststream import BaseMiddleware

from relatum.errors import ConfigurationError
from relatum.publishing import _aio_pika as aio_pika_connections
from relatum.publishing._interception import ATTRIBUTE, ProcessInterceptions, interception_of
from relatum.publishing._receipt import AsyncReceipt

NAME: Final = "faststream"
"""The client, as metrics name it."""


class _Covering(BaseMiddleware[Any, Any]):
    """Intercepts a broker's connection before it publishes. One object serves all messages."""

    def __init__(self, broker: Any) -> None:
        self._broker = broker

    def __call__(self, _message: Any, *, context: Any) -> "_Covering":
        return self

    async def publish_scope(self, call_next: Callable[[Any], Awaitable[Any]], cmd: Any) -> Any:
        """Publish, through the interception that the broker has now, if any."""
        _cover(self._broker)
        return await call_next(cmd)


def intercept(broker: Any, interceptions: ProcessInterceptions) -> None:
    """Publish through the interception on the connection that the broker has, and on those it will have."""
    if interceptions.options.copy_to is not None:
        raise ConfigurationError(
            "copy_to= is for Celery and dramatiq: FastStream publishes as mandatory, and a message whose queue "
            "is gone would count as delivered, for its copy. `relatum tap` the exchange"
        )
    setattr(broker, ATTRIBUTE, interceptions)
    if not any(isinstance(middleware, _Covering) for middleware in broker.middlewares):
        broker.add_middleware(_Covering(broker))


def release(broker: Any) -> None:
    """Forget the interception. The middleware stays, without effect; `ProcessInterceptions.release` does the rest."""
    delattr(broker, ATTRIBUTE)


async def with_receipt(
    broker: Any,
    message: Any,
    routing_key: Any = "",
    *,
    mandatory: bool,
    headers: Mapping[str, Any] | None = None,
    message_id: str | None = None,
    **kwargs: Any,
) -> AsyncReceipt:
    """Publish by a broker's own method, with a receipt."""
    if interception_of(broker) is not None and not isinstance(broker._connection, AbstractConnection):
        raise ConfigurationError("a receipt is of a message on RabbitMQ: await broker.start() first")
    interception = _cover(broker)
    if interception is None:
        raise ConfigurationError("this broker is not intercepted: relatum.intercept(broker, …)")
    is_made = isinstance(message, AbstractMessage)
    given: Any = copy.copy(message) if is_made else message
    if is_made:
        headers, message_id = message.headers, message.message_id
    if routing_key:
        kwargs["routing_key" if isinstance(routing_key, str) else "queue"] = routing_key

    async def publish(message_id: str, headers: dict[str, Any]) -> Any:
        if is_made:
            # FastStream sends it as it is.
            given.message_id, given.headers = message_id, headers
        return await broker.publish(given, mandatory=mandatory, headers=headers, message_id=message_id, **kwargs)

    return await aio_pika_connections.with_receipt(interception, message_id, headers, publish)


def _cover(broker: Any) -> Any:
    """This process's interception of the broker's connection; None once released, or where a test connects nowhere."""
    interceptions, connection = interception_of(broker), broker._connection
    if interceptions is None or not isinstance(connection, AbstractConnection):
        return None
    return interceptions.cover(connection, aio_pika_connections)
