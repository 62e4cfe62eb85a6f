"""Waiting for the places of one message: which there are, and when it is known that there are no more."""

import logging
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from functools import lru_cache
from typing import Final

from relatum.checks import seconds_text
from relatum.errors import NotRecordedInTime
from relatum.ids import MessageId
from relatum.publishing._locate import Locator, Sent, Whereabouts
from relatum.waiting import LEAST_S, within

LOOKED_AT_MAX: Final = 32
"""Streams of one exchange whose recording a receipt waits for; with more, it gives what is recorded first."""

NAMED_ONCE_MAX: Final = 100
"""Queues that are no streams and were named in the log, which are not named again."""

logger = logging.getLogger("relatum.interception")


class Look:
    """One wait for the places of a message: take steps, and wait in between, until there are places or an error.

    The table is asked for all who wait together (`Locator.waits`), the broker in the caller's thread.

    Attributes:
        where: Where it may be; None until that was asked.
        until: The moment to wait to, as of `time.monotonic`: the table is asked once, however little time there is.
        ends: Up to where streams may hold the message, where these are not exactly known; asked once it has a place.
    """

    def __init__(
        self, locator: Locator, sent: Sent, timeout_s: float, deadline: float, where: Whereabouts | None
    ) -> None:
        self.sent = sent
        self.until = self._deadline = deadline
        self.where = where
        self.ends: dict[str, int] | None = None
        self._locator = locator
        self._timeout_s = timeout_s
        self._has_begun = self._is_answered = self._is_beyond = False
        self._lock = threading.Lock()
        self._heard: frozenset[MessageId] = frozenset()

    def step(self) -> tuple[MessageId, ...] | None:
        """The places, where there are no more; None where it has to be waited for them. Asks the servers.

        Raises:
            NotRecordedInTime: time is over.
        """
        with within(max(LEAST_S, self._deadline - time.monotonic())):
            if not self._has_begun:
                self._begin()
            if self._needs_ends:
                # After the message was confirmed, so that it is before them wherever it is.
                self.ends = self._locator.ends(self._others)
        if self._has_all:
            self._locator.told(self.sent)
            return self._found
        return self._at_end() if self._is_over else None

    @contextmanager
    def asked(self) -> "Iterator[Future[bool | None]]":
        """Ask for news of the message while the block lasts: of the table, and of the recorder in this process."""
        waits = self._locator.waits
        future = waits.ask(self)

        def arrived(place: MessageId) -> None:
            self.learn(frozenset([place]))
            if self.leads_on:
                waits.answer(future, True)

        unsubscribe = self._locator.subscribe(self.sent, arrived)
        try:
            yield future
        finally:
            unsubscribe()
            future.cancel()

    def learn(self, places: frozenset[MessageId], recorded_to: Mapping[str, float] | None = None) -> None:
        """Take places of the message, and how far streams were recorded before these were looked for."""
        with self._lock:
            self._heard |= places
        if recorded_to is None:
            return
        self._is_answered = True
        if self.ends is not None and self._heard:
            others = self._others
            # A stream that was not asked about is not recorded far enough: its end came in the midst of the question.
            self._is_beyond = all(recorded_to.get(name, -1) > end for name, end in self.ends.items() if name in others)

    @property
    def leads_on(self) -> bool:
        """Whether a step has something to do: the places are all there, time is over, or ends are to be asked for."""
        return self._has_all or self._needs_ends or self._is_over

    @property
    def _is_over(self) -> bool:
        return time.monotonic() >= (self._deadline if self._is_answered else self.until)

    def _begin(self) -> None:
        self.where = self._locator.whereabouts(self.sent, self._timeout_s)
        self._has_begun = True
        self.until = max(self._deadline, time.monotonic() + LEAST_S)
        if self.where.is_exact and not self.where.streams and not self.sent.routing_key.startswith("amq."):
            _warn_of_no_stream(self.sent.routing_key)

    @property
    def _has_all(self) -> bool:
        """Whether there are no more places.

        Where its streams are exactly known, each must have it. Otherwise, once one has it at all, each stream it may be
        in must have it or be recorded up to the end that it had after the message was confirmed.
        """
        if self._is_exact:
            return not self._others
        return bool(self._heard) and (self._is_beyond or not 0 < len(self._others) <= LOOKED_AT_MAX)

    @property
    def _needs_ends(self) -> bool:
        return bool(self._heard) and self.ends is None and not self._is_exact and not self._has_all

    @property
    def _is_exact(self) -> bool:
        return self.where is not None and self.where.is_exact

    @property
    def _others(self) -> frozenset[str]:
        """Streams the message may be in, of which no place is known."""
        where = self.where
        assert where is not None, "waited for before it was asked"
        return where.streams - {place.stream for place in self._heard}

    @property
    def _found(self) -> tuple[MessageId, ...]:
        """One place for each stream, by the stream's name."""
        return tuple(sorted(self._heard))

    def _at_end(self) -> tuple[MessageId, ...]:
        """What to give when time is over."""
        where, found = self.where, self._found
        assert where is not None
        if found and not where.is_exact:
            return found
        missing = self._others
        note = ""
        if not where.is_known:
            note = " (its streams are not known: name them in intercept(…, streams=[…]))"
        elif missing:
            note = f" ({'missing' if where.is_exact else 'looked for in'}: {', '.join(sorted(missing))})"
        within = seconds_text(self._timeout_s)
        raise NotRecordedInTime(
            f"the message {self.sent.message_id} is confirmed, but was not recorded within {within}{note}: "
            "wait again, or see whether a recorder runs (`relatum status`)",
            found=found,
            in_stream=True if where.is_exact or found else None,
        )


@lru_cache(NAMED_ONCE_MAX)
def _warn_of_no_stream(queue: str) -> None:
    logger.warning("a receipt was waited for, and %r is no stream: what is published there has no place", queue)
