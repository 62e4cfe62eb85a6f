"""What stands before the page: host names, passwords, proxies, limits, headers. No server is reached."""

import json
import logging
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import httpx
import pytest

from relatum.errors import ConfigurationError
from relatum_consumer.web import WebOptions, _access, hash_password
from relatum_consumer.web._limits import Bucket
from tests.support.web import Asking, asking

NOWHERE = ("amqp://127.0.0.1:1/", "postgresql://nobody@127.0.0.1:1/none")
"""Servers that are not there: nothing here asks them."""

PASSWORD = "correct horse"


@pytest.fixture(scope="module")
def hashed() -> str:
    """The hash of the password."""
    return hash_password(PASSWORD)


def page(client: tuple[str, int] = ("127.0.0.1", 5000), **options: Any) -> AbstractContextManager[Asking]:
    """The page, asked as by a client of an address, in one moment."""
    return asking(WebOptions(*NOWHERE, **options), client, clock=lambda: 1_000.0)


# --- who may be called, and how ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "host", ["localhost", "127.0.0.1", "LOCALHOST", "localhost:8440", "[::1]:8440", "relatum.test"]
)
def test_it_is_called_by_its_names(host: str) -> None:
    """By the names of loopback, and those that it was told."""
    with page(hosts=("relatum.test",)) as page_:
        assert page_.get("/api/openapi.json", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "localhost.evil.example",
        "127.0.0.1.evil.example",
        "evil@localhost.x",
        "localhost:80@evil.example",
    ],
)
def test_another_name_is_refused(host: str) -> None:
    """A name of elsewhere that was turned to this machine reads nothing, whatever it asks for."""
    with page() as page_:
        for path in ("/", "/api/openapi.json", "/static/x/page.css"):
            assert page_.get(path, headers={"Host": host}).status_code == 421


def test_all_answers_have_the_headers_of_safety() -> None:
    """Pages, documents, files and what is refused: none may be framed, sniffed, kept, or run scripts of elsewhere."""
    with page() as page_:
        for path in ("/login", "/api/openapi.json", "/nothing", "/api/nothing", "/static/x/page.css"):
            headers = page_.get(path).headers
            assert headers["X-Content-Type-Options"] == "nosniff", path
            assert "default-src 'self'" in headers["Content-Security-Policy"], path
            assert "unsafe" not in headers["Content-Security-Policy"], path
            assert "frame-ancestors 'none'" in headers["Content-Security-Policy"], path
            assert headers["Referrer-Policy"] == "same-origin", path
            assert headers["Cross-Origin-Opener-Policy"] == "same-origin", path
        assert page_.get("/api/openapi.json").headers["Cache-Control"] == "no-store"


def test_only_reading_is_known() -> None:
    """Nothing can be written, so nothing but GET is answered."""
    with page() as page_:
        for method in ("POST", "PUT", "DELETE", "PATCH"):
            assert page_.request(method, "/streams").status_code == 405


def test_files_of_the_page_are_kept_by_their_sum_and_weigh_little() -> None:
    """A present path is kept for ever, another is asked for again; all files together are under 200 kB."""
    with page() as page_:
        text = page_.get("/nothing").text
        path = text.split('rel="stylesheet" href="')[1].split('"')[0]
        assert "immutable" in page_.get(path).headers["Cache-Control"]
        assert page_.get("/static/old/page.css").headers["Cache-Control"] == "no-cache"
        assert page_.get("/static/old/..%2f_options.py").status_code == 404
        names = (
            "page.css",
            "theme.js",
            "shared.js",
            "search.js",
            "message.js",
            "refresh.js",
            "symbols.svg",
            "icon.svg",
        )
        assert sum(len(page_.get(f"/static/x/{name}").content) for name in names) < 100_000


# --- who may see it ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["0.0.0.0", "192.0.2.1", "::", "relatum.test"])
def test_it_does_not_start_where_anyone_could_look(host: str) -> None:
    """Listening beyond this machine needs a password or a proxy; what is wrong with one shows at once."""
    with pytest.raises(ConfigurationError, match="--password-file"):
        WebOptions(*NOWHERE, host=host)
    with pytest.raises(ConfigurationError, match="hash"):
        WebOptions(*NOWHERE, host=host, password_hash="plain")
    with pytest.raises(ConfigurationError, match="--trusted-proxy"):
        WebOptions(*NOWHERE, host=host, trust_header="X-User")


def test_no_option_shows_a_secret(hashed: str) -> None:
    """What is printed of the options has neither URLs nor the password's hash."""
    shown = repr(WebOptions("amqp://u:secret@h/", "postgresql://u:secret@h/d", password_hash=hashed))
    assert "secret" not in shown
    assert hashed not in shown


def test_who_knows_the_password_gets_in(hashed: str) -> None:
    """Others are shown the form, or 401; a login gives a cookie that scripts and other sites do not see."""
    with page(password_hash=hashed) as page_:
        assert page_.get("/streams?q=a%26b").status_code == 401
        assert 'value="/streams?q=a%26b"' in page_.get("/streams?q=a%26b").text
        assert page_.get("/api/openapi.json").status_code == 401
        wrong = page_.post("/login", data={"password": "wrong"})
        assert wrong.status_code == 401
        assert "Set-Cookie" not in wrong.headers
        right = page_.post("/login", data={"password": PASSWORD, "next": "/api/openapi.json"})
        assert (right.status_code, right.headers["Location"]) == (303, "/api/openapi.json")
        cookie = right.headers["Set-Cookie"]
        assert all(each in cookie for each in ("HttpOnly", "SameSite=strict", "Path=/", "Max-Age=43200"))
        assert page_.get("/api/openapi.json").status_code == 200


@pytest.mark.parametrize(
    "goal", ["//evil.example/", "https://evil.example/", "/\\evil.example", "javascript:alert(1)", ""]
)
def test_a_login_leads_to_no_other_site(hashed: str, goal: str) -> None:
    """Where one goes after it is a path of the page."""
    with page(password_hash=hashed) as page_:
        assert page_.post("/login", data={"password": PASSWORD, "next": goal}).headers["Location"] == "/"


@pytest.mark.parametrize("cookie", ["x", "9999999999.aa.bb", "..", "9999999999.", "a.b.c.d", "é.é.é"])
def test_a_made_up_session_is_none(hashed: str, cookie: str) -> None:
    """Whatever is in the cookie: who has not logged in is not in."""
    with page(password_hash=hashed) as page_:
        headers = {"Cookie": b"relatum_session=" + cookie.encode()}
        assert page_.get("/api/openapi.json", headers=headers).status_code == 401


def session(page_: Asking) -> dict[str, str]:
    """A new login, as the header that has its cookie."""
    return {"Cookie": page_.post("/login", data={"password": PASSWORD}).headers["Set-Cookie"].partition(";")[0]}


@pytest.mark.parametrize(("remembered", "status_of_others"), [(10_000, 404), (0, 401)])
def test_who_logs_out_is_out(
    hashed: str, monkeypatch: pytest.MonkeyPatch, remembered: int, status_of_others: int
) -> None:
    """The cookie is worth nothing afterwards, whoever kept it; another login stays while logouts are remembered."""
    monkeypatch.setattr(_access, "_ENDED_MAX", remembered)
    with page(password_hash=hashed, root_path="/r") as page_:
        mine, other = session(page_), session(page_)
        shown = page_.get("/nothing", headers=mine)
        assert (shown.status_code, shown.headers["Cache-Control"]) == (404, "no-store")
        assert 'action="/r/logout"' in shown.text
        assert page_.get("/logout", headers=mine).status_code == 405
        assert page_.post("/logout", headers=mine | {"Origin": "https://evil.example"}).status_code == 403
        assert page_.get("/nothing", headers=mine).status_code == 404
        out = page_.post("/logout", headers=mine)
        assert (out.status_code, out.headers["Cache-Control"]) == (200, "no-store")
        assert "You are logged out." in out.text
        assert "/r/logout" not in out.text
        assert all(each in out.headers["Set-Cookie"] for each in ('relatum_session="";', "Max-Age=0", "Path=/r/"))
        assert page_.get("/nothing", headers=mine).status_code == 401
        assert page_.get("/api/openapi.json", headers=mine).status_code == 401
        assert page_.post("/logout", headers=mine).status_code == 200
        assert page_.get("/nothing", headers=other).status_code == status_of_others
        assert page_.get("/nothing", headers=session(page_)).status_code == 404


def test_who_has_no_session_is_not_offered_to_leave_it(hashed: str) -> None:
    """Where anybody may look, where a proxy says who asks, and before a login."""
    by_proxy: dict[str, Any] = {"trust_header": "X-User", "trusted_proxies": ("10.0.0.0/8",), "host": "0.0.0.0"}
    for options in ({}, {"password_hash": hashed}, by_proxy, by_proxy | {"password_hash": hashed}):
        with page(("10.1.2.3", 1), **options) as page_:
            assert "/logout" not in page_.get("/nothing", headers={"X-User": "ann"}).text
    with page() as page_:
        assert page_.post("/logout").status_code == 404


def test_scripts_log_in_by_basic(hashed: str) -> None:
    """With each request, of `/api` alone, which tells them so."""
    with page(password_hash=hashed) as page_:
        assert page_.get("/api/openapi.json").headers["WWW-Authenticate"].startswith("Basic")
        assert page_.get("/api/openapi.json", auth=httpx.BasicAuth("any", PASSWORD)).status_code == 200
        assert page_.get("/api/openapi.json", auth=httpx.BasicAuth("any", PASSWORD)).status_code == 200
        assert page_.get("/api/openapi.json", auth=httpx.BasicAuth("any", "wrong")).status_code == 401
        assert page_.get("/login", auth=httpx.BasicAuth("any", PASSWORD)).status_code == 200


def test_passwords_cannot_be_tried_for_ever(hashed: str) -> None:
    """After a few wrong ones not even the right one is looked at, for a minute."""
    with page(password_hash=hashed) as page_:
        for _ in range(5):
            assert page_.post("/login", data={"password": "wrong"}).status_code == 401
        assert page_.post("/login", data={"password": PASSWORD}).status_code == 401


@pytest.mark.parametrize(
    "headers", [{"Origin": "https://evil.example"}, {"Sec-Fetch-Site": "cross-site"}, {"Origin": "null"}]
)
def test_another_site_logs_nobody_in(hashed: str, headers: dict[str, str]) -> None:
    """A form of elsewhere is refused, also with the right password."""
    with page(password_hash=hashed) as page_:
        assert page_.post("/login", data={"password": PASSWORD}, headers=headers).status_code == 403


def test_a_proxy_says_who_asks(hashed: str) -> None:
    """Its header counts of its network alone."""
    options: dict[str, Any] = {"trust_header": "X-User", "trusted_proxies": ("10.0.0.0/8",), "host": "0.0.0.0"}
    named = {"X-User": "ann"}
    with page(("10.1.2.3", 1), **options) as page_:
        assert page_.get("/api/openapi.json", headers=named).status_code == 200
        assert page_.get("/api/openapi.json").status_code == 401
        assert page_.get("/streams").status_code == 403
        # One of them came from who asked, and the proxy let it through.
        twice = [("X-User", "root"), ("X-User", "ann")]
        assert page_.get("/api/openapi.json", headers=twice).status_code == 401
    with page(("192.0.2.7", 1), **options) as page_:
        assert page_.get("/api/openapi.json", headers=named).status_code == 401


# --- how much, and what is written down -------------------------------------------------------------------


def test_one_client_cannot_ask_for_all() -> None:
    """What is too much is 429 and says when to come again; another client is served, and files are not counted."""
    with page(requests_per_s=1, requests_burst=3) as page_:
        assert [page_.get("/api/openapi.json").status_code for _ in range(4)] == [200, 200, 200, 429]
        refused = page_.get("/api/openapi.json")
        assert int(refused.headers["Retry-After"]) >= 1
        assert refused.json()["error"]["code"] == "too_many_requests"
        assert page_.get("/static/x/page.css").status_code == 200


def test_those_who_come_by_a_proxy_are_counted_apart() -> None:
    """By the name that it gives: its address is that of all. Who comes by no trusted proxy has no name."""
    options: dict[str, Any] = {"trust_header": "X-User", "trusted_proxies": ("10.0.0.0/8",), "host": "0.0.0.0"}
    with page(("10.1.2.3", 1), requests_per_s=1, requests_burst=2, **options) as page_:
        for name in ("ann", "bob"):
            given = [page_.get("/api/openapi.json", headers={"X-User": name}).status_code for _ in range(3)]
            assert given == [200, 200, 429]
    with page(("192.0.2.7", 1), requests_per_s=1, requests_burst=2, **options) as page_:
        given = [page_.get("/api/openapi.json", headers={"X-User": str(n)}).status_code for n in range(3)]
        assert given == [401, 401, 429]


def test_bytes_are_counted_too() -> None:
    """Who took more than was allowed waits."""
    with page(bytes_per_s=100) as page_:
        assert page_.get("/api/openapi.json").status_code == 200
        assert page_.get("/api/openapi.json").status_code == 429


def test_a_bucket_fills_again() -> None:
    """So much over time, and no more than its most."""
    bucket = Bucket(rate=2.0, most=4.0, left=4.0, at=0.0)
    assert [bucket.take(1, 0.0) for _ in range(5)] == [0, 0, 0, 0, 0.5]
    assert bucket.take(1, 0.5) == 0
    assert bucket.take(1, 1_000.0) == 0
    assert bucket.left == 3.0


def test_who_asked_what_is_written_down(tmp_path: Path, hashed: str) -> None:
    """A line of JSON for each request, with who, what and how it ended, and no password."""
    audit = tmp_path / "audit.log"
    with page(password_hash=hashed, audit_path=str(audit)) as page_:
        page_.get("/streams?q=a%0Ab")
        page_.post("/login", data={"password": PASSWORD})
        page_.get("/api/openapi.json")
    lines = [json.loads(line) for line in audit.read_text().splitlines()]
    assert [(line["who"], line["path"], line["status"]) for line in lines] == [
        ("-", "/streams", 401),
        ("-", "/login", 303),
        ("password", "/api/openapi.json", 200),
    ]
    assert lines[0]["query"] == "q=a%0Ab"
    assert PASSWORD not in audit.read_text()


def test_without_a_file_the_log_has_it(caplog: pytest.LogCaptureFixture) -> None:
    """The logger `relatum.web.audit` at INFO."""
    with caplog.at_level(logging.INFO, "relatum.web.audit"), page() as page_:
        page_.get("/api/openapi.json")
    lines = [record.getMessage() for record in caplog.records if record.name == "relatum.web.audit"]
    assert [json.loads(line)["path"] for line in lines] == ["/api/openapi.json"]


def test_a_proxys_path_stands_before_all_links() -> None:
    """Whether the proxy takes it off or not; what the page links to begins with it."""
    with page(root_path="/relatum") as page_:
        for path in ("/api/openapi.json", "/relatum/api/openapi.json"):
            assert page_.get(path).json()["servers"] == [{"url": "/relatum/api"}]
        text = page_.get("/nothing").text
        links = [each.split('"')[0] for each in text.replace("src=", "href=").split('href="')[1:]]
        assert links
        assert all(link.startswith(("/relatum/", "#")) for link in links)


def test_what_nobody_knows_is_a_page_or_a_document() -> None:
    """An unknown path has the page's face; below `/api` it is JSON."""
    with page() as page_:
        assert page_.get("/nothing").status_code == 404
        assert 'data-problem="not_found"' in page_.get("/nothing").text
        assert page_.get("/api/nothing").json()["error"]["code"] == "not_found"
        assert page_.get("/alive", headers={"Host": "any.example"}).text == "alive\n"
