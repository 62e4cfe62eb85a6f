"""The faces of consumers that share groups: blocking, and asyncio, which calls it in threads."""

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Any, Self

from relatum import metrics
from relatum.closing import Closing, Keeper
from relatum.errors import RelatumError, Transient
from relatum.processes import new_holder, of_one_process
from relatum.publishing import DeadLetters
from relatum.reading import BrokerAddress
from relatum.store.members import renewal_s
from relatum.waiting import Outages, ended, pause
from relatum_consumer.groups._claims import Given
from relatum_consumer.groups._consumer import SharedGroupsStatistics
from relatum_consumer.groups._group import Group
from relatum_consumer.groups._member import SharedReading
from relatum_consumer.groups._options import SharedOptions
from relatum_consumer.lookups.catalog import Catalog
from relatum_consumer.lookups.waiting import Rest

logger = logging.getLogger("relatum.groups")


@dataclass(frozen=True, slots=True, eq=False, repr=False, kw_only=True)
class SharedGroup(Group):
    """A group that is this member's until it is acknowledged, or the member dies.

    Attributes:
        deliveries: How often the group was claimed; from 2 on it may have been handled before.
    """

    deliveries: int
    _given: Given
    _shared: "SharedGroups"

    def acknowledge(self) -> None:
        """Say that the group is done: it is never given again. Any thread may, and again: that changes nothing.

        Where PostgreSQL does not answer, it is asked again for as long as the lease holds.

        Raises:
            ClaimLost: the group is another member's by now, or was given back when the iteration was closed. What was
                done with it is done again.
            DatabaseUnavailable: PostgreSQL does not answer; acknowledging again is safe.
        """
        began = time.monotonic()
        while (rest := self._acknowledge(began)) is not None:
            pause(rest.seconds)

    def _acknowledge(self, began: float) -> Rest | None:
        shared = self._shared
        is_first = shared._reading.claims.has(self._given.claim)
        rest = shared._reading.claims.acknowledge(self._given.claim, began)
        if rest is None:
            shared._reading.counts.acknowledged += is_first
        return rest


class SharedGroups(Closing, Iterator[SharedGroup]):
    """The groups of one member of a consumer. Iterate in one thread; a context manager.

    The leases of the groups given and not acknowledged are renewed in the background for as long as this is open,
    also after its end was reached.
    """

    def __init__(self, catalog: Catalog, address: BrokerAddress, options: SharedOptions) -> None:
        consumer = options.consumer
        self._name = consumer.name
        self._outages = Outages(logger, broker=str(address))
        stream = consumer.dead_letter_stream
        letters = None if stream is None else DeadLetters(address, stream)
        self._reading = SharedReading(catalog, options, consumer.member or new_holder(), self._outages, letters)
        self._keeper: Keeper | None = None
        self._renew_s = renewal_s(consumer.lease_s)
        of_one_process(self, "a consumer of groups")
        metrics.report(self, consumer=self._name)

    def __next__(self) -> SharedGroup:
        """Give the next group.

        Raises:
            GroupConflict: a group is not sound; it was given back.
            StreamNotFound: there is no stream, or no dead-letter stream, of a name that was given.
            PublishError: the dead-letter stream does not take a message; the group was given back.
        """
        self._reading.begin()
        while isinstance(found := self._take(), Rest):
            pause(found.seconds)
        if found is None:
            raise StopIteration
        return found

    def _take(self) -> SharedGroup | Rest | None:
        """The next group; None at the end, and a rest where there is none now."""
        self._keep()
        outcome = self._reading.next()
        if outcome is None:
            if not self._reading.claims.held:
                self.close()
            return None
        if isinstance(outcome, Rest):
            return outcome
        group, claim = outcome.group, outcome.claim
        self._reading.counts.given += 1
        self._reading.counts.redelivered += claim.number > 1
        return SharedGroup(
            group.group_id,
            group.messages,
            group.position,
            group.duplicates,
            group.expired,
            deliveries=claim.number,
            _given=outcome,
            _shared=self,
        )

    def _put_back(self, group: SharedGroup) -> None:
        """The caller was cancelled before it got the group: the group is the next one again."""
        self._reading.counts.given -= 1
        self._reading.counts.redelivered -= group.deliveries > 1
        self._reading.put_back(group._given)

    def statistics(self) -> SharedGroupsStatistics:
        """What this member has counted, and how many groups it holds. It asks nobody."""
        return SharedGroupsStatistics(**asdict(self._reading.counts), held=len(self._reading.claims.held))

    def _keep(self) -> None:
        """See that leases are renewed."""
        if self._keeper is None and not self._reading.claims.is_closed:
            renew = SharedGroups._renew
            self._keeper = Keeper(self, renew, every_s=self._renew_s, name="relatum-leases")

    def _renew(self) -> None:
        who = f"renewing the leases of the consumer {self._name!r} of groups"
        try:
            self._reading.claims.renew()
        except Transient:
            pass  # There are two more before the lease runs out; then the groups are let go.
        except Exception as error:  # noqa: BLE001 - it is tried again; the leases run out where they must
            self._outages.failed(who, error)
        else:
            self._outages.over(who)

    def close(self) -> None:
        """Give back what was not acknowledged: other members get it at once. The iteration is over."""
        if self._reading.claims.is_closed:
            return
        self._reading.claims.is_closed = True
        if self._keeper is not None:
            self._keeper.end()
        try:
            self._reading.claims.give_back()
        except RelatumError as error:
            text = "groups of the consumer %r could not be given back, and are free when their lease has run out: %s"
            logger.info(text, self._name, ended(error))
        metrics.retire(self)


@dataclass(frozen=True, slots=True, eq=False, repr=False, kw_only=True)
class AsyncSharedGroup(Group):
    """A group that is this member's until it is acknowledged, or the member dies.

    Attributes:
        deliveries: How often the group was claimed; from 2 on it may have been handled before.
    """

    deliveries: int
    _group: SharedGroup
    _call: Callable[..., Awaitable[Any]]

    async def acknowledge(self) -> None:
        """Say that the group is done; as `SharedGroup.acknowledge`. Any task may, and again: that changes nothing."""
        began = time.monotonic()
        while (rest := await self._call(self._group._acknowledge, began)) is not None:  # noqa: ASYNC110
            await asyncio.sleep(rest.seconds)


class AsyncSharedGroups(AsyncIterator[AsyncSharedGroup]):
    """The groups of one member of a consumer. Iterate in one task; an asynchronous context manager.

    The leases of the groups given and not acknowledged are renewed in the background for as long as this is open, also
    after its end was reached. A task that is cancelled while it waits for a group loses none.
    """

    def __init__(
        self,
        call: Callable[..., Awaitable[Any]],
        end: Callable[[Callable[[], object]], Awaitable[None]],
        shared: SharedGroups,
    ) -> None:
        self._call = call
        self._end = end
        self._shared = shared
        self._taking = threading.Lock()
        of_one_process(self, "a consumer of groups")

    async def __anext__(self) -> AsyncSharedGroup:
        """Give the next group; as `SharedGroups.__next__`."""
        self._shared._reading.begin()
        found: SharedGroup | Rest | None
        while isinstance(found := await self._call(self._take, returned=self._put_back), Rest):  # noqa: ASYNC110
            await asyncio.sleep(found.seconds)
        if found is None:
            raise StopAsyncIteration
        return AsyncSharedGroup(
            found.group_id,
            found.messages,
            found.position,
            found.duplicates,
            found.expired,
            deliveries=found.deliveries,
            _group=found,
            _call=self._call,
        )

    def _take(self) -> SharedGroup | Rest | None:
        # After a task was cancelled, its thread may go on for a moment.
        with self._taking:
            return self._shared._take()

    def _put_back(self, found: SharedGroup | Rest | None) -> None:
        if isinstance(found, SharedGroup):
            with self._taking:
                self._shared._put_back(found)

    def statistics(self) -> SharedGroupsStatistics:
        """What this member has counted, and how many groups it holds. It asks nobody."""
        return self._shared.statistics()

    async def aclose(self) -> None:
        """Give back what was not acknowledged: other members get it at once. The iteration is over."""
        await self._end(self._shared.close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()
