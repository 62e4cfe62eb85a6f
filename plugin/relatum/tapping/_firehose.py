"""Carrying the firehose's copies into a stream, each as the message it is a copy of."""

import logging
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import Any, Final

from pika import BlockingConnection
from pika.adapters.blocking_connection import BlockingChannel
from pika.exceptions import AMQPChannelError, ChannelClosedByBroker, ConnectionClosedByBroker

from relatum.errors import NotFound, PublishNacked, PublishUnroutable, RelatumError
from relatum.reading import BrokerAddress
from relatum.superstreams import blocking_connection, checked_stream_name
from relatum.tapping._firehose_queue import queue_of
from relatum.tapping._raw_properties import RawProperties, keep_raw
from relatum.tapping._unwrapping import unwrapped
from relatum.waiting import Outages, Pauses, Server, may_repeat

logger = logging.getLogger("relatum.firehose")

PENDING_MAX: Final = 500
"""Copies under way: taken from the queue, and not confirmed by the stream yet."""

IDLE_S: Final = 0.1
"""Seconds without a copy after which confirms are looked after all the same."""

ASK_S: Final = 30.0
"""Seconds without a copy after which it is asked whether the firehose is on: a broker that starts has it off."""

ANSWER_S: Final = 5.0
"""Seconds within which the copy of such a question comes where it is on."""

LAST_S: Final = 2.0
"""Seconds for what is under way at the end; what is not confirmed by then is carried again the next time."""

_NOT_FOUND: Final = 404
_FORCED: Final = 320
"""The reply code of a broker that is stopped: no message is at fault."""
_NOT_ACKNOWLEDGED: Final = "delivery acknowledgement"
"""In the words of a broker that ends a channel for acknowledging nothing for long: the stream confirms nothing."""
_SETTLED: Final = 0


@dataclass(frozen=True, slots=True)
class FirehoseCounts:
    """What a `Firehose` has done: copies carried, and copies left out since the stream's broker refuses such."""

    carried: int
    refused: int


class Firehose:
    """Carries copies from the firehose's queue into the stream, each at least once, in their order.

    It publishes with confirms and acknowledges afterwards: one that dies leaves up to `PENDING_MAX` messages in the
    stream twice.

    Args:
        broker: The broker's URL or address.
        stream: The stream, as `tap_firehose` made it.
    """

    def __init__(self, broker: str | BrokerAddress, stream: str) -> None:
        self._address = BrokerAddress.of(broker, None)
        self._stream = checked_stream_name(stream, "The stream's name")
        self._queue = queue_of(stream)
        self._question = f"{self._queue}.is-on"
        """A routing key that leads to no queue: a message there is nothing but its copy."""
        self._may_ask = True
        self._is_on: bool | None = None
        self._asked_at: float | None = None
        self._seen_at = 0.0
        self._carried = self._refused = 0
        self._one_by_one = 0
        """How many of the next copies are carried one by one, after the broker has refused one of many."""
        self._passes_first = False
        self._way: _Way | None = None

    def counts(self) -> FirehoseCounts:
        """What it has done so far."""
        return FirehoseCounts(self._carried, self._refused)

    def run(self, stop: threading.Event) -> None:
        """Carry until `stop` is set. The broker may go away and come back.

        Raises:
            NotFound: the queue, the exchange or the stream is not there, or was deleted: tap the firehose first.
            AccessRefused: this user may not read from the queue or write to the exchange.
        """
        outages = Outages(logger, broker=f"{self._address.host}:{self._address.amqp_port}", stop=stop)
        who = f"the firehose into {self._stream!r}"
        pauses = Pauses()
        while not stop.is_set():
            carried = self._carried
            try:
                with blocking_connection(self._address, self._address) as connection:
                    outages.answered(Server.BROKER)
                    outages.over(who)
                    self._carry(connection, stop)
            except RelatumError as error:
                if not self._goes_on(error):
                    raise
                if self._carried > carried:
                    pauses = Pauses()
                outages.failed(who, error)
                stop.wait(pauses.after(error))

    def _goes_on(self, error: RelatumError) -> bool:
        """Whether an error passes. A message that the broker refuses to the stream ends the channel for all."""
        closed = error.__cause__
        if isinstance(closed, ChannelClosedByBroker) and closed.reply_code == _NOT_FOUND:
            raise NotFound(
                f"The firehose's queue {self._queue!r} or exchange {self._stream!r} is not there: relatum tap "
                f"--firehose --stream {self._stream} makes it."
            ) from error
        is_under_way = self._way is not None and len(self._way.pending) > 0
        if is_under_way and _is_refusal(closed):
            self._passes_first = self._one_by_one > 0
            self._one_by_one = PENDING_MAX
        return may_repeat(error) or isinstance(error, PublishNacked)

    # --- one connection ---------------------------------------------------------------------------------------------

    def _carry(self, connection: BlockingConnection, stop: threading.Event) -> None:
        keep_raw(connection)
        channel = connection.channel()
        channel.basic_qos(prefetch_count=1 if self._one_by_one else PENDING_MAX)
        self._way = way = _Way(channel, self._stream)
        self._asked_at, self._seen_at = None, time.monotonic() - ASK_S
        for method, properties, body in channel.consume(self._queue, inactivity_timeout=IDLE_S):
            if method is None:
                self._look(connection)
            else:
                self._take(way, method.delivery_tag, properties, body)
            self._carried += way.settle()
            if stop.is_set():
                break
            if self._one_by_one == 1 and not way.pending:
                # How many are taken at once is said before consuming: it begins anew.
                self._one_by_one = 0
                return
        else:
            raise NotFound(f"The firehose's queue {self._queue!r} was deleted: it is tapped no more.")
        end = time.monotonic() + LAST_S
        while way.pending and time.monotonic() < end:
            connection.process_data_events(time_limit=IDLE_S)
            self._carried += way.settle()

    def _take(self, way: "_Way", tag: int, properties: RawProperties, body: bytes) -> None:
        self._one_by_one = max(1, self._one_by_one - 1) if self._one_by_one else 0
        self._seen_at, self._asked_at = time.monotonic(), None
        if not self._is_on:
            if self._is_on is False:
                logger.info("the firehose of virtual host %r is on", self._address.vhost)
            self._is_on = True
        message = unwrapped(properties.raw)
        if message is None:
            self._leave_out(way, tag, "", "it has no properties, or no routing keys")
        elif message.routing_key == self._question:
            way.skip(tag)
        elif self._passes_first:
            self._passes_first = False
            self._leave_out(way, tag, message.routing_key, "the broker ends the channel that publishes it to a stream")
        else:
            way.publish(tag, message.routing_key, RawProperties(message.properties), body)

    def _leave_out(self, way: "_Way", tag: int, routing_key: str, why: object) -> None:
        self._refused += 1
        logger.warning("a copy of the firehose's is left out (routing key %r): %s", routing_key, why)
        way.skip(tag)

    # --- whether it is on -------------------------------------------------------------------------------------------

    def _look(self, connection: BlockingConnection) -> None:
        """Ask by a message that leads nowhere, where no copy has come for long; say once where none comes of it."""
        now = time.monotonic()
        if self._asked_at is None:
            if self._may_ask and now - self._seen_at >= ASK_S:
                self._asked_at = now
                self._ask(connection)
        elif now - self._asked_at >= ANSWER_S:
            self._asked_at, self._seen_at = None, now
            if self._is_on is not False:
                self._is_on = False
                vhost = self._address.vhost
                logger.warning(
                    "the firehose of virtual host %r is off, so nothing is copied: rabbitmqctl trace_on -p %s turns it "
                    "on, until the broker is started again",
                    vhost,
                    vhost,
                )

    def _ask(self, connection: BlockingConnection) -> None:
        try:
            with connection.channel() as channel:
                channel.basic_publish("", self._question, b"")
        except AMQPChannelError:
            self._may_ask, self._asked_at = False, None
            logger.info("whether the firehose is on is not known: this user may not publish to the default exchange")


def _is_refusal(closed: BaseException | None) -> bool:
    """Whether a broker ended a channel or a connection for what was published there."""
    return (
        isinstance(closed, ChannelClosedByBroker | ConnectionClosedByBroker)
        and closed.reply_code != _FORCED
        and _NOT_ACKNOWLEDGED not in closed.reply_text
    )


class _Way:
    """Publishing copies with confirms, and acknowledging those that the stream has, in their order.

    Confirms are taken by the channel below pika's blocking one, which would wait for each.
    """

    def __init__(self, channel: BlockingChannel, exchange: str) -> None:
        self._channel = channel
        self._exchange = exchange
        self._published = 0
        self._confirmed: set[int] = {_SETTLED}
        self._confirmed_to = 0
        self._failure: RelatumError | None = None
        self.pending: deque[tuple[int, int]] = deque()
        """Number in the order of publishing, 0 of what is not published; and tag of the delivery."""
        ready = threading.Event()
        channel._impl.confirm_delivery(self._on_confirm, lambda _: ready.set())
        while not ready.is_set():
            channel.connection.process_data_events(time_limit=IDLE_S)
        channel.add_on_return_callback(self._on_return)

    def publish(self, tag: int, routing_key: str, properties: RawProperties, body: bytes) -> None:
        self._published += 1
        self.pending.append((self._published, tag))
        self._channel.basic_publish(self._exchange, routing_key, body, properties, mandatory=True)

    def skip(self, tag: int) -> None:
        self.pending.append((_SETTLED, tag))

    def settle(self) -> int:
        """Acknowledge what the stream has; how many that are.

        Raises:
            PublishNacked, PublishUnroutable: the stream took one not; it is carried again.
        """
        if self._failure is not None:
            raise self._failure
        carried, last = 0, None
        while self.pending and (self.pending[0][0] <= self._confirmed_to or self.pending[0][0] in self._confirmed):
            number, last = self.pending.popleft()
            carried += number != _SETTLED
            if number != _SETTLED:
                self._confirmed.discard(number)
        if last is not None:
            self._channel.basic_ack(last, multiple=True)
        return carried

    def _on_confirm(self, frame: Any) -> None:
        method = frame.method
        if method.NAME == "Basic.Nack":
            self._failure = PublishNacked("The broker nacked a copy of the firehose's: its stream may have no leader.")
        elif method.multiple:
            self._confirmed_to = max(self._confirmed_to, method.delivery_tag)
        else:
            self._confirmed.add(method.delivery_tag)

    def _on_return(self, *_: object) -> None:
        self._failure = PublishUnroutable(f"Exchange {self._exchange!r} leads to no stream: tap the firehose again.")
