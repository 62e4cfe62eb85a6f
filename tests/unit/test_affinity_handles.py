"""Affinity handles: how they are balanced among each other, and what their tokens say; how a router balances sets."""

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relatum import AffinityHandle, SuperStream
from relatum.contexts import AffinityOptions
from relatum.errors import ConfigurationError, InvalidInput
from relatum.superstreams import Candidate, Layout

TEXTS = st.text(st.characters(blacklist_categories=["Cs"], blacklist_characters="\r\n\0"), min_size=1, max_size=20)


class Channel:
    """Remembers what is published, as a channel of pika would send it."""

    def __init__(self) -> None:
        self.sent: list[tuple[Any, ...]] = []

    def basic_publish(self, *args: Any) -> None:
        self.sent.append(args)


def placed(handle: AffinityHandle) -> str:
    """Publish a handle's next message; gives the stream it went to."""
    handle.publish(Channel(), b"")
    assert handle.partition is not None
    return handle.partition.stream


def orders(partitions: int = 3) -> SuperStream:
    return SuperStream("orders", partitions=partitions)


def test_all_messages_go_where_the_first_one_went() -> None:
    """A handle chooses once, names the super stream's exchange and is mandatory unless told otherwise."""
    channel, handle = Channel(), orders().affinity()
    for number in range(5):
        handle.publish(channel, b"%d" % number, routing_key="other")
    handle.publish(channel, b"5", mandatory=False)
    assert handle.partition is not None
    key = handle.partition.binding_key
    assert channel.sent == [("orders", key, b"%d" % number, None, number < 5) for number in range(6)]


@given(st.integers(1, 7), st.integers(1, 50))
def test_handles_go_round(partitions: int, handles: int) -> None:
    """Handles of one super stream are spread evenly, wherever the first one begins."""
    super_stream = orders(partitions)
    counts = Counter(placed(super_stream.affinity()) for _ in range(handles))
    full, rest = divmod(handles, partitions)
    assert sorted(counts.values()) == sorted([full] * (partitions - rest) * bool(full) + [full + 1] * rest)


def test_least_loaded_counts_open_handles() -> None:
    """A handle that is closed leaves room for the next; closing it twice leaves no more."""
    super_stream = orders()
    open_handles = [super_stream.affinity("least_loaded") for _ in range(3)]
    assert len({placed(handle) for handle in open_handles}) == 3
    for _ in range(4):
        open_handles[1].close()
    with super_stream.affinity("least_loaded") as fourth:
        assert placed(fourth) == placed(open_handles[1])
        assert placed(super_stream.affinity("least_loaded")) in {f"orders-{place}" for place in range(3)}


def test_other_rules() -> None:
    """Handles go by the hash of a name, by weights, or by a function."""
    layout = Layout.numbered("orders", 3)
    assert placed(orders().affinity("hash", name="hello2")) == layout.route("hello2").stream
    assert placed(orders().affinity("weighted", weights={"orders-0": 0, "orders-2": 0})) == "orders-1"
    assert placed(orders().affinity(lambda _name, candidates: len(candidates) - 1)) == "orders-2"
    with pytest.raises(ConfigurationError, match="balance= takes one of"):
        orders().affinity("fairest")  # type: ignore[arg-type]


@given(TEXTS, TEXTS)
def test_token_names_the_partition(super_stream: str, key: str) -> None:
    """Who has a token publishes to the same partition, without asking anybody."""
    layout = Layout.keyed(super_stream, ["first", key])
    handle = SuperStream(super_stream, partitions=layout).affinity(lambda _name, candidates: 1)
    handle.publish(Channel(), b"")
    channel, again = Channel(), AffinityHandle.from_token(handle.token)
    again.publish(channel, b"more")
    assert again.partition == handle.partition
    assert channel.sent == [(super_stream, key, b"more", None, True)]
    assert again.token == handle.token


def test_no_token_before_the_first_message() -> None:
    """A set that is not placed has nothing to pass on."""
    handle = orders().affinity()
    assert handle.partition is None
    with pytest.raises(InvalidInput, match="no partition yet"):
        _ = handle.token


LOADS = st.lists(st.integers(0, 50), min_size=1, max_size=8)


def candidates(loads: list[int]) -> list[Candidate]:
    return [Candidate(f"orders-{place}", 1.0, load) for place, load in enumerate(loads)]


@given(LOADS, st.integers(1, 60))
def test_messages_of_no_set_go_by_what_was_sent_here(loads: list[int], messages: int) -> None:
    """They are spread evenly, however the sets lie."""
    _, balance = AffinityOptions(balance="least_loaded").rules()
    sent = Counter(balance(None, candidates(loads)) for _ in range(messages))
    assert max(sent.values()) - min(sent[place] for place in range(len(loads))) <= 1
