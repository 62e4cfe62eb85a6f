"""A member's claims of groups: how it takes, renews and ends them."""

import time
from dataclasses import dataclass
from typing import Any, Final

import sqlalchemy as sa

from relatum.errors import ClaimLost, DatabaseUnavailable
from relatum.store.database import sql
from relatum.store.members import RENEWED
from relatum_consumer.lookups.servers import Servers


@dataclass(slots=True)
class Claim:
    """A group claimed by this member."""

    group_id: str
    number: int
    """How often the group has been claimed. It tells this claim from others."""
    given: int
    """How often the group was delivered before, if the consumer counts that."""
    stream_id: int
    first_offset: int
    good_until: float
    """When the lease expires, by the monotonic clock. Another member may claim the group then."""


ACKNOWLEDGE_PAUSE_S: Final = 0.25
"""Seconds until an acknowledgement that PostgreSQL did not answer is repeated."""


# The condition on `state` must be literally that of the index `group_states_next`, or the index cannot be used.
CLAIM: Final = sql(
    f"""
    WITH chosen AS (
      SELECT group_id
      FROM relatum.group_states
      WHERE consumer_id = :consumer_id::int AND state IN ('ready', 'claimed')
        AND (
          state = 'ready' OR lease_expires_at < clock_timestamp()
          OR holder = :holder::text AND NOT (group_id = ANY (:held::text[]))
        )
      ORDER BY rank, stream_id, first_offset
      LIMIT :limit::bigint
      FOR UPDATE SKIP LOCKED
    )
    UPDATE relatum.group_states claimed
    SET deliveries = claimed.deliveries + 1, state = 'claimed', holder = :holder::text, {RENEWED}
    FROM chosen
    WHERE claimed.consumer_id = :consumer_id::int AND claimed.group_id = chosen.group_id
    RETURNING claimed.group_id, claimed.deliveries, claimed.given, claimed.rank, claimed.stream_id, claimed.first_offset
    """
)
"""Claims the first `limit` groups that are ready.

Returns rows, unordered: group, claim's number, how often it was delivered, rank, stream id, first offset.

A group whose lease has expired is ready, too; and so is a group of this holder that is not in `held`: it was claimed by
an earlier process of that name, or by a statement whose answer was lost.
"""

RENEW: Final = sql(
    f"""
    UPDATE relatum.group_states
    SET {RENEWED}
    WHERE consumer_id = :consumer_id::int AND holder = :holder::text AND group_id = ANY (:group_ids::text[])
      AND state = 'claimed'
    RETURNING group_id, deliveries
    """
)
"""Renews the leases of the groups `group_ids` that the holder has. Returns: group, claim's number."""

STATE_OF: Final = sql(
    """
    SELECT state, holder, deliveries
    FROM relatum.group_states
    WHERE consumer_id = :consumer_id::int AND group_id = :group_id::text
    """
)


def _set(values: str) -> sa.TextClause:
    """Make a statement that changes a group under this claim. It returns the id, or no row if the claim was lost."""
    return sql(
        f"""
        UPDATE relatum.group_states
        SET {values}
        WHERE consumer_id = :consumer_id::int AND holder = :holder::text AND group_id = :group_id::text
          AND deliveries = :number::int AND state = 'claimed'
        RETURNING group_id
        """
    )


COUNT_GIVEN: Final = _set("given = :given::int")
"""Stores how often the group has been delivered, including this time."""

DONE: Final = _set("state = 'done', done_at = clock_timestamp()")
DEAD: Final = _set("state = 'dead', done_at = clock_timestamp()")
READY: Final = _set("state = 'ready', holder = NULL, lease_expires_at = NULL")
"""Any member may claim the group."""
OPEN: Final = _set("state = 'open', holder = NULL, lease_expires_at = NULL")
"""The group is incomplete again."""


class Claims:
    """The open claims of one member. One thread or task claims; any may end a claim."""

    def __init__(self, servers: Servers, holder: str, lease_s: float) -> None:
        self._servers = servers
        self._holder = holder
        self.lease_s = lease_s
        self.consumer_id: int | None = None
        """The consumer whose groups are claimed; set before the first claim."""
        self.held: dict[str, Claim] = {}
        """The claims whose leases are renewed, by group."""
        self.acknowledged = 0
        """How many claims were ended as done."""
        self.is_closed = False

    def take(self, limit: int) -> list[Claim]:
        """Claim up to `limit` ready groups. Returns them in their order."""
        good_until = time.monotonic() + self.lease_s
        given = {"lease_s": self.lease_s, "limit": limit, "held": list(self.held)}
        rows = self._servers.rows(CLAIM, self._mine() | given)
        # RETURNING has no order. Sort by rank, stream, offset.
        claims = [
            Claim(group_id, number, given, stream_id, first_offset, good_until)
            for group_id, number, given, _, stream_id, first_offset in sorted(rows, key=lambda row: row[3:])
        ]
        self.held |= {claim.group_id: claim for claim in claims}
        return claims

    def has(self, claim: Claim) -> bool:
        """Return whether the claim is in force, as far as this member knows."""
        return self.held.get(claim.group_id) is claim

    def is_mine(self, claim: Claim) -> bool:
        """Return whether the claim is still in force; an expired lease is renewed first."""
        if self.has(claim) and claim.good_until < time.monotonic():
            self.renew()
        return self.has(claim)

    def forget(self, claim: Claim) -> None:
        """Forget a claim that has ended, here or elsewhere."""
        if self.has(claim):
            del self.held[claim.group_id]

    def count_given(self, claim: Claim) -> bool:
        """Store that a group is delivered. False if the claim was lost. Idempotent."""
        rows = self._servers.rows(COUNT_GIVEN, self._this(claim) | {"given": claim.given + 1})
        if not rows:
            self.forget(claim)
        return bool(rows)

    def end(self, claim: Claim, ending: sa.TextClause) -> bool:
        """End a claim by `DONE`, `DEAD`, `READY` or `OPEN`. Returns whether it was still in force."""
        rows = self._servers.rows(ending, self._this(claim))
        self.forget(claim)
        return bool(rows)

    def acknowledge(self, claim: Claim, until: float) -> bool:
        """End a claim as done. False: the database is unavailable, so repeat the call, up to a monotonic time."""
        is_first = self.has(claim)
        try:
            is_done = self.end(claim, DONE) or self._was_done(claim)
        except DatabaseUnavailable:
            if self.is_closed or time.monotonic() > until:
                raise
            return False
        if not is_done:
            raise ClaimLost(
                f"this member has lost the group {claim.group_id}; it was not acknowledged, and is delivered again",
                group_id=claim.group_id,
            )
        self.acknowledged += is_first
        return True

    def _was_done(self, claim: Claim) -> bool:
        """Return whether this claim was done already: that answer may have been lost."""
        rows = self._servers.rows(STATE_OF, self._mine() | {"group_id": claim.group_id})
        return [tuple(row) for row in rows] == [("done", self._holder, claim.number)]

    def renew(self) -> None:
        """Renew the leases of all held claims, and forget the lost ones."""
        held = list(self.held.values())
        if not held:
            return
        good_until = time.monotonic() + self.lease_s
        ids = [claim.group_id for claim in held]
        rows = self._servers.rows(RENEW, self._mine() | {"lease_s": self.lease_s, "group_ids": ids})
        numbers: dict[str, int] = dict(rows)
        for claim in held:
            if numbers.get(claim.group_id) == claim.number:
                claim.good_until = good_until
            else:
                self.forget(claim)

    def give_back(self) -> None:
        """Release all claims, so that other members need not wait for the leases to expire."""
        for claim in list(self.held.values()):
            self.end(claim, READY)

    def _mine(self) -> dict[str, Any]:
        assert self.consumer_id is not None, "nothing is claimed before that is known"
        return {"consumer_id": self.consumer_id, "holder": self._holder}

    def _this(self, claim: Claim) -> dict[str, Any]:
        return self._mine() | {"group_id": claim.group_id, "number": claim.number}
