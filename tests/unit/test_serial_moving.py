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


def waited(sessions: list[dict[str, moving.SessionSeen]], takes_s: float = 0.5) -> list[moving.MoveRequest]:
    """What is asked for until a move that somebody else began is let be fenced; each look takes a while."""
    now = [100.0]
    steps = moving.go_on(7, clock=lambda: now[0])
    requests, answer = [next(steps)], STOPPED
    answers = iter(sessions)
    while not isinstance(requests[-1], moving.LetFence):
        requests.append(steps.send(answer))
        answer = None
        if isinstance(requests[-1], moving.FindSessions):
            answer = next(answers)
            now[0] += takes_s
        elif isinstance(requests[-1], moving.Sleep):
            now[0] += requests[-1].seconds
    steps.close()
    return requests[2:]


def test_a_fence_waits_for_those_who_publish() -> None:
    """Until each has gone on, or has ended its session; who comes later is not waited for."""
    one, other = moving.SessionSeen(3, 2.0), moving.SessionSeen(9, 2.0)
    requests = waited([{"a": one, "b": other}, {"a": one, "late": other}, {"late": other}])
    assert [type(each) for each in requests].count(moving.FindSessions) == 2
    assert not any(isinstance(each, moving.ForgetSession) for each in requests)


def test_a_fence_waits_no_longer_than_a_session_holds() -> None:
    """By the mover's own clock, from its first look on; a publisher that died is not waited for again."""
    dead = moving.SessionSeen(3, 2.0)
    alive = replace(dead, beat=4)
    # Looks that begin 0.01, 0.52, 1.03, 1.54 and 2.05 s after the first was answered.
    requests = waited([{"a": dead}] + [{"a": alive}] * 6)
    assert requests[-2:] == [moving.ForgetSession(7, "a", 3), moving.LetFence(7)]
    assert sum(isinstance(each, moving.FindSessions) for each in requests) == 5


def test_a_fence_waits_for_looks_that_nobody_registers() -> None:
    """Where nobody has a session, for as long as a look serves by the slowest clock, and some time more."""
    requests = waited([{}])
    slept = sum(each.seconds for each in requests if isinstance(each, moving.Sleep))
    assert TRUST_S * 1.01 / 0.99 + 0.1 < slept < 0.36


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
