"""Streams over AMQP 0.9.1: a channel each, many channels on a connection, all on the loop of the thread that reads.

A consumer is ended by closing its channel, as in reading over AMQP 0.9.1. Nothing marks a stream's end: where nothing
came for a while, there is no more at present.
"""

import contextlib
import time
from functools import partial
from typing import Any, Final

from pika.adapters.select_connection import SelectConnection
from pika.channel import Channel
from pika.connection import ConnectionParameters
from pika.exceptions import AMQPError, ChannelClosedByBroker

from relatum.errors import ConnectionLost
from relatum.following._desk import Desk, no_room
from relatum.following._followed import SETTLED_S, Followed
from relatum.following._held import Held, HeldDeliveries
from relatum.reading import (
    QUIET_S,
    BrokerAddress,
    Message,
    answered,
    connection_error,
    in_turn,
    moved,
    offset_of,
    pika_parameters,
    refused,
)
from relatum.waiting import Pauses

CHANNELS: Final = 256
"""Streams on one connection: as many as by the stream protocol; RabbitMQ allows 2047 channels by default."""

PREFETCH: Final = 64
"""Messages that a stream has under way and held."""

GOODBYE_S: Final = 0.5
"""Seconds the broker has to answer a close."""


class Consumer:
    """A stream on a channel, as what a following is seated on.

    Args:
        pipe: The connection.
        followed: The following.
    """

    def __init__(self, pipe: "Pipe", followed: Followed) -> None:
        self.pipe = pipe
        self.followed = followed
        self.channel: Channel | None = None
        self.gathered: list[Message] = []
        self.tag = 0
        self.is_over = False


class Pipe:
    """A connection, and the consumers on it.

    Args:
        address: The one of the broker's addresses that it is to.
    """

    def __init__(self, address: BrokerAddress) -> None:
        self.address = address
        self.connection: Any = None
        self.consumers: set[Consumer] = set()
        self.opened_at = time.monotonic()
        self.is_open = False


class Channels:
    """AMQP 0.9.1 as a `Transport`.

    Args:
        desk: Whose streams are read.
        connections_max: Connections that streams are read over at most.
    """

    def __init__(self, desk: Desk, connections_max: int) -> None:
        self.desk = desk
        self._connections_max = connections_max
        self._pipes: list[Pipe] = []
        self._waiting: dict[Followed, None] = {}
        self._opening: Pipe | None = None
        self._is_resting = self._is_closed = False
        self._untried: list[BrokerAddress] = []
        """Of several addresses, those that are tried before the first of them is tried again."""
        self._why: Exception | None = None
        self._pauses = Pauses()
        self._gathering: dict[Consumer, None] = {}

    @property
    def connections(self) -> int:
        """How many there are."""
        return len(self._pipes)

    # --- as a Transport -----------------------------------------------------------------------------------------------

    def seat(self, followed: Followed) -> None:
        """Consume, where there is room; else it waits for another connection."""
        open_pipes = (pipe for pipe in self._pipes if pipe.connection.is_open)
        pipe = next((pipe for pipe in open_pipes if len(pipe.consumers) < CHANNELS), None)
        if pipe is None:
            self._waiting[followed] = None
            self._open()
            return
        consumer = followed.seat = Consumer(pipe, followed)
        pipe.consumers.add(consumer)
        consumer.channel = pipe.connection.channel(on_open_callback=partial(self._on_channel, consumer))
        consumer.channel.add_on_close_callback(partial(self._on_channel_end, consumer))
        consumer.channel.add_on_cancel_callback(lambda _frame: self._fail(consumer, moved(followed.stream)))

    def unseat(self, followed: Followed) -> None:
        """End the channel."""
        self._waiting.pop(followed, None)
        consumer, followed.seat = followed.seat, None
        if consumer is not None:
            self._end(consumer)

    def _end(self, consumer: Consumer) -> None:
        consumer.is_over = True
        consumer.pipe.consumers.discard(consumer)
        self._gathering.pop(consumer, None)
        channel = consumer.channel
        if channel is not None and channel.is_open and consumer.pipe.is_open:
            channel.close()

    def grant(self, followed: Followed, credit: int, held: Held | None) -> None:
        """Acknowledge what is held no more, with which the broker sends more."""
        channel = followed.seat.channel
        if isinstance(held, HeldDeliveries) and channel is not None and channel.is_open:
            channel.basic_ack(held.tag, multiple=True)
            # The broker may have waited for it: what comes by it takes as long as anything else.
            followed.has_come = True

    def pause(self, is_paused: bool) -> None:
        """What is not acknowledged bounds what comes: nothing else is to be done."""

    def close(self) -> None:
        """End all connections, waiting a little for the broker."""
        self._is_closed = True
        opening = [self._opening] if self._opening is not None and self._opening.connection is not None else []
        pipes = [*self._pipes, *opening]
        for pipe in pipes:
            for consumer in pipe.consumers:
                consumer.is_over = True
            with contextlib.suppress(AMQPError):
                pipe.connection.close()
        self._pipes, self._opening = [], None
        until = time.monotonic() + GOODBYE_S
        self.desk.loop.call_later(GOODBYE_S, lambda: None)
        while time.monotonic() < until and any(not pipe.connection.is_closed for pipe in pipes):
            self.desk.loop.run_once()
        if any(not pipe.connection.is_closed for pipe in pipes):
            # pika would wait for ever for a broker that does not answer.
            self.desk.loop.shut_sockets()
            self.desk.loop.run_once()

    # --- connections --------------------------------------------------------------------------------------------------

    def _open(self) -> None:
        if self._opening is not None or self._is_resting or self._is_closed:
            return
        if len(self._pipes) >= self._connections_max:
            error = no_room(len(self._waiting), self._connections_max)
            for followed in list(self._waiting):
                self.desk.failed(followed, error)
            return
        address, limit_s = self.desk.questions.address, self.desk.questions.timeout_s
        self._untried = self._untried or in_turn(address)
        pipe = self._opening = Pipe(self._untried.pop(0))
        # Files of TLS may be read, and somebody's function be asked for the password.
        self.desk.helpers.ask(
            lambda: pika_parameters(pipe.address, limit_s, self.desk.questions.heartbeat_s),
            lambda parameters: self._connect(pipe, parameters),
        )

    def _connect(self, pipe: Pipe, parameters: ConnectionParameters | Exception) -> None:
        if self._is_closed:
            return
        if isinstance(parameters, Exception):
            # Told, and tried again.
            self._opening = None
            self._away(parameters)
            return
        pipe.connection = SelectConnection(
            parameters,
            on_open_callback=lambda _connection: self._on_open(pipe),
            on_open_error_callback=lambda _connection, error: self._on_end(pipe, error),
            on_close_callback=lambda _connection, error: self._on_end(pipe, error),
            custom_ioloop=self.desk.loop,
        )

    def _on_open(self, pipe: Pipe) -> None:
        if self._is_closed:
            return
        self._opening = None
        pipe.is_open = True
        answered(self.desk.questions.address, pipe.address, self._why)
        self._untried, self._why = [], None
        self._pipes.append(pipe)
        self.desk.back()
        waiting, self._waiting = list(self._waiting), {}
        for followed in waiting:
            self.seat(followed)

    def _on_end(self, pipe: Pipe, error: BaseException) -> None:
        """A connection has ended, or was not opened."""
        if self._is_closed:
            return
        was_open, pipe.is_open = pipe.is_open, False
        if self._opening is pipe:
            self._opening = None
        if pipe in self._pipes:
            self._pipes.remove(pipe)
        for consumer in pipe.consumers:
            consumer.is_over = True
            self._gathering.pop(consumer, None)
            followed = consumer.followed
            followed.seat = None
            followed.round += 1
            self._waiting[followed] = None
        if was_open:
            if time.monotonic() - pipe.opened_at >= SETTLED_S:
                self._pauses = Pauses()
            self._away(ConnectionLost("An AMQP connection to the broker was lost."))
            return
        # To find out why may take a second.
        self._is_resting = True
        self.desk.helpers.ask(lambda: connection_error(error, pipe.address), self._not_opened)

    def _not_opened(self, error: Exception) -> None:
        self._why = self._why or error
        self._away(error)

    def _away(self, error: Exception) -> None:
        def again() -> None:
            self._is_resting = False
            if self._waiting:
                self._open()

        self._is_resting = True
        self.desk.away(error)
        self.desk.loop.call_later(self._pauses.after(error), again)

    # --- consumers ----------------------------------------------------------------------------------------------------

    def _on_channel(self, consumer: Consumer, channel: Channel) -> None:
        if consumer.is_over:
            channel.close()
            return
        followed = consumer.followed
        start = self.desk.begins(followed)
        channel.basic_qos(prefetch_count=PREFETCH)
        channel.basic_consume(
            followed.stream,
            partial(self._on_delivery, consumer),
            arguments={"x-stream-offset": start},
            callback=lambda _frame: self._look_later(consumer),
        )

    def _look_later(self, consumer: Consumer) -> None:
        """See after a while whether the stream has no more at present."""

        def look() -> None:
            followed = consumer.followed
            if consumer.is_over:
                return
            if followed.has_come:
                followed.has_come = False
            elif not followed.is_held:
                self.desk.quiet(followed)
                if followed.is_quiet:
                    return
            self._look_later(consumer)

        self.desk.loop.call_later(QUIET_S, look)

    def _on_delivery(self, consumer: Consumer, _channel: Channel, method: Any, properties: Any, body: bytes) -> None:
        offset = offset_of(properties.headers)
        if consumer.is_over or offset is None:
            return
        consumer.followed.has_come = True
        consumer.tag = method.delivery_tag
        consumer.gathered.append(Message.from_amqp(consumer.followed.stream, offset, properties, body))
        # All that one read of the socket brought is given together.
        if not self._gathering:
            self.desk.loop.add_callback(self._give)
        self._gathering[consumer] = None

    def _give(self) -> None:
        gathering, self._gathering = list(self._gathering), {}
        for consumer in gathering:
            gathered, consumer.gathered = consumer.gathered, []
            if gathered and not consumer.is_over:
                self.desk.came(consumer.followed, HeldDeliveries(gathered, consumer.tag))

    def _on_channel_end(self, consumer: Consumer, _channel: Channel, reason: BaseException) -> None:
        if isinstance(reason, ChannelClosedByBroker):
            self._fail(consumer, refused(consumer.followed.stream, reason.reply_code, reason.reply_text))

    def _fail(self, consumer: Consumer, error: Exception) -> None:
        if not consumer.is_over:
            self.desk.failed(consumer.followed, error)
