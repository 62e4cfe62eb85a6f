"""Publishes Relatum's own messages directly to streams, each confirmed: control messages, and dead letters.

Dead letters are messages given up, which are published to another stream with the reason as a header.
"""

import logging
import math
import threading
from collections import deque
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any, Final

from pika import BasicProperties
from pika.adapters.blocking_connection import BlockingChannel, BlockingConnection
from pika.exceptions import (
    AMQPError,
    ChannelClosedByBroker,
    ConnectionClosedByBroker,
    NackError,
    UnroutableError,
)
from pika.spec import ACCESS_REFUSED, FRAME_ERROR, PRECONDITION_FAILED, SYNTAX_ERROR, UNEXPECTED_FRAME

from relatum.common.client_logs import own_connection
from relatum.common.closing import Closing
from relatum.common.ids import MessageId
from relatum.common.limits import HEADERS_BYTES_MAX, HEADERS_DEPTH_MAX
from relatum.common.processes import after_fork, leave_to_parent
from relatum.common.waiting import ended, log_failure, may_be_mended, may_repeat
from relatum.errors import (
    AccessRefused,
    BrokerUnavailable,
    ConfigurationError,
    HeadersRefused,
    InvalidInput,
    PublishNacked,
    PublishRejected,
    PublishUnroutable,
)
from relatum.reading import GOODBYE_S, BrokerAddress, Message, blocking_connection, in_time

logger = logging.getLogger("relatum.dead_letters")

REASON_HEADER: Final = "relatum_dead_reason"
"""Header: why the message was given up."""

STREAM_HEADER: Final = "relatum_dead_stream"
"""Header: the name of the message's stream."""

OFFSET_HEADER: Final = "relatum_dead_offset"
"""Header: the message's offset in its stream. The two identify a dead letter that was published twice."""

LEFT_OUT_HEADER: Final = "relatum_dead_left_out"
"""Header: the properties and headers that do not fit or cannot be sent: "correlation_id, header trace"."""

REASON_CHARACTERS_MAX: Final = 1000
"""Characters of a reason; the rest is cut off."""

_NAME_CHARACTERS_MAX: Final = 60
"""Characters of a header's name in the list of omissions."""

_PROPERTIES: Final = (
    "content_type",
    "content_encoding",
    "delivery_mode",
    "priority",
    "correlation_id",
    "reply_to",
    "message_id",
    "timestamp",
    "type",
    "app_id",
)
"""Properties a dead letter keeps: not `expiration`, ignored by streams, nor `user_id`, allowed only to that user."""

DIRECT_TIMEOUT_S: Final = 10.0
"""Seconds until a silent broker counts as unavailable."""

MALFORMED: Final = frozenset({FRAME_ERROR, SYNTAX_ERROR, UNEXPECTED_FRAME})
"""Reply codes by which the broker closes the connection over a frame of a wrong order, size or content. It drops all
later frames of the connection."""

_FRAME_BYTES: Final = 8 + 12
"""Bytes of a header frame besides its properties: the frame's header and end, then class, weight and body size.

Source: AMQP 0-9-1, 2.3.5 and 2.3.5.2. RabbitMQ compares the whole frame with the negotiated size.
"""


class DirectPublisher(Closing):
    """Publishes to streams by name, through the default exchange. A context manager; threads may share one.

    The first message opens the connection; after a loss, the next message opens another. If the connection ends before
    a confirm and the caller retries, the message may be published twice. `what` names a message in errors: "a dead
    letter". After `timeout_s`, to connect and then for each message, a broker that is silent or blocks publishers is
    `BrokerUnavailable`.
    """

    def __init__(self, address: BrokerAddress, what: str, *, timeout_s: float = DIRECT_TIMEOUT_S) -> None:
        self._address = address
        self._what = what
        if address.amqp_port is None:
            raise ConfigurationError(f"publishing {what} needs AMQP 0.9.1: give the broker as an amqp:// URL")
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._connection: BlockingConnection | None = None
        self._channel: BlockingChannel | None = None
        after_fork(self, DirectPublisher._renew)

    def _renew(self) -> None:
        self._lock = threading.Lock()
        leave_to_parent(self._connection, self._channel)
        self._connection = self._channel = None

    @own_connection()
    def publish(self, stream: str, body: bytes, properties: BasicProperties) -> None:
        """Publish a message and wait for its confirm.

        Raises:
            PublishUnroutable: the stream does not exist.
            PublishNacked: the broker refused the message.
            PublishRejected: the broker never accepts this message: it is too large, or malformed.
            InvalidInput: the properties cannot be encoded; nothing was sent.
            HeadersRefused: the properties exceed a frame (field `bytes_max`: the room for them); nothing was sent.
            BrokerUnavailable: the broker does not answer, or the connection ended before the confirm.
            AccessRefused: the broker refuses the user, or does not let it write to the default exchange.
        """
        size = _encoded_bytes(properties)
        with self._lock:
            try:
                connection = self._connected()
                most = connection._impl.params.frame_max
                if most and size + _FRAME_BYTES > most:
                    # The broker would close the connection.
                    raise HeadersRefused(
                        f"the properties of {self._what} take {size} bytes; the connection negotiated frames of "
                        f"{most}; nothing was sent",
                        reason="too_large",
                        bytes_max=most - _FRAME_BYTES,
                    )
                with in_time(connection, self._timeout_s):
                    if self._channel is None:
                        self._channel = connection.channel()
                        self._channel.confirm_delivery()
                    self._channel.basic_publish("", stream, body, properties, mandatory=True)
            except UnroutableError as error:
                raise PublishUnroutable(f"there is no stream {stream!r} for {self._what}: declare it") from error
            except NackError as error:
                raise PublishNacked(f"the broker refused {self._what} for {stream!r}") from error
            except (AMQPError, OSError) as error:
                self._drop()
                code = error.reply_code if isinstance(error, ChannelClosedByBroker | ConnectionClosedByBroker) else None
                why = str(error) or type(error).__name__
                if isinstance(error, ChannelClosedByBroker) and code == ACCESS_REFUSED:
                    raise AccessRefused(
                        f"the broker does not let user {self._address.user!r} publish {self._what} to {stream!r} by "
                        "the default exchange: grant the permission to write to 'amq.default'"
                    ) from error
                if code == PRECONDITION_FAILED or code in MALFORMED:  # too large, or invalid
                    raise PublishRejected(f"the broker does not accept {self._what} for {stream!r}: {why}") from error
                raise BrokerUnavailable(f"{self._what} could not be published to {stream!r}: {why}") from error

    def _connected(self) -> BlockingConnection:
        if self._connection is not None:
            with suppress(AMQPError, OSError):
                self._connection.process_data_events(0)
            if self._channel is None or not self._channel.is_open:
                self._drop()
        if self._connection is None:
            # No heartbeats: none are answered between messages, and the next publish notices a lost connection.
            self._connection = blocking_connection(self._address, timeout_s=self._timeout_s, heartbeat_s=0)
        return self._connection

    def _drop(self) -> None:
        connection, self._connection, self._channel = self._connection, None, None
        if connection is not None and connection.is_open:
            with suppress(AMQPError, OSError), in_time(connection, GOODBYE_S):
                connection.close()

    @own_connection()
    def close(self) -> None:
        """Close the connection. Publishing again opens another."""
        with self._lock:
            self._drop()


def _encoded_bytes(properties: BasicProperties) -> int:
    _check_depth(properties.headers, HEADERS_DEPTH_MAX + 1)
    try:
        return sum(map(len, properties.encode()))
    except Exception as error:
        # pika's encoder raises AssertionError, struct.error, RecursionError and its own errors.
        raise InvalidInput(f"AMQP 0.9.1 cannot encode the properties: {error or type(error).__name__}") from error


class DeadLetters(Closing):
    """Publishes given-up messages to a stream or other queue, each confirmed. Like `DirectPublisher`.

    A letter that was published twice has the same `relatum_dead_stream` and `relatum_dead_offset` each time.
    """

    def __init__(self, address: BrokerAddress, stream: str, *, timeout_s: float = DIRECT_TIMEOUT_S) -> None:
        self.stream = stream
        self._publisher = DirectPublisher(address, "a dead letter", timeout_s=timeout_s)

    def publish(self, message: Message, reason: str, **headers: str | int | bool) -> None:
        """Publish a message and wait for the confirm.

        A dead letter has the message's body, properties and headers, and the headers `relatum_dead_reason`,
        `relatum_dead_stream` and `relatum_dead_offset`. Properties and headers that AMQP 0.9.1 cannot send (a
        correlation id over 255 bytes, headers larger than a frame) are left out and named in `relatum_dead_left_out`.

        Raises:
            InvalidInput, DataError: the message can never be a dead letter, and was not sent.
            RelatumError: as for `DirectPublisher.publish`.
        """
        added: dict[str, Any] = {REASON_HEADER: reason[:REASON_CHARACTERS_MAX], **headers}
        added |= {STREAM_HEADER: message.stream, OFFSET_HEADER: message.offset}
        fields = {name: getattr(message.properties, name) for name in _PROPERTIES}
        if fields["timestamp"] is not None:
            fields["timestamp"] = int(fields["timestamp"].timestamp())
        own = {name: value for name, value in message.headers.items() if name not in added}
        try:
            self._publisher.publish(self.stream, message.body, BasicProperties(headers={**own, **added}, **fields))
        except InvalidInput as refused:
            reduced = _reduced(fields, own, added, getattr(refused, "bytes_max", HEADERS_BYTES_MAX))
            self._publisher.publish(self.stream, message.body, reduced)
            extra = {"stream": message.stream, "offset": message.offset, "left_out": added[LEFT_OUT_HEADER]}
            logger.warning("a dead letter was published without some of its properties: %s", refused, extra=extra)

    def close(self) -> None:
        """Close the connection."""
        self._publisher.close()


class DeadLetterPublisher:
    """Publishes dead letters. A retry does not publish confirmed letters again."""

    def __init__(
        self, dead_letters: DeadLetters, letters: Iterable[tuple[Message, str]], **headers: str | int | bool
    ) -> None:
        self._dead_letters = dead_letters
        self._left = deque(letters)
        self._headers = headers
        self._refused: dict[MessageId, str] = {}

    def run(self) -> dict[MessageId, str]:
        """Publish the remaining messages; return those that can never be dead letters, with the reasons.

        Raises:
            Transient, AccessRefused, PublishNacked, PublishUnroutable: the broker may accept them later; call again.
        """
        while self._left:
            message, reason = self._left[0]
            try:
                self._dead_letters.publish(message, reason, **self._headers)
            except Exception as error:
                if may_repeat(error) or may_be_mended(error):
                    raise
                # It would fail again and block the next ones.
                extra = {"stream": message.stream, "offset": message.offset}
                log_failure(logger, error, f"message {message.id} cannot become a dead letter", extra=extra)
                self._refused[message.id] = ended(error)
            self._left.popleft()
        return self._refused


def _reduced(
    fields: Mapping[str, Any], headers: Mapping[str, Any], added: dict[str, Any], bytes_max: int
) -> BasicProperties:
    """Return the properties and headers that can be sent and fit into `bytes_max`; name the others in `added`."""
    # Less the added headers and the list of omissions, at four bytes a character.
    room: float = bytes_max - _encoded_bytes(BasicProperties(headers=added)) - 5 * REASON_CHARACTERS_MAX
    kept: dict[str, dict[str, Any]] = {"": {}, "header ": {}}
    left_out: list[str] = []
    for kind, given in (("", fields), ("header ", headers)):
        for name, value in given.items():
            try:
                size: float = _encoded_bytes(BasicProperties(**({"headers": {name: value}} if kind else {name: value})))
            except InvalidInput:
                size = math.inf
            if size > room:
                left_out.append(kind + name[:_NAME_CHARACTERS_MAX])
            else:
                room -= size
                kept[kind][name] = value
    added[LEFT_OUT_HEADER] = ", ".join(left_out)[:REASON_CHARACTERS_MAX]
    return BasicProperties(headers={**kept["header "], **added}, **kept[""])


def _check_depth(value: Any, levels: int) -> None:
    """Refuse headers nested so deep that the broker accepts them, but every pika consumer crashes."""
    if isinstance(value, Mapping | list | tuple):
        if levels <= 0:
            raise InvalidInput(f"headers are nested deeper than {HEADERS_DEPTH_MAX} levels")
        for each in value.values() if isinstance(value, Mapping) else value:
            _check_depth(each, levels - 1)
