"""What the page shows in these tests: a database and streams of their own, recorded once for all tests of a process."""

import json
import struct
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, LiteralString
from urllib.parse import urlsplit, urlunsplit

import psycopg
import pytest
import sqlalchemy as sa
from psycopg import sql

import relatum
from relatum import MessageCollector, SerialConsumer, SerializationContexts
from relatum.collecting import Bulk, ExecutorOptions, collector_status
from relatum.keys import KeyDefinition
from relatum.store import make_engine
from relatum.superstreams import Layout
from relatum_consumer import Expectation
from relatum_consumer.expectations import add_expectations
from relatum_consumer.web import WebOptions
from tests.support import (
    declare_stream,
    delete_stream,
    publish_plain,
    record,
    recording,
    unique_name,
    wait_recorded,
    wait_until,
)
from tests.support.databases import administer, database_name, named
from tests.support.groups import of_group, whole_group
from tests.support.super_streams import super_stream
from tests.support.web import Asking, asking

if TYPE_CHECKING:
    from tests.web.conversations import Talks

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
NUMBER = "0042"

MASKED_KEYS = [
    KeyDefinition("card", masked=True),
    KeyDefinition("again", source="header:card"),
    KeyDefinition("at", source=("header:card", "header:shop")),
    KeyDefinition("number", type="integer", masked=True),
    KeyDefinition("paid_by", names="card"),
    KeyDefinition("shop"),
]

MASKED_HEADERS = {"card": SECRET, "shop": "north", "number": NUMBER, "paid_by": SECRET}


def png() -> bytes:
    """A picture of one point."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", 1, 1, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", zlib.compress(b"\0\xff\0\0")) + chunk(b"IEND", b"")


BODIES: Final[list[bytes]] = [
    json.dumps({"order": {"id": 7, "lines": [{"sku": "a", "price": 1.10}] * 3}, "note": HOSTILE}).encode(),
    HOSTILE.encode(),
    b"<!doctype html><script>hacked()</script>",
    b"<svg xmlns='http://www.w3.org/2000/svg' onload='hacked()'><script>hacked()</script></svg>",
    png(),
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
    """What there is to be seen.

    Attributes:
        options: Of a page on it.
        orders: A stream of `BODIES`, of `MANY` messages of one host, and of one more that is not recorded.
        payments: A stream whose name is hostile; one message for each body, and then those of groups.
        placed: A super stream whose contexts are placed, and of which one was moved.
        first_of_many: The offset of the first of the many.
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
    """What is expected of them: that comes true, comes late, does not come, or has time left."""
    return [
        Expectation("answered <b>", orders, "host", payments, 60),
        Expectation("paid", orders, "order_id", payments, 3600),
        Expectation("patient", orders, "host", payments, 20 * 365 * 86_400),
        Expectation("shelved", orders, "place", payments, 60),
        Expectation("swift", orders, "card", payments, 0.0001),
    ]


@contextmanager
def web_database(server_url: str, template: str, copying: LiteralString) -> Iterator[str]:
    """A database of the schema, for as long as tests need it."""
    name = database_name("relatum_web")
    administer(server_url, "CREATE DATABASE {} TEMPLATE {} " + copying, name, template)
    yield named(server_url, name)
    administer(server_url, "DROP DATABASE {} WITH (FORCE)", name)


@contextmanager
def held_up(url: str) -> Iterator[Callable[[], int]]:
    """A database that answers no look-up; gives what says how many sessions wait for it."""
    waiting = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
    with psycopg.connect(url, autocommit=True) as watching, psycopg.connect(url) as holding:
        holding.execute("LOCK TABLE relatum.relationships IN ACCESS EXCLUSIVE MODE")
        yield lambda: int(watching.execute(waiting).fetchall()[0][0])
        holding.rollback()


@pytest.fixture(scope="session")
def web_database_url(database_server_url: str, _migrated_template: str, _copying: LiteralString) -> Iterator[str]:
    """A database for all these tests."""
    with web_database(database_server_url, _migrated_template, _copying) as url:
        yield url


@pytest.fixture(scope="session")
def talks(
    amqp_url: str, stream_url: str, database_server_url: str, _migrated_template: str, _copying: LiteralString
) -> "Iterator[Talks]":
    """Conversations, in a database of their own."""
    from tests.web.conversations import talking

    with (
        web_database(database_server_url, _migrated_template, _copying) as url,
        talking(amqp_url, stream_url, url) as talks,
    ):
        yield talks


@pytest.fixture(scope="session")
def lively(
    amqp_url: str, stream_url: str, database_server_url: str, _migrated_template: str, _copying: LiteralString
) -> Iterator[World]:
    """As `world`, for what is recorded while a test looks on; `orders` is a stream that nobody records any more."""
    orders = unique_name("quiet")
    declare_stream(amqp_url, orders)
    with web_database(database_server_url, _migrated_template, _copying) as url:
        engine = make_engine(url)
        publish_plain(amqp_url, orders, [(b"quiet", {})])
        record(amqp_url, engine, orders, keys=KEYS)
        engine.dispose()
        yield World({"broker": amqp_url, "database": url, "stream_url": stream_url}, orders, "", 0, "")
    delete_stream(amqp_url, orders)


@pytest.fixture
def reader_url(web_database_url: str) -> Iterator[str]:
    """The URL of a user in `relatum_reader`, for the database that is shared."""
    with reading_only(web_database_url) as url:
        yield url


@contextmanager
def reading_only(database_url: str) -> Iterator[str]:
    """A database's URL for a user in `relatum_reader`."""
    name = unique_name("page").replace("-", "_")
    with psycopg.connect(database_url, autocommit=True) as administrator:
        made = sql.SQL("CREATE ROLE {} LOGIN PASSWORD 'x' IN ROLE relatum_reader")
        administrator.execute(made.format(sql.Identifier(name)))
        parts = urlsplit(database_url)
        yield urlunsplit(parts._replace(netloc=f"{name}:x@{parts.hostname}:{parts.port}"))
        administrator.execute(sql.SQL("DROP OWNED BY {}").format(sql.Identifier(name)))
        administrator.execute(sql.SQL("DROP ROLE {}").format(sql.Identifier(name)))


@pytest.fixture(scope="session")
def world(amqp_url: str, stream_url: str, web_database_url: str) -> Iterator[World]:
    """Streams with messages of all kinds, recorded."""
    orders, payments = unique_name("orders"), f'{unique_name("pay")} "/<b>?#%41&ö'
    engine = make_engine(web_database_url)
    try:
        for name in (orders, payments):
            declare_stream(amqp_url, name)
        odd = {"order_id": f"o-{HOSTILE}", "card": "4711-secret", "large": 2**62, "flag": True, HOSTILE[:40]: HOSTILE}
        shelf = {"shelf": "a|b", "row": "7"}
        bodies = [(body, odd | shelf | {"relatum_time": TIME_US + n}) for n, body in enumerate(BODIES)]
        many = [(b"%d" % n, {"host": "busy", "relatum_time": TIME_US + 1_000_000 * (n // 60)}) for n in range(MANY)]
        publish_plain(amqp_url, orders, bodies + many)
        publish_plain(amqp_url, payments, [(b"paid", odd | {"relatum_time": TIME_US + 500 + n}) for n in range(12)])
        publish_plain(amqp_url, payments, GROUPED)
        with recording(amqp_url, engine, orders, payments, keys=KEYS):
            for name in (orders, payments):
                wait_recorded(amqp_url, engine, name)
        add_expectations(web_database_url, expectations(orders, payments))
        publish_plain(amqp_url, orders, [(b"later", {"host": "late", "order_id": "late"})])
        _collect(amqp_url, web_database_url, payments)
        options = {"broker": amqp_url, "database": web_database_url, "stream_url": stream_url}
        with super_stream(amqp_url, stream_url, 2) as layout:
            _place(amqp_url, web_database_url, layout)
            yield World(options, orders, payments, len(BODIES), layout.super_stream)
    finally:
        engine.dispose()
        for name in (orders, payments):
            delete_stream(amqp_url, name)


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
    """Place three contexts, and move one of them."""
    with SerializationContexts(layout.super_stream, database, broker=broker, header="order_id") as contexts:
        first, second = (each.stream for each in layout)
        contexts.assign(["a & b", "c", f"o-{HOSTILE}"], first)
        contexts.move("c", second)
        with SerialConsumer(layout.super_stream, "billing", database=database, broker=broker) as consumer:
            assert consumer.status().partitions


@pytest.fixture(scope="session")
def page(world: World) -> Iterator[Asking]:
    """The page on it, with its defaults."""
    with asking(world.page()) as page:
        yield page


@pytest.fixture
def masked(amqp_url: str, engine: sa.Engine, database_url: str, stream_name: str) -> str:
    """A stream of three messages that have masked values, and one that has none; its database is the test's own."""
    given = [(f"it is {SECRET}".encode(), MASKED_HEADERS)] * 3 + [(b"shown", {"shop": "north"})]
    publish_plain(amqp_url, stream_name, given)
    record(amqp_url, engine, stream_name, keys=MASKED_KEYS)
    return stream_name
