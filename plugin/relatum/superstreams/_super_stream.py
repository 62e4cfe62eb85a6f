"""`SuperStream` publishes messages to the partitions of their keys, `AffinityHandle` a set of them to one partition."""

import json
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Final, Self, TypeAlias
from weakref import WeakKeyDictionary

from pika.adapters.blocking_connection import BlockingChannel
from pika.channel import Channel

from relatum.common.checks import checked_text, checked_weights, shown
from relatum.common.closing import Closing
from relatum.common.processes import after_fork
from relatum.common.waiting import Threads, in_thread
from relatum.errors import ConfigurationError, InvalidInput
from relatum.keys import InvalidValue, KeyType, canonical
from relatum.reading import Broker, BrokerAddress
from relatum.superstreams.administration import describe_super_stream
from relatum.superstreams.connections import address_of
from relatum.superstreams.layout import (
    Balance,
    BalanceName,
    Candidate,
    Layout,
    Partition,
    balance_of,
    checked_stream_name,
)
from relatum.superstreams.targets import Outgoing, Target, aiormq_connection

RouteBy: TypeAlias = str | Callable[[Outgoing], str | bytes] | None
"""The source of a message's key: a header's name, a function, or None for the message's routing key."""


class SuperStream(Target):
    """A super stream to publish to. Each message goes to the partition of its key, as with RabbitMQ's stream clients.

    Use it in place of an exchange: `channel.basic_publish(orders, "", body, properties)` on an intercepted pika
    channel, or `relatum.publish(channel, orders, "", body, properties)`. On any pika channel, call
    `orders.publish(channel, body, properties)`. With aio-pika, use `orders.exchange(channel)` as the exchange.

    Channels, connections and threads can share one object.

    Args:
        name: The super stream's name.
        route_by: The source of a message's key: the name of a header, whose value is used as text; or a function of an
            `Outgoing`. None (default): the key is the message's routing key.
        partitions: A `Layout`, or the number of partitions if the streams are `NAME-0`, `NAME-1` and so on. None
            (default): Relatum queries the broker at the first publish, over a separate connection.
        broker: The broker to query for the partitions: its URL, or a `Broker`. None (default): the publishing
            connection's broker. If the stream protocol does not answer, see `describe_super_stream`.

    Raises:
        ConfigurationError, InvalidInput: An argument is invalid.
    """

    def __init__(
        self,
        name: str,
        *,
        route_by: RouteBy = None,
        partitions: int | Layout | None = None,
        broker: str | Broker | None = None,
    ) -> None:
        if not (route_by is None or callable(route_by) or (isinstance(route_by, str) and route_by)):
            raise ConfigurationError(f"route_by= takes the name of a header, or a function, not {shown(route_by)}")
        checked_stream_name(name)
        if isinstance(route_by, str):
            checked_text("route_by", route_by)
        if broker is not None:
            BrokerAddress.of(broker)
        if isinstance(partitions, Layout) and partitions.super_stream != name:
            raise ConfigurationError(f"partitions= is the layout of {partitions.super_stream!r}, not of {name!r}")
        self.name = name
        self.route_by = route_by
        self._broker = broker
        self._fixed_layout = partitions if isinstance(partitions, Layout | None) else Layout.numbered(name, partitions)
        self._rules: dict[BalanceName, Balance] = {}
        self._open_handles: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._layout_lock = threading.Lock()
        self._threads = Threads(1, "relatum-layout")
        self._layouts: tuple[dict[tuple[str, int | None, str], Layout], WeakKeyDictionary[Any, Layout]]
        """The known layouts, by broker and by connection."""
        self.refresh()
        after_fork(self, SuperStream._renew)

    def _renew(self) -> None:
        """Replace locks and rules in a forked child. Layouts and counts of open handles are kept."""
        self._lock, self._layout_lock = threading.Lock(), threading.Lock()
        self._rules = {}

    def __repr__(self) -> str:
        return f"SuperStream({self.name!r})"

    def layout(self, broker: Any) -> Layout:
        """Return the partitions on a broker, which is queried once for all connections.

        Args:
            broker: A URL, a pika connection or channel, or an aio-pika connection. This call blocks: if the thread of
                an aio-pika or callback connection must not wait, call it with the URL or in another thread before
                you publish.

        Raises:
            SuperStreamNotFound, SuperStreamConflict: See `describe_super_stream`.
            BrokerUnavailable, AccessRefused: The broker could not be queried; safe to retry.
        """
        connection = broker.connection if isinstance(broker, BlockingChannel | Channel) else broker
        known = self._known(connection)
        if known is not None:
            return known
        source = self._broker or connection
        address = address_of(source)
        key = address.host, address.amqp_port or address.stream_port, address.vhost
        # One thread queries while the others wait, so that threads that start together cause one query. Handles have
        # another lock: they take it in event loops, too.
        with self._layout_lock:
            by_broker, by_connection = self._layouts
            if key not in by_broker:
                by_broker[key] = describe_super_stream(source, self.name)
            with suppress(TypeError):
                by_connection[connection] = by_broker[key]
            return by_broker[key]

    def _known(self, connection: Any) -> Layout | None:
        try:
            return self._layouts[1].get(connection) if self._fixed_layout is None else self._fixed_layout
        except TypeError:
            return None  # A URL does not support weak references.

    async def layout_async(self, channel: Any) -> Layout:
        """Return the partitions on the broker of an aio-pika channel. A thread queries it, so the loop does not block.

        Raises: As `layout`.
        """
        connection = await aiormq_connection(channel)
        known = self._known(connection)
        return known if known is not None else await in_thread(self._threads, self.layout, connection)

    def refresh(self) -> None:
        """Query the broker again at the next publish, unless `partitions` was given. Call this if they change."""
        # A query that is running stores its result, which may be outdated, in the former dictionaries.
        self._layouts = {}, WeakKeyDictionary()

    def affinity(
        self,
        balance: BalanceName | Balance = "round_robin",
        *,
        name: str | None = None,
        weights: Mapping[str, float] | None = None,
    ) -> "AffinityHandle":
        """Return a handle of an affinity set, whose messages stay in one partition. No database is used.

        Args:
            balance: The rule that chooses the partition of the first message: "round_robin" (default), "least_loaded"
                (fewest open handles of this `SuperStream`), "weighted", "hash" (of `name`), or a function.
            name: The name that "hash" or a function uses. None (default): no name.
            weights: Weights by stream, for "weighted". None (default): all 1. A missing stream has weight 1.

        Raises:
            ConfigurationError, InvalidInput: An argument is invalid.
        """
        return AffinityHandle(self, balance=balance, name=name, weights=weights)

    def key_of(self, message: Outgoing, routing_key: str = "") -> str | bytes:
        """Return the key of a message.

        Raises:
            InvalidInput: The message has no valid key.
        """
        if isinstance(self.route_by, str):
            return _header_key(self.route_by, message.headers)
        key: Any = routing_key if self.route_by is None else self.route_by(message)
        if not isinstance(key, str | bytes):
            subject = "The routing key must be" if self.route_by is None else "route_by must return"
            raise InvalidInput(f"{subject} text or bytes, not {type(key).__name__}; nothing was sent.")
        return key

    def partition_of(self, broker: Any, key: str | bytes) -> Partition:
        """Return the partition of a key.

        Args:
            broker: As for `layout`.
            key: The key; text is encoded as UTF-8.

        Raises: As `layout`.
        """
        return self.layout(broker).route(key)

    def destination(self, channel: Any, body: bytes | str, properties: Any, routing_key: str) -> tuple[str, str]:
        """Return the exchange and the binding key that route a pika message to its partition."""
        headers = getattr(properties, "headers", None) or {}
        message = Outgoing(body.encode() if isinstance(body, str) else body, headers, properties)
        return self.name, self.partition_of(channel, self.key_of(message, routing_key)).binding_key

    async def destination_async(self, channel: Any, message: Any, routing_key: str) -> tuple[str, str]:
        """Return the exchange and the binding key that route an aio-pika message to its partition."""
        key = self.key_of(Outgoing(message.body, message.headers or {}, message), routing_key)
        return self.name, (await self.layout_async(channel)).route(key).binding_key


def _header_key(name: str, headers: Mapping[str, Any]) -> str:
    value = headers.get(name)
    if type(value) is str:
        return value
    if value is None:
        raise InvalidInput(f"The message has no header {name!r}, which route_by= names; nothing was sent.")
    try:
        return canonical(value, KeyType.TEXT)
    except InvalidValue as error:
        raise InvalidInput(f"Header {name!r} cannot be used as a key ({error.reason}); nothing was sent.") from error


_TOKEN_VERSION: Final = 1
"""The version of tokens, which is their first item."""


class AffinityHandle(Target, Closing):
    """A handle of an affinity set: all messages published with it go to the partition of the first message.

    `SuperStream.affinity` returns it. Only this object knows the partition: no database and no header contains it.
    Another process can continue the set with its `token`. Thread-safe, but pika's channels are not: each thread needs
    its own channel.

    Args:
        super_stream: The super stream.
        balance, name, weights: As for `SuperStream.affinity`.
        partition: The set's partition. None (default): `balance` chooses it at the first publish.

    Raises:
        ConfigurationError, InvalidInput: An argument is invalid.
    """

    def __init__(
        self,
        super_stream: SuperStream,
        *,
        balance: BalanceName | Balance = "round_robin",
        name: str | None = None,
        weights: Mapping[str, float] | None = None,
        partition: Partition | None = None,
    ) -> None:
        if not isinstance(super_stream, SuperStream):
            raise InvalidInput(f"super_stream= takes a SuperStream, not {shown(super_stream)}")
        if not isinstance(partition, Partition | None):
            raise InvalidInput(f"partition= takes a Partition, or None, not {shown(partition)}")
        balance_of(balance)  # Raises now, not at the first message.
        self._super_stream = super_stream
        self._balance: BalanceName | Balance = balance
        self._name = name
        if name is not None:
            checked_text("name", name)
        self._weights = {} if weights is None else checked_weights("weights", weights)
        self._partition = partition
        self._counted: Partition | None = None
        self._is_closed = False

    def __repr__(self) -> str:
        where = "not placed yet" if self._partition is None else self._partition.stream
        return f"<AffinityHandle of {self._super_stream.name}: {where}>"

    @property
    def partition(self) -> Partition | None:
        """The partition of the set's messages; None before the first message."""
        return self._partition

    @property
    def token(self) -> str:
        """A text with which another process can continue the set; see `AffinityHandle.from_token`.

        Raises:
            InvalidInput: No message was published yet, so the set has no partition.
        """
        partition = self._partition
        if partition is None:
            raise InvalidInput("this affinity set has no partition yet: publish its first message, then use the token")
        items = [_TOKEN_VERSION, self._super_stream.name, partition.place, partition.stream, partition.binding_key]
        return json.dumps(items, ensure_ascii=False, separators=(",", ":"))

    @classmethod
    def from_token(cls, token: str) -> Self:
        """Return a handle that continues the set of a token. No I/O.

        If the partition was unbound in the meantime, publishing a mandatory message raises `PublishUnroutable`.

        Raises:
            InvalidInput: The token is invalid.
        """
        try:
            version, super_stream, place, stream, binding_key = json.loads(token)
        except (TypeError, ValueError):
            raise InvalidInput("this is not a token of an affinity handle: give the value of its `token`") from None
        texts = (super_stream, stream, binding_key)
        if version != _TOKEN_VERSION or not isinstance(place, int) or not all(isinstance(each, str) for each in texts):
            raise InvalidInput("this is not a token of an affinity handle, or a later release of Relatum wrote it")
        return cls(SuperStream(super_stream), partition=Partition(place, stream, binding_key))

    def destination(self, channel: Any, body: bytes | str, properties: Any, routing_key: str) -> tuple[str, str]:
        """Return the exchange and the routing key of the set's messages; the first call places the set."""
        partition = self._partition or self._place(self._super_stream.layout(channel))
        return self._super_stream.name, partition.binding_key

    async def destination_async(self, channel: Any, message: Any, routing_key: str) -> tuple[str, str]:
        """Return the exchange and the routing key of the set's messages; the first call places the set."""
        partition = self._partition or self._place(await self._super_stream.layout_async(channel))
        return self._super_stream.name, partition.binding_key

    def close(self) -> None:
        """Stop counting this handle as open for "least_loaded". You can still publish with it. Idempotent."""
        owner = self._super_stream
        with owner._lock:
            self._is_closed = True
            counted, self._counted = self._counted, None
            if counted is not None:
                owner._open_handles[counted.stream] -= 1

    def _place(self, layout: Layout) -> Partition:
        """Choose the partition, once. All handles of a super stream share its rules and counts."""
        owner, weights = self._super_stream, self._weights
        with owner._lock:
            if self._partition is None:
                # A caller may pass another function for each set: these are not kept.
                rule = balance_of(self._balance)
                if isinstance(self._balance, str):
                    rule = owner._rules.setdefault(self._balance, rule)
                candidates = [
                    Candidate(each.stream, weights.get(each.stream, 1.0), owner._open_handles[each.stream])
                    for each in layout
                ]
                self._partition = layout.partitions[rule(self._name, candidates)]
                if not self._is_closed:
                    self._counted = self._partition
                    owner._open_handles[self._partition.stream] += 1
            return self._partition
