"""A name that matches nothing is said to be so, by every command that takes one."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import sqlalchemy as sa

from relatum.membership import GROUP_KEY
from relatum.terminal import ExitCode
from tests.acceptance._command import LIMIT_S, Relatum
from tests.support import publish_plain, record, wait_until

UNKNOWN = "relatum-test-nope"

COMMANDS = [
    "status NOPE", "status --collector NOPE", "verify NOPE", "prune NOPE", "forget NOPE --yes", "keys time NOPE --off",
    "backfill NOPE", "read NOPE 0", "groups NOPE", "groups --consumer NOPE", "related NOPE 0",
    "super-stream describe NOPE", "super-stream delete NOPE --yes", "super-stream route NOPE key", "affinity list NOPE",
    "contexts status NOPE", "contexts list NOPE", "contexts moves NOPE", "contexts consumers NOPE",
    "contexts verify NOPE",
]  # fmt: skip


@pytest.fixture
def recorded(relatum: Relatum, engine: sa.Engine, stream_name: str) -> str:
    """The one stream that is recorded."""
    publish_plain(relatum.broker_url, stream_name, [(b"", {"order_id": 1})])
    record(relatum.broker_url, engine, stream_name, keys=["order_id", GROUP_KEY])
    return stream_name


def test_a_name_that_matches_nothing_ends_with_its_code(relatum: Relatum, recorded: str) -> None:
    """Never 0, as if there were nothing to say of a name that is spelled wrong; and the name is in the message.

    Where a letter is missing, the recorded stream is named.
    """
    commands = [line.replace("NOPE", UNKNOWN).split() for line in COMMANDS]
    with ThreadPoolExecutor(4) as pool:
        for ended in pool.map(lambda arguments: relatum.run(*arguments), commands):
            assert ended.returncode == ExitCode.NOT_THERE, ended
            assert UNKNOWN in ended.stderr + ended.stdout, ended
    wrong = recorded[:-1]
    for command in (
        f"status {wrong}",
        f"prune {wrong}",
        f"forget --dry-run {wrong}",
        f"related {recorded} 0 --to {wrong}",
    ):
        ended = relatum.run(*command.split())
        assert (ended.returncode, ended.stdout) == (ExitCode.NOT_THERE, "")
        assert repr(wrong) in ended.stderr
        assert f" (did you mean {recorded!r}?)" in ended.stderr


def test_all_that_is_recorded_is_compared_where_no_stream_is_named(
    relatum: Relatum, recorded: str, empty_database_url: str
) -> None:
    """`relatum verify` takes every recorded stream, and where none is, says that there is nothing to compare."""
    report = relatum.json("verify")
    assert (report["ok"], [each["stream"] for each in report["streams"]]) == (True, [recorded])
    empty = replace(relatum, database_url=empty_database_url)
    empty.ok("migrate")
    ended = empty.run("verify")
    assert (ended.returncode, "nothing to compare" in ended.stderr) == (ExitCode.CONFIGURATION, True)


def test_what_would_be_forgotten_is_shown_while_it_is_recorded(relatum: Relatum, recorded: str) -> None:
    """The rows and who needs the stream are printed, and the code is that of forgetting it."""
    with relatum.start("record", recorded) as recorder:
        try:
            wait_until(lambda: relatum.json("status", recorded)[0]["recorder"])
            for arguments in (("--dry-run",), ("--dry-run", "--json")):
                ended = relatum.run("forget", recorded, *arguments)
                assert (ended.returncode, recorded in ended.stdout) == (ExitCode.DIFFERENT, True)
                assert "stop that one first" in ended.stderr
            assert relatum.run("forget", recorded).stdout == ""
        finally:
            recorder.kill()
            recorder.communicate(timeout=LIMIT_S)
