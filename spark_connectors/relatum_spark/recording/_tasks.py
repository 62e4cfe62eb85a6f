"""Work that runs in tasks and gives the driver a small answer each: back-fill and verification.

Rows of a DataFrame stand for the tasks and `mapInArrow` runs them, so that Spark Connect works too. What the work needs
travels with the function, pickled: nothing of it is in a plan that Spark shows.
"""

import contextlib
import functools
import pickle
from collections.abc import Callable, Iterator, Sequence
from typing import Final, TypeVar

import pyarrow as pa
from pyspark.sql import SparkSession
from pyspark.sql.utils import is_remote

from relatum.checks import checked_count, checked_names
from relatum.errors import RelatumError, Transient

PARALLELISM_OVER_CONNECT: Final = 8
"""Tasks taken to run at once where the session cannot be asked."""

_ANSWER: Final = pa.schema([pa.field("number", pa.int64()), pa.field("answer", pa.binary())])

_Task = TypeVar("_Task")
_Answer = TypeVar("_Answer")


def parallelism(spark: SparkSession, wanted: int | None) -> int:
    """How many tasks should run at once: what is wanted, else what the session has slots for.

    Raises:
        InvalidInput: it is no number, or less than one is wanted.
    """
    if wanted is not None:
        return checked_count("partitions", wanted)
    return PARALLELISM_OVER_CONNECT if is_remote() else max(1, spark.sparkContext.defaultParallelism)


def one_or_several(argument: str, names: str | Sequence[str]) -> tuple[str, ...]:
    """Names, where one may stand for a list of itself.

    Raises:
        InvalidInput: it is no name, and no list of names.
    """
    return checked_names(argument, [names] if isinstance(names, str) else names, least=1)


def run_tasks(
    spark: SparkSession, work: Callable[[_Task], _Answer], tasks: Sequence[_Task], description: str
) -> list[_Answer]:
    """Do the work for each task, and give the answers in the order of the tasks.

    Args:
        spark: The session.
        work: A function of an importable module, or an instance of its class; with what it holds it can be pickled.
        tasks: What it is called with, each in a Spark task of its own.
        description: What Spark's pages show of the job; not over Spark Connect.

    Raises:
        RelatumError: a task met an error that doing it again would not cure.
        PythonException: a task failed as often as Spark tries it; the others' effects stay.
    """
    if not tasks:
        return []
    frame = spark.range(0, len(tasks), 1, len(tasks)).mapInArrow(
        functools.partial(_answers, work, list(tasks)), "number long, answer binary"
    )
    with _described(spark, description):
        rows = frame.collect()
    # Written by our own function, in the tasks of this job.
    answers = [pickle.loads(row.answer) for row in sorted(rows, key=lambda row: row.number)]  # noqa: S301
    for answer in answers:
        if isinstance(answer, RelatumError):
            raise answer
    return answers


def _answers(
    work: Callable[[_Task], _Answer], tasks: list[_Task], batches: Iterator[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """Runs in the task. What may pass is raised, so that Spark tries again; other errors are answers."""
    for batch in batches:
        for number in batch.column(0).to_pylist():
            answer: _Answer | RelatumError
            try:
                answer = work(tasks[number])
            except Transient:
                raise
            except RelatumError as error:
                answer = error
            yield pa.record_batch([[number], [pickle.dumps(answer)]], schema=_ANSWER)


@contextlib.contextmanager
def _described(spark: SparkSession, description: str) -> Iterator[None]:
    if is_remote():
        yield
        return
    spark.sparkContext.setJobDescription(description)
    try:
        yield
    finally:
        spark.sparkContext.setLocalProperty("spark.job.description", None)  # type: ignore[arg-type]
