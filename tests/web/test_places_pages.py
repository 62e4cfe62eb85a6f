"""The pages of groups, collectors, contexts and what is missing: what the commands show, with links, page by page."""

import html
import json
from urllib.parse import urlencode

import pytest

from relatum import SerialConsumer, SerializationContexts
from relatum.keys import KeyDefinition
from relatum.membership import GROUP_KEY
from relatum.store.catalog import add_keys
from relatum_consumer import Relations
from relatum_consumer.web import groups, missing
from tests.acceptance._command import Relatum
from tests.support import wait_until
from tests.support.groups import group_id, of_group, whole_group
from tests.support.place import Place
from tests.support.super_streams import super_stream
from tests.support.web import Asking, asking, at
from tests.web.conftest import BODIES, FAILED, GROUPED, HOSTILE, MANY, TAKEN, World, page_of
from tests.web.test_api import harmless, hostile_names, links, pages


def test_groups_that_are_not_whole_say_what_they_lack(page: Asking, world: World) -> None:
    """Listed by age with what they lack, the contradictory ones last; a group's page lists its messages by number."""
    answer = page.get("/api/groups").json()
    assert (answer["incomplete"], answer["contradictory"]) == (2, 1)
    facts = [each["position"] for each in answer["groups"]]
    assert [each["group_id"] for each in facts] == [group_id(4), group_id(2), group_id(3)]
    assert [each["missing"] for each in facts[:2]] == [[[1, 1], [3, 3]], [[3, 4]]]
    assert [each["last_sequence"] for each in facts] == [4, None, 1]
    text = page.get("/groups").text
    harmless(text)
    assert text.count("incomplete: numbers are missing") == 2
    assert "contradictory: two messages are marked as the last" in text
    for each in answer["groups"]:
        place = each["places"][0]
        shown = page.get(at(**place)).text
        assert "Its message group" in shown
        assert world.payments in html.unescape(shown), "a name that is hostile"
        harmless(shown)
        assert page.get(f"/api{at(**place)}").json()["is_in_group"]
        of_message = urlencode({"of_stream": place["stream"], "of_offset": place["offset"]})
        found = page.get(f"/api/groups/group?{of_message}").json()["group"]["group_id"]
        assert found == each["group_id"]
    rows = page.get("/api/groups?limit=2").json()["groups"]
    assert [row["group_id"] for row in rows] == [each["group_id"] for each in facts[:2]]
    assert "and 1 more" in page.get("/groups?limit=2").text
    whole = page.get(f"/api/groups/group?id={group_id(1)}").json()
    assert (whole["group"]["contiguous"], [each["sequence"] for each in whole["results"]]) == (3, [1, 2, 3])
    assert [each["is_last"] for each in whole["results"]] == [False, False, True]
    assert "The group has no messages" in page.get(f"/groups/group?id={group_id(9)}").text


def test_what_is_not_recorded_by_the_key_of_groups_is_named_and_not_read(
    place: Place, own: Asking, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Messages recorded before the key of groups are named as unrecorded, with the command that adds them."""
    monkeypatch.setattr(groups, "UNRECORDED_READ", 10)
    place.put_recorded(*whole_group(1, 20), of_group(2, 1), keys=["order_id"])
    add_keys(place.engine, [GROUP_KEY])
    place.put_recorded(of_group(2, 3))
    for path in ("/groups?older_s=0&show=unfinished", "/groups?older_s=0&show=all"):
        answer = own.get(f"/api{path}").json()
        assert [row["group_id"] for row in answer["groups"]] == [group_id(2)]
        assert [(each["stream"], each["start"]) for each in answer["unrecorded"]] == [(place.stream, 0)]
        text = own.get(path).text
        assert "relatum backfill" in text
        harmless(text)
    shown = own.get(f"/api/groups/group?id={group_id(2)}").json()
    assert (len(shown["results"]), shown["group"]["is_proven"]) == (1, False)


def test_without_the_key_of_groups_it_says_how_to_define_it(own: Asking) -> None:
    """Without the key of groups their list is empty, one group is not found, and both name the command."""
    for path, status in (("/groups", 200), (f"/groups/group?id={group_id(1)}", 404)):
        shown = own.get(path)
        assert (shown.status_code, "<code>relatum keys add message_group" in shown.text) == (status, True)
        assert "`" not in shown.text
        assert own.get(f"/api{path}").json()["error"]["code"] == "key_not_defined"


def test_a_consumer_of_groups_is_shown(own: Asking, place: Place) -> None:
    """The page shows a consumer of groups with its groups in each state."""
    place.put_recorded(*GROUPED, keys=[GROUP_KEY])
    with Relations(place.broker, place.database) as relations:
        given = list(relations.groups(place.stream, consumer=f"billing {HOSTILE}", on_conflict="skip"))
        assert [each.group_id for each in given] == [group_id(1)]
        assert f"billing {HOSTILE}" in relations.group_consumers()
    ((name, status),) = own.get("/api/groups").json()["consumers"].items()
    assert (name, status["counts"]["open"]) == (f"billing {HOSTILE}", 2)
    harmless(own.get("/groups").text)


def test_collectors_are_shown_with_what_became_of_messages(page: Asking, world: World) -> None:
    """Counts by state, members and positions; a message has its outcome, with a reason unless bodies are masked."""
    (row,) = page.get("/api/collectors").json()["collectors"]
    counts = {"collected": 0, "forwarded": 0, "succeeded": TAKEN - FAILED, "failed": FAILED, "dead": 0}
    assert row["counts"] == counts
    assert [(each["stream"], each["position"]) for each in row["sources"]] == [(world.payments, TAKEN)]
    harmless(page.get("/collectors").text)
    first = page.get("/api/collectors/collector?name=books").json()["results"][0]
    place = at(first["stream"], first["offset"])
    assert page.get(f"/api{place}").json()["outcomes"] == [first]
    shown = page.get(place).text
    harmless(shown)
    assert "no such account" in shown
    assert page.get(f"/api{at(world.orders, 0)}").json()["outcomes"] == []
    with asking(world.page(mask_bodies=True)) as masked:
        for path in ("/collectors/collector?name=books", place):
            assert "no such account" not in masked.get(path).text


@pytest.mark.parametrize("limit", [1, 3, 1000])
def test_what_failed_is_listed_with_why(page: Asking, limit: int) -> None:
    """All of them, however many succeeded; and each that succeeded."""
    whole = page.get("/api/collectors/collector?name=books&limit=1000").json()
    assert (len(whole["results"]), whole["next"]) == (FAILED, None)
    failed = pages(page, "/collectors/collector", "results", name="books", limit=limit)
    assert sorted(row["offset"] for row in failed) == list(range(FAILED))
    assert {row["reason"] for row in failed} == {f"no such account: {HOSTILE}"}
    good = pages(page, "/collectors/collector", "results", name="books", limit=limit, state="succeeded")
    assert sorted(row["offset"] for row in good) == list(range(FAILED, TAKEN))
    assert pages(page, "/collectors/collector", "results", name="books", limit=limit, state="waiting") == []


COLLECTOR = "INSERT INTO relatum.collectors (vhost, name) VALUES ('/', :name) RETURNING collector_id"
SOURCE = "INSERT INTO relatum.collector_sources (collector_id, stream) VALUES (:within, :stream) RETURNING source_id"
MESSAGE = """
INSERT INTO relatum.collected_messages (source_id, stream_offset, message_id, type, size)
VALUES (:source, :offset, :text, :text, 1)
"""


def test_what_waits_is_listed_page_by_page(own: Asking, place: Place) -> None:
    """A collector is shown once it is there, and lists what waits page by page, hostile names as text or as digests."""
    names = hostile_names(12)
    # The list of all collectors is cached for seconds.
    assert own.get("/collectors").status_code == 200
    ((collector_id,),) = place.sql(COLLECTOR, name=names[0])
    ((source_id,),) = place.sql(SOURCE, within=collector_id, stream=names[1])
    for offset, name in enumerate(names):
        place.sql(MESSAGE, source=source_id, offset=offset, text=name)
    shown = own.get(f"/collectors/collector?{urlencode({'name': names[0]})}")
    assert (shown.status_code, HOSTILE[:20] in html.unescape(shown.text)) == (200, True)
    found = pages(own, "/collectors/collector", "results", name=names[0], state="waiting", limit=5)
    assert [row["offset"] for row in found] == list(range(len(names)))
    harmless(own.get(f"/collectors/collector?{urlencode({'name': names[0], 'state': 'waiting'})}").text)
    (status,) = wait_until(lambda: own.get("/api/collectors").json()["collectors"], what="the list is asked anew")
    assert set(status["unattended"]) == set(names)
    add_keys(place.engine, [KeyDefinition("id", source="property:message_id", masked=True)])

    def is_masked() -> bool:
        rows = pages(own, "/collectors/collector", "results", name=names[0], state="waiting")
        return {row["message_id"][0] for row in rows} == {"~"}

    wait_until(is_masked, what="the page knows the key")


def test_contexts_are_shown_where_they_live(page: Asking, world: World) -> None:
    """Contexts are shown by partition and, page by page, by name, with the latest moves and the consumers."""
    (row,) = page.get("/api/contexts").json()["super_streams"]
    assert (row["super_stream"], row["header"]) == (world.placed, "order_id")
    assert [each["open_sets"] for each in row["partitions"]] == [2, 1]
    path = "/contexts/super-stream"
    names = [each["context"] for each in pages(page, path, "contexts", name=world.placed, limit=1)]
    assert names == ["a & b", "c", f"o-{HOSTILE}"]
    answer = page.get(f"/api{path}?{urlencode({'name': world.placed, 'context': 'c'})}").json()
    assert [each["partition"] for each in answer["contexts"]] == [row["partitions"][1]["stream"]]
    assert [(each["state"], each["contexts"]) for each in answer["latest"]] == [("switched", 1)]
    assert list(answer["consumers"]) == ["billing"]
    assert "/?key=order_id&value=c" in links(page, f"{path}?name={world.placed}")
    assert "The context has no partition" in page.get(f"{path}?name={world.placed}&context=nobody").text
    assert page.get(f"/api{path}?name={world.placed}&cursor={2**63 - 1}").json()["contexts"] == []


HOLD = """
INSERT INTO relatum.serial_holds
    (consumer_id, partition_id, move_id, source_id, epoch, marker_offset, cursor, fence_offset, held)
SELECT p.consumer_id, p.partition_id, m.move_id, m.source_id, m.epoch, 0, 0, 0, 2
FROM relatum.serial_positions p JOIN relatum.context_moves m ON m.target_id = p.partition_id
"""


def test_a_wait_that_is_over_is_said_to_be(place: Place) -> None:
    """A hold is over once its source is consumed past the fence, and then waits for a member only."""
    relatum = Relatum(place.amqp, place.stream_url, place.database)
    with super_stream(place.broker, 2) as layout:
        name, (source, target) = layout.super_stream, (each.stream for each in layout)
        with SerializationContexts(name, place.database, broker=place.amqp, header="order_id") as contexts:
            contexts.assign(["a"], source)
            (move,) = contexts.move("a", target)
        with SerialConsumer(name, "billing", database=place.database, broker=place.amqp) as consumer:
            assert consumer.status().partitions
        place.sql("UPDATE relatum.serial_positions SET position = 3")
        # The member may have met the move before it ended.
        place.sql("DELETE FROM relatum.serial_holds")
        place.sql(HOLD)
        for fence_offset, is_over in ((0, True), (10_000, False)):
            place.sql("UPDATE relatum.serial_holds SET fence_offset = :at", at=fence_offset)
            with asking(page_of(place)) as page:
                path = f"/contexts/super-stream?name={name}"
                (status,) = page.get(f"/api{path}").json()["consumers"].values()
                shown = page.get(path).text
            holds = [each for partition in status["partitions"] for each in partition["holds"]]
            assert [(each["move_id"], each["is_over"]) for each in holds] == [(move.move_id, is_over)]
            assert (f"until {source} is consumed past" in shown) is not is_over
            assert (f"{source} is consumed; these continue once a member consumes this partition" in shown) is is_over
            (line,) = relatum.ok("contexts", "consumers", name, "--json").splitlines()
            holds = [each for partition in json.loads(line)["partitions"] for each in partition["holds"]]
            assert [each["is_over"] for each in holds] == [is_over]


def test_pages_that_may_not_be_read_or_are_empty_say_what_to_do(place: Place) -> None:
    """What to grant, or how to begin; none is a fault of the page."""
    paths = ("/groups", "/collectors", "/missing", "/contexts")
    for role, status, said in (
        ("router", 403, ["GRANT relatum_reader"] * 3),
        ("consumer", 200, ["No group key is defined yet", "no collector yet", "relatum expect add", "No contexts are"]),
    ):
        with asking(page_of(place, database=f"{place.database}?options=-crole%3Drelatum_{role}")) as page:
            for path, words in zip(paths, said, strict=False):
                shown = page.get(path)
                assert (shown.status_code, words in shown.text) == (status, True), path


NAMES = ["answered <b>", "paid", "patient", "shelved", "swift"]


def test_expectations_are_counted(page: Asking, world: World) -> None:
    """By name; what has time left is not known; a span without messages has no green tick and a link to all times."""
    answer = page.get("/api/missing?span=all").json()
    rows = {row["expectation"]["name"]: row for row in answer["expectations"]}
    assert (list(rows), answer["total"]) == (NAMES, len(NAMES))
    counts = ("status", "missing_count", "late_count", "not_known_count")
    found = {name: tuple(row["report"][each] for each in counts) for name, row in rows.items()}
    assert (found["answered <b>"], found["swift"]) == (("found", MANY, 0, 0), ("found", 0, len(BODIES), 0))
    assert (found["paid"], found["patient"]) == (("absent", 0, 0, 0), ("absent", 0, 0, MANY))
    assert rows["patient"]["words"] == f"nothing is missing so far: there is time left ({MANY} are not due yet)"
    text = page.get("/missing?span=all").text
    assert rows["paid"]["words"] in text
    wanted = {f"/missing/expectation?{urlencode({'name': name, 'span': 'all'})}" for name in rows}
    assert wanted <= set(links(page, "/missing?span=all"))
    patient = page.answer("/missing/expectation", span="all", name="patient")
    assert (patient["finding"], {row["why"] for row in patient["results"]}) == ("not_known", {"not_due"})
    assert page.answer("/missing/expectation", span="all", name="patient", finding="missing")["results"] == []
    assert "None is missing" in page.get("/missing/expectation?name=patient&span=all&finding=missing").text
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


def test_what_came_late_names_it_and_leads_to_it(page: Asking, world: World) -> None:
    """A late answer is listed with both messages and its delay, and each row links to messages that share its value."""
    answer = page.answer("/missing/expectation", span="all", name="swift")
    assert answer["finding"] == "late"
    row = answer["results"][0]
    assert (row["id"]["stream"], row["came"]["stream"]) == (world.orders, world.payments)
    assert "late by 0.4 ms" in page.get("/missing/expectation?name=swift&span=all").text
    same = f"/?{urlencode({'key': 'card', 'value': row['value']})}"
    wanted = {same, at(**row["id"]), at(**row["came"])}
    assert wanted <= set(links(page, "/missing/expectation?name=swift&span=all"))
    hrefs = links(page, "/missing/expectation?name=shelved&span=all")
    composite = next(each for each in hrefs if each.startswith("/?key=place&of_stream="))
    assert len(page.get(f"/api/search{composite[1:]}").json()["results"]) == len(BODIES) - 1


def test_counts_that_take_too_long_are_said_to_be_none(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A list whose counts take too long is shown without them, and says to ask for a shorter span."""
    monkeypatch.setattr(missing, "COUNTED_S", 0.000_001)
    with asking(world.page()) as page:
        rows = page.get("/api/missing?span=all").json()["expectations"]
        assert {row["report"] for row in rows} == {None}
        assert all("shorter span" in row["words"] for row in rows)
        assert not any(".." in row["words"] for row in rows)
        assert page.get("/missing?span=all").status_code == 200


def test_a_message_has_only_its_own_outcomes(place: Place, own: Asking) -> None:
    """Not those at its offset in another virtual host, or of an earlier stream of its name; also with an endless id."""
    place.put_recorded(b"", keys=["order_id"])
    ((collector_id,),) = place.sql(COLLECTOR, name="books")
    ((source_id,),) = place.sql(SOURCE, within=collector_id, stream=place.stream)
    place.sql(MESSAGE, source=source_id, offset=0, text=f"{place.stream}:0")
    for change, count in (
        ("UPDATE relatum.collectors SET vhost = 'other'", 0),
        ("UPDATE relatum.collectors SET vhost = '/'", 1),
        ("UPDATE relatum.collector_sources SET replaced_at = now()", 0),
        ("UPDATE relatum.collector_sources SET replaced_at = NULL", 1),
        ("UPDATE relatum.collected_messages SET message_id = 'of another message'", 0),
    ):
        place.sql(change)
        assert len(own.get(f"/api{at(place.stream, 0)}").json()["outcomes"]) == count, change


def test_groups_of_other_streams_hide_none(place: Place, own: Asking, other_stream: str) -> None:
    """The list of a stream's groups continues behind any number of newer groups of other streams."""
    place.put_recorded(of_group(1, 1), keys=[GROUP_KEY])
    place.put_recorded(*(of_group(number, 1) for number in range(2, 14)), to=other_stream, keys=[GROUP_KEY])
    rows = pages(own, "/groups", "groups", show="all", stream=place.stream, limit=1)
    assert [row["group_id"] for row in rows] == [group_id(1)]
