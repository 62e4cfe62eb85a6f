"""Reading whole groups in logical order, compared with reading the same messages straight through."""

import random
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final
from unittest.mock import patch

from benchmarks import _streams as streams
from benchmarks._bare import FRAME_RECORDS, BareStreamClient
from benchmarks._context import Context
from benchmarks._recorder import catch_up
from benchmarks._results import Row, attempted
from benchmarks._timing import in_turns, median
from relatum import GROUP_KEY
from relatum.reading import StreamReader
from relatum.store.catalog import add_keys
from relatum.store.database import as_engine
from relatum_consumer import Relations

GROUP: Final = "group_reading"

GROUPS: Final = 10_000
SIZE: Final = 10
AIM_OF_BODIES: Final = 0.3
AIM_OF_HEADERS: Final = 0.9
ROUNDS: Final = 5

LARGE_GROUPS: Final = 1_750
LARGE_BYTES: Final = 10_240
LARGE_IN_FRAME: Final = 90
AIM_OF_BYTES: Final = 1.5
"""Maximum ratio of the received bytes to the groups' bodies."""

Way = Callable[[], int]


def measure(context: Context) -> Iterator[Row]:
    """Yield the rows about reading groups."""
    groups = min(GROUPS, context.messages // SIZE)
    what = f"logical-order reading of {groups:,} groups of {SIZE}, shuffled"
    yield from attempted(GROUP, what, lambda: _compare(context, groups, what))
    what = f"bytes received for {LARGE_GROUPS:,} groups of {SIZE} × {LARGE_BYTES // 1024} KiB, all mixed"
    yield from attempted(GROUP, what, lambda: [_received(context, what)])


def _compare(context: Context, groups: int, what: str) -> Iterator[Row]:
    messages = groups * SIZE
    stream, database = _recorded(context, groups, streams.BODY_BYTES)
    context.say(what)
    with StreamReader.open(context.broker) as reader, Relations(context.broker, database) as relations:
        # All access every body, since unused messages are not decoded. Groups are checked by their headers.
        ways: dict[str, Way] = {
            "groups": lambda: _by_group(relations, stream, groups),
            "through": lambda: sum(len(message.body) for message in reader.iterate(stream)),
            "decoded": lambda: sum(len(message.body) for message in reader.iterate(stream) if message.headers),
        }
        sizes = {way() for way in ways.values()}
        assert len(sizes) == 1, "all read the same messages"
        taken = {name: median(values) for name, values in in_turns(ways, context.rounds(ROUNDS)).items()}
    context.drop_database(database)
    ours, seconds = f"{messages / taken['groups']:,.0f} messages/s", {f"{way}_s": taken[way] for way in taken}
    for way, other, aim in (
        ("through", "reading bodies straight through", AIM_OF_BODIES),
        ("decoded", "reading through with headers", AIM_OF_HEADERS),
    ):
        ratio = taken[way] / taken["groups"]
        yield Row(
            GROUP,
            what if way == "through" else "the same",
            ours,
            f"{messages / taken[way]:,.0f} messages/s: {other}",
            ratio,
            f"≥ {aim:g} ×",
            ratio >= aim,
            figures=seconds,
        )


def _received(context: Context, what: str) -> Row:
    """Compare the received bytes. Chunks are received whole and mix the groups, so the minimum is the whole stream."""
    stream, database = _recorded(context, LARGE_GROUPS, LARGE_BYTES)
    context.say(what)
    with StreamReader.open(context.broker) as reader, _counted() as once:
        size = sum(len(message.body) for message in reader.iterate(stream))
    with Relations(context.broker, database) as relations, _counted() as received:
        assert _by_group(relations, stream, LARGE_GROUPS) == size
    context.drop_database(database)
    ratio = received[0] / size
    return Row(
        GROUP,
        what,
        f"{received[0] / 2**20:,.0f} MiB",
        f"{size / 2**20:,.0f} MiB: their bodies (the stream once: {once[0] / 2**20:,.0f} MiB)",
        ratio,
        f"≤ {AIM_OF_BYTES:g} ×",
        ratio <= AIM_OF_BYTES,
        figures={"received_bytes": received[0], "once_bytes": once[0], "bodies_bytes": size},
    )


@contextmanager
def _counted() -> Iterator[list[int]]:
    """Count the bytes that this process's sockets receive, PostgreSQL's excluded."""
    count = [0]
    receive = socket.socket.recv_into

    def counting(receiver: socket.socket, *arguments: Any) -> int:
        received = receive(receiver, *arguments)
        count[0] += received
        return received

    with patch.object(socket.socket, "recv_into", counting):
        yield count


def _recorded(context: Context, groups: int, size: int) -> tuple[str, str]:
    """Return a stream of groups with bodies of `size` bytes, and the database in which it is recorded."""
    messages = groups * SIZE
    name = f"groups-{groups}-{size}"
    stream = context.stream(name, lambda stream: _write(context, stream, groups, size), messages)
    database = context.new_database()
    with as_engine(database) as engine:
        add_keys(engine, [GROUP_KEY])
    context.say(f"recording {messages:,} messages of groups")
    catch_up(context.broker_url, context.stream_url, database, stream, messages, rows_each=1)
    return stream, database


def _by_group(relations: Relations, stream: str, groups: int) -> int:
    """Return the bytes of all groups; checks that each is complete."""
    count = size = 0
    for group in relations.groups(stream):
        count += 1
        assert len(group) == SIZE
        size += sum(len(message.body) for message in group)
    assert count == groups, f"{count} groups instead of {groups}"
    return size


def _write(context: Context, stream: str, groups: int, size: int) -> None:
    numbers = list(range(groups * SIZE))
    random.Random(groups).shuffle(numbers)
    with BareStreamClient(context.stream_url) as client:
        records = (_encoded(number, size) for number in numbers)
        client.publish_all(stream, records, FRAME_RECORDS if size < LARGE_BYTES else LARGE_IN_FRAME)


def _encoded(number: int, size: int) -> bytes:
    """Encode a message of a group as RabbitMQ stores it: three application properties and a body."""
    group, place = divmod(number, SIZE)
    pairs = b"\xa1\x08group_id\xa1\x30%048x" % group
    pairs += b"\xa1\x0egroup_sequence\x54%c" % (place + 1)
    pairs += b"\xa1\x0agroup_last%c" % (0x41 if place + 1 == SIZE else 0x42)
    body = b"%-*d" % (size, number)
    return b"\0St\xc1%c\6%b\0Su\xb0%b%b" % (len(pairs) + 1, pairs, size.to_bytes(4), body)
