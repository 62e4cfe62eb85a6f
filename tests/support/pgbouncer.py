"""A private pgbouncer before the PostgreSQL of the tests, which hands out sessions by transaction."""

import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit, urlunsplit

import psycopg
import pytest

from relatum.local._postgresql import Account
from relatum.store.address import parse_database
from tests.support._waiting import wait_until
from tests.support.ports import free_port

_PROGRAMS: Final = ("/usr/sbin", "/usr/local/sbin", "/usr/bin", "/usr/local/bin")

_SETTINGS: Final = """[databases]
* = host={host} port={port} user={user} password={password}
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {own_port}
unix_socket_dir =
auth_type = any
pool_mode = transaction
default_pool_size = {pool_size}
max_client_conn = {clients_max}
query_wait_timeout = 60
server_tls_sslmode = prefer
{more}
"""


def _program() -> str | None:
    return shutil.which("pgbouncer") or shutil.which("pgbouncer", path=":".join(_PROGRAMS))


def holds_statements() -> bool:
    """Whether the installed version follows prepared statements (1.21 and newer), unless told not to."""
    program = _program()
    if program is None:
        return False  # The tests say so themselves.
    told = subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout
    major, minor = told.split()[1].split(".")[:2]
    return (int(major), int(minor)) >= (1, 21)


@contextmanager
def pgbouncer(
    server_url: str, directory: Path, *, pool_size: int = 3, clients_max: int = 500, more: str = ""
) -> Iterator[str]:
    """Run one, by the URL's user and with `more` lines of settings; yield `server_url` through it."""
    program = _program()
    if program is None:
        pytest.fail("pgbouncer is missing: run tools/install pgbouncer", pytrace=False)
    given = parse_database(server_url).parameters
    own_port = free_port((0,))
    settings = directory / f"pgbouncer-{own_port}.ini"
    log = settings.with_suffix(".log")
    server = {"port": "5432", "user": "postgres", "password": ""} | given
    own = {"own_port": own_port, "pool_size": pool_size, "clients_max": clients_max, "more": more}
    settings.write_text(_SETTINGS.format(**server, **own))
    settings.chmod(0o600)
    account = Account.choose(None, must_reach=[Path(program), settings])  # it refuses root, as PostgreSQL does
    account.own(settings)
    with log.open("wb") as output:
        running = subprocess.Popen(
            account.command(program, str(settings)), stdout=output, stderr=output, stdin=subprocess.DEVNULL
        )
    url = urlunsplit(urlsplit(server_url)._replace(netloc=f"{server['user']}@127.0.0.1:{own_port}"))
    try:
        wait_until(lambda: _answers(url, running, log), what="pgbouncer answers")
        yield url
    finally:
        running.send_signal(signal.SIGTERM)  # at once; SIGINT would wait for clients
        running.wait(90)


def _answers(url: str, running: "subprocess.Popen[bytes]", log: Path) -> bool:
    assert running.poll() is None, log.read_text()
    try:
        psycopg.connect(url, connect_timeout=5).close()
    except psycopg.OperationalError:
        return False
    return True
