"""The private servers: what they answer, what they survive, and that nothing of them survives their owner."""

import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pika.exceptions
import psycopg
import pytest

from relatum.errors import ServerStartFailed
from relatum.local import LocalPostgreSQL, LocalRabbitMQ, LocalServers
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


def _one(url: str, statement: str) -> object:
    with psycopg.connect(url) as connection:
        row = connection.execute(statement).fetchone()
        assert row is not None
        return row[0]


def test_both_answer_and_listen_on_loopback_alone(private_servers: LocalServers) -> None:
    """Both servers can be used, with a password only, and the stream port lies 120 below the AMQP port."""
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


def test_two_run_side_by_side(private_servers: LocalServers, tmp_path: Path) -> None:
    """A second pair in another directory shares nothing with the first."""
    with LocalServers(tmp_path / "second", durable=False, start_timeout_s=START_S) as second:
        declare_stream(second.broker_url, "only-here")
        assert second.broker_url != private_servers.broker_url
        assert not set(second.pids) & set(private_servers.pids)
        with (
            pytest.raises(pika.exceptions.ChannelClosedByBroker, match="404"),
            broker_connection(private_servers.broker_url) as connection,
        ):
            connection.channel().queue_declare("only-here", passive=True)
    assert private_servers.running


OWNER = """
import os, signal, sys
from relatum.local import LocalServers
with LocalServers(sys.argv[1], durable=False):
    print("up", flush=True)
    if sys.argv[2] == "fork" and os.fork() == 0:
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


@pytest.mark.parametrize("way", ["alone", "fork"])
def test_nothing_is_left_when_the_owner_is_killed(tmp_path: Path, way: str) -> None:
    """SIGKILL to the owner ends every process of both servers, even while a forked child of the owner lives on."""
    directory = tmp_path / unique_name("owned")
    command = [sys.executable, "-c", OWNER, str(directory), way]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as owner:
        try:
            assert owner.stdout is not None
            assert owner.stdout.readline() == b"up\n"
            assert len(processes_naming(str(directory))) > 5
            owner.kill()
            owner.wait()
            wait_until(lambda: _outside(owner.pid, directory) == [], what="all to be gone")
            assert len(processes_naming(str(directory))) == (1 if way == "fork" else 0)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(owner.pid, signal.SIGKILL)


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


def test_a_start_that_fails_shows_the_servers_last_lines(tmp_path: Path) -> None:
    """The error holds what RabbitMQ itself said, and none of its processes is left."""
    server = LocalRabbitMQ(tmp_path / "broker", configuration={"no.such.setting": "1"})
    with pytest.raises(ServerStartFailed, match=r"(?s)RabbitMQ in .* ended with status .*no\.such\.setting"):
        server.start()
    assert server.pids == []
    assert processes_naming(str(tmp_path)) == []


def test_a_start_that_takes_too_long_fails(tmp_path: Path) -> None:
    """A server that gives no answer in time is killed and named."""
    server = LocalRabbitMQ(tmp_path / "broker", start_timeout_s=0.2)
    with pytest.raises(ServerStartFailed, match=r"gave no answer in 0\.2 s"):
        server.start()
    assert processes_naming(str(tmp_path)) == []


class Late(LocalPostgreSQL):
    """A server whose port is taken by another between its choice and its use."""

    taken: socket.socket | None = None

    def _prepare(self) -> None:
        super()._prepare()
        if self.taken is None:
            self.taken = socket.create_server(("127.0.0.1", self.port))


def test_a_port_that_is_taken_in_between_is_replaced(tmp_path: Path) -> None:
    """Of several servers that start at once one may have chosen another's port: it starts on another one."""
    with Late(tmp_path / "database", durable=False) as server:
        assert server.taken is not None
        with server.taken:
            assert server.port != server.taken.getsockname()[1]
            assert _one(server.database_url, "SELECT 1") == 1


def test_a_server_that_is_not_installed_is_one_clear_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error says what to install, or to use Docker."""
    monkeypatch.setenv("RELATUM_RABBITMQ_SERVER", str(tmp_path / "nowhere"))
    with pytest.raises(ServerStartFailed, match=r"apt-get install .* rabbitmq-server.*Docker") as failed:
        LocalServers(tmp_path / "servers", durable=False, start_timeout_s=START_S).start()
    assert "\n" not in str(failed.value)
    assert processes_naming(str(tmp_path)) == []


def test_ports_before_the_first_start_are_an_error(tmp_path: Path) -> None:
    """A URL asked for too early is refused rather than wrong."""
    with pytest.raises(RuntimeError, match="start it first"):
        LocalRabbitMQ(tmp_path).broker_url  # noqa: B018
