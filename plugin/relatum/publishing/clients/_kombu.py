"""kombu: connections of its transport `pyamqp`, and pools of them. Imported only once somebody has such.

A kombu connection opens one of py-amqp when it needs one, and another after that was lost. So what opens it is watched,
and each channel of what it gives publishes through us. Clones and pools are made of a connection by itself, and are
covered with it; their pools are never those that an equal connection of somebody else's has in `kombu.pools`.
"""

from collections.abc import Callable, Iterable, Mapping
from queue import Empty
from typing import Any, Final

from amqp import spec
from amqp.connection import Connection as AMQPConnection
from kombu import pools
from kombu.connection import Connection, ConnectionPool
from kombu.pools import ProducerPool
from kombu.transport.pyamqp import Transport
from kombu.utils.collections import HashedSeq
from kombu.utils.functional import lazy

from relatum.errors import ConfigurationError
from relatum.publishing._interception import ATTRIBUTE
from relatum.publishing._process_interceptions import ProcessInterceptions
from relatum.publishing._receipt import Receipt
from relatum.publishing.clients._attributes import Replacement, Wrapper
from relatum.publishing.clients._kombu_publisher import Publisher, Returns

NAME: Final = "kombu"
"""The client, as metrics name it."""

IS_OF_PROCESSES: Final = True
"""Whether what is intercepted is used in processes that are forked off later."""


class _OwnPools(Replacement):
    """Stands in for a connection's `__eqhash__`, by which `kombu.pools` tells whose pool is whose."""

    def __init__(self, wrapped: Callable[[], Any], interceptions: ProcessInterceptions) -> None:
        self.__wrapped__ = wrapped
        self._name = pools_name(interceptions)

    def __call__(self) -> Any:
        sequence: Any = HashedSeq
        return sequence(*self.__wrapped__(), self._name)


def intercept(given: Any, interceptions: ProcessInterceptions) -> None:
    """Publish through the interception on all channels that a connection or a pool has and will have."""
    # A pool of producers takes their connections out of another.
    owner: Any = given.connections if isinstance(given, ProducerPool) else given
    if not isinstance(owner, Connection | ConnectionPool):
        raise ConfigurationError(
            f"{type(given).__qualname__} of kombu cannot be intercepted: give its connection, or a pool of connections "
            "or producers"
        )
    is_pool = isinstance(owner, ConnectionPool)
    source: Any = owner.connection if is_pool else owner
    transport = source.get_transport_cls()
    if not issubclass(transport, Transport):
        raise ConfigurationError(
            f"the transport {transport.__module__}.{transport.__qualname__} is not kombu's pyamqp: only RabbitMQ has "
            "streams, and only pyamqp can be intercepted"
        )
    (_cover_pool if is_pool else cover)(owner, interceptions)
    setattr(given, ATTRIBUTE, interceptions)


def may_wait(_given: Any) -> bool:
    """Whether its thread may wait for a server: kombu always blocks."""
    return True


def release(given: Any) -> None:
    """Put back what was there before: `ProcessInterceptions.release` does it, of all that was made of it."""
    delattr(given, ATTRIBUTE)


def with_receipt(
    producer: Any,
    exchange: Any,
    routing_key: str,
    body: Any,
    *,
    mandatory: bool,
    headers: Mapping[str, Any] | None = None,
    message_id: str | None = None,
    **kwargs: Any,
) -> Receipt:
    """Publish by a producer's own method, with a receipt."""
    publisher = vars(producer.channel).get("basic_publish")
    if not isinstance(publisher, Publisher) or not publisher.interceptions.active:
        raise ConfigurationError("this producer's connection is not intercepted: relatum.intercept(connection, …)")
    interception, _ = publisher.begin()
    with interception.asking(message_id, headers) as asking:
        producer.publish(
            body,
            routing_key or None,
            exchange=exchange,
            mandatory=mandatory,
            headers=asking.headers,
            message_id=asking.message_id,
            **kwargs,
        )
    return Receipt(asking.published(), interception.locator)


def cover(connection: Any, interceptions: ProcessInterceptions) -> None:
    """Have a connection, its clones and its pools publish through the interception."""
    if interceptions.covers(connection):
        return

    def wrapper(name: str, after: Callable[[Any], None]) -> None:
        interceptions.put(connection, name, Wrapper(getattr(connection, name), interceptions, after))

    wrapper("_establish_connection", lambda opened: _cover_opened(opened, interceptions))
    wrapper("clone", lambda clone: cover(clone, interceptions))
    wrapper("Pool", lambda pool: _cover_pool(pool, interceptions))
    interceptions.put(connection, "__eqhash__", _OwnPools(connection.__eqhash__, interceptions))
    if connection._connection is not None:
        _cover_opened(connection._connection, interceptions)


def pools_name(interceptions: ProcessInterceptions) -> str:
    """What the pools of its connections are known by in `kombu.pools`."""
    return f"relatum-{id(interceptions):x}"


def forget_pools(name: str) -> list[Any]:
    """Take the pools of that name out of `kombu.pools`."""
    # By the name alone: a publish that may be repeated writes its policy into the options, which the rest is made of.
    found: list[Any] = []
    for group in (pools.producers, pools.connections):
        keys = [key for key in list(group) if isinstance(key, HashedSeq) and key[-1] == name]
        found += [group.pop(key, None) for key in keys]
    return found


def close_pools(name: str) -> None:
    """Take them out likewise, and close what nobody uses there."""
    for pool in forget_pools(name):
        if isinstance(pool, ConnectionPool):
            for idle in _taken(pool):
                close: Any = pool.close_resource
                close(idle)


def _taken(pool: Any) -> Iterable[Any]:
    """The connections in a pool that nobody uses, taken out of it."""
    while True:
        try:
            resource = pool._resource.get_nowait()
        except Empty:
            return
        if not isinstance(resource, lazy):
            yield resource


def _cover_pool(pool: Any, interceptions: ProcessInterceptions) -> None:
    """Have each connection publish through the interception as it is taken out of the pool."""
    if interceptions.covers(pool):
        return

    def taken(connection: Any) -> None:
        cover(connection, interceptions)

    interceptions.put(pool, "prepare", Wrapper(pool.prepare, interceptions, taken))
    for connection in [*pool._resource.queue, *pool._dirty]:
        if isinstance(connection, Connection):
            taken(connection)


def _cover_opened(opened: Any, interceptions: ProcessInterceptions) -> None:
    """Have all channels of an open connection of py-amqp publish through the interception."""
    if not isinstance(opened, AMQPConnection) or interceptions.covers(opened):
        return

    def opened_channel(channel: Any) -> None:
        _cover_channel(channel, interceptions)

    interceptions.put(opened, "channel", Wrapper(opened.channel, interceptions, opened_channel))
    for number, channel in list((opened.channels or {}).items()):
        if number:  # 0 is the connection itself.
            opened_channel(channel)


def _cover_channel(channel: Any, interceptions: ProcessInterceptions) -> None:
    if interceptions.covers(channel):
        return
    told = channel._callbacks
    returns = Returns(told[spec.Basic.Return])
    told[spec.Basic.Return] = returns
    interceptions.at_release(channel, Returns.put_back)
    interceptions.put(channel, "basic_publish", Publisher(channel, channel.basic_publish, interceptions, returns))
