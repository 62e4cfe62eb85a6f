"""pika: intercepts the channels of a BlockingConnection or of any callback connection.

Interception sets attributes of this connection and its channels, and does not patch pika. Objects keep their identity
and class. Other instrumentation may wrap the interceptor, or be wrapped by it.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from inspect import signature
from operator import attrgetter
from time import monotonic, time
from typing import Any, Final

from pika import BasicProperties, BlockingConnection
from pika.channel import Channel
from pika.connection import Connection
from pika.exceptions import (
    ChannelClosedByBroker,
    ConnectionBlockedTimeout,
    ConnectionClosedByBroker,
    NackError,
    UnroutableError,
)
from pika.spec import Confirm

from relatum.common.processes import refuse_in_child
from relatum.errors import (
    PublishError,
    PublishNacked,
    PublishOutcomeUnknown,
    PublishRejected,
    PublishUnroutable,
)
from relatum.own_messages import MALFORMED
from relatum.publishing._interception import ATTRIBUTE, Interception, install, uninstall
from relatum.publishing._locate import SentMessage
from relatum.publishing._publish_outcome import REFUSAL_CODES, Unsettled, final_at, outcome, refuses_message
from relatum.publishing._stamp import is_copied, with_copy
from relatum.superstreams import Target
from relatum.superstreams.connections import note_secret

NAME: Final = "pika"
"""The client's name in metrics."""

PUBLISHER: Final = "_relatum_publisher"
"""The attribute of an intercepted channel that holds its publisher. Other libraries may wrap `basic_publish` itself."""

_JOINED_MAX: Final = 3
"""Maximum frames to join: method, header and one of the body. pika copies longer messages at each partial send."""

_values: Final = attrgetter(*signature(BasicProperties).parameters)


class Publisher:
    def __init__(self, channel: Any, interception: Interception, connection: Connection) -> None:
        self.channel = channel
        self.interception = interception
        self.connection = connection
        self._stamper = interception.stamper(connection.params.frame_max)
        self._copy_to = interception.options.copy_to
        self.delivery_tag: int | None = None
        """The last delivery tag of a callback channel in confirm mode, counted from the publishes; else None."""
        self._held_select: Any = None
        self.confirms: Any = None
        """The receipts of a callback channel that wait for confirms."""
        refuse_in_child(self, "an intercepted connection")

    def publish(
        self,
        original: Callable[..., Any],
        exchange: Any,
        routing_key: Any,
        body: Any,
        properties: Any = None,
        mandatory: Any = None,
        *more: Any,
        **options: Any,
    ) -> Any:
        """Publish a stamped message. Arguments, result and errors before sending are those of the original method.

        A `Target` passed as the exchange chooses the exchange and calls this method again.
        """
        if type(exchange) is not str and isinstance(exchange, Target):
            # A target has its own default of `mandatory`.
            options |= {} if mandatory is None else {"mandatory": mandatory}
            return exchange.publish(self.channel, body, properties, *more, routing_key=routing_key, **options)
        interception, mandatory = self.interception, mandatory or False
        if not interception.active or not _is_stampable(properties):
            # Pass the call through: the connection was released, or pika refuses the properties.
            return original(exchange, routing_key, body, properties, mandatory, *more, **options)
        if self._copy_to is not None and is_copied(self._copy_to, exchange, routing_key, mandatory):
            given = properties or BasicProperties()
            properties = copy_with(given, with_copy(given.headers, self._copy_to), given.message_id)
        properties = self._stamped(properties or None, body)
        interception.watch(exchange, routing_key)
        frames, began = self.connection.frames_sent, (monotonic(), time())
        has_returned = False
        try:
            result = original(exchange, routing_key, body, properties, mandatory, *more, **options)
            has_returned = True
        except Exception as error:
            # pika encodes the whole message before it queues the first frame: without a new frame, nothing was sent.
            if self.connection.frames_sent == frames:
                raise
            sent = exchange, routing_key, properties.message_id, properties.headers, body, *began
            ended = self._outcome(error, sent)
            raise interception.counts.sent_and_failed(ended) from error
        finally:
            # Also after an error or an interrupt: the broker counts each message that was sent.
            is_sent = has_returned or self.connection.frames_sent != frames
            if self.delivery_tag is not None and is_sent and self._is_confirming():
                self.delivery_tag += 1
        interception.counts.published += 1
        return result

    def begin_counting(self) -> None:
        """Count delivery tags from now on: `confirm_delivery` was called."""
        if self.delivery_tag is None:
            self.delivery_tag = 0
            held = (each for each in self.channel._blocked if isinstance(each[0], Confirm.Select))
            self._held_select = next(held, None)

    def _is_confirming(self) -> bool:
        """Return whether confirm mode has begun: while a channel waits for an answer, pika holds back its request."""
        if self._held_select not in self.channel._blocked:
            self._held_select = None
        return self._held_select is None

    def begin_confirms(self) -> None:
        """Send a request for confirm mode now if pika holds one back: messages would overtake it."""
        if not self._is_confirming():
            self.channel._send_method(Confirm.Select(nowait=True))
            self._held_select = None

    def _stamped(self, given: Any, body: Any) -> BasicProperties:
        if given is None:
            stamp = self._stamper.stamp(None, None, None, None, body)
            return OwnProperties(headers=stamp.headers, message_id=stamp.message_id)
        stamp = self._stamper.stamp(given.headers, given.message_id, given.timestamp, given, body)
        if type(given) is OwnProperties:
            given.headers, given.message_id = stamp.headers, stamp.message_id
            return given
        return copy_with(given, stamp.headers, stamp.message_id)

    def _outcome(self, error: Exception, sent: tuple[Any, ...]) -> PublishError:
        """Return an error that states the sent message's outcome. `sent`: arguments of `SentMessage.of`."""
        if isinstance(error, UnroutableError):
            return outcome(PublishUnroutable, error)
        if isinstance(error, NackError):
            # One of several queues can refuse a message that another has accepted.
            return outcome(PublishNacked, error, in_stream=False if sent[0] == "" else None)
        if isinstance(error, ChannelClosedByBroker):
            is_refused = error.reply_code in REFUSAL_CODES or refuses_message(error.reply_text)
        else:
            is_refused = isinstance(error, ConnectionClosedByBroker) and error.reply_code in MALFORMED
        if is_refused:
            return outcome(PublishRejected, error)
        unsettled = Unsettled(SentMessage.of(*sent), self.interception.locator_or_error(), self.final_at(error))
        return outcome(PublishOutcomeUnknown, error, settle=unsettled.settle)

    def final_at(self, error: Exception) -> float | None:
        """Return the `time.monotonic()` after which messages sent before `error` cannot arrive; None: no such time."""
        if isinstance(error, ConnectionBlockedTimeout):
            # A broker that blocks publishers neither reads nor checks heartbeats, and may accept the message later.
            return None
        heartbeat = self.connection.params.heartbeat
        announced = isinstance(error, (ChannelClosedByBroker, ConnectionClosedByBroker))
        return final_at(heartbeat if isinstance(heartbeat, int) else 0, announced=announced)


def intercept(connection: "BlockingConnection | Connection", interception: Interception) -> None:
    def intercept_channels() -> None:
        for channel in _channels(connection) if interception.active else ():
            if PUBLISHER not in vars(channel):
                _intercept_channel(connection, channel, interception)

    def channel(original: Callable[[], Any], _connection: Any, *args: Any, **kwargs: Any) -> Any:
        # A subclass may return something else than the new channel, such as a future.
        opened = original()(*args, **kwargs)
        intercept_channels()
        return opened

    def update_secret(original: Callable[[], Any], _connection: Any, new_secret: Any, *args: Any, **kwargs: Any) -> Any:
        # pika sends a new password to the broker without storing it, but Relatum's readers need it.
        result = original()(new_secret, *args, **kwargs)
        note_secret(connection, new_secret)
        return result

    implementation = _implementation(connection)

    def output(frames: Sequence[bytes]) -> None:
        # pika sends each frame by its own system call: one call for all saves more than stamping costs.
        if 1 < len(frames) <= _JOINED_MAX:
            joined = (b"".join(frames),)
            implementation.frames_sent += len(frames) - 1
            frames = joined
        type(implementation)._output_marshaled_frames(implementation, frames)

    setattr(connection, ATTRIBUTE, interception)
    implementation._output_marshaled_frames = output
    install(connection, "channel", channel)
    install(connection, "update_secret", update_secret)
    intercept_channels()


def release(connection: "BlockingConnection | Connection") -> None:
    """Restore the original methods. Later wrappers of other libraries stay, and pass calls through."""
    for channel in _channels(connection):
        uninstall(channel, "basic_publish")
        uninstall(channel, "confirm_delivery")
        vars(channel).pop(PUBLISHER, None)
    vars(_implementation(connection)).pop("_output_marshaled_frames", None)
    uninstall(connection, "channel")
    uninstall(connection, "update_secret")
    delattr(connection, ATTRIBUTE)


def _intercept_channel(connection: "BlockingConnection | Connection", channel: Any, interception: Interception) -> None:
    publisher = Publisher(channel, interception, _implementation(connection))

    def basic_publish(original: Callable[[], Any], _channel: Any, *args: Any, **options: Any) -> Any:
        return publisher.publish(original(), *args, **options)

    def confirm_delivery(original: Callable[[], Any], _channel: Any, *args: Any, **options: Any) -> Any:
        result = original()(*args, **options)
        if interception.active:
            publisher.begin_counting()
        return result

    setattr(channel, PUBLISHER, publisher)
    install(channel, "basic_publish", basic_publish)
    if isinstance(channel, Channel):
        install(channel, "confirm_delivery", confirm_delivery)


def _implementation(connection: "BlockingConnection | Connection") -> Connection:
    implementation: Connection = connection._impl if isinstance(connection, BlockingConnection) else connection
    return implementation


def _channels(connection: "BlockingConnection | Connection") -> Iterator[Any]:
    for channel in list(_implementation(connection)._channels.values()):
        channel_of_user = channel._get_cookie() if isinstance(connection, BlockingConnection) else channel
        if channel_of_user is not None:
            yield channel_of_user


def _is_stampable(properties: Any) -> bool:
    """Return whether pika accepts the properties. If not, pika gets the call and raises its own error."""
    if isinstance(properties, BasicProperties):
        headers = properties.headers
        return headers is None or type(headers) is dict or hasattr(headers, "items")
    return not properties


class OwnProperties(BasicProperties):  # type: ignore[misc]
    """Properties that Relatum creates for one message, and stamps without another copy."""

    headers: dict[str, Any] | None
    message_id: str | None


def copy_with(given: BasicProperties, headers: dict[str, Any] | None, message_id: str | None) -> BasicProperties:
    """Return a copy of properties with other headers and `message_id`. The copy keeps a caller's subclass."""
    if type(given) is not BasicProperties:
        copied = copy.copy(given)
        copied.headers, copied.message_id = headers, message_id
        return copied
    # `copy.copy` takes four times as long.
    properties = OwnProperties(*_values(given))
    properties.headers, properties.message_id = headers, message_id
    return properties
