"""An application for a Spark cluster: does the steps below as files in one directory ask, and answers there."""

import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import relatum_spark

POLL_S = 0.05
FRESH_S = 0.3
"""Seconds after which an executor's reports have arrived at the driver."""


def number_of(column: str) -> Any:
    return F.col(column).cast("string").cast("long")


def numbers(frame: DataFrame) -> list[Any]:
    return [list(row) for row in frame.collect()]


def whereabouts(spark: SparkSession) -> list[Any]:
    def look(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import psycopg

        import relatum

        for _ in batches:
            yield pa.record_batch([[sys.executable], [relatum.__file__], [psycopg.__file__]], names=["a", "b", "c"])

    return numbers(spark.range(0, 2, 1, 2).mapInArrow(look, "a string, b string, c string"))


def read(spark: SparkSession, stream: str, **options: Any) -> list[Any]:
    frame = spark.read.format("rabbitmq_streams").options(stream=stream, **options).load()
    return numbers(frame.select("offset", number_of("value")))


def backfill(spark: SparkSession, streams: list[str]) -> list[Any]:
    return [report.stream for report in relatum_spark.backfill(spark, streams, slice_offsets=4_000)]


def pairs(spark: SparkSession, left: str, right: str, on: str) -> list[Any]:
    found = relatum_spark.related_pairs(spark, left, right, on=on, payloads=True)
    return numbers(found.select(number_of("left_value"), number_of("right_value")))


def copy(spark: SparkSession, source: str, target: str, checkpoint: str, each: int) -> list[Any]:
    """A streaming query from one stream into another; the numbers of rows of its micro-batches."""
    rows = spark.readStream.format("rabbitmq_streams").options(
        stream=source, startingOffsets="earliest", maxOffsetsPerTrigger=each, maxRecordsPerPartition=each // 4
    )
    writer = rows.load().select("value", "headers").writeStream.format("rabbitmq_streams").option("stream", target)
    query = writer.option("checkpointLocation", checkpoint).trigger(availableNow=True).start()
    query.awaitTermination()
    return [progress.numInputRows for progress in query.recentProgress]


STEPS: dict[str, Callable[..., list[Any]]] = {
    step.__name__: step for step in (whereabouts, read, backfill, pairs, copy)
}


class Killer:
    """Kills an executor that has a task, once so many tasks have ended since it began; None kills none."""

    def __init__(self, spark: SparkSession, after: int | None) -> None:
        self._context, self._after = spark.sparkContext, after
        self._stages: dict[int, Any] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> "Killer":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def tasks(self, outcome: str) -> int:
        """The number of tasks by a field of Spark's stages."""
        tracker = self._context.statusTracker()
        for stage in {*self._stages, *tracker.getActiveStageIds()}:
            self._stages[stage] = tracker.getStageInfo(stage) or self._stages.get(stage)
        return sum(getattr(info, outcome) for info in self._stages.values() if info is not None)

    def _run(self) -> None:
        while not self._stop.wait(POLL_S):
            if self.tasks("numCompletedTasks") < (sys.maxsize if self._after is None else self._after):
                continue
            for executor in self._busy():
                process = self._process_of(executor)
                os.kill(process, signal.SIGSTOP)
                # What it reported to the driver before it was frozen arrives, and none of its tasks can end any more.
                time.sleep(FRESH_S)
                if executor in self._busy():
                    os.kill(process, signal.SIGKILL)
                    self._after = None
                    break
                os.kill(process, signal.SIGCONT)

    def _busy(self) -> list[str]:
        listed = self._context._jsc.sc().statusStore().executorList(True)  # type: ignore[attr-defined]
        summaries = [listed.apply(number) for number in range(listed.size())]
        return [summary.id() for summary in summaries if summary.activeTasks() > 0]

    def _process_of(self, executor: str) -> int:
        for entry in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                words = (entry / "cmdline").read_bytes().decode().split("\0")
                if self._context.applicationId in words and ("--executor-id", executor) in pairwise(words):
                    return int(entry.name)
        raise LookupError(f"there is no process of executor {executor}")


def write(target: Path, document: Any) -> None:
    """Write a file that is never seen half written."""
    part = target.with_suffix(".part")
    part.write_text(json.dumps(document))
    part.replace(target)


def executors_of(spark: SparkSession) -> int:
    return int(spark.sparkContext._jsc.sc().getExecutorMemoryStatus().size()) - 1  # type: ignore[attr-defined]


def await_condition(condition: Callable[[], bool]) -> None:
    """Wait; the submitter has the time limit and ends it."""
    while not condition():
        time.sleep(POLL_S)


def main(directory: Path, executors: int) -> None:
    spark = SparkSession.Builder().getOrCreate()
    relatum_spark.register(spark)
    for number in count():
        asked = directory / f"{number}.asked"
        await_condition(asked.exists)
        name, kill_after, arguments = json.loads(asked.read_text())
        if name not in STEPS:
            break
        await_condition(lambda: executors_of(spark) >= executors)
        try:
            with Killer(spark, kill_after) as killer:
                result = STEPS[name](spark, **arguments)
            answer = {"answer": result, "failed": killer.tasks("numFailedTasks")}
        except Exception:
            answer = {"error": [traceback.format_exc()]}
        write(directory / f"{number}.answer", answer)
    spark.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
