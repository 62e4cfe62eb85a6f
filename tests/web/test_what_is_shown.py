"""What the pages say of a few streams: gone ones, keys' letters, a NUL; and what they mask."""

import re
from datetime import UTC, datetime
from typing import Any
from urllib.parse import urlencode

from relatum.common.limits import TIME_US_MAX, TIME_US_MIN
from relatum.keys import KeyDefinition
from relatum.store.catalog import add_keys
from relatum_consumer import Expectation
from relatum_consumer.expectations import add_expectations
from tests.acceptance._command import Relatum
from tests.support import delete_stream, new_streams, publish_plain
from tests.support._raw_publisher import RawPublisher
from tests.support.amqp import encode, section
from tests.support.place import Place
from tests.support.web import Asking, asking, at
from tests.web.conftest import KEYS, NUMBER, SECRET, Talks, World, page_of
from tests.web.test_api import links, pages


def test_a_deleted_stream_is_not_said_to_have_expired(place: Place, own: Asking, other_stream: str) -> None:
    """Pages, documents and commands say that a stream was deleted and what to do, and never that it expired."""
    stream = place.stream
    place.put(*[(b"", {"order_id": "b", "relatum_time": second * 1_000_000}) for second in range(12)], to=other_stream)
    place.put((b"", {"order_id": "a"}), (b"", {"order_id": "b"}))
    place.record(stream, other_stream, keys=["order_id"])
    delete_stream(place.amqp, stream)
    for path in ("/search?key=order_id&value=a", "/trace?key=order_id&value=a"):
        answer = own.get(f"/api{path}").json()
        places = [(each["stream"], each["offset"]) for each in answer["deleted"]]
        assert (answer["status"], answer["expired"], places) == ("deleted", [], [(stream, 0)])
        assert f"relatum forget {stream}" in answer["advice"]
    for path in ("/?key=order_id&value=a", "/?key=order_id&value=b", "/trace?key=order_id&value=a"):
        shown = own.get(path).text
        assert "Stream deleted" in shown
        assert "Dropped by retention" not in shown
        assert at(stream) in links(own, path)
    (row,) = (each for each in own.get("/api/streams").json()["streams"] if each["stream"] == stream)
    assert row["state"] == "deleted"
    gone = own.get(at(stream, 0))
    assert (gone.status_code, f'href="{at(stream)}">The stream' in gone.text) == (404, True)
    assert f"Recorded streams: &#39;{other_stream}&#39;." in gone.text
    # It does not keep the messages nearest in time from being found.
    (near,) = own.get(f"/api{at(other_stream, 9)}").json()["related"]
    assert [each["offset"] for each in near["results"]] == [7, 8, 10, 11]
    assert "deleted: the broker no longer has it" in own.get(at(stream)).text
    unknown = own.get(at(f"never-{stream}", 0))
    assert (unknown.status_code, "All streams</a>" in unknown.text) == (404, True)
    relatum = Relatum(place.amqp, place.stream_url, place.database)
    found, trace = (relatum.run(command, "order_id", "a") for command in ("find", "trace"))
    assert (found.returncode, "deleted: a message matched" in found.stdout) == (6, True)
    assert f"relatum forget {stream}" in found.stdout
    assert (trace.returncode, "deleted: a message was" in trace.stdout) == (6, True)
    assert relatum.ok("status", stream).startswith(f"{stream}: deleted: relatum forget {stream}")


def test_a_stream_that_is_recorded_to_its_end_is_complete(place: Place, own: Asking) -> None:
    """That nobody records now is nothing to worry about until a part is not recorded; a NUL in a text is seen."""
    place.put_recorded((b"", {"order_id": "a"}), keys=["order_id"])
    for state, words in (("complete", "complete, no recorder now"), ("unattended", "a part is not recorded")):
        with asking(page_of(place)) as page:
            (row,) = page.get("/api/streams").json()["streams"]
            assert row["state"] == state
            for path in ("/streams", at(place.stream)):
                assert words in page.get(path).text
        place.put(b"later")
    place.put_recorded((b"before\0after", {"order_id": "a"}), keys=["order_id"])
    body = own.get(f"/api{at(place.stream, 3)}").json()["body"]
    assert (body["kind"], body["part"]) == ("text", "before\0after")
    assert "before⟨0⟩after" in own.get(at(place.stream, 3)).text


def test_nothing_is_claimed_of_what_is_not_recorded(place: Place, own: Asking, other_stream: str) -> None:
    """An empty stream is recorded up to no message; of one that came later, nobody knows whether it has a value."""
    place.record(place.stream, other_stream, keys=["order_id"])
    place.put((b"", {"order_id": "a"}))
    add_expectations(place.database, [Expectation("paid", place.stream, "order_id", other_stream, 1)])
    shown = own.get("/missing/expectation?name=paid&span=all").text
    assert "None is known to be missing" in shown
    assert "has a value" not in shown
    states = {row["stream"]: row["state"] for row in own.get("/api/streams").json()["streams"]}
    assert states == {place.stream: "unattended", other_stream: "complete"}
    with asking(page_of(place, broker="amqp://127.0.0.1:1")) as page:
        assert "recorded up to" not in page.get("/streams").text


def test_keys_keep_their_letters(place: Place) -> None:
    """Whatever keys come later, and wherever they are in the alphabet."""
    place.put_recorded((b"", {"order_id": "a", "about": "b"}), keys=["order_id", "zone"])

    def hues() -> dict[str, int]:
        with asking(page_of(place)) as page:
            found: list[dict[str, int]] = []
            for path in ("/", "/streams", at(place.stream, 0)):
                chips = re.findall(r'<a class="key hue(\d)" href="/\?key=(\w+)', page.get(path).text)
                found.append({key: int(hue) for hue, key in chips})
            assert all(hue == found[0][name] for hues in found for name, hue in hues.items())
            return found[0]

    before = hues()
    assert len(set(before.values())) == 2
    add_keys(place.engine, ["about"])
    after = hues()
    assert {name: after[name] for name in before} == before


def test_messages_of_the_first_and_last_moment_are_shown(place: Place, own: Asking) -> None:
    """A header may say the first or the last microsecond of all times: pages and cursors pass them."""
    ends = (TIME_US_MIN, TIME_US_MIN, TIME_US_MAX, TIME_US_MAX)
    place.put_recorded(*[(b"", {"order_id": "a", "relatum_time": end}) for end in ends], keys=["order_id"])
    for order, offsets in (("oldest", [0, 1, 2, 3]), ("newest", [3, 2, 1, 0])):
        found = pages(own, "/search", "results", key="order_id", value="a", order=order, limit=1)
        assert [each["offset"] for each in found] == offsets
    for offset in range(len(ends)):
        page = at(place.stream, offset)
        for path in (page, f"/api{page}", page.replace("/message", "/trace")):
            assert own.get(path).status_code == 200, path


def test_a_value_of_many_messages_says_how_many(place: Place, own: Asking) -> None:
    """A card counts the recorded messages up to 1,000, without those that retention dropped."""
    place.put_recorded(*[(b"", {"order_id": "a"})] * 1_000, keys=["order_id"])
    assert " of 1,000 recorded" in own.get(at(place.stream, 500)).text
    place.put_recorded((b"", {"order_id": "a"}), keys=["order_id"])
    assert " of more than 1,000" in own.get(at(place.stream, 500)).text
    place.sql("UPDATE relatum.streams SET retained_from = 400")
    assert " of 601 recorded" in own.get(at(place.stream, 500)).text


def test_a_search_without_a_result_offers_what_is_there(place: Place, own: Asking) -> None:
    """Values of the key that are like the one searched for, and the other keys that have it."""
    place.put_recorded(
        *((b"", {"order_id": value}) for value in ("N534UA", "N534UB", "N999")), (b"", {"host": "N1"}), keys=KEYS
    )
    for value, similar, other_keys in (
        ("N534UX", ["N534UB", "N534UA"], []),
        ("N534", ["N534UB", "N534UA"], []),
        ("N1", [], ["host"]),
        ("%", [], []),
    ):
        answer = own.answer("/search", key="order_id", value=value)
        assert (answer["status"], answer["similar"], answer["other_keys"]) == ("absent", similar, other_keys)
        offered = [f"/?key=order_id&value={each}" for each in similar] + [
            f"/?key={each}&value={value}" for each in other_keys
        ]
        assert set(offered) <= set(links(own, f"/?{urlencode({'key': 'order_id', 'value': value})}"))
    assert own.answer("/search", key="order_id", value="N999")["similar"] == []


def test_live_lists_what_arrived_last(place: Place, own: Asking, other_stream: str) -> None:
    """The newest arrivals come first, whatever times their messages carry, of all streams or of one."""
    place.put(*((b"%d" % n, {"relatum_time": 1_800_000_000_000_000}) for n in range(1, 6)))
    place.record(keys=["order_id"])  # it is in the log before the other is published
    place.put_recorded((b"old", {"relatum_time": 1_000_000_000_000_000}), to=other_stream, keys=["order_id"])
    for query, wanted in {
        "": ["old", "5", "4", "3", "2", "1"],
        "?limit=1": ["old"],
        f"?stream={place.stream}": ["5", "4", "3", "2", "1"],
    }.items():
        answer = own.get(f"/api/live{query}").json()
        assert [row["preview"] for row in answer["results"]] == wanted
        shown = own.get(f"/live{query}").text
        places = [shown.index(f"<code>{each}</code>") for each in wanted]
        assert places == sorted(places)


def test_busy_streams_hide_no_message_to_begin_with(place: Place, own: Asking, other_stream: str) -> None:
    """The first page has the newest message of each stream, however many came to others since."""
    place.put_recorded(b"rare", to=other_stream, keys=["order_id"])
    with new_streams(place.amqp, 2) as more:
        busy = [place.stream, *more]
        for stream in busy:
            publish_plain(place.amqp, stream, [b"busy"] * 200, confirm=False)
        place.record(*busy, keys=["order_id"])
        assert {at(other_stream, 0), at(busy[2], 199)} <= set(links(own, "/"))
        assert "The newest of each stream" in own.get("/").text


def named(rows: list[dict[str, Any]]) -> dict[str, str]:
    return {row.get("name", row.get("key")): row.get("text", row.get("value")) for row in rows}


def test_a_key_masked_by_definition_is_a_digest_that_can_be_followed(masked: str, own: Asking) -> None:
    """A masked key is a digest in headers and in each key that shares it, and its link finds the same messages."""
    answer = own.get(f"/api{at(masked, 0)}").json()
    headers, keys = named(answer["headers"]), named(answer["keys"])
    digest = keys["card"]
    assert (digest[0], len(digest)) == ("~", 11)
    assert headers["card"] == headers["paid_by"] == keys["again"] == keys["paid_by"] == digest
    assert keys["at"].startswith("~")
    assert headers["number"] == keys["number"] != digest
    assert headers["shop"] == keys["shop"] == "north"
    assert answer["body"]["kind"] == "masked"
    assert own.get(at(masked, 0, "body")).status_code == 403
    assert own.get(f"/api{at(masked, 3)}").json()["body"]["part"] == "shown"
    seen = {row["name"]: row["is_masked"] for row in own.get("/api/keys").json()["keys"]}
    assert seen == {"card": True, "again": True, "at": True, "number": True, "paid_by": True, "shop": False}
    for key, prefix in [("card", "4"), ("again", "4"), ("number", ""), ("paid_by", SECRET)]:
        listed = own.get(f"/api/values?key={key}&prefix={prefix}").json()
        assert listed == {"values": [], "reason": "values of a masked key are not listed"}
    for key in keys.keys() - {"shop"}:
        follow = f"?key={key}&of_stream={masked}&of_offset=0"
        assert f"/{follow}" in links(own, at(masked, 0))
        found = own.get(f"/api/search{follow}").json()
        assert [row["offset"] for row in found["results"] if row["offset"] in (1, 2)] == [1, 2], follow
        assert (found["value"], {row["preview"] for row in found["results"][:2]}) == (keys[key], {""})


def test_no_page_and_no_answer_has_a_masked_value(place: Place, masked: str, own: Asking) -> None:
    """No document, page or file has a masked value, whichever path of the API it belongs to."""
    add_expectations(place.database, Expectation("paid", masked, "card", masked, 60))
    of_message, of_key = f"stream={masked}&offset=0", f"of_stream={masked}&of_offset=0"
    asked = {
        "/search": [f"?key={key}&{of_key}" for key in ("card", "again", "at", "number", "paid_by", "shop")]
        + [f"?key=card&value={SECRET[:-1]}", "?key=number&value=43", f"?key=shop&value={SECRET[:-1]}"],
        "/trace": [f"?{of_message}", f"?{of_message}&fan_out=1", "?key=shop&value=north"],
        "/message": [f"?{of_message}", f"?{of_message}&view=text", f"?{of_message}&view=hex"],
        "/message/body": [f"?{of_message}"],
        "/stream": [f"?stream={masked}"],
        "/missing/expectation": ["?name=paid&span=all"],
        "/live": ["", f"?stream={masked}"],
        "/groups/group": [f"?{of_key}"],
        "/collectors/collector": ["?name=none"],
        "/contexts/super-stream": ["?name=none"],
        "/values": ["?key=card", "?key=number"],
    }
    for path in sorted({*own.get("/api/openapi.json").json()["paths"], *asked}):
        for query in asked.get(path, [""]):
            for shown in ("/" if path == "/search" else path, f"/api{path}"):
                text = own.get(f"{shown}{query}").text
                assert SECRET not in text, (shown, query)
                assert NUMBER not in text, (shown, query)


def test_a_digest_is_the_same_in_each_process_and_whatever_is_typed(place: Place, masked: str, own: Asking) -> None:
    """So is that of a value typed in, however it is written; a digest is followed by its link."""
    with asking(page_of(place)) as other:
        keys = named(own.get(f"/api{at(masked, 0)}").json()["keys"])
        assert named(other.get(f"/api{at(masked, 1)}").json()["keys"]) == keys
        typed: list[tuple[str, list[str]]] = [("card", [SECRET]), ("number", ["42"]), ("at", [SECRET, "north"])]
        for key, value in typed:
            answer = other.get(f"/api/search?{urlencode({'key': key, 'value': value}, doseq=True)}").json()
            assert (answer["value"], len(answer["results"])) == (keys[key], 3)


def test_options_show_bodies_and_mask_more_keys(place: Place, masked: str) -> None:
    """`--show-bodies` shows all bodies, and `--mask` masks keys beside those that are defined so."""
    with asking(page_of(place, show_bodies=True)) as page:
        assert SECRET in page.get(f"/api{at(masked, 0)}").json()["body"]["part"]
        assert page.get(at(masked, 0, "body")).status_code == 200
    with asking(page_of(place, masked_keys=("shop",))) as page:
        answer = page.get(f"/api{at(masked, 3)}").json()
        assert named(answer["headers"])["shop"] == named(answer["keys"])["shop"] != "north"
        assert answer["body"]["kind"] == "masked"


def test_what_names_an_expectation_a_group_or_a_context_is_masked(world: World) -> None:
    """Masked values of expectations, groups and contexts are digests on each page and in its links."""
    with asking(world.page(masked_keys=("card", "order_id", "host", "message_group"))) as page:
        (late, *_) = pages(page, "/missing/expectation", "results", name="swift", span="all")
        assert late["value"].startswith("~")
        rows = pages(page, "/groups", "groups", show="all", limit=2)
        assert [row["position"]["seen"] for row in rows] == [2, 3, 3, 3]
        link = next(each for each in links(page, "/groups") if each.startswith("/groups/group?of_stream="))
        assert [each["sequence"] for each in page.get(f"/api{link}").json()["results"]] == [2, 4]
        contexts = pages(page, "/contexts/super-stream", "contexts", name=world.placed, limit=1)
        assert len({row["context"] for row in contexts if row["context"].startswith("~")}) == 3
        paths = ["/groups?limit=1", "/groups?show=all&limit=2", link, "/missing/expectation?name=swift&span=all"]
        paths += ["/collectors/collector?name=books", f"/contexts/super-stream?name={world.placed}", "/live"]
        secrets = ["000000", SECRET, "o-<img", "o-&lt;img", "no such account"]
        secrets += ["a &amp; b", '"a & b"', "order_id&amp;value"]
        for path in paths:
            for text in (page.get(path).text, page.get(f"/api{path}").text):
                assert not [secret for secret in secrets if secret in text], path


def test_a_conversation_has_no_masked_value_in_any_form(talks: Talks) -> None:
    """Neither in edges nor in values, tables and titles; its digest still leads to all that share it."""
    with asking(talks.page(masked_keys=("card", "order_id", "cause", "id", "place"))) as page:
        query = f"stream={talks.orders}&offset=0"
        forms = [page.get(f"{path}?{query}").text for path in ("/api/trace", "/trace")]
        secrets = [SECRET, "onerror=hacked", "HYPERLINK", "nobody"]
        assert [text for text in secrets for form in forms if text in form] == []
        answer = page.get(f"/api/trace?{query}").json()
        shared = next(each for each in answer["shared"] if each["key"] == "card")
        assert (shared["value"][0], shared["value"] in forms[1]) == ("~", True)
        link = next(each for each in links(page, f"/trace?{query}") if each.startswith("/?key=card&of_stream="))
        assert len(page.get(f"/api/search{link[1:]}").json()["results"]) >= 1
        # The links of an effect lead to its cause, which has no value of the key that names it.
        for link in links(page, f"/trace?{urlencode({'stream': talks.payments, 'offset': 0})}"):
            assert page.get(link).status_code == 200 or not link.startswith("/?"), link
        stopped = page.get("/api/trace?key=order_id&value=talk-200&fan_out=7").json()["stopped"]
        assert stopped
        assert all(each["value"].startswith("~") for each in stopped if each["key"])


def test_a_binary_body_is_whole_unless_the_page_says_otherwise(place: Place, own: Asking) -> None:
    """Each line of hexadecimal is shown."""
    place.put_recorded(b"\xff" * 5_000, keys=["order_id"])
    shown = own.get(at(place.stream, 0)).text
    assert "00001380" in shown
    assert "Only the beginning" not in shown


def test_an_empty_value_is_followed_by_its_message(place: Place, own: Asking) -> None:
    """An address has no empty value, so its link names the message."""
    place.put_recorded(*[(b"", {"order_id": ""})] * 2, keys=["order_id"])
    link = f"/?key=order_id&of_stream={place.stream}&of_offset=0"
    assert link in links(own, at(place.stream, 0))
    assert [row["offset"] for row in own.get(f"/api/search{link[1:]}").json()["results"]] == [1]


def test_a_conversation_leads_to_the_value_that_it_shows(place: Place, own: Asking) -> None:
    """Also where a message has several masked values of the key."""
    key = KeyDefinition("sku", source="body:$.skus[*]", masked=True)
    place.put_recorded(b'{"skus": ["a", "b"]}', b'{"skus": ["b"]}', keys=[key])
    found = [each for each in links(own, f"/trace?stream={place.stream}&offset=1") if each.startswith("/?key=sku")]
    assert found == [f"/?key=sku&of_stream={place.stream}&of_offset=0&of_value=1"]


def test_headers_of_several_values_are_json(place: Place, own: Asking) -> None:
    """Lists and tables are written as JSON, with times in ISO 8601: readers and programs need no Python."""
    header = {"a": 'say "é"', "at": datetime(2026, 11, 22, tzinfo=UTC), "items": [1, None, True, 2**62]}
    with RawPublisher(place.stream_url, place.stream) as publisher:
        publisher.publish(section(0x74, encode({"x-table": header, "x-list": [header]})) + section(0x75, encode(b"")))
    shown = '{"a": "say \\"é\\"", "at": "2026-11-22T00:00:00+00:00", "items": [1, null, true, 4611686018427387904]}'
    headers = {
        each["name"]: (each["type"], each["text"])
        for each in own.answer("/message", stream=place.stream, offset=0)["headers"]
    }
    assert headers == {"x-table": ("dict", shown), "x-list": ("list", f"[{shown}]")}
