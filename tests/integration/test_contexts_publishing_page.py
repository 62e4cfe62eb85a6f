"""What docs/contexts.md shows of publishing is run, as it stands there."""

import asyncio
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import aio_pika
import pika

import relatum
from relatum.contexts import ContextOptions
from tests.support import broker_connection
from tests.support.routing import consumed
from tests.support.super_streams import super_stream

PAGE = (Path(__file__).parents[2] / "docs" / "contexts.md").read_text()
PUBLISHING = PAGE.partition("\n## Publishing\n")[2].partition("\n## ")[0]


def test_what_the_page_shows_of_publishing_works(amqp_url: str, stream_url: str, database_url: str) -> None:
    """The blocks run one after the other; a consumer gets what they publish, in order."""
    names: dict[str, Any] = {"relatum": relatum, "pika": pika, "aio_pika": aio_pika, "asyncio": asyncio}
    names |= {"BROKER": amqp_url, "DATABASE": database_url}

    with super_stream(amqp_url, stream_url, 3) as layout, broker_connection(amqp_url) as connection:
        names["connection"] = connection
        for block in re.findall(r"```python\n(.*?)```", PUBLISHING, re.DOTALL):
            block = block.replace('"orders"', repr(layout.super_stream))
            exec(compile(block, "docs/contexts.md", "exec"), names)
        relatum.release(connection)
        found = consumed(layout.super_stream, database_url, amqp_url, 5)
    assert found == {"account 17": [b"opened", b"credited", b"debited", b"closed", b"archived"]}


def test_the_page_names_the_routers_options_and_defaults() -> None:
    """Each option of the table is one of the routers', with the default given there, and none is left out."""
    rows = re.findall(r"^\| `(\w+)` \| `?\"?([\w,. ]+?)\"?`? \|", PUBLISHING, re.MULTILINE)
    told = {name: value for name, value in rows if name.islower() or "_" in name}
    wanted = {each.name: each.default for each in fields(ContextOptions)}
    assert set(told) == set(wanted)
    for name, default in wanted.items():
        assert told[name].replace(",", "") == (f"{default:g}" if isinstance(default, float) else str(default))
