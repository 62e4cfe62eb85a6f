"""After every integration test, the table must equal the streams; and what several files of them use."""

from collections.abc import Generator, Iterator

import pytest
from pika.adapters.blocking_connection import BlockingChannel

from relatum.errors import StreamNotFound
from relatum.recording import verify
from relatum.store import make_engine, streams_named
from tests.support import broker_connection, declare_stream, delete_stream, unique_name


def pytest_configure(config: pytest.Config) -> None:
    """Name the marker of tests that leave table and streams different on purpose."""
    config.addinivalue_line("markers", "differs: the test leaves table and streams different, on purpose")


@pytest.fixture
def channel(amqp_url: str) -> Iterator[BlockingChannel]:
    """A channel in confirm mode."""
    with broker_connection(amqp_url) as connection:
        opened = connection.channel()
        opened.confirm_delivery()
        yield opened


@pytest.fixture
def other_stream(amqp_url: str) -> Iterator[str]:
    """The name of a second new stream."""
    name = unique_name()
    declare_stream(amqp_url, name)
    yield name
    delete_stream(amqp_url, name)


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
    engine = make_engine(database)
    try:
        with engine.connect() as connection:
            names = [stream.name for stream in streams_named(connection, "/", None)]
        for name in names:
            _verify_stream(broker, engine, name)
    finally:
        engine.dispose()


def _verify_stream(broker: str, engine: object, name: str) -> None:
    try:
        report = verify(broker, engine, [name])
    except StreamNotFound:
        return  # The test deleted it.
    assert report.ok, report.streams[0].differences[:10]
