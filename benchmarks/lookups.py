"""Lookups: `related` compared with a bare probe and read at two sizes, and with scanning the stream."""

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import psycopg

from benchmarks import _streams as streams
from benchmarks._bare import BareStreamClient
from benchmarks._context import Context, Table
from benchmarks._results import Row
from benchmarks._timing import median, milliseconds, no_collection, percentile, timed
from relatum.reading import Message, StreamReader
from relatum_consumer import Relations, Status

GROUP: Final = "lookups"

QUESTIONS: Final = 1_000
SMALL_MESSAGES: Final = 10_000
WARM_UP: Final = 50
"""Untimed lookups at the start, in which connections open and PostgreSQL prepares its plan."""

BARE_AIM: Final = 1.5
GROWTH_AIM: Final = 1.2
SCAN_AIM: Final = 1_000.0

PROBE: Final = (
    "SELECT stream_offset FROM relatum.relationships "
    "WHERE key_id = %s AND value = %s AND stream_id = %s ORDER BY time_us, stream_offset LIMIT 2"
)
KEY_AND_STREAM: Final = (
    "SELECT key_id, stream_id FROM relatum.keys, relatum.streams "
    "WHERE keys.name = 'order_id' AND streams.name = %s AND replaced_at IS NULL"
)


@dataclass(slots=True)
class Case:
    """A recorded stream, messages with relata in it, and the two ways to find them."""

    table: Table
    numbers: Sequence[int]
    questions: Sequence[Message]
    relations: Relations
    database: psycopg.Connection[Any]
    client: BareStreamClient
    key_id: int
    stream_id: int
    ours: list[float] = field(default_factory=list)
    bare: list[float] = field(default_factory=list)

    def ask(self, index: int) -> None:
        """Look up the message related to a question, and check it."""
        answer = self.relations.related(self.questions[index], to=self.table.stream, by="order_id")
        assert answer.status is Status.FOUND
        [message] = answer
        assert message.offset == self.numbers[index]
        assert message.body == streams.body(self.numbers[index])

    def ask_bare(self, index: int) -> None:
        """Do the same with only the index probe and the read."""
        value = streams.order_id(self.numbers[index])
        [(offset,)] = self.database.execute(PROBE, (self.key_id, value, self.stream_id), prepare=True).fetchall()
        record = self.client.read(self.table.stream, offset)
        assert record.endswith(streams.body(self.numbers[index]))


@contextmanager
def cases(context: Context, sizes: Sequence[int]) -> Iterator[list[Case]]:
    """Open everything for lookups at several sizes."""
    with ExitStack() as stack:
        yield [_case(context, size, stack) for size in sizes]


def _case(context: Context, size: int, stack: ExitStack) -> Case:
    table = context.table(size)
    numbers = random.Random(size).sample(range(size), QUESTIONS)
    name = context.stream(
        f"questions-{size}", lambda name: streams.write_one_by_one(context.broker_url, name, numbers), QUESTIONS
    )
    with StreamReader.open(context.broker) as reader:
        questions = list(reader.iterate(name))
    database = stack.enter_context(psycopg.connect(table.database_url, autocommit=True))
    row = database.execute(KEY_AND_STREAM, [table.stream]).fetchone()
    assert row is not None
    return Case(
        table,
        numbers,
        questions,
        stack.enter_context(Relations(context.broker, table.database_url)),
        database,
        stack.enter_context(BareStreamClient(context.stream_url)),
        *row,
    )


def measure(context: Context) -> Iterator[Row]:
    """Yield the rows about lookups by key."""
    sizes = sorted({SMALL_MESSAGES, context.messages})
    with cases(context, sizes) as found:
        context.say("looking up")
        take_turns(found, context.rounds(QUESTIONS))
        large = found[-1]
        yield _beside_bare(large)
        if len(found) > 1:
            yield _growth(found[0], large)
        context.say("scanning by pika")
        yield _beside_scan(context, large)


def take_turns(found: Sequence[Case], count: int) -> None:
    """Ask each question in both ways at each size, in random order."""
    ways: list[tuple[Callable[[int], None], list[float]]] = []
    for case in found:
        ways += [(case.ask, case.ours), (case.ask_bare, case.bare)]
    for ask, _ in ways:
        for index in range(WARM_UP):
            ask(index)
    shuffler = random.Random(1)
    with no_collection():
        for index in range(count):
            shuffler.shuffle(ways)
            for ask, taken in ways:
                taken.append(timed(lambda ask=ask, index=index: ask(index)))  # type: ignore[misc]


def _beside_bare(case: Case) -> Row:
    ours, bare = median(case.ours), median(case.bare)
    return Row(
        GROUP,
        f"`related`, one message with its payload, median, {case.table.messages:,} messages",
        milliseconds(ours),
        f"{milliseconds(bare)}: bare psycopg probe and bare read",
        ours / bare,
        f"≤ {BARE_AIM:g} ×",
        ours / bare <= BARE_AIM,
        figures={"ours_s": ours, "bare_s": bare, "ours_p99_s": percentile(case.ours, 0.99), "count": len(case.ours)},
    )


def _growth(small: Case, large: Case) -> Row:
    ours, before = median(large.ours), median(small.ours)
    return Row(
        GROUP,
        f"the same at {large.table.messages:,} messages against {small.table.messages:,}",
        milliseconds(ours),
        f"{milliseconds(before)}: {small.table.messages:,} messages",
        ours / before,
        f"≤ {GROWTH_AIM:g} ×",
        ours / before <= GROWTH_AIM,
        note="The bare probe and read grow too: see bare_large_s and bare_small_s.",
        figures={
            "large_s": ours,
            "small_s": before,
            "bare_large_s": median(large.bare),
            "bare_small_s": median(small.bare),
        },
    )


def _beside_scan(context: Context, case: Case) -> Row:
    ours, scan = median(case.ours), scan_by_pika(context, case)
    return Row(
        GROUP,
        "the same against scanning the stream",
        milliseconds(ours),
        f"{scan:,.1f} s: pika reads all {case.table.messages:,} messages once",
        scan / ours,
        f"≥ {SCAN_AIM:,.0f} × faster" if case.table.messages >= 1_000_000 else "",
        scan / ours >= SCAN_AIM if case.table.messages >= 1_000_000 else None,
        figures={"ours_s": ours, "scan_s": scan},
    )


def scan_by_pika(context: Context, case: Case) -> float:
    """Return the seconds in which pika reads the whole stream for the messages of a question's order."""
    wanted, found = streams.order_id(case.numbers[0]), []
    last = case.table.messages - 1
    with streams.connected(context.broker_url) as connection:
        channel = connection.channel()
        channel.basic_qos(prefetch_count=1_000)
        start = time.perf_counter()
        for method, properties, body in channel.consume(case.table.stream, arguments={"x-stream-offset": "first"}):
            offset = properties.headers["x-stream-offset"]
            if properties.headers.get("order_id") == wanted:
                found.append((offset, body))
            if offset == last:
                break
            if offset % 200 == 199:
                channel.basic_ack(method.delivery_tag, multiple=True)
        taken = time.perf_counter() - start
        assert found == [(case.numbers[0], streams.body(case.numbers[0]))]
    return taken
