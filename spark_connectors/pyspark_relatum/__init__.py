"""Found by Spark by its name, so that `spark.read.format("rabbitmq_streams")` works without `register`."""

from relatum_spark._format import RabbitMQStreams as DefaultSource

__all__ = ["DefaultSource"]
