"""One member of a group consumer: it delivers, acknowledges and gives up groups."""

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, fields
from typing import Any, Final, Self

from relatum import metrics
from relatum.common.closing import Closing, PeriodicThread
from relatum.common.processes import new_holder, refuse_in_child
from relatum.common.waiting import Outages, Pauses, ended, has_passed, may_repeat, pause
from relatum.errors import GroupConflict, RelatumError, StreamReplaced, Transient
from relatum.membership import Anomaly
from relatum.own_messages import REASON_CHARACTERS_MAX, DeadLetterPublisher, DeadLetters
from relatum.reading import BrokerAddress, Message
from relatum.store.members import renewal_s
from relatum_consumer.groups._assembly import Assembled, named
from relatum_consumer.groups._consumer import (
    ACKNOWLEDGE_PAUSE_S,
    Claim,
    Claims,
    SharedGroupsStatistics,
    check_dead_letters,
    find_consumer,
)
from relatum_consumer.groups._finding import IdleBackoff, Scanner
from relatum_consumer.groups._options import GroupOptions
from relatum_consumer.groups._reading import Group, conflict, floors_of, read_groups
from relatum_consumer.lookups.catalog import Catalog
from relatum_consumer.lookups.waiting import Pause

logger = logging.getLogger("relatum.groups")

POLL_S_MAX: Final = 0.25
"""Longest pause between two queries for groups, in seconds: each of many members queries."""

SCANS_S: Final = 0.05
"""Minimum seconds between two scans of the streams, while there are groups to deliver."""

MESSAGES_AT_ONCE: Final = 10_000
"""Messages held in memory after which a member reads no further groups ahead."""

DEAD_LETTERS_S: Final = 1.0
"""Minimum seconds before dead letters are published again after a failure."""

NEVER_ACKNOWLEDGED: Final = "never_acknowledged"
"""The reason for giving up a group that was delivered `deliveries_max` times."""


@dataclass(frozen=True, slots=True, eq=False, repr=False, kw_only=True)
class SharedGroup(Group):
    """A group claimed by this member until it is acknowledged, or the member dies.

    Attributes:
        deliveries: How often the group has been claimed, including now. From 2 on, it may have been handled before.
    """

    deliveries: int
    _claim: Claim
    _shared: "SharedGroups"

    def acknowledge(self) -> None:
        """Mark the group as done, so that it is never delivered again. Any thread may call this. Idempotent.

        While PostgreSQL does not answer, the call retries, for `lease_s` at most.

        Raises:
            ClaimLost: another member claimed the group, or `close` released it. The group will be delivered again.
            DatabaseUnavailable: PostgreSQL does not answer; safe to repeat.
        """
        claims = self._shared._claims
        until = time.monotonic() + claims.lease_s
        while not claims.acknowledge(self._claim, until):
            pause(ACKNOWLEDGE_PAUSE_S)


def _fields_of(group: Group) -> dict[str, Any]:
    return {each.name: getattr(group, each.name) for each in fields(Group)}


@dataclass(frozen=True, slots=True)
class _GivenUp:
    """A group to give up. Its messages become dead letters, if the consumer has a dead-letter stream."""

    reason: str
    publisher: DeadLetterPublisher | None = None


class SharedGroups(Closing, Iterator[SharedGroup]):
    """The groups of one member of a group consumer. Iterate in one thread. A context manager.

    Until `close`, the leases of unacknowledged groups are renewed in the background, even after the iteration's end.
    """

    def __init__(self, catalog: Catalog, address: BrokerAddress, options: GroupOptions) -> None:
        assert options.consumer is not None, "it is shared"
        self._catalog = catalog
        self._options = options
        self._consumer = consumer = options.consumer
        self._label = f"the group consumer {consumer.name!r}"
        self._outages = Outages(logger, broker=str(address))
        stream = consumer.dead_letter_stream
        self._letters = None if stream is None else DeadLetters(address, stream)
        self._claims = Claims(catalog.servers, consumer.member or new_holder(), float(consumer.lease_s))
        self._scanner: Scanner | None = None
        self._unread: deque[Claim] = deque()
        """Claims of groups that are not read yet."""
        self._outcomes: deque[tuple[Claim, Group | GroupConflict | _GivenUp]] = deque()
        """The results of reading groups, in order: groups to deliver, conflicts to raise, groups to give up."""
        self._idle = IdleBackoff(options.idle_timeout_s, POLL_S_MAX)
        self._pauses = Pauses()
        self._counts = dict.fromkeys(("given", "redelivered", "given_up"), 0)
        self._keeper: PeriodicThread | None = None
        self._take_lock = threading.Lock()
        refuse_in_child(self, "a group consumer")
        metrics.report(self, consumer=consumer.name)

    def __next__(self) -> SharedGroup:
        """Return the next group.

        Raises:
            GroupConflict: a group is unsound; it was released.
            StreamNotFound: a named stream, or the dead-letter stream, does not exist.
            PublishError: the broker did not confirm a dead letter; the group was released.
        """
        self._idle.begin()
        while isinstance(found := self._take(), Pause):
            pause(found.seconds)
        if found is None:
            raise StopIteration
        return found

    def _take(self) -> SharedGroup | Pause | None:
        """Return the next group, a pause if no group is ready, or None at the end."""
        # The lock is for asyncio: the thread of a cancelled task may still run.
        with self._take_lock:
            if self._claims.is_closed:
                return None
            if self._keeper is None:
                every_s = renewal_s(self._consumer.lease_s)
                self._keeper = PeriodicThread(self, SharedGroups._renew, every_s=every_s, name="relatum-leases")
            is_end = not self._options.follow or self._idle.is_over
            try:
                found = self._next()
            except (Transient, StreamReplaced) as error:
                # With follow=True, the member waits for the servers, or for a recorder to repair the record.
                if not self._options.follow or has_passed():
                    raise
                self._outages.failed(self._label, error)
                found = None
            else:
                self._outages.over(self._label)
            if found is None and not is_end:
                return self._idle.pause()
            if found is None and not self._claims.held:
                self.close()
            if isinstance(found, SharedGroup):
                self._counts["given"] += 1
                self._counts["redelivered"] += found.deliveries > 1
            return found

    def _put_back(self, found: SharedGroup | Pause | None) -> None:
        """Put a group back at the front, because the caller was cancelled before it received the group."""
        if isinstance(found, SharedGroup):
            with self._take_lock:
                self._counts["given"] -= 1
                self._counts["redelivered"] -= found.deliveries > 1
                self._outcomes.appendleft((found._claim, found))

    def statistics(self) -> SharedGroupsStatistics:
        """Return this member's counters, and the number of groups it holds, without any I/O."""
        acknowledged, held = self._claims.acknowledged, len(self._claims.held)
        return SharedGroupsStatistics(**self._counts, acknowledged=acknowledged, held=held)

    def _renew(self) -> None:
        label = f"renewing the leases of {self._label}"
        try:
            self._claims.renew()
        except Transient:
            pass  # Two more renewals are due before the leases expire and the groups are lost.
        except Exception as error:  # noqa: BLE001 - it is retried; at worst, the leases expire
            self._outages.failed(label, error)
        else:
            self._outages.over(label)

    def close(self) -> None:
        """End the iteration, and release unacknowledged groups: other members can claim them immediately."""
        if self._claims.is_closed:
            return
        self._claims.is_closed = True
        if self._keeper is not None:
            self._keeper.end()
        try:
            self._claims.release_all()
        except RelatumError as error:
            text = "groups of %s could not be released, so other members can claim them after their leases expire: %s"
            logger.info(text, self._label, ended(error))
        metrics.retire(self)

    def _next(self) -> SharedGroup | Pause | None:
        """Return the next group, or a pause after one was given up; None if no group is ready."""
        while True:
            while self._outcomes:
                # The outcome is removed after the calls to the database: if one fails, the outcome is next again.
                claim, outcome = self._outcomes[0]
                is_mine = self._claims.is_mine(claim)
                if is_mine and isinstance(outcome, GroupConflict):
                    # Release all claimed groups that were not delivered.
                    for each in [*(claim for claim, _ in self._outcomes), *self._unread]:
                        self._claims.end(each, "ready")
                    self._outcomes.clear()
                    self._unread.clear()
                    raise outcome
                if is_mine and isinstance(outcome, Group) and self._consumer.deliveries_max is not None:
                    is_mine = self._claims.count_given(claim)
                self._outcomes.popleft()
                if is_mine and isinstance(outcome, _GivenUp):
                    return self._give_up(claim, outcome)
                if is_mine and isinstance(outcome, Group):
                    return SharedGroup(**_fields_of(outcome), deliveries=claim.number, _claim=claim, _shared=self)
            if not self._unread:
                self._claim()
                if not self._unread:
                    return None
            self._read()

    def _claim(self) -> None:
        """Claim ready groups. If there are none, scan the streams and try again."""
        if self._scanner is None:
            # Check the dead-letter stream before the consumer is created.
            check_dead_letters(self._catalog.servers, self._consumer.dead_letter_stream)
            consumer = find_consumer(self._catalog, self._consumer.name, self._options)
            self._claims.consumer_id = consumer.consumer_id
            self._scanner = Scanner(self._catalog, consumer)
        is_fresh = time.monotonic() - self._scanner.scanned_at < SCANS_S
        if not is_fresh:
            self._scanner.run()
        claims = self._claims.take(self._consumer.prefetch)
        if is_fresh and not claims:
            self._scanner.run()
            claims = self._claims.take(self._consumer.prefetch)
        self._unread.extend(claims)

    def _read(self) -> None:
        """Read claimed groups in one pass, until `MESSAGES_AT_ONCE`."""
        assert self._scanner is not None, "it is set before the first claim"
        self._unread = deque(claim for claim in self._unread if self._claims.has(claim))
        ids = [claim.group_id for claim in self._unread]
        groups = {group.group_id: group for group in self._scanner.groups(ids)}
        if not all(group.was_complete for group in groups.values()):
            # Another member may have found them in a stream that this member's view lacks.
            self._scanner.refresh()
            groups = {group.group_id: group for group in self._scanner.groups(ids)}
        part: list[Assembled] = []
        messages = 0
        for claim in self._unread:
            if messages < MESSAGES_AT_ONCE:
                part.append(groups[claim.group_id])
                messages += len(groups[claim.group_id].retained)
        # If a server is unavailable, this raises, and the groups that are still in `_unread` are read again later.
        deliveries_max = self._consumer.deliveries_max
        found = read_groups(self._catalog.servers, part, self._options, is_named=False)
        for group, read in zip(part, found, strict=True):
            claim = self._unread[0]
            if read is None:
                self._end_incomplete(claim, group)
            elif deliveries_max is not None and claim.given >= deliveries_max:
                self._outcomes.append((claim, self._given_up(NEVER_ACKNOWLEDGED, group)))
            elif isinstance(read, GroupConflict):
                self._end_unsound(claim, group, read)
            else:
                self._outcomes.append((claim, read))
            self._unread.popleft()

    def _end_incomplete(self, claim: Claim, group: Assembled) -> None:
        """Handle a group that is no longer complete: retention dropped a part, or a stream lost its tail or is gone."""
        assert self._scanner is not None, "it is set before the first claim"
        stream = next((each for each in self._scanner.refresh() if each.stream_id == claim.stream_id), None)
        if stream is None:
            # The stream was deleted or declared again. A group with the same id in a new stream is a different group.
            self._claims.end(claim, "dead")
            return
        floor = floors_of(self._catalog.servers, [stream.name], is_named=False)[stream.name]
        if max(floor, stream.retained_from) > claim.first_offset:
            self._end_unsound(claim, group, conflict(claim.group_id, Anomaly.EXPIRED))
        else:
            self._claims.end(claim, "open")
            # The group may be complete again: a scan by another member does not change the state of a claimed group.
            self._scanner.store_state(claim.group_id)

    def _end_unsound(self, claim: Claim, group: Assembled, error: GroupConflict) -> None:
        if self._options.on_conflict == "raise" or error.anomaly == Anomaly.DUPLICATE:
            self._outcomes.append((claim, error))
        elif self._options.on_conflict == "skip":
            self._claims.end(claim, "dead")
        else:
            self._outcomes.append((claim, self._given_up(error.anomaly, group)))

    def _given_up(self, reason: str, group: Assembled) -> _GivenUp:
        """Return the group to give up; its retained messages become dead letters, in the group's order."""
        ids = [member.id for member in named(group.retained)]
        if self._letters is None or not ids:
            return _GivenUp(reason)
        letters = [(each, reason) for each in self._catalog.servers.read(ids) if isinstance(each, Message)]
        missing = ",".join(f"{first}-{last}" for first, last in group.position.missing)
        headers = {"relatum_dead_group_missing": missing[:REASON_CHARACTERS_MAX]} if missing else {}
        return _GivenUp(reason, DeadLetterPublisher(self._letters, letters, **headers))

    def _give_up(self, claim: Claim, given_up: _GivenUp) -> Pause:
        """Publish a group's messages as dead letters, if there is a stream for them. If that fails, it is released."""
        label = f"publishing dead letters of the group {claim.group_id}, of {self._label},"
        try:
            if given_up.publisher is not None and self._letters is not None:
                # Dead letters are rare: close the connection after each group.
                with self._letters:
                    given_up.publisher.run()
            was_mine = self._claims.end(claim, "dead")
        except Exception as error:
            if self._options.follow and may_repeat(error):
                self._outages.failed(label, error)
                self._outcomes.appendleft((claim, given_up))
                return Pause(DEAD_LETTERS_S + self._pauses.after(error))
            with suppress(RelatumError):
                self._claims.end(claim, "ready")
            # If the release failed, other members can claim the group after its lease expires.
            self._claims.forget(claim)
            raise
        self._pauses = Pauses()
        self._outages.over(label)
        self._counts["given_up"] += 1
        if was_mine and given_up.reason == NEVER_ACKNOWLEDGED:
            stream = self._consumer.dead_letter_stream
            where = "remain only in their streams" if stream is None else f"are in the stream {stream!r}"
            text = "the group %s is dead: consumer %r received it %d times and never acknowledged it; its messages %s"
            logger.warning(text, claim.group_id, self._consumer.name, claim.given, where)
        self._idle.begin()
        return Pause(0.0)


@dataclass(frozen=True, slots=True, eq=False, repr=False, kw_only=True)
class AsyncSharedGroup(Group):
    """Like `SharedGroup`: a group claimed by this member until it is acknowledged or the member dies."""

    deliveries: int
    _group: SharedGroup
    _call: Callable[..., Awaitable[Any]]

    async def acknowledge(self) -> None:
        """Mark the group as done; see `SharedGroup.acknowledge`. Any task may call this. Idempotent."""
        claims, claim = self._group._shared._claims, self._group._claim
        until = time.monotonic() + claims.lease_s
        # Between attempts, this holds no thread: the other calls of the lookups need them.
        while not await self._call(claims.acknowledge, claim, until):  # noqa: ASYNC110
            await asyncio.sleep(ACKNOWLEDGE_PAUSE_S)


class AsyncSharedGroups(AsyncIterator[AsyncSharedGroup]):
    """Like `SharedGroups`: the groups of one member. Iterate in one task; cancelling it loses no group."""

    def __init__(
        self,
        call: Callable[..., Awaitable[Any]],
        end: Callable[[Callable[[], object]], Awaitable[None]],
        shared: SharedGroups,
    ) -> None:
        self._call = call
        self._end = end
        self._shared = shared
        refuse_in_child(self, "a group consumer")

    async def __anext__(self) -> AsyncSharedGroup:
        """Return the next group; see `SharedGroups.__next__`."""
        shared = self._shared
        shared._idle.begin()
        found: SharedGroup | Pause | None
        while isinstance(found := await self._call(shared._take, returned=shared._put_back), Pause):  # noqa: ASYNC110
            await asyncio.sleep(found.seconds)
        if found is None:
            raise StopAsyncIteration
        return AsyncSharedGroup(**_fields_of(found), deliveries=found.deliveries, _group=found, _call=self._call)

    def statistics(self) -> SharedGroupsStatistics:
        """Return this member's counters, and the number of groups it holds, without any I/O."""
        return self._shared.statistics()

    async def aclose(self) -> None:
        """End the iteration, and release unacknowledged groups: other members can claim them immediately."""
        await self._end(self._shared.close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self.aclose()
