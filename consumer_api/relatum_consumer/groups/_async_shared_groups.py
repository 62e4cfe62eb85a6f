"""The asyncio interface of a member of a group consumer: it calls the blocking one in threads."""

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, fields
from types import TracebackType
from typing import Any, Self

from relatum.processes import of_one_process
from relatum_consumer.groups._consumer import SharedGroupsStatistics
from relatum_consumer.groups._group import Group
from relatum_consumer.groups._shared_groups import SharedGroup, SharedGroups
from relatum_consumer.lookups.waiting import Pause


@dataclass(frozen=True, slots=True, eq=False, repr=False, kw_only=True)
class AsyncSharedGroup(Group):
    """A group claimed by this member until it is acknowledged, or the member dies.

    Attributes:
        deliveries: How often the group has been claimed. From 2 on, it may have been handled before.
    """

    deliveries: int
    _group: SharedGroup
    _call: Callable[..., Awaitable[Any]]

    async def acknowledge(self) -> None:
        """Mark the group as done, as `SharedGroup.acknowledge` does. Any task may call this. Idempotent."""
        rests = self._group._acknowledging()
        while (rest := await self._call(next, rests, None)) is not None:  # noqa: ASYNC110
            await asyncio.sleep(rest.seconds)


class AsyncSharedGroups(AsyncIterator[AsyncSharedGroup]):
    """The groups of one member of a consumer. Iterate in one task. An asynchronous context manager.

    The leases of unacknowledged groups are renewed in the background while this is open, even after the iteration has
    ended. Cancelling a task that waits for a group loses no group.
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
        of_one_process(self, "a group consumer")

    async def __anext__(self) -> AsyncSharedGroup:
        """Return the next group, as `SharedGroups.__next__` does."""
        self._shared._begin()
        found: SharedGroup | Pause | None
        while isinstance(found := await self._call(self._take, returned=self._put_back), Pause):  # noqa: ASYNC110
            await asyncio.sleep(found.seconds)
        if found is None:
            raise StopAsyncIteration
        known = {each.name: getattr(found, each.name) for each in fields(Group)}
        return AsyncSharedGroup(**known, deliveries=found.deliveries, _group=found, _call=self._call)

    def _take(self) -> SharedGroup | Pause | None:
        # The thread of a cancelled task may still run for a moment.
        with self._taking:
            return self._shared._take()

    def _put_back(self, found: SharedGroup | Pause | None) -> None:
        if isinstance(found, SharedGroup):
            with self._taking:
                self._shared._put_back(found)

    def statistics(self) -> SharedGroupsStatistics:
        """Return this member's counters and how many groups it holds. No I/O."""
        return self._shared.statistics()

    async def aclose(self) -> None:
        """Release unacknowledged groups: other members can claim them at once. The iteration ends."""
        await self._end(self._shared.close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()
