"""What samples of streams suggest as keys."""

import json
import random
from typing import Any

import pytest

from relatum.reading import Message
from relatum_cli.demo._data import FLIGHTS, PLANES, WEATHER, load
from relatum_consumer.suggesting import Sample, suggest


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


def names(*samples: Sample) -> list[str]:
    """The names of suggested keys, in their order."""
    return [each.definition.name for each in suggest(samples)]


@pytest.fixture(scope="module")
def demo() -> list[Sample]:
    """Samples of the demo's streams, as the command takes them: eight windows of 500 messages."""
    samples = []
    for stream, rows in load().items():
        found = Sample(stream)
        starts = [len(rows) * window // 8 for window in range(8)]
        for number, each in enumerate(rows):
            if any(start <= number < start + 500 for start in starts):
                properties = Properties(each.headers, message_id=each.message_id)
                found.add(Message.from_amqp(stream, number, properties, each.body))
        samples.append(found)
    return samples


def test_the_demo_s_keys_are_found_without_their_definitions(demo: list[Sample]) -> None:
    """Tail number, airport and hour, each in the streams that share it; no measure, and what is unique comes last."""
    found = [each for each in suggest(demo) if not each.is_unique]
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
    assert [each.definition.sources for each in suggest(demo)[len(found) :]] == [["property:message_id"]]


def test_a_moment_of_its_own_is_no_key_where_others_have_it_too(chance: random.Random) -> None:
    """Events of the same second, or millisecond, in several streams do not belong together; an hour comes again."""

    def events(word: str) -> list[tuple[dict[str, Any], Any]]:
        moments = [(f"2026-03-01T{n // 60:02}:{n % 60:02}:00Z", n) for n in chance.sample(range(600), 300)]
        return [({}, {word: at, "ts_ms": 1_772_323_200_000 + n, "hour": n // 60 + 10**6}) for at, n in moments]

    assert names(sampled("loads", events("loadedAt")), sampled("scans", events("at"))) == ["hour"]


def test_what_says_nothing_of_a_message_makes_no_key(chance: random.Random) -> None:
    """What is the same everywhere, cannot be a value, is a flag, a moment, a small number, or a text for people."""
    messages = [
        (
            {"version": "1.0", "at": f"2026-11-23T05:{n // 60:02}:{n % 60:02}Z"},
            {"ok": bool(n % 2), "n": n % 7, "x": 1 / (n + 1), "name": f"Ann {n}", "text": "word " * 100},
        )
        for n in range(300)
    ]
    assert names(sampled("one", messages)) == []
    assert names() == []
    # Two values that all messages have, in whatever stream, relate nothing.
    flags = [sampled(stream, [({"op": chance.choice("cu")}, {}) for _ in range(300)]) for stream in ("a", "b")]
    assert names(*flags) == []
    # Members that are called after values: so many fields are kept, and no more.
    wide = sampled("wide", [({}, {f"m{n}-{each}": each for each in range(100)}) for n in range(50)])
    assert len(wide.fields) <= 400
    assert names(wide) == []


def test_a_place_makes_one_key_also_where_streams_share_no_value(chance: random.Random) -> None:
    """The ids of rows of two tables lie in the same place: a key is of all streams."""
    orders = [({}, {"after": {"id": chance.randrange(1_000, 1_300)}}) for _ in range(900)]
    customers = [({}, {"after": {"id": chance.randrange(1, 90)}}) for _ in range(200)]
    [found] = suggest([sampled("orders", orders), sampled("customers", customers)])
    assert {one.stream for one in found.found} == {"orders", "customers"}


def test_a_value_that_comes_again_is_a_key_of_one_stream(chance: random.Random) -> None:
    """A device among many, each seldom; two orders, each placed and paid; forty orders, half of them paid."""
    devices = [f"device-{number}" for number in range(100)]
    [found] = suggest([sampled("readings", [({"device": chance.choice(devices)}, {"t": 20.5}) for _ in range(1_000)])])
    assert (found.definition.name, found.overlap) == ("device", 0.0)
    [found] = suggest([sampled("tap.shop", [({"order_id": n // 2, "paid": bool(n % 2)}, {}) for n in range(4)])])
    assert (found.definition.name, found.is_unique) == ("order_id", False)
    bodies = [{"orderId": f"o-{n}", "total": n * 1.5} for n in range(40)]
    bodies += [{"orderId": f"o-{n}", "amount": n * 1.5} for n in range(0, 40, 2)]
    [found] = suggest([sampled("tap.shop", [({}, body) for body in bodies])])
    assert found.definition.sources == ["body:$.orderId"]


def test_a_number_that_is_called_an_id_is_one(chance: random.Random) -> None:
    """README's order 4711, in one stream as in two, and a small shop's order 17; a price of as many digits is none."""
    orders = [({"order_id": 4711 + n // 2}, {"price": chance.randrange(1_000, 1_100)}) for n in range(600)]
    assert names(sampled("orders", orders)) == ["order_id"]
    one = [({}, {"orderNo": n, "price": chance.randrange(90)}) for n in range(90)]
    two = [({}, {"orderNo": n, "items": chance.randrange(90)}) for n in range(0, 90, 2)]
    assert names(sampled("one", one), sampled("two", two)) == ["orderNo"]


def test_what_tells_messages_apart_comes_before_what_many_share(chance: random.Random) -> None:
    """A patient before the ward, though each ward is in both streams, and not each patient."""
    samples = []
    for stream in ("readings", "alarms"):
        patients = [chance.randrange(10_000, 10_300) for _ in range(300)]
        samples.append(sampled(stream, [({"ward": chance.choice("ABC"), "patient": each}, {}) for each in patients]))
    assert names(*samples) == ["patient", "ward"]


def test_what_tells_the_messages_of_an_ordinary_exchange_apart_is_listed() -> None:
    """Each order appears once: it relates no messages of this stream, and those of another that has it, too."""
    for count in (3, 300):
        bodies = [{"orderId": 4711 + n, "customer": f"c-{n:04}", "total": 9.5 * n} for n in range(count)]
        orders = [({"attempt": 1}, body | {"note": f"ring twice, {n}"}) for n, body in enumerate(bodies)]
        found = suggest([sampled("tap.orders", orders)])
        assert {each.definition.sources[0] for each in found} == {"body:$.orderId", "body:$.customer"}
        assert [(each.is_unique, each.overlap) for each in found] == [(True, 0.0)] * 2
        # Where another stream has them they are no longer unique.
        paid = [({}, {"orderId": 4711 + n}) for n in range(count)]
        [order, *others] = suggest([sampled("tap.orders", orders), sampled("payments", paid)])
        assert (order.definition.name, order.overlap, order.is_unique) == ("orderId", 1.0, False)
        assert [each.is_unique for each in others] == [True]


def test_a_key_is_told_of_wherever_its_place_is(chance: random.Random) -> None:
    """A device comes again in one stream and never in another: the key reads both, so both are named, and counted."""
    few, many = ([({"device": f"{kind}-{n // 2:03}"}, {}) for n in range(300)] for kind in ("a", "b"))
    once = [({"device": f"c-{n:03}"}, {}) for n in range(100)]
    [found] = suggest([sampled("few", few), sampled("many", many), sampled("once", once)])
    assert {one.stream: one.distinct for one in found.found} == {"few": 150, "many": 150, "once": 100}
    assert not found.is_unique


def test_what_a_stream_says_twice_is_suggested_once(chance: random.Random) -> None:
    """A header that a member of the body repeats is one key; from and to are of the same places and are two."""
    places = [f"place-{n}" for n in range(80)]
    devices = [f"device-{n % 80}" for n in range(2000)]
    moved = [{"dev": each, "from": chance.choice(places), "to": chance.choice(places)} for each in devices]
    readings = [({"deviceId": body["dev"]}, body) for body in moved]
    assert set(names(sampled("readings", readings))) == {"deviceId", "from", "to"}


def test_two_places_of_one_name_are_two_keys() -> None:
    """Both can be defined: the second is called after its whole place."""
    rows = [({}, {"sender": {"id": f"s-{n // 2}"}, "by": {"sender": {"id": f"t-{n // 3}"}}}) for n in range(300)]
    named = {each.definition.sources[0]: each.definition.name for each in suggest([sampled("one", rows)])}
    assert set(named) == {"body:$.sender.id", "body:$.by.sender.id"}
    assert set(named.values()) & {"sender_id"}
    assert len(set(named.values())) == 2
