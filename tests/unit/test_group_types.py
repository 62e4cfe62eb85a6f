"""What a type checker knows of groups: what `groups` gives is told apart by its arguments."""

from pathlib import Path

import pytest
from mypy import api

ROOT = Path(__file__).parents[2]

PROGRAM = """
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
    relations.groups(consumer="billing", complete=True)  # refused
    relations.groups(order="random")  # refused
    relations.groups(nonsense=1)  # refused
    for group in relations.groups():
        group.acknowledge()  # refused
"""


def test_what_is_given_is_told_by_the_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups, or shared groups that are a context manager; the project's type checker refuses what cannot be."""
    monkeypatch.chdir(ROOT)
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    # With the project's cache, which `make check` fills: else most of ten seconds.
    output, problems, _ = api.run(["--no-error-summary", "--no-pretty", str(program)])
    assert not problems
    refused = {int(line.split(":")[1]) for line in output.splitlines() if ": error:" in line}
    assert refused == {n for n, line in enumerate(PROGRAM.splitlines(), 1) if line.endswith("# refused")}
