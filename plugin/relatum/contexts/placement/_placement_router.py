"""The blocking router: publishes each message to the partition where its context, or affinity set, is."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import TracebackType
from typing import Any, Self

import sqlalchemy as sa
from pika import BasicProperties
from pika.adapters.blocking_connection import BlockingChannel
from pika.exceptions import UnroutableError

from relatum.checks import checked_seconds
from relatum.contexts.placement._cache import Sent
from relatum.contexts.placement._model import PartitionRow
from relatum.contexts.placement._placement_core import Places, RouterCore, unsettled
from relatum.contexts.placement._publication import Published, Unsettled
from relatum.contexts.placement._publication_requests import PublicationRequest, Send, Sleep, Steps, T
from relatum.contexts.placement._router_options import RouterOptions
from relatum.contexts.placement._router_statistics import RouterStatistics
from relatum.errors import ConfigurationError, PublishOutcomeUnknown, PublishRejected, RelatumError
from relatum.processes import of_one_process
from relatum.publishing import OwnProperties, copy_with
from relatum.steps import run
from relatum.superstreams import Target, vhost_of


class NameLocks:
    """A lock for each name that is in use."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: dict[str, tuple[threading.Lock, int]] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Hold the name's lock."""
        with self._lock:
            lock, users = self._held.get(name) or (threading.Lock(), 0)
            self._held[name] = (lock, users + 1)
        try:
            with lock:
                yield
        finally:
            with self._lock:
                users = self._held[name][1] - 1
                if users:
                    self._held[name] = (lock, users)
                else:
                    del self._held[name]


class Router(Target):
    """Publishes messages with a name where that is placed, others by a rule. A context manager; threads may share it.

    What is used by routers of contexts and of affinity sets; `publish` is theirs.

    Args:
        super_stream: The super stream's name.
        database: PostgreSQL's URL, or an engine, which stays the caller's.
        options: How it places and checks.
        broker: The broker's URL; None: that of the channel first published on.
        stream_url: Where the stream protocol answers, if not 120 ports below AMQP's.
    """

    def __init__(
        self,
        super_stream: str,
        database: "str | sa.URL | sa.Engine",
        options: RouterOptions,
        *,
        broker: str | None = None,
        stream_url: str | None = None,
    ) -> None:
        self._core = RouterCore(super_stream, database, options, broker=broker, stream_url=stream_url)
        of_one_process(self, "a router")
        self._locks = NameLocks()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._core.super_stream!r}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def session(self) -> str:
        """What this router's messages name it by in their header `relatum_placed`: 16 hexadecimal digits."""
        return self._core.publications.session

    def statistics(self) -> RouterStatistics:
        """What was published, and what is remembered. It asks nobody."""
        return self._core.statistics()

    def open(self, source: Any = None) -> None:
        """Connect now, and not with the first message. Again: nothing.

        Args:
            source: A channel or connection of pika, which names the broker where the router was given no URL.

        Raises:
            ConfigurationError: it knows no broker, or is closed.
            SuperStreamNotFound: the broker has no such super stream.
            SuperStreamConflict: its contexts, or sets, are named by another header.
            BrokerUnavailable, DatabaseUnavailable, AccessRefused, SchemaMissing: as they say.
        """
        self._core.open(source)

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
            with self._locks(name):
                self._run(self._core.publications.settle(name, timeout_s))

    def close(self) -> None:
        """Check what is not checked yet, and give the connections back.

        Raises:
            ContextMoving, DatabaseUnavailable, BrokerUnavailable: as `check`; the connections are given back.
        """
        try:
            if self._core.is_open:
                self.check()
        finally:
            self._core.close()

    async def publish_async(self, channel: Any, message: Any, routing_key: str = "", **kwargs: Any) -> Any:
        """Nothing is published with aio-pika here.

        Raises:
            ConfigurationError: always.
        """
        raise ConfigurationError(f"a {type(self).__name__} publishes with pika: use Async{type(self).__name__}")

    # --- for routers of contexts and of sets ----------------------------------------------------------------------

    def _publish_named(
        self,
        channel: BlockingChannel,
        name: str,
        body: bytes | str,
        properties: BasicProperties | None,
        *,
        stream: str | None = None,
    ) -> Published:
        """Publish a message of a name.

        Args:
            channel: A pika channel in confirm mode.
            name: The name; the message's header says so afterwards, whether it did before or not.
            body: The body.
            properties: The message's properties; not changed.
            stream: Where to place the name, if it is not placed yet; None: by the rule.
        """
        require_confirms(channel)
        with self._locks(name):
            return self._publish_locked(channel, name, body, properties, stream=stream)

    def _publish_locked(
        self,
        channel: BlockingChannel,
        name: str,
        body: bytes | str,
        properties: BasicProperties | None,
        *,
        stream: str | None = None,
    ) -> Published:
        """Publish a message of a name whose lock is held; see `_publish_named`."""
        core = self._core
        if not core.is_open:
            core.open(channel)
        core.check_vhost(vhost_of(channel))
        try:
            published = self._run(
                core.publications.publish(name, stream=stream), partial(self._send, channel, body, properties)
            )
        except Unsettled as error:
            raise unsettled(name, error.__cause__, partial(self._settle, name)) from error.__cause__
        core.published()
        return published

    def _publish_unnamed(
        self,
        channel: Any,
        body: bytes | str,
        properties: BasicProperties | None,
        *,
        routing_key: str,
        mandatory: bool,
    ) -> Any:
        """Publish a message of no name, by the rule; it never waits for the database."""
        partition = self._unnamed_partition(channel, routing_key)
        return self._publish_to(partition, channel, body, properties, mandatory=mandatory)

    def _unnamed_partition(self, channel: Any, routing_key: str) -> PartitionRow:
        """Where a message of no name goes, by the rule."""
        core = self._core
        if not core.has_layout:
            core.open(channel, with_database=False)
        core.check_vhost(vhost_of(channel))
        return core.unnamed(routing_key)

    def _publish_to(
        self,
        partition: PartitionRow,
        channel: Any,
        body: bytes | str,
        properties: BasicProperties | None,
        *,
        mandatory: bool,
    ) -> Any:
        """Publish a message of no name to a partition."""
        try:
            result = channel.basic_publish(
                self._core.super_stream, partition.binding_key, body, properties, mandatory=mandatory
            )
        except UnroutableError:
            self._core.forget_layout()
            raise
        self._core.published_unnamed()
        return result

    # --- steps ----------------------------------------------------------------------------------------------------

    def _run(self, steps: Steps[T], send: Any = None) -> T:
        """Perform steps until they return."""
        return run(steps, lambda request: self._perform(request, send))

    def _perform(self, request: PublicationRequest, send: Any) -> Any:
        if isinstance(request, Send):
            return send(request)
        if isinstance(request, Sleep):
            return time.sleep(request.seconds)
        return self._core.perform(request)

    def _send(
        self, channel: BlockingChannel, body: bytes | str, properties: BasicProperties | None, request: Send
    ) -> Any:
        headers = self._core.headers_for(request, properties.headers if properties else None)
        own = (
            copy_with(properties, headers, properties.message_id, OwnProperties)
            if properties
            else OwnProperties(headers=headers)
        )
        placement = request.placement
        try:
            return channel.basic_publish(self._core.super_stream, placement.binding_key, body, own, mandatory=True)
        except PublishOutcomeUnknown as error:
            sent = Sent(placement.name, placement.stream, request.placed, request.as_of)
            error.settle = partial(self._settle_unknown, error.settle, sent)
            raise

    def _settle(self, name: str, timeout_s: float | None = None, *, streams: tuple[str, ...] = ()) -> Places:
        """Wait until a message counts that the broker has; gives no places, the name's partition has it.

        Raises:
            PublishOutcomeUnknown: it is still not known.
        """
        with self._locks(name):
            try:
                self._run(self._core.publications.settle(name, timeout_s))
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


def rejected(sent: Sent) -> PublishRejected:
    """The error of a message of unknown outcome that came to lie where its context is not any more."""
    return PublishRejected(
        f"the message of {sent.name!r} came to {sent.stream!r} after that had moved, so no serial consumer takes it "
        "there: publish it again",
        in_stream=False,
    )


def require_confirms(channel: Any) -> None:
    """Refuse channels that do not tell when the broker has a message.

    Raises:
        ConfigurationError: it is no blocking channel of pika in confirm mode; nothing was sent.
    """
    if not isinstance(channel, BlockingChannel):
        raise ConfigurationError(
            f"messages of a context or an affinity set need a BlockingChannel of pika, not {type(channel).__name__}; "
            "nothing was sent"
        )
    if not channel._delivery_confirmation:
        raise ConfigurationError(
            "messages of a context or an affinity set need confirms: channel.confirm_delivery(); nothing was sent"
        )
