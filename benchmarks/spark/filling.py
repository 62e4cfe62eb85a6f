"""Back-filling a stream by Spark, compared with the recorder alone."""

import time
from collections.abc import Iterator
from typing import Final

import psycopg

import relatum_spark
from benchmarks._context import Context
from benchmarks._recorder import catch_up
from benchmarks._results import Row
from benchmarks._timing import median, per_second
from benchmarks.spark._session import session

GROUP: Final = "filling"

ROUNDS: Final = 3

RECORDER_AIM: Final = 1.2


def measure(context: Context) -> Iterator[Row]:
    """Yield the row about the back-fill."""
    stream, count = context.orders(context.messages), context.messages
    session()
    fills: list[float] = []
    records: list[float] = []
    rounds = context.rounds(ROUNDS)
    for number in range(rounds):
        context.say(f"back-filling {count:,} messages, and recording them: round {number + 1} of {rounds}")
        database = context.new_database()
        records.append(catch_up(context.broker_url, context.stream_url, database, stream, count).rate)
        context.drop_database(database)
        database = context.new_database()
        fills.append(count / _fill(context, database, stream))
        if number + 1 < rounds:
            context.drop_database(database)
        else:
            context.keep_table(count, database)
    rate, recorder = median(fills), median(records)
    yield Row(
        GROUP,
        f"back-fill of {count:,} messages, 2 keys",
        per_second(rate),
        f"{per_second(recorder)}: the recorder alone",
        rate / recorder,
        f"≥ {RECORDER_AIM:g} ×",
        rate / recorder >= RECORDER_AIM,
        note="From the call to its report; the recorder from its opening the stream to its last commit.",
        figures={"all_messages_per_s": fills, "all_recorder_messages_per_s": records},
    )


def _fill(context: Context, database: str, stream: str) -> float:
    started = time.perf_counter()
    relatum_spark.backfill(session(), stream, broker=context.broker, database=database)
    taken = time.perf_counter() - started
    with psycopg.connect(database) as connection:
        row = connection.execute("SELECT count(*), count(DISTINCT stream_offset) FROM relatum.relationships").fetchone()
    assert row == (2 * context.messages, context.messages), f"{row} rows for {context.messages} messages"
    return taken
