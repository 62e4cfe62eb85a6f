"""The outcome of a publish: errors with the client's and Relatum's class, and the settling of an unknown outcome.

Some callers write `except pika.exceptions.NackError`, others `except relatum.errors.PublishNacked`. Both must catch the
same exception, so its class has both as bases. Any exception of the client or of the system may mean a lost connection,
so the class for a pair is created on first use. The error keeps the arguments, attributes and text of the client's
exception.

`settle` finds an unknown outcome by reading the streams that the message was sent to. The proof that the message is in
no stream has three parts: no message of the lost connection can still arrive; after that time, the stream's leader
reported the stream's end; and all messages written from before the send up to that end were read. Without all three
parts, the outcome stays unknown.
"""

import asyncio
import contextlib
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, is_dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import cache
from typing import Any, Final, TypeVar, cast

from pika.spec import ACCESS_REFUSED, NOT_FOUND

from relatum.common.checks import checked_names, checked_seconds, seconds_text
from relatum.common.ids import MessageId
from relatum.common.waiting import LEAST_S, backoff, in_thread, within
from relatum.errors import (
    BrokerUnavailable,
    ConfigurationError,
    ConnectionsInUse,
    NotAStream,
    NotFound,
    PublishError,
    PublishOutcomeUnknown,
    PublishRejected,
    ReadTimeout,
    RelatumError,
    Transient,
)
from relatum.publishing._locate import Locator, SentMessage
from relatum.reading import RecordBatch, StreamBounds, StreamReader

_Outcome = TypeVar("_Outcome", bound=PublishError)

_UNPICKLABLE = frozenset({"settle", "link", "connection"})


def outcome(kind: type[_Outcome], error: Exception, **fields: Any) -> _Outcome:
    """Return an error that has the client's exception class and Relatum's. Raise it `from` the client's exception."""
    if isinstance(error, kind):
        error.__dict__.update(fields)
        return error
    return _rebuild(kind, type(error), error.args, {**_attributes(error), **fields})


def _rebuild(
    kind: type[_Outcome], client_class: type[Exception], args: tuple[Any, ...], attributes: dict[str, Any]
) -> _Outcome:
    error_class = _class_of(kind, client_class)  # type: ignore[arg-type]  # classes are hashable
    # Call neither initialiser: pika's errors build `args` from other arguments, which are lost.
    error: _Outcome = error_class.__new__(error_class, *args)
    error.args = args
    for name, value in attributes.items():
        setattr(error, name, value)
    return error


@cache
def _class_of(kind: Any, client_class: Any) -> Any:
    body = {
        "__doc__": kind.__doc__,
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__reduce__": lambda self: (_rebuild, (kind, client_class, self.args, _picklable(self))),
        "__init__": Exception.__init__,
        "__str__": client_class.__str__,
        "__repr__": client_class.__repr__,
    }
    return type(kind.__name__, (kind, client_class), body)


def _attributes(error: Exception) -> dict[str, Any]:
    """Return the exception's attributes except `args`: aiormq uses slots, pika the instance's dictionary."""
    state = object.__getstate__(error)
    parts = state if isinstance(state, tuple) else (state,)
    attributes = {name: value for part in parts for name, value in (part or {}).items() if name != "__notes__"}
    if isinstance(error, OSError) and error.errno is not None:
        attributes.update(errno=error.errno, strerror=error.strerror)
    return attributes


def _picklable(error: Exception) -> dict[str, Any]:
    """Return the attributes without those that only work in this process: `settle`, links, connections, channels."""
    attributes = {name: value for name, value in _attributes(error).items() if name not in _UNPICKLABLE}
    for name, value in attributes.items():
        if is_dataclass(value) and not isinstance(value, type) and hasattr(value, "channel"):
            # aiormq's returned message.
            attributes[name] = replace(value, channel=None)
    return attributes


# --- a channel that the broker closed ---------------------------------------------------------------------------------

# A broker processes a channel's frames in order, and drops all frames after a refused one. So if it refused a publish,
# of the channel's last message or of an earlier one, the last message is in no stream.

_MESSAGE_REFUSALS: Final = re.compile(
    r"PRECONDITION_FAILED - (message size|invalid expiration|user_id property|invalid message)"
)
"""Texts of RabbitMQ's code 406 about messages, the same from 3.10 to 4.3. Its others are about acks and declarations.

Source: RabbitMQ, `rabbit_channel.erl`: `check_msg_size`, `check_expiration_header`, `check_user_id_header`.
"""

_PUBLISH_REFUSALS: Final = re.compile(
    r"ACCESS_REFUSED - (write access to exchange|access to topic|access to exchange|.*publish)", re.IGNORECASE
)

REFUSAL_CODES: Final = frozenset({ACCESS_REFUSED, NOT_FOUND})
"""Reply codes that refuse a publish: no permission, no such exchange.

A blocking channel has one call at a time, so a code received during a publish refuses the publish.
"""


def refuses_message(text: str) -> bool:
    """Return whether the broker closed a channel because of a message: its size, expiration or user id."""
    return _MESSAGE_REFUSALS.search(text) is not None


def refuses_publish(text: str, exchange: str) -> bool:
    """Return whether the broker closed a channel because of a publish to `exchange`, not because of another call."""
    named = f"'{exchange or 'amq.default'}'" in text
    missing = named and "NOT_FOUND - no exchange" in text
    return refuses_message(text) or missing or (named and _PUBLISH_REFUSALS.search(text) is not None)


# --- a search for the message -----------------------------------------------------------------------------------------

CLOCK_SKEW_S: Final = 60
"""Seconds by which the clocks of a cluster's nodes may differ, or by which a clock may have been set back."""

WAIT_S: Final = 10.0
"""The minimum search time by default, in seconds."""

_POLL_S: Final = 1.0
"""The longest pause between two searches, in seconds."""

_HEARTBEATS_UNTIL_CLOSED: Final = 3
"""Heartbeat intervals without a byte after which RabbitMQ has closed the connection: it does so after 2 to 3."""


def final_at(heartbeat_s: int, *, announced: bool) -> float | None:
    """Return the `time.monotonic()` after which no message of a lost connection can arrive; None: no such time.

    The broker accepts nothing more from a channel or connection that it closed itself (`announced`).
    """
    if announced:
        return time.monotonic() + 1
    return time.monotonic() + _HEARTBEATS_UNTIL_CLOSED * heartbeat_s + 1 if heartbeat_s else None


@dataclass(frozen=True, slots=True)
class Unsettled:
    """A message with an unknown outcome.

    `locator`: The locator, or the error that `settle` raises instead of a search.
    `final_at`: The `time.monotonic()` from which absence proves that the message will not arrive: by then the broker
    has closed the connection that sent the message. None: no such time.
    """

    sent: SentMessage
    locator: Locator | ConfigurationError
    final_at: float | None

    def settle(self, timeout_s: float | None = None, *, streams: tuple[str, ...] = ()) -> tuple[MessageId, ...]:
        """Find the message by reading its streams; see `Receipt.settle`. The search ends at most half a second late.

        The outcome also stays unknown if absence proves nothing: retention has dropped messages of that time, the
        exchange may route to streams that are not bound to it directly, or only a queue has the message.
        """
        settlement = _Settlement(self, timeout_s, streams, again=self.settle)
        while True:
            with within(settlement.left_s):
                found = settlement.search()
            if found:
                return found
            time.sleep(settlement.pause_s())

    async def settle_async(
        self, timeout_s: float | None = None, *, streams: tuple[str, ...] = ()
    ) -> tuple[MessageId, ...]:
        """Like `settle`, but each search runs in a thread. Pauses occupy no thread. Cancelling is safe."""
        settlement = _Settlement(self, timeout_s, streams, again=self.settle_async)
        while True:
            with within(settlement.left_s):
                found = await in_thread(None, settlement.search)
            if found:
                return found
            await asyncio.sleep(settlement.pause_s())


class _Settlement:
    """One call of `settle`: the searches of its streams, and the conclusion from them."""

    def __init__(
        self, unsettled: Unsettled, timeout_s: float | None, streams: tuple[str, ...], *, again: Callable[..., Any]
    ) -> None:
        locator, final_at, now = unsettled.locator, unsettled.final_at, time.monotonic()
        if isinstance(locator, ConfigurationError):
            raise locator
        if timeout_s is None:
            timeout_s = WAIT_S if final_at is None else max(WAIT_S, final_at + 5 - now)
        self._sent, self._locator, self._final_at, self._again = unsettled.sent, locator, final_at, again
        self._timeout_s = checked_seconds("timeout_s", timeout_s)
        self._began, self._deadline = now, now + timeout_s
        self._searches = {name: _StreamSearch(self._sent, name) for name in checked_names("streams", streams)}
        self._is_exact = bool(self._searches)
        self._pauses = backoff(_POLL_S)
        self._has_broker_answered = False

    @property
    def left_s(self) -> float:
        return max(LEAST_S, self._deadline - time.monotonic())

    def pause_s(self) -> float:
        return min(next(self._pauses), max(0.0, self._deadline - time.monotonic()))

    def search(self) -> tuple[MessageId, ...]:
        """Search all streams once. Returns the places, or () to search again. Raises the errors of `settle`."""
        is_final = self._final_at is not None and time.monotonic() >= self._final_at
        failure: RelatumError | None = None
        was_found = any(search.place for search in self._searches.values())
        try:
            if not self._searches:
                where = self._locator.destinations(self._sent)
                self._is_exact = where.is_exact
                if not where.streams:
                    # Handled below: a starting broker may not have restored its bindings yet.
                    text = f"the streams that exchange {self._sent.exchange!r} routes to are unknown"
                    raise NotFound(text)  # noqa: TRY301
                self._searches = {name: _StreamSearch(self._sent, name) for name in where.streams}
            with self._locator.reader() as reader:
                for search in self._searches.values():
                    search.resume(reader, self._deadline)
        except (Transient, NotFound) as error:
            # A starting broker may also report that a stream does not exist.
            failure = error
        searches = self._searches
        found = tuple(sorted(search.place for search in searches.values() if search.place))
        # The broker routes a message to all its streams at one time: a stream without it in the next search lacks it.
        if searches and (len(found) == len(searches) or (was_found and not self._is_exact and failure is None)):
            return found
        is_sure = is_final and failure is None and all(search.is_known for search in searches.values())
        if is_sure and (found or self._is_exact):
            if found:
                return found
            raise PublishRejected(
                f"message {self._sent.message_id} is in no stream and can no longer arrive: publish it again"
            )
        # An exchange without streams is hopeless long before the broker closes a lost connection.
        may_be_starting = not self._is_exact and time.monotonic() < self._began + WAIT_S
        is_hopeless = isinstance(failure, NotFound) and not searches and not may_be_starting
        if is_hopeless or time.monotonic() >= self._deadline:
            # If the broker answered the previous search, a timeout of the last search does not make it unavailable.
            was_cut_short = self._has_broker_answered and isinstance(failure, ReadTimeout)
            return found or self._raise_unknown(None if was_cut_short else failure)
        self._has_broker_answered = failure is None
        return ()

    def _raise_unknown(self, failure: RelatumError | None) -> Any:
        name, searches = self._sent.message_id, self._searches
        if isinstance(failure, NotAStream) or (isinstance(failure, NotFound) and not searches):
            remedy = "name its streams in settle(streams=…) or intercept(…, streams=[…])"
            why = f"cannot search for message {name}; {remedy}: {failure}"
            raise ConfigurationError(why) from failure
        if isinstance(failure, NotFound):
            raise failure
        if isinstance(failure, Transient) and not isinstance(failure, (_OutOfTime, ConnectionsInUse)):
            raise BrokerUnavailable(
                f"cannot search for message {name} within {seconds_text(self._timeout_s)}; settle it again: {failure}"
            ) from failure
        arrives = f"it may still arrive{'' if self._is_exact else ', or be in another stream'}; settle it again"
        why = next((search.unproven_because for search in searches.values() if search.unproven_because), arrives)
        if isinstance(failure, ConnectionsInUse):
            why = f"all {failure.limit} connections were searching for other messages; settle it again"
        raise PublishOutcomeUnknown(
            f"message {name} was not found within {seconds_text(self._timeout_s)}: {why}",
            settle=self._again,
        ) from failure


class _OutOfTime(ReadTimeout):
    """The deadline passed before a stream was read to its end."""


class _StreamSearch:
    """The search of one stream. Each call continues where the last one ended."""

    def __init__(self, sent: SentMessage, stream: str) -> None:
        self._sent = sent
        self._stream = stream
        self._begin: datetime | None = None
        self._next: int | datetime | None = None
        self._is_absent = False
        self.place: MessageId | None = None
        self.unproven_because = ""

    @property
    def is_known(self) -> bool:
        """Whether the message was found, or the last search proved that the stream lacks it."""
        return self.place is not None or self._is_absent

    def resume(self, reader: StreamReader, deadline: float) -> None:
        """Read up to the message or the stream's current end."""
        self._is_absent = False
        if self.place is not None:
            return
        # Query the end before reading: the read then covers all messages up to it.
        bounds = reader.bounds(self._stream)
        if self._next is None:
            self._begin = begin_of(reader, self._stream, self._sent)
            self._next = 0 if self._begin is None else self._begin
        with contextlib.closing(cast("Any", reader.iterate(self._stream, self._next))) as messages:
            for message in messages:
                if self._sent.is_in(message):
                    self.place = MessageId(self._stream, message.offset)
                    return
                self._next = message.offset + 1
                if time.monotonic() >= deadline:
                    raise _OutOfTime(f"the stream {self._stream!r} was not read to its end in time")
        self.unproven_because = self._reason_unproven(reader, bounds)
        self._is_absent = not self.unproven_because

    def _reason_unproven(self, reader: StreamReader, bounds: StreamBounds) -> str:
        """Return why the stream may contain the message that was not found; "": it does not contain the message."""
        if not bounds.is_sure:
            return f"the leader of {self._stream!r} did not report the stream's end; settle the message again"
        if bounds.last is None:
            return ""
        if not isinstance(self._next, int) or self._next <= bounds.last:
            return f"the stream {self._stream!r} was not read to its end; settle the message again"
        if self._begin is not None:
            # Read again: retention may have dropped messages since.
            first = _chunk(reader, self._stream, "first")
            is_later = first is None or (first.chunk_ms or 0) > self._begin.timestamp() * 1000
            if is_later and (first is None or first.first_offset):
                return f"retention has dropped messages of that time from {self._stream!r}, which may have had it"
        return ""


def begin_of(reader: StreamReader, stream: str, sent: SentMessage) -> datetime | None:
    """Return a lower bound of the time, by the broker's clock, when a message was written. None: the stream is empty.

    The broker's clock now shows at least the time of the stream's last chunk. When the message was sent, it showed at
    least that time minus the time elapsed since. The bound holds for any difference between the clocks of client and
    broker, and regardless of when the failure was detected. A sleep of this machine counts only by its wall clock.
    """
    latest = _chunk(reader, stream, "last")
    if latest is None:
        return None
    elapsed_s = max(time.monotonic() - sent.monotonic_s, time.time() - sent.sent_at.timestamp())
    elapsed = timedelta(seconds=elapsed_s)
    begin = min(sent.sent_at, datetime.fromtimestamp((latest.chunk_ms or 0) / 1000, UTC) - elapsed)
    return begin - timedelta(seconds=CLOCK_SKEW_S)


def _chunk(reader: StreamReader, stream: str, which: Any) -> RecordBatch | None:
    """Return the beginning of the first or last chunk; None if the stream is empty."""
    batches = reader.batches(stream, which, follow=False, credit=1)
    with contextlib.closing(cast("Any", batches)) as found:
        for batch in found:
            if batch is None:
                raise ReadTimeout(f"stream {stream!r} delivered no messages in time, although it has some")
            return cast("RecordBatch", batch)
    return None
