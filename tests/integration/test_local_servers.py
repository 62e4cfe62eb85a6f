"""The private servers and `relatum up`: what they answer and survive, and that nothing survives their owner."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pika.exceptions
import psycopg
import pytest

from relatum.errors import ConfigurationError, ServerStartFailed
from relatum.local import LocalPostgreSQL, LocalRabbitMQ, LocalServers
from relatum_cli.exits import ExitCode
from relatum_migrations import upgrade
from tests.acceptance._command import COMMAND, run
from tests.support import (
    START_S,
    broker_connection,
    declare_stream,
    processes_naming,
    publish_plain,
    read_plain,
    server_version,
    stream_available,
    unique_name,
    wait_until,
)
from tests.support.ports import free_port


def _one(url: str, statement: str) -> object:
    with psycopg.connect(url) as connection:
        row = connection.execute(statement).fetchone()
        assert row is not None
        return row[0]


def test_both_answer_and_listen_on_loopback_alone(private_servers: LocalServers) -> None:
    """Both servers can be used, with a password only, and the stream port is 120 below the AMQP port."""
    declare_stream(private_servers.broker_url, "flights")
    assert publish_plain(private_servers.broker_url, "flights", [b"one", (b"two", {"host": "a"})]) == 2
    assert server_version(private_servers.broker_url) >= (3, 10)
    assert private_servers.rabbitmq.stream_port == private_servers.rabbitmq.port - 120
    assert _one(private_servers.database_url, "SHOW listen_addresses") == "127.0.0.1"
    assert _one(private_servers.database_url, "SHOW unix_socket_directories") == ""
    for url in (private_servers.database_url, private_servers.broker_url, private_servers.stream_url):
        assert private_servers.directory.name not in url
    names = [Path(f"/proc/{pid}/comm").read_text().strip() for pid in private_servers.rabbitmq.pids]
    assert any(name.startswith("beam") for name in names)
    assert "epmd" not in names  # as a daemon it would outlive us and be shared with other nodes
    assert [len(private_servers.rabbitmq.last_lines(count).splitlines()) for count in (0, 1, 2)] == [0, 1, 2]
    without = private_servers.database_url.replace(private_servers.postgresql._identity.password, "guess")
    with pytest.raises(psycopg.OperationalError, match="password"):
        psycopg.connect(without)


def test_killed_servers_come_back_with_their_data_on_the_same_ports(private_servers: LocalServers) -> None:
    """After SIGKILL no process is left, and a restart serves what was there at the same URLs."""
    stream, urls = unique_name(), (private_servers.broker_url, private_servers.database_url)
    declare_stream(urls[0], stream)
    publish_plain(urls[0], stream, [b"body"] * 5)
    with psycopg.connect(urls[1]) as connection:
        connection.execute("CREATE TABLE planes AS SELECT 7 AS seats")
    pids = private_servers.pids
    private_servers.kill()
    assert len(pids) > 2
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    assert not private_servers.running
    private_servers.rabbitmq.restart()
    private_servers.postgresql.restart()
    assert (private_servers.broker_url, private_servers.database_url) == urls
    assert _one(urls[1], "SELECT seats FROM planes") == 7
    wait_until(lambda: stream_available(urls[0], stream), what="the stream")
    assert read_plain(urls[0], stream, 5) == [b"body"] * 5


def test_a_frozen_server_answers_nothing_until_thawed(private_servers: LocalServers) -> None:
    """Freezing suspends the answers and keeps the connections; thawing brings them back; stopping needs no thaw."""
    server = private_servers.postgresql
    with psycopg.connect(server.database_url) as connection:
        server.freeze()
        with pytest.raises(psycopg.OperationalError):
            psycopg.connect(server.database_url, connect_timeout=2)
        server.thaw()
        row = connection.execute("SELECT 1").fetchone()
        assert row == (1,)
    private_servers.rabbitmq.freeze()
    private_servers.stop()
    assert private_servers.pids == []


OWNER = """
import os, signal, sys
from relatum.local import LocalServers
with LocalServers(sys.argv[1], durable=False) as servers:
    print(servers.broker_url, flush=True)
    if os.fork() == 0:
        signal.pause()
    signal.pause()
"""


def _outside(group: int, directory: Path) -> list[int]:
    """Return the processes that name the directory and are not of the owner's own process group."""
    found = []
    for pid in processes_naming(str(directory)):
        with suppress(ProcessLookupError):
            if os.getpgid(pid) != group:
                found.append(pid)
    return found


def test_nothing_is_left_of_a_second_pair_when_its_owner_is_killed(
    private_servers: LocalServers, tmp_path: Path
) -> None:
    """It shares nothing with the first; SIGKILL to its owner ends all of it, though a forked child lives on."""
    directory = tmp_path / unique_name("owned")
    command = [sys.executable, "-c", OWNER, str(directory)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as owner:
        try:
            assert owner.stdout is not None
            url = owner.stdout.readline().decode().strip()
            assert len(processes_naming(str(directory))) > 5
            assert not set(processes_naming(str(directory))) & set(private_servers.pids)
            declare_stream(url, "only-here")
            assert url != private_servers.broker_url
            with (
                pytest.raises(pika.exceptions.ChannelClosedByBroker, match="404"),
                broker_connection(private_servers.broker_url) as connection,
            ):
                connection.channel().queue_declare("only-here", passive=True)
            owner.kill()
            owner.wait()
            wait_until(lambda: _outside(owner.pid, directory) == [], what="all to be gone")
            assert len(processes_naming(str(directory))) == 1  # the child
            assert private_servers.running
        finally:
            with suppress(ProcessLookupError):
                os.killpg(owner.pid, signal.SIGKILL)


@pytest.mark.parametrize(
    ("options", "program", "said"),
    [
        ({"configuration": {"no.such.setting": "1"}}, "", r"(?s)RabbitMQ in .* exited with status .*no\.such\.setting"),
        ({"start_timeout_s": 0.2}, "", r"did not answer within 0\.2 s"),
        ({}, "nowhere", r"\A[^\n]*apt-get install [^\n]* rabbitmq-server[^\n]*Docker[^\n]*\Z"),
    ],
    ids=["its last lines", "too long", "not installed"],
)
def test_a_start_that_fails_says_why_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], program: str, said: str
) -> None:
    """What RabbitMQ said, the time it was given, or what to install; a URL asked for before is refused."""
    if program:
        monkeypatch.setenv("RELATUM_RABBITMQ_SERVER", str(tmp_path / program))
    server = LocalRabbitMQ(tmp_path / "broker", **options)
    with pytest.raises(RuntimeError, match="start it first"):
        server.broker_url  # noqa: B018
    with pytest.raises(ServerStartFailed, match=said):
        server.start()
    assert server.pids == processes_naming(str(tmp_path)) == []


def test_a_requirement_of_tls_does_not_look_like_a_failed_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server starts; who connects learns that it has no TLS."""
    monkeypatch.setenv("PGSSLMODE", "require")
    server = LocalPostgreSQL(tmp_path / "database", durable=False, start_timeout_s=START_S)
    with server, pytest.raises(ConfigurationError, match="does not support SSL"):
        upgrade(server.database_url)


def test_a_directory_has_one_server_at_a_time(tmp_path: Path) -> None:
    """A second server in a directory in use fails and changes nothing; once the first is gone, it has its URL."""
    with LocalPostgreSQL(tmp_path / "database", durable=False, start_timeout_s=START_S) as server:
        url = server.database_url
        with pytest.raises(ServerStartFailed, match="Another server runs in"):
            LocalPostgreSQL(tmp_path / "database", start_timeout_s=START_S).start()
        assert _one(url, "SELECT 1") == 1
    with LocalPostgreSQL(tmp_path / "database", start_timeout_s=START_S) as again:
        assert again.database_url == url
        assert _one(url, "SHOW fsync") == "on"


@contextmanager
def _up(directory: Path, *options: str) -> Iterator[tuple["subprocess.Popen[str]", dict[str, str]]]:
    """Run the command with the page; give it with the URLs it printed; end what is left of it."""
    command, pipe = [COMMAND, "up", "--web", "--directory", directory, *options], subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, start_new_session=True) as process:
        try:
            assert process.stdout is not None
            urls = {}
            for _ in range(4):
                line = process.stdout.readline()
                found = re.fullmatch(r"export (RELATUM_[A-Z]+_URL)=(\S+)\n", line)
                assert found, line + (process.stderr.read() if process.stderr and not line else "")
                urls[found[1]] = found[2]
            yield process, urls
        finally:
            process.kill()
    wait_until(lambda: not processes_naming(str(directory)), what="all processes to be gone")


def test_up_serves_until_it_is_stopped_and_is_started_again_in_its_directory(tmp_path: Path) -> None:
    """Servers, schema and page come back at the same URLs, however it ended; its end is 0, or names the dead server."""
    directory, port = tmp_path / "servers", str(free_port([0]))
    first = subprocess.Popen([COMMAND, "up", "--directory", directory, "--web"], stderr=subprocess.DEVNULL)
    with first:
        wait_until((directory / "rabbitmq" / "server.log").exists, what="the start of a server")
        first.kill()
    wait_until(lambda: not processes_naming(str(directory)), what="all processes to be gone")
    seen = []
    for end in ("SIGINT", "SIGKILL", "SIGTERM", "a server's"):
        with _up(directory, "--port", port) as (process, urls):
            assert httpx.get(urls["RELATUM_WEB_URL"] + "api/health", timeout=90).json() == {"is_well": True}
            seen.append(urls)
            if end == "SIGINT":
                assert server_version(urls["RELATUM_BROKER_URL"]) >= (3, 10)
                with psycopg.connect(urls["RELATUM_DATABASE_URL"]) as connection:
                    row = connection.execute("SELECT to_regclass('relatum.relationships') IS NOT NULL").fetchone()
                    assert row == (True,)
            if end == "a server's":
                for pid in processes_naming(str(directory / "postgresql" / "data")):
                    with suppress(ProcessLookupError):  # the first one's death ends the others
                        os.kill(pid, signal.SIGKILL)
                assert process.wait(90) != 0
                assert process.stderr is not None
                assert "PostgreSQL exited unexpectedly" in " ".join(process.stderr.read().split())
            elif end != "SIGKILL":
                process.send_signal(signal.Signals[end])
                assert process.wait(90) == 0
                assert processes_naming(str(directory)) == []
    assert all(urls == seen[0] for urls in seen)
    assert set(seen[0]) == {f"RELATUM_{name}_URL" for name in ("BROKER", "STREAM", "DATABASE", "WEB")}
    assert seen[0]["RELATUM_WEB_URL"] == f"http://127.0.0.1:{port}/"


@pytest.mark.parametrize("where", ["a file", "below a file", "not for anybody", "a directory in a file's place"])
def test_up_says_which_directory_cannot_be_used(tmp_path: Path, where: str) -> None:
    """One that cannot be made or written to is named, with the reason: a wrong option."""
    (tmp_path / "file").touch()
    (tmp_path / "odd" / "rabbitmq" / "identity.json").mkdir(parents=True)
    directory = {
        "a file": tmp_path / "file",
        "below a file": tmp_path / "file" / "below",
        # Nobody may create a directory there, not even root.
        "not for anybody": Path("/sys/relatum"),
        "a directory in a file's place": tmp_path / "odd",
    }[where]
    ended = run("up", "-d", str(directory))
    assert ended.returncode == ExitCode.CONFIGURATION
    assert f"{directory}" in ended.stderr
    assert "cannot be used" in ended.stderr
    assert "Traceback" not in ended.stderr
