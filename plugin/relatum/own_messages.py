"""Publishes Relatum's own messages, control messages and dead letters, directly to streams, each with a confirm.

A dead letter is a copy of a message that could not be processed. A header contains the reason.
"""

import logging
import math
import threading
from collections import deque
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import fields
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
from relatum.common.waiting import ended, log_failure, may_repeat, needs_operator
from relatum.errors import (
    AccessRefused,
    BrokerUnavailable,
    ConfigurationError,
    HeadersRefused,
    InvalidInput,
    PublishNacked,
    PublishRejected,
    PublishUnroutable,
    RelatumError,
)
from relatum.reading import BrokerAddress, Message, Properties, blocking_connection, close_in_time, in_time

logger = logging.getLogger("relatum.dead_letters")

REASON_HEADER: Final = "relatum_dead_reason"
"""Header: why the message became a dead letter."""

STREAM_HEADER: Final = "relatum_dead_stream"
"""Header: the name of the message's stream."""

OFFSET_HEADER: Final = "relatum_dead_offset"
"""Header: the message's offset in its stream. Stream and offset identify a dead letter that was published twice."""

LEFT_OUT_HEADER: Final = "relatum_dead_left_out"
"""Header: names of properties and headers that were left out, since they do not fit or cannot be sent:
"correlation_id, header trace"."""

REASON_CHARACTERS_MAX: Final = 1000
"""Maximum characters of a reason; the rest is cut off."""

_NAME_CHARACTERS_MAX: Final = 60
"""Maximum characters of a header's name in `relatum_dead_left_out`."""

_PROPERTIES: Final = [each.name for each in fields(Properties) if each.name not in ("expiration", "user_id")]
"""Properties that a dead letter copies: not `expiration`, which streams ignore, nor the publisher's `user_id`."""

DIRECT_TIMEOUT_S: Final = 10.0
"""Seconds until a silent broker counts as unavailable."""

MALFORMED: Final = frozenset({FRAME_ERROR, SYNTAX_ERROR, UNEXPECTED_FRAME})
"""Reply codes with which the broker closes a connection after a frame of wrong order, size or content. It drops all
later frames of the connection."""

_FRAME_BYTES: Final = 8 + 12
"""Bytes of a header frame without its properties: the frame's header and end, then class, weight and body size.

Source: AMQP 0-9-1, 2.3.5 and 2.3.5.2. RabbitMQ compares the whole frame with the negotiated size.
"""


class DirectPublisher(Closing):
    """Publishes to streams by name, through the default exchange. A context manager; threads may share one.

    The first message opens the connection; after a loss, the next message opens another. If the connection ends before
    a confirm and the caller retries, the message may be published twice. `what` names a message in errors: "a dead
    letter". `timeout_s` limits connecting and then each message: after that, a broker that is silent or blocks
    publishers raises `BrokerUnavailable`.
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

        Raises a `PublishError`, `BrokerUnavailable` or `AccessRefused`; `InvalidInput` if nothing was sent, such as
        `HeadersRefused` for properties that do not fit into a frame (field `bytes_max`: their maximum).
        """
        size = _encoded_bytes(properties)
        with self._lock:
            try:
                connection = self._connected()
                frame_max = connection._impl.params.frame_max
                if frame_max and size + _FRAME_BYTES > frame_max:
                    # The broker would close the connection.
                    raise HeadersRefused(  # noqa: TRY301 - raised again below
                        f"the properties of {self._what} take {size} bytes, and a frame of this connection can hold "
                        f"at most {frame_max - _FRAME_BYTES} of them; nothing was sent",
                        reason="too_large",
                        bytes_max=frame_max - _FRAME_BYTES,
                    )
                with in_time(connection, self._timeout_s):
                    if self._channel is None:
                        self._channel = connection.channel()
                        self._channel.confirm_delivery()
                    self._channel.basic_publish("", stream, body, properties, mandatory=True)
            except UnroutableError as error:
                raise PublishUnroutable(f"there is no stream {stream!r} for {self._what}: declare it") from error
            except NackError as error:
                raise PublishNacked(
                    f"the broker refused {self._what} for {stream!r}: try again, or make room if the queue is full"
                ) from error
            except (AMQPError, OSError) as error:
                self._drop()
                code = error.reply_code if isinstance(error, ChannelClosedByBroker | ConnectionClosedByBroker) else None
                reason_text = str(error) or type(error).__name__
                if isinstance(error, ChannelClosedByBroker) and code == ACCESS_REFUSED:
                    raise AccessRefused(
                        f"user {self._address.user!r} may not publish {self._what} to {stream!r} through the default "
                        "exchange: grant the user permission to write to 'amq.default'"
                    ) from error
                if code == PRECONDITION_FAILED or code in MALFORMED:  # too large, or invalid
                    raise PublishRejected(
                        f"the broker does not accept {self._what} for {stream!r}: {reason_text}"
                    ) from error
                raise BrokerUnavailable(
                    f"the broker did not confirm {self._what} for {stream!r}; try again: {reason_text}"
                ) from error
            except RelatumError:
                raise  # nothing was sent
            except BaseException:
                # Interrupted: pika would take a late confirm for that of the next message.
                self._drop()
                raise

    def _connected(self) -> BlockingConnection:
        if self._connection is not None:
            with suppress(AMQPError, OSError):
                self._connection.process_data_events(0)
            if self._channel is None or not self._channel.is_open:
                self._drop()
        if self._connection is None:
            # No heartbeats: nothing would answer them between messages. The next publish notices a lost connection.
            self._connection = blocking_connection(self._address, timeout_s=self._timeout_s, heartbeat_s=0)
        return self._connection

    def _drop(self) -> None:
        connection, self._connection, self._channel = self._connection, None, None
        if connection is not None:
            close_in_time(connection)

    @own_connection()
    def close(self) -> None:
        """Close the connection. The next message opens another."""
        with self._lock:
            self._drop()


def _encoded_bytes(properties: BasicProperties) -> int:
    _check_depth(properties.headers, HEADERS_DEPTH_MAX + 1)
    try:
        return sum(map(len, properties.encode()))
    except Exception as error:
        # pika's encoder raises AssertionError, struct.error and RecursionError as well as its own errors.
        reason = str(error) or type(error).__name__
        raise InvalidInput(f"AMQP 0.9.1 cannot encode the properties: {reason}; nothing was sent") from error


class DeadLetters(Closing):
    """Publishes dead letters to a stream or another queue. Connects, retries and times out like `DirectPublisher`.

    Duplicates of a dead letter have the same `relatum_dead_stream` and `relatum_dead_offset`.
    """

    def __init__(self, address: BrokerAddress, stream: str, *, timeout_s: float = DIRECT_TIMEOUT_S) -> None:
        self.stream = stream
        self._publisher = DirectPublisher(address, "a dead letter", timeout_s=timeout_s)

    def publish(self, message: Message, reason: str, **headers: str | int | bool) -> None:
        """Publish a message as a dead letter and wait for the confirm. Raises as `DirectPublisher.publish`.

        Properties and headers that AMQP 0.9.1 cannot send (a correlation id over 255 bytes, headers larger than a
        frame) are left out and named in `relatum_dead_left_out`.
        """
        added: dict[str, Any] = {REASON_HEADER: reason[:REASON_CHARACTERS_MAX], **headers}
        added |= {STREAM_HEADER: message.stream, OFFSET_HEADER: message.offset}
        given = {name: getattr(message.properties, name) for name in _PROPERTIES}
        if given["timestamp"] is not None:
            given["timestamp"] = int(given["timestamp"].timestamp())
        own_headers = {name: value for name, value in message.headers.items() if name not in added}
        try:
            properties = BasicProperties(headers={**own_headers, **added}, **given)
            self._publisher.publish(self.stream, message.body, properties)
        except InvalidInput as refused:
            reduced = _reduced(given, own_headers, added, getattr(refused, "bytes_max", HEADERS_BYTES_MAX))
            self._publisher.publish(self.stream, message.body, reduced)
            extra = {"stream": message.stream, "offset": message.offset, "left_out": added[LEFT_OUT_HEADER]}
            why = str(refused).removesuffix("; nothing was sent")
            logger.warning("a dead letter was published without some of its properties: %s", why, extra=extra)

    def close(self) -> None:
        """Close the connection."""
        self._publisher.close()


class DeadLetterPublisher:
    """Publishes several dead letters. A second `run` skips those that were confirmed or cannot be published."""

    def __init__(
        self, dead_letters: DeadLetters, letters: Iterable[tuple[Message, str]], **headers: str | int | bool
    ) -> None:
        self._dead_letters = dead_letters
        self._pending = deque(letters)
        self._headers = headers
        self._refused: dict[MessageId, str] = {}

    def run(self) -> dict[MessageId, str]:
        """Publish the remaining messages; return the ids of those that cannot become dead letters, with the reasons.

        Raises an error only if it may be over later: call again to publish the rest.
        """
        while self._pending:
            message, reason = self._pending[0]
            try:
                self._dead_letters.publish(message, reason, **self._headers)
            except Exception as error:
                if may_repeat(error) or needs_operator(error):
                    raise
                # A retry would fail again and block the following messages.
                extra = {"stream": message.stream, "offset": message.offset}
                log_failure(logger, error, f"message {message.id} cannot become a dead letter", extra=extra)
                self._refused[message.id] = ended(error)
            self._pending.popleft()
        return self._refused


def _reduced(
    given: Mapping[str, Any], headers: Mapping[str, Any], added: dict[str, Any], bytes_max: int
) -> BasicProperties:
    """Return the properties and headers that can be sent and fit into `bytes_max`; list the others in `added`."""
    # The added headers and the list of the others, with up to four bytes a character, also need room.
    room: float = bytes_max - _encoded_bytes(BasicProperties(headers=added)) - 5 * REASON_CHARACTERS_MAX
    included: dict[str, dict[str, Any]] = {"": {}, "header ": {}}
    left_out: list[str] = []
    for kind, items in (("", given), ("header ", headers)):
        for name, value in items.items():
            try:
                size: float = _encoded_bytes(BasicProperties(**({"headers": {name: value}} if kind else {name: value})))
            except InvalidInput:
                size = math.inf
            if size > room:
                left_out.append(kind + name[:_NAME_CHARACTERS_MAX])
            else:
                room -= size
                included[kind][name] = value
    added[LEFT_OUT_HEADER] = ", ".join(left_out)[:REASON_CHARACTERS_MAX]
    return BasicProperties(headers={**included["header "], **added}, **included[""])


def _check_depth(value: Any, levels: int) -> None:
    """Raise `InvalidInput` for headers nested so deep that pika crashes when it reads them. The broker accepts them."""
    if isinstance(value, Mapping | list | tuple):
        if levels <= 0:
            raise InvalidInput(f"headers are nested deeper than {HEADERS_DEPTH_MAX} levels; nothing was sent")
        for each in value.values() if isinstance(value, Mapping) else value:
            _check_depth(each, levels - 1)
