# The blocking face of this, _placement_router.py, is made by tools/make-twins.
"""Routers: each message is published to the partition where its context, or affinity set, is."""

from functools import partial
from typing import Any

from relatum.checks import checked_seconds
from relatum.closing import AsyncClosing
from relatum.contexts.placement._cache import Sent
from relatum.contexts.placement._model import PartitionRow
from relatum.contexts.placement._placement_core import Places, rejected, unsettled
from relatum.contexts.placement._publication import Published, Unsettled
from relatum.contexts.placement._publication_requests import Send
from relatum.contexts.placement._router_faces import AsyncRouterFace
from relatum.contexts.placement._sending import AsyncSending
from relatum.errors import PublishOutcomeUnknown, RelatumError


class AsyncRouter(AsyncRouterFace, AsyncClosing):
    """Publishes messages with a name where that is placed, others by a rule."""

    async def open(self, source: Any = None) -> None:
        """Connect now, and not with the first message. Again: nothing.

        Args:
            source: A URL, or a channel or connection of the client's, where the router was given no URL.

        Raises:
            ConfigurationError: it knows no broker, or is closed.
            SuperStreamNotFound: the broker has no such super stream.
            SuperStreamConflict: its contexts, or sets, are named by another header.
            BrokerUnavailable, DatabaseUnavailable, AccessRefused, SchemaMissing: as they say.
        """
        await self._connect(source)

    async def check(self, timeout_s: float | None = None) -> None:
        """See to it that all messages told of as published are in their order, those not checked yet included.

        Args:
            timeout_s: Seconds for each name with such messages; None (default): the router's.

        Raises:
            ContextMoving: a move did not end in time.
            DatabaseUnavailable, BrokerUnavailable: it is not known yet; call it again.
        """
        if timeout_s is not None:
            checked_seconds("timeout_s", timeout_s)
        for name in self._core.publications.unchecked.names():
            await self._settle_name(name, timeout_s)

    async def close(self) -> None:
        """Check what is not checked yet, and give the connections back.

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
