"""One member of a consumer: what it is given next, what is given up, and streams that nobody records."""

import logging
import math
import time
from collections import deque
from contextlib import closing
from dataclasses import replace
from typing import Final

from relatum.errors import GroupConflict, RelatumError, StreamReplaced, Transient
from relatum.ids import MessageId
from relatum.membership import Anomaly
from relatum.publishing import DeadLetters
from relatum.reading import Message, StreamBounds
from relatum.waiting import Outages, Pauses, ended, has_passed, may_repeat
from relatum_consumer.groups._assembly import Assembled
from relatum_consumer.groups._claims import (
    DEAD,
    NEVER_ACKNOWLEDGED,
    OPEN,
    READY,
    Claim,
    Claims,
    Given,
    GivenUp,
    Refused,
)
from relatum_consumer.groups._consumer import SharedGroupsCounts, check_dead_letters, find_consumer
from relatum_consumer.groups._options import SharedOptions
from relatum_consumer.groups._reading import Reading, all_of, conflict, floor_of, read_group
from relatum_consumer.groups._scanning import Scanner
from relatum_consumer.groups._view import group_key
from relatum_consumer.lookups.catalog import Catalog
from relatum_consumer.lookups.proof import ends_of, evidence
from relatum_consumer.lookups.servers import Servers
from relatum_consumer.lookups.waiting import POLL_S_MIN, Rest

logger = logging.getLogger("relatum.groups")

CHECKS_S: Final = 5.0
"""Seconds until the second check: longer than a recorder's lease, so one may take over from another unnoticed."""

CHECKS_S_MAX: Final = 60.0
"""Seconds between two checks at most; the time doubles, since each asks the broker for the ends of streams."""


class Unrecorded:
    """Warns of messages that nobody records, once for each stream."""

    def __init__(self, catalog: Catalog, names: tuple[str, ...] | None) -> None:
        self._catalog = catalog
        self._names = names
        self._told: set[str] = set()
        self._seen: set[str] = set()
        self._pause_s = CHECKS_S
        self._next_at = -math.inf

    def check(self, *, is_end: bool) -> None:
        """Look at the streams, where it is time to."""
        now = time.monotonic()
        if now < self._next_at and not is_end:
            return
        self._next_at, self._pause_s = now + self._pause_s, min(2 * self._pause_s, CHECKS_S_MAX)
        try:
            found = self._find()
        except RelatumError:
            return  # Whoever reads on meets it, and says so; a hint is no reason to end.
        for stream, count in found.items():
            if is_end or stream in self._seen:
                self._told.add(stream)
                logger.warning(
                    "%d messages of the stream %r are not recorded, and nobody records it: `relatum record %s`",
                    count,
                    stream,
                    stream,
                )
        self._seen = set(found)

    def interrupted(self) -> None:
        """Servers are away: recorders' leases run out, so a missing recorder proves nothing until they are back."""
        self._seen = set()
        self._next_at = time.monotonic() + CHECKS_S_MAX

    def _find(self) -> dict[str, int]:
        """How many offsets of streams that nobody records are not recorded, where there are any."""
        known = evidence(self._catalog, self._names, [group_key(self._catalog)])
        counts = {name: 0 for name in known.unrecorded_streams(self._catalog) if name not in self._told}
        for gap in known.uncovered:
            if gap.stream in counts:
                counts[gap.stream] += gap.stop - gap.start
        return counts


POLL_S_MAX: Final = 0.25
"""The longest pause between two looks for groups, in seconds; there may be many members, and each looks."""

SCANS_S: Final = 0.05
"""Seconds between two looks at the streams, while there are groups to be given."""

MESSAGES_AT_ONCE: Final = 10_000
"""Messages after which a member reads no further group ahead; what it has read is held in memory."""

DEAD_LETTERS_S: Final = 1.0
"""Seconds until dead letters that were not taken are tried again, at least."""


class SharedReading:
    """One member of a consumer. One thread or task asks for groups; any may acknowledge."""

    def __init__(
        self, catalog: Catalog, options: SharedOptions, holder: str, outages: Outages, letters: DeadLetters | None
    ) -> None:
        self._catalog = catalog
        self._options = options
        self._of_one = replace(options, names=None, start=None, on_conflict="raise")
        """How one group is read: what becomes of a conflict is decided here, and a stream may be gone."""
        self._outages = outages
        self._letters = letters
        self._who = f"the consumer {options.consumer.name!r} of groups"
        self._deliveries_max = options.consumer.deliveries_max
        self._scanner: Scanner | None = None
        self._unrecorded = Unrecorded(catalog, options.names)
        self._waiting: deque[Claim] = deque()
        self._outcomes: deque[Given | GivenUp | Refused] = deque()
        self._pauses = Pauses()
        self._scanned_at = -math.inf
        self.begin()
        self.claims = Claims(catalog.servers, holder, float(options.consumer.lease_s))
        """What is this member's."""
        self.counts = SharedGroupsCounts()

    # --- the next group -----------------------------------------------------------------------------------

    def begin(self) -> None:
        """The next group is asked for: from now on it is counted how long there is none."""
        self._idle_since, self._pause_s = time.monotonic(), POLL_S_MIN

    def next(self) -> Given | Rest | None:
        """What is to be given next; a rest where there is nothing now, None at the end."""
        if self.claims.is_closed:
            return None
        follow, idle_s = self._options.follow, self._options.idle_timeout_s
        is_idle = idle_s is not None and time.monotonic() - self._idle_since >= idle_s
        is_end = not follow or is_idle
        try:
            outcome = self._next()
            if outcome is None:
                self._unrecorded.check(is_end=is_end)
        except (Transient, StreamReplaced) as error:
            # With follow=True the member waits until the servers are back and a recorder has put the stream right.
            if not follow or has_passed():
                raise
            self._outages.failed(self._who, error)
            self._unrecorded.interrupted()
            outcome = None
        else:
            self._outages.over(self._who)
        if isinstance(outcome, GivenUp):
            return self._give_up(outcome)
        if outcome is not None:
            return outcome
        if is_end:
            return None
        left = POLL_S_MAX if idle_s is None else self._idle_since + idle_s - time.monotonic()
        rest = Rest(max(0.0, min(self._pause_s, left)))
        self._pause_s = min(2 * self._pause_s, POLL_S_MAX)
        return rest

    def put_back(self, given: Given) -> None:
        """What was given did not arrive: it is the next again."""
        self._outcomes.appendleft(given)

    def _next(self) -> Given | GivenUp | None:
        while True:
            while self._outcomes:
                # Taken off only when that is sure: where the database goes away, it is the next again.
                outcome = self._outcomes[0]
                is_mine = self.claims.is_mine(outcome.claim)
                if isinstance(outcome, Refused):
                    if is_mine:
                        self._refuse(outcome)
                    self._outcomes.popleft()
                    continue
                if is_mine and isinstance(outcome, Given) and self._deliveries_max is not None:
                    is_mine = self.claims.count_given(outcome.claim)
                self._outcomes.popleft()
                if is_mine:
                    return outcome
            if not self._waiting:
                is_fresh = self._look()
                if not self._waiting:
                    if not is_fresh:
                        self._scanned_at = -math.inf
                        continue
                    return None
            self._read()

    def _look(self) -> bool:
        """Claim what there is; whether what the streams hold by now was looked at for that."""
        scanner = self._opened()
        now = time.monotonic()
        is_fresh = now - self._scanned_at >= SCANS_S
        if is_fresh:
            scanner.run()
            self._scanned_at = now
        claims = self.claims.take(self._options.consumer.prefetch)
        self._waiting.extend(claims)
        return is_fresh

    # --- the consumer -------------------------------------------------------------------------------------

    def _opened(self) -> Scanner:
        """Find the consumer, or make it, once it is sure that its dead letters have a place."""
        if self._scanner is None:
            check_dead_letters(self._catalog.servers, self._options.consumer.dead_letter_stream)
            consumer = find_consumer(self._catalog, self._options)
            self.claims.bind(consumer.consumer_id)
            self._scanner = Scanner(self._catalog, consumer)
        return self._scanner

    # --- reading what was claimed -------------------------------------------------------------------------

    def _read(self) -> None:
        """Read the groups claimed, as many as may be held at once, in one pass."""
        assert self._scanner is not None, "nothing is claimed before that is known"
        self._waiting = deque(claim for claim in self._waiting if self.claims.has(claim))
        found = self._scanner.groups(claim.group_id for claim in self._waiting)
        part: list[tuple[Claim, Assembled]] = []
        messages = 0
        for claim in self._waiting:
            if messages < MESSAGES_AT_ONCE:
                part.append((claim, found[claim.group_id]))
                messages += len(all_of(found[claim.group_id]))
        with closing(Reading(self._catalog.servers, [row for _, group in part for row in all_of(group)])) as reading:
            for claim, group in part:
                # Where this raises, the broker or the database went away: it and what follows it is read again.
                self._read_one(reading, claim, group)
                self._waiting.popleft()

    def _read_one(self, reading: Reading, claim: Claim, group: Assembled) -> None:
        if not group.is_complete:
            reading.take(len(all_of(group)))
            self._not_whole(claim, group)
            return
        if self._deliveries_max is not None and claim.given >= self._deliveries_max:
            reading.take(len(all_of(group)))
            self._never_acknowledged(claim, group)
            return
        try:
            if unsound := next((each for each in _UNSOUND if each in group.anomalies), None):
                reading.take(len(all_of(group)))
                raise conflict(group.group_id, unsound)
            given = read_group(reading, group, self._of_one)
        except GroupConflict as error:
            self._conflict(claim, group, error)
        else:
            assert given is not None, "what retention took raises"
            self._outcomes.append(Given(claim, given))

    def _not_whole(self, claim: Claim, group: Assembled) -> None:
        """A group was complete and is not: retention dropped a part, or its stream lost its end or was replaced."""
        scanner = self._scanner
        assert scanner is not None, "it was claimed"
        stream = scanner.present.get(claim.stream_id)
        if stream is None:
            # It lay in a stream that was deleted; what comes of it in a new one is another group.
            self.claims.end(claim, DEAD)
        elif _is_dropped(self._catalog.servers, stream, claim.first_offset):
            self._conflict(claim, group, conflict(claim.group_id, Anomaly.EXPIRED))
        else:
            self.claims.end(claim, OPEN)
            # It may have been recorded again: the member that scanned it saw it claimed and left it alone.
            scanner.write_down_again([claim.group_id])

    def _conflict(self, claim: Claim, group: Assembled, error: GroupConflict) -> None:
        if self._options.on_conflict == "raise":
            self._outcomes.append(Refused(claim, error))
            return
        if self._options.on_conflict == "skip":
            self.claims.end(claim, DEAD)
            return
        messages = self._retained(group)
        self._outcomes.append(GivenUp(claim, error.anomaly, group.position, messages))

    def _never_acknowledged(self, claim: Claim, group: Assembled) -> None:
        """Give a group up that was given as often as it may be: it may be what its members die of."""
        is_kept = self._options.consumer.dead_letter_stream is not None
        messages = self._retained(group) if is_kept else ()
        self._outcomes.append(GivenUp(claim, NEVER_ACKNOWLEDGED, group.position, messages))

    def _refuse(self, refused: Refused) -> None:
        """Give back what was claimed and not given, and raise."""
        for claim in [*(outcome.claim for outcome in self._outcomes), *self._waiting]:
            self.claims.end(claim, READY)
        self._outcomes.clear()
        self._waiting.clear()
        raise refused.error

    def _retained(self, group: Assembled) -> tuple[Message, ...]:
        """What is left of a group's messages, in its order."""
        found = self._catalog.servers.read([MessageId(*row[3:5]) for row in all_of(group)]) if all_of(group) else ()
        return tuple(message for message in found if isinstance(message, Message))

    # --- groups that are given up -------------------------------------------------------------------------

    def _give_up(self, outcome: GivenUp) -> Rest:
        """Publish a group's messages as dead letters, where they have a place; gives the rest before the next group.

        Where they are not taken, the group's turn comes again; who follows waits until the servers are there again.
        """
        claim = outcome.claim
        who = f"publishing dead letters of the group {claim.group_id}, of {self._who},"
        try:
            if outcome.messages:
                assert self._letters is not None, "the options were checked"
                # They are rare: a connection that is left to time is one more to lose.
                with self._letters as letters:
                    outcome.burial(letters).run()
            self._pauses = Pauses()
            self._outages.over(who)
            was_mine = self.claims.end(claim, DEAD)
        except Exception as error:
            if self._options.follow and may_repeat(error):
                self._outages.failed(who, error)
                self._outcomes.appendleft(outcome)
                return Rest(DEAD_LETTERS_S + self._pauses.after(error))
            self._give_back(claim)
            raise
        self.counts.given_up += 1
        if was_mine and outcome.reason == NEVER_ACKNOWLEDGED:
            letters_stream = self._options.consumer.dead_letter_stream
            logger.warning(
                "the group %s was given %d times by the consumer %r and never acknowledged: it is dead, %s",
                claim.group_id,
                claim.given,
                self._options.consumer.name,
                "and only in its streams" if letters_stream is None else f"and in the stream {letters_stream!r}",
            )
        self.begin()
        return Rest(0.0)

    def _give_back(self, claim: Claim) -> None:
        try:
            self.claims.end(claim, READY)
        except RelatumError as lost:
            self.claims.forget(claim)
            text = "the group %s of the consumer %r could not be given back, and is free when its lease has run out: %s"
            logger.info(text, claim.group_id, self._options.consumer.name, ended(lost))


_UNSOUND: Final = (Anomaly.TWO_LASTS, Anomaly.PAST_LAST)
"""What a group that is complete cannot recover from."""


def _is_dropped(servers: Servers, stream: str, offset: int) -> bool:
    """Whether a stream does not hold an offset any more that it has held."""
    bounds = ends_of(servers, stream, is_named=False)
    if isinstance(bounds, StreamBounds):
        return floor_of(stream, bounds) > offset
    return bounds is None
