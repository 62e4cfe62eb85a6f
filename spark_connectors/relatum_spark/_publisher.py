"""Publishing to streams under a named producer, with publishing ids chosen by the caller.

Tasks cannot use rstream. A task needs the last publishing id before it sends, which rstream hides. It needs an error if
the connection is lost, but rstream reconnects and calls back. It needs a time-out if the broker is frozen, but rstream
waits forever.
"""

import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Final, NoReturn, Self

from relatum.common.checks import seconds_text
from relatum.errors import (
    AccessRefused,
    BrokerUnavailable,
    ConnectionLost,
    PublishNacked,
    PublishOutcomeUnknown,
    RelatumError,
    StreamNotFound,
    StreamUnavailable,
)
from relatum.reading import BrokerAddress, SocketConnection, stream_connection
from relatum.wire import frames
from relatum.wire.frames import Code
from relatum.wire.session import Answer, Event, StreamMoved, code_name
from relatum_spark._options import SinkOptions

FRAME_BYTES: Final = 128 << 10
"""Maximum bytes of messages in a Publish frame; a larger message gets its own frame."""

PUBLISHERS_MAX: Final = 200
"""Maximum streams of a connection: the protocol numbers publishers from 0 to 255."""

_POLL_S: Final = 1.0  # between two checks of the confirm time-out


def connect(options: SinkOptions) -> SocketConnection:
    """Open a connection of the stream protocol. Raises the errors of `StreamReader.open`."""
    timeout_s = min(options.timeout_s, options.confirm_timeout_s)
    return stream_connection(BrokerAddress.of(options.broker), timeout_s)


class Publisher:
    """A connection that publishes to several streams, which calls name by index. Not thread-safe."""

    def __init__(self, options: SinkOptions, reference: str, streams: Sequence[str]) -> None:
        self._options, self._reference, self._streams = options, reference, tuple(streams)
        self._pending: list[list[bytes]] = [[] for _ in streams]
        self._pending_bytes = [0] * len(self._streams)
        self._unconfirmed: set[tuple[int, int]] = set()  # target and publishing id
        self._progress_at = 0.0
        self._connection = connect(options)
        negotiated = self._connection.session.send_bytes_max or FRAME_BYTES
        self._frame_bytes = min(FRAME_BYTES, negotiated - frames.PUBLISH_BYTES)
        try:
            self._ask(lambda id_, number, stream: frames.declare_publisher(id_, number, reference, stream))
        except BaseException:
            self._connection.abandon()
            raise

    def last_ids(self) -> list[int]:
        """Return the producer's last publishing id in each stream, 0 if it never published there."""
        answers = self._ask(lambda id_, _, stream: frames.query_publisher_sequence(id_, self._reference, stream))
        return [frames.decode_sequence(answer.body) for answer in answers]

    def _ask(self, request: Callable[[int, int, str], bytes]) -> list[Answer]:
        """Send a request for each stream and return the answers; raises an error unless all are OK."""
        connection, correlations = self._connection, []
        for number, stream in enumerate(self._streams):
            correlations.append(connection.session.next_correlation())
            connection.session.send(request(correlations[-1], number, stream))
        connection.deadline = time.monotonic() + min(self._options.timeout_s, self._options.confirm_timeout_s)
        answers = connection.answers(*correlations)
        for stream, answer in zip(self._streams, answers, strict=True):
            if answer.code != Code.OK:
                raise _refusal(stream, answer.code)
        return answers

    def publish(self, target: int, publishing_id: int, entry: bytes) -> None:
        """Publish a message, possibly buffering it; waits while too many messages are unconfirmed.

        `publishing_id` must be higher than the stream's previous one; `entry` is the message with that id, encoded as
        an entry by `relatum.wire`.
        """
        if self._pending_bytes[target] + len(entry) > self._frame_bytes:
            self._send(target)
        self._pending[target].append(entry)
        self._pending_bytes[target] += len(entry)
        self._unconfirmed.add((target, publishing_id))
        if len(self._unconfirmed) >= self._options.in_flight_max:
            self._confirm(self._options.in_flight_max // 2)

    def finish(self) -> None:
        """Send buffered messages and wait until the broker has confirmed all."""
        self._confirm(0)

    def _send(self, target: int) -> None:
        pending = self._pending[target]
        if not pending:
            return
        connection = self._connection
        connection.session.send(frames.publish(target, pending))
        self._pending[target] = []
        self._pending_bytes[target] = 0
        try:
            # A broker that blocks publishers does not read: the flush then waits up to the time-out of confirms.
            connection.flush(self._options.confirm_timeout_s)
        except OSError as error:
            connection.abandon()
            self._raise_unknown("the connection to the broker broke, or the broker stopped reading,", error)
        self._receive(0.0)

    def _confirm(self, in_flight: int) -> None:
        """Send everything, and receive confirms until at most `in_flight` messages are unconfirmed."""
        for target in range(len(self._streams)):
            self._send(target)
        self._progress_at = time.monotonic()
        while len(self._unconfirmed) > in_flight:
            left = self._progress_at + self._options.confirm_timeout_s - time.monotonic()
            if left <= 0:
                self._connection.abandon()
                self._raise_unknown(f"no confirm arrived for {seconds_text(self._options.confirm_timeout_s)}", None)
            self._receive(min(left, _POLL_S))

    def _receive(self, idle_s: float) -> None:
        """Handle received events; wait up to `idle_s` for the first."""
        try:
            events = self._connection.wait(idle_s)
        except ConnectionLost as error:
            self._raise_unknown("the connection to the broker was lost", error)
        for event in events or ():
            self._handle(event)

    def _handle(self, event: Event) -> None:
        if isinstance(event, frames.Confirmed):
            self._unconfirmed.difference_update((event.publisher, number) for number in event.publishing_ids)
            self._progress_at = time.monotonic()
        elif isinstance(event, frames.Refused):
            self._connection.abandon()
            stream, code = self._streams[event.publisher], event.refusals[0][1]
            raise PublishNacked(
                f"the broker refused messages for the stream {stream!r}: {code_name(code)}; some may be stored, and a"
                " retry publishes none of those twice",
                stream=stream,
                in_stream=None,
            )
        elif isinstance(event, StreamMoved) and event.stream in self._streams:
            self._connection.abandon()
            self._raise_unknown(f"the stream {event.stream!r} moved or was deleted", None)

    def _raise_unknown(self, event: str, error: Exception | None) -> NoReturn:
        if not self._unconfirmed and isinstance(error, RelatumError):
            raise error
        raise PublishOutcomeUnknown(
            f"{event} with {len(self._unconfirmed)} messages unconfirmed: they may or may not be stored. A retry of the"
            " task, or of the write under the same writeId, publishes nothing twice",
            in_stream=None,
        ) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if error is None:
            self._connection.close()
        else:
            self._connection.abandon()


def _refusal(stream: str, code: int) -> RelatumError:
    if code == Code.STREAM_DOES_NOT_EXIST:
        return StreamNotFound(f"the stream {stream!r} was deleted: declare it again, and retry", stream=stream)
    if code == Code.ACCESS_REFUSED:
        return AccessRefused(f"this user may not write to the stream {stream!r}: grant write", stream=stream)
    if code == Code.STREAM_NOT_AVAILABLE:
        return StreamUnavailable(f"the stream {stream!r} has no leader now; retry later", stream=stream)
    message = f"the broker refuses to publish to the stream {stream!r}: {code_name(code)}; retry later"
    return BrokerUnavailable(message, stream=stream)
