"""Reading whole groups in logical order beside reading the same messages straight through."""

import random
from collections.abc import Callable, Iterator
from typing import Final

from benchmarks import _streams as streams
from benchmarks._bare import BareStreamClient
from benchmarks._context import Context
from benchmarks._recorder import catch_up
from benchmarks._results import Row, attempted
from benchmarks._timing import in_turns, median
from relatum import GROUP_KEY
from relatum.reading import StreamReader
from relatum.store import add_keys, as_engine
from relatum_consumer import Relations

GROUP: Final = "group_reading"

GROUPS: Final = 10_000
SIZE: Final = 10
AIM: Final = 0.5
ROUNDS: Final = 5

Way = Callable[[], int]


def measure(context: Context) -> Iterator[Row]:
    """The rows about reading groups."""
    groups = min(GROUPS, context.messages // SIZE)
    what = f"logical-order reading of {groups:,} groups of {SIZE}, shuffled"
    yield from attempted(GROUP, what, lambda: _compare(context, groups, what))


def _compare(context: Context, groups: int, what: str) -> Iterator[Row]:
    messages = groups * SIZE
    stream = context.stream(f"groups-{groups}", lambda name: _write(context, name, groups), messages)
    database = context.new_database()
    with as_engine(database) as engine:
        add_keys(engine, [GROUP_KEY])
    context.say(f"recording {messages:,} messages of groups")
    catch_up(context.broker_url, context.stream_url, database, stream, messages, rows_each=1)
    context.say(what)
    with StreamReader.open(context.address) as reader, Relations(context.address, database) as relations:
        # All hand over every body: a message that nobody looks into is not decoded. Groups are checked by headers.
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
    for way, other in (("through", "reading bodies straight through"), ("decoded", "reading through with headers")):
        ratio = taken[way] / taken["groups"]
        yield Row(
            GROUP,
            what if way == "through" else "the same",
            ours,
            f"{messages / taken[way]:,.0f} messages/s: {other}",
            ratio,
            f"≥ {AIM:g} ×",
            ratio >= AIM,
            figures=seconds,
        )


def _by_group(relations: Relations, stream: str, groups: int) -> int:
    """The bytes of all groups; each must be whole and in order."""
    count = size = 0
    for group in relations.groups(stream):
        count += 1
        assert len(group) == SIZE
        size += sum(len(message.body) for message in group)
    assert count == groups, f"{count} groups instead of {groups}"
    return size


def _write(context: Context, stream: str, groups: int) -> None:
    numbers = list(range(groups * SIZE))
    random.Random(groups).shuffle(numbers)
    with BareStreamClient(context.stream_url) as client:
        client.publish_all(stream, (_encoded(number) for number in numbers))


def _encoded(number: int) -> bytes:
    """A message of a group as RabbitMQ stores it: three application properties and a body."""
    group, place = divmod(number, SIZE)
    pairs = b"\xa1\x08group_id\xa1\x30%048x" % group
    pairs += b"\xa1\x0egroup_sequence\x54%c" % (place + 1)
    pairs += b"\xa1\x0agroup_last%c" % (0x41 if place + 1 == SIZE else 0x42)
    return b"\0St\xc1%c\6%b\0Su\xa0%c%b" % (len(pairs) + 1, pairs, streams.BODY_BYTES, streams.body(number))
