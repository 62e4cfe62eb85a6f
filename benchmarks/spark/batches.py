"""The cost of a micro-batch, compared with Spark's own rate source."""

import tempfile
import threading
import time
from collections.abc import Iterator
from typing import Any, Final

from pyspark.sql import DataFrame

from benchmarks import _streams as streams
from benchmarks._context import Context
from benchmarks._results import Row
from benchmarks._timing import median, milliseconds
from benchmarks.spark._session import session

GROUP: Final = "batches"

BATCHES: Final = 30
"""Micro-batches of each query that count; the first three only warm it up."""

WARM_UP: Final = 3

MESSAGES_EACH: Final = 10
INTERVAL_S: Final = 0.02

BATCH_ROWS: Final = 100
"""Rows of the rate source in each micro-batch: about as many as are published while one runs."""

LIMIT_S: Final = 120.0

OVERHEAD_AIM: Final = 1.6


def measure(context: Context) -> Iterator[Row]:
    """Yield the row about micro-batches."""
    spark = session()
    stream = context.empty_stream("micro")
    ours = spark.readStream.format("rabbitmq_streams").option("broker", context.broker_url)
    ours = ours.option("streamUrl", context.stream_url).option("stream", stream).option("startingOffsets", "earliest")
    theirs = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", BATCH_ROWS)
    context.say(f"{BATCHES} micro-batches of each source")
    with _trickle(context, stream):
        mine, rate = [], []
        for _ in range(context.rounds(3)):
            rate += _durations(theirs.load())
            mine += _durations(ours.load())
    yield Row(
        GROUP,
        f"micro-batch at {MESSAGES_EACH / INTERVAL_S:,.0f} messages/s, median",
        milliseconds(median(mine)),
        f"{milliseconds(median(rate))}: Spark's rate source",
        median(mine) / median(rate),
        f"≤ {OVERHEAD_AIM:g} ×",
        median(mine) / median(rate) <= OVERHEAD_AIM,
        figures={"relatum_s": mine, "rate_s": rate},
    )


def _durations(frame: DataFrame) -> list[float]:
    """Return the seconds of each micro-batch with rows, without the first ones."""
    found: dict[int, float] = {}
    with tempfile.TemporaryDirectory() as checkpoint:
        query = frame.writeStream.format("noop").option("checkpointLocation", checkpoint).start()
        limit = time.monotonic() + LIMIT_S
        while len(found) < BATCHES + WARM_UP:
            assert time.monotonic() < limit, f"{len(found)} micro-batches in {LIMIT_S:.0f} s"
            if query.exception() is not None:
                raise query.exception()  # type: ignore[misc] - it is there
            for progress in query.recentProgress:
                if progress["numInputRows"]:
                    found[progress["batchId"]] = progress["durationMs"]["triggerExecution"] / 1000
            time.sleep(0.1)
        query.stop()
    return [seconds for _, seconds in sorted(found.items())][WARM_UP : BATCHES + WARM_UP]


class _trickle:  # noqa: N801 - reads as the statement it is
    """Publish a few messages every few milliseconds, so that each micro-batch has some."""

    def __init__(self, context: Context, stream: str) -> None:
        self._context = context
        self._stream = stream
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="publisher of the benchmark")

    def _run(self) -> None:
        with streams.connected(self._context.broker_url) as connection:
            channel = connection.channel()
            number = 0
            while not self._stop.wait(INTERVAL_S):
                for number in range(number, number + MESSAGES_EACH):  # noqa: B020 - continues the iteration
                    channel.basic_publish("", self._stream, streams.body(number))
                connection.process_data_events(0)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: Any) -> None:
        self._stop.set()
        self._thread.join()
