# The blocking face of this, _context_router.py, is made by tools/make-twins.
"""Publishing to serialization contexts: each message goes to the partition its context is in."""

from typing import Any

from relatum.contexts.placement._async_placement_router import AsyncRouter
from relatum.contexts.placement._sending import AsyncSending
from relatum.contexts.serial._context_options import ContextOptions
from relatum.store import AnyDatabase


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
