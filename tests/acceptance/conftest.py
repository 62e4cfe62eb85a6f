"""What several files of acceptance tests use."""

import gc
import random
from collections.abc import Iterator

import pytest

import relatum_migrations
from relatum.local import LocalServers
from tests.acceptance._command import Relatum
from tests.acceptance._harm import Harm


@pytest.fixture
def relatum(amqp_url: str, stream_url: str, database_url: str) -> Relatum:
    return Relatum(amqp_url, stream_url, database_url)


@pytest.fixture
def harm(private_servers: LocalServers, chance: random.Random, harm_s: float) -> Iterator[Harm]:
    relatum_migrations.upgrade(private_servers.database_url)
    with Harm(private_servers, chance, harm_s) as harm:
        yield harm
    # Find resources left open now, not in the middle of another test.
    gc.collect()
