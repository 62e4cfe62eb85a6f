"""Receipts, which let a publisher wait for its message's offsets."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Final, cast

from relatum.common.checks import checked_seconds, seconds_text
from relatum.common.ids import MessageId
from relatum.common.waiting import LEAST_S, in_thread, within
from relatum.errors import (
    ConfigurationError,
    NotRecordedInTime,
    PublishError,
    PublishOutcomeUnknown,
)
from relatum.outcomes import Outcome, outcome_in_task
from relatum.publishing._locate import Locator, PlaceSearch, SentMessage
from relatum.publishing._publish_outcome import Unsettled

WAIT_S: Final = 10.0
"""Seconds a receipt waits by default."""


class _PublishedMessage:
    """A sent message and its known places."""

    def __init__(self, sent: SentMessage, locator: Locator) -> None:
        self.message_id = sent.message_id
        self._sent = sent
        self._locator = locator
        self._search: PlaceSearch | None = None

    @property
    def streams(self) -> frozenset[str] | None:
        """The streams the message was routed to; None before `wait`, or if the streams are not known exactly.

        They are known for the default exchange and for super streams. For other exchanges, see `wait`.
        """
        where = None if self._search is None else self._search.where
        return where.streams if where is not None and where.is_exact else None

    def _begin_search(self, deadline: float) -> tuple[PlaceSearch, float]:
        """Return a new search and the time when its wait ends, which leaves time for at least one query."""
        where, ends = self._locator.destinations_and_ends(self._sent, deadline - time.monotonic())
        self._search = PlaceSearch(self._sent, where, ends, deadline)
        return self._search, max(deadline, time.monotonic() + LEAST_S)

    def _places_found(self, search: PlaceSearch, timeout_s: float) -> tuple[MessageId, ...]:
        """Return the places that an ended wait has found, or raise `NotRecordedInTime`."""
        found, missing, is_exact = tuple(sorted(search.places)), search.missing, search.where.is_exact
        if search.has_all:
            self._locator.receipt_s.observe(time.monotonic() - self._sent.monotonic_s)
            return found
        if found and not is_exact:
            return found
        note = "its streams are unknown: name them in intercept(…, streams=[…])"
        if missing:
            note = f"{'missing' if is_exact else 'searched'}: {', '.join(sorted(missing))}"
        raise NotRecordedInTime(
            f"message {self.message_id} is confirmed, but was not recorded within {seconds_text(timeout_s)} ({note}): "
            "wait again, or check that a recorder runs (`relatum status`)",
            found=found,
            in_stream=True if is_exact or found else None,
        )


class Receipt(_PublishedMessage):
    """A published message that is confirmed or waits for its confirm. `relatum.publish` returns it. Thread-safe.

    Attributes:
        message_id: The message's property `message_id`.
    """

    def __init__(self, sent: SentMessage, locator: Locator, *, pending: bool = False) -> None:
        super().__init__(sent, locator)
        self._final_at: float | None = None
        self._answer: Future[None] = Future()
        # On a callback connection, the publishing thread also receives the confirm, and must not wait for it.
        self._thread_of_confirms = threading.get_ident() if pending else None
        if not pending:
            self._answer.set_result(None)

    def __repr__(self) -> str:
        state = "confirmed" if self.is_confirmed else "failed" if self.error else "pending"
        return f"<Receipt {self.message_id} {state}>"

    @property
    def is_confirmed(self) -> bool:
        """Whether the broker has confirmed the message. Always True with a blocking connection."""
        return self._answer.done() and self._answer.exception() is None

    @property
    def error(self) -> PublishError | None:
        """The error of the publish: nacked, unroutable, rejected or outcome unknown. None: no error so far."""
        return cast("PublishError | None", self._answer.exception()) if self._answer.done() else None

    def add_done_callback(self, callback: "Callable[[Receipt], None]") -> None:
        """Call `callback(receipt)` when the broker answers, or immediately if it has already answered.

        A callback connection calls it on the connection's thread, so the callback must not wait. Its errors are logged.
        """
        self._answer.add_done_callback(lambda _: callback(self))

    def wait(self, timeout_s: float = WAIT_S) -> tuple[MessageId, ...]:
        """Wait for the broker's answer, then for the recorder, and return the message's places.

        A blocking connection processes no heartbeats during the wait: the broker may close it during a long wait.

        Args:
            timeout_s: Seconds to wait in all. Default: 10. If a server does not answer, at most one second is added.

        Returns:
            One message id for each stream that the exchange routed the message to, ordered by the stream's name. A
            queue that is not a stream gives no id; a warning is logged. For exchanges other than the default and those
            of super streams, the wait ends when the message is recorded in one stream, and each other stream that is
            bound to the exchange or named in `intercept` has the message or is recorded beyond it. Name streams that
            are bound through other exchanges. If no stream is known (without the stream protocol), or more than 32
            are, the wait ends when the message is recorded in one stream.

        Raises:
            PublishUnroutable: no queue is bound for the message; `in_stream` is False. Safe to publish again.
            PublishNacked: the broker refused the message; `in_stream` is False, or None if one of several queues may
                have accepted it.
            PublishRejected: the broker refused the publish and closed the channel; `in_stream` is False.
            PublishOutcomeUnknown: the broker did not answer in time, or before the connection ended; `in_stream` is
                None. Call `settle`.
            NotRecordedInTime: the message is confirmed, but was not recorded in time; `in_stream` is True (None if the
                message may be only in queues), `found` has the places known so far. Wait again.
            ConfigurationError: the call was made on the thread of a callback connection, which would wait for itself.
        """
        checked_seconds("timeout_s", timeout_s)
        deadline = time.monotonic() + timeout_s
        self._await_answer(deadline, timeout_s)
        search, until = self._begin_search(deadline)
        if not search.has_all:
            waits = self._locator.waits
            waits.wait(waits.ask(search), until)
        return self._places_found(search, timeout_s)

    def outcome(self, timeout_s: float = WAIT_S, *, collector: str | None = None) -> Outcome:
        """Wait for the broker's answer, then for a collector, and return the message's outcome.

        A blocking connection processes no heartbeats during the wait, as with `wait`.

        Args:
            timeout_s: Seconds to wait in all, even while PostgreSQL is unavailable. Default: 10.
            collector: The name of a collector; None (default): all collectors. If the message has been collected
                more than once, by several collectors or from several streams, all copies must be finished.

        Returns:
            The message's outcome: succeeded, failed or dead.

        Raises:
            PublishUnroutable, PublishNacked, PublishRejected, PublishOutcomeUnknown: as for `wait`.
            NotFinishedInTime: the outcome was not final in time; the field `outcome` has the current state, "unknown"
                if no collector has collected the message. Wait again.
            NotFound: no collector of that name appeared in time.
            DatabaseUnavailable: PostgreSQL did not answer in time.
            ConfigurationError: as for `wait`.
        """
        checked_seconds("timeout_s", timeout_s)
        with within(timeout_s):
            self._await_answer(time.monotonic() + timeout_s, timeout_s)
            return self._locator.outcomes.wait(self.message_id, timeout_s, collector=collector)

    def settle(self, timeout_s: float | None = None, *, streams: tuple[str, ...] = ()) -> tuple[MessageId, ...]:
        """Find the message by reading its streams. Needs neither the database nor the broker's answer.

        Args:
            timeout_s: Seconds to search. None (default): at least 10, and enough to prove absence if possible.
            streams: The streams to search. Default: those that exchange and routing key route to, which prove no
                absence if the exchange may route elsewhere, or the message has the header CC or BCC.

        Returns:
            The message's places, one for each stream it is in, ordered by the stream's name.

        Raises:
            PublishRejected: no stream has the message, and it can no longer arrive: safe to publish again.
            PublishOutcomeUnknown: the message was not found in time, and may still arrive.
            BrokerUnavailable, NotFound, AccessRefused: a stream cannot be read; the outcome stays unknown.
            ConfigurationError: the streams are unknown: pass them as `streams`.
        """
        return Unsettled(self._sent, self._locator, self._final_at).settle(timeout_s, streams=streams)

    def _await_answer(self, deadline: float, timeout_s: float) -> None:
        if self._thread_of_confirms == threading.get_ident():
            raise ConfigurationError(
                "a wait on the callback connection's own thread blocks the confirm: wait on another thread, or use "
                "add_done_callback"
            )
        try:
            error = self._answer.exception(max(0.0, deadline - time.monotonic()))
        except TimeoutError:
            raise PublishOutcomeUnknown(
                f"the broker did not confirm message {self.message_id} within {seconds_text(timeout_s)}, but may still "
                "do so: wait again, or settle the message",
                settle=self.settle,
            ) from None
        if error is not None:
            raise error

    def _set_answer(self, error: PublishError | None, final_at: float | None = None) -> None:
        """Set the broker's answer, on the connection's thread. Later answers are ignored."""
        if self._answer.done():
            return
        self._final_at = final_at
        if error is None:
            self._answer.set_result(None)
        else:
            self._answer.set_exception(error)


class AsyncReceipt(_PublishedMessage):
    """A published and confirmed message. `relatum.publish_async` returns it.

    Attributes:
        message_id: The message's property `message_id`.
    """

    def __repr__(self) -> str:
        return f"<AsyncReceipt {self.message_id} confirmed>"

    async def wait(self, timeout_s: float = WAIT_S) -> tuple[MessageId, ...]:
        """Wait for the recorder and return the message's places, as `Receipt.wait` does. Cancelling is safe.

        Raises:
            NotRecordedInTime: see `Receipt.wait`.
        """
        checked_seconds("timeout_s", timeout_s)
        search, until = await in_thread(None, self._begin_search, time.monotonic() + timeout_s)
        if not search.has_all:
            waits = self._locator.waits
            await waits.wait_in_task(waits.ask(search), until)
        return self._places_found(search, timeout_s)

    async def outcome(self, timeout_s: float = WAIT_S, *, collector: str | None = None) -> Outcome:
        """Wait for a collector and return the message's outcome, as `Receipt.outcome` does. Cancelling is safe.

        Raises:
            NotFinishedInTime, NotFound, DatabaseUnavailable: see `Receipt.outcome`.
        """
        return await outcome_in_task(self._locator.outcomes, self.message_id, timeout_s, collector)

    async def settle(self, timeout_s: float | None = None, *, streams: tuple[str, ...] = ()) -> tuple[MessageId, ...]:
        """Find the message by reading its streams in threads. See `Receipt.settle`."""
        return await Unsettled(self._sent, self._locator, None).settle_async(timeout_s, streams=streams)
