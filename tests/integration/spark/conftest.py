"""One Spark session for all tests of the connector: starting one takes five seconds."""

from collections.abc import Iterator

import pytest
from pyspark.sql import SparkSession

import relatum_spark
from tests.support.place import Place
from tests.support.spark import make_session
from tests.support.spark_joins import Sides


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """A session with two local slots, PostgreSQL's JDBC driver and the source."""
    session = make_session(tmp_path_factory.mktemp("spark"))
    relatum_spark.register(session)
    yield session
    session.stop()


@pytest.fixture
def sides(spark: SparkSession, place: Place, other_stream: str) -> Sides:
    return Sides(spark, place, place.stream, other_stream)
