"""Comparing the table with the streams in parallel, window by window as the kernel does."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import sqlalchemy as sa
from pyspark.sql import SparkSession

from relatum.errors import RelatumError
from relatum.reading import BrokerAddress, StreamReader
from relatum.recording import (
    Comparison,
    StreamVerified,
    Subject,
    VerifyReport,
    check_any,
    checked_sample,
    chosen_windows,
    leave_out,
    plan_verification,
    verify_strays,
)
from relatum.store import Range, as_engine
from relatum_spark._broker import Broker, database_url
from relatum_spark._backfill import named_streams
from relatum_spark.recording._tasks import one_or_several, parallelism, run_tasks

RUNS_EACH: Final = 4
"""Runs of windows for each task that runs at once, at least: so that all slots end together."""

RUN_WINDOWS: Final = 50
"""Windows one task compares at most: a million offsets."""


def verify(
    spark: SparkSession,
    streams: str | Sequence[str],
    *,
    broker: str | BrokerAddress | Broker | None = None,
    stream_url: str | None = None,
    database: str | None = None,
    sample: float | None = None,
    seed: int | None = None,
    partitions: int | None = None,
    progress: Callable[[StreamVerified], None] | None = None,
) -> VerifyReport:
    """Compare streams with the table, up to the coverage, in parallel. Nothing is written.

    Args:
        spark: The session.
        streams: A stream or several; a super stream stands for its partitions.
        broker: The broker; None takes RELATUM_BROKER_URL. Executors connect to it too.
        stream_url: The stream protocol's URL, where it cannot be told from the broker's.
        database: PostgreSQL's URL; None takes RELATUM_DATABASE_URL. Executors connect to it too.
        sample: The share of windows of 20,000 offsets to compare, 0 to 1, one of each stream at least; None compares
            all. A difference in a share d of all windows goes unseen with the probability
            (1 - d) ** (number of windows compared).
        seed: Chooses the same sample again; None for another each time, which the report names.
        partitions: Tasks that run at once; None for the session's slots (8 over Spark Connect, which does not tell).
        progress: Called on the driver with each stream's result.

    Returns:
        The kernel's own report, which `relatum.recording.repair` takes: streams in the order given, partitions in
        theirs; of each stream the first 1,000 differences, more are counted.

    Raises:
        InvalidInput: an argument is wrong.
        ConfigurationError: no broker or database is named.
        StreamNotFound, NotAStream, AccessRefused: no stream can be compared; else the report names it in `failed`.
        PythonException: a task failed as often as Spark tries it.
    """
    names = one_or_several("streams", streams)
    seed = checked_sample(sample, seed)
    at_once = parallelism(spark, partitions)
    target, url = Broker.of(broker, stream_url), database_url(database)
    with as_engine(url) as engine, target.open() as reader:
        failed: dict[str, RelatumError] = {}
        run = _Verification(spark, engine, reader, target, url, at_once)
        results = run.compare(named_streams(reader, names), sample, seed, failed)
        check_any(results, failed)
        results += verify_strays(engine)
    for result in results:
        if progress is not None:
            progress(result)
    return VerifyReport(results, sample is None, seed, target.address, failed)


@dataclass(frozen=True, slots=True)
class Run:
    """Neighbouring windows of one stream."""

    stream: str
    windows: tuple[Range, ...]


@dataclass(frozen=True)
class Comparing:
    """The work of a task: to compare a run of windows, with one reader and one engine. Can be pickled."""

    broker: Broker = field(repr=False)
    database: str = field(repr=False)
    subjects: dict[str, Subject]

    def __call__(self, run: Run) -> StreamVerified:
        """Compare the windows; the result is of these alone."""
        result = StreamVerified(run.stream)
        with as_engine(self.database) as engine, self.broker.open() as reader:
            comparison = Comparison(engine, reader, self.subjects[run.stream])
            for window in run.windows:
                comparison.compare(window, result)
        return result


@dataclass
class _Verification:
    """One verification on the driver."""

    spark: SparkSession
    engine: sa.Engine
    reader: StreamReader
    broker: Broker
    database: str
    at_once: int

    def compare(
        self, names: dict[str, str | None], sample: float | None, seed: int | None, failed: dict[str, RelatumError]
    ) -> list[StreamVerified]:
        """Compare what can be; `failed` takes what cannot."""
        vhost = self.broker.address.vhost
        planned = []
        for stream, super_stream in names.items():
            try:
                planned.append(plan_verification(self.engine, self.reader, vhost, stream, super_stream))
            except RelatumError as error:
                leave_out(failed, stream, error)
        results = {result.stream: result for result, _ in planned}
        subjects = {result.stream: subject for result, subject in planned if subject is not None}
        chosen = {name: tuple(chosen_windows(results[name], sample, seed)) for name in subjects}
        work = Comparing(self.broker, self.database, subjects)
        runs = into_runs(chosen, at_once=self.at_once)
        for part in run_tasks(self.spark, work, runs, f"relatum: comparing {len(subjects)} streams with the table"):
            results[part.stream].merge(part)
        for name, subject in subjects.items():
            Comparison(self.engine, self.reader, subject).finish(results[name])
        return list(results.values())


def into_runs(chosen: dict[str, tuple[Range, ...]], *, at_once: int) -> list[Run]:
    """Put windows into runs of even length, in order."""
    total = sum(map(len, chosen.values()))
    length = max(1, min(RUN_WINDOWS, -(-total // (at_once * RUNS_EACH))))
    return [
        Run(name, found[start : start + length])
        for name, found in chosen.items()
        for start in range(0, len(found), length)
    ]
