"""After every integration test, the table must equal the streams; and what several files of them use."""

import asyncio
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any
from zlib import crc32

import psycopg
import pytest
import sqlalchemy as sa
from pika.adapters.blocking_connection import BlockingChannel, BlockingConnection

from relatum import otel
from relatum.common.waiting import LoopThread
from relatum.errors import StreamNotFound
from relatum.recording import verify
from relatum.store.database import Database
from relatum.superstreams import Layout
from relatum_consumer import Relations
from tests.support import broker_connection, declare_stream, delete_stream, new_streams, unique_name
from tests.support.groups import of_group, whole_group
from tests.support.place import FailingPlace, Place
from tests.support.plans import filled_database
from tests.support.relations import FACES, open_relations
from tests.support.serial_consuming import SerialBed, Stage
from tests.support.spans import Spans, collected_spans

_RECORDED = "SELECT name FROM relatum.streams WHERE vhost = '/' AND replaced_at IS NULL"


def pytest_configure(config: pytest.Config) -> None:
    """Name the marker of tests that leave table and streams different on purpose."""
    config.addinivalue_line("markers", "differs: the test leaves table and streams different, on purpose")


@pytest.fixture
def connection(amqp_url: str) -> Iterator[BlockingConnection]:
    with broker_connection(amqp_url) as connection:
        yield connection


@pytest.fixture
def channel(connection: BlockingConnection) -> BlockingChannel:
    """A channel in confirm mode."""
    opened = connection.channel()
    opened.confirm_delivery()
    return opened


@pytest.fixture
def longest(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """The longest callback of components' loops, in seconds of a processor: others may have it in the meantime."""
    found = {"": 0.0}
    run = asyncio.events.Handle._run

    def measured(self: Any) -> None:
        begun = time.thread_time()
        run(self)
        if isinstance(threading.current_thread(), LoopThread):
            took_s = time.thread_time() - begun
            if took_s > max(found.values()):
                found.clear()
                found[repr(self)] = took_s

    monkeypatch.setattr(asyncio.events.Handle, "_run", measured)
    return found


@pytest.fixture
def copies(amqp_url: str) -> Iterator[str]:
    """The name of a stream of copies, which the first publisher of copies declares."""
    name = unique_name("copies")
    yield name
    delete_stream(amqp_url, name)


@pytest.fixture
def streams(amqp_url: str) -> Iterator[list[str]]:
    """The names of three new streams, ascending."""
    with new_streams(amqp_url, 3) as names:
        yield names


@pytest.fixture
def fleeting(place: Place) -> Iterator[Place]:
    """The same with a new stream that retains four segments of 50 kB, and so loses what is older."""
    name = unique_name("fleeting")
    declare_stream(place.amqp, name, x_max_length_bytes=200_000, x_stream_max_segment_size_bytes=50_000)
    yield replace(place, stream=name)
    delete_stream(place.amqp, name)


@pytest.fixture
def failing(face: str, place: Place) -> Iterator[FailingPlace]:
    """Behind lines that fail, with an order, a whole group, and a part of one in its stream."""
    place.put((b"", {"order_id": 1}), *whole_group(1, 2), of_group(2, 1))
    made = FailingPlace(place, face)
    yield made
    made.close()


@pytest.fixture
def dead_stream(amqp_url: str) -> Iterator[str]:
    name = unique_name("dead")
    declare_stream(amqp_url, name)
    yield name
    delete_stream(amqp_url, name)


@pytest.fixture
def database(database_url: str) -> Iterator[Database]:
    with closing(Database(database_url)) as shared:
        yield shared


@pytest.fixture
def ledger(engine: sa.Engine) -> Callable[[], list[str]]:
    """A table `ledger` of bodies for executors to write to; gives what it holds."""
    with engine.begin() as connection:
        connection.execute(sa.text("CREATE TABLE ledger (body text)"))

    def bodies() -> list[str]:
        with engine.connect() as connection:
            return list(connection.scalars(sa.text("SELECT body FROM ledger ORDER BY body")))

    return bodies


@pytest.fixture
def stage(amqp_url: str, database_url: str, engine: sa.Engine, layout: Layout, channel: BlockingChannel) -> Stage:
    """That super stream, whose contexts are published to and moved by hand."""
    return Stage(SerialBed(amqp_url, engine, layout, channel), database_url, amqp_url, engine)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Ask by one face or the other, by turns: `make check` proves that they are twins. A long run asks by both."""
    marked = [each for each in metafunc.definition.iter_markers("parametrize") if each.args[0] == "one_face"]
    if "one_face" in metafunc.fixturenames and not marked:
        one = FACES[crc32(metafunc.function.__name__.encode()) % 2]
        metafunc.parametrize("one_face", FACES if metafunc.config.getoption("--long") else [one])


@pytest.fixture
def relations(one_face: str, amqp_url: str, database_url: str) -> Iterator[Relations]:
    with open_relations(one_face, amqp_url, database_url) as relations:
        yield relations


@pytest.fixture
def spans() -> Iterator[Spans]:
    """The spans that the test makes, with OpenTelemetry set up for it alone."""
    with collected_spans() as spans:
        yield spans
    otel.configure()


@pytest.fixture(scope="module")
def filled(
    request: pytest.FixtureRequest, database_server_url: str, _migrated_template: str
) -> Iterator[psycopg.Connection[Any]]:
    """A connection to a database with what the file's `FILL` puts there."""
    with filled_database(database_server_url, _migrated_template, request.module.FILL) as connection:
        yield connection


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Function) -> Generator[None, None, None]:
    """Compare before the fixtures are torn down: the streams are still there."""
    try:
        if item.get_closest_marker("differs") is None:
            _verify(item)
    finally:
        yield


def _verify(item: pytest.Function) -> None:
    broker, database = item.funcargs.get("amqp_url"), item.funcargs.get("database_url")
    if broker is None or database is None:
        return
    with psycopg.connect(database) as connection:
        names = [name for (name,) in connection.execute(_RECORDED)]
    if not names:
        return
    try:
        report = verify(broker, database, names)
    except StreamNotFound:
        return  # The test has deleted all.
    assert all(isinstance(error, StreamNotFound) for error in report.failed.values()), report.failed
    assert not [each.differences[:10] for each in report.streams if each.difference_count]
