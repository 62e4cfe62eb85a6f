"""Publishing on one channel of py-amqp, as kombu's transport `pyamqp` does."""

import copy
import struct
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from time import monotonic
from typing import Any, Final

from amqp import spec
from amqp.basic_message import Message
from amqp.exceptions import AMQPError, ChannelError, MessageNacked
from amqp.exceptions import ConnectionError as AMQPConnectionError

from relatum.errors import (
    ConfigurationError,
    PublishError,
    PublishNacked,
    PublishOutcomeUnknown,
    PublishRejected,
    PublishUnroutable,
)
from relatum.headers import TIME_HEADER
from relatum.processes import of_one_process
from relatum.publishing._interception import Interception
from relatum.publishing._locate import Sent
from relatum.publishing._process_interceptions import ProcessInterceptions
from relatum.publishing._publish_errors import outcome
from relatum.publishing._refusals import MALFORMED, refuses_publish
from relatum.publishing._settle import Unsettled, final_at
from relatum.publishing._stamp import Stamp, Stamper
from relatum.publishing.clients._attributes import Replacement
from relatum.publishing.clients._copies import is_copied, with_copy
from relatum.publishing.clients._kombu_message import OwnMessage

HEADERS: Final = "application_headers"
"""The name that py-amqp has for the property `headers`."""

RETURNED: Final = frozenset({312, 313})
"""Reply codes of `basic.return`: no route, no consumers."""

ANSWER_S: Final = 10.0
"""Seconds to wait for the confirm of a message that came back; the broker sends it right behind."""

REMEMBERED_MAX: Final = 1000
"""Mandatory messages remembered on a channel: one of them may come back."""


class Returns:
    """Stands in for what a channel calls for a message that came back: what was added is taken out before."""

    def __init__(self, wrapped: Callable[..., Any]) -> None:
        self.__wrapped__ = wrapped
        self._stamps: OrderedDict[tuple[Any, Any], Stamp] = OrderedDict()
        self.last: tuple[Any, Any] = (None, None)
        """What the message that came back last is known by."""

    def expect(self, stamp: Stamp) -> None:
        """Remember what was added to a message that may come back."""
        self._stamps[_known_by(stamp.message_id, stamp.headers)] = stamp._replace(headers=None)
        if len(self._stamps) > REMEMBERED_MAX:
            self._stamps.popitem(last=False)

    def is_of(self, stamp: Stamp) -> bool:
        """Whether it was this message that came back last."""
        return self.last == _known_by(stamp.message_id, stamp.headers)

    @staticmethod
    def put_back(channel: Any) -> None:
        """Leave the channel as it was."""
        present = channel._callbacks.get(spec.Basic.Return)
        if isinstance(present, Returns):
            channel._callbacks[spec.Basic.Return] = present.__wrapped__

    def __call__(self, code: Any, text: Any, exchange: Any, routing_key: Any, message: Any) -> Any:
        properties = message.properties
        headers = properties.get(HEADERS)
        self.last = _known_by(properties.get("message_id"), headers)
        stamp = self._stamps.pop(self.last, None)
        if stamp is not None:
            if stamp.names_message:
                del properties["message_id"]
            for name in stamp.added:
                headers.pop(name, None)
            if not headers and not stamp.had_headers:
                properties.pop(HEADERS, None)
        return self.__wrapped__(code, text, exchange, routing_key, message)


def _known_by(message_id: Any, headers: Any) -> tuple[Any, Any]:
    return message_id, (headers or {}).get(TIME_HEADER)


class Publisher(Replacement):
    """Stands in for `basic_publish` on one channel."""

    def __init__(
        self, channel: Any, wrapped: Callable[..., Any], interceptions: ProcessInterceptions, returns: Returns
    ) -> None:
        self.channel = channel
        self.interceptions = interceptions
        self.returns = returns
        self.__wrapped__ = wrapped
        self._copy_to = interceptions.options.copy_to
        self._begun: tuple[Interception, Stamper] | None = None
        of_one_process(self, "an intercepted channel of kombu")

    def __call__(
        self, msg: Any, exchange: Any = "", routing_key: Any = "", mandatory: Any = False, *args: Any, **kwargs: Any
    ) -> Any:
        """Publish with what is missing added. Arguments, result and what is raised before sending are py-amqp's."""
        if not self.interceptions.active or self.channel.connection is None or not isinstance(msg, Message):
            # Released; or closed, or not a call py-amqp takes: let it say so.
            return self.__wrapped__(msg, exchange, routing_key, mandatory, *args, **kwargs)
        properties = msg.properties
        headers = properties.get(HEADERS)
        if type(headers) is not dict and headers is not None and not hasattr(headers, "items"):
            return self.__wrapped__(msg, exchange, routing_key, mandatory, *args, **kwargs)
        interception, stamper = self._begun or self.begin()
        copy_to = self._copy_to
        if copy_to is not None:
            if is_copied(copy_to, exchange, routing_key, mandatory):
                headers = with_copy(headers, copy_to)
            else:
                copy_to = None
        stamp = stamper.stamp(headers, properties.get("message_id"), properties.get("timestamp"), properties, msg.body)
        own = _stamped(msg, stamp)
        if mandatory:
            self.returns.expect(stamp)
        interception.watch(exchange, routing_key)
        began_s = monotonic()
        asking = interception.asking_for(stamp) if interception.asked else None
        if asking is not None:
            in_stream = copy_to is not None
            asking.sent = self._asked("" if in_stream else exchange, copy_to if in_stream else routing_key, own, stamp)
        try:
            result = self.__wrapped__(own, exchange, routing_key, mandatory, *args, **kwargs)
        except Exception as error:
            if not _may_be_sent(error, own):
                raise
            sent = Sent.of(
                exchange, copy_to or routing_key, stamp.message_id, stamp.headers, own.body, monotonic_s=began_s
            )
            ended = self._outcome(interception, error, replace(sent, is_copy=copy_to is not None), stamp)
            if isinstance(ended, PublishUnroutable):
                self._take_confirm(kwargs)
            with self.interceptions.lock:
                interception.counts.published += 1
                interception.counts.failed(ended)
            raise ended from error
        with self.interceptions.lock:
            interception.counts.published += 1
        if asking is not None and mandatory:
            # Where somebody listens to returns, py-amqp raises nothing.
            asking.came_back = self.returns.is_of(stamp)
        return result

    def _asked(self, exchange: Any, routing_key: Any, own: Any, stamp: Stamp) -> Sent:
        """What is known of a message that gets a receipt, a moment before it is sent."""
        if not self.channel.connection.confirm_publish:
            raise ConfigurationError(
                "a receipt needs confirms: open the connection with transport_options={'confirm_publish': True}; "
                "nothing was sent"
            )
        return Sent.of(exchange, routing_key, stamp.message_id, stamp.headers, own.body)

    def begin(self) -> tuple[Interception, Stamper]:
        """What this process stamps by; the channel's connection is open by now."""
        connection = self.channel.connection
        interception = self.interceptions.current(connection.client)
        stamper = interception.stamper(connection.frame_max, read_property=_read_property)
        self._begun = interception, stamper
        return self._begun

    def _outcome(
        self,
        interception: Interception,
        error: Exception,
        sent: Sent,
        stamp: Stamp,
    ) -> PublishError:
        """The error of a publish that was sent, as what it says about the message."""
        if isinstance(error, MessageNacked):
            # One of several queues can refuse what another has taken.
            is_nowhere = sent.exchange == "" and not sent.is_copy
            return outcome(PublishNacked, error, in_stream=False if is_nowhere else None)
        if isinstance(error, ChannelError):
            if error.reply_code in RETURNED and self.returns.is_of(stamp):
                return outcome(PublishUnroutable, error, in_stream=False)
            if refuses_publish(str(error.reply_text), sent.exchange):
                return outcome(PublishRejected, error, in_stream=False)
        announced = isinstance(error, AMQPError) and bool(error.method_sig)
        if isinstance(error, AMQPConnectionError) and announced and error.reply_code in MALFORMED:
            return outcome(PublishRejected, error, in_stream=False)
        connection = self.channel.connection
        heartbeat = 0 if connection is None else int(connection.heartbeat or 0)
        # After a mere time-out the connection lives on, and what was sent may still arrive at any time.
        until = None if isinstance(error, TimeoutError) else final_at(heartbeat, announced=announced)
        unsettled = Unsettled(sent, interception.locator, until)
        return outcome(PublishOutcomeUnknown, error, in_stream=None, settle=unsettled.settle)

    def _take_confirm(self, kwargs: dict[str, Any]) -> None:
        """Take the confirm that follows a message that came back; py-amqp would take it for the next message's."""
        if self.channel._confirm_selected:
            timeout = kwargs.get("confirm_timeout") or kwargs.get("timeout") or ANSWER_S
            with suppress(AMQPError, OSError):
                self.channel.wait([spec.Basic.Ack, spec.Basic.Nack], timeout=timeout)


def _stamped(message: Any, stamp: Stamp) -> Any:
    """A copy of the caller's message with what is missing added."""
    properties = dict(message.properties)
    properties["message_id"] = stamp.message_id
    if stamp.headers is not None:
        properties[HEADERS] = stamp.headers
    if type(message) is not Message:
        own = copy.copy(message)
    else:
        # Without what only a message that is being received has: this is the publish path.
        own = OwnMessage.__new__(OwnMessage)
        own.body, own.channel, own.delivery_info = message.body, message.channel, message.delivery_info
    own.properties = properties
    return own


def _may_be_sent(error: Exception, own: Any) -> bool:
    """Whether a publish that raised this may have reached the broker.

    py-amqp first reads what the broker has to say, of earlier messages too; then it encodes properties and frames, and
    hands them to the socket.
    """
    return getattr(own, "is_encoded", True) and not isinstance(error, (TypeError, ValueError, struct.error))


def _read_property(properties: Any, name: str) -> Any:
    return properties.get(name)
