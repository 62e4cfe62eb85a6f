"""Waiting for the places of one message: which there are, and when it is known that there are no more."""

import logging
import threading
import time
from collections.abc import Callable, Generator
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, Final

from relatum.checks import seconds_text
from relatum.errors import DatabaseUnavailable, NotRecordedInTime
from relatum.ids import MessageId
from relatum.publishing._locate import Locator, Sent, Whereabouts
from relatum.steps import Request

POLL_FIRST_S: Final = 0.002
"""Seconds before the table is asked again for the first time; a batch is recorded in about that time."""

POLL_LAST_S: Final = 0.05
"""Seconds between two questions at most: what a receipt can come late by."""

LOOKED_AT_MAX: Final = 32
"""Streams of one exchange whose recording a receipt waits for; with more, it gives what is recorded first."""


NAMED_ONCE_MAX: Final = 100
"""Queues that are no streams and were named in the log, which are not named again."""

logger = logging.getLogger("relatum.interception")


@dataclass(frozen=True, slots=True)
class Ask(Request[Any]):
    """A question to the servers, in what is left of the time."""

    question: Callable[[], Any]


@dataclass(frozen=True, slots=True)
class Rest(Request[None]):
    """So many seconds, or until a place is heard of."""

    seconds: float


class Look:
    """Looks for the places of one message, again and again, until it is known that there are no more.

    Attributes:
        where: Where to look; None until that was asked.
    """

    def __init__(self, locator: Locator, sent: Sent, timeout_s: float, where: Whereabouts | None) -> None:
        self.where = where
        self._locator = locator
        self._sent = sent
        self._timeout_s = timeout_s
        self._ends: dict[str, int] | None = None
        self._lock = threading.Lock()
        self._heard: frozenset[MessageId] = frozenset()

    def hear(self, places: frozenset[MessageId]) -> frozenset[MessageId]:
        """All places heard of so far, with these: from the recorder in this process, or from the table."""
        with self._lock:
            self._heard |= places
            return self._heard

    def places(self, deadline: float) -> Generator[Ask | Rest, Any, tuple[MessageId, ...]]:
        """The places, when there are no more; or those that `_at_end` gives, or its error. Asks by `Ask` and `Rest`."""
        yield from Ask(self._begin)
        pause = POLL_FIRST_S
        while True:
            found, is_complete = yield from Ask(partial(self._look, self.hear(frozenset())))
            self.hear(found)
            if is_complete:
                self._locator.told(self._sent)
                return _in_order(found)
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                return self._at_end(found)
            yield from Rest(min(pause, remaining))
            pause = min(2 * pause, POLL_LAST_S)

    def _begin(self) -> None:
        self.where = self._locator.whereabouts(self._sent, self._timeout_s)
        if self.where.is_exact and not self.where.streams and not self._sent.routing_key.startswith("amq."):
            _warn_of_no_stream(self._sent.routing_key)

    def _look(self, found: frozenset[MessageId]) -> tuple[frozenset[MessageId], bool]:
        """The places known now, the table's as well, and whether they are all of the message's.

        Where its streams are exactly known, each must have it. Otherwise, once one has it at all, each stream it may be
        in must have it or be recorded up to the end that it had after the message was confirmed.
        """
        if not self._has_all(found):
            # The table is derived: while it is away, the message is simply not recorded yet.
            with suppress(DatabaseUnavailable):
                # In this order: what is recorded meanwhile is among the places that are read then.
                is_beyond = bool(found) and not self._lacks_any(found)
                found |= self._locator.recorded(self._sent)
                if is_beyond:
                    return found, True
        return found, self._has_all(found)

    def _has_all(self, found: frozenset[MessageId]) -> bool:
        """Whether the places tell by themselves that they are all."""
        where = self.where
        assert where is not None
        if where.is_exact:
            return where.streams <= {place.stream for place in found}
        return bool(found) and not 0 < len(self._others(found)) <= LOOKED_AT_MAX

    def _lacks_any(self, found: frozenset[MessageId]) -> bool:
        """Whether a stream that may have the message, too, is not recorded far enough to tell."""
        others = self._others(found)
        if self.where is None or self.where.is_exact:
            return True
        if self._ends is None:
            self._ends = self._locator.ends(others)
        return bool(self._locator.lacking({name: end for name, end in self._ends.items() if name in others}))

    def _others(self, found: frozenset[MessageId]) -> frozenset[str]:
        where = self.where
        assert where is not None
        return where.streams - {place.stream for place in found}

    def _at_end(self, found: frozenset[MessageId]) -> tuple[MessageId, ...]:
        """What to give when time is over."""
        where = self.where
        assert where is not None
        if found and not where.is_exact:
            return _in_order(found)
        missing = self._others(found)
        note = ""
        if not where.is_known:
            note = " (its streams are not known: name them in intercept(…, streams=[…]))"
        elif missing:
            note = f" ({'missing' if where.is_exact else 'looked for in'}: {', '.join(sorted(missing))})"
        within = seconds_text(self._timeout_s)
        raise NotRecordedInTime(
            f"the message {self._sent.message_id} is confirmed, but was not recorded within {within}{note}: "
            "wait again, or see whether a recorder runs (`relatum status`)",
            found=_in_order(found),
            in_stream=True if where.is_exact or found else None,
        )


@lru_cache(NAMED_ONCE_MAX)
def _warn_of_no_stream(queue: str) -> None:
    logger.warning("a receipt was waited for, and %r is no stream: what is published there has no place", queue)


def _in_order(found: frozenset[MessageId]) -> tuple[MessageId, ...]:
    """One place for each stream, by the stream's name."""
    return tuple(sorted(found))
