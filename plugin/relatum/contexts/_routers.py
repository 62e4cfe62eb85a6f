"""Routers: each message is published to the partition where its context, or affinity set, is."""

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
from relatum.contexts._predecessors import NO_SET, Found, Predecessors, set_request_of
from relatum.contexts._router_core import Places, RouterCore, rejected, unsettled
from relatum.contexts._set_keeper import SetKeeper
from relatum.errors import ConfigurationError, PublishOutcomeUnknown, RelatumError
from relatum.processes import of_one_process
from relatum.publishing import OwnProperties, copy_with
from relatum.reading import Broker
from relatum.store.database import AnyDatabase
from relatum.superstreams import Target
from relatum.superstreams.connections import vhost_of

Options = TypeVar("Options", bound=RouterOptions)


@dataclass(frozen=True, slots=True)
class Sending:
    """A message, as `basic_publish` of pika's channel takes it."""

    channel: Any
    body: bytes | str
    properties: BasicProperties | None
    routing_key: str
    mandatory: bool

    @property
    def headers(self) -> Mapping[str, Any] | None:
        """Its headers; None for none."""
        return self.properties.headers if self.properties else None

    @property
    def message_id(self) -> str | None:
        """Its `message_id`; None for none."""
        return self.properties.message_id if self.properties else None

    def require_confirms(self) -> None:
        """Refuse a channel that does not tell when the broker has a message."""
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
        """What names the broker."""
        return self.channel

    def vhost(self) -> str:
        """The virtual host it would be published in."""
        return vhost_of(self.channel)

    def send_named(self, core: RouterCore, placement: Placement, headers: dict[str, Any]) -> Any:
        """Publish it under a placement, with these headers; gives what the client gives."""
        own = (
            copy_with(self.properties, headers, self.properties.message_id)
            if self.properties
            else OwnProperties(headers=headers)
        )
        return self.channel.basic_publish(core.super_stream, placement.binding_key, self.body, own, mandatory=True)

    def send_unnamed(self, core: RouterCore, partition: PartitionRow) -> Any:
        """Publish it as it is, under no name; gives what the client gives."""
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
    """What routers for threads and for tasks do alike."""

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
        """Make what a router of its kind has beside its core."""
        raise NotImplementedError

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._core.super_stream!r}>"

    @property
    def session(self) -> str:
        """What this router's messages name it by in their header `relatum_placed`: 16 hexadecimal digits."""
        return self._core.publications.name

    def statistics(self) -> RouterStatistics:
        """What was published, and what is remembered. It asks nobody."""
        return self._core.statistics()


class Router(RouterBase[Options], Target, Closing):
    """Publishes messages by pika with a name where that is placed, others by a rule. Threads may share it."""

    def _set_up(self) -> None:
        self._locks = NameLocks(threading.Lock)

    def open(self, source: Any = None) -> None:
        """Connect eagerly. Idempotent.

        Args:
            source: A URL, or a channel or connection of the client's, where the router was given no URL.

        Raises:
            ConfigurationError: it knows no broker, or is closed.
            SuperStreamNotFound: the broker has no such super stream.
            SuperStreamConflict: its contexts, or sets, are named by another header.
            BrokerUnavailable, DatabaseUnavailable, AccessRefused, SchemaMissing: one of the servers cannot be used.
        """
        self._core.open(source)

    def check(self, timeout_s: float | None = None) -> None:
        """Wait until every message published so far is known to be in its order.

        Args:
            timeout_s: Seconds for each name with messages that are not known to be; None (default): the router's.

        Raises:
            ContextMoving: a move did not end in time.
            DatabaseUnavailable, BrokerUnavailable: it is not known yet; call it again.
        """
        if timeout_s is not None:
            checked_seconds("timeout_s", timeout_s)
        for name in self._core.publications.unchecked.names():
            self._settle_name(name, timeout_s)

    def close(self) -> None:
        """Wait as `check` does, and give the connections back.

        Raises:
            ContextMoving, DatabaseUnavailable, BrokerUnavailable: as `check`; the connections are given back.
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
        """Publish a message where its context, or affinity set, is; of a context, return when it is in its order.

        Args:
            channel: A BlockingChannel of pika in confirm mode, intercepted or not. For messages of no context or set
                any channel of pika.
            body: The body.
            properties: The properties; the headers that name the context, or set, are among their headers. Not changed.
            routing_key: Of messages of none: their key, if any, to balance by. None is sent by it.
            mandatory: Of messages of none: whether one that nothing is bound for comes back. The others always do.

        Returns:
            What `basic_publish` returned.

        Raises:
            ConfigurationError: the channel has no confirms, or is in another virtual host, or the router is closed;
                nothing was sent.
            InvalidInput: the headers make no sense, or the name is no text of 1 to 1,024 bytes; nothing was sent.
            PredecessorNotFound: the message that was named is not known, or not yet; nothing was sent.
            ContextMoving: a move did not end within `timeout_s`; nothing was sent, and it may be repeated.
            TooManyOpenSets: nothing was sent; it may be repeated.
            DatabaseUnavailable, BrokerUnavailable: nothing was sent.
            SuperStreamNotFound, SuperStreamConflict: nothing was sent.
            PublishOutcomeUnknown: it may be in its context's order, or in its set. `settle(timeout_s)` finds out, and
                helps it in where a move came between. Nothing else of the name is published by this router before.
            Exception: what `basic_publish` raises.
        """
        return self._publish(Sending(channel, body, properties, routing_key, mandatory))

    def _publish(self, sending: Sending) -> Any:
        raise NotImplementedError

    async def publish_async(self, channel: Any, message: Any, routing_key: str = "", **kwargs: Any) -> Any:
        """Nothing is published with aio-pika here.

        Raises:
            ConfigurationError: always.
        """
        raise ConfigurationError(f"a {type(self).__name__} publishes with pika: use Async{type(self).__name__}")

    # --- for routers of contexts and of sets ----------------------------------------------------------------------

    def _publish_locked(self, sending: Sending, name: str, *, stream: str | None = None) -> tuple[Placement, Any]:
        """Publish a message of a name whose lock is held; gives its placement, and what the client gave.

        - `stream`: Where to place the name, if it is not placed yet.
        """
        sending.require_confirms()
        core, publications = self._core, self._core.publications
        if not core.is_open:
            core.open(sending.source())
        core.check_vhost(sending.vhost())
        known = publications.at_hand(name) or publications.place(name, stream)
        sent = publications.next_of(known)
        try:
            result = sending.send_named(core, known.placement, core.headers_for(sent, sending.headers))
        except PublishOutcomeUnknown as error:
            error.settle = partial(self._settle_unknown, error.settle, sent)
            raise
        try:
            if not publications.counts_at_once(sent):
                publications.settle(name, must=False)
        except RelatumError as error:
            raise unsettled(name, error, partial(self._settle, name)) from error
        core.published()
        return known.placement, result

    def _unnamed_partition(self, sending: Sending) -> PartitionRow:
        """Where a message of no name goes, by the rule; it never waits for the database."""
        core = self._core
        if not core.has_layout:
            self._core.open(sending.source(), with_database=False)
        core.check_vhost(sending.vhost())
        return core.unnamed(sending.routing_key)

    def _settle_name(self, name: str, timeout_s: float | None = None) -> None:
        with self._locks(name) as lock, lock:
            self._core.publications.settle(name, timeout_s)

    def _settle(self, name: str, timeout_s: float | None = None, *, streams: tuple[str, ...] = ()) -> Places:
        """Wait until a message counts that the broker has; gives no places, the name's partition has it."""
        try:
            self._settle_name(name, timeout_s)
        except RelatumError as error:
            raise unsettled(name, error, partial(self._settle, name)) from error
        return ()

    def _settle_unknown(
        self, found: Any, sent: Sent, timeout_s: float | None = None, *, streams: tuple[str, ...] = ()
    ) -> Places:
        """Find out about a message whose confirm did not come: it must be in a stream, and count there."""
        places: Places = found(timeout_s, streams=streams or (sent.stream,))
        if self._core.publications.counts(sent):
            return places
        raise rejected(sent)


class ContextRouter(Router[ContextOptions]):
    """Publishes messages to the partitions their serialization contexts are in.

    A context manager; threads may share one.

        with relatum.ContextRouter("orders", DATABASE_URL) as router:
            router.publish(channel, body, BasicProperties(headers={"serialization_context": account}))

    When `publish` returns, the message is in its context's order, behind all that was published before it, and every
    serial consumer sees it there once, wherever the context is moved, and however long this process slept in between.
    While it publishes, a thread looks at the database, and each look serves the messages of a moment. Without one so
    young, the router looks after the broker's confirm, which costs a round trip to PostgreSQL.

    It can be given as the exchange on an intercepted channel: `channel.basic_publish(router, "", body, properties)`.
    One message of a context is under way at a time; threads with channels of their own publish different contexts
    side by side. A message without the header is published to any partition and waits for no database.

    Args:
        super_stream: The super stream's name.
        database: PostgreSQL's URL, or a `Database`, which stays the caller's.
        options: How it places and checks.
        broker: The broker's URL, or a `Broker`. None (default): that of the channel first published on.

    Raises:
        ConfigurationError: an option, or a URL, cannot be one.
        InvalidInput: the super stream's name cannot be one.
    """

    _options_class = ContextOptions

    def _publish(self, sending: Sending) -> Any:
        name = self._core.name_of(sending.headers)
        if name is None:
            return sending.send_unnamed(self._core, self._unnamed_partition(sending))
        # Nothing comes before: threads of a name queue in the order they called.
        with self._locks(name) as lock, lock:
            return self._publish_locked(sending, name)[1]


class AffinityRouter(Router[AffinityOptions]):
    """Publishes all messages of an affinity set to the partition where its first one went.

    A context manager; threads may share one, each with a channel of its own.

        with relatum.AffinityRouter("invoices", DATABASE_URL, AffinityOptions(balance="least_loaded")) as router:
            router.publish(channel, body, BasicProperties(headers={"affinity_set": "invoice 17"}))

    The set is named in a header. The partition of its first message is chosen by the rule and stored atomically, so
    that all publishers agree; it is cached, so that further messages go there without asking. A message
    with the header `affinity_last: True` ends its set, one with `affinity_predecessor` joins that of another message,
    and those with neither are balanced by the rule and never wait for PostgreSQL.

    It can be given as the exchange on an intercepted channel: `channel.basic_publish(router, "", body, properties)`.
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
        with self._locks(place.name) as lock, lock:
            if sets.is_ending(place.name):
                core.publications.settle(place.name)
                sets.end_now(place.name)
            placement, result = self._publish_locked(sending, place.name, stream=place.stream)
            predecessors.published(Found(placement.name, placement.stream), sending.message_id)
            sets.used(placement.name, placement.epoch, is_last=request.is_last)
        return result

    def _publish_of_none(self, sending: Sending, partition: PartitionRow | None = None) -> Any:
        """Publish a message of no set, where its predecessor went or by the rule."""
        partition = partition or self._unnamed_partition(sending)
        result = sending.send_unnamed(self._core, partition)
        self._predecessors.published(Found(None, partition.stream), sending.message_id)
        return result

    def close(self) -> None:
        """Close the sets that have ended, wait as `check` does, and give the connections back.

        Sets that have not ended stay open.

        Raises:
            ContextMoving, DatabaseUnavailable, BrokerUnavailable: as `check`; the connections are given back.
        """
        try:
            self._sets.close()
        finally:
            super().close()
