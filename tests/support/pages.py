"""The Python that pages of docs show, to be run unchanged."""

import asyncio
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aio_pika
import pika

import relatum
from tests.support import broker_connection

DOCS = Path(__file__).parents[2] / "docs"


def text_of(page: str, heading: str = "") -> str:
    """A page, or what stands below one of its headings."""
    text = (DOCS / page).read_text()
    return text.partition(f"\n## {heading}")[2].partition("\n## ")[0] if heading else text


def blocks_of(page: str, heading: str = "", renamed: Mapping[str, str] | None = None) -> list[str]:
    """The blocks of Python there; of texts in quotes, those that are `renamed` are other ones."""
    given = renamed or {}
    blocks = re.findall(r"```python\n(.*?)```", text_of(page, heading), re.DOTALL)
    return [
        re.sub(r'"([^"\n]*)"', lambda hit: repr(given[hit[1]]) if hit[1] in given else hit[0], each) for each in blocks
    ]


def run(page: str, block: str, names: dict[str, Any]) -> None:
    exec(compile(block, f"docs/{page}", "exec"), names)


@contextmanager
def names_there(broker: str, database: str) -> Iterator[dict[str, Any]]:
    """What most pages take as given: clients, URLs, and a connection, which is released at the end."""
    modules = {"asyncio": asyncio, "relatum": relatum, "pika": pika, "aio_pika": aio_pika}
    with broker_connection(broker) as connection:
        try:
            yield {**modules, "BROKER": broker, "DATABASE": database, "connection": connection}
        finally:
            relatum.release(connection)
