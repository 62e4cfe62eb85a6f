"""The steps of a move, one by one: what is asked for, in which order, and what is never asked for again."""

from dataclasses import replace
from datetime import UTC, datetime

import pytest

from relatum.contexts import MoveState
from relatum.contexts.placement._trust import TRUST_S
from relatum.contexts.serial.moving import _move_steps as moving
from relatum.contexts.serial.moving._move_steps import MoveStep
from relatum.errors import StreamUnavailable

C = frozenset("ab")
NOW = datetime.fromtimestamp(0, UTC)
STATE = (MoveState.FENCING, False, 1, 2, 0, 0, 10, 20, None, None, None, None, NOW, None, None, None)
STOPPED = MoveStep(7, "s", "t", 1, 2, *STATE, names=C)
BEGUN = replace(STOPPED, fence_epoch=40, epoch=40)


def waited(found: MoveStep) -> float:
    """How long is slept before somebody who goes on with a move publishes its fence."""
    now = 100.0
    steps = moving.go_on(7, clock=lambda: now)
    request, answer = next(steps), found
    while not isinstance(request, moving.PublishControl):
        request = steps.send(answer)
        answer = BEGUN if isinstance(request, moving.LetFence) else None
        if isinstance(request, moving.Sleep):
            now += request.seconds
    steps.close()
    return now - 100.0


def test_a_fence_waits_for_as_long_as_a_look_serves() -> None:
    """By the slowest clock, and some time more; also where somebody else began the move, and may have waited."""
    assert TRUST_S * 1.01 / 0.99 + 0.1 < waited(STOPPED) < 0.36


def test_a_fence_that_has_its_epoch_waits_no_more() -> None:
    """Whoever took the epoch has waited."""
    assert waited(BEGUN) == 0


def test_a_message_that_is_confirmed_and_not_there_ends_the_steps() -> None:
    """It is looked for a few times, since a replica may be behind; then somebody may go on later."""
    requests: list[moving.MoveRequest] = []

    def performed() -> None:
        steps = moving.go_on(7)
        requests.append(next(steps))
        requests.append(steps.send(BEGUN))
        while len(requests) < 100:
            requests.append(steps.send(None))

    with pytest.raises(StreamUnavailable, match="not to be found") as caught:
        performed()
    asked_for = [type(request) for request in requests]
    assert asked_for.count(moving.FindControl) == 1 + moving.LOOKS_MAX
    assert asked_for.count(moving.PublishControl) == 1
    assert caught.value.stream == "s"
