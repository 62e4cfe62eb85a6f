"""Copying whole messages into PostgreSQL, which users would do without Relatum: its rate, its bytes and its lookups."""

import random
import time
from collections.abc import Iterator
from contextlib import closing
from typing import Any, Final

import psycopg

from benchmarks import _streams as streams
from benchmarks._bare import BareStreamClient
from benchmarks._context import Context
from benchmarks._recorder import catch_up, number_of
from benchmarks._results import Row
from benchmarks._timing import median, milliseconds, no_collection, per_second
from relatum.reading import Message, StreamReader
from relatum_consumer import Relations

GROUP: Final = "copying"

ROUNDS: Final = 3
LOOKUPS: Final = 500
TRANSACTION_MESSAGES: Final = 10_000
"""Messages that the copier writes in one transaction."""

LARGE_BYTES: Final = 2_000
LARGE_SHARE: Final = 5
"""Bodies of 2,000 bytes: one message for each five of 200 bytes."""

COPIED: Final = """
    CREATE TABLE copied (stream_offset bigint, time timestamptz, order_id text, host text, body bytea);
    CREATE INDEX ON copied (order_id);
    CREATE INDEX ON copied (host);
    CREATE TABLE copied_to (next_offset bigint);
    INSERT INTO copied_to VALUES (0)"""
"""The copier's table, an index for each key, and its position, which makes each message one row."""

COPY_OF: Final = "SELECT body FROM copied WHERE order_id = %s"

OURS_BYTES: Final = """
    SELECT sum(pg_total_relation_size(pg_class.oid)) FROM pg_class JOIN pg_namespace ON relnamespace = pg_namespace.oid
    WHERE nspname = 'relatum' AND relkind = 'r'"""


def measure(context: Context) -> Iterator[Row]:
    """Yield the rows about copying everything."""
    stream = context.orders(context.messages)
    yield from _compare(context, stream, context.messages, streams.BODY_BYTES)
    count = context.messages // LARGE_SHARE
    large = context.stream(f"large-{count}", lambda name: _write_large(context, name, count), count)
    yield from _compare(context, large, count, LARGE_BYTES)


def _compare(context: Context, stream: str, count: int, size: int) -> Iterator[Row]:
    ours: list[float] = []
    copies: list[float] = []
    rounds = context.rounds(ROUNDS)
    for number in range(rounds):
        context.say(f"recording and copying {count:,} messages of {size:,} bytes: round {number + 1} of {rounds}")
        database = context.new_database()
        ours.append(catch_up(context.broker_url, context.stream_url, database, stream, count).rate)
        copies.append(count / _copy(context, database, stream, count))
        if number + 1 < rounds:
            context.drop_database(database)
    rate, copied = median(ours), median(copies)
    what = f"{count:,} messages of {size:,} bytes, 2 keys"
    yield Row(
        GROUP,
        f"recorder, {what}, against copying them",
        per_second(rate),
        f"{per_second(copied)}: whole messages by COPY into a table with two indexes",
        rate / copied,
        figures={"ours_messages_per_s": rate, "copied_messages_per_s": copied},
    )
    with psycopg.connect(database, autocommit=True) as connection:
        ours_bytes, copied_bytes = (
            number_of(connection, query) / count for query in (OURS_BYTES, "SELECT pg_total_relation_size('copied')")
        )
        yield Row(
            GROUP,
            f"bytes in PostgreSQL of a message, {what}",
            f"{ours_bytes:,.0f}",
            f"{copied_bytes:,.0f}: copied",
            ours_bytes / copied_bytes,
            figures={"ours_bytes": ours_bytes, "copied_bytes": copied_bytes},
        )
        yield _lookups(context, connection, database, stream, count, what)
    context.drop_database(database)


def _lookups(
    context: Context, connection: psycopg.Connection[Any], database: str, stream: str, count: int, what: str
) -> Row:
    context.say(f"looking up {what}")
    shuffler = random.Random(count)
    numbers = shuffler.sample(range(count), context.rounds(LOOKUPS))
    taken: dict[str, list[float]] = {"ours": [], "copied": []}
    with Relations(context.broker, database) as relations, no_collection():

        def find(number: int) -> bytes:
            [message] = relations.find("order_id", streams.order_id(number), streams=stream)
            return message.body

        def select(number: int) -> bytes:
            [(body,)] = connection.execute(COPY_OF, [streams.order_id(number)], prepare=True)
            return bytes(body)

        ways = {"ours": find, "copied": select}
        for number in numbers:
            found: dict[str, bytes] = {}
            for way in shuffler.sample(list(ways), len(ways)):
                start = time.perf_counter()
                found[way] = ways[way](number)
                taken[way].append(time.perf_counter() - start)
            assert found["ours"] == found["copied"]
    ours, copied = median(taken["ours"]), median(taken["copied"])
    return Row(
        GROUP,
        f"one related message with its payload, {what}",
        milliseconds(ours),
        f"{milliseconds(copied)}: copied",
        ours / copied,
        figures={"ours_s": ours, "copied_s": copied, "count": len(numbers)},
    )


def _copy(context: Context, database: str, stream: str, count: int) -> float:
    """Return the seconds in which a consumer copies a stream into a table."""
    with psycopg.connect(database) as connection, StreamReader.open(context.broker) as reader:
        connection.execute(COPIED)
        connection.commit()
        start = time.perf_counter()
        waiting: list[Message] = []
        with closing(reader.iterate(stream)) as messages:
            for message in messages:
                waiting.append(message)
                if len(waiting) == TRANSACTION_MESSAGES:
                    _write(connection, waiting)
        _write(connection, waiting)
        taken = time.perf_counter() - start
        assert number_of(connection, "SELECT count(*) FROM copied") == count
    return taken


def _write(connection: psycopg.Connection[Any], messages: list[Message]) -> None:
    if not messages:
        return
    with connection.cursor().copy("COPY copied FROM STDIN") as copy:
        for message in messages:
            headers = message.headers
            copy.write_row((message.offset, message.time, headers["order_id"], headers["host"], message.body))
    connection.execute("UPDATE copied_to SET next_offset = %s", [messages[-1].offset + 1])
    connection.commit()
    messages.clear()


def _write_large(context: Context, stream: str, count: int) -> None:
    with BareStreamClient(context.stream_url) as client:
        client.publish_all(
            stream, (streams.encoded(number, _body(number)) for number in range(count)), frame_records=200
        )


def _body(number: int) -> bytes:
    # Digits at random, since PostgreSQL would compress spaces to nothing.
    return random.Random(number).randbytes(LARGE_BYTES // 2).hex().encode()
