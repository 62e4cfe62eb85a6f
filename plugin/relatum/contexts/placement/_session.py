"""How long a router may trust its cached placements without asking PostgreSQL, by its own clock. Pure; thread-safe.

A mover that has stopped contexts looks which sessions there are. It publishes its fence when each of those has gone on
to the generation of the move, or when it has waited for longer than the session holds, by its own clock. So, where a
session holds when a message is known to be confirmed, and its placement is still in force, no fence is before it:

- A renewal that was there when the mover looked: the mover has waited for it.
- One that came later: the publisher has read the generation behind it, and with that the move, before it relied on it.

No clock is compared with another one, and none has to tell the time. They must only go on at the same rate, nearly, and
not stand still while the world goes on. Source: docs/adr/0025.
"""

import threading
from collections.abc import Callable
from typing import Final

from relatum.contexts.placement._placing import KEEP_COMMITS
from relatum.contexts.placement._trust import DRIFT
from relatum.processes import after_fork
from relatum.store.database import sql
from relatum.store.members import renewal_s

SESSION_S: Final = 2.0
"""Seconds a session holds without a renewal, by default: how long a move waits for a publisher that died."""

SESSION_S_MIN: Final = 0.1
SESSION_S_MAX: Final = 60.0

IDLE_S: Final = 1.0
"""Seconds without a message after which a session is ended: nobody shall wait for one who does not publish."""

BUSY: Final = 2
"""Messages between two looks from which on a session pays."""

_ENDED: Final = float("-inf")

# Sessions of a day ago go, whose routers died: without moves, nobody else removes them. Any router may, so none waits
# for another; its own row is written and cannot be deleted, too, by one statement.
RENEW_SESSION: Final = sql(f"""
    WITH forgotten AS (
        DELETE FROM relatum.publisher_sessions
        WHERE super_stream_id = :super_stream_id::integer AND holder IN (
            SELECT holder FROM relatum.publisher_sessions
            WHERE super_stream_id = :super_stream_id::integer AND holder <> :holder::text
                AND lease_expires_at < clock_timestamp() - interval '1 day'
            FOR UPDATE SKIP LOCKED))
    INSERT INTO relatum.publisher_sessions AS s (super_stream_id, holder, seen, session_s, lease_expires_at)
    VALUES (:super_stream_id::integer, :holder::text, :seen::bigint, :session_s::double precision,
        clock_timestamp() + make_interval(secs => :session_s::double precision))
    ON CONFLICT ON CONSTRAINT publisher_sessions_holder DO UPDATE
    SET seen = excluded.seen, beat = s.beat + 1, session_s = excluded.session_s,
        lease_expires_at = clock_timestamp() + make_interval(secs => excluded.session_s)
    RETURNING {KEEP_COMMITS}""")

END_SESSION: Final = sql("""
    DELETE FROM relatum.publisher_sessions
    WHERE super_stream_id = :super_stream_id::integer AND holder = :holder::text""")


class Session:
    """What one publisher may rely on. One thread renews it; any may ask.

    Args:
        clock: Seconds since some moment.
        session_s: Seconds it holds after a renewal began; 0: it never holds.
    """

    def __init__(self, clock: Callable[[], float], session_s: float) -> None:
        self.session_s = session_s
        self._lock = threading.Lock()
        self._clock = clock
        self._holds_s = session_s * (1 - DRIFT)
        self._until = _ENDED
        self._due_at = _ENDED
        self._used_at = _ENDED
        self.is_kept = False
        """Whether there may be a row of it."""
        self.must_tell = False
        """Whether somebody may wait to be told how far this publisher has gone on."""
        # Its renewals are the parent's.
        after_fork(self, Session._end)

    def holds(self) -> bool:
        """Whether it holds. What is looked at afterwards is right as of now; what was looked at before may not be."""
        return self._clock() < self._until

    def is_wanted(self, published: int) -> bool:
        """Whether it is to be kept, after so many messages since this was asked last."""
        now = self._clock()
        if published:
            self._used_at = now
        return self.session_s > 0 and (published >= BUSY or (self.is_kept and now - self._used_at < IDLE_S))

    def is_due(self) -> bool:
        """Whether it is to be renewed now."""
        return self.session_s > 0 and (self.must_tell or self._clock() >= self._due_at)

    def renew(self) -> float:
        """Begin to renew it; gives what `renewed` is told."""
        self.is_kept, self.must_tell = True, False
        self._due_at = _ENDED  # until that has come through
        return self._clock()

    def renewed(self, began: float) -> None:
        """Note that it was renewed, and that all changes that had been made by then are known here."""
        with self._lock:
            if self.session_s:
                self._until = began + self._holds_s
                self._due_at = began + renewal_s(self.session_s)

    def end(self, *, for_good: bool = False) -> bool:
        """Rely on it no more; gives whether its row is to be removed.

        `for_good`: Whether a renewal that is under way shall not bring it back.
        """
        with self._lock:
            if for_good:
                self.session_s = 0.0
            self._end()
            is_kept, self.is_kept = self.is_kept, False
            return is_kept

    def _end(self) -> None:
        self._until = self._due_at = _ENDED
