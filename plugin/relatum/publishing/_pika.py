"""pika: channels of a BlockingConnection or of any callback connection publish through here, with a receipt or without.

Attributes of the very connection and its channels are set, nothing of pika is patched: the object stays what it was,
callbacks are given the same channel, and other instrumentation wraps us or is wrapped by us, in either order.
"""

import copy
from collections.abc import Callable, Iterator
from time import monotonic
from typing import Any, Final

from pika import BasicProperties, BlockingConnection
from pika.adapters.blocking_connection import BlockingChannel
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
from pika.frame import Method
from pika.spec import Basic

from relatum.checks import checked_body
from relatum.errors import (
    ConfigurationError,
    PublishError,
    PublishNacked,
    PublishOutcomeUnknown,
    PublishRejected,
    PublishUnroutable,
)
from relatum.headers import RECEIPT_HEADER
from relatum.processes import of_one_process
from relatum.publishing._attributes import Replacement, Watch, put, put_back
from relatum.publishing._copies import is_copied, with_copy
from relatum.publishing._interception import ATTRIBUTE, Interception
from relatum.publishing._locate import Sent
from relatum.publishing._pika_properties import OwnProperties, copy_with
from relatum.publishing._publish_errors import BLOCKING, MALFORMED, outcome, refuses_message, refuses_publish
from relatum.publishing._receipt import Receipt, receipt_header
from relatum.publishing._settle import Unsettled, final_at
from relatum.publishing._stamp import Stamp
from relatum.superstreams import Target
from relatum.superstreams.connections import note_secret

NAME: Final = "pika"
"""The client, as metrics name it."""

PUBLISHER: Final = "_relatum_publisher"
"""Where an intercepted channel keeps its publisher: `basic_publish` itself may have been wrapped by others."""

_CONFIRMS: Final = "_relatum_confirms"
"""Where a callback channel keeps the receipts that wait for an answer."""

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
        self.delivery_tag: int | None = None
        """The last delivery tag of a callback channel in confirm mode, which can only be counted; else None."""
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
        if self._copy_to is not None and is_copied(self._copy_to, exchange, routing_key, mandatory):
            given = properties or BasicProperties()
            properties = copy_with(given, with_copy(given.headers, self._copy_to), given.message_id)
        properties, stamp = self.stamp(properties or None, body)
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


def intercept(connection: "BlockingConnection | Connection", interception: Interception) -> None:
    """Publish through the interception on all channels the connection has and will have."""

    def opened(channel: Any, *_args: Any, **_kwargs: Any) -> None:
        if interception.active:
            _intercept_channel(connection, channel, interception)

    def renewed(_result: Any, new_secret: Any, *_args: Any, **_kwargs: Any) -> None:
        note_secret(connection, new_secret)

    setattr(connection, ATTRIBUTE, interception)
    put(connection, "channel", Watch(lambda: connection, "channel", opened))
    # pika sends the broker a new password and does not keep it; readers need it, too.
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
        if publisher is not None and publisher.delivery_tag is not None:
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
    publisher = Publisher(channel, channel.basic_publish, interception, _implementation(connection))
    earlier: Publisher | None = vars(channel).get(PUBLISHER)
    setattr(channel, PUBLISHER, publisher)
    put(channel, "basic_publish", publisher)
    if earlier is not None:
        # Of an earlier interception: it has gone on counting, and so has what watches `confirm_delivery`.
        publisher.delivery_tag = earlier.delivery_tag
        if earlier is publisher.__wrapped__:
            publisher.__wrapped__, publisher.replaced = earlier.__wrapped__, earlier.replaced
    elif isinstance(channel, Channel):

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


# --- receipts ---------------------------------------------------------------------------------------------------------


def publish(
    channel: "BlockingChannel | Channel",
    exchange: "str | Target",
    routing_key: str,
    body: bytes | str,
    properties: BasicProperties | None = None,
    *,
    mandatory: bool = True,
    **kwargs: Any,
) -> Receipt:
    """Publish with a confirm and get a receipt, which gives the message's offsets once they are recorded.

    Confirm mode is switched on where the channel is not in it. On a BlockingConnection this returns when the broker
    has confirmed; on a callback connection it returns at once and must be called on the connection's thread.

    Args:
        channel: A channel of an intercepted pika connection.
        exchange: The exchange; "" for the default one, which routes to the queue named by the routing key. Or a
            `SuperStream`, which chooses the partition.
        routing_key: The routing key.
        body: The body; not changed.
        properties: As for `basic_publish`; not changed.
        mandatory: True (default): a message that no queue is bound for is `PublishUnroutable`. False: the broker
            drops it and confirms.
        kwargs: Further arguments of the client's own `basic_publish`.

    Returns:
        The receipt: `receipt.wait(timeout_s)`.

    Raises:
        ConfigurationError: the connection is not intercepted, or without a database; nothing was sent.
        InvalidInput: the body is neither bytes nor text; nothing was sent.
        InvalidRelationshipKey, HeadersRefused: nothing was sent.
        KeyDefinitionConflict, InvalidKeyDefinition: the database defines the keys otherwise; nothing was sent.
        PublishUnroutable, PublishNacked, PublishOutcomeUnknown: see `Receipt.wait`; from here over a blocking
            connection, from the receipt over a callback connection.
    """
    publisher = publisher_of(channel)
    interception = publisher.interception
    interception.require_database()
    checked_body(body)
    if isinstance(exchange, Target):
        exchange, routing_key = exchange.destination(channel, body, properties, routing_key)
    asked = receipt_header(properties.message_id if properties is not None else None)
    stamped, stamp = publisher.stamp(properties, body, asked)
    sent = Sent.of(exchange, routing_key, stamp.message_id, stamp.headers, body)

    def send() -> None:
        channel.basic_publish(exchange, routing_key, body, stamped, mandatory, **kwargs)

    if isinstance(publisher.channel, Channel):
        return _Confirms.of(publisher.channel, publisher).publish(sent, send)
    if not publisher.channel._delivery_confirmation:
        publisher.channel.confirm_delivery()
    send()
    return Receipt(sent, interception.locator)


def publisher_of(channel: Any) -> Publisher:
    """What publishes on a channel of an intercepted pika connection."""
    if not isinstance(channel, BlockingChannel | Channel):
        raise ConfigurationError(
            f"channel is a channel of an intercepted pika connection, not {type(channel).__name__} of "
            f"{type(channel).__module__}; with aio-pika: await relatum.publish_async(exchange, message, routing_key), "
            "with FastStream publish_async(broker, message, stream)"
        )
    publisher = vars(channel).get("basic_publish")
    if not isinstance(publisher, Publisher):
        publisher = vars(channel).get(PUBLISHER)
    if not isinstance(publisher, Publisher) or not publisher.interception.active:
        raise ConfigurationError("this channel's connection is not intercepted: relatum.intercept(connection, …)")
    return publisher


class _Confirms:
    """The receipts of one callback channel that wait for an answer. Lives on the connection's thread."""

    def __init__(self, channel: Channel, publisher: Publisher) -> None:
        self._publisher = publisher
        self._pending: dict[int, Receipt] = {}
        self._by_name: dict[str | None, Receipt] = {}
        number = channel.channel_number
        if publisher.delivery_tag is None:
            if channel.callbacks.pending(number, Basic.Ack):
                raise ConfigurationError(
                    "this channel was in confirm mode before its connection was intercepted, so its delivery tags are "
                    "not known: intercept first"
                )
            channel.confirm_delivery(self._on_answer)
        else:
            channel.callbacks.add(number, Basic.Ack, self._on_answer, False)
            channel.callbacks.add(number, Basic.Nack, self._on_answer, False)
        channel.add_on_return_callback(self._on_return)
        channel.add_on_close_callback(self._on_close)

    @classmethod
    def of(cls, channel: Channel, publisher: Publisher) -> "_Confirms":
        """The channel's confirms, listened to from now on."""
        confirms = vars(channel).get(_CONFIRMS)
        if not isinstance(confirms, cls):
            confirms = cls(channel, publisher)
            setattr(channel, _CONFIRMS, confirms)
        # Another one where the connection was released and intercepted again; it went on counting.
        confirms._publisher = publisher
        return confirms

    def publish(self, sent: Sent, send: Callable[[], Any]) -> Receipt:
        """Send, and give the receipt that the answer will decide."""
        receipt = Receipt(sent, self._publisher.interception.locator, pending=True)
        send()
        tag = self._publisher.delivery_tag
        assert tag is not None
        self._pending[tag] = receipt
        self._by_name[sent.receipt] = receipt
        return receipt

    def _on_answer(self, frame: "Method[Any]") -> None:
        answer = frame.method
        tags = [answer.delivery_tag]
        if answer.multiple:
            tags = [tag for tag in self._pending if tag <= answer.delivery_tag]
        for tag in tags:
            receipt = self._pending.pop(tag, None)
            if receipt is None:
                continue
            self._by_name.pop(receipt._sent.receipt, None)
            if isinstance(answer, Basic.Ack):
                receipt._decide(None)
                continue
            routed = None if receipt._sent.exchange else False
            self._fail(receipt, PublishNacked(f"the broker refused message {receipt.message_id}", in_stream=routed))

    def _on_return(self, _channel: Channel, method: Basic.Return, properties: BasicProperties, _body: bytes) -> None:
        """A message comes back before its ack does: it is known by what we named it."""
        names = ((properties.headers or {}).get(RECEIPT_HEADER), properties.message_id)
        receipt = next((self._by_name[name] for name in names if name in self._by_name), None)
        if receipt is not None:
            self._fail(
                receipt,
                PublishUnroutable(
                    f"message {receipt.message_id} came back: {method.reply_code} {method.reply_text}", in_stream=False
                ),
            )

    def _fail(self, receipt: Receipt, error: PublishError, until: float | None = None) -> None:
        self._publisher.interception.counts.failed(error)
        receipt._decide(error, until)

    def _on_close(self, _channel: Channel, reason: Exception) -> None:
        until = self._publisher.final_at(reason)
        pending, self._pending = self._pending, {}
        self._by_name.clear()
        for tag, receipt in pending.items():
            text = reason.reply_text if isinstance(reason, ChannelClosedByBroker) else ""
            error: PublishError
            if tag == self._publisher.delivery_tag and refuses_publish(text, receipt._sent.exchange):
                error = PublishRejected(f"the broker refused message {receipt.message_id}: {reason}", in_stream=False)
            else:
                error = PublishOutcomeUnknown(
                    f"the channel ended before the broker answered for message {receipt.message_id}: {reason!r}",
                    in_stream=None,
                    settle=receipt.settle,
                )
            error.__cause__ = reason
            self._fail(receipt, error, until)
