"""FastStream: a RabbitMQ broker, which has one connection of aio-pika's at a time. Imported only with such a broker.

The broker connects when it is started, and again when it is started once more. So what connects is watched, and each
connection is intercepted before anybody publishes on it.
"""

import copy
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

from aio_pika.abc import AbstractConnection, AbstractMessage

from relatum.errors import ConfigurationError, RelatumError
from relatum.publishing._interception import ATTRIBUTE, interception_of
from relatum.publishing._process_interceptions import ProcessInterceptions
from relatum.publishing._receipt import AsyncReceipt
from relatum.publishing.clients import _aio_pika as aio_pika_connections
from relatum.publishing.clients._attributes import Replacement

NAME: Final = "faststream"
"""The client, as metrics name it."""

IS_OF_PROCESSES: Final = True
"""Whether what is intercepted is used in processes that are forked off later."""


class _Connect(Replacement):
    """Stands in for a broker's `_connect`."""

    def __init__(self, wrapped: Callable[[], Awaitable[Any]], interceptions: ProcessInterceptions) -> None:
        self.__wrapped__ = wrapped
        self._interceptions = interceptions

    async def __call__(self) -> Any:
        connection = await self.__wrapped__()
        try:
            if self._interceptions.active:
                _cover(connection, self._interceptions)
        except RelatumError:
            await connection.close()
            raise
        return connection


def intercept(broker: Any, interceptions: ProcessInterceptions) -> None:
    """Publish through the interception on the connection that the broker has, and on those it will have."""
    if interceptions.options.copy_to is not None:
        raise ConfigurationError(
            "copy_to= is for Celery and dramatiq: FastStream publishes as mandatory, and a message whose queue "
            "is gone would count as delivered, for its copy. `relatum tap` the exchange"
        )
    _cover(broker._connection, interceptions)
    interceptions.put(broker, "_connect", _Connect(broker._connect, interceptions))
    setattr(broker, ATTRIBUTE, interceptions)


def may_wait(_broker: Any) -> bool:
    """Whether its thread may wait for a server: never, it runs an event loop."""
    return False


def release(broker: Any) -> None:
    """Put back what was there before: `ProcessInterceptions.release` does it."""
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
    interceptions = interception_of(broker)
    if interceptions is None:
        raise ConfigurationError("this broker is not intercepted: relatum.intercept(broker, …)")
    if not isinstance(broker._connection, AbstractConnection):
        raise ConfigurationError("a receipt is of a message on RabbitMQ: await broker.start() first")
    interception = interceptions.current(broker._connection, may_wait=False)
    await interception.agreed()
    is_made = isinstance(message, AbstractMessage)
    if is_made:
        headers, message_id = message.headers, message.message_id
    with interception.asking(message_id, headers) as asking:
        given: dict[str, Any] = {"headers": asking.headers, "message_id": asking.message_id}
        if is_made:
            # FastStream sends it as it is.
            message = copy.copy(message)
            message.headers, message.message_id = asking.headers, asking.message_id
        if routing_key:
            given["routing_key" if isinstance(routing_key, str) else "queue"] = routing_key
        result = await broker.publish(message, mandatory=mandatory, **given, **kwargs)
    asking.came_back = aio_pika_connections.came_back(result)
    return AsyncReceipt(asking.published(), interception.locator)


def _cover(connection: Any, interceptions: ProcessInterceptions) -> None:
    """Have a connection publish through this process's interception; FastStream's own tests have none."""
    if isinstance(connection, AbstractConnection) and not interceptions.covers(connection):
        aio_pika_connections.intercept(connection, interceptions.current(connection, may_wait=False))
        interceptions.at_release(connection, _uncover)


def _uncover(connection: Any) -> None:
    if getattr(connection, ATTRIBUTE, None) is not None:
        aio_pika_connections.release(connection)
