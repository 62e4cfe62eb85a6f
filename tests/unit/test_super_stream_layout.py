"""Layouts of super streams, the rules that balance over them, and what a message is routed by."""

from collections import Counter
from typing import Any

import pika
import pytest
from hypothesis import given
from hypothesis import strategies as st

import relatum
from relatum.errors import ConfigurationError, InvalidInput, NotFound
from relatum.superstreams import Candidate, Layout, Outgoing, Partition, balance_of, partition_of


def candidates(*weights: float, loads: tuple[float, ...] = ()) -> list[Candidate]:
    """Partitions to choose from, by weight or by load."""
    loads = loads or (0,) * len(weights)
    return [
        Candidate(f"s-{place}", weight, load) for place, (weight, load) in enumerate(zip(weights, loads, strict=True))
    ]


def test_partitions_are_named_by_numbers_or_keys() -> None:
    """As RabbitMQ's own tools name them, in the order given and not of the alphabet; what is none of them is named."""
    assert Layout.numbered("orders", 2).partitions == (Partition(0, "orders-0", "0"), Partition(1, "orders-1", "1"))
    layout = Layout.keyed("orders", ["emea", "apac"])
    assert [(each.place, each.stream) for each in layout] == [(0, "orders-emea"), (1, "orders-apac")]
    assert layout.partition("orders-apac") is layout.partitions[1]
    with pytest.raises(NotFound, match="'orders-1' is not a partition"):
        layout.partition("orders-1")
    wrong: list[Any] = [0, -1, True, 1.5, "3"]
    for partitions in wrong:
        with pytest.raises(InvalidInput):
            Layout.numbered("orders", partitions)


@pytest.mark.parametrize(("key", "place"), [("hello1", 1), ("hello2", 0), ("hello3", 1), ("hello4", 2), ("hello5", 0)])
def test_keys_go_where_other_clients_send_them(key: str, place: int) -> None:
    """The rule is the one of RabbitMQ's stream clients, over the partitions in their order, whatever their keys are."""
    for layout in (Layout.numbered("orders", 3), Layout.keyed("orders", ["z", "a", "m"])):
        assert layout.route(key) is layout.route(key.encode()) is layout.partitions[place]


@pytest.mark.parametrize(
    ("key", "hashed"),
    [
        ("", 0xC6757D56),
        ("a", 0x40C5855A),
        ("ab", 0x17C238A8),
        ("abc", 0xCB3BE711),
        ("abcd", 0xCBF34FEC),
        ("order-4711", 0x4C1B5832),
        ("ключ", 0x218303C5),
        ("鍵🔑", 0x6C99E04A),
        ("x" * 300, 0x3EFFEC66),
    ],
)
def test_hash_is_murmur3_over_utf8(key: str, hashed: int) -> None:
    """MurmurHash3 x86 32-bit with the clients' seed 104729, as mmh3 has it; unsigned, for any number of streams."""
    for partitions in (1, 2, 3, 7, 200, 2**32):
        assert partition_of(key, partitions) == hashed % partitions


@given(st.integers(1, 9), st.integers(0, 100))
def test_round_robin_misses_none(partitions: int, turns: int) -> None:
    """However many turns, no partition is more than one ahead of another; not all publishers begin with the first."""
    rule = balance_of("round_robin")
    chosen = Counter(rule(None, candidates(*[1.0] * partitions)) for _ in range(turns))
    assert not turns or max(chosen.values()) - min(chosen[place] for place in range(partitions)) <= 1
    assert len({balance_of("round_robin")(None, candidates(*[1.0] * 100)) for _ in range(50)}) > 1


@given(st.lists(st.integers(0, 6), min_size=1, max_size=6).filter(any))
def test_weights_are_kept_exactly(weights: list[int]) -> None:
    """In as many turns as all weights make together each partition is chosen as often as its weight says."""
    rule = balance_of("weighted")
    chosen = Counter(rule(None, candidates(*map(float, weights))) for _ in range(3 * sum(weights)))
    assert [chosen[place] for place in range(len(weights))] == [3 * weight for weight in weights]


def test_weights_are_mixed_and_outlive_a_change_of_partitions() -> None:
    """A heavy partition is not chosen many times in a row; one that is added takes its share, no more.

    Where nothing may be chosen, nothing is.
    """
    rule = balance_of("weighted")
    assert "".join("abc"[rule(None, candidates(5, 1, 1))] for _ in range(7)) == "aabacaa"
    rule = balance_of("weighted")
    for _ in range(5):
        rule(None, candidates(1, 1))
    chosen = Counter(rule(None, candidates(1, 1, 1)) for _ in range(30))
    assert all(9 <= chosen[place] <= 11 for place in range(3))
    with pytest.raises(InvalidInput):
        rule(None, candidates(0, 0))


@given(st.lists(st.integers(0, 5), min_size=1, max_size=8))
def test_least_loaded_is_least(loads: list[int]) -> None:
    """None is chosen that has more than another, and those that have equally little take turns."""
    rule = balance_of("least_loaded")
    given_loads = candidates(*[1.0] * len(loads), loads=tuple(loads))
    least = {place for place, load in enumerate(loads) if load == min(loads)}
    assert {rule(None, given_loads) for _ in range(len(least))} == least


@given(st.text(max_size=40), st.integers(1, 20))
def test_hash_is_the_routing_of_keys(name: str, partitions: int) -> None:
    """A set placed by hash lies where messages with that key lie; those without a name go one after the other."""
    rule, given_partitions = balance_of("hash"), candidates(*[1.0] * partitions)
    assert rule(name, given_partitions) == Layout.numbered("orders", partitions).route(name).place
    assert {rule(None, given_partitions) for _ in range(partitions)} == set(range(partitions))


def test_rules_are_known_by_name_or_called() -> None:
    """A function is used as it is; another name is an error that lists the names."""

    def last(_name: str | None, given: Any) -> int:
        return len(given) - 1

    assert balance_of(last)(None, candidates(1, 1)) == 1
    for wrong in (2, -1, None, 0.5):
        with pytest.raises(ConfigurationError, match="index of one of 2 candidates"):
            balance_of(lambda _name, _given, wrong=wrong: wrong)(None, candidates(1, 1))  # type: ignore[misc]
    with pytest.raises(ConfigurationError, match="round_robin"):
        balance_of("fastest")  # type: ignore[arg-type]


@pytest.mark.parametrize(("value", "key"), [("N1", "N1"), (7, "7"), (True, "true"), (b"N1", "N1"), ("", "")])
def test_a_header_names_the_key(value: Any, key: str) -> None:
    """Numbers and truth values count as the text that the keys of look-ups have."""
    orders = relatum.SuperStream("orders", route_by="tail", partitions=3)
    assert orders.key_of(Outgoing(b"", {"tail": value}, None)) == key
    found = orders.destination(None, b"", pika.BasicProperties(headers={"tail": value}), "ignored")
    assert found == ("orders", Layout.numbered("orders", 3).route(key).binding_key)


@pytest.mark.parametrize("headers", [None, {}, {"tail": None}, {"tail": 1.5}, {"tail": ["N1"]}, {"tail": b"\xff"}])
def test_a_header_that_names_none_is_an_error(headers: Any) -> None:
    """A message without a key is refused: it would go to another partition than the others of its key."""
    orders = relatum.SuperStream("orders", route_by="tail", partitions=3)
    with pytest.raises(InvalidInput, match=r"'tail'.*nothing was sent"):
        orders.destination(None, b"", pika.BasicProperties(headers=headers), "")


def test_a_function_names_the_key() -> None:
    """It is given the body as bytes, the headers and the properties; anything but text or bytes is an error."""
    seen: list[Outgoing] = []

    def route_by(message: Outgoing) -> Any:
        seen.append(message)
        return message.headers.get("key")

    orders = relatum.SuperStream("orders", route_by=route_by, partitions=3)
    properties = pika.BasicProperties(headers={"key": "hello4"})
    assert orders.destination(None, "text", properties, "") == ("orders", "2")
    assert seen == [Outgoing(b"text", {"key": "hello4"}, properties)]
    with pytest.raises(InvalidInput, match="NoneType"):
        orders.destination(None, "text", None, "")
    # Without a function it is the routing key.
    assert relatum.SuperStream("orders", partitions=3).destination(None, b"", None, "hello4") == ("orders", "2")
