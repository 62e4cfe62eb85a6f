"""The Spark session of a run, with two concurrent tasks on this machine."""

import atexit
import os
import sys
from functools import cache

from pyspark.sql import DataFrame, SparkSession

import relatum_spark
from benchmarks._context import Context

TASKS = 2


@cache
def session() -> SparkSession:
    """Return the session with two slots; the first call creates it."""
    os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    builder = SparkSession.Builder().master(f"local[{TASKS}]").appName("relatum benchmark")
    settings = {
        "spark.ui.enabled": "false",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.memory": "4g",
        "spark.jars": str(relatum_spark.jdbc_jar()),
        "spark.sql.session.timeZone": "UTC",
        "spark.ui.showConsoleProgress": "false",
        "spark.log.level": "OFF",  # a query that is stopped logs the end of its tasks as errors
    }
    for name, value in settings.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    atexit.register(spark.stop)
    relatum_spark.register(spark)
    return spark


def read_stream(context: Context, stream: str, messages: int, **options: object) -> DataFrame:
    """Return the stream through Relatum's source, in two slices."""
    reader = session().read.format("rabbitmq_streams").option("broker", context.broker_url)
    reader = reader.option("streamUrl", context.stream_url).option("stream", stream)
    reader = reader.option("maxRecordsPerPartition", -(-messages // TASKS))
    for name, value in options.items():
        reader = reader.option(name, str(value).lower() if isinstance(value, bool) else str(value))
    return reader.load()


def consume(frame: DataFrame) -> None:
    """Make Spark produce and discard every row and column."""
    frame.write.format("noop").mode("overwrite").save()
