# Generated from _async_placement_router.py by tools/make-twins: edit that, then "make twins".
"""Routers: each message is published to the partition where its context, or affinity set, is."""

from functools import partial
from typing import Any

from relatum.checks import checked_seconds
from relatum.closing import Closing
from relatum.contexts.placement._cache import Sent
from relatum.contexts.placement._model import PartitionRow
from relatum.contexts.placement._placement_core import Places, rejected, unsettled
from relatum.contexts.placement._publication import Published, Unsettled
from relatum.contexts.placement._publication_requests import Send
from relatum.contexts.placement._router_faces import RouterFace
from relatum.contexts.placement._sending import Sending
from relatum.errors import PublishOutcomeUnknown, RelatumError


class Router(RouterFace, Closing):
    """Publishes messages with a name where that is placed, others by a rule."""

    def open(self, source: Any = None) -> None:
        """Connect now, and not with the first message. Again: nothing.

        Args:
            source: A URL, or a channel or connection of the client's, where the router was given no URL.

        Raises:
            ConfigurationError: it knows no broker, or is closed.
            SuperStreamNotFound: the broker has no such super stream.
            SuperStreamConflict: its contexts, or sets, are named by another header.
            BrokerUnavailable, DatabaseUnavailable, AccessRefused, SchemaMissing: as they say.
        """
        self._connect(source)

    def check(self, timeout_s: float | None = None) -> None:
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
            self._settle_name(name, timeout_s)

    def close(self) -> None:
        """Check what is not checked yet, and give the connections back.

        Raises:
            ContextMoving, DatabaseUnavailable, BrokerUnavailable: as `check`; the connections are given back.
        """
        try:
            if self._core.is_open:
                self.check()
        finally:
            self._end()

    # --- for routers of contexts and of sets ----------------------------------------------------------------------

    def _publish_named(self, sending: Sending, name: str) -> Published:
        """Publish a message of a name; its header names it afterwards, whether it did before or not."""
        # Nothing is awaited before: threads of a name queue in the order they called.
        with self._locks(name):
            return self._publish_locked(sending, name)

    def _publish_locked(self, sending: Sending, name: str, *, stream: str | None = None) -> Published:
        """Publish a message of a name whose lock is held; a stream: where to place it, if it is not placed yet."""
        sending.require_confirms()
        core = self._core
        if not core.is_open:
            self._connect(sending.source())
        core.check_vhost(sending.vhost())
        try:
            published = self._run(core.publications.publish(name, stream=stream), partial(self._send, sending))
        except Unsettled as error:
            raise unsettled(name, error.__cause__, partial(self._settle, name)) from error.__cause__
        core.published()
        return published

    def _publish_unnamed(self, sending: Sending, partition: PartitionRow | None = None) -> Any:
        """Publish a message of no name, to a partition or by the rule; it never waits for the database."""
        return sending.send_unnamed(self._core, partition or self._unnamed_partition(sending))

    def _unnamed_partition(self, sending: Sending) -> PartitionRow:
        """Where a message of no name goes, by the rule."""
        core = self._core
        if not core.has_layout:
            self._connect(sending.source(), with_database=False)
        core.check_vhost(sending.vhost())
        return core.unnamed(sending.routing_key)

    # --- steps ----------------------------------------------------------------------------------------------------

    def _send(self, sending: Sending, request: Send) -> Any:
        placement = request.placement
        headers = self._core.headers_for(request, sending.headers)
        try:
            return sending.send_named(self._core, placement, headers)
        except PublishOutcomeUnknown as error:
            sent = Sent(placement.name, placement.stream, request.placed, request.as_of)
            error.settle = partial(self._settle_unknown, error.settle, sent)
            raise

    def _settle_name(self, name: str, timeout_s: float | None = None) -> None:
        with self._locks(name):
            self._run(self._core.publications.settle(name, timeout_s))

    def _settle(self, name: str, timeout_s: float | None = None, *, streams: tuple[str, ...] = ()) -> Places:
        """Wait until a message counts that the broker has; gives no places, the name's partition has it.

        Raises:
            PublishOutcomeUnknown: it is still not known.
        """
        try:
            self._settle_name(name, timeout_s)
        except RelatumError as error:
            raise unsettled(name, error, partial(self._settle, name)) from error
        return ()

    def _settle_unknown(
        self, found: Any, sent: Sent, timeout_s: float | None = None, *, streams: tuple[str, ...] = ()
    ) -> Places:
        """Find out about a message whose confirm did not come: it must be in a stream, and count there.

        Raises:
            PublishRejected: it is nowhere, or where its context is not any more: nobody reads it there.
            PublishOutcomeUnknown: it is still not known.
            BrokerUnavailable: the broker did not answer until the end.
        """
        places: Places = found(timeout_s, streams=streams or (sent.stream,))
        if self._run(self._core.publications.counts(sent)):
            return places
        raise rejected(sent)
