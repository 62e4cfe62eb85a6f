"""pika: channels of a BlockingConnection or of any callback connection publish through here.

Attributes of the very connection and its channels are set, nothing of pika is patched: the object stays what it was,
callbacks are given the same channel, and other instrumentation wraps us or is wrapped by us, in either order.
"""

import copy
from collections.abc import Callable, Iterator
from time import monotonic
from typing import Any, Final

from pika import BasicProperties, BlockingConnection
from pika.channel import Channel
from pika.compat import long
from pika.connection import Connection
from pika.exceptions import (
    ChannelClosedByBroker,
    ConnectionBlockedTimeout,
    ConnectionClosedByBroker,
    NackError,
    UnroutableError,
)

from relatum.errors import PublishError, PublishNacked, PublishOutcomeUnknown, PublishRejected, PublishUnroutable
from relatum.processes import of_one_process
from relatum.publishing._interception import ATTRIBUTE, Interception
from relatum.publishing._locate import Sent
from relatum.publishing._publish_errors import outcome
from relatum.publishing._refusals import BLOCKING, MALFORMED, refuses_message
from relatum.publishing._settle import Unsettled, final_at
from relatum.publishing._stamp import Stamp
from relatum.publishing.clients._attributes import Replacement, Watch, put, put_back
from relatum.publishing.clients._copies import is_copied, with_copy
from relatum.publishing.clients._pika_properties import OwnProperties, copy_with
from relatum.superstreams import Target
from relatum.superstreams.connections import note_secret

NAME: Final = "pika"
"""The client, as metrics name it."""

PUBLISHER: Final = "_relatum_publisher"
"""Where an intercepted channel keeps its publisher: `basic_publish` itself may have been wrapped by others."""

_NOTHING: Final = object()
"""In the place of an argument that was not given."""


class Publisher(Replacement):
    """Stands in for `basic_publish` on one channel."""

    def __init__(
        self, channel: Any, wrapped: Callable[..., Any], interception: Interception, connection: Connection
    ) -> None:
        self.channel = channel
        self.interception = interception
        self.connection = connection
        self.__wrapped__ = wrapped
        self._stamper = interception.stamper(connection.params.frame_max, integer=long)
        self._watches = interception.watches
        self._copy_to = interception.options.copy_to
        self._lifts = any(definition.from_body is not None for definition in interception.options.definitions)
        self.delivery_tag: int | None = None
        """The last delivery tag of a callback channel in confirm mode; else None."""
        of_one_process(self, "an intercepted connection")

    @property
    def _original_function(self) -> "Publisher":
        """What OpenTelemetry's instrumentation puts back when it goes: what it wrapped, still intercepted.

        It looks for this attribute on whatever `basic_publish` is. Raises AttributeError where it wrapped nothing.
        """
        inner = self.__wrapped__._original_function  # type: ignore[attr-defined]
        publisher = copy.copy(self)
        publisher.__wrapped__ = inner
        return publisher

    def __call__(
        self,
        exchange: Any,
        routing_key: Any = _NOTHING,
        body: Any = _NOTHING,
        properties: Any = None,
        mandatory: Any = _NOTHING,
    ) -> Any:
        """Publish with what is missing added. Arguments, result and what is raised before sending are pika's.

        A target in the exchange's place chooses the exchange and calls again.
        """
        if type(exchange) is not str and isinstance(exchange, Target):
            given = {"routing_key": routing_key, "body": body, "properties": properties, "mandatory": mandatory}
            return exchange.publish(
                self.channel, **{name: value for name, value in given.items() if value is not _NOTHING}
            )
        if routing_key is _NOTHING or body is _NOTHING:
            raise TypeError("basic_publish takes an exchange, a routing_key and a body; nothing was sent")
        if mandatory is _NOTHING:
            mandatory = False
        interception = self.interception
        if not interception.active or not _is_stampable(properties):
            # Released; or not a call pika takes: let pika say so.
            result = self.__wrapped__(exchange, routing_key, body, properties, mandatory)
            if self.delivery_tag is not None:
                self.delivery_tag += 1
            return result
        if self._copy_to is None or not is_copied(self._copy_to, exchange, routing_key, mandatory):
            properties, stamp = self.stamp(properties or None, body)
        else:
            properties, stamp = self._copied(self._copy_to, properties or None, body)
        if self._watches:
            interception.watch(exchange, routing_key)
        frames = self.connection.frames_sent
        began_s = monotonic()
        try:
            result = self.__wrapped__(exchange, routing_key, body, properties, mandatory)
        except Exception as error:
            # pika encodes all of a message before it hands over the first frame: no frame, nothing sent.
            if self.connection.frames_sent == frames:
                raise
            ended = self._outcome(error, exchange, routing_key, body, stamp, began_s)
            interception.counts.published += 1
            interception.counts.failed(ended)
            raise ended from error
        interception.counts.published += 1
        if self.delivery_tag is not None:
            self.delivery_tag += 1
        return result

    def stamp(self, given: Any, body: Any, receipt: str | bool | None = None) -> tuple[BasicProperties, Stamp]:
        """A copy of the caller's properties with what is missing added."""
        if given is None:
            stamp = self._stamper.stamp(None, None, None, None, body, receipt)
            return OwnProperties(headers=stamp.headers, message_id=stamp.message_id), stamp
        stamp = self._stamper.stamp(given.headers, given.message_id, given.timestamp, given, body, receipt)
        if type(given) is OwnProperties:
            given.headers, given.message_id = stamp.headers, stamp.message_id
            return given, stamp
        return copy_with(given, stamp.headers, stamp.message_id), stamp

    def _copied(self, stream: str, given: Any, body: Any) -> tuple[BasicProperties, Stamp]:
        """As `stamp`, with the header by which the broker puts a copy of the message into a stream."""
        if self._lifts or (given is not None and given.headers):
            # Among other headers it counts towards their limits.
            given = given or BasicProperties()
            return self.stamp(copy_with(given, with_copy(given.headers, stream), given.message_id), body)
        properties, stamp = self.stamp(given, body)
        properties.headers = with_copy(properties.headers, stream)
        return properties, stamp

    def _outcome(
        self, error: Exception, exchange: Any, routing_key: Any, body: Any, stamp: Stamp, began_s: float
    ) -> PublishError:
        """The error of a publish that was sent, as what it says about the message."""
        if isinstance(error, UnroutableError):
            return outcome(PublishUnroutable, error, in_stream=False)
        if isinstance(error, NackError):
            # One of several queues can refuse what another has taken.
            return outcome(PublishNacked, error, in_stream=False if exchange == "" else None)
        if _is_refusal(error):
            return outcome(PublishRejected, error, in_stream=False)
        sent = Sent.of(exchange, routing_key, stamp.message_id, stamp.headers, body, monotonic_s=began_s)
        return self.unknown(error, sent)

    def unknown(self, error: Exception, sent: Sent) -> PublishOutcomeUnknown:
        """The error of a publish after which the connection or the channel ended."""
        unsettled = Unsettled(sent, self.interception.locator, self.final_at(error))
        return outcome(PublishOutcomeUnknown, error, in_stream=None, settle=unsettled.settle)

    def final_at(self, error: Exception) -> float | None:
        """From when on nothing that was published before the connection or channel ended so can arrive any more."""
        if isinstance(error, ConnectionBlockedTimeout):
            # A broker that blocks publishers neither reads nor counts heartbeats: it may take it whenever it goes on.
            return None
        heartbeat = self.connection.params.heartbeat
        announced = isinstance(error, (ChannelClosedByBroker, ConnectionClosedByBroker))
        return final_at(heartbeat if isinstance(heartbeat, int) else 0, announced=announced)


class CountingPublisher(Publisher):
    """A publisher on a callback channel, which hears of confirms by delivery tags: publishes since confirm mode began.

    The tags can only be counted, so the channel's `confirm_delivery` is watched too.
    """

    def take_over(self, earlier: "CountingPublisher") -> None:
        """Go on counting where the publisher of an earlier interception, which is still there, has come to."""
        self.delivery_tag = earlier.delivery_tag
        if self.__wrapped__ is earlier:
            self.__wrapped__ = earlier.__wrapped__
            self.replaced = earlier.replaced


def intercept(connection: "BlockingConnection | Connection", interception: Interception) -> None:
    """Publish through the interception on all channels the connection has and will have."""

    def opened(channel: Any, *_args: Any, **_kwargs: Any) -> None:
        if interception.active:
            _intercept_channel(connection, channel, interception)

    def renewed(_result: Any, new_secret: Any, *_args: Any, **_kwargs: Any) -> None:
        note_secret(connection, new_secret)

    setattr(connection, ATTRIBUTE, interception)
    put(connection, "channel", Watch(lambda: connection, "channel", opened))
    # It tells the broker a new password, and keeps it nowhere.
    put(connection, "update_secret", Watch(lambda: connection, "update_secret", renewed))
    for channel in _channels(connection):
        _intercept_channel(connection, channel, interception)


def is_connection(connection: object) -> bool:
    """Whether it is a connection of pika's."""
    return isinstance(connection, BlockingConnection | Connection)


def may_wait(connection: "BlockingConnection | Connection") -> bool:
    """Whether its thread may wait for a server: a callback connection's runs an event loop."""
    return isinstance(connection, BlockingConnection)


def release(connection: "BlockingConnection | Connection") -> None:
    """Put back what was there before. What somebody else has wrapped since stays, and passes everything through."""
    for channel in _channels(connection):
        publisher = vars(channel).get(PUBLISHER)
        if isinstance(publisher, CountingPublisher) and publisher.delivery_tag is not None:
            # Stays, passes everything through and counts: the tags of later confirms could not be known otherwise.
            continue
        put_back(channel, "basic_publish")
        put_back(channel, "confirm_delivery")
        vars(channel).pop(PUBLISHER, None)
    put_back(connection, "channel")
    put_back(connection, "update_secret")
    delattr(connection, ATTRIBUTE)


def _is_refusal(error: Exception) -> bool:
    """Whether what a blocking publish ended by says that the broker took the message into no stream."""
    if isinstance(error, ChannelClosedByBroker):
        return error.reply_code in BLOCKING or refuses_message(error.reply_text)
    return isinstance(error, ConnectionClosedByBroker) and error.reply_code in MALFORMED


def _intercept_channel(connection: "BlockingConnection | Connection", channel: Any, interception: Interception) -> None:
    kind = CountingPublisher if isinstance(channel, Channel) else Publisher
    publisher = kind(channel, channel.basic_publish, interception, _implementation(connection))
    earlier = vars(channel).get(PUBLISHER)
    setattr(channel, PUBLISHER, publisher)
    put(channel, "basic_publish", publisher)
    if not isinstance(publisher, CountingPublisher):
        return
    if isinstance(earlier, CountingPublisher):
        publisher.take_over(earlier)
        return

    def begin_counting(*_args: Any, **_kwargs: Any) -> None:
        if interception.active:
            publisher.delivery_tag = publisher.delivery_tag or 0

    put(channel, "confirm_delivery", Watch(lambda: channel, "confirm_delivery", begin_counting))


def _implementation(connection: "BlockingConnection | Connection") -> Connection:
    implementation: Connection = connection._impl if isinstance(connection, BlockingConnection) else connection
    return implementation


def _channels(connection: "BlockingConnection | Connection") -> Iterator[Any]:
    """The channels that are open now, as the caller knows them."""
    for channel in list(_implementation(connection)._channels.values()):
        known = channel._get_cookie() if isinstance(connection, BlockingConnection) else channel
        if known is not None:
            yield known


def _is_stampable(properties: Any) -> bool:
    """Whether pika would take these as a message's properties; otherwise it shall raise its own error."""
    if isinstance(properties, BasicProperties):
        headers = properties.headers
        return headers is None or type(headers) is dict or hasattr(headers, "items")
    return not properties
