"""Back-fill in parallel: the kernel plans on the driver and fills in tasks.

A slice is a part of what a stream lacks. Its task looks up what of it is still not covered, so a task that is tried
again, a run that is repeated and two that run at once write nothing twice.
"""

import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from time import perf_counter
from typing import Final

import sqlalchemy as sa
from pyspark.sql import SparkSession

from relatum.checks import checked_count, checked_names, shown
from relatum.errors import InvalidInput
from relatum.keys import KeyDefinition
from relatum.reading import BrokerAddress, StreamReader
from relatum.recording import BackfillReport, Filler, Pace, Plan, Segment, edges_of, plan_backfill
from relatum.store import StreamRow, as_engine
from relatum_spark._broker import Broker, database_url
from relatum_spark.recording._follower import Follower, ProgressListener
from relatum_spark.recording._tasks import one_or_several, parallelism, run_tasks

SLICE_OFFSETS: Final = 100_000
"""Offsets a slice has at most: some seconds of work, so that little is repeated and all slots end together."""

SLICES_EACH: Final = 2
"""Slices for each task that runs at once, at least."""


def backfill(
    spark: SparkSession,
    streams: str | Sequence[str],
    *,
    keys: Sequence[str] | None = None,
    broker: str | BrokerAddress | Broker | None = None,
    stream_url: str | None = None,
    database: str | None = None,
    messages_per_s: float | None = None,
    partitions: int | None = None,
    slice_offsets: int = SLICE_OFFSETS,
    progress: ProgressListener | None = None,
) -> list[BackfillReport]:
    """Record the retained messages of streams that lack some key, in parallel.

    Safe to repeat, to run twice at once, and beside recorders. When it is killed anywhere, the table equals the
    streams up to the coverage, and the next run does what is left.

    Args:
        spark: The session.
        streams: A stream or several; a super stream stands for its partitions.
        keys: Names of defined keys; None: all that are in force, and the time unless it is switched off.
        broker: The broker; None takes RELATUM_BROKER_URL. Executors connect to it too.
        stream_url: The stream protocol's URL, where it cannot be told from the broker's.
        database: PostgreSQL's URL; None takes RELATUM_DATABASE_URL. Executors connect to it too.
        messages_per_s: Messages read a second by all tasks together, at most; None for no limit.
        partitions: Tasks that run at once; None for the session's slots (8 over Spark Connect, which does not tell).
        slice_offsets: Offsets one slice has at most; a task that fails repeats what of its slice is not covered.
        progress: Called on the driver, about once a second for each stream that is being filled.

    Returns:
        A report for each stream, in the order given, partitions in theirs. A task that died after a commit could not
        count what it did: messages and rows are then too few, the table is not.

    Raises:
        InvalidInput: an argument is wrong.
        ConfigurationError: no broker or database is named, or executors cannot reach the stream protocol's port.
        KeyNotDefined, StreamNotFound: as they say; nothing was read.
        CoverageConflict: a stream is not the one that was recorded, or others keep moving the coverage.
        PythonException: a task failed as often as Spark tries it; run it again to go on.
    """
    names = one_or_several("streams", streams)
    if keys is not None:
        keys = checked_names("keys", keys)
    if messages_per_s is not None and not (type(messages_per_s) in (int, float) and messages_per_s > 0):
        raise InvalidInput(f"messages_per_s= takes a number over 0, not {shown(messages_per_s)}")
    checked_count("slice_offsets", slice_offsets)
    at_once = parallelism(spark, partitions)
    target, url = Broker.of(broker, stream_url), database_url(database)
    with as_engine(url) as engine, target.open() as reader:
        run = _Run(spark, engine, reader, target, url, at_once, slice_offsets, messages_per_s, progress)
        return run.run(names, keys)


@dataclass(frozen=True, slots=True)
class Part:
    """A slice of what a stream lacks."""

    stream: str
    segment: Segment


@dataclass(frozen=True, slots=True)
class SliceFilled:
    """What a task did of one slice."""

    stream: str
    messages: int
    rows: int


@dataclass(frozen=True)
class Filling:
    """The work of a task: to fill some slices, with one reader and one engine. Can be pickled."""

    broker: Broker = field(repr=False)
    database: str = field(repr=False)
    streams: dict[str, StreamRow]
    definitions: dict[str, tuple[KeyDefinition, ...]]
    messages_per_s: float | None

    def __call__(self, parts: Sequence[Part]) -> list[SliceFilled]:
        """Fill slices, one after the other."""
        pace = Pace(self.messages_per_s, threading.Event())
        with as_engine(self.database) as engine, self.broker.open() as reader:
            return [self._fill(engine, reader, part, pace) for part in parts]

    def _fill(self, engine: sa.Engine, reader: StreamReader, part: Part, pace: Pace) -> SliceFilled:
        done: Counter[str] = Counter()

        def count(messages: int, rows: int, _: int) -> None:
            done.update(messages=messages, rows=rows)

        stream, definitions = self.streams[part.stream], self.definitions[part.stream]
        Filler(engine, reader, stream, definitions, on_commit=count, pace=pace).complete(part.segment)
        return SliceFilled(part.stream, done["messages"], done["rows"])


@dataclass
class _Run:
    """One back-fill on the driver."""

    spark: SparkSession
    engine: sa.Engine
    reader: StreamReader
    broker: Broker
    database: str
    at_once: int
    slice_offsets: int
    messages_per_s: float | None
    progress: ProgressListener | None

    def run(self, names: Sequence[str], keys: Sequence[str] | None) -> list[BackfillReport]:
        started = perf_counter()
        streams = named_streams(self.reader, names)
        messages: Counter[str] = Counter()
        rows: Counter[str] = Counter()
        edges: dict[str, list[int]] = {stream: [] for stream in streams}
        to_end = True
        while plans := self._plans(streams, keys, to_end=to_end):
            to_end = False
            for plan in plans:
                edges[plan.stream.name] += edges_of(plan.segments)
            # Live recording may have begun a key only meanwhile, so what is lacking is looked up until nothing is.
            for filled in self._fill(plans):
                messages[filled.stream] += filled.messages
                rows[filled.stream] += filled.rows
        seconds = perf_counter() - started
        return [
            BackfillReport(stream, messages[stream], rows[stream], min(found or [0]), max(found or [0]), seconds)
            for stream, found in edges.items()
        ]

    def _plans(self, streams: dict[str, str | None], keys: Sequence[str] | None, *, to_end: bool) -> list[Plan]:
        vhost = self.broker.address.vhost
        plans = [
            plan_backfill(self.engine, self.reader, vhost, name, keys, super_stream, to_end=to_end)
            for name, super_stream in streams.items()
        ]
        return [plan for plan in plans if plan.segments]

    def _fill(self, plans: Sequence[Plan]) -> list[SliceFilled]:
        parts = cut(plans, at_once=self.at_once, slice_offsets=self.slice_offsets)
        tasks: list[list[Part]] = [[part] for part in parts]
        pace = self.messages_per_s
        if pace is not None:
            # Each task has a share of the limit and keeps it, so there are only as many as run at once.
            tasks = [parts[number :: self.at_once] for number in range(min(self.at_once, len(parts)))]
            pace /= len(tasks)
        work = Filling(
            self.broker,
            self.database,
            {plan.stream.name: plan.stream for plan in plans},
            {plan.stream.name: plan.definitions for plan in plans},
            pace,
        )
        shown = ", ".join(plan.stream.name for plan in plans[:3]) + (", …" if len(plans) > 3 else "")
        with Follower(self.engine, plans, self.progress):
            filled = run_tasks(self.spark, work, tasks, f"relatum: back-fill of {shown} in {len(parts)} slices")
        return list(chain.from_iterable(filled))


def named_streams(reader: StreamReader, names: Iterable[str]) -> dict[str, str | None]:
    """The streams that names stand for, each once, with the super stream of those that are partitions."""
    found: dict[str, str | None] = {}
    for name in names:
        partitions = reader.partitions(name)
        found |= dict.fromkeys(partitions, name) if partitions else {name: found.get(name)}
    return found


def cut(plans: Sequence[Plan], *, at_once: int, slice_offsets: int) -> list[Part]:
    """Cut what streams lack into slices, in order: neighbours are filled at about the same time.

    So the table's rows lie nearly in the order of offsets, and its block index stays small and exact.
    """
    total = sum(part.to_offset - part.from_offset for plan in plans for part in plan.segments)
    size = max(1, min(slice_offsets, -(-total // (at_once * SLICES_EACH))))
    return [
        Part(plan.stream.name, Segment(start, min(start + size, whole.to_offset), whole.key_ids))
        for plan in plans
        for whole in plan.segments
        for start in range(whole.from_offset, whole.to_offset, size)
    ]
