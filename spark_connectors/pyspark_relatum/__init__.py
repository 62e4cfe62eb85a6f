"""Lets Spark find `format("rabbitmq_streams")` by the package's name, without `register`."""

from relatum_spark._format import RabbitMQStreams as DefaultSource

__all__ = ["DefaultSource"]
