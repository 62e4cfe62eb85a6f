"""The live view on real servers, asked over real connections: what is told, to whom, and what is left out."""

import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
import sqlalchemy as sa

from relatum.following import FollowerOptions
from relatum.reading import BrokerAddress
from relatum.store import Database, make_engine
from relatum_consumer.web import WebServer, _access, _server, hash_password
from relatum_consumer.web._live import _events, _intake, _seen
from tests.support import (
    LIMIT_S,
    declare_stream,
    delete_stream,
    publish_plain,
    record,
    recording,
    unique_name,
    wait_recorded,
    wait_until,
)
from tests.support.proxy import Proxy
from tests.web.conftest import KEYS, World

Event = tuple[str, dict[str, Any]]


def followers() -> set[threading.Thread]:
    """The threads of this process that follow streams: recorders have one each, too."""
    return {each for each in threading.enumerate() if each.name == "relatum-follower"}


class Looking:
    """One who looks, in a thread of its own: all events since it began."""

    def __init__(self, url: str, query: str = "", **options: Any) -> None:
        self.events: list[Event] = []
        self.last_id = ""
        self.status = 0
        self.error: dict[str, Any] = {}
        self._response: httpx.Response | None = None
        self._thread = threading.Thread(target=self._look, args=(f"{url}api/live/events?{query}", options), daemon=True)
        self._thread.start()
        wait_until(lambda: self.status != 0, what="an answer")

    def _look(self, url: str, options: dict[str, Any]) -> None:
        try:
            with httpx.stream("GET", url, timeout=LIMIT_S, **options) as response:
                self._response = response
                if response.status_code != 200:
                    response.read()
                    self.error = response.json()["error"]
                    self.status = response.status_code
                    return
                self.status = response.status_code
                self._read(response)
        except httpx.HTTPError:
            pass

    def _read(self, response: httpx.Response) -> None:
        name = ""
        for line in response.iter_lines():
            field, _, value = line.partition(": ")
            if field == "event":
                name = value
            elif field == "id":
                self.last_id = value
            elif field == "data":
                self.events.append((name, json.loads(value)))

    def told(self, name: str) -> list[dict[str, Any]]:
        """The data of all events of a name."""
        return [data for each, data in list(self.events) if each == name]

    @property
    def messages(self) -> list[dict[str, Any]]:
        """All messages that were shown."""
        return [row for data in self.told("messages") for row in data["results"]]

    @property
    def state(self) -> str:
        """The state as it was told last."""
        return str((self.told("state") or [{"state": ""}])[-1]["state"])

    def leave(self) -> None:
        """Hang up."""
        if self._response is not None:
            connection = self._response.extensions["network_stream"].get_extra_info("socket")
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self.join()

    def join(self) -> None:
        """Wait for the end of what is told."""
        self._thread.join(LIMIT_S)
        assert not self._thread.is_alive()


@pytest.fixture(scope="module")
def stream(amqp_url: str) -> Iterator[str]:
    """A stream that is recorded while these tests run."""
    name = unique_name("live")
    declare_stream(amqp_url, name)
    yield name
    delete_stream(amqp_url, name)


@pytest.fixture(scope="module")
def recorded(lively: World, amqp_url: str, stream: str) -> Iterator[sa.Engine]:
    """Its recorder."""
    engine = make_engine(lively.options["database"])
    with recording(amqp_url, engine, stream, keys=KEYS):
        publish_plain(amqp_url, stream, [(b"first", {"host": "first"})])
        yield engine
    engine.dispose()


@pytest.fixture(scope="module")
def url(lively: World, recorded: sa.Engine, stream: str) -> Iterator[str]:
    """The page, which follows the stream."""
    with WebServer(lively.page(port=0, live_per_client=200)) as server:
        wait_until(lambda: stream in httpx.get(f"{server.url}api/live").json()["streams"], what="the stream")
        yield server.url


@contextmanager
def looking(url: str, query: str = "", **options: Any) -> Iterator[Looking]:
    """One who looks and is told of what comes: live, if some of the streams wait to be recorded or are gone."""
    looks = Looking(url, query, **options)
    wait_until(lambda: looks.state in ("live", "behind", "partly"), what="being live")
    try:
        yield looks
    finally:
        looks.leave()


def test_messages_are_told_as_they_are_recorded(url: str, amqp_url: str, stream: str) -> None:
    """Each once and in order, with keys and link, to all who look, whatever their form."""
    with looking(url, f"stream={stream}") as one, looking(url) as other, looking(url, "form=rows") as rows:
        for n in range(30):
            publish_plain(amqp_url, stream, [(b"%d" % n, {"host": f"h{n}"})])
        wait_until(lambda: len(one.messages) == 30, what="all of them")
        assert [row["preview"] for row in one.messages] == [str(n) for n in range(30)]
        assert one.messages[3]["keys"][0]["value"] == "h3"
        wait_until(lambda: [row for row in other.messages if row["stream"] == stream] == one.messages, what="the same")
        wait_until(lambda: sum(data["shown"] for data in rows.told("messages")) >= 30, what="rows")
        assert "<tr>" in rows.told("messages")[0]["rows"]


def test_only_what_is_wanted_is_told(url: str, amqp_url: str, stream: str) -> None:
    """By stream, by key, by value in any form that the key takes, by the parts of a composite one."""
    queries = ["key=host", "key=host&value=b", "key=place&value=a&value=1", f"stream={stream}&key=order_id"]
    with contextlib.ExitStack() as stack:
        looks = [stack.enter_context(looking(url, query)) for query in queries]
        messages = [(b"1", {"host": "a"}), (b"2", {"host": "b"}), (b"3", {"shelf": "a", "row": "1"}), (b"4", {})]
        publish_plain(amqp_url, stream, [*messages, (b"5", {"order_id": "x"})])
        for each, wanted in zip(looks, [["1", "2"], ["2"], ["3"], ["5"]], strict=True):
            wait_until(lambda each=each, wanted=wanted: len(each.messages) >= len(wanted), what=f"{wanted}")
            assert [row["preview"] for row in each.messages] == wanted
        assert looks[1].told("messages")[0]["more"] == 0


@pytest.mark.parametrize(
    ("query", "status", "code"),
    [
        ("key=nope", 404, "key_not_defined"),
        ("value=1", 400, "invalid_input"),
        ("key=place&value=1", 400, "invalid_key_definition"),
        ("stream=no-such-stream", 404, "stream_not_found"),
        ("most=0", 400, "invalid_input"),
        ("x=1", 400, "invalid_input"),
    ],
)
def test_what_cannot_be_asked_is_refused(url: str, query: str, status: int, code: str) -> None:
    """Before anything is told, with what to do; on the page as well."""
    looks = Looking(url, query)
    looks.join()
    assert (looks.status, looks.error["code"]) == (status, code)
    if "most" not in query:
        assert httpx.get(f"{url}live?{query}").status_code == status


def test_the_page_shows_the_latest_without_scripts(url: str, amqp_url: str, stream: str) -> None:
    """The newest first, those of a filter where one is asked for, and it says what it needs to go on."""
    publish_plain(amqp_url, stream, [(b"older", {"host": "latest"}), (b"newer", {"host": "latest"})])
    path = f"live?stream={stream}&key=host&value=latest"
    wait_until(lambda: len(httpx.get(f"{url}api/{path}").json()["results"]) == 2, what="both")
    assert [row["preview"] for row in httpx.get(f"{url}api/{path}").json()["results"]] == ["newer", "older"]
    shown = httpx.get(f"{url}{path}").text
    assert shown.index("newer") < shown.index("older")
    assert "Without scripts" in shown


def test_who_comes_back_is_told_what_was_missed(url: str, amqp_url: str, stream: str) -> None:
    """The messages where the server still has them; else since when nobody looked."""
    query = f"stream={stream}&key=host&value=back"
    with looking(url, query) as watch, looking(url, query) as one:
        publish_plain(amqp_url, stream, [(b"seen", {"host": "back"})])
        wait_until(lambda: len(one.messages) == 1, what="the first")
        last_id = one.last_id
        publish_plain(amqp_url, stream, [(b"missed", {"host": "back"})] * 3)
        wait_until(lambda: len(watch.messages) == 4, what="those that are missed")
        with looking(url, query, headers={"Last-Event-ID": last_id}) as again:
            wait_until(lambda: len(again.messages) == 3, what="what was missed")
        with looking(url, f"{query}&after=00ff-17-1700000000000") as late:
            assert late.told("missed") == [{"since": "2023-11-14T22:13:20.000+00:00"}]
        with looking(url, f"after={'9' * 4000}") as nonsense:
            assert nonsense.told("missed") == [{"since": "1970-01-01T00:00:00.000+00:00"}]


def test_of_many_at_once_the_newest_are_told_and_the_rest_counted(url: str, amqp_url: str, stream: str) -> None:
    """Nothing is left out without being said."""
    with looking(url, f"stream={stream}&most=10") as few, looking(url, f"stream={stream}&key=host") as keyed:
        publish_plain(amqp_url, stream, [(b"%d" % n, {"host": "many"}) for n in range(5_000)], confirm=False)

        def told(looks: Looking) -> int:
            return sum(data["shown"] + data["more"] + data["passed"] for data in looks.told("messages"))

        wait_until(lambda: told(few) >= 5_000 and told(keyed) >= 5_000, what="all of them")
        assert (told(few), told(keyed)) == (5_000, 5_000)
        assert few.messages[-1]["preview"] == "4999"
        assert max(data["shown"] for data in few.told("messages")) == 10


def test_too_many_who_look_are_refused(lively: World, recorded: sa.Engine) -> None:
    """One client by 429, all together by 503; who leaves makes room."""
    with WebServer(lively.page(port=0, live_per_client=2)) as server:
        with looking(server.url), looking(server.url):
            refused = Looking(server.url)
            assert (refused.status, refused.error["code"]) == (429, "too_many_live")
            assert "another tab" in refused.error["hint"]
        wait_until(lambda: Looking(server.url).status == 200, what="room")
    with WebServer(lively.page(port=0, live_max=1)) as server, looking(server.url):
        assert Looking(server.url).status == 503


def test_a_stop_ends_what_goes_on_for_ever(lively: World, recorded: sa.Engine) -> None:
    """In far less time than what is under way has, and those who look are told; nobody follows afterwards."""
    with WebServer(lively.page(port=0, drain_s=600.0)) as server:
        looks = [Looking(server.url) for _ in range(3)]
        wait_until(lambda: all(each.state for each in looks), what="a beginning")
    for each in looks:
        each.join()
        assert each.told("end") == [{"why": "stopping"}]


def test_beginning_and_end_are_audited(lively: World, recorded: sa.Engine, tmp_path: Path) -> None:
    """A line each: who began to look at what, and how many messages were shown by the end."""
    audit = tmp_path / "audit"
    with WebServer(lively.page(port=0, audit_path=str(audit))) as server:
        with looking(server.url, "key=host"):
            (begin,) = [json.loads(line) for line in audit.read_text().splitlines()]
        wait_until(lambda: len(audit.read_text().splitlines()) == 2, what="the end")
        end = json.loads(audit.read_text().splitlines()[1])
    assert (begin["path"], begin["query"], begin["status"], begin["ms"]) == ("/api/live/events", "key=host", 200, None)
    assert (end["path"], end["status"], end["messages"]) == ("/api/live/events", 200, 0)
    assert end["ms"] > 0


def test_what_is_masked_is_masked_here_too(lively: World, amqp_url: str, stream: str, recorded: sa.Engine) -> None:
    """In JSON and in rows: neither value nor body."""
    options = {"masked_keys": ("card",), "mask_bodies": True}
    with WebServer(lively.page(port=0, **options)) as server:
        with looking(server.url, "key=card&value=4712") as one, looking(server.url, "form=rows") as rows:
            publish_plain(amqp_url, stream, [(b"secret-body", {"card": "4712"})])
            wait_until(lambda: one.messages and rows.told("messages"), what="the message")
            told = json.dumps([one.events, rows.events])
        assert "4712" not in told
        assert "secret-body" not in told
        assert one.messages[0]["keys"][0]["is_masked"]


def test_a_login_that_ends_ends_what_is_told(
    lively: World, recorded: sa.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who asks again then is asked to log in."""
    password = "right horse"
    with WebServer(lively.page(port=0, password_hash=hash_password(password))) as server:
        for session_s in (2, 60):
            monkeypatch.setattr(_access, "SESSION_S", session_s)
            login = httpx.post(f"{server.url}login", data={"password": password})
            looks = Looking(server.url, cookies=dict(login.cookies))
            if looks.status == 200:
                break
        looks.join()
        assert looks.told("end") == [{"why": "renew"}]
        assert Looking(server.url, cookies=dict(login.cookies)).status == 401


def test_a_logout_ends_what_is_told(lively: World, recorded: sa.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """In another tab, too."""
    monkeypatch.setattr(_events, "BEAT_S", 0.1)
    with WebServer(lively.page(port=0, password_hash=hash_password("right horse"))) as server:
        cookies = dict(httpx.post(f"{server.url}login", data={"password": "right horse"}).cookies)
        looks = Looking(server.url, cookies=cookies)
        assert looks.status == 200
        assert httpx.post(f"{server.url}logout", cookies=cookies).status_code == 200
        looks.join()
        assert looks.told("end") == [{"why": "renew"}]
        assert Looking(server.url, cookies=cookies).status == 401


def test_broker_and_database_may_go_away(lively: World, amqp_url: str, stream: str, recorded: sa.Engine) -> None:
    """It is said, and mends by itself; what was recorded meanwhile is told then."""
    stream_url, database = lively.options["stream_url"], lively.options["database"]
    with Proxy.to(stream_url) as broker, Proxy.to(database) as tables:
        options = {"stream_url": broker.url(stream_url), "database": tables.url(database), "timeout_s": 5.0}
        with WebServer(lively.page(port=0, **options)) as server, looking(server.url, f"stream={stream}") as looks:
            for proxy in (broker, tables):
                proxy.accepts = False
                proxy.reset()
                wait_until(lambda: looks.state == "away", what="being away")
                publish_plain(amqp_url, stream, [(b"meanwhile", {})])
                before = len(looks.messages)
                proxy.accepts = True
                wait_until(lambda: looks.state == "live", what="being live again")
                wait_until(lambda before=before: len(looks.messages) > before, what="what came meanwhile")
        assert [row["preview"] for row in looks.messages] == ["meanwhile"] * 2


def test_what_nobody_records_is_said_to_wait(lively: World, amqp_url: str, recorded: sa.Engine) -> None:
    """A stream whose recorder is gone holds up no other."""
    with WebServer(lively.page(port=0)) as server, looking(server.url) as looks:
        publish_plain(amqp_url, lively.orders, [(b"waits", {})])
        wait_until(lambda: looks.state == "behind", what="being behind")
        assert lively.orders in looks.told("state")[-1]["words"]
        assert "waits" not in [row["preview"] for row in looks.messages]


def test_what_waits_takes_no_room_of_others(
    lively: World, amqp_url: str, stream: str, recorded: sa.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stream whose recorder is gone may have more than is held at all; it is told once that gets on."""
    monkeypatch.setattr(_intake, "_FOLLOWING", FollowerOptions(bytes_max=1 << 20))
    abandoned = unique_name("abandoned")
    declare_stream(amqp_url, abandoned)
    query = f"stream={stream}&stream={abandoned}&key=host"
    record(amqp_url, recorded, abandoned, keys=KEYS)
    with WebServer(lively.page(port=0)) as server, looking(server.url, query) as looks:
        publish_plain(amqp_url, abandoned, [(b"x" * 300_000, {"host": f"late-{n}"}) for n in range(10)])
        wait_until(lambda: looks.state == "behind", what="being behind")
        publish_plain(amqp_url, stream, [(b"others", {"host": "others"})])
        wait_until(lambda: looks.messages, what="the other stream's message")
        with recording(amqp_url, recorded, abandoned, keys=KEYS):
            wait_until(lambda: len(looks.messages) == 11, what="those that waited")
            wait_until(lambda: looks.state == "live", what="being live again")
    assert [row["stream"] for row in looks.messages] == [stream] + 10 * [abandoned]
    delete_stream(amqp_url, abandoned)


def test_the_newest_of_each_stream_is_looked_at_however_many_come(
    lively: World, amqp_url: str, stream: str, recorded: sa.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is passed over lies before it, in however small chunks it came: the list shows how far the stream is."""
    monkeypatch.setattr(_intake, "LOOKED_MAX", 1)
    wait_recorded(amqp_url, recorded, stream)
    intake = _intake.Intake(BrokerAddress.of(amqp_url), Database(recorded.url))
    try:
        intake.come(frozenset([stream]))
        publish_plain(amqp_url, stream, [b"%d" % number for number in range(20)])
        wait_recorded(amqp_url, recorded, stream)
        rounds: list[_intake.Came] = []

        def counted() -> int:
            # All of them come in one round so, or nearly all.
            time.sleep(1)
            rounds.append(intake.come(frozenset([stream])))
            return sum(len(each.messages) + each.passed.total() for each in rounds)

        wait_until(lambda: counted() == 20, what="all of them")
    finally:
        intake.close()
    last = [each for each in rounds if each.messages or each.passed.total()][-1]
    assert [each.body for each in last.messages] == [b"19"]


def test_a_defect_ends_all_who_look_and_the_next_begin_anew(
    lively: World,
    amqp_url: str,
    stream: str,
    recorded: sa.Engine,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The log says why, who comes back is told that something was missed, and no follower of before goes on."""
    others = followers()
    with WebServer(lively.page(port=0)) as server:
        with looking(server.url, f"stream={stream}") as one, monkeypatch.context() as broken:
            publish_plain(amqp_url, stream, [(b"works", {})])
            wait_until(lambda: one.last_id, what="the first message")
            broken.setattr(_seen, "message_row", None)
            publish_plain(amqp_url, stream, [(b"breaks", {})])
            one.join()
        assert one.told("end") == [{"why": "stopping"}]
        (line,) = [each for each in caplog.records if each.name == "relatum_consumer.web._live._hub"]
        assert "has a defect" in line.getMessage()
        assert line.exc_info
        with looking(server.url, f"stream={stream}", headers={"Last-Event-ID": one.last_id}) as again:
            publish_plain(amqp_url, stream, [(b"works again", {})])
            wait_until(lambda: again.messages, what="the next message")
            assert len(again.told("missed")) == 1
            # That of before may still be ending.
            wait_until(lambda: len(followers() - others) <= 1, what="no follower of it but one")


def test_who_does_not_read_holds_up_nobody_and_is_given_up(
    lively: World, amqp_url: str, stream: str, recorded: sa.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others are told all; its connection ends, as one does whose client has vanished."""
    monkeypatch.setattr(_server, "_SILENT_MS", 1_000)
    with WebServer(lively.page(port=0, live_per_client=2)) as server, looking(server.url, f"stream={stream}") as other:
        address = urlsplit(server.url)
        with socket.socket() as silent:
            silent.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
            silent.connect((address.hostname, address.port))
            silent.sendall(b"GET /api/live/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
            wait_until(lambda: Looking(server.url).status == 429, what="its place")
            count = 0

            def is_free() -> bool:
                nonlocal count
                publish_plain(amqp_url, stream, [(b"x" * 200, {"host": "h" * 500})] * 500, confirm=False)
                count += 500
                return Looking(server.url).status == 200

            wait_until(is_free, what="room")
        wait_until(lambda: sum(d["shown"] + d["passed"] for d in other.told("messages")) >= count, what="all")
        assert other.told("lost") == []


def test_fifty_look_at_once(url: str, amqp_url: str, stream: str) -> None:
    """Each is told of each message, and none loses any."""
    with contextlib.ExitStack() as stack:
        looks = [stack.enter_context(looking(url, f"stream={stream}")) for _ in range(50)]
        for n in range(20):
            publish_plain(amqp_url, stream, [(b"%d-%d" % (n, m), {"host": "many"}) for m in range(20)])
        wait_until(lambda: all(len(each.messages) == 400 for each in looks), what="all, by all")
        assert all(each.told("lost") == [] for each in looks)


def test_it_is_there_below_a_path(lively: World, amqp_url: str, stream: str, recorded: sa.Engine) -> None:
    """As a proxy serves it: the page's own links lead below it."""
    with WebServer(lively.page(port=0, root_path="/relatum")) as server, looking(server.url):
        assert 'data-live="/relatum/api/live/events' in httpx.get(f"{server.url}live").text
