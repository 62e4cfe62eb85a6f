"""Keys that are masked by definition: nothing that a page gives out has their values."""

from typing import Any
from urllib.parse import urlencode

from relatum_consumer import Expectation
from relatum_consumer.expectations import add_expectations
from tests.support.web import asking, at
from tests.web.conftest import NUMBER, SECRET, World
from tests.web.test_api import links


def named(rows: list[dict[str, Any]]) -> dict[str, str]:
    """Headers or keys of an answer, by name."""
    return {row.get("name", row.get("key")): row.get("text", row.get("value")) for row in rows}


def test_a_key_masked_by_definition_is_shown_nowhere(world: World, database_url: str, masked: str) -> None:
    """Without any option: its header, keys that share the header or name the key, bodies, pages, documents, links."""
    with asking(world.page(database=database_url)) as page:
        answer = page.get(f"/api/message?stream={masked}&offset=0").json()
        headers, keys = named(answer["headers"]), named(answer["keys"])
        digest = keys["card"]
        assert digest.startswith("~")
        assert headers["card"] == headers["paid_by"] == keys["again"] == keys["paid_by"] == digest
        assert keys["at"].startswith("~")
        assert headers["number"] == keys["number"] != digest
        assert headers["shop"] == keys["shop"] == "north"
        assert answer["body"]["kind"] == "masked"
        assert page.get(f"/message/body?stream={masked}&offset=0").status_code == 403
        assert page.get(f"/api/message?stream={masked}&offset=3").json()["body"]["text"] == "shown"
        seen = {row["name"]: row["is_masked"] for row in page.get("/api/keys").json()["keys"]}
        assert seen == {"card": True, "again": True, "at": True, "number": True, "paid_by": True, "shop": False}
        for key, prefix in [("card", "4"), ("again", "4"), ("number", ""), ("paid_by", SECRET)]:
            listed = page.get(f"/api/values?key={key}&prefix={prefix}").json()
            assert listed == {"values": [], "reason": "values of a masked key are not listed"}
        by = [each["key"] for each in answer["keys"] if each["is_masked"]]
        follow = [f"/?key={key}&of_stream={masked}&of_offset=0" for key in by]
        assert set(follow) <= set(links(page, at(masked, 0)))
        for path in [at(masked, 0), "/?key=shop&value=north", "/streams", at(masked), *follow]:
            for text in (page.get(path).text, page.get(_document(path)).text):
                assert SECRET not in text, path
                assert NUMBER not in text, path
        for link in follow:
            found = page.get(_document(link)).json()
            assert [row["offset"] for row in found["results"] if row["offset"] in (1, 2)] == [1, 2], link


def test_no_page_and_no_answer_has_a_masked_value(world: World, database_url: str, masked: str) -> None:
    """Each path of the API, as document and page, and each file: asked by messages, so that no question has it."""
    add_expectations(database_url, Expectation("paid", masked, "card", masked, 60))
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
        "/groups/group": [f"?{of_key}"],
        "/collectors/collector": ["?name=none"],
        "/collectors/outcome": [f"?{of_key}"],
        "/contexts/super-stream": ["?name=none"],
        "/values": ["?key=card", "?key=number"],
    }
    with asking(world.page(database=database_url)) as page:
        paths = {*page.get("/api/openapi.json").json()["paths"], *asked}
        for path in sorted(paths):
            for query in asked.get(path, [""]):
                for prefix in ("", "/api"):
                    shown = "/" if (prefix, path) == ("", "/search") else f"{prefix}{path}"
                    text = page.get(f"{shown}{query}").text
                    assert SECRET not in text, (prefix, path, query)
                    assert NUMBER not in text, (prefix, path, query)


def _document(path: str) -> str:
    return f"/api/search{path[1:]}" if path.startswith("/?") else f"/api{path}"


def test_a_digest_is_the_same_in_each_process_and_whatever_is_typed(
    world: World, database_url: str, masked: str
) -> None:
    """So is that of a value typed in, however it is written; one who has a digest goes by its link."""
    with asking(world.page(database=database_url)) as one, asking(world.page(database=database_url)) as other:
        keys = named(one.get(f"/api/message?stream={masked}&offset=0").json()["keys"])
        assert named(other.get(f"/api/message?stream={masked}&offset=1").json()["keys"]) == keys
        typed: list[tuple[str, list[str]]] = [("card", [SECRET]), ("number", ["42"]), ("at", [SECRET, "north"])]
        for key, value in typed:
            answer = other.get(f"/api/search?{urlencode({'key': key, 'value': value}, doseq=True)}").json()
            assert answer["value"] == keys[key]
            assert len(answer["results"]) == 3


def test_bodies_are_shown_where_somebody_says_so(world: World, database_url: str, masked: str) -> None:
    """`--show-bodies`: of all messages; a body is theirs who set up the page."""
    with asking(world.page(database=database_url, show_bodies=True)) as page:
        assert SECRET in page.get(f"/api/message?stream={masked}&offset=0").json()["body"]["text"]
        assert page.get(f"/message/body?stream={masked}&offset=0").status_code == 200


def test_a_key_is_masked_by_an_option_as_well(world: World, database_url: str, masked: str) -> None:
    """`--mask` adds to what definitions say."""
    with asking(world.page(database=database_url, masked_keys=("shop",))) as page:
        answer = page.get(f"/api/message?stream={masked}&offset=3").json()
        assert named(answer["headers"])["shop"] == named(answer["keys"])["shop"] != "north"
        assert answer["body"]["kind"] == "masked"
