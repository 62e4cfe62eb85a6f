"""Layouts of super streams, the rules that balance over them, what a message is routed by, and affinity handles."""

import gc
import socket
import subprocess
import sys
import weakref
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pika
import pytest
from hypothesis import given
from hypothesis import strategies as st

import relatum
from relatum import AffinityHandle, SuperStream
from relatum.contexts import AffinityOptions
from relatum.errors import BrokerUnavailable, ConfigurationError, InvalidInput, NotFound
from relatum.superstreams import Candidate, Layout, Outgoing, Partition, balance_of, partition_of


def candidates(*weights: float, loads: tuple[float, ...] = ()) -> list[Candidate]:
    loads = loads or (0,) * len(weights)
    return [
        Candidate(f"s-{place}", weight, load) for place, (weight, load) in enumerate(zip(weights, loads, strict=True))
    ]


def test_partitions_are_named_by_numbers_or_keys() -> None:
    """Partitions are named as RabbitMQ's tools name them, in the given order; others are not found."""
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
    """A key goes to the partition that RabbitMQ's stream clients choose, whatever the binding keys are."""
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
    """The hash is MurmurHash3 x86 32-bit with seed 104729, unsigned, for any number of streams."""
    for partitions in (1, 2, 3, 7, 200, 2**32):
        assert partition_of(key, partitions) == hashed % partitions


@given(st.integers(1, 9), st.integers(0, 100))
def test_round_robin_misses_none(partitions: int, turns: int) -> None:
    """No partition is more than one turn ahead, and publishers begin at different partitions."""
    rule = balance_of("round_robin")
    chosen = Counter(rule(None, candidates(*[1.0] * partitions)) for _ in range(turns))
    assert not turns or max(chosen.values()) - min(chosen[place] for place in range(partitions)) <= 1
    assert len({balance_of("round_robin")(None, candidates(*[1.0] * 100)) for _ in range(50)}) > 1


@given(st.lists(st.integers(0, 6), min_size=1, max_size=6).filter(any))
def test_weights_are_kept_exactly(weights: list[int]) -> None:
    """In as many turns as the weights add up to, each partition is chosen as often as its weight."""
    rule = balance_of("weighted")
    chosen = Counter(rule(None, candidates(*map(float, weights))) for _ in range(3 * sum(weights)))
    assert [chosen[place] for place in range(len(weights))] == [3 * weight for weight in weights]


def test_weights_are_mixed_and_outlive_a_change_of_partitions() -> None:
    """Turns of weights are interleaved, an added partition takes its share, and weights of 0 alone are refused."""
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
    """Only a least loaded partition is chosen, and equally loaded ones take turns."""
    rule = balance_of("least_loaded")
    given_loads = candidates(*[1.0] * len(loads), loads=tuple(loads))
    least = {place for place, load in enumerate(loads) if load == min(loads)}
    assert {rule(None, given_loads) for _ in range(len(least))} == least


@given(st.text(max_size=40), st.integers(1, 20))
def test_hash_is_the_routing_of_keys(name: str, partitions: int) -> None:
    """A name is placed where messages of that key are; handles without a name take turns."""
    rule, given_partitions = balance_of("hash"), candidates(*[1.0] * partitions)
    assert rule(name, given_partitions) == Layout.numbered("orders", partitions).route(name).place
    assert {rule(None, given_partitions) for _ in range(partitions)} == set(range(partitions))


def test_rules_are_known_by_name_or_called() -> None:
    """A function serves as a rule if it returns an index; an unknown name is an error that lists the names."""

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
    """A number or a truth value in the header is routed as its text."""
    orders = relatum.SuperStream("orders", route_by="tail", partitions=3)
    assert orders.key_of(Outgoing(b"", {"tail": value}, None)) == key
    found = orders.destination(None, b"", pika.BasicProperties(headers={"tail": value}), "ignored")
    assert found == ("orders", Layout.numbered("orders", 3).route(key).binding_key)


@pytest.mark.parametrize("headers", [None, {}, {"tail": None}, {"tail": 1.5}, {"tail": ["N1"]}, {"tail": b"\xff"}])
def test_a_header_that_names_none_is_an_error(headers: Any) -> None:
    """A message without a key is refused, since it would reach another partition than its key's."""
    orders = relatum.SuperStream("orders", route_by="tail", partitions=3)
    with pytest.raises(InvalidInput, match=r"'tail'.*nothing was sent"):
        orders.destination(None, b"", pika.BasicProperties(headers=headers), "")


def test_a_function_names_the_key() -> None:
    """A routing function gets body, headers and properties, and must return text or bytes."""
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
    # Without a function, the key is the routing key.
    assert relatum.SuperStream("orders", partitions=3).destination(None, b"", None, "hello4") == ("orders", "2")


TEXTS = st.text(st.characters(blacklist_categories=["Cs"], blacklist_characters="\r\n\0"), min_size=1, max_size=20)


class Channel:
    """Remembers what is published, as a channel of pika would send it."""

    def __init__(self) -> None:
        self.sent: list[tuple[Any, ...]] = []

    def basic_publish(self, *args: Any) -> None:
        self.sent.append(args)


def placed(handle: AffinityHandle) -> str:
    handle.publish(Channel(), b"")
    assert handle.partition is not None
    return handle.partition.stream


def orders(partitions: int = 3) -> SuperStream:
    return SuperStream("orders", partitions=partitions)


def test_all_messages_go_where_the_first_one_went() -> None:
    """A handle's first message chooses its partition, without which there is no token; messages are mandatory."""
    channel, handle = Channel(), orders().affinity()
    assert handle.partition is None
    with pytest.raises(InvalidInput, match="no partition yet"):
        _ = handle.token
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


def test_least_loaded_does_not_count_a_handle_that_was_closed_before_its_first_message() -> None:
    """A closed handle can still publish, but its partition gets no load that nothing takes away."""
    super_stream = SuperStream("orders", partitions=2)
    for _ in range(3):
        closed = super_stream.affinity(lambda _name, _candidates: 0)
        closed.close()
        assert placed(closed) == "orders-0"
    assert {placed(super_stream.affinity("least_loaded")) for _ in range(2)} == {"orders-0", "orders-1"}


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


def test_a_handle_does_not_wait_for_a_silent_broker() -> None:
    """Event loops place and close handles, also while a thread queries another broker for its partitions."""
    super_stream = SuperStream("orders")
    with ThreadPoolExecutor(2) as threads:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            query = threads.submit(super_stream.layout, f"amqp://127.0.0.1:{silent.getsockname()[1]}")
            with silent.accept()[0]:
                threads.submit(super_stream.affinity().close).result(5.0)
        with pytest.raises(BrokerUnavailable):
            query.result(60.0)


def test_other_rules() -> None:
    """A handle is placed by the hash of its name, by weights, or by a function."""
    layout = Layout.numbered("orders", 3)
    assert placed(orders().affinity("hash", name="hello2")) == layout.route("hello2").stream
    assert placed(orders().affinity("weighted", weights={"orders-0": 0, "orders-2": 0})) == "orders-1"
    assert placed(orders().affinity(lambda _name, candidates: len(candidates) - 1)) == "orders-2"


def test_a_function_for_one_set_is_not_kept_for_all() -> None:
    """A publisher may pass a new function for each set, for weeks."""
    super_stream, rule = orders(), lambda _name, _candidates: 0
    kept = weakref.ref(rule)
    with super_stream.affinity(rule) as handle:
        placed(handle)
    del rule, handle
    gc.collect()
    assert kept() is None


@given(TEXTS, TEXTS)
def test_token_names_the_partition(super_stream: str, key: str) -> None:
    """A handle made from a token publishes to the same partition without asking a server."""
    layout = Layout.keyed(super_stream, ["first", key])
    handle = SuperStream(super_stream, partitions=layout).affinity(lambda _name, candidates: 1)
    handle.publish(Channel(), b"")
    channel, again = Channel(), AffinityHandle.from_token(handle.token)
    again.publish(channel, b"more")
    assert again.partition == handle.partition
    assert channel.sent == [(super_stream, key, b"more", None, True)]
    assert again.token == handle.token


@given(st.lists(st.integers(0, 50), min_size=1, max_size=8), st.integers(1, 60))
def test_messages_of_no_set_go_by_what_was_sent_here(loads: list[int], messages: int) -> None:
    """Messages without a set are spread evenly over the partitions, whatever the loads of sets are."""
    _, balance = AffinityOptions(balance="least_loaded").rules()
    partitions = candidates(*[1.0] * len(loads), loads=tuple(loads))
    sent = Counter(balance(None, partitions) for _ in range(messages))
    assert max(sent.values()) - min(sent[place] for place in range(len(loads))) <= 1


def test_a_pika_without_its_own_long_integers() -> None:
    """Pika's releases after 1.4 have no `pika.compat`: what is imported from it is optional."""
    program = "import pika.compat; del pika.compat.long; import relatum, relatum.superstreams, relatum_consumer"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=90)
