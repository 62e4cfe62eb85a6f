"""A publisher that slept until retention had dropped the fence behind which its message came to lie."""

from collections.abc import Generator
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest

from relatum.contexts import Move, MoveState
from relatum.contexts.placement._entries import Adoption
from relatum.contexts.placement._model import Placement, PlacementState
from relatum.contexts.placement._publication import Publications
from relatum.contexts.placement._publication_requests import (
    Adopt,
    FindMove,
    Place,
    ReadChanges,
    ReadGeneration,
    Search,
    Send,
)

BEFORE = Placement("x", 1, "a", "a", 1, PlacementState.OPEN)
AFTER = Placement("x", 2, "b", "b", 5, PlacementState.OPEN, generation=2)
NOW = datetime.now(UTC)
OUT = Move(
    1, "a", "b", 1, 2, MoveState.SWITCHED, False, 1, 1, 5, 5, 8, 3, 10, 4, None, None, NOW, NOW, NOW, None
)  # fmt: skip
INTO = replace(OUT, source="c", target="a", scan_from=90, target_scan_from=8, fence_offset=95, marker_offset=10)
UNKNOWN = replace(OUT, state=MoveState.FENCING, fence_offset=None, marker_offset=None, ended_at=None)


def publish(move: Move, lies_at: int | None) -> list[Any]:
    """Publish a message whose context moves between placement and confirm; gives all that was asked for."""
    publications = Publications(lambda: 0.0, names_max=10)
    generations = iter([1, 2, 2, 2, 2])
    steps: Generator[Any, Any, Any] = publications.publish("x")
    asked: list[Any] = []
    request = next(steps)
    while True:
        asked.append(request)
        answer: Any = None
        match request:
            case ReadGeneration():
                answer = next(generations)
            case ReadChanges():
                answer = 2, [AFTER]
            case Place():
                answer = BEFORE
            case Send():
                answer = "confirmed"
            case FindMove(_, epoch, stream):
                answer = move if (epoch, stream) == (1, "a") else None
            case Search():
                answer = lies_at
        try:
            request = steps.send(answer)
        except StopIteration:
            return asked


@pytest.mark.parametrize("move", [OUT, INTO])
def test_what_lies_behind_the_known_end_is_a_stray(move: Move) -> None:
    """Its offset alone tells: no fence need be met on the way."""
    asked = publish(move, 12)
    (search,) = [each for each in asked if isinstance(each, Search)]
    assert (search.from_offset, search.anywhere) == (10, True)
    (adopt,) = [each for each in asked if isinstance(each, Adopt)]
    assert adopt == Adopt("b", Adoption("x", 5, "a", 12))


def test_what_is_not_behind_the_known_end_counts() -> None:
    """It lies before the fence, or retention has dropped it with the fence."""
    assert not [each for each in publish(OUT, None) if isinstance(each, Adopt)]


def test_an_end_that_is_not_known_is_looked_for() -> None:
    """The search begins where the fence can lie at the earliest, and goes by the fence it meets."""
    (search,) = [each for each in publish(UNKNOWN, None) if isinstance(each, Search)]
    assert (search.from_offset, search.anywhere) == (8, False)
