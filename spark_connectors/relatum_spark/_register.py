"""Making the source known to a session."""

from pyspark.sql import SparkSession

from relatum_spark._format import RabbitMQStreams


def register(spark: SparkSession) -> None:
    """Make `format("rabbitmq_streams")` known, for reading, writing and streaming.

    Spark finds the source by itself too, but not where any other `pyspark_…` package of the installation is broken.

    Args:
        spark: The session; one of Spark Connect will do. The tasks need `relatum` with its extra `spark` too.
    """
    spark.dataSource.register(RabbitMQStreams)
