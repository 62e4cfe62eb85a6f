# The blocking face of this, _affinity_router.py, is made by tools/make-twins.
"""Publishing to affinity sets: messages of one set go where its first one went."""

import asyncio
from typing import Any

from relatum.contexts.affinity._affinity_headers import NO_WISH, wish_of
from relatum.contexts.affinity._affinity_options import AffinityOptions
from relatum.contexts.affinity._set_keeping import Keeping
from relatum.contexts.placement._async_placement_router import AsyncRouter
from relatum.contexts.placement._model import PartitionRow
from relatum.contexts.placement._sending import AsyncSending
from relatum.store import AnyDatabase


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
        self._sets = Keeping(self._core, self._settle_set, predecessors_max=options.predecessors_max)
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
            place = await asyncio.to_thread(sets.place_of, wish)
        else:
            # Nothing is awaited before the set's lock where its name is known: tasks queue in the order they called.
            place = sets.place_of(wish)
        if place.name is None:
            return await self._publish_of_none(sending, core.active(place.stream or ""))
        async with self._locks(place.name):
            if sets.is_ending(place.name):
                await self._run(core.publications.settle(place.name))
                await asyncio.to_thread(sets.end_now, place.name)
            published = await self._publish_locked(sending, place.name, stream=place.stream)
            sets.published(published, is_last=place.is_last, message_id=sending.message_id)
        return published.result

    async def _publish_of_none(self, sending: AsyncSending, partition: PartitionRow | None = None) -> Any:
        """Publish a message of no set, where its predecessor went or by the rule."""
        partition = partition or await self._unnamed_partition(sending)
        result = await self._publish_unnamed(sending, partition)
        self._sets.published_plain(partition, sending.message_id)
        return result

    async def close(self) -> None:
        """Close the sets that have ended, check what is not checked yet, and give the connections back.

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
