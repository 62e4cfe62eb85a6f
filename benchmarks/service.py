"""Lookups in a web service: compared with a bare probe and read; waits; how long answers block an event loop."""

import asyncio
import queue
import random
import statistics
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from itertools import product
from typing import Any, Final

import psycopg

from benchmarks import _streams as streams
from benchmarks._bare import AsyncBareStreamClient, BareStreamClient
from benchmarks._context import Context
from benchmarks._recorder import catch_up
from benchmarks._results import Row
from benchmarks._timing import milliseconds, no_collection, percentile
from benchmarks.lookups import KEY_AND_STREAM, PROBE
from relatum.reading import Message, StreamReader
from relatum.store.database import Database
from relatum_consumer import AsyncRelations, Relations, Status

GROUP: Final = "service"

MESSAGES: Final = 2_000
"""Messages, published one by one so that a chunk has one message, as in a service."""

LARGE: Final = 1_000
"""Messages with the same value."""

QUESTIONS: Final = 1_000
POOL: Final = 10
AT_ONCE: Final = (1, 8, 64)
ROUNDS: Final = 5
WAITS: Final = 500
IDLE_S: Final = 5.0
PER_SECOND: Final = 40.0
"""Commits a second, at random times, of the messages for which waits wait."""

PROCESSOR_AIM: Final = 2.0
RATE_AIM: Final = 0.8
IDLE_AIM: Final = 20.0
WOKEN_AIM_S: Final = (0.030, 0.100)
HOLD_AIM_S: Final = 0.020

Ask = Callable[[int], None]
AskInTask = Callable[[int], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Case:
    """A recorded stream of small chunks, and messages with relata in it."""

    context: Context
    stream: str
    large_stream: str
    database_url: str
    large_database_url: str
    numbers: Sequence[int]
    questions: Sequence[Message]
    key_id: int
    stream_id: int

    def bare_parameters(self, index: int) -> tuple[int, str, int]:
        """Return the parameters of a bare probe."""
        return self.key_id, streams.order_id(self.numbers[index % QUESTIONS]), self.stream_id


def measure(context: Context) -> Iterator[Row]:
    """Yield the rows about lookups in a web service."""
    with _case(context) as case:
        context.say("looking up with threads")
        yield from _rows("threads", _with_threads(case, context.rounds(ROUNDS)))
        context.say("looking up with asyncio")
        yield from _rows("asyncio", asyncio.run(_with_tasks(case, context.rounds(ROUNDS))))
        context.say("waiting")
        yield from asyncio.run(_waits(case))
        yield asyncio.run(_hold(case))


@contextmanager
def _case(context: Context) -> Iterator[Case]:
    numbers = random.Random(1).sample(range(MESSAGES), QUESTIONS)
    stream = context.stream(
        "service", lambda name: streams.write_one_by_one(context.broker_url, name, range(MESSAGES)), MESSAGES
    )
    asked = context.stream(
        "service-questions", lambda name: streams.write_one_by_one(context.broker_url, name, numbers), QUESTIONS
    )
    large = context.stream(
        "service-large", lambda name: streams.write_one_by_one(context.broker_url, name, [0] * LARGE), LARGE
    )
    database_url = context.new_database()
    catch_up(context.broker_url, context.stream_url, database_url, stream, MESSAGES)
    large_url = context.new_database()
    catch_up(context.broker_url, context.stream_url, large_url, large, LARGE)
    with psycopg.connect(database_url, autocommit=True) as database:
        database.execute("VACUUM ANALYZE")
        row = database.execute(KEY_AND_STREAM, [stream]).fetchone()
        assert row is not None
    with StreamReader.open(context.broker) as reader:
        questions = list(reader.iterate(asked))
    yield Case(context, stream, large, database_url, large_url, numbers, questions, *row)
    for url in (database_url, large_url):
        context.drop_database(url)


# --- beside a bare probe and read -------------------------------------------------------------------------


@dataclass(slots=True)
class Taken:
    """Lookups a second, and processor seconds of this process for each, by round."""

    rates: list[float]
    processor_s: list[float]


def _rows(face: str, taken: dict[tuple[str, int], Taken]) -> Iterator[Row]:
    for at_once in AT_ONCE:
        ours, bare = taken["ours", at_once], taken["bare", at_once]
        cost = statistics.median(a / b for a, b in zip(ours.processor_s, bare.processor_s, strict=True))
        rate = statistics.median(a / b for a, b in zip(ours.rates, bare.rates, strict=True))
        own_s, bare_s = statistics.median(ours.processor_s), statistics.median(bare.processor_s)
        yield Row(
            GROUP,
            f"the client's processor for one `related`, {face}, {at_once} at once",
            milliseconds(own_s),
            f"{milliseconds(bare_s)}: bare probe and read, the same pools",
            cost,
            f"≤ {PROCESSOR_AIM:g} ×",
            cost <= PROCESSOR_AIM,
            figures={"ours_s": own_s, "bare_s": bare_s},
        )
        own_rate, bare_rate = statistics.median(ours.rates), statistics.median(bare.rates)
        has_aim = at_once > 1
        yield Row(
            GROUP,
            f"lookups a second, {face}, {at_once} at once",
            f"{own_rate:,.0f}/s",
            f"{bare_rate:,.0f}/s: bare probe and read, the same pools",
            rate,
            f"≥ {RATE_AIM:g} ×" if has_aim else "",
            rate >= RATE_AIM if has_aim else None,
            figures={"ours_per_s": own_rate, "bare_per_s": bare_rate},
        )


def _take(taken: dict[tuple[str, int], Taken], key: tuple[str, int], began: tuple[float, float]) -> None:
    wall, processor = time.perf_counter() - began[0], time.process_time() - began[1]
    found = taken.setdefault(key, Taken([], []))
    found.rates.append(QUESTIONS / wall)
    found.processor_s.append(processor / QUESTIONS)


def _with_threads(case: Case, rounds: int) -> dict[tuple[str, int], Taken]:
    taken: dict[tuple[str, int], Taken] = {}
    with ExitStack() as stack:
        ours = _ours(case, stack)
        for _ in range(1 + rounds):
            with ExitStack() as of_round:
                ways = {"ours": ours, "bare": _bare(case, of_round)}
                for at_once, (name, ask) in product(AT_ONCE, ways.items()):
                    with no_collection():
                        began = time.perf_counter(), time.process_time()
                        _in_threads(ask, at_once)
                        _take(taken, (name, at_once), began)
    return _warmed(taken)


def _warmed(taken: dict[tuple[str, int], Taken]) -> dict[tuple[str, int], Taken]:
    """Drop the first round, in which connections open and statements are prepared."""
    return {key: Taken(each.rates[1:], each.processor_s[1:]) for key, each in taken.items()}


def _in_threads(ask: Ask, at_once: int) -> None:
    def run(first: int) -> None:
        for index in range(first, QUESTIONS, at_once):
            ask(index)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(at_once)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _ours(case: Case, stack: ExitStack) -> Ask:
    relations = stack.enter_context(Relations(case.context.broker, case.database_url, database_connections_max=POOL))

    def ask(index: int) -> None:
        answer = relations.related(case.questions[index % QUESTIONS], to=case.stream, by="order_id")
        assert answer[0].offset == case.numbers[index % QUESTIONS]

    return ask


def _bare(case: Case, stack: ExitStack) -> Ask:
    """Open connections for one round: RabbitMQ 3.10 opens a file for each read, and closes it with the connection."""
    databases: queue.LifoQueue[psycopg.Connection[Any]] = queue.LifoQueue()
    clients: queue.LifoQueue[BareStreamClient] = queue.LifoQueue()
    for _ in range(POOL):
        databases.put(stack.enter_context(psycopg.connect(case.database_url, autocommit=True)))
    for _ in range(2 * 8):
        clients.put(stack.enter_context(BareStreamClient(case.context.stream_url)))

    def ask(index: int) -> None:
        database = databases.get()
        [(offset,)] = database.execute(PROBE, case.bare_parameters(index), prepare=True).fetchall()
        databases.put(database)
        client = clients.get()
        assert client.read(case.stream, offset).endswith(streams.body(case.numbers[index % QUESTIONS]))
        clients.put(client)

    return ask


async def _with_tasks(case: Case, rounds: int) -> dict[tuple[str, int], Taken]:
    taken: dict[tuple[str, int], Taken] = {}
    relations = AsyncRelations(case.context.broker, case.database_url, database_connections_max=POOL)

    async def ours(index: int) -> None:
        answer = await relations.related(case.questions[index % QUESTIONS], to=case.stream, by="order_id")
        assert answer[0].offset == case.numbers[index % QUESTIONS]

    async with relations:
        for _ in range(1 + rounds):
            async with _bare_in_tasks(case) as bare:
                ways: dict[str, AskInTask] = {"ours": ours, "bare": bare}
                for at_once, (name, ask) in product(AT_ONCE, ways.items()):
                    with no_collection():
                        began = time.perf_counter(), time.process_time()
                        await _in_tasks(ask, at_once)
                        _take(taken, (name, at_once), began)
    return _warmed(taken)


async def _in_tasks(ask: AskInTask, at_once: int) -> None:
    async def run(first: int) -> None:
        for index in range(first, QUESTIONS, at_once):
            await ask(index)

    await asyncio.gather(*(run(number) for number in range(at_once)))


@asynccontextmanager
async def _bare_in_tasks(case: Case) -> AsyncIterator[AskInTask]:
    databases: asyncio.LifoQueue[psycopg.AsyncConnection[Any]] = asyncio.LifoQueue()
    clients: asyncio.LifoQueue[AsyncBareStreamClient] = asyncio.LifoQueue()
    opened = [await psycopg.AsyncConnection.connect(case.database_url, autocommit=True) for _ in range(POOL)]
    readers = [await AsyncBareStreamClient.open(case.context.stream_url) for _ in range(2 * 8)]
    for connection in opened:
        databases.put_nowait(connection)
    for reader in readers:
        clients.put_nowait(reader)

    async def ask(index: int) -> None:
        database = await databases.get()
        cursor = await database.execute(PROBE, case.bare_parameters(index), prepare=True)
        [(offset,)] = await cursor.fetchall()
        databases.put_nowait(database)
        client = await clients.get()
        record = await client.read(case.stream, offset)
        assert record.endswith(streams.body(case.numbers[index % QUESTIONS]))
        clients.put_nowait(client)

    try:
        yield ask
    finally:
        for connection in opened:
            await connection.close()
        for reader in readers:
            reader.close()


# --- waits, and large answers -----------------------------------------------------------------------------


@contextmanager
def _counted() -> Iterator[list[int]]:
    """Count the statements of lookups; yields a list with the current number."""
    count, rows = [0], Database.rows

    def counting(self: Database, *args: Any, **options: Any) -> Any:
        count[0] += 1
        return rows(self, *args, **options)

    Database.rows = counting  # type: ignore[method-assign]
    try:
        yield count
    finally:
        Database.rows = rows  # type: ignore[method-assign]


async def _waits(case: Case) -> list[Row]:
    """Delete rows, and insert them again while all wait, so that the time of each commit is known."""
    woken: dict[int, float] = {}
    committed: dict[int, float] = {}
    async with AsyncExitStack() as stack:
        # Patch before the relations are created, since they keep a reference to the method.
        statements = stack.enter_context(_counted())
        relations = AsyncRelations(case.context.broker, case.database_url, database_connections_max=POOL)
        await stack.enter_async_context(relations)

        async def wait(index: int) -> None:
            question = case.questions[index]
            answer = await relations.wait_related(question, to=case.stream, by="order_id", timeout_s=60)
            assert answer.status is Status.FOUND
            woken[index] = time.monotonic()

        with psycopg.connect(case.database_url, autocommit=True) as database:
            held = [database.execute(_TAKE_OUT, case.bare_parameters(index)).fetchall() for index in range(WAITS)]
            waits = [asyncio.create_task(wait(index)) for index in range(WAITS)]
            await asyncio.sleep(IDLE_S)
            assert relations.statistics().awaiting == WAITS, "all have begun"
            assert statements[0], "each has looked once"
            before, began = statements[0], time.monotonic()
            await asyncio.sleep(IDLE_S)
            idle = (statements[0] - before) / (time.monotonic() - began)
            chance = random.Random(1)
            for index in chance.sample(range(WAITS), WAITS):
                await asyncio.sleep(chance.expovariate(PER_SECOND))
                await asyncio.to_thread(database.execute, _PUT_BACK, held[index][0])
                committed[index] = time.monotonic()
            await asyncio.gather(*waits)
    late = [woken[index] - committed[index] for index in committed]
    median, worst = percentile(late, 0.5), percentile(late, 0.99)
    return [
        Row(
            GROUP,
            f"statements a second of {WAITS} `wait_related`, idle",
            f"{idle:.0f}/s",
            aim=f"≤ {IDLE_AIM:g}/s",
            is_met=idle <= IDLE_AIM,
            figures={"statements_per_s": idle},
        ),
        Row(
            GROUP,
            f"{WAITS} `wait_related` woken after the commit, median and 99 %",
            f"{milliseconds(median)}, {milliseconds(worst)}",
            aim=f"≤ {milliseconds(WOKEN_AIM_S[0])}, {milliseconds(WOKEN_AIM_S[1])}",
            is_met=median <= WOKEN_AIM_S[0] and worst <= WOKEN_AIM_S[1],
            figures={"median_s": median, "p99_s": worst},
        ),
    ]


_TAKE_OUT: Final = (
    "DELETE FROM relatum.relationships WHERE key_id = %s AND value = %s AND stream_id = %s "
    "RETURNING stream_offset, time_us, stream_id, key_id, value"
)
_PUT_BACK: Final = (
    "INSERT INTO relatum.relationships (stream_offset, time_us, stream_id, key_id, value) VALUES (%s, %s, %s, %s, %s)"
)


async def _hold(case: Case) -> Row:
    """Measure the longest processor time of the loop's thread without a return to the loop."""
    longest, loop = 0.0, asyncio.get_running_loop()
    last = time.thread_time()

    def tick() -> None:
        nonlocal longest, last
        now = time.thread_time()
        longest, last = max(longest, now - last), now
        handle[0] = loop.call_soon(tick)

    async with AsyncRelations(case.context.broker, case.large_database_url) as relations:
        value = streams.order_id(0)
        await relations.find("order_id", value, streams=case.large_stream, limit=1)
        with no_collection():
            handle = [loop.call_soon(tick)]
            await asyncio.sleep(0)
            longest = 0.0
            messages = await relations.find("order_id", value, streams=case.large_stream, limit=LARGE)
            handle[0].cancel()
    assert len(messages) == LARGE
    return Row(
        GROUP,
        f"an answer of {len(messages):,} messages holds the event loop for",
        milliseconds(longest),
        aim=f"≤ {milliseconds(HOLD_AIM_S)}",
        is_met=longest <= HOLD_AIM_S,
        note="The processor's time of the loop's thread between two turns of the loop, at most.",
        figures={"longest_s": longest, "messages": len(messages)},
    )
