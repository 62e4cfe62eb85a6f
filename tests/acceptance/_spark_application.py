"""An application for a Spark cluster, submitted by `test_spark_cluster`: does one step after the other as it is asked.

Files in one directory carry what is asked, how far it is and what came out; a step is a function below.
"""

import json
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import relatum_spark

POLL_S = 0.05


def number_of(column: str) -> Any:
    """The number that is a message's body."""
    return F.col(column).cast("string").cast("long")


def numbers(frame: DataFrame) -> list[Any]:
    """The rows as lists."""
    return [list(row) for row in frame.collect()]


def whereabouts(spark: SparkSession) -> list[Any]:
    """Which interpreter the tasks run in, and where Relatum and a dependency of it come from."""

    def look(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import psycopg

        import relatum

        for _ in batches:
            yield pa.record_batch([[sys.executable], [relatum.__file__], [psycopg.__file__]], names=["a", "b", "c"])

    return numbers(spark.range(0, 2, 1, 2).mapInArrow(look, "a string, b string, c string"))


def read(spark: SparkSession, stream: str, **options: Any) -> list[Any]:
    """The whole stream: offsets and numbers."""
    frame = spark.read.format("rabbitmq_streams").options(stream=stream, **options).load()
    return numbers(frame.select("offset", number_of("value")))


def backfill(spark: SparkSession, streams: list[str]) -> list[Any]:
    """Record streams."""
    return [report.stream for report in relatum_spark.backfill(spark, streams, slice_offsets=4_000)]


def pairs(spark: SparkSession, left: str, right: str, on: str) -> list[Any]:
    """The numbers of paired messages."""
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


class Watch:
    """Writes how many tasks have ended and failed since it began, and which executors have one, until it is left."""

    def __init__(self, spark: SparkSession, target: Path) -> None:
        self._tracker = spark.sparkContext.statusTracker()
        self._store = spark.sparkContext._jsc.sc().statusStore()  # type: ignore[attr-defined]
        self._target = target
        self._stages: dict[int, Any] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> "Watch":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._look()

    def _run(self) -> None:
        while not self._stop.wait(POLL_S):
            self._look()

    def _look(self) -> None:
        for stage in {*self._stages, *self._tracker.getActiveStageIds()}:
            self._stages[stage] = self._tracker.getStageInfo(stage) or self._stages.get(stage)
        seen = [info for info in self._stages.values() if info is not None]
        write(
            self._target,
            {
                "ended": sum(info.numCompletedTasks for info in seen),
                "failed": sum(info.numFailedTasks for info in seen),
                "busy": self._busy(),
            },
        )

    def _busy(self) -> list[str]:
        listed = self._store.executorList(True)
        summaries = [listed.apply(number) for number in range(listed.size())]
        return [summary.id() for summary in summaries if summary.activeTasks() > 0]


def write(target: Path, document: Any) -> None:
    """Write a file that is never seen half written."""
    part = target.with_suffix(".part")
    part.write_text(json.dumps(document))
    part.replace(target)


def executors_of(spark: SparkSession) -> int:
    """How many executors are there, this driver not counted."""
    return int(spark.sparkContext._jsc.sc().getExecutorMemoryStatus().size()) - 1  # type: ignore[attr-defined]


def await_condition(condition: Callable[[], bool]) -> None:
    """Wait; whoever submitted this has the limit and ends it."""
    while not condition():
        time.sleep(POLL_S)


def main(directory: Path, executors: int) -> None:
    """Do what is asked until the asked step is no step."""
    spark = SparkSession.Builder().getOrCreate()
    relatum_spark.register(spark)
    for number in count():
        asked = directory / f"{number}.asked"
        await_condition(asked.exists)
        name, arguments = json.loads(asked.read_text())
        if name not in STEPS:
            break
        await_condition(lambda: executors_of(spark) >= executors)
        try:
            with Watch(spark, directory / f"{number}.tasks"):
                answer = {"answer": STEPS[name](spark, **arguments)}
        except Exception:
            answer = {"error": [traceback.format_exc()]}
        write(directory / f"{number}.answer", answer)
    spark.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
