"""What docs/super-streams.md shows is run, as it stands there."""

import asyncio
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aio_pika
import pika
import pytest

import relatum
from relatum.superstreams import Layout, StreamOptions, declare_super_stream, describe_super_stream
from tests.support import broker_connection, unique_name
from tests.support.super_streams import bodies, delete_by_hand

PAGE = (Path(__file__).parents[2] / "docs" / "super-streams.md").read_text()


@pytest.fixture
def name(amqp_url: str) -> Iterator[str]:
    """The name of a super stream that is not there yet."""
    name = unique_name("relatum-flights")
    yield name
    delete_by_hand(amqp_url, name, *(partition.stream for partition in Layout.numbered(name, 3)))


def test_what_the_page_shows_works(
    amqp_url: str, stream_url: str, database_url: str, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each block runs after the one before; all messages are there, and what is said to be printed is."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    with broker_connection(amqp_url) as connection:
        names: dict[str, Any] = {
            "BROKER": amqp_url,
            "DATABASE": database_url,
            "connection": connection,
            "asyncio": asyncio,
            "relatum": relatum,
            "pika": pika,
            "aio_pika": aio_pika,
        }
        for block in (block.replace('"flights"', repr(name)) for block in blocks):
            exec(block, names)
        relatum.release(connection)
    printed = capsys.readouterr().out.splitlines()
    assert printed[:3] == [f"{place} {name}-{place} {place}" for place in range(3)]
    assert printed[-1] == f"{name}-1"
    layout = describe_super_stream(amqp_url, name, stream_url=stream_url)
    assert layout == declare_super_stream(amqp_url, name, 3, stream_url=stream_url)
    assert sum(map(len, bodies(stream_url, layout).values())) == 6


def test_the_page_names_each_option() -> None:
    """What a super stream to publish to, and what new streams, can be given stands in the tables."""
    for parameters in (inspect.signature(relatum.SuperStream), inspect.signature(StreamOptions)):
        for parameter in parameters.parameters:
            assert f"| `{parameter}` |" in PAGE, parameter
