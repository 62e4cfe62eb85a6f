"""Back-fill in parallel: the driver plans by the coverage, tasks fill slices of what a stream lacks.

A task looks up what of its slice is still not covered. So a task that Spark runs again, a run that is repeated, and two
that run at once write nothing twice.
"""

import pickle
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Final

import pyarrow as pa
import sqlalchemy as sa
from pyspark.sql import Row, SparkSession
from pyspark.sql.utils import is_remote

from relatum.checks import checked_count, checked_names, shown
from relatum.errors import InvalidInput, RelatumError, Transient
from relatum.reading import Broker, StreamReader
from relatum.recording import BackfillReport, Filler, Pace, Plan, Segment, edges_of, plan_backfill
from relatum.store.database import as_engine
from relatum_spark._where import GivenBroker, broker_of, database_url, names_of, open_reader

SLICE_OFFSETS: Final = 100_000
"""Offsets a slice has at most: some seconds of work, so that little is repeated and all slots end together."""

SLICES_EACH: Final = 2
"""Slices for each task that runs at once, at least."""

PARALLELISM_OVER_CONNECT: Final = 8
"""Tasks taken to run at once where the session cannot be asked."""

Part = tuple[str, Segment]
"""A slice of what a stream lacks."""

_FILLED: Final = pa.schema(
    [("stream", pa.string()), ("messages", pa.int64()), ("rows", pa.int64()), ("error", pa.binary())]
)


def backfill(
    spark: SparkSession,
    streams: str | Sequence[str],
    *,
    keys: Sequence[str] | None = None,
    broker: GivenBroker = None,
    database: str | None = None,
    messages_per_s: float | None = None,
    partitions: int | None = None,
    slice_offsets: int = SLICE_OFFSETS,
) -> list[BackfillReport]:
    """Record the retained messages of streams that lack some key, in parallel.

    Safe to repeat, to run twice at once, and beside recorders. When it is killed anywhere, the table equals the
    streams up to the coverage, and the next run does what is left. `relatum status` shows how far it is.

    Args:
        spark: The session.
        streams: A stream or several; a super stream stands for its partitions.
        keys: Names of defined keys; None: all that are in force, and the time unless it is switched off.
        broker: The broker; None takes RELATUM_BROKER_URL. Executors connect to it too.
        database: PostgreSQL's URL; None takes RELATUM_DATABASE_URL. Executors connect to it too.
        messages_per_s: Messages read a second by all tasks together, at most; None for no limit.
        partitions: Tasks that run at once; None for the session's slots (8 over Spark Connect, which does not tell).
        slice_offsets: Offsets one slice has at most; a task that fails repeats what of its slice is not covered.

    Returns:
        A report for each stream, in the order given, partitions in theirs. A task that died after a commit could not
        count what it did: messages and rows are then too few, the table is not.

    Raises:
        InvalidInput: an argument is wrong.
        ConfigurationError: no broker or database is named, or executors cannot reach the stream protocol's port.
        KeyNotDefined, StreamNotFound: a key is not defined, a stream not there; nothing was read.
        CoverageConflict: a stream is not the one that was recorded, or others keep moving the coverage.
        PythonException: a task failed as often as Spark tries it; run it again to go on.
    """
    names = names_of("streams", streams)
    if keys is not None:
        keys = checked_names("keys", keys)
    if messages_per_s is not None and not (type(messages_per_s) in (int, float) and messages_per_s > 0):
        raise InvalidInput(f"messages_per_s= takes a number over 0, not {shown(messages_per_s)}")
    checked_count("slice_offsets", slice_offsets)
    if partitions is not None:
        at_once = checked_count("partitions", partitions)
    else:
        at_once = PARALLELISM_OVER_CONNECT if is_remote() else max(1, spark.sparkContext.defaultParallelism)
    target, url = broker_of(broker), database_url(database)
    started = perf_counter()
    with as_engine(url) as engine, open_reader(target) as reader:
        super_streams: dict[str, str | None] = {}
        for name in names:
            found = reader.partitions(name)
            super_streams |= dict.fromkeys(found, name) if found else {name: super_streams.get(name)}

        def plans(*, to_end: bool) -> dict[str, Plan]:
            """Return what there is to fill of each stream that lacks anything."""
            each = {
                stream: plan_backfill(engine, reader, target.vhost, stream, keys, super_stream, to_end=to_end)
                for stream, super_stream in super_streams.items()
            }
            return {stream: plan for stream, plan in each.items() if plan.segments}

        done: dict[str, Counter[str]] = {stream: Counter() for stream in super_streams}
        edges: dict[str, list[int]] = {stream: [] for stream in super_streams}
        lacking = plans(to_end=True)
        while lacking:
            for stream, plan in lacking.items():
                edges[stream] += edges_of(plan.segments)
            parts = cut(list(lacking.values()), at_once=at_once, slice_offsets=slice_offsets)
            # With a pace, as many tasks as run at once, each with its share.
            count = len(parts) if messages_per_s is None else min(at_once, len(parts))
            pace = None if messages_per_s is None else messages_per_s / count
            tasks = [parts[number::count] for number in range(count)]
            for row in _rows(spark, Filling(target, url, lacking, tasks, pace)):
                done[row.stream].update(messages=row.messages, rows=row.rows)
            # Live recording may only now have begun to record a key: plan again until nothing is lacking.
            lacking = plans(to_end=False)
    seconds = perf_counter() - started
    return [
        BackfillReport(stream, count["messages"], count["rows"], min(ends or [0]), max(ends or [0]), seconds)
        for (stream, count), ends in zip(done.items(), edges.values(), strict=True)
    ]


def cut(plans: Sequence[Plan], *, at_once: int, slice_offsets: int) -> list[Part]:
    """Cut what streams lack into slices, in order: neighbours are filled at about the same time.

    So the table's rows are nearly in the order of offsets, and its block index stays small and exact.
    """
    total = sum(part.to_offset - part.from_offset for plan in plans for part in plan.segments)
    size = max(1, min(slice_offsets, -(-total // (at_once * SLICES_EACH))))
    return [
        (plan.stream.name, Segment(start, min(start + size, whole.to_offset), whole.key_ids))
        for plan in plans
        for whole in plan.segments
        for start in range(whole.from_offset, whole.to_offset, size)
    ]


@dataclass(frozen=True)
class Filling:
    """What the tasks do: numbers of tasks in, a row for each slice out. Can be pickled."""

    broker: Broker = field(repr=False)
    database: str = field(repr=False)
    plans: dict[str, Plan]
    tasks: list[list[Part]]
    messages_per_s: float | None
    """Messages that each task reads a second, at most."""

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for number in batch.column(0).to_pylist():
                yield pa.RecordBatch.from_pylist(self._fill(self.tasks[number]), schema=_FILLED)

    def _fill(self, parts: Sequence[Part]) -> list[dict[str, Any]]:
        """Fill slices with one reader and one engine.

        What may pass is raised, so that Spark tries again; another error is the only row, and the driver raises it.
        """
        try:
            pace = Pace(self.messages_per_s, threading.Event())
            with as_engine(self.database) as engine, open_reader(self.broker) as reader:
                return [self._fill_one(engine, reader, stream, segment, pace) for stream, segment in parts]
        except Transient:
            raise
        except RelatumError as error:
            return [{"error": pickle.dumps(error)}]

    def _fill_one(
        self, engine: sa.Engine, reader: StreamReader, stream: str, segment: Segment, pace: Pace
    ) -> dict[str, Any]:
        done: Counter[str] = Counter()

        def count(messages: int, rows: int, _: int) -> None:
            done.update(messages=messages, rows=rows)

        plan = self.plans[stream]
        Filler(engine, reader, plan.stream, plan.definitions, on_commit=count, pace=pace).complete(segment)
        return {"stream": stream, "messages": done["messages"], "rows": done["rows"]}


def _rows(spark: SparkSession, work: Filling) -> list[Row]:
    """Run the tasks, and collect a row for each slice. Spark Connect has `mapInArrow` too, and no RDDs."""
    numbers = spark.range(0, len(work.tasks), 1, len(work.tasks))
    rows = numbers.mapInArrow(work, "stream string, messages long, rows long, error binary").collect()
    for row in rows:
        if row.error is not None:
            # Written by `Filling`, in a task of this job.
            raise pickle.loads(row.error)  # noqa: S301
    return rows
