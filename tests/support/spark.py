"""A Spark session for tests, on this machine; and what represents one where a test needs no job."""

import logging
import os
import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import pyarrow as pa
from pyspark import cloudpickle
from pyspark.logger import PySparkLogger
from pyspark.sql import Row, SparkSession
from pyspark.sql.pandas.types import from_arrow_schema

from tests.support._jvm import SPARK_START
from tests.support.spark_python import spark_python

JDBC_JAR = Path(os.environ.get("RELATUM_JDBC_JAR", "/usr/share/java/postgresql.jar"))


def fixed_settings(directory: Path) -> dict[str, str]:
    return {
        "spark.ui.enabled": "false",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.extraJavaOptions": SPARK_START,
        "spark.jars": str(JDBC_JAR),
        "spark.local.dir": str(directory / "local"),
        "spark.sql.warehouse.dir": str(directory / "warehouse"),
        "spark.sql.shuffle.partitions": "2",
        # Compiling a plan costs more than running it over a few hundred rows. Clusters and commands compile theirs.
        "spark.sql.codegen.wholeStage": "false",
        "spark.sql.codegen.factoryMode": "NO_CODEGEN",
        "spark.sql.session.timeZone": "UTC",
        "spark.driver.memory": "1g",
        "spark.ui.showConsoleProgress": "false",
        "spark.log.level": "ERROR",
    }


def make_session(directory: Path, master: str = "local[2]", **settings: str) -> SparkSession:
    """Start a session whose files are in `directory`; underscores in the names of settings mean dots."""
    os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = str(spark_python())
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    builder = SparkSession.Builder().master(master).appName("relatum tests")
    own = {name.replace("_", "."): value for name, value in settings.items()}
    for name, value in (fixed_settings(directory) | own).items():
        builder = builder.config(name, value)
    # pytest adds its handlers to loggers that do not propagate, and PySpark's would give them a format of its own.
    PySparkLogger.addHandler = logging.Logger.addHandler  # type: ignore[method-assign]
    return builder.getOrCreate()


def uncommit(checkpoint: Path, batch: int) -> None:
    """Take back that Spark committed a micro-batch, as a kill would have."""
    for name in (f"{batch}", f".{batch}.crc"):
        (checkpoint / "commits" / name).unlink(missing_ok=True)


class Frame:
    """A DataFrame of Arrow batches, whose `mapInArrow` runs in this process, by what a task has: pickled and back."""

    def __init__(self, kinds: Mapping[str, pa.DataType], rows: Sequence[Sequence[Any]] = ()) -> None:
        columns = zip(*rows, strict=True) if rows else [()] * len(kinds)
        arrays = [pa.array(column, kind) for column, kind in zip(columns, kinds.values(), strict=True)]
        self._show(pa.schema(list(kinds.items())), [pa.record_batch(arrays, names=list(kinds))])

    def _show(self, schema: pa.Schema, batches: list[pa.RecordBatch]) -> Self:
        self.schema, self.columns, self.batches = from_arrow_schema(schema), schema.names, batches
        return self

    def toDF(self, *names: str) -> "Frame":  # noqa: N802
        renamed = [batch.rename_columns(list(names)) for batch in self.batches]
        return Frame({})._show(renamed[0].schema, renamed)

    def mapInArrow(self, function: Callable[[Iterable[pa.RecordBatch]], Any], schema: Any) -> "Frame":  # noqa: N802
        """What the function makes of the rows; its columns are those that the schema names."""
        made = list(pickle.loads(cloudpickle.dumps(function))(iter(self.batches)))
        names = [part.split()[0] for part in schema.split(",")] if isinstance(schema, str) else schema.names
        assert all(batch.num_columns == len(names) for batch in made)
        named = [batch.rename_columns(names) for batch in made]
        return Frame({})._show(named[0].schema if named else pa.schema([]), named)

    def collect(self) -> list[Row]:
        return [Row(**row) for batch in self.batches for row in batch.to_pylist()]


class Here:
    """Represents a session whose two tasks at once run in this process, one after the other."""

    defaultParallelism = 2  # noqa: N815

    @property
    def sparkContext(self) -> "Here":  # noqa: N802
        return self

    def range(self, start: int, end: int, step: int, partitions: int) -> Frame:
        return Frame({"id": pa.int64()}, [(number,) for number in range(start, end, step)])
