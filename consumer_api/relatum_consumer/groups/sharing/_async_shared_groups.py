# The blocking face of this, _shared_groups.py, is made by tools/make-twins.
"""The asyncio face of consumers that share groups."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Any, Self

from relatum import metrics
from relatum.errors import RelatumError, Transient
from relatum.processes import new_holder, of_one_process
from relatum.publishing import DeadLetters
from relatum.reading import BrokerAddress
from relatum.store import renewal_s
from relatum.waiting import AsyncKeeper, Outages, ended
from relatum_consumer.groups.reading._group_values import Group
from relatum_consumer.groups.sharing._claims import Claim, Given, GivenUp
from relatum_consumer.groups.sharing._sharing_options import SharedOptions
from relatum_consumer.groups.sharing._sharing_status import SharedGroupsCounts, SharedGroupsStatistics
from relatum_consumer.groups.sharing._sharing_steps import SharedReading
from relatum_consumer.lookups import Catalog

logger = logging.getLogger("relatum.groups")

AsyncRun = Callable[[Any], Awaitable[Any]]
"""Takes steps to their end, and returns what they do."""


@dataclass(frozen=True, slots=True, eq=False, repr=False, kw_only=True)
class AsyncSharedGroup(Group):
    """A group that is this member's until it is acknowledged, or the member dies.

    Attributes:
        deliveries: How often the group was claimed; from 2 on it may have been handled before.
    """

    deliveries: int
    _claim: Claim
    _shared: "AsyncSharedGroups"

    async def acknowledge(self) -> None:
        """Say that the group is done: it is never given again. Any task may, and again: that changes nothing.

        Where PostgreSQL does not answer, it is asked again for as long as the lease holds.

        Raises:
            ClaimLost: the group is another member's by now, or was given back when the iteration was closed. What was
                done with it is done again.
            DatabaseUnavailable: PostgreSQL does not answer; acknowledging again is safe.
        """
        shared = self._shared
        is_first = shared._reading.claims.has(self._claim)
        await shared._run(shared._reading.claims.acknowledge(self._claim))
        shared._counts.acknowledged += is_first


class AsyncSharedGroups(AsyncIterator[AsyncSharedGroup]):
    # asyncio only:
    """The groups of one member of a consumer. Iterate in one task; an asynchronous context manager.

    The leases of the groups given and not acknowledged are renewed in the background for as long as this is open, also
    after its end was reached.
    """

    # blocking only:
    # """The groups of one member of a consumer. Iterate in one thread; a context manager.
    #
    # The leases of the groups given and not acknowledged are renewed in the background for as long as this is open,
    # also after its end was reached.
    # """
    # both:

    def __init__(self, run: AsyncRun, catalog: Catalog, address: BrokerAddress, options: SharedOptions) -> None:
        consumer = options.consumer
        self._run = run
        self._name = consumer.name
        self._outages = Outages(logger, broker=str(address))
        self._reading = SharedReading(catalog, options, consumer.member or new_holder(), self._outages)
        self._letters: DeadLetters | None = None
        if consumer.dead_letter_stream is not None:
            self._letters = DeadLetters(address, consumer.dead_letter_stream)
        self._keeper: AsyncKeeper | None = None
        self._renew_s = renewal_s(consumer.lease_s)
        of_one_process(self, "a consumer of groups")
        self._counts = SharedGroupsCounts()
        metrics.report(self, consumer=self._name)

    async def __anext__(self) -> AsyncSharedGroup:
        """Give the next group.

        Raises:
            GroupConflict: a group is not sound; it was given back.
            StreamNotFound: there is no stream, or no dead-letter stream, of a name that was given.
            PublishError: the dead-letter stream does not take a message; the group was given back.
        """
        while True:
            self._keep()
            outcome = await self._run(self._reading.next())
            if outcome is None:
                if not self._reading.claims.held:
                    await self.aclose()
                raise StopAsyncIteration
            if isinstance(outcome, Given):
                group, claim = outcome.group, outcome.claim
                self._counts.given += 1
                self._counts.redelivered += claim.number > 1
                return AsyncSharedGroup(
                    group.group_id,
                    group.messages,
                    group.position,
                    group.duplicates,
                    group.expired,
                    deliveries=claim.number,
                    _claim=claim,
                    _shared=self,
                )
            await self._give_up(outcome)

    async def _give_up(self, outcome: GivenUp) -> None:
        try:
            if outcome.messages:
                assert self._letters is not None, "the options were checked"
                await asyncio.to_thread(_publish, self._letters, outcome)
            await self._run(self._reading.given_up(outcome))
            self._counts.given_up += 1
        except Exception as error:
            if not await self._run(self._reading.not_given_up(outcome, error)):
                raise

    def statistics(self) -> SharedGroupsStatistics:
        """What this member has counted, and how many groups it holds. It asks nobody."""
        return SharedGroupsStatistics(**asdict(self._counts), held=len(self._reading.claims.held))

    def _keep(self) -> None:
        """See that leases are renewed."""
        if self._keeper is None and not self._reading.claims.is_closed:
            renew = AsyncSharedGroups._renew
            self._keeper = AsyncKeeper(self, renew, every_s=self._renew_s, name="relatum-leases")

    async def _renew(self) -> None:
        who = f"renewing the leases of the consumer {self._name!r} of groups"
        try:
            await self._run(self._reading.claims.renew())
        except Transient:
            pass  # There are two more before the lease runs out; then the groups are let go.
        except Exception as error:  # noqa: BLE001 - it is tried again; the leases run out where they must
            self._outages.failed(who, error)
        else:
            self._outages.over(who)

    async def aclose(self) -> None:
        """Give back what was not acknowledged: other members get it at once. The iteration is over."""
        if self._reading.claims.is_closed:
            return
        self._reading.claims.is_closed = True
        if self._keeper is not None:
            await self._keeper.end()
        try:
            await self._run(self._reading.claims.give_back())
        except RelatumError as error:
            text = "groups of the consumer %r could not be given back, and are free when their lease has run out: %s"
            logger.info(text, self._name, ended(error))
        metrics.retire(self)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()


def _publish(letters: DeadLetters, outcome: GivenUp) -> None:
    # They are rare: a connection that is left to time is one more to lose.
    with letters:
        outcome.burial(letters).run()
