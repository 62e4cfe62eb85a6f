"""How one router balances sets, and messages of no set."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relatum.contexts.affinity._balancing import MessageBalance, SetBalance
from relatum.errors import ConfigurationError
from relatum.superstreams import Candidate

LOADS = st.lists(st.integers(0, 50), min_size=1, max_size=8)


def candidates(loads: list[int], weights: list[float] | None = None) -> list[Candidate]:
    """Partitions with these open sets, and weights."""
    return [
        Candidate(f"orders-{place}", 1.0 if weights is None else weights[place], load)
        for place, load in enumerate(loads)
    ]


@given(LOADS)
def test_sets_go_by_the_open_sets_of_all(loads: list[int]) -> None:
    """A set is placed where the fewest are open, as the database counts them."""
    assert loads[SetBalance("least_loaded")("s1", candidates(loads))] == min(loads)


@given(LOADS, st.integers(1, 60))
def test_messages_of_no_set_go_by_what_was_sent_here(loads: list[int], messages: int) -> None:
    """They are spread evenly, however the sets lie."""
    balance = MessageBalance("least_loaded")
    sent = Counter(balance(None, candidates(loads)) for _ in range(messages))
    assert max(sent.values()) - min(sent[place] for place in range(len(loads))) <= 1


def test_own_weights_come_before_those_of_the_database() -> None:
    """Streams that are left out of them have weight 1."""
    balance = SetBalance("weighted", {"orders-0": 0, "orders-2": 2})
    chosen = Counter(balance("s1", candidates([0, 0, 0], [5, 0, 0])) for _ in range(30))
    assert chosen == {1: 10, 2: 20}


@pytest.mark.parametrize("weight", [-1, float("nan"), float("inf"), "2", True])
def test_weights_are_numbers_from_0(weight: object) -> None:
    """Any other weight is refused when the rule is made."""
    with pytest.raises(ConfigurationError, match="orders-0"):
        SetBalance("weighted", {"orders-0": weight})  # type: ignore[dict-item]


def test_weights_that_no_rule_asks_for_are_refused() -> None:
    """Otherwise they would be given and have no effect."""
    with pytest.raises(ConfigurationError, match="weights are for"):
        SetBalance("round_robin", {"orders-0": 2})
