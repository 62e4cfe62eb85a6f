"""A stream-protocol connection on an event loop, and its subscriptions: numbers, credit and answers.

The connection reads the socket itself, since asyncio's transports cannot take over a connection that has logged in over
TLS, and `add_reader` needs no copy.

A barrier is the answer to an empty Metadata command that follows a subscription or credit. The broker handles the
commands of a connection in order: if a stream got no chunk before the barrier, it has no more records on this node
now.
"""

import asyncio
import contextlib
import ssl
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from relatum.errors import ConnectionLost, RelatumError, StreamUnavailable
from relatum.reading import RECEIVE_BYTES, SILENCE_HEARTBEATS, SocketConnection, refusal
from relatum.wire import frames
from relatum.wire.chunk import Chunk
from relatum.wire.frames import Code, Start, StartSpec
from relatum.wire.session import SUBSCRIPTIONS, Answer, CreditRefused, Damaged, Event, StreamMoved, StreamSession

if TYPE_CHECKING:
    from relatum.following._followed import Followed

# --- subscriptions, without I/O ---------------------------------------------------------------------------------------

WAITS_BEFORE: Final = (4, 2, 1)
"""Before this version, the broker delays all streams of a connection by two milliseconds whenever one has no more, so
for each lone message. Source: rabbitmq-server, pull request 14766; `timer:sleep(1)` in `rabbit_stream_reader` of
3.10.8."""

UNDER_WAY_MAX: Final = 16
"""Maximum chunks of a stream in flight from such a broker: while a stream gets a message every millisecond, all others
of the connection wait for it until its credit is used up."""

CROWD: Final = 64
"""Maximum streams on a connection to such a broker: they delay each other by at most an eighth of a second."""

WINDOW_BYTES: Final = 1 << 20
"""Approximate bytes of one stream in flight and held; at least one chunk."""

CHUNKS_MAX: Final = 1024
"""Maximum chunks of a stream in flight and held; messages published one by one have one each. An owner that releases
them five times a second keeps up with 5,000 a second."""


class Interrupted(Exception):
    """The connection ended, which is reported once for all its streams."""


class Subscription:
    """The subscription to one stream: its number on the connection, and its credit.

    `barrier`: Answered after everything requested before it. `is_quiet`: A barrier showed that there is no more.
    """

    def __init__(self, followed: "Followed", number: int, under_way_max: int = CHUNKS_MAX) -> None:
        self.followed = followed
        self.number = number
        self._under_way_max = under_way_max
        self.connection: Connection | None = None
        self.barrier: int | None = None
        self.has_come = self.is_quiet = False
        self._under_way, self._held, self._window = 1, 0, 1

    def on_chunk(self, chunk: Chunk) -> None:
        """Count an arrived chunk, and adapt the window to its size."""
        self.has_come = True
        self._under_way -= 1
        self._held += 1
        self._window = min(CHUNKS_MAX, WINDOW_BYTES // (len(chunk.data) or 1) or 1)

    def free(self) -> None:
        self._held -= 1

    def credit(self) -> int:
        """Take the available credit, once it is half of what may be in flight: how many more chunks are sent now.

        For each credit, a broker before `WAITS_BEFORE` delays all streams of the connection as for a lone message.
        """
        most = min(self._window, self._under_way_max)
        credit = min(self._window - self._held, most) - self._under_way
        if credit * 2 < most:
            return 0
        self._under_way += credit
        return credit

    @property
    def may_come(self) -> bool:
        """Whether a chunk may arrive; without credit, silence proves nothing."""
        return self._under_way > 0


class Subscriptions:
    """The subscriptions of one session."""

    def __init__(self, session: StreamSession) -> None:
        self._session = session
        self._all: dict[int, Subscription] = {}
        self._answers: dict[int, int] = {}
        self._awaiting: dict[int, None] = {}
        self._barriers: dict[int, list[int]] = {}

    @property
    def room(self) -> int:
        """The number of subscriptions that still fit; numbers being unsubscribed are not free yet."""
        return min(SUBSCRIPTIONS - self._session.subscription_count, self._session.attaches_left)

    @property
    def is_crowded(self) -> bool:
        """Whether the streams on this connection would delay another one."""
        return len(self._all) >= CROWD and self._session.is_older_than(WAITS_BEFORE)

    # --- commands -----------------------------------------------------------------------------------------------------

    def add(self, followed: "Followed", offset: int) -> Subscription:
        """Subscribe, with one credit and a barrier."""
        number = self._session.take_subscription()
        correlation = self._session.next_correlation()
        self._answers[correlation] = number
        most = UNDER_WAY_MAX if self._session.is_older_than(WAITS_BEFORE) else CHUNKS_MAX
        subscription = self._all[number] = Subscription(followed, number, most)
        start = StartSpec(Start.OFFSET, offset)
        self._session.send(frames.subscribe(correlation, number, followed.stream, start, 1))
        self._awaiting[number] = None
        return subscription

    def remove(self, subscription: Subscription) -> None:
        """Unsubscribe; chunks still in flight are dropped on arrival."""
        number = subscription.number
        if self._all.get(number) is subscription:
            del self._all[number]
            self._awaiting.pop(number, None)
            self._session.unsubscribe(number)

    def grant(self, subscription: Subscription) -> bool:
        """Grant the available credit; return whether there is something to send.

        Until the stream is quiet, request a barrier, too; even without credit if chunks were larger than expected: with
        so much in flight, there may be no credit for long.
        """
        if self._all.get(subscription.number) is not subscription:
            return False
        credit = subscription.credit()
        asks = not subscription.is_quiet and (credit > 0 or (subscription.has_come and subscription.may_come))
        if credit:
            self._session.send(frames.credit(subscription.number, credit))
        if asks:
            subscription.has_come, subscription.barrier = False, None
            self._awaiting[subscription.number] = None
        return credit > 0 or asks

    def set_barrier(self) -> None:
        """Set one barrier for all streams that were subscribed or granted credit since the last one."""
        if self._awaiting:
            correlation = self._session.next_correlation()
            self._barriers[correlation] = list(self._awaiting)
            for number in self._awaiting:
                self._all[number].barrier = correlation
            self._awaiting.clear()
            self._session.send(frames.metadata(correlation, []))

    def interrupt(self) -> None:
        subscriptions, self._all = self._all, {}
        self._awaiting.clear()
        for subscription in subscriptions.values():
            subscription.connection = None
            subscription.followed.on_ended(Interrupted())

    # --- answers ------------------------------------------------------------------------------------------------------

    def receive(self, events: list[Event]) -> None:
        for event in events:
            if type(event) is Chunk:
                subscription = self._all.get(event.subscription)
                if subscription is not None:
                    subscription.on_chunk(event)
                    subscription.followed.on_chunk(event)
            elif type(event) is Answer:
                self._answered(event)
            elif type(event) is StreamMoved:
                error = StreamUnavailable(f"The stream {event.stream!r} moved or was deleted.", stream=event.stream)
                for each in [each for each in self._all.values() if each.followed.stream == event.stream]:
                    self._end(each, error)
            elif isinstance(event, CreditRefused | Damaged):
                self._broken(event)

    def _broken(self, event: CreditRefused | Damaged) -> None:
        subscription = self._all.get(event.subscription)
        if subscription is None:
            return
        if isinstance(event, Damaged):
            self._end(subscription, event.error)
        else:
            stream = subscription.followed.stream
            dropped = StreamUnavailable(f"The broker dropped the subscription to {stream!r}.", stream=stream)
            self._end(subscription, dropped)

    def _answered(self, answer: Answer) -> None:
        for number in self._barriers.pop(answer.correlation, ()):
            subscription = self._all.get(number)
            # If it was granted credit since, a later barrier will show it.
            if subscription is not None and subscription.barrier == answer.correlation and not subscription.has_come:
                subscription.followed.on_drained()
        subscription = self._all.get(self._answers.pop(answer.correlation, -1))
        if subscription is not None and answer.code != Code.OK:
            self._end(subscription, refusal(subscription.followed.stream, answer.code))

    def _end(self, subscription: Subscription, error: RelatumError) -> None:
        # Even if the broker has ended it: the answer frees the number.
        self.remove(subscription)
        subscription.followed.on_ended(error)


# --- the socket -------------------------------------------------------------------------------------------------------

READS_AT_ONCE: Final = 8
"""Reads of one connection before other work gets its turn: 2 MiB."""

UNSENT_BYTES_MAX: Final = 1 << 20
"""Maximum bytes waiting to be sent; a broker that does not read them is considered dead."""

BEAT_S: Final = 1.0
"""Seconds between checks of heartbeats."""

_WOULD_BLOCK: Final = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


class Connection:
    """A logged-in connection, with the streams that are read over it.

    `lost`: Called once with the reason if the connection ends by itself, not after `close`.
    """

    def __init__(self, connection: SocketConnection, lost: "Callable[[Connection, Exception], None]") -> None:
        self._connection = connection
        self._lost = lost
        self.session = connection.session
        self.session.reports_damage = True
        self.subscriptions = Subscriptions(self.session)
        self._socket = connection.socket
        self._loop = asyncio.get_running_loop()
        self._buffer = memoryview(bytearray(RECEIVE_BYTES))
        self._unsent = bytearray()
        self._is_open = True
        self._is_paused = self._is_writing = False
        self.opened_at = self._sent_at = self._received_at = self._paused_at = time.monotonic()
        self._loop.add_reader(self._socket, self._read)
        self._beating = self._loop.call_later(BEAT_S, self._beat)

    # --- bytes --------------------------------------------------------------------------------------------------------

    def _read(self) -> None:
        if not self._is_open or self._is_paused:
            return
        try:
            self._receive()
        except Exception as error:  # noqa: BLE001 - other connections continue
            self._end(error)

    def _receive(self) -> None:
        for _ in range(READS_AT_ONCE):
            try:
                count = self._socket.recv_into(self._buffer)
            except _WOULD_BLOCK:
                return
            except OSError as error:
                raise _broken(error) from error
            if not count:
                raise ConnectionLost("The broker closed a stream connection.")
            self._received_at = time.monotonic()
            self.subscriptions.receive(self.session.receive(self._buffer[:count]))
            if not self._is_open or self._is_paused:
                return
            # Bytes that TLS has already decrypted do not make the socket readable.
            if count < RECEIVE_BYTES and not self._has_pending():
                return
        if self._has_pending():
            self._loop.call_soon(self._read)

    def _has_pending(self) -> bool:
        return isinstance(self._socket, ssl.SSLSocket) and self._socket.pending() > 0

    def flush(self) -> None:
        """Send as many of the outgoing bytes as the socket accepts."""
        if self._is_open:
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
        except _WOULD_BLOCK:
            if len(self._unsent) > UNSENT_BYTES_MAX:
                raise ConnectionLost("A stream connection was lost: the broker does not read.") from None
        except OSError as error:
            raise _broken(error) from error
        if bool(self._unsent) != self._is_writing:
            self._is_writing = not self._is_writing
            if self._is_writing:
                self._loop.add_writer(self._socket, self.flush)
            else:
                self._loop.remove_writer(self._socket)

    # --- control ------------------------------------------------------------------------------------------------------

    def pause(self, is_paused: bool) -> None:
        """Stop or resume reading; TCP then slows the broker down."""
        if not self._is_open or is_paused == self._is_paused:
            return
        self._is_paused, now = is_paused, time.monotonic()
        if is_paused:
            self._paused_at = now
            self._loop.remove_reader(self._socket)
            return
        # The broker was not silent during a pause.
        self._received_at += now - self._paused_at
        self._loop.add_reader(self._socket, self._read)
        if self._has_pending():
            self._loop.call_soon(self._read)

    def _beat(self) -> None:
        """Send a heartbeat if one is due; end the connection if the broker has been silent for too long."""
        self._beating = self._loop.call_later(BEAT_S, self._beat)
        now, heartbeat_s = time.monotonic(), self.session.heartbeat_s
        if not heartbeat_s:
            return
        if now - self._received_at > heartbeat_s * SILENCE_HEARTBEATS and not self._is_paused:
            self._end(ConnectionLost("A stream connection was lost: the broker sent nothing for too long."))
        elif now - self._sent_at > heartbeat_s / 2:
            self.session.send(frames.heartbeat())
            self.flush()

    def _end(self, error: Exception) -> None:
        if self._is_open:
            self._drop()
            self._lost(self, error)

    def _drop(self) -> None:
        self._is_open = False
        self._beating.cancel()
        self._loop.remove_reader(self._socket)
        self._loop.remove_writer(self._socket)
        # The answer to the broker's Close, or our own Close.
        with contextlib.suppress(OSError, ValueError):
            self._socket.send(bytes(self._unsent + self.session.take_outgoing()))
        self._connection.abandon()

    def close(self) -> None:
        """Send Close as best effort, and close the connection."""
        if self._is_open:
            self.session.send_close()
            self._drop()


def _broken(error: OSError) -> ConnectionLost:
    return ConnectionLost(f"A stream connection was lost: {error.strerror or error}.")
