"""The asyncio face of groups: the methods of `AsyncRelations` that read them."""

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from datetime import timedelta
from typing import Any, Literal, TypeVar, Unpack, overload
from weakref import WeakSet

from relatum.membership import GroupPosition
from relatum.reading import AsyncStreamReader, BrokerAddress, Message
from relatum.steps import async_each, async_run
from relatum.waiting import within
from relatum_consumer.groups.reading._assembly import GroupOrder
from relatum_consumer.groups.reading._group_lookups import GroupLookups
from relatum_consumer.groups.reading._group_options import (
    GroupArguments,
    GroupStart,
    OnConflict,
    OnDuplicate,
    SharingArguments,
)
from relatum_consumer.groups.reading._group_requests import (
    GivingSteps,
    GroupRequest,
    GroupSteps,
    OpenMany,
    Sift,
    TakeMany,
)
from relatum_consumer.groups.reading._group_values import Group, IncompleteGroupReport
from relatum_consumer.groups.reading._open_group import Unfolding
from relatum_consumer.groups.sharing._async_shared_groups import AsyncSharedGroups
from relatum_consumer.groups.sharing._sharing_options import GroupConsumer, SharedOptions, shared_options
from relatum_consumer.groups.sharing._sharing_status import GroupConsumerStatus, consumer_status
from relatum_consumer.lookups import Answer, Names

_Result = TypeVar("_Result")


class AsyncGroupMethods(ABC):
    """What `AsyncRelations` offers for groups, over its look-ups and its reader."""

    _group_lookups: GroupLookups
    _address: BrokerAddress
    _timeout_s: float
    _sharing: "WeakSet[AsyncSharedGroups]"

    @abstractmethod
    async def _carry_out(self, request: Any) -> Any: ...

    @abstractmethod
    async def _open_reader(self) -> AsyncStreamReader: ...

    # --- many groups --------------------------------------------------------------------------------------

    @overload
    def groups(
        self,
        streams: Names = None,
        *,
        complete_only: Literal[True] = True,
        consumer: None = None,
        **options: Unpack[GroupArguments],
    ) -> AsyncGenerator[Group, None]: ...
    @overload
    def groups(
        self,
        streams: Names = None,
        *,
        complete_only: Literal[False],
        consumer: None = None,
        **options: Unpack[GroupArguments],
    ) -> "AsyncGenerator[AsyncOpenGroup, None]": ...
    @overload
    def groups(
        self,
        streams: Names = None,
        *,
        complete_only: bool,
        consumer: None = None,
        **options: Unpack[GroupArguments],
    ) -> "AsyncGenerator[Group | AsyncOpenGroup, None]": ...
    @overload
    def groups(
        self, streams: Names = None, *, consumer: str | GroupConsumer, **options: Unpack[SharingArguments]
    ) -> AsyncSharedGroups: ...
    def groups(
        self,
        streams: Names = None,
        *,
        order: GroupOrder = "logical",
        complete_only: bool = True,
        start: GroupStart = None,
        ungrouped: bool = False,
        complete: bool = True,
        follow: bool = False,
        timeout_s: float = 10.0,
        idle_timeout_s: float | None = None,
        on_duplicate: OnDuplicate = "first",
        on_conflict: OnConflict = "raise",
        consumer: str | GroupConsumer | None = None,
    ) -> AsyncGenerator[Any, None] | AsyncSharedGroups:
        """Whole groups, one after the other. See `Relations.groups`; with `complete_only=False`, `AsyncOpenGroup`s.

        Use `async with contextlib.aclosing(relations.groups(…))` where it is left early.
        """
        options = {
            "order": order,
            "complete_only": complete_only,
            "start": start,
            "ungrouped": ungrouped,
            "complete": complete,
            "follow": follow,
            "timeout_s": timeout_s,
            "idle_timeout_s": idle_timeout_s,
            "on_duplicate": on_duplicate,
            "on_conflict": on_conflict,
        }
        if consumer is not None:
            return self._share(shared_options(streams, consumer, options))
        return self._each(self._group_lookups.groups(streams, options))

    async def incomplete_groups(
        self, streams: Names = None, *, older_than: timedelta | float
    ) -> list[IncompleteGroupReport]:
        """The groups that are not complete, or contradict themselves. See `Relations.incomplete_groups`."""
        return await self._run_out(self._group_lookups.incomplete_groups(streams, older_than))

    # --- one group ----------------------------------------------------------------------------------------

    async def group(
        self, group_id: str, *, streams: Names = None, order: GroupOrder = "logical", complete: bool = True
    ) -> Group:
        """What there is of one group, complete or not. See `Relations.group`."""
        return await self._finish(self._group_lookups.group(group_id, streams, order, complete=complete))

    async def grouped(self, group_id: str, sequence: int, *, streams: Names = None, complete: bool = False) -> Answer:
        """The messages of one number of a group. See `Relations.grouped`."""
        return await self._finish(self._group_lookups.grouped(group_id, sequence, streams, complete=complete))

    async def group_position(self, group_id: str, *, streams: Names = None, complete: bool = True) -> GroupPosition:
        """How far a group is. See `Relations.group_position`."""
        return await self._finish(self._group_lookups.group_position(group_id, streams, complete=complete))

    # --- sharing groups -----------------------------------------------------------------------------------

    async def group_consumer_status(self, name: str) -> GroupConsumerStatus:
        """What is known of a consumer that shares groups. See `Relations.group_consumer_status`."""
        return await self._finish(consumer_status(self._group_lookups.catalog, name))

    def _share(self, options: SharedOptions) -> AsyncSharedGroups:
        shared = AsyncSharedGroups(self._run_out, self._group_lookups.catalog, self._address, options)
        self._sharing.add(shared)
        return shared

    # --- carrying out -------------------------------------------------------------------------------------

    async def _finish(self, steps: GroupSteps[_Result]) -> _Result:
        """Take the steps of one call to their end, in its time; what they return."""
        with within(self._timeout_s):
            return await self._run_out(steps)

    async def _run_out(self, steps: GroupSteps[_Result]) -> _Result:
        """Take steps that give nothing on the way to their end; what they return."""
        async with aclosing(_Carrier(self)) as carrier:
            return await async_run(steps, carrier.carry_out)

    async def _each(self, steps: GivingSteps[Any, None]) -> AsyncGenerator[Any, None]:
        async with aclosing(_Carrier(self)) as carrier, aclosing(async_each(steps, carrier.carry_out)) as given:
            async for what in given:
                yield AsyncOpenGroup(self, what) if isinstance(what, Unfolding) else what


class _Carrier:
    """Carries out the requests of one run of steps; it has one batched read under way at most."""

    def __init__(self, relations: AsyncGroupMethods) -> None:
        self._relations = relations
        self._many: Any = None

    async def carry_out(self, request: GroupRequest) -> Any:
        if type(request) is TakeMany:
            assert self._many is not None, "a read was begun"
            return [await anext(self._many) for _ in range(request.count)]
        if type(request) is OpenMany:
            await self.aclose()
            reader = await self._relations._open_reader()
            self._many = reader.read_many(request.ids, window=request.window)
            return None
        if type(request) is Sift:
            reader = await self._relations._open_reader()
            return await reader.scan(request.stream, request.start, request.stop, request.take)
        return await self._relations._carry_out(request)

    async def aclose(self) -> None:
        """End the batched read."""
        if self._many is not None:
            await self._many.aclose()


class AsyncOpenGroup:
    """A group as it comes: `async for` over it gives its messages, and waits for the next. See `OpenGroup`."""

    def __init__(self, relations: AsyncGroupMethods, found: Unfolding) -> None:
        self._relations = relations
        self._found = found
        self.group_id: str | None = found.group_id
        self.position: GroupPosition | None = found.position

    def __aiter__(self) -> AsyncIterator[Message]:
        return self._relations._each(self._found.messages())

    def __repr__(self) -> str:
        return f"<AsyncOpenGroup {self.group_id}>"
