"""Everything here is on a RabbitMQ 4, which alone speaks AMQP 1.0 as its client needs it."""

from collections.abc import Iterator

import pytest

from tests.conftest import Broker
from tests.support import declare_stream, delete_stream, unique_name


@pytest.fixture(scope="session")
def amqp_url(newer_broker: Broker) -> str:
    """The AMQP URL of a RabbitMQ 4."""
    return newer_broker.amqp_url


@pytest.fixture
def stream_name(amqp_url: str) -> Iterator[str]:
    """The name of a new, empty stream there."""
    name = unique_name()
    declare_stream(amqp_url, name)
    yield name
    delete_stream(amqp_url, name)
