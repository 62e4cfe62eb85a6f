"""Consumers that share groups, as steps: what a member claims, gives, acknowledges, gives up and gives back."""

import math
import time
from collections import deque
from collections.abc import Sequence
from datetime import datetime
from typing import Any, Final

from relatum.errors import (
    ClaimLost,
    ConfigurationError,
    DatabaseUnavailable,
    GroupConflict,
    StreamNotFound,
    StreamReplaced,
    Transient,
)
from relatum.grouping import Anomaly
from relatum.reading import Message
from relatum_consumer._catalog import Catalog
from relatum_consumer._limits import POLL_S_MIN
from relatum_consumer._lookups import time_us_of
from relatum_consumer._requests import Bounds, Pause, Read, Select
from relatum_consumer.grouping import _durable_statements as statements
from relatum_consumer.grouping._assembly import Assembled, Member
from relatum_consumer.grouping._delivery import Policy, Reading, all_of, conflict, read_group
from relatum_consumer.grouping._durable_options import SharedOptions
from relatum_consumer.grouping._durable_outcomes import Claim, Given, GivenUp, Outcome, Refused
from relatum_consumer.grouping._durable_scan import Scanner, SharedConsumer
from relatum_consumer.grouping._group import IncompleteGroupReport
from relatum_consumer.grouping._position import report
from relatum_consumer.grouping._reading import Beginning
from relatum_consumer.grouping._requests import GroupSteps

POLL_S_MAX: Final = 0.25
"""The longest pause between two looks for groups, in seconds; there may be many members, and each looks."""

SCANS_S: Final = 0.05
"""Seconds between two looks at the streams, while there are groups to be given."""

MESSAGES_AT_ONCE: Final = 10_000
"""Messages after which a member reads no further group ahead; what it has read is held in memory."""

IDLE_AT_ONCE: Final = 10
"""Incomplete groups that are claimed at once to be given up."""

IDLE_CHECKS_S: Final = 1.0
"""Seconds between two looks for groups to be given up, while there are others to be given."""


RENEWALS: Final = 3
"""How often a lease is renewed in the time it holds: two renewals may fail."""


class SharedReading:
    """One member of a consumer. One thread or task asks for groups; any may acknowledge.

    Args:
        catalog: Of the database.
        options: What was asked for.
        holder: The member's name.
    """

    def __init__(self, catalog: Catalog, options: SharedOptions, holder: str) -> None:
        self._catalog = catalog
        self._options = options
        self._holder = holder
        self._lease_s = float(options.consumer.lease_s)
        self._consumer: SharedConsumer | None = None
        self._scanner: Scanner | None = None
        self._waiting: deque[Claim] = deque()
        self._outcomes: deque[Outcome | Refused] = deque()
        self._idle_at = 0.0
        self._scanned_at = -math.inf
        self.held: dict[str, Claim] = {}
        """What is claimed and not ended, by group: what the leases are renewed of."""
        self.is_closed = False

    # --- the next group -----------------------------------------------------------------------------------

    def next(self) -> GroupSteps[Outcome | None]:
        """What is to be given or given up next; None at the end.

        Raises:
            GroupConflict: a group is not sound and is not to be passed over; it was given back.
        """
        follow, idle_s = self._options.follow, self._options.idle_timeout_s
        last, pause = time.monotonic(), POLL_S_MIN
        while not self.is_closed:
            try:
                outcome = yield from self._next()
            except (Transient, StreamReplaced):
                # Who follows waits until the servers are there again, and a recorder has put the stream right.
                if not follow:
                    raise
                outcome = None
            if outcome is not None:
                return outcome
            left = POLL_S_MAX if idle_s is None else last + idle_s - time.monotonic()
            if not follow or left <= 0:
                return None
            yield Pause(min(pause, left))
            pause = min(2 * pause, POLL_S_MAX)
        return None

    def _next(self) -> GroupSteps[Outcome | None]:
        while True:
            while self._outcomes:
                outcome = self._outcomes.popleft()
                if not (yield from self._is_mine(outcome.claim)):
                    continue
                if isinstance(outcome, Refused):
                    yield from self._refuse(outcome)
                else:
                    return outcome
            if not self._waiting:
                is_fresh = yield from self._look()
                if not self._waiting and not self._outcomes:
                    if not is_fresh:
                        self._scanned_at = -math.inf
                        continue
                    return None
            yield from self._read()

    def _look(self) -> GroupSteps[bool]:
        """Claim what there is; whether what the streams hold by now was looked at for that."""
        scanner = yield from self._opened()
        now = time.monotonic()
        is_fresh = now - self._scanned_at >= SCANS_S
        if is_fresh:
            yield from scanner.run()
            self._scanned_at = now
        yield from self._claim_idle(scanner)
        if not self._outcomes:
            yield from self._claim()
        return is_fresh

    def _is_mine(self, claim: Claim) -> GroupSteps[bool]:
        """Whether a group is still this member's: it may have been read some time ago."""
        if self.held.get(claim.group_id) is claim and claim.good_until < time.monotonic():
            yield from self.renew()
        return self.held.get(claim.group_id) is claim

    def _claim(self) -> GroupSteps[None]:
        rows = yield from self._take(
            statements.claim(), {"limit": self._options.consumer.prefetch, "held": list(self.held)}
        )
        self._waiting.extend(rows)

    def _take(self, sql: str, parameters: dict[str, Any]) -> GroupSteps[list[Claim]]:
        good_until = time.monotonic() + self._lease_s
        rows = yield Select(sql, self._mine() | {"lease_s": self._lease_s} | parameters)
        # RETURNING keeps no order.
        ordered = sorted(rows, key=lambda row: row[2:])
        claims = [
            Claim(group_id, number, stream_id, first_offset, good_until)
            for group_id, number, _, stream_id, first_offset in ordered
        ]
        self.held |= {claim.group_id: claim for claim in claims}
        return claims

    def _mine(self) -> dict[str, Any]:
        assert self._consumer is not None, "nothing is claimed before that is known"
        return {"consumer_id": self._consumer.consumer_id, "holder": self._holder}

    # --- the consumer -------------------------------------------------------------------------------------

    def _opened(self) -> GroupSteps[Scanner]:
        """Find the consumer, or make it; every member must want the same of it."""
        if self._scanner is None:
            self._consumer = yield from self._find_consumer()
            self._scanner = Scanner(self._catalog, self._consumer)
        return self._scanner

    def _find_consumer(self) -> GroupSteps[SharedConsumer]:
        options = self._options
        by_name = {"vhost": self._catalog.vhost, "name": options.consumer.name}
        rows = yield Select(statements.consumer(), by_name)
        if not rows:
            yield Select(statements.add_consumer(), by_name | (yield from self._wanted()))
            rows = yield Select(statements.consumer(), by_name)
        consumer_id, names, order, start_offset, start_us, start_stream_id = rows[0]
        names = None if names is None else tuple(names)
        if names != _sorted(options.names) or order != options.order:
            raise ConfigurationError(
                f"the consumer {options.consumer.name!r} reads {'all streams' if names is None else ', '.join(names)} "
                f"in {order} order: its members ask for the same; another name begins anew"
            )
        return SharedConsumer(consumer_id, names, order, Beginning(start_offset or 0, start_us), start_stream_id)

    def _wanted(self) -> GroupSteps[dict[str, Any]]:
        """What a new consumer is to be."""
        options, start = self._options, self._options.start
        present = yield from self._catalog.streams(options.names)
        offset = None if isinstance(start, datetime) else start
        return {
            "streams": None if options.names is None else list(_sorted(options.names) or ()),
            "ordering": options.order,
            "start_offset": offset,
            "start_us": time_us_of(start) if isinstance(start, datetime) else None,
            "start_stream_id": present[0].stream_id if offset is not None and len(present) == 1 else None,
        }

    # --- reading what was claimed -------------------------------------------------------------------------

    def _read(self) -> GroupSteps[None]:
        """Read the groups claimed, as many as may be held at once, in one pass."""
        assert self._scanner is not None, "nothing is claimed before that is known"
        self._waiting = deque(claim for claim in self._waiting if self.held.get(claim.group_id) is claim)
        found = yield from self._scanner.groups(claim.group_id for claim in self._waiting)
        part: list[tuple[Claim, Assembled]] = []
        messages = 0
        for claim in self._waiting:
            if messages < MESSAGES_AT_ONCE:
                part.append((claim, found[claim.group_id]))
                messages += len(all_of(found[claim.group_id]))
        reading = _AtOnce([member for _, group in part for member in all_of(group)])
        for claim, group in part:
            # Where this raises, the broker or the database went away: it and what follows it is read again.
            yield from self._read_one(reading, claim, group)
            self._waiting.popleft()

    def _read_one(self, reading: Reading, claim: Claim, group: Assembled) -> GroupSteps[None]:
        if not group.is_complete:
            yield from reading.take(len(all_of(group)))
            yield from self._not_whole(claim, group)
            return
        options = self._options
        policy = Policy(options.order, options.on_duplicate, "raise", is_named=False)
        try:
            if unsound := next((each for each in _UNSOUND if each in group.anomalies), None):
                yield from reading.take(len(all_of(group)))
                raise conflict(group.group_id, unsound)
            given = yield from read_group(reading, group, policy)
        except GroupConflict as error:
            yield from self._conflict(claim, group, error)
        else:
            assert given is not None, "what retention took raises"
            self._outcomes.append(Given(claim, given))

    def _not_whole(self, claim: Claim, group: Assembled) -> GroupSteps[None]:
        """A group was complete and is not: retention dropped a part, or its stream lost its end or was replaced."""
        scanner = self._scanner
        assert scanner is not None, "it was claimed"
        stream = scanner.present.get(claim.stream_id)
        if stream is None:
            # It lay in a stream that was deleted; what comes of it in a new one is another group.
            yield from self._end(claim, statements.finish("dead"))
        elif (yield from _is_dropped(stream, claim.first_offset)):
            yield from self._conflict(claim, group, conflict(claim.group_id, Anomaly.EXPIRED))
        else:
            yield from self._end(claim, statements.give_back("open"))
            # It may have been recorded again meanwhile; who scanned that saw it claimed, and left it alone.
            yield from scanner.write_down_again([claim.group_id])

    def _conflict(self, claim: Claim, group: Assembled, error: GroupConflict) -> GroupSteps[None]:
        if self._options.on_conflict == "raise":
            self._outcomes.append(Refused(claim, error))
            return
        if self._options.on_conflict == "skip":
            yield from self._end(claim, statements.finish("dead"))
            return
        messages = yield from self._retained(group)
        self._outcomes.append(GivenUp(claim, error.anomaly, _told(claim, group), messages))

    def _refuse(self, refused: Refused) -> GroupSteps[None]:
        """Give back what was claimed and not given, and raise."""
        behind = [refused.claim, *(outcome.claim for outcome in self._outcomes), *self._waiting]
        self._outcomes.clear()
        self._waiting.clear()
        for claim in behind:
            yield from self._end(claim, statements.give_back("ready"))
        raise refused.error

    def _retained(self, group: Assembled) -> GroupSteps[tuple[Message, ...]]:
        """What is left of a group's messages, in its order."""
        found = (yield Read([member.id for member in all_of(group)])) if all_of(group) else ()
        return tuple(message for message in found if isinstance(message, Message))

    # --- groups that do not complete ----------------------------------------------------------------------

    def _claim_idle(self, scanner: Scanner) -> GroupSteps[None]:
        """Claim groups that have been incomplete for too long."""
        consumer, now = self._options.consumer, time.monotonic()
        if consumer.incomplete_after_s is None or now < self._idle_at:
            return
        claims = yield from self._take(
            statements.claim_idle(), {"limit": IDLE_AT_ONCE, "idle_s": -float(consumer.incomplete_after_s)}
        )
        self._idle_at = now + (0 if len(claims) == IDLE_AT_ONCE else min(IDLE_CHECKS_S, consumer.incomplete_after_s))
        found = yield from scanner.groups(claim.group_id for claim in claims)
        for claim in claims:
            group = found[claim.group_id]
            if group.is_complete:
                # It was completed at this moment; that whoever scanned it wrote it down takes the claim away.
                del self.held[claim.group_id]
                yield from scanner.write_down_again([claim.group_id])
                continue
            dead = consumer.on_incomplete == "dead_letter"
            messages = (yield from self._retained(group)) if dead else ()
            told = _told(claim, group)
            self._outcomes.append(GivenUp(claim, "incomplete" if dead else None, told, messages))

    def given_up(self, outcome: GivenUp) -> GroupSteps[None]:
        """The caller was told, or the dead letters are published."""
        yield from self._end(outcome.claim, statements.finish("open" if outcome.reason is None else "dead"))

    # --- ending claims ------------------------------------------------------------------------------------

    def acknowledge(self, claim: Claim) -> GroupSteps[None]:
        """The group is done. Asked again where the database does not answer, for as long as the lease may hold.

        Raises:
            ClaimLost: it is not this member's any more.
            DatabaseUnavailable: PostgreSQL does not answer; safe to repeat.
        """
        deadline = time.monotonic() + self._lease_s
        while True:
            try:
                is_done = (yield from self._end(claim, statements.finish("done"))) or (yield from self._was_done(claim))
            except DatabaseUnavailable:
                if self.is_closed or time.monotonic() > deadline:
                    raise
                yield Pause(POLL_S_MAX)
                continue
            if is_done:
                return
            raise ClaimLost(
                f"the group {claim.group_id} is not this member's any more; it was not acknowledged",
                group_id=claim.group_id,
            )

    def _was_done(self, claim: Claim) -> GroupSteps[bool]:
        """Whether this very claim ended before: the answer to that may have been lost."""
        rows = yield Select(statements.state_of(), self._mine() | {"group_id": claim.group_id})
        return [tuple(row) for row in rows] == [("done", self._holder, claim.number)]

    def _end(self, claim: Claim, sql: str) -> GroupSteps[bool]:
        rows = yield Select(sql, self._mine() | {"group_id": claim.group_id, "number": claim.number})
        if self.held.get(claim.group_id) is claim:
            del self.held[claim.group_id]
        return bool(rows)

    def renew(self) -> GroupSteps[None]:
        """Renew the leases of everything held; what is another's by now is let go."""
        held = list(self.held.values())
        if not held:
            return
        good_until = time.monotonic() + self._lease_s
        ids = [claim.group_id for claim in held]
        rows = yield Select(statements.renew(), self._mine() | {"lease_s": self._lease_s, "group_ids": ids})
        numbers: dict[str, int] = dict(rows)
        for claim in held:
            if numbers.get(claim.group_id) == claim.number:
                claim.good_until = good_until
            elif self.held.get(claim.group_id) is claim:
                del self.held[claim.group_id]

    def give_back(self) -> GroupSteps[None]:
        """End all claims: other members need not wait for the lease."""
        for claim in list(self.held.values()):
            yield from self._end(claim, statements.give_back("ready"))


_UNSOUND: Final = (Anomaly.TWO_LASTS, Anomaly.PAST_LAST)
"""What a group that is complete cannot recover from."""


class _AtOnce(Reading):
    """A reading whose messages all come at the first use, for few groups."""

    def __init__(self, members: Sequence[Member]) -> None:
        super().__init__(members)
        self._messages: list[Any] | None = None

    def take(self, count: int) -> GroupSteps[list[Any]]:
        """The next so many."""
        if count == 0:
            return []
        if self._messages is None:
            self._messages = yield Read(self._ids)
        taken = self._messages[self._at : self._at + count]
        self._at += count
        return taken


def _is_dropped(stream: str, offset: int) -> GroupSteps[bool]:
    """Whether a stream does not hold an offset any more that it has held."""
    try:
        first: int | None = (yield Bounds(stream)).first
    except StreamNotFound:
        return True
    return first is None or first > offset


def _told(claim: Claim, group: Assembled) -> IncompleteGroupReport:
    assert group.position is not None, "it is a group"
    return report(claim.group_id, group.position, group)


def _sorted(names: tuple[str, ...] | None) -> tuple[str, ...] | None:
    return None if names is None else tuple(sorted(set(names)))
