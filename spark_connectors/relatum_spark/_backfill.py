"""Back-fill in parallel: the driver plans from the coverage, and tasks fill slices of the missing ranges.

A task first looks up which part of its slice is still not covered. So retried tasks, repeated runs and concurrent runs
write nothing twice.
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
from pyspark.sql import SparkSession
from pyspark.sql.utils import is_remote

from relatum.common.checks import checked_count, checked_names, shown
from relatum.errors import InvalidInput, RelatumError, Transient
from relatum.reading import Broker, StreamReader
from relatum.recording import BackfillReport
from relatum.recording.backfilling import Plan, edges_of, plan_backfill
from relatum.recording.filler import Filler, RateLimit
from relatum.recording.ranges import Segment
from relatum.recording.verifying import meant_streams
from relatum.store.database import IDLE_S, as_engine
from relatum_spark._servers import GivenBroker, broker_of, database_url, in_tasks, names_of, open_reader

SLICE_OFFSETS: Final = 100_000
"""Maximum offsets in a slice: a few seconds of work, so that a retry repeats little and all slots end together."""

SLICES_PER_TASK: Final = 2
"""Minimum number of slices for each concurrent task."""

CONNECT_SLOTS: Final = 8
"""Assumed number of concurrent tasks over Spark Connect, which does not report it."""

Part = tuple[str, Segment]
"""A stream's name and a slice of a missing range."""


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
    """Record, in parallel, the retained messages that are not yet recorded for every key.

    Safe to repeat, and to run concurrently with other back-fills and with recorders. After a kill at any point, the
    table equals the streams up to the coverage, and the next run does the rest. `relatum status` shows the progress.

    Args:
        spark: The session.
        streams: One or several streams; a super stream means its partitions.
        keys: Names of defined keys; times are then not recorded. None: all keys in force, and times unless they are
            switched off.
        broker: The broker. None uses RELATUM_BROKER_URL. Executors connect to it too.
        database: PostgreSQL's URL. None uses RELATUM_DATABASE_URL. Executors connect to it too.
        messages_per_s: Maximum messages a second that all tasks together read. None means no limit.
        partitions: The expected number of concurrent tasks: the work is cut into at least two slices for each. With
            `messages_per_s`, also the maximum number of tasks. None: the session's slots (8 over Spark Connect, which
            does not report them).
        slice_offsets: Maximum offsets in a slice. A retried task repeats only offsets that are not covered yet.

    Returns:
        A report for each stream, in the order given; a super stream's partitions in their order. If a task died after a
        commit, the reported messages and rows are too low; the table is still complete.

    Raises:
        InvalidInput: an argument is wrong.
        ConfigurationError: no broker or database is named, a stream was recorded from another broker, or executors
            cannot reach the stream protocol's port.
        BrokerUnavailable, DatabaseUnavailable: a server does not answer the driver; run again to continue.
        KeyNotDefined, StreamNotFound: a key or stream does not exist; nothing was read.
        CoverageConflict: a stream was declared again or lost its tail since it was recorded, or other writers keep
            changing its coverage.
        PythonException: a task failed in every attempt that Spark allows; run again to continue.
    """
    names = names_of("streams", streams)
    keys = None if keys is None else checked_names("keys", keys)
    if messages_per_s is not None and not (type(messages_per_s) in (int, float) and messages_per_s > 0):
        raise InvalidInput(f"messages_per_s= takes a number over 0, not {shown(messages_per_s)}")
    checked_count("slice_offsets", slice_offsets)
    if partitions is not None:
        at_once = checked_count("partitions", partitions)
    else:
        at_once = CONNECT_SLOTS if is_remote() else max(1, spark.sparkContext.defaultParallelism)
    target, url = broker_of(broker), database_url(database)
    started = perf_counter()
    with as_engine(url, idle_s=IDLE_S) as engine, open_reader(target) as reader:
        super_streams: dict[str, str | None] = {}
        for stream, super_stream in meant_streams(engine, reader, target.vhost, names):
            super_streams[stream] = super_stream or super_streams.get(stream)

        def plans(*, to_end: bool) -> dict[str, Plan]:
            each = {
                stream: plan_backfill(engine, reader, target.vhost, stream, keys, super_stream, to_end=to_end)
                for stream, super_stream in super_streams.items()
            }
            return {stream: plan for stream, plan in each.items() if plan.segments}

        done: dict[str, Counter[str]] = {stream: Counter() for stream in super_streams}
        edges: dict[str, list[int]] = {stream: [] for stream in super_streams}
        missing_plans = plans(to_end=True)
        while missing_plans:
            for stream, plan in missing_plans.items():
                edges[stream] += edges_of(plan.segments)
            parts = cut(list(missing_plans.values()), at_once=at_once, slice_offsets=slice_offsets)
            # With a rate limit: one task per slot, each with an equal share of the rate.
            count = len(parts) if messages_per_s is None else min(at_once, len(parts))
            pace = None if messages_per_s is None else messages_per_s / count
            tasks = [parts[number::count] for number in range(count)]
            filled = in_tasks(spark, Filling(target, url, missing_plans, pace), tasks, "result binary")
            has_covered = False
            for row in filled.collect():
                # Written by `Filling`, in a task of this job.
                result = pickle.loads(row.result)  # noqa: S301
                if isinstance(result, RelatumError):
                    raise result
                stream, counted, is_covered = result
                done[stream].update(counted)
                has_covered |= is_covered
            if not has_covered:
                break  # The remaining messages cannot be unpacked here, or other processes recorded them.
            # A recorder may have started to record a key during the job: plan again until nothing is missing.
            missing_plans = plans(to_end=False)
    seconds = perf_counter() - started
    return [
        BackfillReport(stream, count["messages"], count["rows"], min(ends or [0]), max(ends or [0]), seconds)
        for (stream, count), ends in zip(done.items(), edges.values(), strict=True)
    ]


def cut(plans: Sequence[Plan], *, at_once: int, slice_offsets: int) -> list[Part]:
    """Cut the missing ranges into slices, in order, so that neighbours are filled at about the same time.

    The table's rows are then nearly in the order of offsets, and its block index stays small and exact.
    """
    total = sum(part.to_offset - part.from_offset for plan in plans for part in plan.segments)
    size = max(1, min(slice_offsets, -(-total // (at_once * SLICES_PER_TASK))))
    return [
        (plan.stream.name, Segment(start, min(start + size, whole.to_offset), whole.key_ids))
        for plan in plans
        for whole in plan.segments
        for start in range(whole.from_offset, whole.to_offset, size)
    ]


@dataclass(frozen=True)
class Filling:
    """Fills slices in a task, with one reader and one engine. Can be pickled."""

    broker: Broker = field(repr=False)
    database: str = field(repr=False)
    plans: dict[str, Plan]
    messages_per_s: float | None  # of each task; None means no limit

    def __call__(self, parts: Sequence[Part]) -> Iterator[pa.RecordBatch]:
        """Yield the pickled result of each slice, or an error for the driver; Spark retries a transient error."""
        try:
            pace = RateLimit(self.messages_per_s, threading.Event())
            with as_engine(self.database, idle_s=IDLE_S) as engine, open_reader(self.broker) as reader:
                results: list[Any] = [self._fill(engine, reader, stream, segment, pace) for stream, segment in parts]
        except Transient:
            raise
        except RelatumError as error:
            results = [error]
        yield pa.record_batch([pa.array(map(pickle.dumps, results), pa.binary())], names=["result"])

    def _fill(
        self, engine: sa.Engine, reader: StreamReader, stream: str, segment: Segment, pace: RateLimit
    ) -> tuple[str, Counter[str], bool]:
        done: Counter[str] = Counter()

        def count(messages: int, rows: int, _: int) -> None:
            done.update(messages=messages, rows=rows)

        plan = self.plans[stream]
        filler = Filler(engine, reader, plan.stream, plan.definitions, on_commit=count, pace=pace)
        return stream, done, filler.complete(segment)
