"""What several files of acceptance tests use."""

import os
import random
from collections.abc import Iterator

import pytest

import relatum_migrations
from relatum.local import LocalServers
from tests.acceptance._command import Relatum
from tests.acceptance._harm import HARM_S, Harm


@pytest.fixture
def relatum(amqp_url: str, stream_url: str, database_url: str) -> Relatum:
    """The command on this test's servers and database."""
    return Relatum(amqp_url, stream_url, database_url)


@pytest.fixture
def harm(private_servers: LocalServers, chance: random.Random, is_long: bool) -> Iterator[Harm]:
    """Servers of this test's own, with the schema, to be harmed: RELATUM_HARM_S says for how many seconds at least."""
    relatum_migrations.upgrade(private_servers.database_url)
    lasts_s = float(os.environ.get("RELATUM_HARM_S", HARM_S if is_long else 0))
    with Harm(private_servers, chance, lasts_s) as harm:
        yield harm
