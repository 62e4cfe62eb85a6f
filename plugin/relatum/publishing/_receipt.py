"""Receipts, by which a publisher waits for the offsets of its message."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

from relatum.checks import checked_seconds, seconds_text
from relatum.errors import (
    ConfigurationError,
    NotFinishedInTime,
    NotRecordedInTime,
    PublishError,
    PublishOutcomeUnknown,
)
from relatum.ids import MessageId
from relatum.outcomes import Outcome, not_finished, outcome_in_task
from relatum.publishing._locate import LOOKED_AT_MAX, Destinations, Locator, Sent
from relatum.publishing._settle import Unsettled
from relatum.waiting import LEAST_S, in_thread

WAIT_S: Final = 10.0
"""Seconds a receipt waits by default."""


@dataclass(eq=False)
class Look:
    """One wait for the places of a message. It ends when all of them are known, or when its time is over.

    Attributes:
        sent: The message.
        where: The streams it may be in.
        ends: The last offset of each of these streams after the message was confirmed, unless `where` is exact.
        deadline: When its time is over, as of `time.monotonic`. The table is asked at least once.
        places: The places found so far: a set that two threads may add to.
        recorded_to: How far those streams were recorded before the table was last asked.
    """

    sent: Sent
    where: Destinations
    ends: dict[str, int]
    deadline: float
    places: set[MessageId] = field(default_factory=set)
    recorded_to: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def asked(self, locator: Locator) -> "Iterator[Future[bool | None]]":
        """A future of the end: by the table, or by the recorder of this process, which knows it sooner."""
        future = locator.waits.ask(self)

        def arrived(place: MessageId) -> None:
            self.places.add(place)
            if self.has_all:
                locator.waits.answer(future, True)

        unsubscribe = locator.subscribe(self.sent, arrived)
        try:
            yield future
        finally:
            unsubscribe()
            future.cancel()

    @property
    def missing(self) -> frozenset[str]:
        """Streams the message may be in, of which no place is known."""
        return self.where.streams - {place.stream for place in tuple(self.places)}

    @property
    def has_all(self) -> bool:
        """Whether there are no more places.

        Where its streams are known exactly, each must have it. Otherwise one must have it, and each other stream it may
        be in must be recorded up to the end that it had after the message was confirmed.
        """
        if self.where.is_exact:
            return not self.missing
        if not self.places or len(self.missing) > LOOKED_AT_MAX:
            return bool(self.places)
        return all(self.recorded_to.get(name, -1) > end for name, end in self.ends.items() if name in self.missing)


class _Published:
    """A message that was sent, and what is known of where it is."""

    def __init__(self, sent: Sent, locator: Locator) -> None:
        self.message_id = sent.message_id
        self._sent = sent
        self._locator = locator
        self._look: Look | None = None

    @property
    def streams(self) -> frozenset[str] | None:
        """The streams the message was routed to; None where that is not exactly known, and before `wait`.

        It is known for the default exchange and for super streams. For other exchanges see `wait`.
        """
        where = None if self._look is None else self._look.where
        return where.streams if where is not None and where.is_exact else None

    def _begin(self, deadline: float) -> tuple[Look, float]:
        """Begin to wait: where the message may be, and when the wait ends. The table is asked once at least."""
        where, ends = self._locator.destinations_and_ends(self._sent, deadline - time.monotonic())
        self._look = Look(self._sent, where, ends, deadline)
        return self._look, max(deadline, time.monotonic() + LEAST_S)

    def _end(self, look: Look, timeout_s: float) -> tuple[MessageId, ...]:
        """The places that were found, when the wait has ended."""
        found, missing, is_exact = tuple(sorted(look.places)), look.missing, look.where.is_exact
        if look.has_all:
            self._locator.note_found(self._sent)
            return found
        if found and not is_exact:
            return found
        note = ""
        if missing:
            note = f" ({'missing' if is_exact else 'looked for in'}: {', '.join(sorted(missing))})"
        elif not is_exact:
            note = " (its streams are not known: name them in intercept(…, streams=[…]))"
        raise NotRecordedInTime(
            f"the message {self.message_id} is confirmed, but was not recorded within {seconds_text(timeout_s)}{note}: "
            "wait again, or see whether a recorder runs (`relatum status`)",
            found=found,
            in_stream=True if is_exact or found else None,
        )


class Receipt(_Published):
    """A published message that is confirmed, or will be. Returned by `relatum.publish`; thread-safe.

    Attributes:
        message_id: The message's property `message_id`.
    """

    def __init__(self, sent: Sent, locator: Locator, *, pending: bool = False) -> None:
        super().__init__(sent, locator)
        self._final_at: float | None = None
        self._error: PublishError | None = None
        self._decided = threading.Event()
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[Receipt], None]] = []
        # A callback connection receives the confirm on the thread that published, which must not wait for it.
        self._thread_of_confirms = threading.get_ident() if pending else None
        if not pending:
            self._decided.set()

    def __repr__(self) -> str:
        state = "pending" if not self._decided.is_set() else "confirmed" if self._error is None else "failed"
        return f"<Receipt {self.message_id} {state}>"

    @property
    def is_confirmed(self) -> bool:
        """Whether the broker has confirmed the message. Always true over a blocking connection."""
        return self._decided.is_set() and self._error is None

    @property
    def error(self) -> PublishError | None:
        """Why the message is not confirmed, once that is known: nacked, unroutable, or outcome unknown."""
        return self._error

    def add_done_callback(self, callback: "Callable[[Receipt], None]") -> None:
        """Call `callback(receipt)` once the broker has answered; at once if it already has.

        With a callback connection it is called on the connection's thread, and must not wait.
        """
        with self._lock:
            if not self._decided.is_set():
                self._callbacks.append(callback)
                return
        callback(self)

    def wait(self, timeout_s: float = WAIT_S) -> tuple[MessageId, ...]:
        """Wait for the broker's answer, then for the recorder, and return the message's places.

        Meanwhile a blocking connection is not served: a long wait misses its heartbeats.

        Args:
            timeout_s: Seconds to wait in all; at most one more if a server does not answer.

        Returns:
            One message id for each stream that the exchange routed the message to, by the stream's name; none, and a
            warning, for a queue that is not a stream. An exchange other than the default one and super streams: once
            the message is recorded in one stream, and each other stream that is bound to the exchange, or named in
            `intercept`, has it or is recorded behind it. Streams behind further exchanges must be named. If no stream
            is known (no stream protocol), or over 32: the places recorded with the first one. `streams` is None then.

        Raises:
            PublishUnroutable: nothing is bound for it; `in_stream` is False.
            PublishNacked: the broker refused it; `in_stream` is False, or None if one of several queues may have
                taken it.
            PublishOutcomeUnknown: no answer before the connection ended, or in time; `in_stream` is None. Settle it.
            NotRecordedInTime: confirmed, but not recorded in time; `in_stream` is True (None if it may have gone to
                other queues only), `found` has the places known so far. Wait again.
            ConfigurationError: called on the thread of a callback connection, which would wait for itself.
        """
        checked_seconds("timeout_s", timeout_s)
        deadline = time.monotonic() + timeout_s
        self._await_answer(deadline, timeout_s)
        look, until = self._begin(deadline)
        if not look.has_all:
            with look.asked(self._locator) as answer:
                self._locator.waits.result(answer, until)
        return self._end(look, timeout_s)

    def outcome(self, timeout_s: float = WAIT_S, *, collector: str | None = None) -> Outcome:
        """Wait for the broker's answer, then for a collector, and return what became of the message.

        Meanwhile a blocking connection is not served, as with `wait`.

        Args:
            timeout_s: Seconds to wait in all, also while PostgreSQL is away.
            collector: The name of a collector; None: all of them. If the message went to several streams, or has
                several collectors, all that have collected it so far must have finished.

        Returns:
            Its outcome: succeeded, failed or dead.

        Raises:
            PublishUnroutable, PublishNacked, PublishOutcomeUnknown: as for `wait`.
            NotFinishedInTime: not final in time; its field `outcome` has what is known, "unknown" if no collector has
                taken the message. Wait again.
            NotFound: there was no collector of that name until the end.
            DatabaseUnavailable: PostgreSQL did not answer until the end.
            ConfigurationError: as for `wait`.
        """
        checked_seconds("timeout_s", timeout_s)
        deadline = time.monotonic() + timeout_s
        self._await_answer(deadline, timeout_s)
        remaining = max(0.0, deadline - time.monotonic())
        try:
            return self._locator.outcomes().wait(self.message_id, remaining, collector=collector)
        except NotFinishedInTime as error:
            # With the time-out as given, not what the broker's answer left of it.
            raise not_finished(error.outcome, timeout_s) from None

    def settle(self, timeout_s: float | None = None, *, streams: tuple[str, ...] = ()) -> tuple[MessageId, ...]:
        """Find the message by reading its streams. Needs no database, and no answer of the broker.

        Args:
            timeout_s: Seconds to look for it; None (default): until the outcome is sure, at least 10.
            streams: Where to look; by default, where exchange and routing key lead.

        Returns:
            Its places, one for each stream it is in, by the stream's name.

        Raises:
            PublishRejected: it is in no stream and cannot arrive any more: safe to publish again.
            PublishOutcomeUnknown: not found in time, and it may still arrive.
            ConfigurationError: the streams cannot be known: name them.
        """
        return Unsettled(self._sent, self._locator, self._final_at).settle(timeout_s, streams=streams)

    def _await_answer(self, deadline: float, timeout_s: float) -> None:
        if self._thread_of_confirms == threading.get_ident():
            raise ConfigurationError(
                "this is the thread of the callback connection, which must go on to receive the confirm: wait on "
                "another thread, or use add_done_callback"
            )
        if not self._decided.wait(max(0.0, deadline - time.monotonic())):
            raise PublishOutcomeUnknown(
                f"the broker has not answered for message {self.message_id} within {seconds_text(timeout_s)}; "
                "it may still",
                in_stream=None,
                settle=self.settle,
            )
        if self._error is not None:
            raise self._error

    def _decide(self, error: PublishError | None, final_at: float | None = None) -> None:
        """Take the broker's answer; only the first counts."""
        with self._lock:
            if self._decided.is_set():
                return
            self._error = error
            self._final_at = final_at
            self._decided.set()
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback(self)


class AsyncReceipt(_Published):
    """A published and confirmed message. Returned by `relatum.publish_async`.

    Attributes:
        message_id: The message's property `message_id`.
    """

    def __repr__(self) -> str:
        return f"<AsyncReceipt {self.message_id} confirmed>"

    async def wait(self, timeout_s: float = WAIT_S) -> tuple[MessageId, ...]:
        """Wait for the recorder and return the message's places; see `Receipt.wait`. Cancelling leaves nothing behind.

        Args:
            timeout_s: Seconds to wait.

        Returns:
            One message id for each stream the exchange routed it to, by the stream's name.

        Raises:
            NotRecordedInTime: not recorded in time; `in_stream` is True (None if it may have gone to other queues
                only), `found` has the places known so far. Wait again.
        """
        checked_seconds("timeout_s", timeout_s)
        look, until = await in_thread(None, self._begin, time.monotonic() + timeout_s)
        if not look.has_all:
            with look.asked(self._locator) as answer:
                await self._locator.waits.result_in_task(answer, until)
        return self._end(look, timeout_s)

    async def outcome(self, timeout_s: float = WAIT_S, *, collector: str | None = None) -> Outcome:
        """Wait for a collector; see `Receipt.outcome`. Cancelling leaves nothing behind.

        Args:
            timeout_s: Seconds to wait.
            collector: The name of a collector; None: all of them.

        Returns:
            Its outcome: succeeded, failed or dead.

        Raises:
            NotFinishedInTime: not final in time; its field `outcome` has what is known. Wait again.
            NotFound: there was no collector of that name until the end.
            DatabaseUnavailable: PostgreSQL did not answer until the end.
        """
        return await outcome_in_task(self._locator.outcomes(), self.message_id, timeout_s, collector)

    async def settle(self, timeout_s: float | None = None, *, streams: tuple[str, ...] = ()) -> tuple[MessageId, ...]:
        """Find the message by reading its streams; see `Receipt.settle`. The reading runs in threads."""
        return await Unsettled(self._sent, self._locator, None).settle_async(timeout_s, streams=streams)
