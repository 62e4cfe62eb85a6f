"""A name that matches nothing is said to be so, by every command that takes one."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from relatum.membership import GROUP_KEY
from relatum.recording import backfill
from relatum.store import add_keys, make_engine
from relatum.terminal import ExitCode
from tests.acceptance._command import Relatum
from tests.support import publish_plain

UNKNOWN = "relatum-test-nope"

COMMANDS = [
    ("status", UNKNOWN),
    ("status", "--collector", UNKNOWN),
    ("verify", UNKNOWN),
    ("prune", UNKNOWN),
    ("forget", UNKNOWN, "--yes"),
    ("keys", "time", UNKNOWN, "--off"),
    ("backfill", UNKNOWN),
    ("read", UNKNOWN, "0"),
    ("groups", UNKNOWN),
    ("groups", "--consumer", UNKNOWN),
    ("related", UNKNOWN, "0"),
    ("super-stream", "describe", UNKNOWN),
    ("super-stream", "delete", UNKNOWN, "--yes"),
    ("super-stream", "route", UNKNOWN, "key"),
    ("affinity", "list", UNKNOWN),
    ("affinity", "count", UNKNOWN),
    ("contexts", "status", UNKNOWN),
    ("contexts", "list", UNKNOWN),
    ("contexts", "moves", UNKNOWN),
    ("contexts", "consumers", UNKNOWN),
    ("contexts", "verify", UNKNOWN),
]


@pytest.fixture
def relatum(amqp_url: str, stream_url: str, database_url: str, stream_name: str) -> Relatum:
    """The command on a database in which one stream is recorded."""
    publish_plain(amqp_url, stream_name, [(b"", {"order_id": 1})])
    engine = make_engine(database_url)
    add_keys(engine, ["order_id", GROUP_KEY])
    backfill(amqp_url, engine, stream_name)
    engine.dispose()
    return Relatum(amqp_url, stream_url, database_url)


def test_a_name_that_matches_nothing_ends_with_its_code(relatum: Relatum) -> None:
    """Never 0, as if there were nothing to say of a name that is spelled wrong; and the name is in the message."""
    with ThreadPoolExecutor(4) as pool:
        ended = list(pool.map(lambda arguments: relatum.run(*arguments), COMMANDS))
    wrong = [
        (each.args[1:], each.returncode, each.stdout, each.stderr)
        for each in ended
        if each.returncode != ExitCode.NOT_THERE or UNKNOWN not in each.stderr + each.stdout
    ]
    assert not wrong
