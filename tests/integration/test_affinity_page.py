"""What docs/affinity.md shows is run, as it stands there."""

import asyncio
import re
from pathlib import Path

import aio_pika
import pika
import pytest

import relatum
from relatum.contexts import AffinityOptions
from relatum.superstreams import Layout
from tests.support import broker_connection
from tests.support.affinity import Partitions

PAGE = (Path(__file__).parents[2] / "docs" / "affinity.md").read_text()


def test_what_the_page_shows_works(
    layout: Layout, amqp_url: str, database_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each block runs after the one before; what joins a set lies with it, and the open sets are listed."""
    blocks = [
        block.replace('"invoices"', repr(layout.super_stream))
        for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    ]
    with broker_connection(amqp_url) as connection:
        names = {
            "asyncio": asyncio,
            "aio_pika": aio_pika,
            "relatum": relatum,
            "AffinityOptions": AffinityOptions,
            "pika": pika,
            "connection": connection,
            "BROKER": amqp_url,
            "DATABASE": database_url,
        }
        try:
            for block in blocks:
                if "affinity_predecessor" in block:
                    names["router"] = relatum.AffinityRouter(layout.super_stream, database_url)
                exec(block, names)
            names["router"].close()
        finally:
            relatum.release(connection)
    partitions = Partitions(amqp_url, layout)
    assert list(partitions.of_set("invoice 18").values()) == [[b"2 lamps", b"120 EUR"]]
    assert "invoice 17" in capsys.readouterr().out
    assert names["handle"].partition is not None
