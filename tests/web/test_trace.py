"""The conversation: its document and its page; what is masked, what bounds it, what it weighs."""

import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import parse_qs, urlencode, urlsplit

import pytest

from tests.support.web import Asking, asking
from tests.web.conftest import COMMON, FORMULA, TALK_KEYS, Talks
from tests.web.test_api import harmless, links

WEIGHT_MAX = 200_000
"""Bytes of the page of a conversation of 200 messages, with all that it loads."""


@pytest.fixture(scope="module")
def talk(talks: Talks) -> Iterator[Asking]:
    with asking(talks.page()) as page:
        yield page


def test_a_conversation_is_what_is_connected_by_time_and_by_cause(talk: Asking, talks: Talks) -> None:
    """A conversation has the same messages and causes from each of them, and its tree has each once below the start."""
    for stream, offset, tree in (
        (talks.orders, 0, [("0", "3"), ("0", "2"), ("1", "4")]),
        (talks.mails, 0, [("0", "2"), ("1", "1"), ("1", "3")]),
    ):
        answer = talk.answer("/trace", stream=stream, offset=offset, by=["order_id", "cause"])
        places = [(each["stream"], each["offset"]) for each in answer["messages"]]
        assert places == [(talks.orders, 0), (talks.payments, 0), (talks.orders, 1), (talks.mails, 0)]
        assert (answer["status"], answer["words"]) == ("found", "found: this is all")
        ends = [[places.index((*each[end].values(),)) for end in ("cause", "effect")] for each in answer["edges"]]
        assert (ends, {each["key"] for each in answer["edges"]}) == ([[0, 1], [1, 3]], {"cause"})
        query = urlencode({"stream": stream, "offset": offset, "by": ["order_id", "cause"]}, doseq=True)
        lines = re.findall(r'<li class="d(\d)" id="m(\d)">', talk.get(f"/trace?{query}").text)
        assert lines == tree
        shared = {each["key"]: [places.index((*where.values(),)) for where in each["ids"]] for each in answer["shared"]}
        assert shared["order_id"] == [0, 1, 2]
        assert answer["hops"].count(0) == 1


@pytest.mark.parametrize(
    ("query", "reason", "count"),
    [
        ({"key": "host", "value": "busy"}, "fan_out", 201),
        ({"key": "host", "value": "busy", "fan_out": 1000, "limit": 30}, "limit", COMMON - 30),
        ({"key": "order_id", "value": "talk-200", "hops": 1}, "hops", None),
        ({"key": "order_id", "value": FORMULA, "until": "2023-11-14T22:13:20.000001Z", "by": "order_id"}, "time", 2),
    ],
)
def test_what_a_bound_leaves_out_is_said(talk: Asking, query: dict[str, Any], reason: str, count: int | None) -> None:
    """In the document and on the page, with the value, and with a link that asks for more where one helps."""
    answer = talk.answer("/trace", **query)
    stops = [each for each in answer["stopped"] if each["reason"] == reason]
    assert stops
    assert count is None or stops[0]["count"] == count
    shown = talk.get(f"/trace?{urlencode(query)}")
    assert "Where it stopped" in shown.text
    hrefs = [attributes.get("href") or "" for _, attributes in harmless(shown.text).elements]
    if reason == "fan_out":
        assert stops[0]["value"] == "busy"
        assert "/?key=host&value=busy" in hrefs
    else:
        bound = "until" if reason == "time" else reason
        given = parse_qs(urlencode(query)).get(bound)
        others = [parse_qs(urlsplit(href).query) for href in hrefs if href.startswith("/trace?")]
        more = talk.answer("/trace", **next(each for each in others if each.get(bound) != given))
        assert len(more["messages"]) > len(answer["messages"]) or reason == "hops"


def test_nothing_connected_is_said_with_what_is_known(talk: Asking, talks: Talks) -> None:
    """What is missing is said where nothing is connected; one that begins with a value, composite too, has no start."""
    absent = talk.answer("/trace", key="order_id", value="nobody")
    assert (absent["status"], absent["messages"]) == ("absent", [])
    found = talk.answer("/trace", stream=talks.orders, offset=4)
    assert (found["status"], len(found["messages"])) == ("absent", 1)
    assert {each["key"] for each in found["missing_keys"]} == {each.name for each in TALK_KEYS}
    alone = talk.answer("/trace", stream=talks.mails, offset=0, by="id")
    assert (alone["words"], len(alone["messages"])) == ("absent: nothing else is connected with it", 1)
    for query in ("key=order_id&value=nobody", f"stream={talks.orders}&offset=4", "", "since=2026-01-01"):
        shown = talk.get(f"/trace?{query}")
        assert shown.status_code == 200
        harmless(shown.text)
    answer = talk.answer("/trace", key="order_id", value=FORMULA, by="cause")
    assert answer["hops"] == [1, 1, 1]
    (named,) = answer["edges"]
    effect = answer["messages"][1]
    assert (named["cause"], named["effect"]) == (None, {name: effect[name] for name in ("stream", "offset")})
    composite = talk.answer("/trace", key="place", value=["a|b", "7"], by="place")
    assert {each["stream"] for each in composite["messages"]} == {talks.orders, talks.payments}
    assert composite["start"] == "place a|b + 7"


def test_large_conversations_are_whole_and_weigh_little(talk: Asking) -> None:
    """The page of 200 messages weighs less than 200 kB with all it loads, and that of 1,000 has a row for each."""
    shown = talk.get("/trace?key=order_id&value=talk-200&by=order_id")
    assert shown.text.count("<circle") == 200
    loaded = set(re.findall(r'(?:href|src)="(/static/[^"#]+)', shown.text))
    assert len(loaded) > 4
    weight = len(shown.content) + sum(len(talk.get(path).content) for path in loaded)
    assert weight < WEIGHT_MAX, weight
    large = talk.get("/trace?key=order_id&value=talk-1000&limit=1000&fan_out=1000&hops=1").text
    assert large.count("<circle") == large.count('<li class="d') == 1_000
    harmless(large)


def test_the_way_to_a_conversation_is_on_messages_and_searches(talk: Asking, talks: Talks) -> None:
    """The pages of a message, of a value, and of a value that goes by its message link to their conversation."""
    for path, target in [
        (f"/message?stream={talks.orders}&offset=0", f"/trace?stream={talks.orders}&offset=0"),
        ("/?key=order_id&value=talk-200", "/trace?key=order_id&value=talk-200"),
        (f"/?key=place&of_stream={talks.orders}&of_offset=0", f"/trace?stream={talks.orders}&offset=0&by=place"),
    ]:
        assert target in links(talk, path)
        assert talk.get(target).status_code == 200
