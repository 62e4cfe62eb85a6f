"""What a type checker knows of groups, by the arguments of `groups`: mypy alone reads it, in `make check`."""

from collections.abc import AsyncGenerator, Generator
from contextlib import aclosing, closing
from datetime import UTC, datetime
from typing import assert_type

from relatum.membership import GroupPosition
from relatum.reading import Message
from relatum_consumer import (
    AsyncRelations,
    AsyncSharedGroup,
    AsyncSharedGroups,
    Group,
    GroupConsumer,
    Relations,
    SharedGroup,
    SharedGroups,
)


def blocking(relations: Relations, name: str | None) -> None:
    assert_type(relations.groups(), Generator[Group, None, None])
    assert_type(relations.groups("orders", complete=False), Generator[Group, None, None])
    with closing(relations.groups(["a", "b"], order="physical", start=datetime.now(UTC))) as groups:
        for group in groups:
            assert_type(group[0], Message)
            assert_type(group.position, GroupPosition)
    with relations.groups("orders", consumer="billing", follow=True, idle_timeout_s=3) as shared:
        assert_type(shared, SharedGroups)
        for each in shared:
            assert_type(each, SharedGroup)
            assert_type(each.deliveries, int)
            each.acknowledge()
    assert_type(relations.groups(consumer=GroupConsumer("billing", deliveries_max=5)), SharedGroups)
    assert_type(relations.groups(consumer=name), Generator[Group, None, None] | SharedGroups)


async def asynchronous(relations: AsyncRelations) -> None:
    async with aclosing(relations.groups("orders", follow=True)) as groups:
        assert_type(groups, AsyncGenerator[Group, None])
    async with relations.groups("orders", consumer=GroupConsumer("billing"), on_conflict="skip") as shared:
        assert_type(shared, AsyncSharedGroups)
        async for each in shared:
            assert_type(each, AsyncSharedGroup)
            await each.acknowledge()


def refused(relations: Relations) -> None:
    relations.groups(consumer="billing", complete=True)  # type: ignore[call-overload]
    relations.groups(order="random")  # type: ignore[call-overload]
    relations.groups(nonsense=1)  # type: ignore[call-overload]
    for group in relations.groups():
        group.acknowledge()  # type: ignore[attr-defined]
