"""`read_many` compared with the faster of reading each message and reading straight through, by density.

`read_many` has a reader of its own: chunks that reading through has requested and not read arrive at the next call over
the same connection, which then takes up to three times as long.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from benchmarks import _streams as streams
from benchmarks._bare import BareStreamClient
from benchmarks._context import Context
from benchmarks._results import Row, attempted
from benchmarks._timing import in_turns, median, milliseconds
from relatum import MessageId
from relatum.reading import Message, StreamReader

GROUP: Final = "many"

IDS: Final = 1_000
AIM: Final = 1.1
AIM_OF_ALL: Final = 1.15
"""The aim if every message is requested: reading straight through then wastes nothing."""

ROUNDS: Final = 3
REPEATS: Final = 5
"""How often a round repeats ways that take less than a second. Reading each message takes seconds."""

SPARSE_GAP: Final = 10_000

Way = Callable[[], list[Message]]


def measure(context: Context) -> Iterator[Row]:
    """Yield the rows about reading many messages."""
    for kind, messages, stream in (
        ("", context.messages, lambda: context.orders(context.messages)),
        (", written one by one", context.singles_messages, context.singles),
    ):
        for gap in (1, 10, 100):
            if gap * IDS <= messages:
                yield from _attempt(context, stream, messages, gap, kind)
    count = 10 * context.messages
    gap = min(SPARSE_GAP, count // IDS)
    yield from _attempt(context, lambda: _tiny(context, count), count, gap, f", {count:,} tiny messages")


def _attempt(context: Context, stream: Callable[[], str], messages: int, gap: int, kind: str) -> Iterator[Row]:
    what = f"`read_many` of {IDS:,} offsets, 1 in {gap:,}{kind}"
    return attempted(GROUP, what, lambda: [_compare(context, stream(), messages, gap, what)])


def _tiny(context: Context, count: int) -> str:
    def write(name: str) -> None:
        with BareStreamClient(context.stream_url) as client:
            client.publish_all(name, map(streams.tiny, range(count)))

    return context.stream(f"tiny-{count}", write, count)


def _compare(context: Context, stream: str, messages: int, gap: int, what: str) -> Row:
    context.say(what)
    chooser = random.Random(gap)
    begin = chooser.randrange(messages - gap * IDS + 1)
    # One in each stretch: of this density, but not evenly spread.
    offsets = [begin + number * gap + chooser.randrange(gap) for number in range(IDS)]
    asked = chooser.sample(offsets, IDS)
    with StreamReader.open(context.broker) as reader, StreamReader.open(context.broker) as other:
        ways: dict[str, Way] = {
            "many": lambda: _many(reader, stream, asked),
            "each": lambda: [other.read(stream, offset) for offset in offsets],
            "through": lambda: _through(other, stream, offsets),
        }
        for way in ways.values():
            _check(way(), offsets)
        taken: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(context.rounds(ROUNDS)):
            _one_round(ways, taken)
    return _row(what, AIM_OF_ALL if gap == 1 else AIM, {name: median(values) for name, values in taken.items()})


def _one_round(ways: dict[str, Way], taken: dict[str, list[float]]) -> None:
    """Run each way once and quick ones several more times, in turns."""
    first = in_turns(ways, 1)
    quick = {name: ways[name] for name, values in first.items() if values[0] < 1.0}
    again = in_turns(quick, REPEATS - 1)
    for name, values in (*first.items(), *again.items()):
        taken[name] += values


def _row(what: str, aim: float, taken: dict[str, float]) -> Row:
    better = min(("each", "through"), key=lambda name: taken[name])
    ratio = taken["many"] / taken[better]
    named = {"each": "reading each", "through": "reading through"}
    other = "through" if better == "each" else "each"
    return Row(
        GROUP,
        what,
        milliseconds(taken["many"]),
        f"{milliseconds(taken[better])}: {named[better]} ({named[other]}: {milliseconds(taken[other])})",
        ratio,
        f"≤ {aim:g} ×",
        ratio <= aim,
        figures={f"{name}_s": value for name, value in taken.items()},
    )


def _many(reader: StreamReader, stream: str, asked: Sequence[int]) -> list[Message]:
    found = list(reader.read_many(MessageId(stream, offset) for offset in asked))
    messages = [message for message in found if isinstance(message, Message)]
    assert [message.offset for message in messages] == list(asked)
    return messages


def _through(reader: StreamReader, stream: str, offsets: Sequence[int]) -> list[Message]:
    """Read from the first to the last offset, decoding only the wanted messages."""
    found: list[Message] = []
    rest = iter(offsets)
    wanted: int | None = next(rest)
    for batch in reader.batches(stream, offsets[0], stop=offsets[-1] + 1, follow=False):
        while batch is not None and wanted is not None and wanted <= batch.last_offset:
            record = batch.records[wanted - batch.first_offset]
            found.append(Message.from_record(stream, wanted, record, batch.chunk_ms))
            wanted = next(rest, None)
    return found


def _check(found: Sequence[Message], offsets: Sequence[int]) -> None:
    """Check that all messages are there, each with its offset in its body."""
    assert sorted(message.offset for message in found) == list(offsets)
    assert all(int(message.body) == message.offset for message in found)
