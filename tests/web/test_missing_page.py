"""The pages of what is missing: three answers, told apart, counted, listed page by page, and never guessed."""

from typing import Any
from urllib.parse import urlencode

import pytest
import sqlalchemy as sa

from relatum.store import add_keys
from relatum.store import expectations as expectation_rows
from relatum_consumer.web._api import _missing
from tests.support.web import Asking, asking, at
from tests.web.conftest import BODIES, MANY, World
from tests.web.test_api import harmless, hostile_names, links

NAMES = ["answered <b>", "paid", "patient", "shelved", "swift"]


def listed(page: Asking, **query: Any) -> dict[str, Any]:
    """The answer about one expectation."""
    response = page.get(f"/api/missing/expectation?{urlencode({'span': 'all', **query})}")
    assert response.status_code == 200, response.text
    return response.json()  # type: ignore[no-any-return]


def test_expectations_are_counted(page: Asking, world: World) -> None:
    """By name, each with what is known; nothing is said of what could not be counted but that."""
    answer = page.get("/api/missing?span=all").json()
    rows = {row["name"]: row for row in answer["expectations"]}
    assert [row["name"] for row in answer["expectations"]] == NAMES
    assert (rows["answered <b>"]["missing"], rows["answered <b>"]["status"]) == (MANY, "found")
    assert (rows["swift"]["late"], rows["swift"]["missing"]) == (len(BODIES), 0)
    assert (rows["paid"]["missing"], rows["paid"]["late"], rows["paid"]["status"]) == (0, 0, "absent")
    # What has time left is not known: it is neither missing nor followed, and changes nothing.
    assert (rows["patient"]["missing"], rows["patient"]["not_known"], rows["patient"]["status"]) == (0, MANY, "absent")
    assert rows["patient"]["words"] == f"nothing is missing so far: there is time left ({MANY} are not due yet)"
    assert [name for name, row in rows.items() if row["is_early"]] == ["patient"]
    text = page.get("/missing?span=all").text
    assert rows["paid"]["words"] in text
    wanted = {f"/missing/expectation?{urlencode({'name': name, 'span': 'all'})}" for name in rows}
    assert wanted <= set(links(page, "/missing?span=all"))


def test_where_nothing_was_looked_at_nothing_is_praised(page: Asking) -> None:
    """A span without messages has no green tick, and a link to the one that has some."""
    for path, wider in (
        ("/missing?span=5m", "/missing?span=all"),
        ("/missing/expectation?name=paid&span=5m", "/missing/expectation?name=paid&amp;span=all"),
    ):
        shown = page.get(path).text
        assert "no messages in this span" in shown
        assert 'class="sign good"' not in shown
        assert f'<a href="{wider}">All times</a>' in shown
    shown = page.get("/missing?span=all").text
    assert 'class="sign good"' in shown
    assert "All times" not in shown


def test_expectations_come_page_by_page(page: Asking) -> None:
    """Each once, by name."""
    names, cursor = [], ""
    while cursor is not None:
        answer = page.get(f"/api/missing?limit=3&cursor={cursor}").json()
        names += [row["name"] for row in answer["expectations"]]
        cursor = answer["next"]
    assert names == NAMES
    assert answer["total"] == len(NAMES)


def test_late_names_what_came(page: Asking, world: World) -> None:
    """With both messages, and by how much."""
    answer = listed(page, name="swift")
    assert answer["finding"] == "late"
    row = answer["results"][0]
    assert (row["stream"], row["came"]["stream"]) == (world.orders, world.payments)
    assert row["words"] == "late by 0.4 ms"
    same = f"/?{urlencode({'key': 'card', 'value': row['key']['value']})}"
    wanted = {same, at(row["stream"], row["offset"]), at(**row["came"])}
    assert wanted <= set(links(page, "/missing/expectation?name=swift&span=all"))


def test_what_has_time_left_is_not_known_and_not_missing(page: Asking) -> None:
    """Said in words, and listed by itself."""
    answer = listed(page, name="patient")
    assert (answer["finding"], {row["why"] for row in answer["results"]}) == ("not_known", {"not_due"})
    assert listed(page, name="patient", finding="missing")["results"] == []
    assert "None is missing" in page.get("/missing/expectation?name=patient&span=all&finding=missing").text


@pytest.mark.parametrize("limit", [7, 60, 229, 230])
def test_pages_of_missing_messages_are_the_whole_and_each_once(page: Asking, limit: int) -> None:
    """Also where more messages than a page has are of one moment; a later page counts from its beginning on."""
    places, cursor = [], ""
    while cursor is not None:
        answer = listed(page, name="answered <b>", limit=limit, cursor=cursor)
        assert answer["finding"] == "missing"
        places += [row["offset"] for row in answer["results"]]
        cursor = answer["next"]
    assert places == list(range(len(BODIES), len(BODIES) + MANY))


def test_a_composite_value_is_followed_by_its_message(page: Asking, world: World) -> None:
    """Its link finds the others that share it."""
    hrefs = links(page, "/missing/expectation?name=shelved&span=all")
    link = next(each for each in hrefs if each.startswith("/?key=place&of_stream="))
    assert len(page.get(f"/api/search{link[1:]}").json()["results"]) == len(BODIES) - 1


def test_a_value_of_a_masked_key_is_a_digest(world: World) -> None:
    """On the page and in the document."""
    with asking(world.page(masked_keys=("card",))) as page:
        shown = page.get("/missing/expectation?name=swift&span=all").text
        assert "4711-secret" not in shown
        assert "4711-secret" not in str(answer := listed(page, name="swift"))
        assert answer["results"][0]["key"]["value"].startswith("~")


@pytest.mark.parametrize(
    ("query", "status", "code"),
    [
        ("", 400, "invalid_input"),
        ("name=", 400, "invalid_input"),
        ("name=none", 404, "not_found"),
        ("name=paid&span=2d", 400, "invalid_input"),
        ("name=paid&finding=found", 400, "invalid_input"),
        ("name=paid&cursor=W10=", 400, "invalid_input"),
        ("name=paid&cursor=x", 400, "invalid_input"),
        ("name=paid&since=2026-01-02&until=2026-01-01", 400, "invalid_input"),
    ],
)
def test_what_cannot_be_asked_says_why(page: Asking, query: str, status: int, code: str) -> None:
    """As a document and as a page."""
    response = page.get(f"/api/missing/expectation?{query}")
    assert (response.status_code, response.json()["error"]["code"]) == (status, code)
    assert response.json()["error"]["hint"]
    shown = page.get(f"/missing/expectation?{query}")
    assert f'data-problem="{code}"' in shown.text
    harmless(shown.text)


def test_counts_that_take_too_long_are_said_to_be_none(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The list is there all the same, with what to do."""
    monkeypatch.setattr(_missing, "COUNTED_S", 0.000_001)
    with asking(world.page()) as page:
        rows = page.get("/api/missing?span=all").json()["expectations"]
        assert {(row["status"], row["missing"]) for row in rows} <= {("failed", None)}
        assert all("shorter span" in row["words"] for row in rows)
        assert not any(".." in row["words"] for row in rows)
        assert page.get("/missing?span=all").status_code == 200


def test_nothing_expected_says_how_to(world: World, database_url: str) -> None:
    """And a user who may not read the table is told what to grant."""
    with asking(world.page(database=database_url)) as page:
        assert "relatum expect add" in page.get("/missing").text
    with asking(world.page(database=f"{database_url}?options=-crole%3Drelatum_router")) as page:
        shown = page.get("/missing")
        assert (shown.status_code, "GRANT relatum_reader" in shown.text) == (403, True)


def test_names_that_were_made_to_do_harm_are_names(world: World, database_url: str, engine: sa.Engine) -> None:
    """An expectation of such streams and such a name is text, and its links lead to it."""
    names = [name for name in hostile_names(30) if name.strip()]
    add_keys(engine, ["order_id"])
    with engine.begin() as connection:
        columns = {"vhost": "/", "by_key": "order_id", "within_s": 60}
        rows = [{"name": name, "of_stream": name, "follows": name} | columns for name in names]
        connection.execute(sa.insert(expectation_rows), rows)
    with asking(world.page(database=database_url)) as page:
        shown = [row["name"] for row in page.get("/api/missing?limit=50").json()["expectations"]]
        markup = harmless(page.get("/missing?limit=50").text)
        assert sorted(shown) == sorted(names)
        hrefs = [attributes.get("href") or "" for tag, attributes in markup.elements if tag == "a"]
        for name in shown[::5]:
            (link,) = {each for each in hrefs if each == f"/missing/expectation?{urlencode({'name': name})}"}
            assert harmless(page.get(link).text).headings
