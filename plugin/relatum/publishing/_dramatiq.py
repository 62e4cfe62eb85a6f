"""dramatiq: intercepts a RabbitMQ broker object, which has a pika connection for each thread.

The broker object connects when a thread first publishes, and adds the connection to its public set before using it. So
that set is replaced. Middleware does not suffice: dramatiq suppresses its errors.
"""

from collections.abc import Iterable
from typing import Any, Final

from pika import BlockingConnection

from relatum.errors import ConfigurationError
from relatum.publishing import _pika as pika_connections
from relatum.publishing._interception import ATTRIBUTE, ProcessInterceptions

NAME: Final = "dramatiq"
"""The client's name in metrics."""


class _Connections(set[Any]):
    """A broker's connections, each intercepted when it is added."""

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


def intercept(broker: Any, interceptions: ProcessInterceptions) -> None:
    """Intercept all present and future connections of the broker object."""
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


def release(broker: Any) -> None:
    """Restore the set. `ProcessInterceptions.release` releases the connections."""
    if isinstance(broker.connections, _Connections):
        broker.connections = set(broker.connections)
    delattr(broker, ATTRIBUTE)


def _cover(connection: Any, interceptions: ProcessInterceptions) -> None:
    if isinstance(connection, BlockingConnection) and connection.is_open:
        interceptions.cover(connection, pika_connections)
