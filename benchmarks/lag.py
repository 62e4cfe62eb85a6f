"""The lag of recording behind publishing, at a steady rate."""

import bisect
import multiprocessing
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Final

import pika
import psycopg

from benchmarks import _streams as streams
from benchmarks._context import Context
from benchmarks._recorder import COVERAGE, recorder
from benchmarks._results import Row
from benchmarks._timing import median, milliseconds, percentile
from relatum.reading import StreamReader

GROUP: Final = "lag"

RATE: Final = 1_000
"""Messages a second."""

SECONDS: Final = 15
WARM_UP_S: Final = 3
"""Seconds at the start that do not count, while the recorder's process warms up."""

POLL_S: Final = 0.0005
LIMIT_S: Final = 60.0

MEDIAN_AIM_S: Final = 0.025
P99_AIM_S: Final = 0.1


def measure(context: Context) -> Iterator[Row]:
    """Yield the row about the lag of recording."""
    count = RATE * (WARM_UP_S + context.rounds(SECONDS))
    stream, database = context.empty_stream("lag"), context.new_database()
    context.say(f"publishing {RATE:,} messages a second beside a recorder")
    receiver, sender = multiprocessing.Pipe(duplex=False)
    publisher = multiprocessing.get_context("spawn").Process(
        target=publish_steadily, args=(context.broker_url, stream, count, sender)
    )
    with (
        psycopg.connect(database, autocommit=True) as connection,
        recorder(context.broker_url, context.stream_url, database, stream),
    ):
        wait_opened(connection, stream)
        publisher.start()
        seen = _watch(connection, stream, count)
        published = receiver.recv()
        publisher.join()
        row = connection.execute("SELECT count(*) FROM relatum.relationships").fetchone()
        assert row == (2 * count,), "each message has its two rows"
    lags = _lags(context, stream, published, seen)[RATE * WARM_UP_S :]
    context.drop_database(database)
    yield _row(lags, count / (published[-1] - published[0]))


def _row(lags: list[float], rate: float) -> Row:
    middle, late = median(lags), percentile(lags, 0.99)
    return Row(
        GROUP,
        f"from publish to recorded, at {RATE:,} messages/s",
        f"median {milliseconds(middle)}, p99 {milliseconds(late)}",
        aim=f"median ≤ {MEDIAN_AIM_S * 1e3:.0f} ms, p99 ≤ {P99_AIM_S * 1e3:.0f} ms",
        is_met=middle <= MEDIAN_AIM_S and late <= P99_AIM_S,
        note="From the call of basic_publish until another connection sees the coverage past the message.",
        figures={"median_s": middle, "p99_s": late, "max_s": max(lags), "published_per_s": rate, "count": len(lags)},
    )


def publish_steadily(broker_url: str, stream: str, count: int, sender: Connection) -> None:
    """Publish at a steady rate, in a process of its own; send back the time of each publish."""
    moments: list[float] = []
    with streams.connected(broker_url) as connection:
        channel = connection.channel()
        due = time.perf_counter()
        for number in range(count):
            due += 1 / RATE
            time.sleep(max(0.0, due - time.perf_counter()))
            headers = {"order_id": streams.order_id(number), "host": streams.host(number)}
            properties = pika.BasicProperties(headers=headers)
            # The monotonic clock is system-wide, so processes can compare it.
            moments.append(time.monotonic())
            channel.basic_publish("", stream, streams.body(number), properties)
    sender.send(moments)


def wait_opened(connection: psycopg.Connection[tuple[int]], stream: str) -> None:
    """Wait until a recorder has opened a stream."""
    limit = time.monotonic() + LIMIT_S
    while connection.execute(COVERAGE, [stream], prepare=True).fetchone() is None:
        assert time.monotonic() < limit, "the recorder did not open the stream"
        time.sleep(0.02)


def _watch(connection: psycopg.Connection[tuple[int]], stream: str, count: int) -> list[tuple[int, float]]:
    """Return each observed end of the coverage with its time, up to the last message."""
    seen: list[tuple[int, float]] = [(0, 0.0)]
    limit = time.monotonic() + count / RATE + LIMIT_S
    while seen[-1][0] < count:
        row = connection.execute(COVERAGE, [stream], prepare=True).fetchone()
        now = time.monotonic()
        assert row is not None
        if row[0] != seen[-1][0]:
            seen.append((row[0], now))
        assert now < limit, f"the recorder is at {row[0]} of {count}"
        time.sleep(POLL_S)
    return seen


def _lags(context: Context, stream: str, published: list[float], seen: list[tuple[int, float]]) -> list[float]:
    """Return the seconds from each publish to the first poll that found it recorded."""
    with StreamReader.open(context.broker) as reader:
        offset_of = {int(message.body): message.offset for message in reader.iterate(stream)}
    ends = [end for end, _ in seen]
    return [seen[bisect.bisect_right(ends, offset_of[number])][1] - moment for number, moment in enumerate(published)]
