"""The recorder catching up: its rate compared with COPY and with reading alone, and its memory."""

import time
from collections.abc import Iterator
from typing import Final

import psycopg

from benchmarks._context import Context
from benchmarks._recorder import CatchUp, catch_up
from benchmarks._results import Row
from benchmarks._timing import median, per_second
from relatum.reading import StreamReader

GROUP: Final = "recording"

ROUNDS: Final = 3

RATE_AIM: Final = 100_000.0
COPY_AIM: Final = 0.5
READING_AIM: Final = 0.7
RSS_AIM_BYTES: Final = 200_000_000

COPY_BYTES: Final = 1 << 20
"""Bytes passed to COPY at once."""

COLUMNS: Final = "(stream_offset, time_us, stream_id, key_id, value)"


def measure(context: Context) -> Iterator[Row]:
    """Yield the rows about the recorder's speed and memory."""
    runs, copies = _against_copy(context)
    rate, copy_rate = median([run.rate for run in runs]), median(copies)
    yield Row(
        GROUP,
        f"recorder catching up on {context.messages:,} messages written in batches, 2 keys",
        per_second(rate),
        "",
        None,
        f"≥ {RATE_AIM:,.0f} messages/s",
        rate >= RATE_AIM,
        note="`relatum record` as a process of its own; from its opening the stream to the last commit.",
        figures={"messages_per_s": rate, "all_messages_per_s": [run.rate for run in runs]},
    )
    yield Row(
        GROUP,
        "the same against a COPY of the same rows alone",
        per_second(rate),
        f"{per_second(copy_rate)}: one COPY into such a table",
        rate / copy_rate,
        f"≥ {COPY_AIM:g} ×",
        rate / copy_rate >= COPY_AIM,
        figures={"ours_messages_per_s": rate, "copy_messages_per_s": copy_rate, "all_copies_messages_per_s": copies},
    )
    yield from _against_reading(context)
    rss = max(run.rss_bytes for run in runs)
    yield Row(
        GROUP,
        f"recorder's memory, {context.messages:,} messages behind",
        f"{rss / 1e6:,.0f} MB at most" if rss else "",
        aim=f"≤ {RSS_AIM_BYTES / 1e6:,.0f} MB",
        is_met=rss <= RSS_AIM_BYTES,
        note="not measured: the system does not report it" if not rss else "",
        figures={"rss_bytes": rss},
    )


def _against_copy(context: Context) -> tuple[list[CatchUp], list[float]]:
    stream = context.orders(context.messages)
    runs: list[CatchUp] = []
    copies: list[float] = []
    rounds = context.rounds(ROUNDS)
    for number in range(rounds):
        context.say(f"recording {context.messages:,} messages, and COPY: round {number + 1} of {rounds}")
        database = context.new_database()
        runs.append(catch_up(context.broker_url, context.stream_url, database, stream, context.messages))
        copies.append(context.messages / copy_alone(database))
        if number + 1 < rounds:
            context.drop_database(database)
        else:
            context.keep_table(context.messages, database)
    return runs, copies


def copy_alone(database_url: str) -> float:
    """Return the seconds in which one COPY writes the recorded rows, in order, into a table of the same form."""
    with psycopg.connect(database_url) as connection:
        cursor = connection.cursor()
        with cursor.copy(
            "COPY (SELECT stream_offset, time_us, stream_id, key_id, value FROM relatum.relationships "
            "ORDER BY stream_offset, key_id) TO STDOUT"
        ) as out:
            data = b"".join(bytes(block) for block in out)
        rows = data.count(b"\n")
        cursor.execute("CREATE TABLE relatum.alone (LIKE relatum.relationships_1 INCLUDING ALL)")
        connection.commit()
        start = time.perf_counter()
        with cursor.copy(f"COPY relatum.alone {COLUMNS} FROM STDIN") as into:
            for place in range(0, len(data), COPY_BYTES):
                into.write(data[place : place + COPY_BYTES])
        connection.commit()
        taken = time.perf_counter() - start
        assert cursor.execute("SELECT count(*) FROM relatum.alone").fetchone() == (rows,)
        cursor.execute("DROP TABLE relatum.alone")
    return taken


def _against_reading(context: Context) -> Iterator[Row]:
    stream, count = context.singles(), context.singles_messages
    runs: list[float] = []
    reads: list[float] = []
    chunks = 0
    rounds = context.rounds(ROUNDS)
    for number in range(rounds):
        context.say(f"recording {count:,} messages written one by one, and reading them: {number + 1} of {rounds}")
        database = context.new_database()
        runs.append(catch_up(context.broker_url, context.stream_url, database, stream, count).rate)
        context.drop_database(database)
        taken, chunks = read_alone(context, stream, count)
        reads.append(count / taken)
    rate, reading = median(runs), median(reads)
    yield Row(
        GROUP,
        f"the same, {count:,} messages written one by one by pika",
        per_second(rate),
        f"{per_second(reading)}: reading it undecoded, {count / chunks:.1f} messages a chunk",
        rate / reading,
        f"≥ {READING_AIM:g} ×",
        rate / reading >= READING_AIM,
        figures={
            "ours_messages_per_s": rate,
            "reading_messages_per_s": reading,
            "chunks": chunks,
            "all_ours_messages_per_s": runs,
            "all_reading_messages_per_s": reads,
        },
    )


def read_alone(context: Context, stream: str, messages: int) -> tuple[float, int]:
    """Return the seconds in which the recorder's reader reads a stream and does nothing else, and the chunks."""
    read = chunks = 0
    with StreamReader.open(context.broker) as reader:
        start = time.perf_counter()
        for batch in reader.batches(stream, "first", follow=False):
            if batch is not None:
                read += len(batch)
                chunks += 1
        taken = time.perf_counter() - start
    assert read == messages
    return taken, chunks
