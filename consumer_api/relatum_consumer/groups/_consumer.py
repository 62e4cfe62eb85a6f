"""Group consumers in the database: a consumer's definition, and its members' claims."""

import time
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import Annotated, Any, Final

from relatum.common.waiting import has_passed
from relatum.errors import AccessRefused, ClaimLost, ConfigurationError, DatabaseUnavailable, NotAStream, StreamNotFound
from relatum.metrics import Counter, Gauge, reported
from relatum.store.coverage import Range
from relatum.store.database import sql
from relatum.store.members import RENEWED
from relatum_consumer.groups._assembly import GroupOrder, Row
from relatum_consumer.groups._options import GroupOptions, StartPosition
from relatum_consumer.lookups.catalog import Catalog
from relatum_consumer.lookups.servers import Servers


@dataclass(frozen=True, slots=True)
class SharedConsumer:
    """A group consumer, as stored in the database for all its members."""

    consumer_id: int
    name: str
    names: list[str] | None
    order: GroupOrder
    start_offset: int | None
    start_us: int | None
    start_stream_id: int | None

    def low(self, stream_id: int) -> int:
        """Return the first offset of a stream that the consumer reads."""
        return (self.start_offset or 0) if self.start_stream_id in (None, stream_id) else 0

    def admits(self, head: Row, stream_id: int) -> bool:
        """Whether the consumer reads a group with this head: its place is not before the consumer's start."""
        return StartPosition(self.low(stream_id), self.start_us).admits(head)


_COLUMNS: Final = "consumer_id, name, streams, ordering, start_offset, start_us, start_stream_id"
"""The columns of `SharedConsumer`."""

# The update changes nothing: it returns the consumer if it exists.
ADD: Final = sql(f"""
    INSERT INTO relatum.group_consumers (vhost, name, streams, ordering, start_offset, start_us, start_stream_id)
    VALUES (:vhost::text, :name::text, :streams::text[], :ordering::text, :start_offset::bigint, :start_us::bigint,
      :start_stream_id::int)
    ON CONFLICT (vhost, name) DO UPDATE SET ordering = group_consumers.ordering
    RETURNING {_COLUMNS}""")

BY_NAME: Final = sql(f"""
    SELECT {_COLUMNS} FROM relatum.group_consumers WHERE vhost = :vhost::text AND name = :name::text""")


def find_consumer(catalog: Catalog, name: str, options: GroupOptions) -> SharedConsumer:
    """Return the consumer of a name; create it if it does not exist."""
    names = None if options.names is None else sorted(set(options.names))
    start, present = StartPosition.of(options.start), catalog.streams(options.names)
    wanted = {
        "vhost": catalog.vhost,
        "name": name,
        "streams": names,
        "ordering": options.order,
        "start_offset": start.offset or None,
        "start_us": start.since_us,
        "start_stream_id": present[0].stream_id if start.offset and len(present) == 1 else None,
    }
    (row,) = catalog.servers.rows(ADD, wanted)
    consumer = SharedConsumer(*row)
    if consumer.names != names or consumer.order != options.order:
        streams = "all streams" if consumer.names is None else ", ".join(consumer.names)
        raise ConfigurationError(
            f"the consumer {name!r} reads {streams} in {consumer.order} order: use the same streams= and order=, "
            "or another consumer name"
        )
    return consumer


def check_dead_letters(servers: Servers, name: str | None) -> None:
    """Check that the stream or queue for dead letters exists, before there is a dead letter."""
    if name is None:
        return
    try:
        servers.bounds(name)
    except StreamNotFound as error:
        raise StreamNotFound(
            f"dead_letter_stream={name!r}: the stream does not exist; declare it", stream=name
        ) from error
    except (NotAStream, AccessRefused):
        pass  # A queue is accepted, too, and a user who may publish need not be allowed to read.


def by_name(catalog: Catalog, name: str) -> SharedConsumer | None:
    """Return a consumer from the database; None if no consumer has that name."""
    rows = catalog.servers.rows(BY_NAME, {"vhost": catalog.vhost, "name": name})
    return SharedConsumer(*rows[0]) if rows else None


SCANS: Final = sql("""
    SELECT stream_id, from_offset, to_offset
    FROM relatum.group_scans
    WHERE consumer_id = :consumer_id::int AND stream_id = ANY (:stream_ids::int[])
    ORDER BY stream_id, from_offset""")


def scanned_of(servers: Servers, consumer: SharedConsumer, stream_ids: Iterable[int]) -> dict[int, list[Range]]:
    parameters = {"consumer_id": consumer.consumer_id, "stream_ids": list(stream_ids)}
    rows = groupby(servers.rows(SCANS, parameters), itemgetter(0))
    return {stream_id: [(start, stop) for _, start, stop in of_stream] for stream_id, of_stream in rows}


@reported("consumer")
@dataclass(frozen=True, slots=True, kw_only=True)
class SharedGroupsStatistics:
    """The counters of one member.

    Attributes:
        given: Number of groups delivered to the application.
        redelivered: Number of these groups that had been claimed before, by this or another member.
        acknowledged: Number of groups acknowledged.
        given_up: Number of groups given up: published as dead letters, or delivered too often.
        held: Number of groups claimed, and neither acknowledged nor released.
    """

    given: Annotated[int, Counter("relatum_group_consumer_given_total", "Groups delivered to the application")]
    redelivered: Annotated[int, Counter("relatum_group_consumer_redelivered_total", "Groups delivered again")]
    acknowledged: Annotated[int, Counter("relatum_group_consumer_acknowledged_total", "Groups acknowledged")]
    given_up: Annotated[int, Counter("relatum_group_consumer_given_up_total", "Groups given up as dead")]
    held: Annotated[int, Gauge("relatum_group_consumer_held_groups", "Groups claimed and not acknowledged")]


@dataclass(slots=True)
class Claim:
    """A group claimed by this member."""

    group_id: str
    number: int
    """The fencing token: how often the group has been claimed."""
    given: int
    """How often the group was delivered before; counted only with `deliveries_max`."""
    stream_id: int
    first_offset: int
    good_until: float
    """When the lease expires, by the monotonic clock; then another member may claim the group."""


ACKNOWLEDGE_PAUSE_S: Final = 0.25
"""Seconds between two attempts to acknowledge while PostgreSQL does not answer."""

# PostgreSQL uses the index `group_states_next` only if the condition on `state` is literally that of the index.
CLAIM: Final = sql(f"""
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
    RETURNING claimed.group_id, claimed.deliveries, claimed.given, claimed.rank, claimed.stream_id,
      claimed.first_offset""")
"""Claims the first `limit` ready groups. Returns rows, unordered: group id, the claim's number, how often the group was
delivered, rank, stream id, first offset.

A group whose lease has expired is ready, too, and so is a group of this holder that is not in `held`: an earlier
process of that name claimed it, or the response to the statement was lost.
"""

RENEW: Final = sql(f"""
    UPDATE relatum.group_states
    SET {RENEWED}
    WHERE consumer_id = :consumer_id::int AND holder = :holder::text AND group_id = ANY (:group_ids::text[])
      AND state = 'claimed'
    RETURNING group_id, deliveries""")
"""Renews the holder's leases of the groups `group_ids`. Returns group id and claim's number of each renewed lease."""

_THIS_CLAIM: Final = """consumer_id = :consumer_id::int AND holder = :holder::text AND group_id = :group_id::text
      AND deliveries = :number::int"""

COUNT_GIVEN: Final = sql(f"""
    UPDATE relatum.group_states SET given = :given::int WHERE {_THIS_CLAIM} AND state = 'claimed' RETURNING group_id""")
"""Stores how often the group has been delivered, including this time. Returns no row if the claim was lost."""

_IS_OVER: Final = "CASE WHEN :state::text IN ('done', 'dead') THEN"

END: Final = sql(f"""
    UPDATE relatum.group_states
    SET state = :state::text, lease_expires_at = NULL,
      done_at = {_IS_OVER} clock_timestamp() END, holder = {_IS_OVER} holder END
    WHERE {_THIS_CLAIM} AND state IN ('claimed', :state::text)
    RETURNING group_id""")
"""Ends a claim by setting the group's state: "done", "dead", "ready" for any member, or "open" (incomplete again).
Returns no row if the claim was lost. A claim that is done or dead may be ended again, after a lost response."""


class Claims:
    """The claims of one member. One thread or task claims; any thread or task may end a claim."""

    def __init__(self, servers: Servers, holder: str, lease_s: float) -> None:
        self._servers = servers
        self._holder = holder
        self.lease_s = lease_s
        self.consumer_id: int | None = None
        """The consumer's id; set before the first claim."""
        self.held: dict[str, Claim] = {}
        """The claims in force, by group id; their leases are renewed."""
        self.acknowledged = 0
        """Number of claims that ended as done."""
        self.is_closed = False

    def take(self, limit: int) -> list[Claim]:
        """Claim up to `limit` ready groups, and return the claims in the order of the groups."""
        good_until = time.monotonic() + self.lease_s
        parameters = {"lease_s": self.lease_s, "limit": limit, "held": list(self.held)}
        rows = self._servers.rows(CLAIM, self._mine() | parameters)
        # RETURNING has no order: sort by rank, stream, offset.
        claims = [
            Claim(group_id, number, given, stream_id, first_offset, good_until)
            for group_id, number, given, _, stream_id, first_offset in sorted(rows, key=lambda row: row[3:])
        ]
        self.held |= {claim.group_id: claim for claim in claims}
        return claims

    def has(self, claim: Claim) -> bool:
        """Whether the claim is in force, as far as this member knows."""
        return self.held.get(claim.group_id) is claim

    def is_mine(self, claim: Claim) -> bool:
        """Whether the claim is still in force; an expired lease is renewed first."""
        if self.has(claim) and claim.good_until < time.monotonic():
            self.renew()
        return self.has(claim)

    def forget(self, claim: Claim) -> None:
        """Remove a claim that has ended or was lost."""
        if self.has(claim):
            # Another thread may remove it now: an acknowledgement and a renewal may run at the same time.
            self.held.pop(claim.group_id, None)

    def count_given(self, claim: Claim) -> bool:
        """Store that a group is delivered; returns False if the claim was lost. Idempotent."""
        rows = self._servers.rows(COUNT_GIVEN, self._this(claim) | {"given": claim.given + 1})
        if not rows:
            self.forget(claim)
        return bool(rows)

    def end(self, claim: Claim, state: str) -> bool:
        """End a claim by setting the group's state; see `END`. Returns whether the claim was still in force."""
        rows = self._servers.rows(END, self._this(claim) | {"state": state})
        self.forget(claim)
        return bool(rows)

    def acknowledge(self, claim: Claim, until: float) -> bool:
        """End a claim as done. False: PostgreSQL is unavailable, so repeat the call. After `until`, it raises."""
        is_first = self.has(claim)
        try:
            is_done = self.end(claim, "done")
        except DatabaseUnavailable:
            if self.is_closed or has_passed() or time.monotonic() > until:
                raise
            return False
        if not is_done:
            raise ClaimLost(
                f"this member has lost its claim of the group {claim.group_id}: the group will be delivered again",
                group_id=claim.group_id,
            )
        self.acknowledged += is_first
        return True

    def renew(self) -> None:
        """Renew the leases of all claims, and remove the claims that were lost."""
        claims = list(self.held.values())
        if not claims:
            return
        good_until = time.monotonic() + self.lease_s
        ids = [claim.group_id for claim in claims]
        rows = self._servers.rows(RENEW, self._mine() | {"lease_s": self.lease_s, "group_ids": ids})
        numbers: dict[str, int] = dict(rows)
        for claim in claims:
            if numbers.get(claim.group_id) == claim.number:
                claim.good_until = good_until
            else:
                self.forget(claim)

    def release_all(self) -> None:
        """Release all claims, so that other members need not wait for the leases to expire."""
        for claim in list(self.held.values()):
            self.end(claim, "ready")

    def _mine(self) -> dict[str, Any]:
        assert self.consumer_id is not None, "it is set before the first claim"
        return {"consumer_id": self.consumer_id, "holder": self._holder}

    def _this(self, claim: Claim) -> dict[str, Any]:
        return self._mine() | {"group_id": claim.group_id, "number": claim.number}
