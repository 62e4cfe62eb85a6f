"""`AffinityRouter` and `AsyncAffinityRouter`: messages of one affinity set go where its first one went."""

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import sqlalchemy as sa
from pika import BasicProperties

from relatum.checks import as_options, checked_count, checked_seconds
from relatum.contexts.affinity._affinity_headers import NO_WISH, wish_of
from relatum.contexts.affinity._balancing import MessageBalance, SetBalance
from relatum.contexts.affinity._set_keeping import Keeping
from relatum.contexts.placement._async_placement_router import AsyncRouter
from relatum.contexts.placement._model import PartitionRow
from relatum.contexts.placement._placement_router import Router, require_confirms
from relatum.contexts.placement._publication_requests import WhenAway
from relatum.contexts.placement._router_options import RouterOptions
from relatum.contexts.serial.moving._abandoned import attend_for
from relatum.headers import AFFINITY_HEADER
from relatum.limits import INTEGER_MAX
from relatum.superstreams import Balance, BalanceName, channel_of

if TYPE_CHECKING:
    from aio_pika.abc import AbstractChannel, AbstractExchange, AbstractMessage

CHECK_S: Final = 0.02
"""Seconds for which a look at the database serves by default; see `AffinityRouter`."""

KNOWN_SETS_MAX: Final = 100_000
"""Sets a router remembers by default: some 50 MB of memory, where that many are open."""

PREDECESSORS_MAX: Final = 65_536
"""Messages a router remembers as predecessors by default."""


class AffinityRouter(Router):
    """Publishes all messages of an affinity set to the partition where its first one went.

    A context manager; threads may share one, each with a channel of its own.

        with relatum.AffinityRouter("invoices", DATABASE_URL, balance="least_loaded") as router:
            router.publish(channel, body, BasicProperties(headers={"affinity_set": "invoice 17"}))

    The set is named in a header. The partition of its first message is chosen by the rule and stored atomically, so
    that all who publish to it agree; it is remembered, so that further messages go there without asking. A message with
    the header `affinity_last: True` ends its set, one with `affinity_predecessor` joins that of another message, and
    those with neither are balanced by the rule and never wait for PostgreSQL.

    It can be given as the exchange on an intercepted channel: `channel.basic_publish(router, "", body, properties)`.

    Args:
        super_stream: The super stream's name.
        database: PostgreSQL's URL, or an engine, which stays the caller's.
        balance: Where a set is placed by its first message: "round_robin" (default), "least_loaded" (fewest open
            sets), "weighted", "hash" (of its name), or a function.
        broker: The broker's URL. None (default): that of the channel first published on.
        stream_url: Where the stream protocol answers, if not 120 ports below AMQP's.
        header: The header that names a message's set. All who use the super stream must agree.
        weights: For "weighted": weights by stream; those left out have 1. None (default): those in the database.
        check_s: Seconds for which one look at the database serves, up to 0.04 (default: 0.02): how long it may be
            unknown here that a set was closed or moved. 0: each message is checked before `publish` returns.
        timeout_s: Seconds to wait for a move to end, and for what else is waited for. 0: not at all.
        when_database_away: "known" (default): messages of known sets go on, a first message is `DatabaseUnavailable`.
            "wait": all wait up to `timeout_s`. "fail": all are `DatabaseUnavailable`.
        idle_s: Seconds without a message after which sets are closed, whoever opened them. It is the super stream's:
            the first router that names it sets it, one that names another is refused. None (default): as it is stored,
            never where nobody named it.
        open_sets_max: Sets of the super stream that may be open. None (default): any number. With a number, sets are
            placed one after the other by all routers.
        known_sets_max: Sets whose partitions are remembered; others are asked for again when they are used.
        predecessors_max: Messages remembered as predecessors, by their `message_id`.

    Raises:
        ConfigurationError: an option cannot be one.
        InvalidInput: the super stream's name cannot be one.
    """

    def __init__(
        self,
        super_stream: str,
        database: "str | sa.URL | sa.Engine",
        *,
        balance: BalanceName | Balance = "round_robin",
        broker: str | None = None,
        stream_url: str | None = None,
        header: str = AFFINITY_HEADER,
        weights: Mapping[str, float] | None = None,
        check_s: float = CHECK_S,
        timeout_s: float = 10.0,
        when_database_away: WhenAway = "known",
        idle_s: float | None = None,
        open_sets_max: int | None = None,
        known_sets_max: int = KNOWN_SETS_MAX,
        predecessors_max: int = PREDECESSORS_MAX,
    ) -> None:
        _check(idle_s, known_sets_max, predecessors_max)
        options = RouterOptions(
            kind="affinity",
            header=header,
            balance=SetBalance(balance, weights),
            unnamed_balance=MessageBalance(balance, weights),
            check_s=check_s,
            timeout_s=timeout_s,
            names_max=known_sets_max,
            open_sets_max=open_sets_max,
            when_database_away=when_database_away,
            names_are_new=True,
            idle_s=idle_s,
        )
        super().__init__(super_stream, database, options, broker=broker, stream_url=stream_url)
        attend_for(self._core)
        self._sets = Keeping(self._core, self._settle_set, predecessors_max=predecessors_max)

    def publish(
        self,
        channel: Any,
        body: bytes | str,
        properties: BasicProperties | None = None,
        *,
        routing_key: str = "",
        mandatory: bool = True,
    ) -> Any:
        """Publish a message where its affinity set is.

        Args:
            channel: A BlockingChannel of pika in confirm mode, intercepted or not. For messages of no set any channel
                of pika.
            body: The body.
            properties: The properties; the headers that name the set are among their headers. Not changed.
            routing_key: Of messages of no set: what "hash" goes by. None is sent by it.
            mandatory: Of messages of no set: whether one that nothing is bound for comes back. The others always do.

        Returns:
            What `basic_publish` returned.

        Raises:
            ConfigurationError: the channel has no confirms, or is in another virtual host, or the router is closed;
                nothing was sent.
            InvalidInput: the headers make no sense; nothing was sent.
            PredecessorNotFound: the message that was named is not known, or not yet; nothing was sent.
            TooManyOpenSets, ContextMoving: nothing was sent; it may be repeated.
            DatabaseUnavailable, BrokerUnavailable: nothing was sent.
            SuperStreamNotFound, SuperStreamConflict: nothing was sent.
            PublishOutcomeUnknown: it may be in its set; `settle(timeout_s)` finds out.
            Exception: what `basic_publish` raises.
        """
        wish = wish_of(properties.headers if properties else None, self._core.options.header)
        message_id = properties.message_id if properties else None
        if wish is NO_WISH:
            return self._publish_plain(
                channel, body, properties, message_id, routing_key=routing_key, mandatory=mandatory
            )
        require_confirms(channel)
        if not self._sets.knows(wish):
            self._core.open(channel)
        place = self._sets.place_of(wish)
        if place.name is None:
            partition = self._core.active(place.stream or "")
            return self._publish_plain(
                channel,
                body,
                properties,
                message_id,
                routing_key=routing_key,
                mandatory=mandatory,
                partition=partition,
            )
        with self._locks(place.name):
            if self._sets.is_ending(place.name):
                self._run(self._core.publications.settle(place.name))
                self._sets.end_now(place.name)
            published = self._publish_locked(channel, place.name, body, properties, stream=place.stream)
            self._sets.published(published, is_last=place.is_last, message_id=message_id)
        return published.result

    def close(self) -> None:
        """Close the sets that have ended, check what is not checked yet, and give the connections back.

        Sets that have not ended stay open.

        Raises:
            ContextMoving, DatabaseUnavailable, BrokerUnavailable: as `check`; the connections are given back.
        """
        try:
            self._sets.close()
        finally:
            super().close()

    def _publish_plain(
        self,
        channel: Any,
        body: bytes | str,
        properties: BasicProperties | None,
        message_id: str | None,
        *,
        routing_key: str,
        mandatory: bool,
        partition: PartitionRow | None = None,
    ) -> Any:
        """Publish a message of no set, where its predecessor went or by the rule."""
        partition = partition or self._unnamed_partition(channel, routing_key)
        result = self._publish_to(partition, channel, body, properties, mandatory=mandatory)
        self._sets.published_plain(partition, message_id)
        return result

    def _settle_set(self, name: str) -> None:
        with self._locks(name):
            self._run(self._core.publications.settle(name))


class AsyncAffinityRouter(AsyncRouter):
    """Publishes all messages of an affinity set to the partition where its first one went: `AffinityRouter`'s twin.

        async with relatum.AsyncAffinityRouter("invoices", DATABASE_URL) as router:
            await router.publish(channel, Message(body, headers={"affinity_set": "invoice 17"}))

    Tasks publish side by side; those of one set go one after the other, in the order they called. Arguments are as of
    `AffinityRouter`.
    """

    def __init__(
        self,
        super_stream: str,
        database: "str | sa.URL | sa.Engine",
        *,
        balance: BalanceName | Balance = "round_robin",
        broker: str | None = None,
        stream_url: str | None = None,
        header: str = AFFINITY_HEADER,
        weights: Mapping[str, float] | None = None,
        check_s: float = CHECK_S,
        timeout_s: float = 10.0,
        when_database_away: WhenAway = "known",
        idle_s: float | None = None,
        open_sets_max: int | None = None,
        known_sets_max: int = KNOWN_SETS_MAX,
        predecessors_max: int = PREDECESSORS_MAX,
    ) -> None:
        _check(idle_s, known_sets_max, predecessors_max)
        options = RouterOptions(
            kind="affinity",
            header=header,
            balance=SetBalance(balance, weights),
            unnamed_balance=MessageBalance(balance, weights),
            check_s=check_s,
            timeout_s=timeout_s,
            names_max=known_sets_max,
            open_sets_max=open_sets_max,
            when_database_away=when_database_away,
            names_are_new=True,
            idle_s=idle_s,
        )
        super().__init__(super_stream, database, options, broker=broker, stream_url=stream_url)
        attend_for(self._core)
        self._sets = Keeping(self._core, self._settle_set, predecessors_max=predecessors_max)
        self._loop: asyncio.AbstractEventLoop | None = None

    async def publish(
        self,
        channel: "AbstractChannel | AbstractExchange",
        message: "AbstractMessage",
        routing_key: str = "",
        **kwargs: Any,
    ) -> Any:
        """Publish a message where its affinity set is.

        Cancelling it leaves open whether the message was published.

        Args:
            channel: An aio-pika channel with publisher confirms, or an exchange of one; intercepted or not.
            message: The message; the headers that name the set are among its headers. Not changed.
            routing_key: Of messages of no set: what "hash" goes by. None is sent by it.
            kwargs: Further arguments of `Exchange.publish`, such as `timeout`.

        Returns:
            What `Exchange.publish` returned.

        Raises:
            ConfigurationError, InvalidInput, PredecessorNotFound, TooManyOpenSets, ContextMoving, DatabaseUnavailable,
            BrokerUnavailable, SuperStreamNotFound, SuperStreamConflict: nothing was sent; see `AffinityRouter.publish`.
            PublishUnroutable: the partition is not bound any more; it is in no stream.
            PublishOutcomeUnknown: it may be in its set: `await error.settle()`.
            Exception: what `Exchange.publish` raises.
        """
        wish = wish_of(message.headers, self._core.options.header)
        self._loop = asyncio.get_running_loop()
        # Nothing is awaited before the set's lock where its name is known: tasks queue in the order they called.
        if self._sets.knows(wish):
            place = self._sets.place_of(wish)
        else:
            await self._open(channel_of(channel), with_database=True)
            place = await asyncio.to_thread(self._sets.place_of, wish)
        if place.name is None:
            partition = self._core.active(place.stream or "") or await self._unnamed_partition(channel, routing_key)
            result = await self._publish_to(partition, channel, message, **kwargs)
            self._sets.published_plain(partition, message.message_id)
            return result
        async with self._locks(place.name):
            if self._sets.is_ending(place.name):
                await self._run(self._core.publications.settle(place.name))
                await asyncio.to_thread(self._sets.end_now, place.name)
            published = await self._publish_locked(channel, place.name, message, stream=place.stream, **kwargs)
            self._sets.published(published, is_last=place.is_last, message_id=message.message_id)
        return published.result

    async def close(self) -> None:
        """Close the sets that have ended, check what is not checked yet, and give the connections back."""
        try:
            await asyncio.to_thread(self._sets.close)
        finally:
            await super().close()

    def _settle_set(self, name: str) -> None:
        """Settle in the loop, whose locks the names have; called in another thread."""
        if self._loop is not None:
            asyncio.run_coroutine_threadsafe(self._settle_in_loop(name), self._loop).result()

    async def _settle_in_loop(self, name: str) -> None:
        async with self._locks(name):
            await self._run(self._core.publications.settle(name))


def _check(idle_s: float | None, known_sets_max: int, predecessors_max: int) -> None:
    with as_options():
        if idle_s is not None:
            checked_seconds("idle_s", idle_s, zero=False)
        checked_count("known_sets_max", known_sets_max, most=INTEGER_MAX)
        checked_count("predecessors_max", predecessors_max, least=0, most=INTEGER_MAX)
