"""One Spark session for all tests of the connector: starting one takes five seconds."""

from collections.abc import Iterator

import pytest
from pyspark.sql import SparkSession

from tests.support import declare_stream, delete_stream, unique_name
from tests.support.spark import make_session


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """A session with two local slots and PostgreSQL's JDBC driver."""
    session = make_session(tmp_path_factory.mktemp("spark"))
    yield session
    session.stop()


@pytest.fixture
def other_stream(amqp_url: str) -> Iterator[str]:
    """The name of a second new stream."""
    name = unique_name()
    declare_stream(amqp_url, name)
    yield name
    delete_stream(amqp_url, name)
