"""The page and its API on real servers: what is asked and answered, with OpenAPI, masks and servers that are away."""

import base64
import html
from html.parser import HTMLParser
from typing import Any
from urllib.parse import urlencode

import psycopg
import pytest

from relatum.store.catalog import add_keys
from tests.support.groups import group_id
from tests.support.place import Place
from tests.support.web import Asking, at
from tests.web.conftest import BODIES, GROUPED, HOSTILE, KEYS, MANY, TAKEN, World


class Markup(HTMLParser):
    """What a browser would make of a page: its elements, with their attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))


def harmless(text: str) -> Markup:
    """The markup of a page in which nothing of others is anything but text."""
    markup = Markup(text)
    for tag, attributes in markup.elements:
        assert not any(name.startswith("on") or name == "style" for name in attributes), (tag, attributes)
        assert tag not in ("iframe", "object", "embed", "base"), tag
        if tag == "script":
            assert (attributes.get("src") or "").startswith("/static/"), attributes
        for name in ("href", "src", "action"):
            target = attributes.get(name)
            assert target is None or target == "" or (target[0] in "/#" and not target.startswith("//")), attributes
    return markup


def links(page: Asking, path: str) -> list[str]:
    elements = harmless(page.get(path).text).elements
    return [attributes.get("href") or "" for tag, attributes in elements if tag == "a"]


def test_a_search_finds_what_shares_a_value(page: Asking, world: World) -> None:
    """A search finds the messages of all streams by time, or those of a span of time or of the streams named."""
    answer = page.answer("/search", key="order_id", value=f"o-{HOSTILE}")
    assert (answer["status"], len(answer["results"])) == ("found", len(BODIES) + 12)
    assert set(answer["streams"]) == {world.orders, world.payments}
    assert {row["stream"] for row in answer["results"]} == {world.orders, world.payments}
    assert [row["time"] for row in answer["results"]] == sorted(row["time"] for row in answer["results"])
    since, until = "2023-11-14T22:13:21Z", "2023-11-14T22:13:22Z"
    bounded = page.answer("/search", key="host", value="busy", since=since, until=until, limit=1000)
    assert len(bounded["results"]) == 60
    named = page.answer("/search", key="order_id", value=f"o-{HOSTILE}", stream=world.payments)
    assert {row["stream"] for row in named["results"]} == {world.payments}
    assert named["streams"] == [world.payments]


def pages(page: Asking, path: str, part: str, **query: Any) -> list[dict[str, Any]]:
    """What all pages of a list have together; each but the last is full."""
    rows: list[dict[str, Any]] = []
    cursor: str | None = ""
    while cursor is not None:
        answer = page.answer(path, cursor=cursor, **query)
        rows += answer[part]
        cursor = answer["next"]
        # A page scans only some of a collector's messages.
        is_full = len(answer[part]) == query.get("limit") or path == "/collectors/collector"
        assert cursor is None or is_full
    return rows


LISTS: list[tuple[str, str, dict[str, Any], list[int]]] = [
    ("/search", "results", {"key": "host", "value": "busy", "order": "oldest"}, [7, 60, 229, 230]),
    ("/search", "results", {"key": "host", "value": "busy", "order": "newest"}, [7, 229]),
    ("/missing/expectation", "results", {"name": "answered <b>", "span": "all"}, [7, 60, 229, 230]),
    ("/groups", "groups", {"show": "all"}, [2]),
    ("/groups/group", "results", {"id": group_id(2)}, [2]),
    ("/collectors/collector", "results", {"name": "books", "state": "succeeded"}, [3, 5]),
]


@pytest.mark.parametrize(("path", "part", "query", "limits"), LISTS, ids=lambda value: str(value)[:40])
def test_pages_together_are_the_whole_and_each_row_once(
    page: Asking, path: str, part: str, query: dict[str, Any], limits: list[int]
) -> None:
    """Also where more messages than a page has are of one moment."""

    def shown(row: dict[str, Any]) -> Any:
        return row.get("group_id", row.get("id", row).get("offset"))

    whole = [shown(row) for row in page.answer(path, limit=1000 if part == "results" else 50, **query)[part]]
    assert len(whole) > max(limits) - 1
    for limit in limits:
        assert [shown(row) for row in pages(page, path, part, limit=limit, **query)] == whole


def test_pages_of_an_expectation_end_where_its_report_does(page: Asking, monkeypatch: pytest.MonkeyPatch) -> None:
    """A report has at most 100,000 messages, here 60: the page that reaches them is the last."""
    for module in ("_missing", "web.missing"):
        monkeypatch.setattr(f"relatum_consumer.{module}.ANSWER_MESSAGES_MAX", 60, raising=False)
    assert len(pages(page, "/missing/expectation", "results", limit=30, name="answered <b>", span="all")) == 60


def test_values_are_listed_as_they_begin(page: Asking) -> None:
    """The first that begin with what was typed; a key of several parts lists none and takes a value for each part."""
    for query, values, reason in (
        ({"key": "host", "prefix": "bu"}, ["busy"], ""),
        ({"key": "order_id"}, [f"o-{HOSTILE}"], ""),
        ({"key": "order_id", "prefix": "x"}, [], ""),
        ({"key": "place"}, [], "values of several parts are not listed"),
    ):
        assert page.answer("/values", **query) == {"values": values, "reason": reason}
    assert page.get("/api/values?key=host&limit=101").status_code == 400
    assert len(page.answer("/search", key="place", value=["a|b", "7"])["results"]) == len(BODIES)
    refused = page.get("/?key=place&value=a")
    assert refused.status_code == 400
    field = {"name": "value", "value": "a", "autocomplete": "off", "spellcheck": "false"}
    assert harmless(refused.text).elements.count(("input", field)) == 1
    assert refused.text.count('name="value"') == 2


def test_that_a_message_was_found_itself_proves_nothing_of_others(place: Place, own: Asking) -> None:
    """A search from a message is absent where no other shares its value, and unproven while one is unrecorded."""
    place.put_recorded((b"one", {"host": "lonely"}), keys=KEYS)
    path = f"/api/search?key=host&of_stream={place.stream}&of_offset=0"
    alone = own.get(path).json()
    assert (alone["status"], alone["results"], alone["streams"]) == ("absent", [], [place.stream])
    assert "no other message has this value" in own.get(path.replace("/api/search", "/")).text
    place.put((b"two", {"host": "lonely"}))
    behind = own.get(path).json()
    assert (behind["status"], behind["results"]) == ("not_recorded_yet", [])
    assert behind["unrecorded_streams"] == [place.stream]
    assert own.get(f"{path}&complete=1").json()["results"][0]["offset"] == 1


def test_a_new_key_is_named_with_what_cures_it(place: Place, own: Asking) -> None:
    """Each view names a key that is newer than the messages, and the command that looks at them for it."""
    place.put_recorded((b"one", {"order_id": "a", "host": "h"}), (b"two", {"order_id": "a"}), keys=["order_id"])
    add_keys(place.engine, ["host"])
    told = f"'host' is a new key: older messages of '{place.stream}' are not recorded for it: "
    told += "relatum backfill --keys host"
    conversation, message = f"/trace?stream={place.stream}&offset=0", at(place.stream, 0)
    trace = own.get(f"/api{conversation}").json()
    assert (trace["status"], len(trace["messages"])) == ("found", 2)
    assert [each["key"] for each in trace["new_keys"]] == ["host"]
    assert (trace["words"], trace["advice"]) == ("found: this is all by the older keys", told)
    search = own.get("/api/search?key=host&value=h").json()
    assert (search["status"], search["words"]) == ("not_recorded_yet", f"not recorded yet: {told}")
    words = {each["key"]["key"]: each["words"] for each in own.get(f"/api{message}").json()["related"]}
    assert words == {"order_id": "found", "host": f"not recorded yet: {told}"}
    for path in (conversation, "/?key=host&value=h", message):
        text = html.unescape(own.get(path).text)
        assert ("Also read what is not recorded yet" in text) == (path != message)
        assert (text.count("relatum backfill --keys host"), "obody records" in text) == (1, False)
    add_keys(place.engine, ["unused"])
    again = own.get(f"/api/trace?stream={place.stream}&offset=1").json()
    assert [each["key"] for each in again["new_keys"]] == ["host"]


def test_nothing_found_is_said_with_what_is_known(page: Asking, world: World) -> None:
    """Absent where it is proven; not recorded yet where a part of the stream is not, and found once that is read."""
    absent = page.answer("/search", key="order_id", value="nobody", stream=world.payments)
    assert (absent["status"], absent["results"]) == ("absent", [])
    unknown = page.answer("/search", key="order_id", value="late")
    assert (unknown["status"], unknown["unrecorded_streams"]) == ("not_recorded_yet", [world.orders])
    assert "no recorder runs for" in unknown["advice"]
    complete = page.answer("/search", key="order_id", value="late", complete=1)
    assert [row["preview"] for row in complete["results"]] == ["later"]
    for query, may_help in (
        ({"key": "order_id", "value": "nobody", "stream": world.payments}, False),
        ({"key": "order_id", "value": "late"}, True),
    ):
        shown = page.get(f"/?{urlencode(query)}").text
        assert page.answer("/search", **query)["words"] in shown
        assert ("Also read what is not recorded yet" in shown) == may_help


_AT = "stream=orders&offset=1"
_CURSOR = base64.urlsafe_b64encode(b'["9",-1,1]').decode()
_SPAN = "since=2026-01-02&until=2026-01-01"
_LONG = "x" * 3000
INVALID = {
    "/search?": ["", "key=order_id", "key=order_id&valeu=1", "key=order_id&value=a%00b"],
    "/search?key=order_id&value=1&": [
        *("limit=1001", "limit=0", "limit=1e1", "limit=%C2%B2", f"limit={'9' * 5_000}", "limit=1&limit=2"),
        *(
            "since=yesterday",
            "since=1764489600",
            "until=9999-12-31T23:59:59-14:00",
            "complete=maybe",
            "cursor=%7B%7D",
            f"cursor={_CURSOR}",
            _SPAN,
        ),
    ],
    "/trace?": ["offset=1", "key=order_id", "value=1", "stream=orders", f"{_AT}&key=order_id&value=1"],
    "/trace?key=order_id&value=1&": ["limit=1001", _SPAN],
    "/missing/expectation?": ["", "name="],
    "/missing/expectation?name=paid&": ["span=2d", "finding=found", "cursor=W10=", "cursor=x", _SPAN],
    "/live?": ["limit=0", "x=1"],
    "/groups?": ["path=1", "self=1"],
    "/groups/group?": [""],
    "/message?stream=ORDERS&offset=": ["-1", "9" * 30, "1&view=html", "", "1&x=1"],
}
WRONG = [
    *((f"{path}{query}", 400, "invalid_input") for path, queries in INVALID.items() for query in queries),
    ("/search?key=nope&value=1", 404, "key_not_defined"),
    ("/search?key=order_id&value=1&stream=no-such-stream", 404, "stream_not_found"),
    (f"/search?key=order_id&value={_LONG}", 400, "invalid_relationship_key"),
    ("/search?key=order_id&of_stream=no-such-stream&of_offset=1", 404, "stream_not_found"),
    ("/trace?stream=no-such-stream&offset=1", 404, "stream_not_found"),
    ("/trace?key=nope&value=1", 404, "key_not_defined"),
    ("/trace?key=order_id&value=1&by=nope", 404, "key_not_defined"),
    (f"/trace?key=order_id&value={_LONG}", 400, "invalid_relationship_key"),
    ("/missing/expectation?name=none", 404, "not_found"),
    ("/live?stream=no-such-stream", 404, "stream_not_found"),
    ("/groups/group?id=x", 400, "invalid_group"),
    ("/collectors/collector?name=none", 404, "not_found"),
    ("/contexts/super-stream?name=none", 404, "super_stream_not_found"),
    ("/stream?stream=..", 404, "stream_not_found"),
    ("/message?stream=ORDERS&offset=99999999", 404, "offset_not_found"),
]


@pytest.mark.parametrize(("question", "status", "code"), WRONG, ids=lambda value: str(value)[:60])
def test_what_cannot_be_answered_says_why(page: Asking, world: World, question: str, status: int, code: str) -> None:
    """The API refuses a wrong question with a code and a hint, and the page says the same beside its form."""
    question = question.replace("ORDERS", world.orders)
    response = page.get(f"/api{question}")
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (status, code)
    assert error["message"]
    assert error["hint"]
    shown = page.get(question.replace("/search", "/"))
    # A half-filled form requests nothing.
    if question in ("/search?", "/search?key=order_id"):
        assert (shown.status_code, "data-problem" in shown.text) == (200, False)
        return
    assert (shown.status_code, f'data-problem="{code}"' in shown.text) == (status, True)
    harmless(shown.text)
    if question.startswith("/trace"):
        assert 'action="/trace"' in shown.text


@pytest.mark.parametrize("offset", range(len(BODIES)))
def test_any_body_is_shown_and_given_out_as_bytes(page: Asking, world: World, offset: int) -> None:
    """Shown as text, downloaded as published, run by nobody, and never shown as a picture."""
    for view in ("", "&view=json", "&view=text", "&view=hex"):
        shown = page.get(f"/message?stream={world.orders}&offset={offset}{view}")
        assert shown.status_code == 200, shown.text
        assert "img" not in {tag for tag, _ in harmless(shown.text).elements}
    file = page.get(at(world.orders, offset, "body"))
    assert (file.content, file.headers["Content-Type"]) == (BODIES[offset], "application/octet-stream")
    assert file.headers["Content-Disposition"] == f'attachment; filename="message-{offset}.bin"'
    assert file.headers["X-Content-Type-Options"] == "nosniff"
    assert file.headers["Content-Security-Policy"].startswith("sandbox")


def test_a_message_has_all_that_it_says_and_what_belongs_to_it(page: Asking, world: World) -> None:
    """Headers with their types, no number rounded; related by each key; the neighbours; links that stay."""
    answer = page.get(f"/api/message?stream={world.orders}&offset=1").json()
    headers = {each["name"]: (each["type"], each["text"]) for each in answer["headers"]}
    assert headers["large"] == ("integer", str(2**62))
    assert headers["flag"] == ("boolean", "true")
    assert headers[HOSTILE[:40]] == ("text", HOSTILE)
    neighbours = [page.get(f"/api{at(world.orders, offset)}").json() for offset in (0, 1, len(BODIES) + MANY)]
    before = [each["previous_offset"] for each in neighbours]
    assert before == [None, 0, len(BODIES) + MANY - 1]
    assert [each["next_offset"] for each in neighbours] == [1, 2, None]
    related = {each["key"]["key"]: each for each in answer["related"]}
    assert set(related) == {"card", "order_id", "place"}
    assert related["order_id"]["has_more"]
    # If there are many: those nearest in time, in other streams and in its own, earlier and later.
    near = [(row["stream"], row["offset"]) for row in related["order_id"]["results"]]
    assert near == [(world.orders, n) for n in (0, 2, 3)] + [(world.payments, n) for n in (0, 1)]
    assert related["order_id"]["recorded"] == len(BODIES) + 12
    assert f"5 of {len(BODIES) + 12} recorded" in page.get(at(world.orders, 1)).text
    # A link of a composite goes by the message, without the message itself.
    follow = f"key=place&of_stream={world.orders}&of_offset=1"
    assert f"/?{follow}" in links(page, at(world.orders, 1))
    assert len(page.get(f"/api/search?{follow}").json()["results"]) == len(BODIES) - 1


def test_the_newest_messages_are_where_one_begins(page: Asking, world: World) -> None:
    """The newest recorded one of each stream, with its keys, on the page that asks for nothing yet."""
    ends = {at(world.orders, len(BODIES) + MANY - 1), at(world.payments, TAKEN - 1)}
    assert {each for each in links(page, "/") if each.startswith("/message")} == ends
    assert "Or start" not in page.get("/?key=host&value=busy").text


def test_streams_are_shown_with_coverage_keys_and_recorders(page: Asking, world: World) -> None:
    """The streams and each one's page show its ends, lag, coverage, keys and latest messages."""
    answer = page.get("/api/streams").json()
    row = next(each for each in answer["streams"] if each["stream"] == world.orders)
    last = len(BODIES) + MANY
    assert (row["first"], row["last"], row["state"], row["lag_offsets"]) == (0, last, "unattended", 1)
    text = page.get("/streams").text
    assert f"coverage of {world.orders}: recorded 0 to {last - 1}, not recorded {last} to {last}" in text
    keys = {each["name"]: each["rows"] for each in answer["keys"]}
    counts = {"order_id": len(BODIES) + 12, "host": MANY, "place": len(BODIES), "card": len(BODIES) + 12}
    assert keys == counts | {"message_group": len(GROUPED)}
    assert answer["recorders"] == []
    answer = page.get(f"/api/stream?stream={world.orders}").json()
    detail = answer["streams"][0]
    assert set(detail["covered"]) == {each.name for each in KEYS} | {"time"}
    assert [each["offset"] for each in answer["latest"]] == list(range(last, last - 10, -1))
    assert page.get(at(world.orders, detail["last"])).status_code == 200
    # It is found by a part of its name; if no name has it, the page says so.
    assert page.get(f"/api/streams?q={world.orders.upper()}").json()["total"] == 1
    assert "No recorded stream matches" in page.get("/streams?q=nothing-like-it").text


def hostile_names(count: int) -> list[str]:
    """Names of streams that were made to do harm, each another one."""
    parts = [
        HOSTILE, "<script>hacked()</script>", "javascript:hacked()", "' OR 1=1; DROP TABLE relatum.streams; --",
        "../../etc/passwd", "..", ".", "%2e%2e%2f", "a\nSet-Cookie: x=1", "\r\n\r\n<html>", "{{ config }}", "${7*7}",
        "\u202edetrevni\u202c", "a\u200bb\ufeff", "東京/大阪?#", "'\"><svg onload=hacked()>", "-->", "]]>", "&amp;&lt;",
        "x" * 200, "🜂" * 40, "/", "//evil.example/x", "\\\\evil\\share", "\x7f\x01", "data:text/html,x", " ",
        "</title><script>hacked()</script>", "*/hacked()/*", "`hacked()`",
    ]  # fmt: skip
    return [*parts, *(f"{parts[n % len(parts)]}{n}" for n in range(len(parts), count))][:count]


def test_500_hostile_names_are_names(own: Asking, database_url: str) -> None:
    """Each is shown as text, its link leads to its own page, and no page has anything of it but text."""
    names = hostile_names(500)
    with psycopg.connect(database_url) as connection, connection.cursor() as cursor:
        cursor.executemany("INSERT INTO relatum.streams (name) VALUES (%s)", [(name,) for name in names])
    shown = [row["stream"] for row in pages(own, "/streams", "streams", limit=100)]
    assert sorted(shown) == sorted(names)
    assert {at(name) for name in shown[:100]} <= set(links(own, "/streams?limit=100"))
    for name in shown[::10]:
        (part,) = own.get(f"/api{at(name)}").json()["streams"]
        assert part["stream"] == name
        harmless(own.get(at(name)).text)


def test_hostile_questions_are_text(page: Asking) -> None:
    """A form shows what was typed as it was typed, and as nothing else."""
    for text in hostile_names(30):
        of_value, of_message = {"key": text, "value": text}, {"stream": text, "offset": "1"}
        for path, query in (
            ("/", of_value | {"stream": text}),
            ("/trace", of_value | {"by": text}),
            ("/trace", of_message),
        ):
            response = page.get(f"{path}?{urlencode(query)}")
            assert response.status_code in (400, 404)
            elements = harmless(response.text).elements
            values = [attributes.get("value") for tag, attributes in elements if tag in ("input", "option")]
            assert values.count(text) == list(query.values()).count(text)


def examples(world: World) -> dict[str, list[str]]:
    return {
        "/search": ["/search?key=host&value=busy", "/search?key=order_id&value=late", "/search"],
        "/around": [f"/around?stream={world.orders}&offset=0&limit=3", "/around?moment=2026-01-01", "/around"],
        "/trace": [f"/trace?stream={world.orders}&offset=0", "/trace?key=host&value=busy", "/trace"],
        "/message": ["/message", at(world.payments, 1), *(at(world.orders, n) for n in range(len(BODIES)))],
        "/streams": ["/streams", "/streams?limit=0"],
        "/stream": [at(world.orders), at("none")],
        "/missing": ["/missing", "/missing?span=all", "/missing?span=2d"],
        "/missing/expectation": [
            *(f"/missing/expectation?span=all&name={name}" for name in ("paid", "swift", "shelved", "none")),
            "/missing/expectation",
        ],
        "/groups": ["/groups", "/groups?older_s=0", "/groups?older_s=x"],
        "/groups/group": [f"/groups/group?id={group_id(number)}" for number in range(6)] + ["/groups/group?id=x"],
        "/collectors": ["/collectors", "/collectors?limit=0"],
        "/collectors/collector": [
            *(f"/collectors/collector?name=books&state={state}" for state in ("waiting", "unsuccessful", "succeeded")),
            "/collectors/collector?name=none",
        ],
        "/contexts": ["/contexts", "/contexts?limit=0"],
        "/contexts/super-stream": [f"/contexts/super-stream?name={world.placed}", "/contexts/super-stream?name=none"],
        "/live": ["/live", f"/live?stream={world.orders}", "/live?stream=none"],
        "/keys": ["/keys", "/keys?x=1"],
        "/values": ["/values?key=host&prefix=b", "/values?key=place", "/values?key=none", "/values"],
        "/health": ["/health"],
    }


def test_its_sessions_write_nothing(world: World) -> None:
    """Whatever the role may do: the session is read-only."""
    from relatum_consumer.web.site import read_only

    with psycopg.connect(read_only(world.options["database"], 12.3)) as connection:
        assert connection.execute("SHOW default_transaction_read_only").fetchone() == ("on",)
        assert connection.execute("SHOW statement_timeout").fetchone() == ("12300ms",)
        with pytest.raises(psycopg.errors.ReadOnlySqlTransaction):
            connection.execute("DELETE FROM relatum.events")


def test_a_stream_may_have_the_name_of_a_super_stream(place: Place, own: Asking) -> None:
    """Each page of the list has its own streams, although the name also means the super stream's partitions."""
    place.sql("INSERT INTO relatum.streams (name, super_stream) VALUES ('a', NULL), ('a-0', 'a'), ('a-1', 'a')")
    assert [row["stream"] for row in pages(own, "/streams", "streams", limit=1)] == ["a", "a-0", "a-1"]


def test_a_message_that_is_gone_has_a_page_that_says_so(page: Asking, world: World) -> None:
    """Also where its file, its group or a value of it was asked for, and never of another offset."""
    of_message = urlencode({"of_stream": world.orders, "of_offset": 999_999})
    for path in (at(world.orders, 999_999, "body"), f"/?key=host&{of_message}", f"/groups/group?{of_message}"):
        shown = page.get(path)
        assert (shown.status_code, 'data-problem="offset_not_found"' in shown.text) == (404, True), path
        assert "No such message" in shown.text
