"""What samples of streams suggest as keys."""

import json
import random
from itertools import pairwise
from typing import Any

import pytest

from relatum.keys import as_definitions
from relatum.reading import Message
from relatum_consumer.demo._data import FLIGHTS, PLANES, WEATHER, load
from relatum_consumer.suggesting import Sample, Suggestion, suggest


class Properties:
    """The properties of a delivery, under pika's names."""

    def __init__(self, headers: dict[str, Any], **given: Any) -> None:
        self.headers = headers
        self.__dict__.update(given)


def sampled(stream: str, messages: list[tuple[dict[str, Any], Any]], **properties: Any) -> Sample:
    """A sample of messages that have headers and a body of JSON."""
    found = Sample(stream)
    for offset, (headers, body) in enumerate(messages):
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        found.add(Message.from_amqp(stream, offset, Properties(headers, **properties), content))
    return found


def by_name(found: list[Suggestion]) -> dict[str, Suggestion]:
    """Suggestions by their keys' names."""
    return {each.definition.name: each for each in found}


@pytest.fixture(scope="module")
def demo() -> list[Sample]:
    """Samples of the demo's streams, as the command takes them: eight windows of 500 messages."""
    data, samples = load(40_000), []
    for stream in (FLIGHTS, PLANES, WEATHER):
        found, rows = Sample(stream), len(data.frame(stream))
        starts = [rows * window // 8 for window in range(8)]
        for number, each in enumerate(data.messages(stream)):
            if any(start <= number < start + 500 for start in starts):
                properties = Properties(each.headers, message_id=each.message_id)
                found.add(Message.from_amqp(stream, number, properties, each.body))
        samples.append(found)
    return samples


def test_the_demo_s_keys_are_found_without_their_definitions(demo: list[Sample]) -> None:
    """Tail number, airport and hour, each in the streams that share it; no measure, and nothing that is unique."""
    found = suggest(demo)
    assert {each.definition.name: {one.stream for one in each.found} for each in found} == {
        "tailnum": {FLIGHTS, PLANES},
        "origin": {FLIGHTS, WEATHER},
        "time_hour": {FLIGHTS, WEATHER},
    }
    # The bodies say the same, and cost more.
    assert {source for each in found for source in each.definition.sources} == {
        "header:tailnum",
        "header:origin",
        "header:time_hour",
    }


def shops(chance: random.Random) -> list[Sample]:
    """Orders, payments that call their order otherwise, and parcels of several items."""
    orders = [f"o-{chance.randrange(10**9)}" for _ in range(300)]
    skus = [f"SKU-{number:05}" for number in range(400)]
    return [
        sampled(
            "orders",
            [({}, {"id": each, "items": [{"sku": chance.choice(skus)} for _ in range(3)], "n": 3}) for each in orders],
            content_type="application/json",
        ),
        sampled("payments", [({"x-meta": {"order": each}}, {"paid": 1.5, "ok": True}) for each in orders[:200]]),
        sampled(
            "parcels",
            [
                ({}, {"order": chance.choice(orders), "parts": [chance.choice(skus), chance.choice(skus)]})
                for _ in orders
            ],
        ),
        sampled("noise", [({"host": "one"}, b"\x00\xff no JSON") for _ in range(50)]),
        Sample("empty"),
    ]


def test_values_are_followed_through_other_names(chance: random.Random) -> None:
    """Where they say enough: one key takes the first of the places that has one."""
    found = suggest(shops(chance))
    assert {frozenset(source.split(" or ")) for each in found for source in each.definition.sources} == {
        frozenset({"header:$.x-meta.order", "body:$.order", "body:$.id"}),
        frozenset({"body:$.items[*].sku", "body:$.parts[*]"}),
    }
    (order,) = [each for each in found if "body:$.id" in each.definition.sources[0]]
    assert {one.stream for one in order.found} == {"orders", "payments", "parcels"}
    assert order.bytes_per_message > 80
    as_definitions([each.definition for each in found])


def test_an_id_is_called_after_what_it_is_of() -> None:
    """Several members of a body are called `id`: keys that are defined so can be told apart, and meet `cartId`."""
    carts, people = ([f"{kind}-{n // 3:06}" for n in range(600)] for kind in ("cart", "person"))
    found = suggest(
        [
            sampled("one", [({}, {"cart": {"id": c, "of": {"id": p}}}) for c, p in zip(carts, people, strict=True)]),
            sampled("two", [({}, {"cartId": c}) for c in carts]),
        ]
    )
    assert [(each.definition.name, *each.definition.sources) for each in found] == [
        ("cart_id", "body:$.cart.id or body:$.cartId"),
        ("of_id", "body:$.cart.of.id"),
    ]


def test_what_is_unique_or_the_same_everywhere_makes_no_key(chance: random.Random) -> None:
    """Nor what cannot be a value, a flag, a moment, or a small number."""
    messages = [
        (
            {"version": "1.0", "at": f"2026-11-23T05:{n // 60:02}:{n % 60:02}Z"},
            {"id": f"id-{n:06}", "ok": bool(n % 2), "n": n % 7, "x": 1 / (n + 1), "text": "word " * 100},
        )
        for n in range(300)
    ]
    assert suggest([sampled("one", messages)]) == []
    assert suggest([]) == []


def test_a_moment_of_its_own_is_no_key_where_others_have_it_too(chance: random.Random) -> None:
    """Events of the same second, or millisecond, in several streams do not belong together; an hour comes again."""

    def events(word: str) -> list[tuple[dict[str, Any], Any]]:
        minutes = chance.sample(range(600), 300)
        return [
            (
                {},
                {
                    word: f"2026-03-01T{n // 60:02}:{n % 60:02}:00Z",
                    "ts_ms": 1_772_323_200_000 + n,
                    "hour": n // 60 + 10**6,
                },
            )
            for n in minutes
        ]

    assert list(by_name(suggest([sampled("loads", events("loadedAt")), sampled("scans", events("at"))]))) == ["hour"]


def test_a_flag_is_no_key(chance: random.Random) -> None:
    """Two values that all messages have, in whatever stream, relate nothing."""
    samples = [sampled(stream, [({"op": chance.choice("cu")}, {}) for _ in range(300)]) for stream in ("a", "b")]
    assert suggest(samples) == []


def test_what_a_stream_says_twice_makes_one_key(chance: random.Random) -> None:
    """A header that repeats a member of the body does; where from and to are of the same places does not."""
    devices = [f"{chance.getrandbits(48):012x}" for _ in range(80)]
    places = [f"place-{n}" for n in range(80)]
    readings = [
        ({"deviceId": device}, {"dev": device, "from": chance.choice(places), "to": chance.choice(places)})
        for device in chance.choices(devices, k=2000)
    ]
    alarms = [({}, {"mac": device}) for device in chance.choices(devices, k=200)]
    found = by_name(suggest([sampled("readings", readings), sampled("alarms", alarms)]))
    assert set(found) == {"deviceId", "from", "to"}
    assert found["deviceId"].definition.sources[0] == "header:deviceId or body:$.mac"


def test_a_place_makes_one_key_also_where_streams_share_no_value(chance: random.Random) -> None:
    """The ids of rows of two tables lie in the same place: a key is of all streams."""
    orders = [({}, {"after": {"id": chance.randrange(1_000, 1_300)}}) for _ in range(900)]
    customers = [({}, {"after": {"id": chance.randrange(1, 90)}}) for _ in range(200)]
    [found] = suggest([sampled("orders", orders), sampled("customers", customers)])
    assert {one.stream for one in found.found} == {"orders", "customers"}


def test_a_value_that_comes_again_is_a_key_of_one_stream(chance: random.Random) -> None:
    """A device among many, each seldom."""
    devices = [f"device-{number}" for number in range(100)]
    found = suggest([sampled("readings", [({"device": chance.choice(devices)}, {"t": 20.5}) for _ in range(1_000)])])
    assert [(each.definition.name, each.overlap) for each in found] == [("device", 0.0)]


def test_a_number_that_is_called_an_id_is_one(chance: random.Random) -> None:
    """README's order 4711, in one stream as in two, and a small shop's order 17; a price of as many digits is none."""
    orders = [({"order_id": 4711 + n // 2}, {"price": chance.randrange(1_000, 1_100)}) for n in range(600)]
    assert [each.definition.name for each in suggest([sampled("orders", orders)])] == ["order_id"]
    one = [({}, {"orderNo": n, "price": chance.randrange(90)}) for n in range(90)]
    two = [({}, {"orderNo": n, "items": chance.randrange(90)}) for n in range(0, 90, 2)]
    assert [each.definition.name for each in suggest([sampled("one", one), sampled("two", two)])] == ["orderNo"]


def test_several_of_a_thing_are_called_as_one_of_it(chance: random.Random) -> None:
    """A round's patients are those of the alarms."""
    alarms = [({}, {"patient": chance.randrange(10_000, 10_200)}) for _ in range(300)]
    rounds = [({}, {"patients": [chance.randrange(10_000, 10_200) for _ in range(4)]}) for _ in range(100)]
    [found] = suggest([sampled("alarms", alarms), sampled("rounds", rounds)])
    assert (found.definition.name, set(found.definition.sources[0].split(" or "))) == (
        "patient",
        {"body:$.patient", "body:$.patients[*]"},
    )


def test_what_tells_messages_apart_comes_before_what_many_share(chance: random.Random) -> None:
    """A patient before the ward, though each ward is in both streams, and not each patient."""
    samples = []
    for stream in ("readings", "alarms"):
        patients = [chance.randrange(10_000, 10_300) for _ in range(300)]
        samples.append(sampled(stream, [({"ward": chance.choice("ABC"), "patient": each}, {}) for each in patients]))
    assert [each.definition.name for each in suggest(samples)] == ["patient", "ward"]


def chained(chance: random.Random) -> list[tuple[dict[str, Any], Any]]:
    """Events, most of which say which one led to them; and a message has its own id in its body, too."""
    ids = [f"e-{chance.randrange(10**9):09}" for _ in range(400)]
    return [
        (
            {"id": each, **({"causation": ids[chance.randrange(max(0, n - 9), n)]} if n % 7 else {})},
            {"self": each, "n": n, "other": f"u-{chance.randrange(10**9):09}"},
        )
        for n, each in enumerate(ids)
    ]


def test_ids_of_messages_that_others_of_their_stream_name_are_keys(chance: random.Random) -> None:
    """The id though it is unique, and what names it, with its direction; both can be defined as they stand."""
    found = suggest([sampled("events", chained(chance))])
    assert [(each.definition.name, each.definition.names) for each in found] == [("id", None), ("causation", "id")]
    assert found[1].overlap > 0.9
    assert found[0].overlap == 0
    as_definitions([each.definition for each in found])


def test_a_reply_s_correlation_names_its_request_s_id(chance: random.Random) -> None:
    """In another stream, whose messages have ids of their own in the same place."""
    ids = [f"m-{chance.randrange(10**9):09}" for _ in range(200)]
    requests, replies = Sample("requests"), Sample("replies")
    for n, each in enumerate(ids):
        requests.add(Message.from_amqp("requests", n, Properties({"relatum_time": 10 * n}, message_id=each), b""))
        given = Properties({"relatum_time": 10 * n + 5}, message_id=f"r-{each}", correlation_id=each)
        replies.add(Message.from_amqp("replies", n, given, b""))
    found = suggest([requests, replies])
    assert [(*each.definition.sources, each.definition.names) for each in found] == [
        ("property:message_id", None),
        ("property:correlation_id", "message_id"),
    ]


def test_what_only_looks_as_if_it_named_a_message_does_not(chance: random.Random) -> None:
    """The same id twice in a message, small numbers, and a conversation that all share: the first of it, too."""
    ids = [f"e-{chance.randrange(10**9):09}" for _ in range(300)]
    twice = [({"id": each}, {"copy": each}) for each in ids]
    numbers = [({"number": n}, {"before": max(0, n - 1)}) for n in range(300)]
    shared = [({"id": each, "conversation": ids[n - n % 3]}, {}) for n, each in enumerate(ids)]
    for messages in (twice, numbers):
        assert suggest([sampled("one", messages)]) == [], messages[0]
    (found,) = suggest([sampled("one", shared)])
    assert (found.definition.name, found.definition.names) == ("conversation", None)


def test_a_message_that_says_which_comes_next_is_what_that_one_came_from(chance: random.Random) -> None:
    """The direction is that of time: the id names the message in which it was announced."""
    ids = [f"e-{chance.randrange(10**9):09}" for _ in range(300)]
    found = suggest([sampled("one", [({"id": each}, {"next": following}) for each, following in pairwise(ids)])])
    assert [(each.definition.name, each.definition.names) for each in found] == [("next", None), ("id", "next")]


def test_bodies_whose_members_are_called_after_values_stay_bounded() -> None:
    """So many fields are kept, and no more."""
    found = sampled("wide", [({}, {f"m{n}-{each}": each for each in range(100)}) for n in range(50)])
    assert len(found.fields) <= 400
    assert suggest([found]) == []


def test_a_small_sample_of_one_stream_says_as_much_as_a_large_one() -> None:
    """Forty orders, half of them paid, in the stream of one tap: two messages of sixty seldom share a value."""
    bodies = [{"orderId": f"o-{n}", "total": n * 1.5} for n in range(40)]
    bodies += [{"orderId": f"o-{n}", "amount": n * 1.5} for n in range(0, 40, 2)]
    found = suggest([sampled("tap.shop", [({}, body) for body in bodies])])
    assert [each.definition.sources for each in found] == [["body:$.orderId"]]


def test_a_key_is_told_of_wherever_it_is() -> None:
    """A cause comes again in one stream and never in another: the key reads both, so both are named, and counted."""

    def events(stream: str, begin: int, causes: list[int]) -> Sample:
        rows = [{"event": f"event-{begin + n:05}", "relatum_time": begin + n} for n in range(300)]
        named = [{"cause": f"event-{cause:05}"} for cause in causes] or [{}] * 300
        return sampled(stream, [(row | cause, None) for row, cause in zip(rows, named, strict=True)])

    orders, payments = events("orders", 0, []), events("payments", 300, list(range(300)))
    shipments = events("shipments", 600, [300 + n // 2 for n in range(300)])
    found = by_name(suggest([orders, payments, shipments]))
    assert found["cause"].definition.names == "event"
    assert {one.stream: one.distinct for one in found["cause"].found} == {"payments": 300, "shipments": 150}
    assert {one.stream for one in found["event"].found} == {"orders", "payments", "shipments"}
