"""Receipts: a publisher uses them to wait for its message's offsets."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
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
from relatum.publishing._locate import LOOKED_AT_MAX, Destinations, Locator, Sent
from relatum.publishing._publish_outcome import Unsettled

WAIT_S: Final = 10.0
"""Seconds a receipt waits by default."""


@dataclass(eq=False)
class PlaceSearch:
    """One wait for the places of a message. It ends when all places are known, or at its deadline.

    `ends` are the last offsets of the possible streams after the confirm, unless these are exact; `recorded_to` says
    how far these streams were recorded before the last query of the places. The table is queried at least once.
    """

    sent: Sent
    where: Destinations
    ends: dict[str, int]
    deadline: float
    places: set[MessageId] = field(default_factory=set)
    recorded_to: dict[str, float] = field(default_factory=dict)

    @property
    def missing(self) -> frozenset[str]:
        """The streams that may contain the message and have no known place."""
        return self.where.streams - {place.stream for place in self.places}

    @property
    def has_all(self) -> bool:
        """Whether all places are known.

        If the streams are known exactly, each must have a place. Otherwise one stream must have a place, and each
        other stream must be recorded up to its end after the confirm.
        """
        if self.where.is_exact:
            return not self.missing
        if not self.places or len(self.missing) > LOOKED_AT_MAX:
            return bool(self.places)
        return all(self.recorded_to.get(name, -1) > end for name, end in self.ends.items() if name in self.missing)


class _Published:
    """A sent message and its known places."""

    def __init__(self, sent: Sent, locator: Locator) -> None:
        self.message_id = sent.message_id
        self._sent = sent
        self._locator = locator
        self._look: PlaceSearch | None = None

    @property
    def streams(self) -> frozenset[str] | None:
        """The streams the message was routed to; None before `wait`, or if they are not known exactly.

        They are known for the default exchange and for super streams. For other exchanges, see `wait`.
        """
        where = None if self._look is None else self._look.where
        return where.streams if where is not None and where.is_exact else None

    def _begin(self, deadline: float) -> tuple[PlaceSearch, float]:
        """Begin a wait; return it and its end. The table is queried at least once."""
        where, ends = self._locator.destinations_and_ends(self._sent, deadline - time.monotonic())
        self._look = PlaceSearch(self._sent, where, ends, deadline)
        return self._look, max(deadline, time.monotonic() + LEAST_S)

    def _end(self, look: PlaceSearch, timeout_s: float) -> tuple[MessageId, ...]:
        """Return the places found by a wait that has ended."""
        found, missing, is_exact = tuple(sorted(look.places)), look.missing, look.where.is_exact
        if look.has_all:
            self._locator.receipt_s.observe(time.monotonic() - self._sent.monotonic_s)
            return found
        if found and not is_exact:
            return found
        note = ""
        if missing:
            note = f" ({'missing' if is_exact else 'searched'}: {', '.join(sorted(missing))})"
        elif not is_exact:
            note = " (its streams are unknown: name them in intercept(…, streams=[…]))"
        raise NotRecordedInTime(
            f"the message {self.message_id} is confirmed, but was not recorded within {seconds_text(timeout_s)}{note}: "
            "wait again, or check whether a recorder runs (`relatum status`)",
            found=found,
            in_stream=True if is_exact or found else None,
        )


class Receipt(_Published):
    """A published message, confirmed or waiting for its confirm. Returned by `relatum.publish`. Thread-safe.

    Attributes:
        message_id: The message's property `message_id`.
    """

    def __init__(self, sent: Sent, locator: Locator, *, pending: bool = False) -> None:
        super().__init__(sent, locator)
        self._final_at: float | None = None
        self._answer: Future[None] = Future()
        # The thread that published on a callback connection receives the confirm, and must not wait for it.
        self._thread_of_confirms = threading.get_ident() if pending else None
        if not pending:
            self._answer.set_result(None)

    def __repr__(self) -> str:
        state = "confirmed" if self.is_confirmed else "failed" if self.error else "pending"
        return f"<Receipt {self.message_id} {state}>"

    @property
    def is_confirmed(self) -> bool:
        """Whether the broker has confirmed the message. Always true with a blocking connection."""
        return self._answer.done() and self._answer.exception() is None

    @property
    def error(self) -> PublishError | None:
        """The error of the publish, once known: nacked, unroutable, rejected or outcome unknown; else None."""
        return cast("PublishError | None", self._answer.exception()) if self._answer.done() else None

    def add_done_callback(self, callback: "Callable[[Receipt], None]") -> None:
        """Call `callback(receipt)` once the broker has answered, or at once if it already has.

        A callback connection calls it on the connection's thread, so it must not wait. Its errors are logged.
        """
        self._answer.add_done_callback(lambda _: callback(self))

    def wait(self, timeout_s: float = WAIT_S) -> tuple[MessageId, ...]:
        """Wait for the broker's answer, then for the recorder, and return the message's places.

        A blocking connection is not served during the wait: a long wait misses heartbeats.

        Args:
            timeout_s: Seconds to wait in all, at most one more if a server does not answer. Default: 10.

        Returns:
            One message id for each stream that the exchange routed the message to, ordered by the stream's name; a
            queue that is not a stream gives no id, but a warning. For other exchanges than the default and super
            streams, the wait ends once the message is recorded in one stream, and each other stream bound to the
            exchange, or named in `intercept`, has it or is recorded beyond it. Name streams behind further exchanges.
            If no stream is known (no stream protocol), or over 32 are: the places recorded with the first place, and
            `streams` is None.

        Raises:
            PublishUnroutable: no queue is bound for the message; `in_stream` is False.
            PublishNacked: the broker refused the message; `in_stream` is False, or None if one of several queues may
                have accepted it.
            PublishOutcomeUnknown: no answer before the connection ended, or in time; `in_stream` is None. Settle it.
            NotRecordedInTime: confirmed, but not recorded in time; `in_stream` is True (None if the message may have
                gone only to other queues), `found` has the places known so far. Wait again.
            ConfigurationError: you called this on the thread of a callback connection, which would wait for itself.
        """
        checked_seconds("timeout_s", timeout_s)
        deadline = time.monotonic() + timeout_s
        self._await_answer(deadline, timeout_s)
        look, until = self._begin(deadline)
        if not look.has_all:
            waits = self._locator.waits
            waits.wait(waits.ask(look), until)
        return self._end(look, timeout_s)

    def outcome(self, timeout_s: float = WAIT_S, *, collector: str | None = None) -> Outcome:
        """Wait for the broker's answer, then for a collector, and return the message's outcome.

        A blocking connection is not served during the wait, as with `wait`.

        Args:
            timeout_s: Seconds to wait in all, even while PostgreSQL is unavailable. Default: 10.
            collector: The name of a collector; None (default): all collectors. If the message went to several streams,
                or has several collectors, all that have collected it so far must have finished.

        Returns:
            The message's outcome: succeeded, failed or dead.

        Raises:
            PublishUnroutable, PublishNacked, PublishOutcomeUnknown: as for `wait`.
            NotFinishedInTime: not final in time; its field `outcome` has the present state, "unknown" if no collector
                has collected the message. Wait again.
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
            timeout_s: Seconds to search; None (default): until the outcome is sure, at least 10.
            streams: The streams to search; by default, those that exchange and routing key route to.

        Returns:
            The message's places, one for each stream it is in, ordered by the stream's name.

        Raises:
            PublishRejected: no stream has the message, and it cannot arrive any more: safe to publish again.
            PublishOutcomeUnknown: the message was not found in time, and may still arrive.
            ConfigurationError: the streams are unknown: name them.
        """
        return Unsettled(self._sent, self._locator, self._final_at).settle(timeout_s, streams=streams)

    def _await_answer(self, deadline: float, timeout_s: float) -> None:
        if self._thread_of_confirms == threading.get_ident():
            raise ConfigurationError(
                "this is the thread of the callback connection, which has to receive the confirm: wait on another "
                "thread, or use add_done_callback"
            )
        try:
            error = self._answer.exception(max(0.0, deadline - time.monotonic()))
        except TimeoutError:
            raise PublishOutcomeUnknown(
                f"the broker has not answered for message {self.message_id} within {seconds_text(timeout_s)}; "
                "it may still do so",
                settle=self.settle,
            ) from None
        if error is not None:
            raise error

    def _decide(self, error: PublishError | None, final_at: float | None = None) -> None:
        """Set the broker's answer, on the connection's thread. Later answers are ignored."""
        if self._answer.done():
            return
        self._final_at = final_at
        if error is None:
            self._answer.set_result(None)
        else:
            self._answer.set_exception(error)


class AsyncReceipt(_Published):
    """A published and confirmed message. Returned by `relatum.publish_async`.

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
        look, until = await in_thread(None, self._begin, time.monotonic() + timeout_s)
        if not look.has_all:
            waits = self._locator.waits
            await waits.wait_in_task(waits.ask(look), until)
        return self._end(look, timeout_s)

    async def outcome(self, timeout_s: float = WAIT_S, *, collector: str | None = None) -> Outcome:
        """Wait for a collector and return the message's outcome, as `Receipt.outcome` does. Cancelling is safe.

        Raises:
            NotFinishedInTime, NotFound, DatabaseUnavailable: see `Receipt.outcome`.
        """
        return await outcome_in_task(self._locator.outcomes, self.message_id, timeout_s, collector)

    async def settle(self, timeout_s: float | None = None, *, streams: tuple[str, ...] = ()) -> tuple[MessageId, ...]:
        """Find the message by reading its streams. See `Receipt.settle`. Threads do the reading."""
        return await Unsettled(self._sent, self._locator, None).settle_async(timeout_s, streams=streams)
