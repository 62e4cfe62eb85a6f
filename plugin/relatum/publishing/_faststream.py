"""FastStream: a RabbitMQ broker object, which has one aio-pika connection at a time.

It connects whenever it is started. So middleware, which sees each message before it is published, intercepts the
connection of that moment.
"""

from collections.abc import Awaitable, Callable
from typing import Any, Final

from aio_pika.abc import AbstractConnection
from faststream import BaseMiddleware

from relatum.errors import ConfigurationError
from relatum.publishing import _aio_pika as aio_pika_connections
from relatum.publishing._interception import ATTRIBUTE, ProcessInterceptions, interception_of

NAME: Final = "faststream"
"""The client, as metrics name it."""


class _Covering(BaseMiddleware[Any, Any]):
    """Intercepts a broker's connection before it publishes. One object for all messages."""

    def __init__(self, broker: Any) -> None:
        self._broker = broker

    def __call__(self, _message: Any, *, context: Any) -> "_Covering":
        return self

    async def publish_scope(self, call_next: Callable[[Any], Awaitable[Any]], cmd: Any) -> Any:
        """Publish, intercepted if the broker is."""
        _cover(self._broker)
        return await call_next(cmd)


def intercept(broker: Any, interceptions: ProcessInterceptions) -> None:
    """Intercept the connection that the broker has, and those it will have."""
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


def _cover(broker: Any) -> Any:
    """This process's interception of the broker's connection; None once released, or where a test connects nowhere."""
    interceptions, connection = interception_of(broker), broker._connection
    if interceptions is None or not isinstance(connection, AbstractConnection):
        return None
    return interceptions.cover(connection, aio_pika_connections)
