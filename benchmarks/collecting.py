"""The message collector: bulks compared with a transaction for each message; memory at its limit."""

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, Final

import pika
import psycopg

from benchmarks import _streams as streams
from benchmarks._context import Context
from benchmarks._recorder import peak_rss_bytes
from benchmarks._results import Row
from benchmarks._timing import in_turns, median, no_collection, per_second
from relatum import MessageCollector
from relatum.collecting import Bulk, ExecutorOptions
from relatum.reading import StreamReader

GROUP: Final = "collecting"

BODY_BYTES: Final = 1024
MESSAGES: Final = 100_000
QUICK_MESSAGES: Final = 60_000
"""Enough to exceed a collector's `bytes_max`."""

SINGLES_SHARE: Final = 20
"""One message in 20 is also written in a transaction of its own; all of them would take too long."""

ROUNDS: Final = 5
WARM_UP_ROUNDS: Final = 1

BULK_MESSAGES: Final = 500
BYTES_MAX: Final = 64 * 1024 * 1024

RATE_AIM: Final = 15_000.0
SINGLES_AIM: Final = 4.0
MEMORY_AIM_BYTES: Final = 50_000_000
"""Bytes beyond the collector's limit."""

LIMIT_S: Final = 120.0

TABLE: Final = "CREATE TABLE booked (message_id text PRIMARY KEY, body bytea NOT NULL)"
STATES: Final = (
    "CREATE TABLE states (stream_offset bigint PRIMARY KEY, message_id text, state text, finished_at timestamptz)"
)
BOOK_MANY: Final = "COPY booked FROM STDIN (FORMAT BINARY)"
BOOK_ONE: Final = "INSERT INTO booked VALUES (%s, %s)"
FINISH_ONE: Final = "INSERT INTO states VALUES (%s, %s, 'succeeded', now())"

PROGRAM: Final = Path(__file__).with_name("_collector.py")


def measure(context: Context) -> Iterator[Row]:
    """Yield the rows about the collector."""
    count = QUICK_MESSAGES if context.is_quick else MESSAGES
    stream = context.stream(f"parcels-{count}", lambda name: write(context.broker_url, name, count), count)
    database = context.new_database()
    with psycopg.connect(database, autocommit=True) as connection:
        connection.execute(TABLE)
        connection.execute(STATES)
    yield from _speed(context, database, stream, count)
    yield _memory(context, database, stream)
    context.drop_database(database)


def write(amqp_url: str, stream: str, count: int) -> None:
    """Write messages of one type with pika."""
    body = b"x" * BODY_BYTES
    with streams.connected(amqp_url) as connection:
        channel = connection.channel()
        for number in range(count):
            channel.basic_publish("", stream, body, pika.BasicProperties(type="order", message_id=f"parcel-{number}"))


def _speed(context: Context, database: str, stream: str, count: int) -> Iterator[Row]:
    context.say(f"collecting {count:,} messages of {BODY_BYTES:,} bytes, and a transaction for each")
    rounds = context.rounds(ROUNDS)
    numbers = iter(range(rounds + WARM_UP_ROUNDS))
    singles = count // SINGLES_SHARE
    actions = {
        "bulks": lambda: collect(context, database, stream, count, f"bench-{next(numbers)}"),
        "singles": lambda: consume_singly(context, database, stream, singles),
    }

    def empty() -> None:
        with psycopg.connect(database, autocommit=True) as connection:
            connection.execute("TRUNCATE booked, states")
            connection.execute("CHECKPOINT")

    in_turns(actions, WARM_UP_ROUNDS, empty)
    with no_collection():
        taken = in_turns(actions, rounds, empty)
    bulks, single = count / median(taken["bulks"]), singles / median(taken["singles"])
    figures = {"messages_per_s": bulks, "singles_per_s": single, "all_s": taken, "rounds": rounds, "messages": count}
    what = f"collector, durable, {BODY_BYTES:,} bytes, bulks of {BULK_MESSAGES} written in the transaction joined"
    yield Row(
        GROUP,
        what,
        per_second(bulks),
        aim=f"≥ {RATE_AIM:,.0f} messages/s",
        is_met=bulks >= RATE_AIM,
        figures=figures,
    )
    yield Row(
        GROUP,
        "the same against a transaction a message",
        per_second(bulks),
        f"{per_second(single)}: each read, written and noted as done by bare psycopg",
        bulks / single,
        f"≥ {SINGLES_AIM:g} ×",
        bulks / single >= SINGLES_AIM,
        figures=figures,
    )


def collect(context: Context, database: str, stream: str, count: int, name: str) -> None:
    """Collect a stream with a new collector, from its start until all results are stored."""
    consumed = 0
    is_done = threading.Event()

    def book(bulk: Bulk) -> None:
        nonlocal consumed
        assert bulk.connection is not None
        driver: Any = bulk.connection.connection.driver_connection
        with driver.cursor() as cursor, cursor.copy(BOOK_MANY) as copy:
            copy.set_types(["text", "bytea"])
            for each in bulk.messages:
                copy.write_row((each.message_id, each.message.body))
        consumed += len(bulk)
        if consumed >= count:
            is_done.set()

    collector = MessageCollector(name, database=database, broker=context.broker, streams=[stream])
    collector.register_executor("order", book, ExecutorOptions(bulk_messages=BULK_MESSAGES, joins_transaction=True))
    with collector:
        assert is_done.wait(LIMIT_S), f"{consumed} of {count} messages consumed"
        # Closing waits for the results, as in a service that stops.
    with psycopg.connect(database) as connection:
        found = connection.execute(
            "SELECT (SELECT count(*) FROM booked), count(*) FROM relatum.collected_messages "
            "JOIN relatum.collector_sources USING (source_id) JOIN relatum.collectors USING (collector_id) "
            "WHERE name = %s AND state = 'succeeded'",
            [name],
        ).fetchone()
    assert found == (count, count), f"{found} of {count} messages are written and succeeded"


def consume_singly(context: Context, database: str, stream: str, count: int) -> None:
    """Do the same without a collector: read, and write each message and its state in one transaction."""
    with (
        StreamReader.open(context.broker) as reader,
        psycopg.connect(database, autocommit=True, prepare_threshold=1) as connection,
    ):
        for message in islice(reader.iterate(stream), count):
            with connection.transaction():
                connection.execute(BOOK_ONE, [message.properties.message_id, message.body])
                connection.execute(FINISH_ONE, [message.offset, message.properties.message_id])
        assert connection.execute("SELECT count(*) FROM booked").fetchone() == (count,)


def _memory(context: Context, database: str, stream: str) -> Row:
    context.say("filling a collector up to its limit")
    empty, full = _peak_bytes(context, database), _peak_bytes(context, database, stream)
    more = full - empty
    aim = BYTES_MAX + MEMORY_AIM_BYTES
    return Row(
        GROUP,
        f"memory of a collector at its limit of {BYTES_MAX / 1e6:,.0f} MB, {BODY_BYTES:,} bytes a message",
        f"{more / 1e6:,.0f} MB more at most" if full else "",
        f"{empty / 1e6:,.0f} MB: a collector that follows nothing" if full else "",
        aim=f"≤ {aim / 1e6:,.0f} MB more",
        is_met=more <= aim,
        note="" if full else "not measured: the system does not report it",
        figures={"empty_bytes": empty, "full_bytes": full, "bytes_max": BYTES_MAX},
    )


def _peak_bytes(context: Context, database: str, *followed: str) -> int:
    """Return the peak memory of a collector's process when the collector is full."""
    with _process(context, database, *followed) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "full\n"
        return peak_rss_bytes(process.pid)


@contextmanager
def _process(context: Context, database: str, *followed: str) -> "Iterator[subprocess.Popen[str]]":
    name = f"bench-memory-{len(followed)}"
    urls = [context.broker_url, context.stream_url, database]
    process = subprocess.Popen(
        [sys.executable, PROGRAM, *urls, name, str(BYTES_MAX), *followed],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()
