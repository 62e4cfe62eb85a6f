"""A name that matches nothing is said to be so, by every command that takes one."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from relatum.membership import GROUP_KEY
from relatum.recording import backfill
from relatum.store import add_keys, make_engine
from relatum.terminal import ExitCode
from tests.acceptance._command import LIMIT_S, Relatum
from tests.support import publish_plain, wait_until

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
    backfill(amqp_url, engine.url, stream_name)
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


@pytest.mark.parametrize("command", [("status",), ("prune",), ("forget", "--dry-run"), ("related", "--to")])
def test_a_name_that_is_nearly_right_is_answered_by_the_right_one(
    relatum: Relatum, stream_name: str, command: tuple[str, ...]
) -> None:
    """A letter is missing, and the recorded stream is named."""
    wrong = stream_name[:-1]
    arguments = ("related", stream_name, "0", "--to", wrong) if "--to" in command else (*command, wrong)
    ended = relatum.run(*arguments)
    assert (ended.returncode, ended.stdout) == (ExitCode.NOT_THERE, "")
    assert f"{wrong!r}" in ended.stderr
    assert f" (did you mean {stream_name!r}?)" in ended.stderr


def test_all_that_is_recorded_is_compared_where_no_stream_is_named(
    relatum: Relatum, amqp_url: str, stream_url: str, empty_database_url: str, stream_name: str
) -> None:
    """`relatum verify` takes every recorded stream, and where none is, says that there is nothing to compare."""
    report = relatum.json("verify")
    assert (report["ok"], [each["stream"] for each in report["streams"]]) == (True, [stream_name])
    empty = Relatum(amqp_url, stream_url, empty_database_url)
    empty.ok("migrate")
    ended = empty.run("verify")
    assert ended.returncode == ExitCode.CONFIGURATION
    assert "nothing to compare" in ended.stderr


def test_what_would_be_forgotten_is_shown_while_it_is_recorded(relatum: Relatum, stream_name: str) -> None:
    """The rows and who needs the stream are printed, and the code is that of forgetting it."""
    with relatum.start("record", stream_name) as recorder:
        try:
            wait_until(lambda: relatum.json("status", stream_name)[0]["recorder"])
            for arguments in (("--dry-run",), ("--dry-run", "--json")):
                ended = relatum.run("forget", stream_name, *arguments)
                assert ended.returncode == ExitCode.DIFFERENT
                assert "stop that one first" in ended.stderr
                assert stream_name in ended.stdout
            assert relatum.run("forget", stream_name).stdout == ""
        finally:
            recorder.kill()
            recorder.communicate(timeout=LIMIT_S)
