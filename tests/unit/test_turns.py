"""Whose turn it is: never more than the limit, in order, and what ends by itself is never stopped by what is lent."""

from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from relatum.reading import CONNECTIONS_MAX
from relatum.reading._pool import Line, Pool, Use, Waiter


class Turns(RuleBasedStateMachine):
    """Calls that come, wait, give up and leave, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.line = Line(5)
        self.held: list[Use] = []
        self.waiting: list[Waiter] = []
        self.woken: list[Waiter] = []

    @rule(use=st.sampled_from([Use.ANSWER, Use.LENT]))
    def enter(self, use: Use) -> None:
        """Somebody asks for a turn."""
        place: list[Any] = []
        waiter = self.line.enter(use, lambda: self.woken.append(place[0]))
        place.append(waiter)
        if waiter is None:
            self.held.append(use)
        else:
            self.waiting.append(waiter)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        """Somebody gives his turn back: who came first of those that can use it has it."""
        use = data.draw(st.sampled_from(self.held))
        self.held.remove(use)
        self.line.leave(use)
        for waiter in self.woken:
            kind = [each for each in self.waiting if each.use is waiter.use]
            assert waiter is kind[0], "somebody was overtaken by one of his own kind"
            self.waiting.remove(waiter)
            self.held.append(waiter.use)
        self.woken.clear()

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def give_up(self, data: st.DataObject) -> None:
        """Somebody waits no more."""
        waiter = data.draw(st.sampled_from(self.waiting))
        self.waiting.remove(waiter)
        self.line.withdraw(waiter)

    @invariant()
    def within_bounds(self) -> None:
        """No more turns than there are, and nobody waits who could go on."""
        lent = self.held.count(Use.LENT)
        assert (self.line.in_use, self.line.lent, self.line.waiting) == (len(self.held), lent, len(self.waiting))
        assert len(self.held) <= 5
        assert lent <= 4
        assert len(self.held) == 5 or not any(each.use is Use.ANSWER for each in self.waiting)
        assert len(self.held) == 5 or lent == 4 or not self.waiting


TestTurns = Turns.TestCase


def test_a_turn_that_comes_as_its_owner_gives_up_goes_on_to_the_next() -> None:
    """Cancelled between the waking and the running: no turn is lost."""
    line = Line(2)
    for _ in range(2):
        assert line.enter(Use.ANSWER, lambda: None) is None
    first, second = (line.enter(Use.ANSWER, lambda: None) for _ in range(2))
    assert first is not None
    assert second is not None
    line.leave(Use.ANSWER)
    assert first.has_turn
    line.withdraw(first)
    assert second.has_turn
    assert (line.in_use, line.waiting) == (2, 0)


class Nothing:
    """In a connection's place."""

    is_closed = False

    def close(self) -> None:
        """As a connection has it."""
        self.is_closed = True


def test_what_many_at_once_have_opened_is_kept_for_the_next() -> None:
    """As many as a reader may have by default, also when nobody asks any more; of more than that the rest is closed."""
    for limit in (CONNECTIONS_MAX, 2 * CONNECTIONS_MAX):
        pool: Pool[Nothing] = Pool(limit)
        taken = [pool.take(None, Use.ANSWER, 0.0) for _ in range(limit)]
        assert [connection for _, connection in taken] == [None] * limit
        opened = [Nothing() for _ in taken]
        for (line, _), connection in zip(taken, opened, strict=True):
            pool.give_back(line, Use.ANSWER, None, connection)
        kept = [connection for connection in opened if not connection.is_closed]
        assert len(kept) == pool.statistics().idle == CONNECTIONS_MAX


@pytest.mark.parametrize(
    ("limit", "use", "most"),
    [(16, Use.ANSWER, 8), (16, Use.LENT, 4), (4, Use.ANSWER, 2), (4, Use.LENT, 1), (2, Use.ANSWER, 1)],
)
def test_who_has_a_connection_may_have_others_while_there_are_plenty(limit: int, use: Use, most: int) -> None:
    """Up to half of them, a quarter by iterations; and none while somebody waits."""
    pool = Pool[Any](limit)
    line, _ = pool.take(None, use, 0.0)
    while pool.has_plenty(use):
        pool.take(None, use, 0.0)
    assert line.in_use == most
    for _ in range(most - 1):
        pool.give_back(line, use)
    while line.enter_at_once(Use.ANSWER):
        pass
    assert line.enter(Use.ANSWER, lambda: None) is not None
    assert not pool.has_plenty(use)
