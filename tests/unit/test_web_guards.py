"""What stands before the page: host names, the token, headers, the log. No server is reached."""

import logging
import socket
from contextlib import AbstractContextManager
from typing import Any
from urllib.parse import urlsplit

import pytest

from relatum.errors import ConfigurationError
from relatum_consumer.web import WebOptions, WebServer
from tests.support.web import Asking, asking

NOWHERE = ("amqp://127.0.0.1:1/", "postgresql://nobody@127.0.0.1:1/none")
"""Servers that are not there: nothing here asks them."""

TOKEN = "a token; 16 characters, or more"


def page(**options: Any) -> AbstractContextManager[Asking]:
    return asking(WebOptions(*NOWHERE, **options))


# --- who may be called, and how ---------------------------------------------------------------------------


NAMES = ["localhost", "127.0.0.1", "LOCALHOST", "localhost:8440", "[::1]:8440", "relatum.test"]
OTHERS = ["evil.example", "localhost.evil.example", "127.0.0.1.evil.example", "evil@localhost.x"]
OTHERS += ["localhost:80@evil.example"]


@pytest.mark.parametrize(
    ("host", "status"), [*((host, 200) for host in NAMES), *((host, 400) for host in OTHERS)], ids=str
)
def test_it_is_called_by_its_names(host: str, status: int) -> None:
    """Those of loopback, and those it was told; a name of elsewhere turned to this machine reads nothing."""
    with page(hosts=("relatum.test",)) as page_:
        assert page_.get("/api/openapi.json", headers={"Host": host}).status_code == status
        for path in ("/", "/static/x/page.css"):
            assert status == 200 or page_.get(path, headers={"Host": host}).status_code == 400


def test_nothing_but_reading_is_known() -> None:
    """What can be written to is nothing; an unknown path has the page's face, and is JSON below `/api`."""
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
    """A present path is kept for ever, another is asked for again; all files together are under 200 kB."""
    with page() as page_:
        text = page_.get("/nothing").text
        path = text.split('rel="stylesheet" href="')[1].split('"')[0]
        assert "immutable" in page_.get(path).headers["Cache-Control"]
        assert page_.get("/static/old/page.css").headers["Cache-Control"] == "no-cache"
        assert page_.get("/static/old/..%2f_options.py").status_code == 404
        scripts = (f"{name}.js" for name in ("shared", "search", "trace", "refresh"))
        names = ["page.css", "symbols.svg", "icon.svg", *scripts]
        assert sum(len(page_.get(f"/static/x/{name}").content) for name in names) < 100_000


# --- who may see it ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["0.0.0.0", "192.0.2.1", "::", "relatum.test"])
def test_it_does_not_start_where_anyone_could_look(host: str) -> None:
    """Listening beyond this machine needs a token, which is none that can be guessed."""
    with pytest.raises(ConfigurationError, match="RELATUM_WEB_TOKEN"):
        WebOptions(*NOWHERE, host=host)
    for short in ("", "x" * 15, "ü" * 20):
        with pytest.raises(ConfigurationError, match="16 ASCII characters"):
            WebOptions(*NOWHERE, host=host, token=short)


def test_no_option_shows_a_secret() -> None:
    """What is printed of the options has neither URLs nor the token."""
    shown = repr(WebOptions("amqp://u:secret@h/", "postgresql://u:secret@h/d", token=TOKEN))
    assert "secret" not in shown
    assert TOKEN not in shown


def test_who_has_the_token_gets_in() -> None:
    """Others get 401 and no word of what there is; the address with the token sets a cookie and leads on."""
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
        assert page_.get("/api/openapi.json", headers=mine).status_code == 200
        assert page_.get("/nothing", headers=mine).status_code == 404


BEARERS: list[str | bytes] = ["Bearer wrong", f"Basic {TOKEN}", TOKEN, "Bearer", "Bearer é".encode()]
COOKIES = ["x", "", "é.é.é", '"', "0" * 64, TOKEN]


def test_programs_send_the_token_with_each_request() -> None:
    """As a bearer, which sets no cookie; one that is wrong or made up, and any cookie that is, lets nobody in."""
    with page(token=TOKEN) as page_:
        given = page_.get("/api/openapi.json", headers={"Authorization": f"Bearer {TOKEN}"})
        assert (given.status_code, "Set-Cookie" in given.headers) == (200, False)
        cookies = [{"Cookie": b"relatum_token=" + cookie.encode()} for cookie in COOKIES]
        for headers in [*({"Authorization": bearer} for bearer in BEARERS), *cookies]:
            assert page_.get("/api/openapi.json", headers=headers).status_code == 401, headers


@pytest.mark.parametrize("path", ["//evil.example/", "///evil.example", "/\\evil.example"])
def test_the_token_leads_to_no_other_site(path: str) -> None:
    """Where one is sent is a path of the page."""
    with page(token=TOKEN) as page_:
        goal = urlsplit(page_.get(f"http://localhost{path}?token={TOKEN}").headers["Location"])
        assert (goal.netloc, goal.scheme) == ("", "")
        assert "\\" not in goal.path


# --- what is written down ---------------------------------------------------------------------------------


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
    """A kept connection gets both parts of an answer at once: else 40 ms lie between them."""
    with WebServer(WebOptions(*NOWHERE, port=0)) as server:
        host, _, port = server.url.split("/")[2].rpartition(":")
        with socket.create_connection((host, int(port)), timeout=60) as connection:
            connection.sendall(b"GET /alive HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert connection.recv(100).startswith(b"HTTP/1.1 200 OK")
            (taken,) = server._server.server_state.connections
            link = taken.transport.get_extra_info("socket")
            assert link.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
