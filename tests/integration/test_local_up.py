"""`relatum up`, as people run it."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import psycopg
import pytest

from tests.support import processes_naming, server_version, wait_until
from tests.support.ports import free_port

RELATUM = Path(sys.executable).parent / "relatum"


@contextmanager
def _up(
    directory: Path, *options: str, urls_printed: int = 3
) -> Iterator[tuple["subprocess.Popen[str]", dict[str, str]]]:
    """Run the command; give it with the URLs it printed; end what is left of it."""
    command = [RELATUM, "up", "--directory", directory, *options]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, start_new_session=True) as process:
        try:
            assert process.stdout is not None
            urls = {}
            for _ in range(urls_printed):
                line = process.stdout.readline()
                found = re.fullmatch(r"export (RELATUM_[A-Z]+_URL)=(\S+)\n", line)
                assert found, line + (process.stderr.read() if process.stderr and not line else "")
                urls[found[1]] = found[2]
            yield process, urls
        finally:
            process.kill()
    wait_until(lambda: not processes_naming(str(directory)), what="all processes to be gone")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_up_serves_until_it_is_stopped(tmp_path: Path, number: signal.Signals) -> None:
    """It prints URLs that work, the database has the schema, and Ctrl-C or SIGTERM ends it with status 0.

    With `--web` there is the page, too.
    """
    with _up(tmp_path / "servers", "--web", urls_printed=4) as (process, urls):
        assert set(urls) == {
            "RELATUM_BROKER_URL",
            "RELATUM_STREAM_URL",
            "RELATUM_DATABASE_URL",
            "RELATUM_WEB_URL",
        }
        assert httpx.get(urls["RELATUM_WEB_URL"] + "api/health", timeout=90).json() == {"is_well": True}
        assert server_version(urls["RELATUM_BROKER_URL"]) >= (3, 10)
        with psycopg.connect(urls["RELATUM_DATABASE_URL"]) as connection:
            row = connection.execute("SELECT to_regclass('relatum.relationships') IS NOT NULL").fetchone()
            assert row == (True,)
        process.send_signal(number)
        assert process.wait(90) == 0
        assert processes_naming(str(tmp_path / "servers")) == []


def test_up_is_started_again_in_its_directory(tmp_path: Path) -> None:
    """Each start serves servers and page at the same URLs: after a stop, a kill, and a kill of its very first start."""
    directory = tmp_path / "servers"
    first = subprocess.Popen([RELATUM, "up", "--directory", directory, "--web"], stderr=subprocess.DEVNULL)
    with first:
        wait_until((directory / "rabbitmq" / "server.log").exists, what="the start of a server")
        first.kill()
    wait_until(lambda: not processes_naming(str(directory)), what="all processes to be gone")
    port = free_port([0])
    seen = []
    for is_stopped in (True, False, True):
        with _up(directory, "--web", "--port", str(port), urls_printed=4) as (process, urls):
            assert httpx.get(urls["RELATUM_WEB_URL"] + "api/health", timeout=90).json() == {"is_well": True}
            seen.append(urls)
            if is_stopped:
                process.terminate()
                assert process.wait(90) == 0
    assert seen[0] == seen[1] == seen[2]
    assert seen[0]["RELATUM_WEB_URL"] == f"http://127.0.0.1:{port}/"


def test_up_ends_when_a_server_ends(tmp_path: Path) -> None:
    """A server that dies by itself ends the command with an error that names it."""
    with _up(tmp_path / "servers") as (process, _):
        for pid in processes_naming(str(tmp_path / "servers" / "postgresql" / "data")):
            with suppress(ProcessLookupError):  # the first one's death ends the others
                os.kill(pid, signal.SIGKILL)
        assert process.wait(90) != 0
        assert process.stderr is not None
        assert "PostgreSQL ended by itself" in " ".join(process.stderr.read().split())


@pytest.mark.parametrize("where", ["a file", "below a file", "not for anybody", "a directory in a file's place"])
def test_up_says_which_directory_cannot_be_used(tmp_path: Path, where: str) -> None:
    """A directory that cannot be made or written to is named, with the reason: a wrong option, not a traceback."""
    (tmp_path / "file").touch()
    (tmp_path / "odd" / "rabbitmq" / "identity.json").mkdir(parents=True)
    directory = {
        "a file": tmp_path / "file",
        "below a file": tmp_path / "file" / "below",
        # Nobody may make a directory there, root included.
        "not for anybody": Path("/sys/relatum"),
        "a directory in a file's place": tmp_path / "odd",
    }[where]
    ended = subprocess.run([RELATUM, "up", "-d", directory], capture_output=True, text=True, check=False, timeout=90)
    assert ended.returncode == 3
    assert str(directory) in ended.stderr
    assert "cannot be used" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_up_says_that_a_servers_identity_cannot_be_read(tmp_path: Path) -> None:
    """A file of an earlier start that was damaged is named."""
    (tmp_path / "rabbitmq").mkdir()
    (tmp_path / "rabbitmq" / "identity.json").write_text("no JSON")
    ended = subprocess.run([RELATUM, "up", "-d", tmp_path], capture_output=True, text=True, check=False, timeout=90)
    assert ended.returncode == 3
    assert "identity.json does not hold" in ended.stderr
