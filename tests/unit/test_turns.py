"""Whose turn it is: never more than the limit, in order, and what ends by itself is never stopped by what is lent."""

from concurrent.futures import Future
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from relatum.reading import CONNECTIONS_MAX
from relatum.reading._pool import Pool, Turns, Use


class Calls(RuleBasedStateMachine):
    """Calls that come, wait, give up and leave, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.turns = Turns(5)
        self.held: list[Use] = []
        self.waiting: list[tuple[Use, Future[None]]] = []

    @rule(use=st.sampled_from([Use.ANSWER, Use.LENT]))
    def enter(self, use: Use) -> None:
        turn = self.turns.enter(use)
        if turn is None:
            self.held.append(use)
        else:
            self.waiting.append((use, turn))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        """A call gives its turn back: the first of those that can use it gets it."""
        use = data.draw(st.sampled_from(self.held))
        self.held.remove(use)
        self.turns.leave(use)
        for each in [each for each in self.waiting if each[1].done()]:
            first = next(waiting for waiting in self.waiting if waiting[0] is each[0])
            assert each is first, "a call was overtaken by one of its own kind"
            self.waiting.remove(each)
            self.held.append(each[0])

    @precondition(lambda self: self.waiting)
    @rule(data=st.data(), is_cancelled=st.booleans())
    def give_up(self, data: st.DataObject, is_cancelled: bool) -> None:
        """A call waits no longer; a task's future is cancelled before."""
        waiting = data.draw(st.sampled_from(self.waiting))
        self.waiting.remove(waiting)
        if is_cancelled:
            waiting[1].cancel()
        self.turns.withdraw(*waiting)

    @invariant()
    def within_bounds(self) -> None:
        """No more turns than there are, and no call waits that could go on."""
        lent = self.held.count(Use.LENT)
        assert (self.turns.in_use, self.turns.lent, self.turns.waiting) == (len(self.held), lent, len(self.waiting))
        assert len(self.held) <= 5
        assert lent <= 4
        assert len(self.held) == 5 or not any(use is Use.ANSWER for use, _ in self.waiting)
        assert len(self.held) == 5 or lent == 4 or not self.waiting


TestCalls = Calls.TestCase


def test_a_turn_that_comes_as_its_owner_gives_up_goes_on_to_the_next() -> None:
    """Cancelled between the waking and the running, or just before: no turn is lost."""
    turns = Turns(2)
    assert [turns.enter(Use.ANSWER) for _ in range(2)] == [None, None]
    first, cancelled, second = (turns.enter(Use.ANSWER) for _ in range(3))
    assert first is not None
    assert cancelled is not None
    assert second is not None
    turns.leave(Use.ANSWER)
    assert first.done()
    cancelled.cancel()
    turns.withdraw(Use.ANSWER, first)
    assert second.done()
    turns.withdraw(Use.ANSWER, cancelled)
    assert (turns.in_use, turns.waiting) == (2, 0)


class Nothing:
    """In a connection's place."""

    is_closed = False

    def is_idle_for(self, _seconds: float) -> bool:
        return False

    def close(self) -> None:
        self.is_closed = True


def test_what_many_at_once_have_opened_is_kept_for_the_next() -> None:
    """As many as a reader may have by default, also when nobody asks any more; of more than that the rest is closed."""
    for limit in (CONNECTIONS_MAX, 2 * CONNECTIONS_MAX):
        pool: Any = Pool(limit)
        taken = [pool.take(None, Use.ANSWER, 0.0) for _ in range(limit)]
        assert [connection for _, connection in taken] == [None] * limit
        opened = [Nothing() for _ in taken]
        for (turns, _), connection in zip(taken, opened, strict=True):
            pool.give_back(turns, Use.ANSWER, None, connection)
        kept = [connection for connection in opened if not connection.is_closed]
        assert len(kept) == pool.statistics().idle == CONNECTIONS_MAX


@pytest.mark.parametrize(("limit", "most"), [(16, 8), (4, 2), (2, 1)])
def test_who_has_a_connection_may_have_others_while_there_are_plenty(limit: int, most: int) -> None:
    """Up to half of them; and none while somebody waits."""
    pool = Pool(limit)
    turns, _ = pool.take(None, Use.ANSWER, 0.0)
    while pool.has_plenty:
        pool.take(None, Use.ANSWER, 0.0)
    assert turns.in_use == most
    for _ in range(most - 1):
        pool.give_back(turns, Use.ANSWER, None)
    while turns.enter(Use.ANSWER) is None:
        pass
    assert not pool.has_plenty
