"""Routers: publish each message to the partition of its context or affinity set."""

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

from pika import BasicProperties
from pika.adapters.blocking_connection import BlockingChannel
from pika.exceptions import UnroutableError

from relatum.checks import checked_seconds, shown
from relatum.closing import Closing
from relatum.contexts._context_options import AffinityOptions, ContextOptions, RouterOptions, RouterStatistics
from relatum.contexts._placement_cache import NameLocks, Sent
from relatum.contexts._placements import PartitionRow, Placement
from relatum.contexts._router_core import Places, RouterCore, rejected, unsettled
from relatum.contexts._router_sets import NO_SET, Found, Predecessors, SetKeeper, set_request_of
from relatum.errors import ConfigurationError, PublishOutcomeUnknown
from relatum.processes import of_one_process
from relatum.publishing import OwnProperties, copy_with
from relatum.reading import Broker
from relatum.store.database import AnyDatabase
from relatum.superstreams import Target
from relatum.superstreams.connections import vhost_of

Options = TypeVar("Options", bound=RouterOptions)


@dataclass(frozen=True, slots=True)
class Sending:
    """The arguments of pika's `basic_publish`."""

    channel: Any
    body: bytes | str
    properties: BasicProperties | None
    routing_key: str
    mandatory: bool

    @property
    def headers(self) -> Mapping[str, Any] | None:
        return self.properties.headers if self.properties else None

    @property
    def message_id(self) -> str | None:
        return self.properties.message_id if self.properties else None

    def require_confirms(self) -> None:
        if not isinstance(self.channel, BlockingChannel):
            raise ConfigurationError(
                "messages of a context or an affinity set need a BlockingChannel of pika, not "
                f"{type(self.channel).__name__}; nothing was sent"
            )
        if not self.channel._delivery_confirmation:
            raise ConfigurationError(
                "messages of a context or an affinity set need confirms: channel.confirm_delivery(); nothing was sent"
            )

    def source(self) -> Any:
        return self.channel

    def vhost(self) -> str:
        return vhost_of(self.channel)

    def send_named(self, core: RouterCore, placement: Placement, headers: dict[str, Any]) -> Any:
        """Publish the message under a placement, with these headers; return the client's result."""
        own = (
            copy_with(self.properties, headers, self.properties.message_id)
            if self.properties
            else OwnProperties(headers=headers)
        )
        return self.channel.basic_publish(core.super_stream, placement.binding_key, self.body, own, mandatory=True)

    def send_unnamed(self, core: RouterCore, partition: PartitionRow) -> Any:
        """Publish a message without a name, unchanged; return the client's result."""
        try:
            result = self.channel.basic_publish(
                core.super_stream, partition.binding_key, self.body, self.properties, mandatory=self.mandatory
            )
        except UnroutableError:
            core.forget_layout()
            raise
        core.published_unnamed()
        return result


class RouterBase(Generic[Options]):
    """The part that blocking and asyncio routers share."""

    _options_class: Any

    def __init__(
        self,
        super_stream: str,
        database: "AnyDatabase",
        options: Options | None = None,
        *,
        broker: str | Broker | None = None,
    ) -> None:
        self._options: Options = self._options_class() if options is None else options
        if not isinstance(self._options, self._options_class):
            raise ConfigurationError(f"options= takes {self._options_class.__name__}, not {shown(options)}")
        self._core = RouterCore(super_stream, database, self._options, broker=broker)
        self._set_up()
        of_one_process(self, "a router")

    def _set_up(self) -> None:
        """Create what this kind of router has besides its core."""
        raise NotImplementedError

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._core.super_stream!r}>"

    @property
    def session(self) -> str:
        """The router's id in its messages' header `relatum_placed`: 16 hexadecimal digits."""
        return self._core.publications.name

    def statistics(self) -> RouterStatistics:
        """Return the counts since the router was opened, without input or output."""
        return self._core.statistics()


class Router(RouterBase[Options], Target, Closing):
    """Publishes messages with pika: by placement if they have a name, else by the balance rule. Thread-safe."""

    def _set_up(self) -> None:
        self._locks = NameLocks(threading.Lock)

    def open(self, source: Any = None) -> None:
        """Connect eagerly. Idempotent.

        Args:
            source: A URL, or a channel or connection of the client, if the router was given no URL.

        Raises:
            ConfigurationError: no broker was given, or the router is closed.
            SuperStreamNotFound: the broker has no such super stream.
            SuperStreamConflict: another header names its contexts or sets.
            BrokerUnavailable, DatabaseUnavailable, AccessRefused, SchemaMissing: a server cannot be used.
        """
        self._core.open(source)

    def check(self, timeout_s: float | None = None) -> None:
        """Wait until every message published so far is known to be in order.

        Args:
            timeout_s: Seconds for each name that has unchecked messages; None (default): the router's `timeout_s`.

        Raises:
            ContextMoving: a move did not end in time.
            DatabaseUnavailable, BrokerUnavailable: the order is not known yet; call `check` again.
        """
        if timeout_s is not None:
            checked_seconds("timeout_s", timeout_s)
        for name in self._core.publications.unchecked.names():
            self._settle_name(name, timeout_s)

    def close(self) -> None:
        """Call `check`, and close the connections.

        Raises:
            ContextMoving, DatabaseUnavailable, BrokerUnavailable: see `check`; the connections are closed.
        """
        try:
            if self._core.is_open:
                self.check()
        finally:
            self._core.close()

    def publish(
        self,
        channel: Any,
        body: bytes | str,
        properties: BasicProperties | None = None,
        *,
        routing_key: str = "",
        mandatory: bool = True,
    ) -> Any:
        """Publish a message to the partition of its context or affinity set.

        For a context, return once the message is known to be in order.

        Args:
            channel: A BlockingChannel of pika in confirm mode, intercepted or not. Messages without a context or set
                may use any channel of pika.
            body: The body.
            properties: The properties, whose headers name the context or set. They are not changed.
            routing_key: For messages without a context or set: a key to balance by, or "".
            mandatory: For messages without a context or set: whether unroutable messages are returned. Others always
                are.

        Returns:
            The result of `basic_publish`.

        Raises:
            ConfigurationError: the channel has no confirms or another virtual host, or the router is closed; nothing
                was sent.
            InvalidInput: the headers contradict each other, or the name is not text of 1 to 1,024 bytes; nothing was
                sent.
            PredecessorNotFound: the predecessor is not known, or not yet; nothing was sent.
            ContextMoving: a move did not end within `timeout_s`; nothing was sent; safe to repeat.
            TooManyOpenSets: nothing was sent; safe to repeat.
            DatabaseUnavailable, BrokerUnavailable: nothing was sent.
            SuperStreamNotFound, SuperStreamConflict: nothing was sent.
            PublishOutcomeUnknown: the message may be in its context or set. `settle(timeout_s)` finds out, and adopts
                the message if a move overtook it. Until then, this router publishes nothing else with that name.
            Exception: errors of `basic_publish`.
        """
        return self._publish(Sending(channel, body, properties, routing_key, mandatory))

    def _publish(self, sending: Sending) -> Any:
        raise NotImplementedError

    async def publish_async(self, channel: Any, message: Any, routing_key: str = "", **kwargs: Any) -> Any:
        """Refuse: this router publishes with pika.

        Raises:
            ConfigurationError: always; nothing was sent.
        """
        raise ConfigurationError(f"a {type(self).__name__} publishes with pika: use Async{type(self).__name__}")

    def _publish_locked(self, sending: Sending, name: str, *, stream: str | None = None) -> tuple[Placement, Any]:
        """Publish a message while the name's lock is held; return its placement and the client's result.

        - `stream`: Where to place the name if it has no placement yet.
        """
        sending.require_confirms()
        core, publications = self._core, self._core.publications
        if not core.is_open:
            core.open(sending.source())
        core.check_vhost(sending.vhost())
        placement = publications.at_hand(name) or publications.place(name, stream)
        sent = publications.next_of(placement)
        try:
            result = sending.send_named(core, placement, core.headers_for(sent, sending.headers))
        except PublishOutcomeUnknown as error:
            error.settle = partial(self._settle_unknown, error.settle, sent)
            raise
        with unsettled(name, partial(self._settle, name)):
            if not publications.counts_at_once(sent):
                publications.settle(name, must=False)
        core.published()
        return placement, result

    def _unnamed_partition(self, sending: Sending) -> PartitionRow:
        """Choose the partition of a message without a name, without waiting for the database."""
        core = self._core
        if not core.has_layout:
            self._core.open(sending.source(), with_database=False)
        core.check_vhost(sending.vhost())
        return core.unnamed(sending.routing_key)

    def _settle_name(self, name: str, timeout_s: float | None = None) -> None:
        with self._locks(name):
            self._core.publications.settle(name, timeout_s)

    def _settle(self, name: str, timeout_s: float | None = None, *, streams: tuple[str, ...] = ()) -> Places:
        """Wait until a confirmed message is valid; return no places, since its partition is known."""
        with unsettled(name, partial(self._settle, name)):
            self._settle_name(name, timeout_s)
        return ()

    def _settle_unknown(
        self, found: Any, sent: Sent, timeout_s: float | None = None, *, streams: tuple[str, ...] = ()
    ) -> Places:
        """Settle a message without a confirm: it must be in a stream, and be valid there."""
        places: Places = found(timeout_s, streams=streams or (sent.stream,))
        if self._core.publications.counts(sent):
            return places
        raise rejected(sent)


class ContextRouter(Router[ContextOptions]):
    """Publishes messages to the partitions their serialization contexts are in.

    A context manager; threads may share one.

        with relatum.ContextRouter("orders", DATABASE_URL) as router:
            router.publish(channel, body, BasicProperties(headers={"serialization_context": account}))

    When `publish` returns, the message is in its context's order, after all earlier messages, and every serial consumer
    sees it there exactly once, wherever the context moves, and even if this process was suspended in between. While
    messages are published, a thread queries the database, and each query validates the messages of a short time. If the
    last query is too old, the router queries after the broker's confirm, which costs a round trip to PostgreSQL.

    A router can take the exchange's place on an intercepted channel: `channel.basic_publish(router, "", body, ...)`.
    Messages of one context are published one at a time; threads with their own channels publish different contexts
    at the same time. A message without the header is published to any partition, without the database.

    Args:
        super_stream: The super stream's name.
        database: PostgreSQL's URL, or a `Database`, which the caller closes.
        options: A `ContextOptions`; None for the defaults.
        broker: The broker's URL, or a `Broker`. None (default): that of the channel first published on.

    Raises:
        ConfigurationError: an option or a URL is invalid.
        InvalidInput: the super stream's name is invalid.
    """

    _options_class = ContextOptions

    def _publish(self, sending: Sending) -> Any:
        name = self._core.name_of(sending.headers)
        if name is None:
            return sending.send_unnamed(self._core, self._unnamed_partition(sending))
        # Take the lock first: threads with the same name then publish in the order of their calls.
        with self._locks(name):
            return self._publish_locked(sending, name)[1]


class AffinityRouter(Router[AffinityOptions]):
    """Publishes all messages of an affinity set to the partition of its first message.

    A context manager; threads may share one, each with a channel of its own.

        with relatum.AffinityRouter("invoices", DATABASE_URL, AffinityOptions(balance="least_loaded")) as router:
            router.publish(channel, body, BasicProperties(headers={"affinity_set": "invoice 17"}))

    A header names the set. The balance rule chooses the partition of its first message, and the database stores it
    atomically, so that all publishers agree. Further messages use the cached partition. A message with the header
    `affinity_last: True` ends its set, and one with `affinity_predecessor` joins the set of another message. Messages
    with none of these headers are balanced by the rule and never wait for PostgreSQL.

    A router can take the exchange's place on an intercepted channel: `channel.basic_publish(router, "", body, ...)`.
    Arguments and errors are those of `ContextRouter`; `options` are `AffinityOptions`.
    """

    _options_class = AffinityOptions

    def _set_up(self) -> None:
        super()._set_up()
        self._predecessors = Predecessors(self._core, self._options.predecessors_max)
        self._sets = SetKeeper(self._core, self._settle_name)

    def _publish(self, sending: Sending) -> Any:
        core, sets, predecessors = self._core, self._sets, self._predecessors
        request = set_request_of(sending.headers, core.options.header)
        if request is NO_SET:
            return self._publish_of_none(sending)
        if not predecessors.knows(request):
            self._core.open(sending.source())
        place = predecessors.place_of(request)
        if place.name is None:
            return self._publish_of_none(sending, core.active(place.stream or ""))
        with self._locks(place.name):
            if sets.is_ending(place.name):
                sets.end_now(place.name)
            placement, result = self._publish_locked(sending, place.name, stream=place.stream)
            predecessors.published(Found(placement.name, placement.stream), sending.message_id)
            sets.used(placement.name, placement.epoch, is_last=request.is_last)
        return result

    def _publish_of_none(self, sending: Sending, partition: PartitionRow | None = None) -> Any:
        """Publish a message without a set to its predecessor's partition, or by the balance rule."""
        partition = partition or self._unnamed_partition(sending)
        result = sending.send_unnamed(self._core, partition)
        self._predecessors.published(Found(None, partition.stream), sending.message_id)
        return result

    def close(self) -> None:
        """Close the sets that have ended, call `check`, and close the connections.

        Sets that have not ended stay open.

        Raises:
            ContextMoving, DatabaseUnavailable, BrokerUnavailable: see `check`; the connections are closed.
        """
        try:
            self._sets.close()
        finally:
            super().close()
