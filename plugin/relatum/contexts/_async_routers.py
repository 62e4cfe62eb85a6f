# The blocking face of this, _routers.py, is made by tools/make-twins.
"""Routers: each message is published to the partition where its context, or affinity set, is."""

import asyncio
from functools import partial
from typing import Any

from relatum.checks import checked_seconds
from relatum.closing import AsyncClosing
from relatum.contexts._options import AffinityOptions, ContextOptions
from relatum.contexts.affinity._affinity_headers import NO_WISH, wish_of
from relatum.contexts.affinity._predecessors import Found
from relatum.contexts.affinity._set_keeping import SetKeeper
from relatum.contexts.placement._model import PartitionRow
from relatum.contexts.placement._placement_core import Places, rejected, unsettled
from relatum.contexts.placement._publication import Published, Unsettled
from relatum.contexts.placement._publication_requests import Send, Sent
from relatum.contexts.placement._router_faces import AsyncRouterFace
from relatum.contexts.placement._sending import AsyncSending
from relatum.errors import PublishOutcomeUnknown, RelatumError
from relatum.store.database import AnyDatabase


class AsyncRouter(AsyncRouterFace, AsyncClosing):
    """Publishes messages with a name where that is placed, others by a rule."""

    async def open(self, source: Any = None) -> None:
        """Connect eagerly. Idempotent.

        Args:
            source: A URL, or a channel or connection of the client's, where the router was given no URL.

        Raises:
            ConfigurationError: it knows no broker, or is closed.
            SuperStreamNotFound: the broker has no such super stream.
            SuperStreamConflict: its contexts, or sets, are named by another header.
            BrokerUnavailable, DatabaseUnavailable, AccessRefused, SchemaMissing: one of the servers cannot be used.
        """
        await self._connect(source)

    async def check(self, timeout_s: float | None = None) -> None:
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
            await self._settle_name(name, timeout_s)

    async def close(self) -> None:
        """Wait as `check` does, and give the connections back.

        Raises:
            ContextMoving, DatabaseUnavailable, BrokerUnavailable: as `check`; the connections are given back.
        """
        try:
            if self._core.is_open:
                await self.check()
        finally:
            await self._end()

    # --- for routers of contexts and of sets ----------------------------------------------------------------------

    async def _publish_named(self, sending: AsyncSending, name: str) -> Published:
        """Publish a message of a name; its header names it afterwards, whether it did before or not."""
        # Nothing is awaited before: tasks of a name queue in the order they called.
        async with self._locks(name):
            return await self._publish_locked(sending, name)

    async def _publish_locked(self, sending: AsyncSending, name: str, *, stream: str | None = None) -> Published:
        """Publish a message of a name whose lock is held; a stream: where to place it, if it is not placed yet."""
        sending.require_confirms()
        core = self._core
        if not core.is_open:
            await self._connect(await sending.source())
        core.check_vhost(await sending.vhost())
        try:
            published = await self._run(core.publications.publish(name, stream=stream), partial(self._send, sending))
        except Unsettled as error:
            raise unsettled(name, error.__cause__, partial(self._settle, name)) from error.__cause__
        core.published()
        return published

    async def _publish_unnamed(self, sending: AsyncSending, partition: PartitionRow | None = None) -> Any:
        """Publish a message of no name, to a partition or by the rule; it never waits for the database."""
        return await sending.send_unnamed(self._core, partition or await self._unnamed_partition(sending))

    async def _unnamed_partition(self, sending: AsyncSending) -> PartitionRow:
        """Where a message of no name goes, by the rule."""
        core = self._core
        if not core.has_layout:
            await self._connect(await sending.source(), with_database=False)
        core.check_vhost(await sending.vhost())
        return core.unnamed(sending.routing_key)

    # --- steps ----------------------------------------------------------------------------------------------------

    async def _send(self, sending: AsyncSending, request: Send) -> Any:
        placement = request.placement
        headers = self._core.headers_for(request, sending.headers)
        try:
            return await sending.send_named(self._core, placement, headers)
        except PublishOutcomeUnknown as error:
            sent = Sent(placement.name, placement.stream, request.placed, request.as_of)
            error.settle = partial(self._settle_unknown, error.settle, sent)
            raise

    async def _settle_name(self, name: str, timeout_s: float | None = None) -> None:
        async with self._locks(name):
            await self._run(self._core.publications.settle(name, timeout_s))

    async def _settle(self, name: str, timeout_s: float | None = None, *, streams: tuple[str, ...] = ()) -> Places:
        """Wait until a message counts that the broker has; gives no places, the name's partition has it.

        Raises:
            PublishOutcomeUnknown: it is still not known.
        """
        try:
            await self._settle_name(name, timeout_s)
        except RelatumError as error:
            raise unsettled(name, error, partial(self._settle, name)) from error
        return ()

    async def _settle_unknown(
        self, found: Any, sent: Sent, timeout_s: float | None = None, *, streams: tuple[str, ...] = ()
    ) -> Places:
        """Find out about a message whose confirm did not come: it must be in a stream, and count there.

        Raises:
            PublishRejected: it is nowhere, or where its context is not any more: nobody reads it there.
            PublishOutcomeUnknown: it is still not known.
            BrokerUnavailable: the broker did not answer until the end.
        """
        places: Places = await found(timeout_s, streams=streams or (sent.stream,))
        if await self._run(self._core.publications.counts(sent)):
            return places
        raise rejected(sent)


class AsyncContextRouter(AsyncRouter):
    # asyncio only:
    """Publishes messages to the partitions their serialization contexts are in: the twin of `ContextRouter`.

        async with relatum.AsyncContextRouter("orders", DATABASE_URL) as router:
            await router.publish(channel, Message(body, headers={"serialization_context": account}))

    Tasks publish side by side; those of one context go one after the other, in the order they called. One look at the
    database serves all whose confirms came before it. Arguments are as of `ContextRouter`.
    """

    # blocking only:
    # """Publishes messages to the partitions their serialization contexts are in.
    #
    # A context manager; threads may share one.
    #
    #     with relatum.ContextRouter("orders", DATABASE_URL) as router:
    #         router.publish(channel, body, BasicProperties(headers={"serialization_context": account}))
    #
    # When `publish` returns, the message is in its context's order, behind all that was published before it, and every
    # serial consumer sees it there once, wherever the context is moved, and however long this process slept in between.
    # While it publishes, it has a session, which moves wait for; where that may have lapsed, it looks at the database
    # after the broker's confirm, which costs a round trip to PostgreSQL.
    #
    # It can be given as the exchange on an intercepted channel: `channel.basic_publish(router, "", body, properties)`.
    # One message of a context is under way at a time; threads with channels of their own publish different contexts
    # side by side. A message without the header is published to any partition and waits for no database.
    #
    # Args:
    #     super_stream: The super stream's name.
    #     database: PostgreSQL's URL, or a `Database`, which stays the caller's.
    #     options: How it places and checks.
    #     broker: The broker's URL. None (default): that of the channel first published on.
    #     stream_url: Where the stream protocol answers, if not 120 ports below AMQP's.
    #
    # Raises:
    #     ConfigurationError: an option, or a URL, cannot be one.
    #     InvalidInput: the super stream's name cannot be one.
    # """
    # both:

    def __init__(
        self,
        super_stream: str,
        database: "AnyDatabase",
        options: ContextOptions = ContextOptions(),
        *,
        broker: str | None = None,
        stream_url: str | None = None,
    ) -> None:
        super().__init__(super_stream, database, options, ContextOptions, broker=broker, stream_url=stream_url)

    async def _publish(self, sending: AsyncSending) -> Any:
        name = self._core.name_of(sending.headers)
        if name is None:
            return await self._publish_unnamed(sending)
        return (await self._publish_named(sending, name)).result


class AsyncAffinityRouter(AsyncRouter):
    # asyncio only:
    """Publishes all messages of an affinity set to the partition where its first one went: `AffinityRouter`'s twin.

        async with relatum.AsyncAffinityRouter("invoices", DATABASE_URL) as router:
            await router.publish(channel, Message(body, headers={"affinity_set": "invoice 17"}))

    Tasks publish side by side; those of one set go one after the other, in the order they called. Arguments are as of
    `AffinityRouter`.
    """

    # blocking only:
    # """Publishes all messages of an affinity set to the partition where its first one went.
    #
    # A context manager; threads may share one, each with a channel of its own.
    #
    #     with relatum.AffinityRouter("invoices", DATABASE_URL, AffinityOptions(balance="least_loaded")) as router:
    #         router.publish(channel, body, BasicProperties(headers={"affinity_set": "invoice 17"}))
    #
    # The set is named in a header. The partition of its first message is chosen by the rule and stored atomically, so
    # that all who publish to it agree; it is remembered, so that further messages go there without asking. A message
    # with the header `affinity_last: True` ends its set, one with `affinity_predecessor` joins that of another message,
    # and those with neither are balanced by the rule and never wait for PostgreSQL.
    #
    # It can be given as the exchange on an intercepted channel: `channel.basic_publish(router, "", body, properties)`.
    #
    # Args:
    #     super_stream: The super stream's name.
    #     database: PostgreSQL's URL, or a `Database`, which stays the caller's.
    #     options: How it places and checks.
    #     broker: The broker's URL. None (default): that of the channel first published on.
    #     stream_url: Where the stream protocol answers, if not 120 ports below AMQP's.
    #
    # Raises:
    #     ConfigurationError: an option, or a URL, cannot be one.
    #     InvalidInput: the super stream's name cannot be one.
    # """
    # both:

    def __init__(
        self,
        super_stream: str,
        database: "AnyDatabase",
        options: AffinityOptions = AffinityOptions(),
        *,
        broker: str | None = None,
        stream_url: str | None = None,
    ) -> None:
        super().__init__(super_stream, database, options, AffinityOptions, broker=broker, stream_url=stream_url)
        self._sets = SetKeeper(self._core, self._settle_set, predecessors_max=options.predecessors_max)
        # asyncio only:
        self._loop: asyncio.AbstractEventLoop | None = None
        # both:

    async def _publish(self, sending: AsyncSending) -> Any:
        core, sets = self._core, self._sets
        wish = wish_of(sending.headers, core.options.header)
        if wish is NO_WISH:
            return await self._publish_of_none(sending)
        # asyncio only:
        self._loop = asyncio.get_running_loop()
        # both:
        if not sets.knows(wish):
            await self._connect(await sending.source())
        # asyncio only:
        # Nothing is awaited before the set's lock where its name is known: tasks queue in the order they called.
        place = sets.place_of(wish) if sets.knows(wish) else await asyncio.to_thread(sets.place_of, wish)
        # blocking only:
        # place = sets.place_of(wish)
        # both:
        if place.name is None:
            return await self._publish_of_none(sending, core.active(place.stream or ""))
        async with self._locks(place.name):
            if sets.is_ending(place.name):
                await self._run(core.publications.settle(place.name))
                await asyncio.to_thread(sets.end_now, place.name)
            published = await self._publish_locked(sending, place.name, stream=place.stream)
            placement = published.placement
            sets.published(Found(placement.name, placement.stream), sending.message_id)
            sets.used(placement.name, placement.epoch, is_last=wish.is_last)
        return published.result

    async def _publish_of_none(self, sending: AsyncSending, partition: PartitionRow | None = None) -> Any:
        """Publish a message of no set, where its predecessor went or by the rule."""
        partition = partition or await self._unnamed_partition(sending)
        result = await self._publish_unnamed(sending, partition)
        self._sets.published(Found(None, partition.stream), sending.message_id)
        return result

    async def close(self) -> None:
        """Close the sets that have ended, wait as `check` does, and give the connections back.

        Sets that have not ended stay open.

        Raises:
            ContextMoving, DatabaseUnavailable, BrokerUnavailable: as `check`; the connections are given back.
        """
        try:
            await asyncio.to_thread(self._sets.close)
        finally:
            await super().close()

    # asyncio only:
    def _settle_set(self, name: str) -> None:
        """Settle in the loop, whose locks the names have; called in another thread."""
        if self._loop is not None:
            asyncio.run_coroutine_threadsafe(self._settle_name(name), self._loop).result()

    # blocking only:
    # def _settle_set(self, name: str) -> None:
    #     self._settle_name(name)
    # both:
