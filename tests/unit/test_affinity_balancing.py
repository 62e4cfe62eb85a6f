"""How one router balances sets, and messages of no set."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from relatum.contexts import AffinityOptions
from relatum.superstreams import Candidate

LOADS = st.lists(st.integers(0, 50), min_size=1, max_size=8)


def candidates(loads: list[int]) -> list[Candidate]:
    """Partitions with these open sets."""
    return [Candidate(f"orders-{place}", 1.0, load) for place, load in enumerate(loads)]


@given(LOADS)
def test_sets_go_by_the_open_sets_of_all(loads: list[int]) -> None:
    """A set is placed where the fewest are open, as the database counts them."""
    of_sets, _ = AffinityOptions(balance="least_loaded").rules()
    assert loads[of_sets("s1", candidates(loads))] == min(loads)


@given(LOADS, st.integers(1, 60))
def test_messages_of_no_set_go_by_what_was_sent_here(loads: list[int], messages: int) -> None:
    """They are spread evenly, however the sets lie."""
    _, balance = AffinityOptions(balance="least_loaded").rules()
    sent = Counter(balance(None, candidates(loads)) for _ in range(messages))
    assert max(sent.values()) - min(sent[place] for place in range(len(loads))) <= 1
