"""What docs/groups.md shows of putting groups is run, as it stands there."""

import asyncio
import re
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import aio_pika
import pika
import sqlalchemy as sa

import relatum
from relatum.membership import Membership, assess, membership
from relatum.reading import StreamReader
from relatum_consumer import Relations
from tests.support import broker_connection, wait_recorded

PAGE = (Path(__file__).parents[2] / "docs" / "groups.md").read_text()


def blocks(stream: str) -> list[str]:
    """The page's Python up to the end of its section about putting, on this stream."""
    until = PAGE.index("\n## ", PAGE.index("\n## Putting") + 1)
    found = re.findall(r"```python\n(.*?)```", PAGE[:until], re.DOTALL)
    return [block.replace('"orders"', repr(stream)) for block in found]


def begin_group(names: dict[str, Any], stream: str) -> None:
    """Leave a group behind as a publisher that failed does, for the block that goes on with it."""
    group = relatum.MessageGroup(names["channel"], "", stream)
    group.put(b"first line")
    names["group"] = group


def groups_of(stream_url: str, stream: str) -> list[list[Membership]]:
    """The places of a stream's messages, by group, in the order of the groups' first messages."""
    groups: dict[str, list[Membership]] = {}
    with StreamReader.open(stream_url) as reader:
        for message in reader.iterate(stream):
            place = membership(message.headers)
            assert place is not None
            groups.setdefault(place.group_id, []).append(place)
    return list(groups.values())


def test_what_the_page_shows_of_putting_works(
    amqp_url: str, stream_url: str, database_url: str, engine: sa.Engine, stream_name: str
) -> None:
    """Each block runs after the one before; the groups they make are whole, where they put a last message."""
    names: dict[str, Any] = {
        "asyncio": asyncio,
        "BROKER": amqp_url,
        "relatum": relatum,
        "pika": pika,
        "aio_pika": aio_pika,
        "DATABASE": database_url,
    }
    with ExitStack() as stack:
        names["connection"] = stack.enter_context(broker_connection(amqp_url))
        names["relations"] = stack.enter_context(Relations(amqp_url, database_url, stream_url=stream_url))
        stack.callback(relatum.release, names["connection"])
        for block in blocks(stream_name):
            if "resume" in block:
                begin_group(names, stream_name)
                wait_recorded(amqp_url, engine, stream_name)  # the recorder has defined the key by then
            exec(compile(block, "docs/groups.md", "exec"), names)
            if "channel" not in names:
                names["channel"] = names["connection"].channel()
                names["channel"].confirm_delivery()
        wait_recorded(amqp_url, engine, stream_name)
    found = groups_of(stream_url, stream_name)
    assert [len(places) for places in found] == [3, 2, 3, 2]
    assert [assess(places[0].group_id, places).is_complete for places in found] == [True, True, True, False]
