"""The pages of groups, collectors and contexts: what the commands tell, with links, page by page."""

import json
from typing import Any
from urllib.parse import urlencode

import pytest
import sqlalchemy as sa

from relatum import SerialConsumer, SerializationContexts
from relatum.collecting import _collector_status as listing
from relatum.keys import KeyDefinition
from relatum.membership import GROUP_KEY
from relatum.store import add_keys
from relatum_consumer.web import WebOptions
from relatum_consumer.web._api import _groups
from tests.acceptance._command import Relatum
from tests.support import publish_plain, record
from tests.support.groups import group_id, of_group, whole_group
from tests.support.super_streams import super_stream
from tests.support.web import Asking, asking, at
from tests.web.conftest import FAILED, HOSTILE, TAKEN, World
from tests.web.test_api import harmless, hostile_names, links


def pages(page: Asking, path: str, part: str, **query: Any) -> list[dict[str, Any]]:
    """What all pages of a list have together."""
    rows: list[dict[str, Any]] = []
    cursor: str | None = ""
    while cursor is not None:
        response = page.get(f"/api{path}?{urlencode(query | {'cursor': cursor}, doseq=True)}")
        assert response.status_code == 200, response.text
        answer = response.json()
        rows += answer[part]
        cursor = answer["next"]
    return rows


# --- groups -----------------------------------------------------------------------------------------------


def test_groups_that_are_not_whole_say_what_they_lack(page: Asking, world: World) -> None:
    """Incomplete ones first, the oldest of them first; then those that no message can make whole."""
    answer = page.get("/api/groups").json()
    assert (answer["incomplete"], answer["unsound"]) == (2, 1)
    facts = [each["group"] for each in answer["groups"]]
    assert [each["group_id"] for each in facts] == [group_id(4), group_id(2), group_id(3)]
    assert [each["state"] for each in facts] == ["incomplete", "incomplete", "unsound"]
    assert [each["missing"] for each in facts[:2]] == [[[1, 1], [3, 3]], [[3, 4]]]
    assert [each["last"] for each in facts] == [4, None, 1]
    text = page.get("/groups").text
    harmless(text)
    for each in answer["groups"]:
        assert each["group"]["words"] in text
        place = each["places"][0]
        assert "Its message group" in page.get(at(**place)).text
        assert page.get(f"/api{at(**place)}").json()["is_in_group"]
        of_message = urlencode({"of_stream": place["stream"], "of_offset": place["offset"]})
        found = page.get(f"/api/groups/group?{of_message}").json()["group"]["group_id"]
        assert found == each["group"]["group_id"]
    rows = page.get("/api/groups?limit=2").json()["groups"]
    assert [row["group"]["group_id"] for row in rows] == [each["group_id"] for each in facts[:2]]
    assert "and 1 more" in page.get("/groups?limit=2").text


@pytest.mark.parametrize("masked", [(), ("message_group",)])
def test_all_groups_are_listed_the_newest_first(world: World, masked: tuple[str, ...]) -> None:
    """Whole ones, too, page by page, also where no id may be in a link."""
    with asking(world.page(masked_keys=masked)) as page:
        rows = pages(page, "/groups", "groups", show="all", limit=2)
        assert [row["group"]["state"] for row in rows] == ["incomplete", "unsound", "incomplete", "complete"]
        text = page.get("/groups?show=all&limit=2").text
        harmless(text)
        assert ("000000" in text) == (not masked)


def test_what_is_not_recorded_by_the_key_of_groups_is_named_and_not_read(
    world: World, amqp_url: str, database_url: str, engine: sa.Engine, stream_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A key that was defined after the streams were recorded: the page says so, and how to have the rest."""
    monkeypatch.setattr(_groups, "UNRECORDED_READ", 10)
    publish_plain(amqp_url, stream_name, [*whole_group(1, 20), of_group(2, 1)])
    record(amqp_url, engine, stream_name, keys=["order_id"])
    add_keys(engine, [GROUP_KEY])
    publish_plain(amqp_url, stream_name, [of_group(2, 3)])
    record(amqp_url, engine, stream_name)
    with asking(world.page(database=database_url)) as page:
        for show in ("unfinished", "all"):
            answer = page.get(f"/api/groups?older_s=0&show={show}").json()
            assert [row["group"]["group_id"] for row in answer["groups"]] == [group_id(2)]
            assert [(each["stream"], each["start"]) for each in answer["unrecorded"]] == [(stream_name, 0)]
            text = page.get(f"/groups?older_s=0&show={show}").text
            assert "relatum backfill" in text
            harmless(text)
        shown = page.get(f"/api/groups/group?id={group_id(2)}").json()
        assert (len(shown["results"]), shown["is_proven"]) == (1, False)


def test_a_group_is_shown_by_number(page: Asking, world: World) -> None:
    """Whole or not, page by page; one that is not there says so."""
    whole = page.get(f"/api/groups/group?id={group_id(1)}").json()
    assert (whole["group"]["state"], [each["sequence"] for each in whole["results"]]) == ("complete", [1, 2, 3])
    assert [each["is_last"] for each in whole["results"]] == [False, False, True]
    numbers = [row["sequence"] for row in pages(page, "/groups/group", "results", id=group_id(2), limit=2)]
    assert numbers == [1, 2, 5]
    assert "Nothing of it is there" in page.get(f"/groups/group?id={group_id(9)}").text
    assert page.get("/groups/group?id=x").status_code == 400
    assert page.get("/groups/group").status_code == 400


def test_a_masked_group_is_followed_by_a_message_of_it(world: World) -> None:
    """Its id stands nowhere, not in a link either."""
    with asking(world.page(masked_keys=("message_group",))) as page:
        answer = page.get("/api/groups?limit=1")
        assert "000000" not in answer.text
        assert "000000" not in page.get("/groups").text
        link = next(each for each in links(page, "/groups") if each.startswith("/groups/group?of_stream="))
        follow = page.get(f"/api{link}")
        assert "000000" not in follow.text
        assert [each["sequence"] for each in follow.json()["results"]] == [2, 4]


def test_without_the_key_of_groups_it_says_how_to_define_it(world: World, database_url: str) -> None:
    """The list is empty, which is no error of a page; of one group nothing can be said."""
    with asking(world.page(database=database_url)) as page:
        for path, status in (("/groups", 200), (f"/groups/group?id={group_id(1)}", 404)):
            shown = page.get(path)
            assert (shown.status_code, "<code>relatum keys add message_group" in shown.text) == (status, True)
            assert "`" not in shown.text
            assert page.get(f"/api{path}").json()["error"]["code"] == "key_not_defined"
        assert "Groups have no key yet" in page.get("/groups").text


def test_a_consumer_of_groups_is_shown(world: World, database_url: str) -> None:
    """By its groups in each state."""
    from relatum_consumer import Relations

    with Relations(world.options["broker"], world.options["database"]) as relations:
        given = list(relations.groups(world.payments, consumer=f"billing {HOSTILE}", on_conflict="skip"))
        assert [each.group_id for each in given] == [group_id(1)]
        assert f"billing {HOSTILE}" in relations.group_consumers()
    with asking(world.page()) as page:
        (row,) = page.get("/api/groups").json()["consumers"]
        assert (row["name"], row["error"], row["status"]["counts"]["open"]) == (f"billing {HOSTILE}", "", 2)
        harmless(page.get("/groups").text)


# --- collectors -------------------------------------------------------------------------------------------


def test_collectors_are_shown_with_what_became_of_messages(page: Asking, world: World) -> None:
    """Counts by state, each with a list; who collects, and how far."""
    (row,) = page.get("/api/collectors").json()["collectors"]
    counts = {"collected": 0, "forwarded": 0, "succeeded": TAKEN - FAILED, "failed": FAILED, "dead": 0}
    assert row["counts"] == counts
    assert [(each["stream"], each["position"]) for each in row["sources"]] == [(world.payments, TAKEN)]
    harmless(page.get("/collectors").text)


@pytest.mark.parametrize("limit", [1, 3, 5, 1000])
@pytest.mark.parametrize("looked", [2, 7, 20_000])
def test_what_failed_is_listed_with_why(page: Asking, monkeypatch: pytest.MonkeyPatch, limit: int, looked: int) -> None:
    """All of them, however many succeeded; and each that succeeded, also where a page looks through a part."""
    monkeypatch.setattr(listing, "LOOKED", looked)
    whole = page.get("/api/collectors/collector?name=books&limit=1000").json()
    assert (len(whole["results"]), whole["looked_to"], whole["next"]) == (FAILED, None, None)
    failed = pages(page, "/collectors/collector", "results", name="books", limit=limit)
    assert sorted(row["offset"] for row in failed) == list(range(FAILED))
    assert {row["reason"] for row in failed} == {f"no such account: {HOSTILE}"}
    good = pages(page, "/collectors/collector", "results", name="books", limit=limit, state="succeeded")
    assert sorted(row["offset"] for row in good) == list(range(FAILED, TAKEN))
    assert pages(page, "/collectors/collector", "results", name="books", limit=limit, state="waiting") == []


def test_a_message_has_its_outcome(page: Asking, world: World) -> None:
    """By its id, or by where it lies; reasons are not shown where bodies are not."""
    row = page.get("/api/collectors/collector?name=books").json()["results"][0]
    place = at(row["stream"], row["offset"])
    assert page.get(f"/api{place}").json()["outcome"] == "failed"
    assert "Collected: failed" in page.get(place).text
    for query in ({"id": row["message_id"]}, {"of_stream": row["stream"], "of_offset": row["offset"]}):
        path = f"/collectors/outcome?{urlencode(query)}"
        assert [each["status"] for each in page.get(f"/api{path}").json()["outcomes"]] == ["failed"]
        harmless(page.get(path).text)
    assert "No collector has taken it" in page.get("/collectors/outcome?id=none").text
    assert page.get("/collectors/collector?name=none").status_code == 404
    for options in ({"mask_bodies": True}, {"masked_keys": ("host",)}):
        with asking(world.page(**options)) as masked:
            assert "no such account" not in masked.get("/collectors/collector?name=books").text


COLLECTOR = "INSERT INTO relatum.collectors (vhost, name) VALUES ('/', :name) RETURNING collector_id"
SOURCE = "INSERT INTO relatum.collector_sources (collector_id, stream) VALUES (:within, :stream) RETURNING source_id"
MESSAGE = """
INSERT INTO relatum.collected_messages (source_id, stream_offset, message_id, type, size)
VALUES (:source, :offset, :text, :text, 1)
"""


def test_what_waits_is_listed_page_by_page(world: World, database_url: str, engine: sa.Engine) -> None:
    """By stream and offset, with hostile names as text; a type without a running executor is named."""
    names = hostile_names(12)
    with engine.begin() as connection:
        collector_id = connection.scalar(sa.text(COLLECTOR), {"name": names[0]})
        source = connection.scalar(sa.text(SOURCE), {"within": collector_id, "stream": names[1]})
        rows = [{"source": source, "offset": n, "text": name} for n, name in enumerate(names)]
        connection.execute(sa.text(MESSAGE), rows)
    with asking(world.page(database=database_url)) as page:
        found = pages(page, "/collectors/collector", "results", name=names[0], state="waiting", limit=5)
        assert [row["offset"] for row in found] == list(range(len(names)))
        harmless(page.get(f"/collectors/collector?{urlencode({'name': names[0], 'state': 'waiting'})}").text)
        (status,) = page.get("/api/collectors").json()["collectors"]
        assert set(status["unattended"]) == set(names)


# --- contexts ---------------------------------------------------------------------------------------------


def test_contexts_are_shown_where_they_live(page: Asking, world: World) -> None:
    """By partition, by name, page by page; with the latest moves and who consumes."""
    (row,) = page.get("/api/contexts").json()["super_streams"]
    assert (row["super_stream"], row["header"]) == (world.placed, "order_id")
    assert [each["open_sets"] for each in row["partitions"]] == [2, 1]
    path = "/contexts/super-stream"
    names = [each["context"] for each in pages(page, path, "contexts", name=world.placed, limit=1)]
    assert names == ["a & b", "c", f"o-{HOSTILE}"]
    answer = page.get(f"/api{path}?{urlencode({'name': world.placed, 'context': 'c'})}").json()
    assert [each["partition"] for each in answer["contexts"]] == [row["partitions"][1]["stream"]]
    assert [(each["state"], each["contexts"]) for each in answer["latest"]] == [("switched", 1)]
    assert [each["name"] for each in answer["consumers"]] == ["billing"]
    shown = page.get(f"{path}?name={world.placed}").text
    hrefs = {attributes.get("href") for tag, attributes in harmless(shown).elements if tag == "a"}
    assert "/?key=order_id&value=c" in hrefs
    assert "It is nowhere" in page.get(f"{path}?name={world.placed}&context=nobody").text
    assert page.get(f"{path}?name=none").status_code == 404


@pytest.mark.parametrize(("fence_offset", "is_over"), [(0, True), (10_000, False)])
def test_a_wait_that_is_over_is_said_to_be(
    amqp_url: str, stream_url: str, database_url: str, engine: sa.Engine, fence_offset: int, is_over: bool
) -> None:
    """What waited for a partition that is consumed so far waits for it no more: it waits for a member."""
    with super_stream(amqp_url, stream_url, 2) as layout:
        name, (source, target) = layout.super_stream, (each.stream for each in layout)
        with SerializationContexts(name, database_url, broker=amqp_url, header="order_id") as contexts:
            contexts.assign(["a"], source)
            (move,) = contexts.move("a", target)
        with SerialConsumer(name, "billing", database=database_url, broker=amqp_url) as consumer:
            assert consumer.status().partitions
        with engine.begin() as connection:
            connection.execute(sa.text("UPDATE relatum.serial_positions SET position = 3"))
            held = (
                "INSERT INTO relatum.serial_holds "
                "(consumer_id, partition_id, move_id, source_id, epoch, marker_offset, cursor, fence_offset, held) "
                "SELECT p.consumer_id, p.partition_id, m.move_id, m.source_id, m.epoch, 0, 0, :fence, 2 "
                "FROM relatum.serial_positions p JOIN relatum.context_moves m ON m.target_id = p.partition_id"
            )
            connection.execute(sa.text(held), {"fence": fence_offset})
        with asking(WebOptions(amqp_url, database_url, stream_url, timeout_s=60.0)) as page:
            path = f"/contexts/super-stream?name={name}"
            (consumer_row,) = page.get(f"/api{path}").json()["consumers"]
            holds = [each for partition in consumer_row["status"]["partitions"] for each in partition["holds"]]
            assert [(each["move_id"], each["is_over"]) for each in holds] == [(move.move_id, is_over)]
            shown = page.get(path).text
            assert (f"until {source} is consumed past" in shown) is not is_over
            assert (f"{source} is consumed, and these go on once a member consumes here" in shown) is is_over
        (line,) = Relatum(amqp_url, stream_url, database_url).ok("contexts", "consumers", name, "--json").splitlines()
        holds = [each for partition in json.loads(line)["partitions"] for each in partition["holds"]]
        assert [each["is_over"] for each in holds] == [is_over]


def test_contexts_named_by_a_masked_key_are_digests(world: World) -> None:
    """Also in the link to the next page."""
    with asking(world.page(masked_keys=("order_id",))) as page:
        path = "/contexts/super-stream"
        rows = pages(page, path, "contexts", name=world.placed, limit=1)
        assert all(row["context"].startswith("~") for row in rows)
        assert len({row["context"] for row in rows}) == 3
        shown = page.get(f"{path}?name={world.placed}").text
        assert "a &amp; b" not in shown
        assert "key=order_id" not in shown


def test_pages_that_may_not_be_read_say_what_to_grant(world: World, database_url: str) -> None:
    """Each of them, and none is a fault of the page."""
    with asking(world.page(database=f"{database_url}?options=-crole%3Drelatum_router")) as page:
        for path in ("/groups", "/collectors"):
            shown = page.get(path)
            assert (shown.status_code, "GRANT relatum_reader" in shown.text) == (403, True), path
    with asking(world.page(database=f"{database_url}?options=-crole%3Drelatum_consumer")) as page:
        for path, said in (("/collectors", "no collector yet"), ("/contexts", "Nothing is placed")):
            shown = page.get(path)
            assert (shown.status_code, said in shown.text) == (200, True), path


def test_a_reader_sees_all_of_it(world: World) -> None:
    """The role that looks up may read what these pages show."""
    database = f"{world.options['database']}?options=-crole%3Drelatum_consumer"
    with asking(world.page(database=database)) as page:
        for path in ("/groups", "/collectors", "/collectors/collector?name=books", "/contexts"):
            assert page.get(path).status_code == 200, path
        assert page.get(f"/contexts/super-stream?name={world.placed}").status_code == 200


def test_a_collector_is_shown_as_soon_as_it_is_there(world: World, database_url: str, engine: sa.Engine) -> None:
    """The list of all is kept for seconds; a page that was looked at before spoils no new collector's."""
    with asking(world.page(database=database_url)) as page:
        assert page.get("/collectors").status_code == 200
        with engine.begin() as connection:
            connection.execute(sa.text(COLLECTOR), {"name": "young"})
        shown = page.get("/collectors/collector?name=young")
        assert (shown.status_code, "young" in shown.text) == (200, True)


def test_an_unknown_outcome_of_a_masked_id_has_no_link(world: World, database_url: str, engine: sa.Engine) -> None:
    """Nothing but the id could lead there, and that is masked."""
    add_keys(engine, [KeyDefinition("id", source="property:message_id", masked=True)])
    with asking(world.page(database=database_url)) as page:
        given = page.get("/api/collectors/outcome?id=strange").json()["outcomes"]
        assert [each["status"] for each in given] == ["unknown"]
        assert given[0]["message_id"].startswith("~")
        shown = page.get("/collectors/outcome?id=strange").text
        assert "of_offset=None" not in shown
        assert "strange" not in shown
