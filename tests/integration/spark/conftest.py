"""One Spark session for all tests of the connector: starting one takes five seconds."""

from collections.abc import Iterator

import pytest
from pyspark.sql import SparkSession

import relatum_spark
from tests.support.spark import make_session


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """A session with two local slots, PostgreSQL's JDBC driver and the source."""
    session = make_session(tmp_path_factory.mktemp("spark"))
    relatum_spark.register(session)
    yield session
    session.stop()
