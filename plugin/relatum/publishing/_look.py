"""Waiting for the places of one message: which there are, and when it is known that there are no more."""

import logging
from contextlib import suppress
from functools import lru_cache
from typing import Final

from relatum.errors import DatabaseUnavailable, NotRecordedInTime
from relatum.ids import MessageId
from relatum.publishing._locate import Locator, Sent, Whereabouts

POLL_FIRST_S: Final = 0.002
"""Seconds before the table is asked again for the first time; a batch is recorded in about that time."""

POLL_LAST_S: Final = 0.05
"""Seconds between two questions at most: what a receipt can come late by."""

LOOKED_AT_MAX: Final = 32
"""Streams of one exchange whose recording a receipt waits for; with more, it gives what is recorded first."""


NAMED_ONCE_MAX: Final = 100
"""Queues that are no streams and were named in the log, which are not named again."""

logger = logging.getLogger("relatum.interception")


class Look:
    """Looks for the places of one message, again and again, until it is known that there are no more."""

    def __init__(self, locator: Locator, sent: Sent, timeout_s: float) -> None:
        self._locator = locator
        self._sent = sent
        self._timeout_s = timeout_s
        self._where: Whereabouts | None = None
        self._ends: dict[str, int] | None = None

    def begin(self) -> Whereabouts:
        """Find out where to look."""
        self._where = self._locator.whereabouts(self._sent, self._timeout_s)
        if self._where.is_exact and not self._where.streams and not self._sent.routing_key.startswith("amq."):
            _warn_of_no_stream(self._sent.routing_key)
        return self._where

    def look(self, found: frozenset[MessageId]) -> tuple[frozenset[MessageId], bool]:
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
        where = self._where
        assert where is not None
        if where.is_exact:
            return where.streams <= {place.stream for place in found}
        return bool(found) and not 0 < len(self._others(found)) <= LOOKED_AT_MAX

    def _lacks_any(self, found: frozenset[MessageId]) -> bool:
        """Whether a stream that may have the message, too, is not recorded far enough to tell."""
        others = self._others(found)
        if self._where is None or self._where.is_exact:
            return True
        if self._ends is None:
            self._ends = self._locator.ends(others)
        return bool(self._locator.lacking({name: end for name, end in self._ends.items() if name in others}))

    def _others(self, found: frozenset[MessageId]) -> frozenset[str]:
        where = self._where
        assert where is not None
        return where.streams - {place.stream for place in found}

    def at_end(self, found: frozenset[MessageId], timeout_s: float) -> tuple[MessageId, ...]:
        """What to give when time is over."""
        where = self._where
        assert where is not None
        if found and not where.is_exact:
            return in_order(found)
        missing = self._others(found)
        note = ""
        if not where.is_known:
            note = " (its streams are not known: name them in intercept(…, streams=[…]))"
        elif missing:
            note = f" ({'missing' if where.is_exact else 'looked for in'}: {', '.join(sorted(missing))})"
        raise NotRecordedInTime(
            f"the message {self._sent.message_id} is confirmed, but was not recorded within {timeout_s} s{note}: wait "
            "again, or see whether a recorder runs (`relatum status`)",
            found=in_order(found),
            in_stream=True if where.is_exact or found else None,
        )


@lru_cache(NAMED_ONCE_MAX)
def _warn_of_no_stream(queue: str) -> None:
    logger.warning("a receipt was waited for, and %r is no stream: what is published there has no place", queue)


def in_order(found: frozenset[MessageId]) -> tuple[MessageId, ...]:
    """One place for each stream, by the stream's name."""
    return tuple(sorted(found))
