"""The page without servers: guards, headers, the log, and the pieces it is made of."""

import gzip
import logging
import socket
from collections.abc import Sequence
from contextlib import AbstractContextManager
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Any
from urllib.parse import urlsplit

import pika
import pytest
from hypothesis import given
from hypothesis import strategies as some

from relatum.errors import ConfigurationError
from relatum.keys import KeyDefinition
from relatum.reading import Message
from relatum_consumer.traces import CAUSE, CAUSED, SAME, KeyValue, Link, Row, places, stems_of
from relatum_consumer.web import WebOptions, WebServer
from relatum_consumer.web.masking import Masking
from relatum_consumer.web.messages import hex_lines, indented, kind_of, preview, previews, text_of
from relatum_consumer.web.rendering import coverage_bar as bar
from relatum_consumer.web.rendering import span_text, visible
from tests.support.web import Asking, asking

NOWHERE = ("amqp://127.0.0.1:1/", "postgresql://nobody@127.0.0.1:1/none")

TOKEN = "a token; 16 characters, or more"


def page(**options: Any) -> AbstractContextManager[Asking]:
    return asking(WebOptions(*NOWHERE, **options))


def test_a_masked_key_that_is_misspelt_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    """Otherwise its values would be shown, and nobody would know. Once for the same definitions."""
    masking = Masking(["card", "crad"], bodies=False, show_bodies=False)
    for _ in range(2):
        masking.update((KeyDefinition("card"),))
    (warning,) = caplog.messages
    assert "'crad'" in warning


NAMES = ["localhost", "127.0.0.1", "LOCALHOST", "localhost:8440", "[::1]:8440", "relatum.test", "127.0.0.2:8440"]
OTHERS = ["evil.example", "localhost.evil.example", "127.0.0.1.evil.example", "evil@localhost.x"]
OTHERS += ["localhost:80@evil.example"]


@pytest.mark.parametrize(
    ("host", "status"), [*((host, 200) for host in NAMES), *((host, 400) for host in OTHERS)], ids=str
)
def test_it_is_called_by_its_names(host: str, status: int) -> None:
    """Only requests for loopback, a configured name, or the address that `relatum web` prints are answered."""
    with page(host="127.0.0.2", hosts=("relatum.test",)) as page_:
        assert page_.get("/api/openapi.json", headers={"Host": host}).status_code == status
        for path in ("/", "/static/x/page.css"):
            assert status == 200 or page_.get(path, headers={"Host": host}).status_code == 400


def test_nothing_but_reading_is_known() -> None:
    """Only reading is allowed; an unknown path is a page, and JSON below `/api`."""
    with page() as page_:
        for method in ("POST", "PUT", "DELETE", "PATCH"):
            assert page_.request(method, "/streams").status_code == 405
        unknown = page_.get("/nothing")
        assert (unknown.status_code, 'data-problem="not_found"' in unknown.text) == (404, True)
        assert page_.get("/api/nothing").json()["error"]["code"] == "not_found"
        assert page_.post("/mcp", json={}).status_code == 404, "tools that nobody asked for"
        assert page_.get("/alive", headers={"Host": "any.example"}).text == "alive\n"


def test_all_answers_have_the_headers_of_safety() -> None:
    """Pages, documents, files and what is refused: none may be framed, sniffed, kept, or run scripts of elsewhere."""
    with page() as page_:
        for path in ("/api/openapi.json", "/nothing", "/api/nothing", "/static/x/page.css"):
            headers = page_.get(path).headers
            assert headers["X-Content-Type-Options"] == "nosniff", path
            assert "default-src 'self'" in headers["Content-Security-Policy"], path
            assert "unsafe" not in headers["Content-Security-Policy"], path
            assert "frame-ancestors 'none'" in headers["Content-Security-Policy"], path
            assert headers["Referrer-Policy"] == "same-origin", path
            assert headers["Cross-Origin-Opener-Policy"] == "same-origin", path
        assert page_.get("/api/openapi.json").headers["Cache-Control"] == "no-store"


def test_files_of_the_page_are_kept_by_their_sum_and_weigh_little() -> None:
    """A present path is kept forever, another is asked for again; all files together are under 200 kB."""
    with page() as page_:
        text = page_.get("/nothing").text
        path = text.split('rel="stylesheet" href="')[1].split('"')[0]
        assert "immutable" in page_.get(path).headers["Cache-Control"]
        assert page_.get("/static/old/page.css").headers["Cache-Control"] == "no-cache"
        assert page_.get("/static/old/..%2f_options.py").status_code == 404
        scripts = (f"{name}.js" for name in ("shared", "search", "trace"))
        names = ["page.css", "symbols.svg", "icon.svg", *scripts]
        assert sum(len(page_.get(f"/static/x/{name}").content) for name in names) < 100_000


@pytest.mark.parametrize("host", ["0.0.0.0", "192.0.2.1", "::", "relatum.test"])
def test_it_does_not_start_where_anyone_could_look(host: str) -> None:
    """Listening beyond this machine needs a token, which is none that can be guessed."""
    with pytest.raises(ConfigurationError, match="RELATUM_WEB_TOKEN"):
        WebOptions(*NOWHERE, host=host)
    for short in ("", "x" * 15, "ü" * 20):
        with pytest.raises(ConfigurationError, match="16 ASCII characters"):
            WebOptions(*NOWHERE, host=host, token=short)


def test_no_option_shows_a_secret() -> None:
    """The options' representation has neither URLs nor the token."""
    shown = repr(WebOptions("amqp://u:secret@h/", "postgresql://u:secret@h/d", token=TOKEN))
    assert "secret" not in shown
    assert TOKEN not in shown


def test_who_has_the_token_gets_in() -> None:
    """Others get 401 and no other information; the address with the token sets a cookie and leads on."""
    with page(token=TOKEN, root_path="/r", is_https=True) as page_:
        for path in ("/nothing", "/api/openapi.json", "/mcp", "/nothing?token=wrong", "/api/openapi.json?token="):
            refused = page_.get(path)
            assert (refused.status_code, "Set-Cookie" in refused.headers) == (401, False), path
            assert refused.headers["WWW-Authenticate"].startswith("Bearer")
        assert page_.get("/api/nothing").json()["error"]["code"] == "token_needed"
        assert page_.get("/static/x/page.css").status_code == 200
        right = page_.get("/api/openapi.json", params={"q": "a&b", "token": TOKEN})
        assert (right.status_code, right.headers["Location"]) == (303, "/r/api/openapi.json?q=a%26b")
        cookie = right.headers["Set-Cookie"]
        assert all(each in cookie for each in ("HttpOnly", "SameSite=strict", "Path=/r/", "Secure"))
        assert TOKEN not in cookie
        mine = {"Cookie": cookie.partition(";")[0]}
        name, _, digest = mine["Cookie"].partition("=")
        assert page_.get("/api/openapi.json", headers=mine).status_code == 200
        for wrong in ("x", "", "é.é.é", '"', "0" * 64, TOKEN, digest[:-1]):
            assert page_.get("/api/openapi.json", headers={"Cookie": f"{name}={wrong}".encode()}).status_code == 401
        with page(token=TOKEN[::-1]) as other:
            assert name not in other.get(f"/?token={TOKEN[::-1]}").headers["Set-Cookie"], "one host has many pages"
        assert page_.get("/nothing", headers=mine).status_code == 404


BEARERS: list[str | bytes] = ["Bearer wrong", f"Basic {TOKEN}", TOKEN, "Bearer", "Bearer é".encode()]


def test_programs_send_the_token_with_each_request() -> None:
    """A right bearer token is accepted and sets no cookie; any other token is refused."""
    with page(token=TOKEN) as page_:
        given = page_.get("/api/openapi.json", headers={"Authorization": f"Bearer {TOKEN}"})
        assert (given.status_code, "Set-Cookie" in given.headers) == (200, False)
        for bearer in BEARERS:
            refused = page_.get("/api/openapi.json", headers={"Authorization": bearer})
            assert refused.status_code == 401, bearer


@pytest.mark.parametrize("path", ["//evil.example/", "///evil.example", "/\\evil.example"])
def test_the_token_leads_to_no_other_site(path: str) -> None:
    """A request with the token is redirected to a path of the page alone."""
    with page(token=TOKEN) as page_:
        goal = urlsplit(page_.get(f"http://localhost{path}?token={TOKEN}").headers["Location"])
        assert (goal.netloc, goal.scheme) == ("", "")
        assert "\\" not in goal.path


def test_who_asked_what_is_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """A record of `relatum.web.audit` for each request: names of parameters, how it ended, and no value."""
    with caplog.at_level(logging.INFO, "relatum.web.audit"), page(token=TOKEN) as page_:
        page_.get("/streams?q=a&token=wrong&x%0Ay=secret")
        page_.get("/api/openapi.json", headers={"Authorization": f"Bearer {TOKEN}"})
        page_.get(f"/nothing?token={TOKEN}")
        page_.get("/static/x/page.css")
        page_.get("/nothing", headers={"Host": "evil.example"})
    lines = [record.getMessage() for record in caplog.records if record.name == "relatum.web.audit"]
    assert [line.rsplit(" ", 2)[0] for line in lines] == [
        "127.0.0.1 GET /streams q,token,x%0Ay 401",
        "127.0.0.1 GET /api/openapi.json - 200",
        "127.0.0.1 GET /nothing token 303",
        "127.0.0.1 GET /nothing - 400",
    ]


def test_a_proxys_path_stands_before_all_links() -> None:
    """Whether the proxy takes it off or not; what the page links to begins with it."""
    with page(root_path="/relatum") as page_:
        for path in ("/api/openapi.json", "/relatum/api/openapi.json"):
            assert page_.get(path).json()["servers"] == [{"url": "/relatum/api"}]
        text = page_.get("/nothing").text
        links = [each.split('"')[0] for each in text.replace("src=", "href=").split('href="')[1:]]
        assert links
        assert all(link.startswith(("/relatum/", "#")) for link in links)


def test_no_answer_waits_for_an_acknowledgement() -> None:
    """A kept connection gets both parts of an answer at once: else 40 ms are between them."""
    with WebServer(WebOptions(*NOWHERE, port=0)) as server:
        host, _, port = server.url.split("/")[2].rpartition(":")
        with socket.create_connection((host, int(port)), timeout=60) as connection:
            connection.sendall(b"GET /alive HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert connection.recv(100).startswith(b"HTTP/1.1 200 OK")
            (taken,) = server._server.server_state.connections
            link = taken.transport.get_extra_info("socket")
            assert link.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


BODIES = {
    "empty": [b""],
    "json": [b'{"a": 1}', b"[]"],
    "text": [
        *(b'{"a": ', b"[" * 100_000, b"<script>alert(1)</script>"),
        b"<svg xmlns='http://www.w3.org/2000/svg' onload='alert(1)'/>",
    ],
    "binary": [b"\x89PNG\r\n\x1a\n<script>", b"RIFF\0\0\0\0WAVE", b"\x00\x01", b"\xff\xfe\xfd"],
}


@pytest.mark.parametrize(("body", "kind"), [(body, kind) for kind, bodies in BODIES.items() for body in bodies])
def test_what_a_body_is_is_said_by_its_bytes(body: bytes, kind: str) -> None:
    """A body is JSON where it is whole, and text where it can be read, as markup is."""
    assert kind_of(body) == kind


@given(some.binary(max_size=400))
def test_any_bytes_can_be_shown(body: bytes) -> None:
    """Any body has a preview in one line, lines of hexadecimal, and a kind."""
    assert "\n" not in preview(body)
    assert len(preview(body)) <= 160
    assert len(hex_lines(body)) == (len(body) + 15) // 16
    assert kind_of(body) in ("empty", "json", "text", "binary")


@pytest.mark.parametrize("letter", ["a", "é", "東", "😀"])
@pytest.mark.parametrize("before", [0, 1, 2, 3])
def test_a_long_text_has_a_preview_in_its_own_letters(letter: str, before: int) -> None:
    """A long text's preview ends between letters, however many bytes each has."""
    shown = preview(("x" * before + letter * 1_000).encode())
    assert shown == f"{'x' * before}{letter * (159 - before)}…"


def test_json_has_a_line_for_each_member_and_numbers_stay_as_they_are_written() -> None:
    """Neither a large integer nor a decimal is rounded, and what JSON has no number for is shown, too."""
    body = '{"large": 12345678901234567890123, "price": [1.10, 1e999], "none": NaN, "t": true, "s": "<b>", "e": {}}'
    assert indented(body) == (
        '{\n  "large": 12345678901234567890123,\n  "price": [\n    1.10,\n    1e999\n  ],\n  "none": NaN,\n'
        '  "t": true,\n  "s": "<b>",\n  "e": {}\n}'
    )
    assert (indented("{"), indented("[" * 100_000)) == (None, None)
    assert len(indented("[" * 300 + "]" * 300) or "") < 10_000


def test_half_a_surrogate_pair_stays_escaped() -> None:
    """JSON may name half a character, which no page can hold: the message's page and previews show it as written."""
    body = r'{"ö": "a\ud800", "\udc00": 1}'
    assert indented(body) == body.replace("{", "{\n  ").replace(", ", ",\n  ").replace("}", "\n}")
    assert previews([body.encode(), b'{"\xc3\xb6": "", "\\udc00": 1}'])[0] == r'{… "ö": "a\ud800"}'


def test_text_has_no_control_characters() -> None:
    """What would move a terminal's or a page's cursor is not text."""
    assert text_of(b"a\x1b[2Jb") is None
    assert text_of(b"before\0after") == "before\0after"
    assert text_of("UTF-16".encode("utf-16-le")) is text_of(bytes(8)) is None
    assert text_of(b"tab\tand\r\nlines") == "tab\tand\r\nlines"


def test_a_bar_shows_what_is_recorded_lost_and_not_recorded() -> None:
    """All keys, some of them, a hole, nothing: each in its place, in per cent."""
    pieces = bar((100, 200), {"a": [(100, 150), (180, 190)], "time": [(100, 140)]}, [(170, 180)])
    assert sorted((each.start, each.end, each.kind) for each in pieces) == [
        (100, 140, "recorded"),
        (140, 150, "partly"),
        (150, 170, "unrecorded"),
        (170, 180, "hole"),
        (180, 190, "partly"),
        (190, 200, "unrecorded"),
    ]
    assert {each.start: (each.x, each.width) for each in pieces}[170] == (70.0, 10.0)
    assert bar((5, 5), {}, []) == ()


@given(
    some.lists(some.tuples(some.integers(0, 2_000), some.integers(1, 40)), max_size=600),
    some.lists(some.tuples(some.integers(0, 2_000), some.integers(1, 5)), max_size=5),
)
def test_any_coverage_is_drawn_whole_and_bounded(covered: list[tuple[int, int]], holes: list[tuple[int, int]]) -> None:
    """Any coverage is drawn without gaps in a bounded number of pieces, with each hole visible."""
    ranges, torn = ([(start, start + size) for start, size in each] for each in (covered, holes))
    pieces = sorted(bar((0, 2_100), {"a": ranges}, torn), key=lambda piece: piece.start)
    assert len(pieces) <= 2 * 200
    assert pieces[0].start == 0
    assert pieces[-1].end == 2_100
    assert all(one.end == other.start for one, other in pairwise(pieces))
    assert all(piece.width > 0.5 and piece.x + piece.width <= 100 for piece in pieces if piece.kind == "hole")
    for start, end in torn:
        assert any(piece.kind == "hole" and piece.start < end and start < piece.end for piece in pieces)


def test_what_is_not_seen_is_written_as_its_number() -> None:
    """Marks that turn text around, and control characters, are shown and do nothing."""
    assert visible("a\u202eb\nc\u200bd") == "a⟨202e⟩b⟨a⟩c⟨200b⟩d"
    assert visible("Bücher 東京 <b>") == "Bücher 東京 <b>"


START = datetime(2026, 11, 23, 9, 30, tzinfo=UTC)


def moments(*seconds: float) -> list[datetime | None]:
    return [START + timedelta(seconds=each) for each in seconds]


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0, "0 s"), (0.000_25, "0.25 ms"), (0.35, "350 ms"), (1.25, "1.25 s"), (59.4, "59.4 s"), (60, "1 min"),
        (185, "3 min 5 s"), (10_799, "3 h"), (86_400 * 1500 + 3600, "1,500 d 1 h"), (-0.35, "−350 ms"),
    ],
)  # fmt: skip
def test_a_span_is_said_in_its_largest_units(seconds: float, words: str) -> None:
    """A span is shown in its two largest units at most."""
    assert span_text(seconds) == words


def key(value: str) -> KeyValue:
    return KeyValue("k", value)


def rows_of(hops: Sequence[int], links: Sequence[Link]) -> list[Row]:
    """All rows of the tree, from the top."""
    return [row for top, below in stems_of(hops, links) for row in (top, *below)]


def lines(hops: list[int], *links: Link) -> list[tuple[int, int, str]]:
    """Each row of the tree: its message, its depth, how it is connected with the one above."""
    return [(row.message, row.depth, row.kind) for row in rows_of(hops, links)]


def test_a_message_is_below_the_one_that_led_to_it() -> None:
    """A message is below its cause; messages of one value, and those that nothing connects, are side by side."""
    cause, caused = Link(CAUSED, key("1"), (0, 1, 2)), Link(CAUSED, key("2"), (2, 4))
    shown = lines([1, 2, 0, 1, 1], cause, caused, Link(SAME, key("3"), (2, 3, 4)))
    assert shown == [(0, 0, CAUSE), (1, 1, CAUSED), (3, 0, SAME), (4, 0, CAUSED)]
    shown = lines([1, 1, 2, 1], Link(SAME, key("1"), (0, 1)), Link(SAME, key("2"), (1, 2)))
    assert shown == [(0, 0, SAME), (1, 0, SAME), (2, 1, SAME), (3, 0, SAME)]
    assert lines([]) == []


LINKS = some.lists(
    some.builds(
        Link,
        some.sampled_from([SAME, CAUSED]),
        some.integers(0, 3).map(str).map(key),
        some.lists(some.integers(0, 11), min_size=1, max_size=5).map(tuple),
    ),
    max_size=30,
)


@given(some.lists(some.integers(0, 3), min_size=12, max_size=12), LINKS)
def test_a_tree_has_each_message_once(hops: list[int], links: list[Link]) -> None:
    """A tree has each message once, also in a circle, and each row is at most one deeper than the one above."""
    rows = rows_of(hops, links)
    starts = [number for number, hop in enumerate(hops) if not hop]
    assert sorted([*starts, *(row.message for row in rows)]) == list(range(12))
    depth = -1
    for row in rows:
        assert row.depth <= depth + 1
        depth = row.depth


def test_a_long_chain_is_no_deeper_than_python() -> None:
    """Thousands of messages, each from the one before."""
    chain = [Link(CAUSED, key(str(cause)), (cause, effect)) for cause, effect in pairwise(range(5_000))]
    assert rows_of(range(5_000), chain)[-1].depth == 4_998


def test_times_have_their_places_around_the_start() -> None:
    """Times are placed around the start, nearer ones farther apart; without a start, the first time is at the left."""
    assert places([*moments(-3, 0, 1, 7), None], START) == (16.67, 50.0, 66.67, 100.0, None)
    assert places([*moments(2, 3, 9)], None) == (0.0, 33.33, 100.0)
    assert (places([*moments(3, 3)], None), places([None], None), places([], None)) == ((0.0, 0.0), (None,), ())


def test_what_all_bodies_of_a_list_share_is_left_out() -> None:
    """Previews of JSON objects leave out what all have in common, unless nothing would be left."""
    assert previews([b'{"a": 1, "b": 1.10, "c": [{"d": "x"}]}', b'{"a": 1, "b": 2}']) == [
        '{… "b": 1.10, "c": [{"d": "x"}]}',
        '{… "b": 2}',
    ]
    for bodies in ([b'{"a": 1}'], [b'{"a": 1}', b'{"a": 1}'], [b'{"a": 1}', b'{"b": 1}'], [b'{"a": 1}', b"text"], []):
        assert previews(bodies) == [preview(each) for each in bodies]


def test_tools_refuse_whatever_is_not_their_own_site() -> None:
    """Also an origin that is no address."""
    with page(mcp=True) as page_:
        for origin in ("http://[", "null", "", "http://evil.example"):
            refused = page_.post("/mcp", json={}, headers={"Origin": origin})
            assert (refused.status_code, refused.json()["error"]["code"]) == (403, "other_site"), origin


def test_a_compressed_body_that_may_have_a_masked_value_is_hidden() -> None:
    """Who sees the bytes can unpack them; without a content type, they may be JSON."""
    masking = Masking([], bodies=False, show_bodies=False)
    masking.update((KeyDefinition("card", source="body:$.card", masked=True),))
    for content_type, is_hidden in (("application/json", True), (None, True), ("image/svg+xml", False)):
        properties = pika.BasicProperties(content_type=content_type, content_encoding="gzip")
        message = Message.from_amqp("s", 0, properties, gzip.compress(b'{"card": 1}'))
        assert masking.hides_body(message) is is_hidden, content_type
