"""What a first attempt gets wrong, and what is said of it."""

import logging

import pytest
from pyspark.errors import AnalysisException
from pyspark.sql import SparkSession

from pyspark_relatum import DefaultSource
from relatum.errors import StreamNotFound
from tests.support import publish_plain

PARTITIONS = 1


def test_a_super_stream_given_as_a_stream_is_named(super_stream: str, stream_url: str) -> None:
    """`stream` with a super stream's name says that the option is `superStream`, for batches and for micro-batches."""
    source = DefaultSource({"broker": stream_url, "stream": super_stream})
    with pytest.raises(StreamNotFound, match="give it as the option superStream"):
        source.reader(source.schema()).partitions()
    streaming = source.streamReader(source.schema())
    with pytest.raises(StreamNotFound, match="give it as the option superStream"):
        streaming.initialOffset()
    streaming.stop()


def test_a_loss_that_may_be_does_not_ask_for_the_option_that_is_set(
    stream_name: str, amqp_url: str, stream_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    """With `failOnDataLoss=false` the warning names what is lost, and not the option that is false already."""
    publish_plain(amqp_url, stream_name, [b"x"])
    given = {"broker": stream_url, "stream": stream_name, "endingOffsets": f'{{"{stream_name}": 9}}'}
    lenient, strict = DefaultSource(given | {"failOnDataLoss": "false"}), DefaultSource(given)
    with caplog.at_level(logging.WARNING, "relatum.spark"):
        lenient.reader(lenient.schema()).partitions()
    assert "are not there" in caplog.text
    assert "failOnDataLoss" not in caplog.text
    with pytest.raises(Exception, match="set failOnDataLoss to false"):
        strict.reader(strict.schema()).partitions()


def test_inserting_into_a_view_is_refused(spark: SparkSession, stream_name: str, stream_url: str) -> None:
    """As the page says: a view over a stream cannot be inserted into."""
    options = {"broker": stream_url, "stream": stream_name}
    spark.read.format("rabbitmq_streams").options(**options).load().createOrReplaceTempView("a_view")
    with pytest.raises(AnalysisException):
        spark.sql("INSERT INTO a_view SELECT * FROM a_view")
