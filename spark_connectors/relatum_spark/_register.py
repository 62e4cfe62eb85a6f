"""Making the source known to a session."""

from pyspark.errors import AnalysisException
from pyspark.sql import SparkSession

from relatum_spark._source import FilteringRabbitMQStreams, RabbitMQStreams

PUSHDOWN: str = "spark.sql.python.filterPushdown.enabled"
"""Spark's switch for sources written in Python; 4.1 and later have it, off."""


def register(spark: SparkSession) -> None:
    """Make `format("rabbitmq_streams")` known, for reading, writing and streaming.

    Spark finds the source by itself too, but not where any other `pyspark_…` package of the installation is broken.
    Filters are taken over where the session's `spark.sql.python.filterPushdown.enabled` is true now; call it again
    after changing that. The option `pushFilters` overrules it.

    Args:
        spark: The session; one of Spark Connect will do. The tasks need `relatum` with its extra `spark` too.
    """
    is_on = spark.conf.get(PUSHDOWN, "false") == "true"
    try:
        spark.dataSource.register(FilteringRabbitMQStreams if is_on else RabbitMQStreams)
    except AnalysisException as error:
        # Spark 4.0 refuses to register anew what it found by itself; it cannot push filters to either.
        if is_on or error.getCondition() != "DATA_SOURCE_ALREADY_EXISTS":
            raise
