"""What several files of acceptance tests use."""

import pytest

from tests.acceptance._command import Relatum


@pytest.fixture
def relatum(amqp_url: str, stream_url: str, database_url: str) -> Relatum:
    """The command on this test's servers and database."""
    return Relatum(amqp_url, stream_url, database_url)
