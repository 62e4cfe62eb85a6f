"""What a fork does to objects: they work in the child, or say that they do not."""

import asyncio
from collections.abc import Iterator

import pytest

from relatum.errors import ConfigurationError, UsedAfterFork
from relatum.processes import after_fork, of_one_process
from relatum.uuid7 import uuid7
from tests.support.forking import in_child


class Single:
    """Something with an identity."""

    def __init__(self) -> None:
        self.name = "mine"
        self.closed = 0
        of_one_process(self, "a thing")

    def use(self) -> str:
        return self.name

    async def use_later(self) -> str:
        return self.name

    def __iter__(self) -> Iterator[str]:
        return iter([self.name])

    def close(self) -> bool:
        """End it."""
        self.closed += 1
        return False

    def __enter__(self) -> "Single":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def test_each_use_of_a_parents_object_is_refused() -> None:
    """Methods, iteration and blocks raise one clear error; attributes stay; the parent's own works on.

    What a child closes on its way out of the parent's blocks is left alone, and errors go through.
    """
    one = Single()

    def in_the_child() -> int:
        assert one.name == "mine"
        assert isinstance(one, Single)
        for use in (one.use, lambda: asyncio.run(one.use_later()), lambda: list(one), one.__enter__):
            with pytest.raises(UsedAfterFork, match="a thing was made before"):
                use()
        assert one.close() is True
        assert not one.__exit__(KeyError, KeyError(), None)
        return one.closed

    assert in_child(in_the_child) == 0
    assert (one.use(), list(one)) == ("mine", ["mine"])
    assert issubclass(UsedAfterFork, ConfigurationError)


def test_objects_are_renewed_before_anything_else_runs_in_the_child() -> None:
    """Also in a child's child; what nobody holds any more is not kept for it."""
    calls: list[str] = []

    class Renewed:
        pass

    kept, dropped = Renewed(), Renewed()
    after_fork(kept, lambda _: calls.append("kept"))
    after_fork(dropped, lambda _: calls.append("dropped"))
    del dropped
    assert in_child(lambda: calls + in_child(lambda: list(calls))) == ["kept", "kept", "kept"]
    assert calls == []


def test_a_child_makes_ids_of_its_own() -> None:
    """Ids of one moment differ between parent and child."""
    uuid7(1)
    theirs = in_child(lambda: [uuid7(1) for _ in range(100)])
    assert not {uuid7(1) for _ in range(100)} & set(theirs)
