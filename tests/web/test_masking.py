"""Keys that are masked, by definition or by an option: nothing that a page gives out has their values."""

from typing import Any
from urllib.parse import urlencode

import sqlalchemy as sa

from relatum.keys import KeyDefinition
from relatum.store import add_keys
from relatum_consumer import Expectation
from relatum_consumer.expectations import add_expectations
from tests.support.place import Place
from tests.support.web import Asking, asking, at
from tests.web.conftest import NUMBER, SECRET, Talks, World, page_of
from tests.web.test_api import links, pages


def named(rows: list[dict[str, Any]]) -> dict[str, str]:
    """Headers or keys of an answer, by name."""
    return {row.get("name", row.get("key")): row.get("text", row.get("value")) for row in rows}


def test_a_key_masked_by_definition_is_a_digest_that_can_be_followed(masked: str, own: Asking) -> None:
    """Without any option: its header, keys that share the header or name the key; its link finds the same messages."""
    answer = own.get(f"/api{at(masked, 0)}").json()
    headers, keys = named(answer["headers"]), named(answer["keys"])
    digest = keys["card"]
    assert (digest[0], len(digest)) == ("~", 11)
    assert headers["card"] == headers["paid_by"] == keys["again"] == keys["paid_by"] == digest
    assert keys["at"].startswith("~")
    assert headers["number"] == keys["number"] != digest
    assert headers["shop"] == keys["shop"] == "north"
    assert answer["body"]["kind"] == "masked"
    for part in ("body", "image"):
        assert own.get(at(masked, 0, part)).status_code == 403
    assert own.get(f"/api{at(masked, 3)}").json()["body"]["text"] == "shown"
    seen = {row["name"]: row["is_masked"] for row in own.get("/api/keys").json()["keys"]}
    assert seen == {"card": True, "again": True, "at": True, "number": True, "paid_by": True, "shop": False}
    for key, prefix in [("card", "4"), ("again", "4"), ("number", ""), ("paid_by", SECRET)]:
        listed = own.get(f"/api/values?key={key}&prefix={prefix}").json()
        assert listed == {"values": [], "reason": "values of a masked key are not listed"}
    for key in [each["key"] for each in answer["keys"] if each["is_masked"]]:
        follow = f"?key={key}&of_stream={masked}&of_offset=0"
        assert f"/{follow}" in links(own, at(masked, 0))
        found = own.get(f"/api/search{follow}").json()
        assert [row["offset"] for row in found["results"] if row["offset"] in (1, 2)] == [1, 2], follow
        assert (found["value"], {row["preview"] for row in found["results"][:2]}) == (keys[key], {""})


def test_no_page_and_no_answer_has_a_masked_value(place: Place, masked: str, own: Asking) -> None:
    """Each path of the API, as document and page, and each file: asked by messages, so that no question has it."""
    add_expectations(place.database, Expectation("paid", masked, "card", masked, 60))
    of_message, of_key = f"stream={masked}&offset=0", f"of_stream={masked}&of_offset=0"
    asked = {
        "/search": [f"?key={key}&{of_key}" for key in ("card", "again", "at", "number", "paid_by", "shop")],
        "/search/times": [f"?key={key}&{of_key}" for key in ("card", "number", "shop")],
        "/trace": [f"?{of_message}", f"?{of_message}&fan_out=1", "?key=shop&value=north"],
        "/trace/csv": [f"?{of_message}"],
        "/message": [f"?{of_message}", f"?{of_message}&view=text", f"?{of_message}&view=hex"],
        "/message/body": [f"?{of_message}"],
        "/stream": [f"?stream={masked}"],
        "/missing/expectation": ["?name=paid&span=all"],
        "/live": ["", f"?stream={masked}"],
        "/groups/group": [f"?{of_key}"],
        "/collectors/collector": ["?name=none"],
        "/collectors/outcome": [f"?{of_key}"],
        "/contexts/super-stream": ["?name=none"],
        "/values": ["?key=card", "?key=number"],
    }
    for path in sorted({*own.get("/api/openapi.json").json()["paths"], *asked}):
        for query in asked.get(path, [""]):
            for prefix in ("", "/api"):
                shown = "/" if (prefix, path) == ("", "/search") else f"{prefix}{path}"
                text = own.get(f"{shown}{query}").text
                assert SECRET not in text, (prefix, path, query)
                assert NUMBER not in text, (prefix, path, query)


def test_a_digest_is_the_same_in_each_process_and_whatever_is_typed(place: Place, masked: str, own: Asking) -> None:
    """So is that of a value typed in, however it is written; who has a digest goes by its link."""
    with asking(page_of(place)) as other:
        keys = named(own.get(f"/api{at(masked, 0)}").json()["keys"])
        assert named(other.get(f"/api{at(masked, 1)}").json()["keys"]) == keys
        typed: list[tuple[str, list[str]]] = [("card", [SECRET]), ("number", ["42"]), ("at", [SECRET, "north"])]
        for key, value in typed:
            answer = other.get(f"/api/search?{urlencode({'key': key, 'value': value}, doseq=True)}").json()
            assert (answer["value"], len(answer["results"])) == (keys[key], 3)


def test_options_show_bodies_and_mask_more_keys(place: Place, masked: str) -> None:
    """`--show-bodies` is of all messages; `--mask` adds to what definitions say."""
    with asking(page_of(place, show_bodies=True)) as page:
        assert SECRET in page.get(f"/api{at(masked, 0)}").json()["body"]["text"]
        assert page.get(at(masked, 0, "body")).status_code == 200
    with asking(page_of(place, masked_keys=("shop",))) as page:
        answer = page.get(f"/api{at(masked, 3)}").json()
        assert named(answer["headers"])["shop"] == named(answer["keys"])["shop"] != "north"
        assert answer["body"]["kind"] == "masked"


def test_what_names_an_expectation_a_group_or_a_context_is_masked(world: World) -> None:
    """Their values are digests, page by page, and in the links to the next page, too."""
    with asking(world.page(masked_keys=("card", "order_id", "host", "message_group"))) as page:
        (late, *_) = pages(page, "/missing/expectation", "results", name="swift", span="all")
        assert late["key"]["value"].startswith("~")
        rows = pages(page, "/groups", "groups", show="all", limit=2)
        assert [row["group"]["state"] for row in rows] == ["incomplete", "unsound", "incomplete", "complete"]
        link = next(each for each in links(page, "/groups") if each.startswith("/groups/group?of_stream="))
        assert [each["sequence"] for each in page.get(f"/api{link}").json()["results"]] == [2, 4]
        contexts = pages(page, "/contexts/super-stream", "contexts", name=world.placed, limit=1)
        assert len({row["context"] for row in contexts if row["context"].startswith("~")}) == 3
        paths = ["/groups?limit=1", "/groups?show=all&limit=2", link, "/missing/expectation?name=swift&span=all"]
        paths += ["/collectors/collector?name=books", f"/contexts/super-stream?name={world.placed}", "/live"]
        secrets = [
            "000000",
            SECRET,
            "o-<img",
            "o-&lt;img",
            "no such account",
            "a &amp; b",
            '"a & b"',
            "order_id&amp;value",
        ]
        for path in paths:
            for text in (page.get(path).text, page.get(f"/api{path}").text):
                assert not [secret for secret in secrets if secret in text], path


def test_a_conversation_has_no_masked_value_in_any_form(talks: Talks) -> None:
    """Neither in edges nor in values, tables and titles; its digest still leads to all that share it."""
    with asking(talks.page(masked_keys=("card", "order_id", "cause", "id", "place"))) as page:
        query = f"stream={talks.orders}&offset=0"
        forms = [page.get(f"{path}?{query}").text for path in ("/api/trace", "/trace", "/trace/csv")]
        secrets = [SECRET, "onerror=hacked", "HYPERLINK", "nobody"]
        assert [text for text in secrets for form in forms if text in form] == []
        answer = page.get(f"/api/trace?{query}").json()
        shared = next(each["key"] for each in answer["shared"] if each["key"]["key"] == "card")
        assert (shared["is_masked"], shared["value"][0], shared["value"] in forms[2]) == (True, "~", True)
        link = next(each for each in links(page, f"/trace?{query}") if each.startswith("/?key=card&of_stream="))
        assert len(page.get(f"/api/search{link[1:]}").json()["results"]) >= 1
        stopped = page.get("/api/trace?key=order_id&value=talk-200&fan_out=7").json()["stopped"]
        assert stopped
        assert all(each["key"]["value"].startswith("~") for each in stopped if each["key"])


def test_an_unknown_outcome_of_a_masked_id_has_no_link(engine: sa.Engine, own: Asking) -> None:
    """Nothing but the id could lead there, and that is masked."""
    add_keys(engine, [KeyDefinition("id", source="property:message_id", masked=True)])
    (given,) = own.get("/api/collectors/outcome?id=strange").json()["outcomes"]
    assert (given["status"], given["message_id"][0]) == ("unknown", "~")
    shown = own.get("/collectors/outcome?id=strange").text
    assert "of_offset=None" not in shown
    assert "strange" not in shown
