"""The steps of a move: what is asked for, in which order, and what is never asked for again."""

from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest

from relatum.contexts import MoveState
from relatum.contexts import _move_steps as moving
from relatum.contexts._entries import Control
from relatum.contexts._move_steps import MoveStep
from relatum.contexts._publication import TRUST_S
from relatum.errors import StreamUnavailable

C = frozenset("ab")
NOW = datetime.fromtimestamp(0, UTC)
STATE = (MoveState.FENCING, False, 1, 2, 0, 0, 10, 20, None, None, None, None, NOW, None, None, None)
STOPPED = MoveStep(7, "s", "t", 1, 2, *STATE, names=C)
BEGUN = replace(STOPPED, fence_epoch=40, epoch=40)


class _World:
    """A world that finds nothing in streams, with a clock that only sleeping moves."""

    def __init__(self, found: MoveStep) -> None:
        self.found = found
        self.now = 100.0
        self.fenced_at: float | None = None
        self.asked: list[str] = []

    def elapsed_s(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def look(self, move_id: int) -> MoveStep:
        return self.found

    def let_fence(self, move_id: int) -> MoveStep:
        return BEGUN

    def publish(self, stream: str, control: Control) -> None:
        self.asked.append("publish")
        self.fenced_at = self.now

    def find(self, stream: str, control: Control, from_offset: int) -> int | None:
        self.asked.append("find")
        return None


def stopped(found: MoveStep) -> tuple[Any, StreamUnavailable]:
    """A world in which somebody went on with a move whose fence does not show, and the error of that."""
    world: Any = _World(found)
    with pytest.raises(StreamUnavailable, match="not to be found") as caught:
        moving.go_on(world, 7)
    return world, caught.value


def waited(found: MoveStep) -> float:
    """How long is slept before somebody who goes on with a move publishes its fence."""
    fenced_at: float = stopped(found)[0].fenced_at
    return fenced_at - 100.0


def test_a_fence_waits_for_as_long_as_a_look_serves() -> None:
    """By the slowest clock, and some time more; also where somebody else began the move, and may have waited."""
    assert TRUST_S * 1.01 / 0.99 + 0.1 < waited(STOPPED) < 0.36


def test_a_fence_that_has_its_epoch_waits_no_more() -> None:
    """Whoever took the epoch has waited."""
    assert waited(BEGUN) == 0


def test_a_message_that_is_confirmed_and_not_there_ends_the_steps() -> None:
    """It is looked for a few times, since a replica may be behind; then somebody may go on later."""
    world, error = stopped(BEGUN)
    assert world.asked == ["find", "publish", *["find"] * moving.LOOKS_MAX]
    assert error.stream == "s"
