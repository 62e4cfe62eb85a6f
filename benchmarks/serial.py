"""Serial consumption without moves, compared with reading the same partitions directly."""

import threading
from collections.abc import Callable, Iterator
from typing import Final

from benchmarks import _streams as streams
from benchmarks._bare import BareStreamClient
from benchmarks._context import Context
from benchmarks._results import Row, attempted
from benchmarks._timing import in_turns, median
from relatum.common.headers import CONTEXT_HEADER, PLACED_HEADER
from relatum.contexts import SerialConsumer
from relatum.contexts._partition_log import Placed
from relatum.reading import StreamReader
from relatum.superstreams import declare_super_stream, delete_super_stream

GROUP: Final = "serial"

PARTITIONS: Final = 3
CONTEXTS: Final = 1_000
AIM: Final = 0.85
ROUNDS: Final = 5

Way = Callable[[], int]


def measure(context: Context) -> Iterator[Row]:
    """Yield the rows about serial consumers."""
    messages = context.messages // PARTITIONS * PARTITIONS
    what = f"serial consumption of {messages:,} messages in {PARTITIONS} partitions, without a move"
    yield from attempted(GROUP, what, lambda: _compare(context, messages, what))


def _compare(context: Context, messages: int, what: str) -> Iterator[Row]:
    name = f"relatum-bench-serial-{id(context):x}"
    layout = declare_super_stream(context.broker_url, name, PARTITIONS)
    database = context.new_database()
    try:
        context.say(f"writing {messages:,} messages: {name}")
        names = [partition.stream for partition in layout]
        for place, stream in enumerate(names):
            _write(context, stream, range(place, messages, PARTITIONS))
        context.say(what)
        reading = _Consuming(context, name, database)
        ways: dict[str, Way] = {
            "serial": lambda: reading.consume(messages),
            "one by one": lambda: sum(_read(context, stream) for stream in names),
            "side by side": lambda: _read_side_by_side(context, names),
        }
        sizes = {way() for way in ways.values()}
        assert len(sizes) == 1, "all read the same messages"
        taken = {way: median(values) for way, values in in_turns(ways, context.rounds(ROUNDS)).items()}
    finally:
        context.drop_database(database)
        delete_super_stream(context.broker_url, name)
    ours = f"{messages / taken['serial']:,.0f} messages/s, a commit for each batch of 1,000"
    others = (("side by side", "a thread for each partition"), ("one by one", "one partition after the other"))
    for way, other in others:
        ratio = taken[way] / taken["serial"]
        yield Row(
            GROUP,
            what if way == "side by side" else "the same",
            ours,
            f"{messages / taken[way]:,.0f} messages/s: reading bodies straight, {other}",
            ratio,
            f"≥ {AIM:g} ×",
            ratio >= AIM,
            figures={f"{each.replace(' ', '_')}_s": seconds for each, seconds in taken.items()},
        )


class _Consuming:
    """Consumes all messages, each time under a new consumer's name."""

    def __init__(self, context: Context, super_stream: str, database: str) -> None:
        self._context = context
        self._super_stream = super_stream
        self._database = database
        self._names = 0

    def consume(self, messages: int) -> int:
        self._names += 1
        size = count = 0
        with SerialConsumer(
            self._super_stream, f"c{self._names}", database=self._database, broker=self._context.broker
        ) as consumer:
            for batch in consumer.batches():
                size += sum(len(message.body) for message in batch)
                count += len(batch)
                batch.acknowledge()
                if count == messages:
                    return size
        return size


def _read(context: Context, stream: str) -> int:
    with StreamReader.open(context.broker) as reader:
        return sum(len(message.body) for message in reader.iterate(stream))


def _read_side_by_side(context: Context, names: list[str]) -> int:
    sizes: list[int] = []
    threads = [threading.Thread(target=lambda name=name: sizes.append(_read(context, name))) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(sizes)


def _write(context: Context, stream: str, numbers: range) -> None:
    with BareStreamClient(context.stream_url) as client:
        client.publish_all(stream, (_encoded(number) for number in numbers))
    streams.wait_written(context.broker, stream, len(numbers))


def _encoded(number: int) -> bytes:
    """Encode a message of a context as RabbitMQ stores it: two headers and a body."""
    pairs = b""
    placed = str(Placed(number % CONTEXTS + 1, "0123456789abcdef", number))
    for name, value in ((CONTEXT_HEADER, f"context-{number % CONTEXTS}"), (PLACED_HEADER, placed)):
        pairs += b"\xa1%c%b\xa1%c%b" % (len(name), name.encode(), len(value), value.encode())
    return b"\0St\xc1%c\4%b\0Su\xa0%c%b" % (len(pairs) + 1, pairs, streams.BODY_BYTES, streams.body(number))
