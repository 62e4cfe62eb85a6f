"""Writes Spark's classes, half of a session's start, to a file: python -m tests.support.spark_classes FILE."""

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from subprocess import Popen

import pyarrow as pa
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from tests.support._jvm import QUICK_START
from tests.support.spark import make_session


def use(spark: SparkSession, directory: Path) -> None:
    def same(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield from batches

    rows = spark.range(100).withColumn("k", F.col("id") % 7).withColumn("t", F.current_timestamp())
    counted = rows.join(rows.groupBy("k").agg(F.count("*"), F.max(F.struct("t", "id"))), "k").orderBy("id")
    for form in ("parquet", "json"):
        counted.write.format(form).save(str(directory / form))
        spark.read.format(form).load(str(directory / form)).where("id > 3").collect()
    rows.repartition(2, "k").mapInArrow(same, rows.schema).toPandas()
    spark.createDataFrame([(1, "a")], "id int, name string").createOrReplaceTempView("named")
    spark.sql("SELECT name, row_number() OVER (PARTITION BY name ORDER BY id) FROM named").collect()
    copied = spark.readStream.format("rate").load().writeStream.format("parquet").trigger(once=True)
    options = {"path": str(directory / "copied"), "checkpointLocation": str(directory / "checkpoint")}
    copied.options(**options).start().awaitTermination()


def main(target: Path) -> None:
    """Start a session that leaves its classes in a file, and use it; the file is empty where this Java cannot."""
    part = target.with_suffix(".part")
    with tempfile.TemporaryDirectory() as directory:
        options = f"{QUICK_START} -XX:ArchiveClassesAtExit={part} -Xlog:disable"
        spark = make_session(Path(directory), spark_driver_extraJavaOptions=options)
        use(spark, Path(directory))
        process: Popen[bytes] = spark.sparkContext._gateway.proc  # type: ignore[union-attr]
        spark.stop()
        assert process.stdin is not None, "the gateway ends when this pipe does"
        process.stdin.close()
        process.wait(600)
    if part.exists():
        part.replace(target)
    else:
        target.touch()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
