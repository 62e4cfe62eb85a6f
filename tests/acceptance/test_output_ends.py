"""Stdout that cannot be written, or that nobody reads any more: a documented code, and no traceback."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from relatum.terminal import ExitCode

LIMIT_S = 240
FULL = Path("/dev/full")
COMMANDS = [["super-stream", "route", "flights", "a", "--partitions", "3"], ["find", "--help"]]
"""What prints without a server: by a console of Relatum's, by Typer's."""


def words(arguments: list[str]) -> list[str]:
    """What the console script does."""
    return [sys.executable, "-c", "from relatum._start import main; main()", *arguments]


@pytest.mark.parametrize("arguments", [*COMMANDS, [*COMMANDS[0], "--json"]], ids=" ".join)
def test_a_reader_that_had_enough_is_no_error(arguments: list[str]) -> None:
    """Where the pipe is closed, as by `head`, the command says nothing, and ends as others do."""
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as pipe:
        ended = subprocess.run(
            words(arguments), stdout=pipe, stderr=subprocess.PIPE, text=True, timeout=LIMIT_S, check=False
        )
    assert (ended.returncode, ended.stderr) == (ExitCode.CLOSED, "")


@pytest.mark.skipif(not FULL.exists(), reason="this system has no device that is always full")
@pytest.mark.parametrize("arguments", [*COMMANDS, [*COMMANDS[0], "--json"]], ids=" ".join)
def test_a_disk_that_is_full_is_one_line(arguments: list[str]) -> None:
    """What cannot be written is said on stderr, with a code of its own."""
    with FULL.open("w") as full:
        ended = subprocess.run(
            words(arguments), stdout=full, stderr=subprocess.PIPE, text=True, timeout=LIMIT_S, check=False
        )
    assert ended.returncode == ExitCode.OUTPUT, ended.stderr
    assert ended.stderr == "error: stdout cannot be written: No space left on device\n"


@pytest.mark.parametrize("as_json", [False, True])
def test_a_terminal_without_utf8_is_written_to_all_the_same(as_json: bool) -> None:
    """What it has no sign for is replaced, and in JSON escaped, which loses nothing."""
    arguments = ["super-stream", "route", "flüge", "東", "--partitions", "3", *(["--json"] if as_json else [])]
    ended = subprocess.run(
        words(arguments),
        env={**os.environ, "PYTHONIOENCODING": "latin-1"},
        capture_output=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (0, b"")
    shown = ended.stdout.decode("latin-1")
    if as_json:
        assert json.loads(shown)[0]["key"] == "東"
    else:
        assert shown.startswith("?: flüge-")
