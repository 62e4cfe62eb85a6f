"""A stream protocol connection on an event loop, and its subscriptions: ids, credit and answers.

The connection reads the socket itself: asyncio's transports cannot take over a connection after its login over TLS, and
`add_reader` avoids a copy.

A barrier is the answer to an empty Metadata command that follows a Subscribe or Credit. The broker handles the commands
of a connection in order. So a stream without a chunk before the barrier has no more records on this node now.
"""

import asyncio
import contextlib
import ssl
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from relatum.errors import ConnectionLost, RelatumError, StreamUnavailable
from relatum.reading import SocketConnection, refusal
from relatum.reading._connecting import WOULD_BLOCK
from relatum.reading._connection import RECEIVE_BYTES, SILENCE_HEARTBEATS
from relatum.wire import frames
from relatum.wire.chunk import Chunk
from relatum.wire.frames import Code, Start, StartSpec
from relatum.wire.session import SUBSCRIPTIONS, Answer, CreditRefused, Damaged, Event, StreamMoved, StreamSession

if TYPE_CHECKING:
    from relatum.reading.following._followed import Followed

# --- subscriptions, without I/O ---------------------------------------------------------------------------------------

DELAYS_BEFORE: Final = (4, 2, 1)
"""Before this version, a broker that reaches a stream's end delays all streams of the connection by two milliseconds;
every message published alone causes this. Source: rabbitmq-server, pull request 14766; `timer:sleep(1)` in
`rabbit_stream_reader` of 3.10.8."""

IN_FLIGHT_MAX: Final = 16
"""Maximum chunks of a stream in flight from such a broker. A stream with a message every millisecond delays all others
of the connection until its credit is used up."""

CROWDED_STREAMS: Final = 64
"""A connection to such a broker is crowded from so many streams on. They delay each other by at most 1/8 s."""

WINDOW_BYTES: Final = 1 << 20
"""Approximate maximum bytes of one stream in flight or held by the owner; at least one chunk."""

CHUNKS_MAX: Final = 1024
"""Maximum chunks of a stream in flight or held by the owner. A message published alone is a chunk of its own, so an
owner that releases five times a second keeps up with 5,000 such messages a second."""


class Interrupted(Exception):
    """The connection ended. The end is reported once for all its streams."""


class Subscription:
    """The subscription to one stream: its id on the connection, and its credit.

    `among`: The connection's subscriptions; None once it has ended. `barrier`: The latest barrier's correlation id.
    `is_quiet`: A barrier showed that the node has no more records.
    """

    def __init__(self, followed: "Followed", number: int, in_flight_max: int = CHUNKS_MAX) -> None:
        self.followed = followed
        self.number = number
        self._in_flight_max = in_flight_max
        self.among: Subscriptions | None = None
        self.barrier: int | None = None
        self.has_chunks = self.is_quiet = False
        self._in_flight, self._held, self._window = 1, 0, 1

    def on_chunk(self, chunk: Chunk) -> None:
        """Count an arrived chunk, and adapt the window to its size."""
        self.has_chunks = True
        self._in_flight -= 1
        self._held += 1
        self._window = min(CHUNKS_MAX, WINDOW_BYTES // (len(chunk.data) or 1) or 1)

    def free(self) -> None:
        self._held -= 1

    def grant(self) -> None:
        if self.among is not None:
            self.among.grant(self)

    def end(self) -> None:
        """Unsubscribe. Idempotent."""
        if self.among is not None:
            self.among.remove(self)

    def credit(self) -> int:
        """Take the credit to grant now, in chunks. 0 while less than half of the maximum in flight is available.

        For each Credit, a broker before `DELAYS_BEFORE` delays all streams of the connection.
        """
        in_flight_max = min(self._window, self._in_flight_max)
        credit = min(self._window - self._held, in_flight_max) - self._in_flight
        if credit * 2 < in_flight_max:
            return 0
        self._in_flight += credit
        return credit

    @property
    def has_credit(self) -> bool:
        """Whether the broker may send a chunk. Without credit, a missing chunk proves nothing."""
        return self._in_flight > 0


class Subscriptions:
    """The subscriptions of one session. `flush_soon` is called when there is something to send."""

    def __init__(self, session: StreamSession, flush_soon: Callable[[], object] = lambda: None) -> None:
        self._session = session
        self._flush_soon = flush_soon
        self._by_id: dict[int, Subscription] = {}
        self._subscribing: dict[int, int] = {}
        self._barriers: dict[int, list[int]] = {}
        self._unfenced: dict[int, None] = {}

    @property
    def room(self) -> int:
        """The number of subscriptions that still fit. An id is free again once its Unsubscribe is answered."""
        return min(SUBSCRIPTIONS - self._session.subscription_count, self._session.attaches_left)

    @property
    def is_crowded(self) -> bool:
        """Whether the streams on this connection would delay another one."""
        return len(self._by_id) >= CROWDED_STREAMS and self._session.is_older_than(DELAYS_BEFORE)

    # --- commands -----------------------------------------------------------------------------------------------------

    def add(self, followed: "Followed", offset: int) -> Subscription:
        """Subscribe, with one credit and a barrier."""
        number = self._session.take_subscription()
        correlation = self._session.next_correlation()
        self._subscribing[correlation] = number
        in_flight_max = IN_FLIGHT_MAX if self._session.is_older_than(DELAYS_BEFORE) else CHUNKS_MAX
        subscription = self._by_id[number] = Subscription(followed, number, in_flight_max)
        subscription.among = self
        start = StartSpec(Start.OFFSET, offset)
        self._session.send(frames.subscribe(correlation, number, followed.stream, start, 1))
        self._unfenced[number] = None
        self._flush_soon()
        return subscription

    def remove(self, subscription: Subscription) -> None:
        """Unsubscribe; chunks still in flight are dropped on arrival."""
        subscription.among = None
        del self._by_id[subscription.number]
        self._unfenced.pop(subscription.number, None)
        self._session.unsubscribe(subscription.number)
        self._flush_soon()

    def grant(self, subscription: Subscription) -> None:
        """Grant the available credit."""
        credit = subscription.credit()
        # A barrier is also needed without credit: after larger chunks than expected, there may be none for long.
        can_drain = credit > 0 or (subscription.has_chunks and subscription.has_credit)
        needs_barrier = can_drain and not subscription.is_quiet
        if credit:
            self._session.send(frames.credit(subscription.number, credit))
        if needs_barrier:
            subscription.has_chunks, subscription.barrier = False, None
            self._unfenced[subscription.number] = None
        if credit or needs_barrier:
            self._flush_soon()

    def set_barrier(self) -> None:
        """Send one barrier for all streams that were subscribed or granted credit since the last barrier."""
        if self._unfenced:
            correlation = self._session.next_correlation()
            self._barriers[correlation] = list(self._unfenced)
            for number in self._unfenced:
                self._by_id[number].barrier = correlation
            self._unfenced.clear()
            self._session.send(frames.metadata(correlation, []))

    def interrupt(self) -> None:
        subscriptions, self._by_id = self._by_id, {}
        self._unfenced.clear()
        for subscription in subscriptions.values():
            subscription.among = None
            subscription.followed.on_ended(Interrupted())

    # --- answers ------------------------------------------------------------------------------------------------------

    def receive(self, events: list[Event]) -> None:
        for event in events:
            if type(event) is Chunk:
                receiver = self._by_id.get(event.subscription)
                if receiver is not None:
                    receiver.on_chunk(event)
                    receiver.followed.on_chunk(event)
            elif type(event) is Answer:
                self._answered(event)
            elif type(event) is StreamMoved:
                error = StreamUnavailable(f"The stream {event.stream!r} moved or was deleted.", stream=event.stream)
                for each in [each for each in self._by_id.values() if each.followed.stream == event.stream]:
                    self._end(each, error)
            elif isinstance(event, CreditRefused | Damaged) and event.subscription in self._by_id:
                subscription = self._by_id[event.subscription]
                stream = subscription.followed.stream
                dropped = StreamUnavailable(f"The broker dropped the subscription to {stream!r}.", stream=stream)
                self._end(subscription, event.error if isinstance(event, Damaged) else dropped)

    def _answered(self, answer: Answer) -> None:
        for number in self._barriers.pop(answer.correlation, ()):
            subscription = self._by_id.get(number)
            # After more credit or a chunk, only a later barrier shows whether the stream is drained.
            if subscription is not None and subscription.barrier == answer.correlation and not subscription.has_chunks:
                subscription.followed.on_drained()
        subscription = self._by_id.get(self._subscribing.pop(answer.correlation, -1))
        if subscription is not None and answer.code != Code.OK:
            self._end(subscription, refusal(subscription.followed.stream, answer.code))

    def _end(self, subscription: Subscription, error: RelatumError) -> None:
        # Unsubscribe even if the broker has ended the subscription: its answer frees the id.
        self.remove(subscription)
        subscription.followed.on_ended(error)


# --- the socket -------------------------------------------------------------------------------------------------------

READS_IN_A_ROW: Final = 8
"""Maximum consecutive reads of one connection before the loop continues with other work: 2 MiB."""

UNSENT_BYTES_MAX: Final = 1 << 20
"""Maximum unsent bytes. A connection that exceeds them counts as lost, since the broker does not read."""

HEARTBEAT_CHECK_S: Final = 1.0
"""Interval of heartbeat checks, in seconds."""


class Connection:
    """A logged-in connection, with the streams that are read over it.

    `on_lost`: Called once with the reason if the connection ends by itself, not after `close`.
    """

    def __init__(self, connection: SocketConnection, on_lost: "Callable[[Connection, Exception], None]") -> None:
        self._connection = connection
        self._on_lost = on_lost
        self.session = connection.session
        self.subscriptions = Subscriptions(self.session, self._flush_soon)
        self._socket = connection.socket
        self._loop = asyncio.get_running_loop()
        self._buffer = memoryview(bytearray(RECEIVE_BYTES))
        self._unsent = bytearray()
        self._is_open = True
        self._is_paused = self._is_writing = self._is_flush_due = False
        self.opened_at = self._sent_at = self._received_at = self._paused_at = time.monotonic()
        self._loop.add_reader(self._socket, self._read)
        self._heartbeat_timer = self._loop.call_later(HEARTBEAT_CHECK_S, self._check_heartbeats)

    # --- bytes --------------------------------------------------------------------------------------------------------

    def _read(self) -> None:
        if not self._is_open or self._is_paused:
            return
        try:
            self._receive()
        except Exception as error:  # noqa: BLE001 - it ends this connection; others continue
            self._end(error)

    def _receive(self) -> None:
        for _ in range(READS_IN_A_ROW):
            try:
                count = self._socket.recv_into(self._buffer)
            except WOULD_BLOCK:
                return
            except OSError as error:
                raise _lost(error) from error
            if not count:
                raise ConnectionLost("The broker closed a stream connection.")
            self._received_at = time.monotonic()
            self.subscriptions.receive(self.session.receive(self._buffer[:count]))
            if not self._is_open or self._is_paused:
                return
            # `add_reader` does not report bytes that TLS has already decrypted.
            if count < RECEIVE_BYTES and not self._has_pending():
                return
        if self._has_pending():
            self._loop.call_soon(self._read)

    def _has_pending(self) -> bool:
        return isinstance(self._socket, ssl.SSLSocket) and self._socket.pending() > 0

    def _flush_soon(self) -> None:
        """Flush in the next iteration of the loop, together with later commands."""
        if not self._is_flush_due:
            self._is_flush_due = True
            self._loop.call_soon(self.flush)

    def flush(self) -> None:
        """Send as many of the pending bytes as the socket accepts."""
        self._is_flush_due = False
        if self._is_open:
            self.subscriptions.set_barrier()
            try:
                self._send()
            except ConnectionLost as error:
                self._end(error)

    def _send(self) -> None:
        self._unsent += self.session.take_outgoing()
        try:
            while self._unsent:
                sent = self._socket.send(self._unsent)
                del self._unsent[:sent]
                self._sent_at = time.monotonic()
        except WOULD_BLOCK:
            if len(self._unsent) > UNSENT_BYTES_MAX:
                raise ConnectionLost("A stream connection was lost: the broker does not read from it.") from None
        except OSError as error:
            raise _lost(error) from error
        if bool(self._unsent) != self._is_writing:
            self._is_writing = not self._is_writing
            if self._is_writing:
                self._loop.add_writer(self._socket, self.flush)
            else:
                self._loop.remove_writer(self._socket)

    # --- control ------------------------------------------------------------------------------------------------------

    def pause(self, is_paused: bool) -> None:
        """Stop or resume reading. During a pause, TCP's flow control stops the broker."""
        if not self._is_open or is_paused == self._is_paused:
            return
        self._is_paused, now = is_paused, time.monotonic()
        if is_paused:
            self._paused_at = now
            self._loop.remove_reader(self._socket)
            return
        # The pause does not count as the broker's silence.
        self._received_at += now - self._paused_at
        self._loop.add_reader(self._socket, self._read)
        if self._has_pending():
            self._loop.call_soon(self._read)

    def _check_heartbeats(self) -> None:
        """Send a heartbeat if one is due. End the connection if the broker has been silent for too long."""
        self._heartbeat_timer = self._loop.call_later(HEARTBEAT_CHECK_S, self._check_heartbeats)
        now, heartbeat_s = time.monotonic(), self.session.heartbeat_s
        if not heartbeat_s:
            return
        if now - self._received_at > heartbeat_s * SILENCE_HEARTBEATS and not self._is_paused:
            limit_s = heartbeat_s * SILENCE_HEARTBEATS
            self._end(ConnectionLost(f"A stream connection was lost: the broker sent nothing for {limit_s:g} s."))
        elif now - self._sent_at > heartbeat_s / 2:
            self.session.send(frames.heartbeat())
            self.flush()

    def _end(self, error: Exception) -> None:
        if self._is_open:
            self._shut_down()
            self._on_lost(self, error)

    def _shut_down(self) -> None:
        self._is_open = False
        self._heartbeat_timer.cancel()
        self._loop.remove_reader(self._socket)
        self._loop.remove_writer(self._socket)
        # The answer to the broker's Close, or our own Close, may be pending.
        with contextlib.suppress(OSError, ValueError):
            self._socket.send(bytes(self._unsent + self.session.take_outgoing()))
        self._connection.abandon()

    def close(self) -> None:
        """Close the connection, after trying to send Close."""
        if self._is_open:
            self.session.send_close()
            self._shut_down()


def _lost(error: OSError) -> ConnectionLost:
    return ConnectionLost(f"A stream connection was lost: {error.strerror or error}.")
