"""One Spark session for all tests of the connector: starting one takes five seconds."""

from collections.abc import Iterator

import pytest
from pyspark.sql import SparkSession

from tests.support.spark import make_session


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """A session with two local slots and PostgreSQL's JDBC driver."""
    session = make_session(tmp_path_factory.mktemp("spark"))
    yield session
    session.stop()
