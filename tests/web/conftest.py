"""What the page shows in these tests: a database and streams of their own, recorded once for all tests of a process."""

import json
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlsplit, urlunsplit

import psycopg
import pytest
from psycopg import sql

from relatum.keys import KeyDefinition
from relatum.store import make_engine
from relatum_consumer import Expectation
from relatum_consumer.expectations import add_expectations
from relatum_consumer.web import WebOptions
from tests.support import declare_stream, delete_stream, publish_plain, recording, unique_name, wait_recorded
from tests.support.web import Asking, asking

HOSTILE: Final = """<img src=x onerror=hacked()>"'`{{7*7}}/..\u202e%2f#?&東"""
"""Text that would do harm wherever it were taken for what it is not."""

KEYS: Final = [
    KeyDefinition("order_id"),
    KeyDefinition("host"),
    KeyDefinition("place", source=("header:shelf", "header:row")),
    KeyDefinition("card"),
]

TIME_US: Final = 1_700_000_000_000_000
MANY: Final = 230
"""Messages that share a value, many of them of one moment."""


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


@dataclass(frozen=True)
class World:
    """What there is to be seen.

    Attributes:
        options: Of a page on it.
        orders: A stream of `BODIES`, of `MANY` messages of one host, and of one more that is not recorded.
        payments: A stream whose name is hostile; one message for each body.
        first_of_many: The offset of the first of the many.
    """

    options: dict[str, Any]
    orders: str
    payments: str
    first_of_many: int

    def page(self, **options: Any) -> WebOptions:
        """The options of a page on it, without limits to speak of."""
        unlimited = {"requests_per_s": 100_000, "requests_burst": 100_000, "requests_at_once": 1_000, "timeout_s": 60.0}
        return WebOptions(**(self.options | unlimited | options))


def expectations(orders: str, payments: str) -> list[Expectation]:
    """What is expected of them: that comes true, comes late, does not come, or has time left."""
    return [
        Expectation("answered <b>", orders, "host", payments, 60),
        Expectation("paid", orders, "order_id", payments, 3600),
        Expectation("patient", orders, "host", payments, 20 * 365 * 86_400),
        Expectation("shelved", orders, "place", payments, 60),
        Expectation("swift", orders, "card", payments, 0.0001),
    ]


@pytest.fixture(scope="session")
def web_database_url(database_server_url: str, _migrated_template: str, _copying: str) -> Iterator[str]:
    """A database for all these tests."""
    name = unique_name("relatum_web").replace("-", "_")
    with psycopg.connect(database_server_url, autocommit=True) as connection:
        made = sql.SQL("CREATE DATABASE {} TEMPLATE {} " + _copying)  # type: ignore[arg-type]
        connection.execute(made.format(sql.Identifier(name), sql.Identifier(_migrated_template)))
    yield database_server_url.rpartition("/")[0] + f"/{name}"
    with psycopg.connect(database_server_url, autocommit=True) as connection:
        connection.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(name)))


@pytest.fixture
def reader_url(web_database_url: str) -> Iterator[str]:
    """The URL of a user in `relatum_reader`."""
    name = unique_name("page").replace("-", "_")
    with psycopg.connect(web_database_url, autocommit=True) as administrator:
        made = sql.SQL("CREATE ROLE {} LOGIN PASSWORD 'x' IN ROLE relatum_reader")
        administrator.execute(made.format(sql.Identifier(name)))
        parts = urlsplit(web_database_url)
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
        with recording(amqp_url, engine, orders, payments, keys=KEYS):
            for name in (orders, payments):
                wait_recorded(amqp_url, engine, name)
        add_expectations(web_database_url, expectations(orders, payments))
        publish_plain(amqp_url, orders, [(b"later", {"host": "late", "order_id": "late"})])
        options = {"broker": amqp_url, "database": web_database_url, "stream_url": stream_url}
        yield World(options, orders, payments, len(BODIES))
    finally:
        engine.dispose()
        for name in (orders, payments):
            delete_stream(amqp_url, name)


@pytest.fixture(scope="session")
def page(world: World) -> Iterator[Asking]:
    """The page on it, with its defaults."""
    with asking(world.page()) as page:
        yield page
