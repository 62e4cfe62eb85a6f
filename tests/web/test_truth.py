"""What the page says while a server is away: which one, since when, what the other knows; and never "there is none"."""

import html
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import anyio
import anyio.lowlevel
import pytest

from relatum import Broker
from relatum.common.waiting import within
from relatum.errors import Transient
from relatum.store.catalog import mask_key
from relatum_consumer.web.site import KEPT_MAX, Links, Site
from tests.support import LIMIT_S, in_a_try, wait_until
from tests.support.place import Place
from tests.support.proxy import Proxy
from tests.support.standstill import in_time, locked, silent_database
from tests.support.web import Asking, asking
from tests.web.conftest import BODIES, MANY, World, page_of, views
from tests.web.test_api import harmless

ANSWER_S = 2.0
"""Seconds that a server is given for a small question, as docs/web.md says."""

TIMEOUT_S = 3.0
"""Seconds that programs wait for an answer that does not come."""

EMPTY = (
    "No key is defined yet", "No stream is recorded yet", "No expectation is defined yet", "There is no collector yet",
    "No contexts are placed yet", "No groups", "No group of that age", "No serial consumers.",
)  # fmt: skip
"""What a view says where the question was answered, and the answer is that there is nothing."""

NAMES = re.compile(
    r"\b(timeout_s|[A-Z][a-z]+[A-Z]\w*(Error|Timeout|Unavailable|Lost|Refused))\b|(?<!within )\b\d\.\d{3,} s\b"
)
"""Words of the code, and figures that nobody needs."""


SEEN = (
    "search-empty", "search-many", "streams", "stream", "message-json", "conversation-stopped", "missing",
    "missing-swift", "groups", "collectors", "collector", "contexts", "super-stream",
)  # fmt: skip
"""Views; neighbours are asked for together, so those that wait long are neighbours."""


def shown(page: Asking, world: World, away: str) -> dict[str, str]:
    """Each view's text, while a server is away: it says so, names both, and calls nothing empty that it did not ask."""
    texts = {}
    for names in (SEEN[n : n + 2] for n in range(0, len(SEEN), 2)):
        with in_time(3 * ANSWER_S + 3):
            found = page.together([views(world)[name] for name in names])
        texts |= {name: answer.text for name, answer in zip(names, found, strict=True)}
    for name, text in texts.items():
        harmless(text)
        assert f'data-away="{away}"' in text, name
        assert text.count("has not answered since") == 1, name
        assert "PostgreSQL at " in html.unescape(text), name
        assert not any(words in text for words in EMPTY), (name, [words for words in EMPTY if words in text])
        assert not NAMES.search(text), (name, NAMES.search(text))
    return texts


def assert_shown(page: Asking, world: World, away: str, *said: tuple[str, str]) -> None:
    """Each view says so, and these words, in one of some tries: a busy machine may take too long for what is there."""

    def is_said() -> bool:
        texts = shown(page, world, away)
        lacking = [each for each in said if each[1] not in texts[each[0]]]
        print("not said:", lacking)
        return not lacking

    in_a_try(is_said, what="all that is known")


@contextmanager
def database_away(world: World, how: str) -> Iterator[str]:
    """A URL of a database that is away in one of the ways in which one can be."""
    if how == "silent":
        with silent_database() as url:
            yield url
    elif how == "stopped":
        yield "postgresql://nobody@127.0.0.1:1/none"
    else:
        yield re.sub("//[^@/]*@", "//stranger:wrong@", world.options["database"])


@pytest.mark.parametrize("how", ["refusing", "stopped", "silent"])
def test_a_page_without_its_database_says_so_in_each_view(
    world: World, how: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without its database each view says so and shows what the broker knows, and the log names the database."""
    # Every answer needs the keys, which are in the database. The broker's part has its own time limit.
    monkeypatch.setattr("relatum_consumer.web.endpoint.ANSWER_S", 0.5)
    with database_away(world, how) as url, asking(world.page(database=url, timeout_s=TIMEOUT_S)) as page:
        bounds = f"messages 0 to {MANY + 12:,}"
        keys = ("search-empty", "The keys cannot be listed now")
        assert_shown(page, world, "PostgreSQL", keys, ("stream", bounds), ("message-json", bounds))
        assert page.get("/").status_code == 200
        assert page.get("/api/live").status_code >= 400
        assert page.get("/api/health").json()["error"]["code"] == "not_well"
        for path in () if how == "refusing" else ("/streams", "/?key=host&value=busy"):
            given = page.get(path)
            assert (given.status_code, given.headers["Retry-After"]) == (503, "1")
    assert "PostgreSQL at " in caplog.text


@pytest.mark.parametrize("how", ["stopped", "frozen"])
def test_a_page_without_its_broker_shows_what_the_database_knows(
    world: World, amqp_url: str, stream_url: str, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Streams with what is recorded, keys, collectors and contexts; and all of it is as before once it is back."""
    with Proxy.to(stream_url) as proxy:
        options = world.page(broker=Broker(amqp_url, stream_url=proxy.url(stream_url)), timeout_s=TIMEOUT_S)
        with asking(options) as page:
            assert "data-away" not in page.get("/streams").text
            if how == "frozen":
                proxy.mode = "frozen"
            else:
                proxy.accepts = False
                proxy.cut()
            wait_until(lambda: "data-away" in page.get("/collectors").text)
            assert_shown(
                page,
                world,
                "RabbitMQ",
                ("search-empty", "The newest messages could not be read now"),
                ("search-empty", 'class="key hue'),
                ("streams", f"recorded up to {MANY + 11:,}"),
                ("stream", f"recorded: 0–{MANY + 11:,}"),
                ("missing", "not counted: RabbitMQ does not answer"),
                ("collectors", "books"),
                ("contexts", world.placed),
                ("super-stream", "not known: RabbitMQ does not answer"),
            )
            assert page.get("/api/search?key=host&value=busy").status_code == 503
            assert page.get(f"/message?stream={world.orders}&offset=0").status_code == 503
            proxy.mode, proxy.accepts = "pass", True
            wait_until(lambda: "data-away" not in page.get("/streams").text)
            wait_until(lambda: page.get(f"/message?stream={world.orders}&offset=0").status_code == 200)
    assert "RabbitMQ at " in caplog.text
    assert "answers again" in caplog.text


def test_each_view_names_its_servers(page: Asking, world: World) -> None:
    """The broker by its cluster's name."""
    for path in (views(world)[name] for name in SEEN):
        text = page.get(path).text
        assert re.search(r"RabbitMQ <b>[^<]+</b> at ", text), path
        assert "PostgreSQL at " in text, path
        assert "data-away" not in text, path


def test_a_message_is_shown_without_the_database_once_it_is_known_what_is_masked(world: World) -> None:
    """Keys come from the message itself; what belongs to it is said to be unknown."""
    database = world.options["database"]
    with Proxy.to(database) as proxy, asking(world.page(database=proxy.url(database))) as page:
        assert page.get(f"/message?stream={world.orders}&offset=0").status_code == 200
        proxy.accepts = False
        proxy.cut()
        wait_until(lambda: "data-away" in page.get("/collectors").text)
        text = page.get(f"/message?stream={world.orders}&offset=1").text
        assert "Headers" in text
        assert 'class="status failed"' in text
        assert page.get(f"/message/body?stream={world.orders}&offset=1").content == BODIES[1]


def test_what_takes_too_long_says_what_to_narrow(world: World) -> None:
    """Both servers answer: it is nobody's fault, and no error's text is shown."""
    database = world.options["database"]
    with locked(database, "relationships"), asking(world.page(timeout_s=0.5)) as page:
        for path in ("/missing/expectation?name=paid&span=all", "/?key=host&value=busy"):
            text = page.get(path).text
            assert 'data-problem="took_too_long"' in text, text
            assert "It took too long" in text
            assert "shorter span" in text
            assert "data-away" not in text
            assert not NAMES.search(text), NAMES.search(text)


def test_what_is_kept_is_asked_once_whatever_else_is_kept(world: World) -> None:
    """Also while so much is asked for that old answers are dropped."""
    asked, begun, others = 0, anyio.Event(), anyio.Event()

    async def ask() -> int:
        nonlocal asked
        asked += 1
        begun.set()
        await others.wait()
        return asked

    async def other() -> None:
        pass

    async def many() -> None:
        site = Site(world.page(), Links())
        async with anyio.create_task_group() as group:
            group.start_soon(site.cached, "slow", LIMIT_S, ask)
            await begun.wait()
            for number in range(KEPT_MAX + 1):
                # Not cached: dropped as soon as there are too many.
                await site.cached(number, 0.0, other)
            group.start_soon(site.cached, "slow", LIMIT_S, ask)
            others.set()
        await site.close()

    anyio.run(many)
    assert asked == 1


def test_a_call_waits_for_a_thread_only_until_its_deadline(world: World) -> None:
    """A page that leaves out a part after seconds is not held up by calls that take longer."""

    async def ask() -> None:
        site, ending = Site(world.page(), Links()), threading.Event()
        async with anyio.create_task_group() as group:
            for _ in range(10):
                group.start_soon(site.in_thread, ending.wait, 5.0)
            await anyio.lowlevel.checkpoint()
            with within(0.2), pytest.raises(Transient):
                await site.in_thread(int)
            ending.set()
        await site.close()

    anyio.run(ask)


def test_callers_of_a_silent_broker_wait_together(world: World, amqp_url: str, stream_url: str) -> None:
    """However many there are, none waits for the time-outs of all those before it."""
    with Proxy.to(stream_url) as proxy:
        proxy.mode = "frozen"
        broker = Broker(amqp_url, stream_url=proxy.url(stream_url))
        with asking(world.page(broker=broker, timeout_s=1.0)) as page, in_time(5):
            found = page.together([f"/api/live?limit={number}" for number in range(1, 41)])
        assert {each.status_code for each in found} == {503}


def test_a_key_is_masked_although_the_database_counts_as_away(place: Place) -> None:
    """The check may lack a connection that lookups have."""
    place.put_recorded((b"", {"order_id": "a"}), keys=["order_id"])

    async def ask() -> None:
        site = Site(page_of(place), Links())
        await site.keys_last_known()
        assert not site.masking.is_masked_key("order_id")
        site.servers.database.error = "too many connections"
        mask_key(place.engine, "order_id", on=True)
        with anyio.fail_after(20):
            while not site.masking.is_masked_key("order_id"):
                await site.keys_last_known()
                await anyio.sleep(0.1)
        await site.close()

    anyio.run(ask)
