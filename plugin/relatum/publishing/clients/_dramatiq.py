"""dramatiq: a RabbitMQ broker, of which every thread has a connection of pika's. Imported only with such a broker.

The broker makes a thread's connection when that needs one, in each process anew, and puts it into its set of
connections before it is used. So that set is watched.
"""

from collections.abc import Iterable
from typing import Any, Final

from pika import BlockingConnection

from relatum.errors import ConfigurationError
from relatum.publishing._interception import ATTRIBUTE
from relatum.publishing._process_interceptions import ProcessInterceptions
from relatum.publishing.clients import _pika as pika_connections
from relatum.publishing.clients._attributes import Replacement, Wrapper
from relatum.publishing.clients._copies import is_copied
from relatum.publishing.clients._pika_properties import copied

NAME: Final = "dramatiq"
"""The client, as metrics name it."""

IS_OF_PROCESSES: Final = True
"""Whether what is intercepted is used in processes that are forked off later."""


class _Connections(set[Any]):
    """A broker's connections, each of which publishes through the interception once it is in."""

    def __init__(self, present: Iterable[Any], interceptions: ProcessInterceptions) -> None:
        super().__init__(present)
        self._interceptions = interceptions

    def add(self, connection: Any) -> None:
        super().add(connection)
        try:
            _cover(connection, self._interceptions)
        except BaseException:
            # Whatever ended it, a time limit of an actor's, too. The thread keeps it: open, it would publish as it is.
            connection.close()
            raise


class _Copying(Replacement):
    """Stands in for a channel's `basic_publish`: messages to the default exchange get a copy in a stream."""

    def __init__(self, channel: Any, interceptions: ProcessInterceptions, stream: str) -> None:
        self.__wrapped__ = channel.basic_publish
        self._interceptions = interceptions
        self._stream = stream
        self._is_lone = all(definition.from_body is None for definition in interceptions.options.definitions)

    def __call__(
        self, exchange: str, routing_key: str, body: bytes, properties: Any = None, mandatory: bool = False
    ) -> Any:
        if self._interceptions.active and is_copied(self._stream, exchange, routing_key, mandatory):
            properties = copied(properties, self._stream, is_lone=self._is_lone)
        return self.__wrapped__(exchange, routing_key, body, properties, mandatory)


def intercept(broker: Any, interceptions: ProcessInterceptions) -> None:
    """Publish through the interception on all connections that the broker has and will have."""
    if interceptions.options.copy_to is not None and broker.confirm_delivery:
        raise ConfigurationError(
            "copy_to= with confirm_delivery=True is refused: a message whose queue is gone would count as delivered, "
            "for its copy, and dramatiq would not declare the queue again"
        )
    given = broker.parameters
    interceptions.nodes = given if isinstance(given, list) else [given]
    for connection in list(broker.connections):
        _cover(connection, interceptions)
    broker.connections = _Connections(broker.connections, interceptions)
    setattr(broker, ATTRIBUTE, interceptions)


def may_wait(_broker: Any) -> bool:
    """Whether its thread may wait for a server: dramatiq always blocks."""
    return True


def release(broker: Any) -> None:
    """Put back what was there before: of the connections `ProcessInterceptions.release` does it."""
    if isinstance(broker.connections, _Connections):
        broker.connections = set(broker.connections)
    delattr(broker, ATTRIBUTE)


def _cover(connection: Any, interceptions: ProcessInterceptions) -> None:
    """Have a connection publish through this process's interception."""
    if not isinstance(connection, BlockingConnection) or not connection.is_open or interceptions.covers(connection):
        return
    # Threads share its counts: an addition is one step of the interpreter.
    pika_connections.intercept(connection, interceptions.current(connection))
    interceptions.at_release(connection, pika_connections.release)
    stream = interceptions.options.copy_to
    if stream is None:
        return

    def made(channel: Any) -> None:
        interceptions.put(channel, "basic_publish", _Copying(channel, interceptions, stream))

    interceptions.put(connection, "channel", Wrapper(connection.channel, interceptions, made))
    for channel in pika_connections.channels_of(connection):
        made(channel)
