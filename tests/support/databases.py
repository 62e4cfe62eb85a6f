"""Databases of the tests: each is as new when a test gets it, and most were another test's before.

A copy has 500 files, which ext4 without a journal makes slowly; so one that only had rows put into it is emptied and
renamed, so that nothing that was left running finds it. One that differs otherwise is dropped.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, LiteralString
from urllib.parse import urlsplit, urlunsplit

import psycopg
from psycopg import sql

from tests.support._streams import unique_name

NEW: Final = "CREATE DATABASE {} TEMPLATE template0 ENCODING 'UTF8' LOCALE 'C' "
"""The same on any server, whatever its own encoding and locale are."""

_ENDS: Final = "SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity WHERE datname = %s"

_WRITTEN: Final = """
SELECT c.oid::regclass::text, pg_table_size(c.oid) FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE c.relkind = 'r' AND c.oid >= 16384 AND n.nspname !~ '^pg_' AND pg_relation_size(c.oid) > 0
"""
"""The tables that anything was ever written to, and their sizes in bytes."""

LARGE: Final = 1 << 19
"""Bytes of a table from which on its files are made again, and with them those of all that refer to it."""

RELEASE_0_4: Final = "0004"
"""The newest revision of release 0.4.0."""

_SEQUENCES: Final = """
SELECT setval(format('%I.%I', schemaname, sequencename)::regclass, start_value, false) FROM pg_sequences
WHERE last_value IS NOT NULL
"""

_CATALOGS: Final = (
    "attribute", "attrdef", "constraint", "default_acl", "event_trigger", "extension", "index", "inherits", "policy",
    "proc", "publication", "rewrite", "statistic_ext", "trigger",
)  # fmt: skip
"""Catalogs (`pg_…`) of which no row changes where a table is emptied, so that their transaction ids show changes."""

_SHAPE: Final = [
    *(f"SELECT count(*)::text || ' ' || coalesce(sum(xmin::text::bigint), 0) FROM pg_{name}" for name in _CATALOGS),
    """
    SELECT md5(string_agg(concat_ws(' ', oid, relname, relnamespace, relkind, relowner, relacl, reloptions,
        relpersistence, relrowsecurity, CASE relkind WHEN 'r' THEN concat(relpages, ' ', reltuples) END), ','
        ORDER BY oid))
    FROM pg_class WHERE oid >= 16384 AND relpersistence <> 't'
    """,
    "SELECT string_agg(concat_ws(' ', oid, nspname, nspowner, nspacl), ',' ORDER BY oid) "
    "FROM pg_namespace WHERE nspname !~ '^pg_(toast_)?temp_'",
    "SELECT concat_ws(' ', datdba, datacl, datconnlimit, datallowconn) FROM pg_database "
    "WHERE datname = current_database()",
    "SELECT string_agg(s::text, ',') FROM pg_db_role_setting s JOIN pg_database d ON d.oid = s.setdatabase "
    "WHERE datname = current_database()",
    "SELECT count(*)::text FROM pg_stats WHERE schemaname !~ '^(pg_|information_schema)'",
]


def administer(server_url: str, statement: LiteralString, *names: str) -> None:
    with psycopg.connect(server_url, autocommit=True) as connection:
        connection.execute(sql.SQL(statement).format(*map(sql.Identifier, names)))


@contextmanager
def user_in(url: str, role: LiteralString, *, connections_max: LiteralString = "-1") -> Iterator[str]:
    """The URL of a new user, who may do what a role may, and no more."""
    name, parts = database_name("relatum_user"), urlsplit(url)
    limit: LiteralString = " LOGIN PASSWORD 'x' CONNECTION LIMIT " + connections_max
    administer(url, "CREATE ROLE {}" + limit + " IN ROLE " + role, name)
    yield parts._replace(netloc=f"{name}:x@{parts.netloc.rpartition('@')[2]}").geturl()
    administer(url, "DROP OWNED BY {}", name)
    administer(url, "DROP ROLE {}", name)


def clear(url: str) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(f"{_ENDS} AND pid <> pg_backend_pid()".encode(), [urlsplit(url).path[1:]])
        connection.execute("DROP SCHEMA IF EXISTS relatum, public CASCADE")
        connection.execute("CREATE SCHEMA public AUTHORIZATION pg_database_owner")
        connection.execute("GRANT USAGE ON SCHEMA public TO PUBLIC")


def named(server_url: str, database: str) -> str:
    return urlunsplit(urlsplit(server_url)._replace(path=f"/{database}"))


def database_name(of: str = "relatum_test") -> str:
    return unique_name(of).replace("-", "_")


@contextmanager
def new_database(server_url: str, statement: LiteralString, *names: str) -> Iterator[str]:
    """The URL of a database that a statement makes by a name and others; it goes at the end."""
    name = database_name()
    administer(server_url, statement, name, *names)
    try:
        yield named(server_url, name)
    finally:
        administer(server_url, "DROP DATABASE {} WITH (FORCE)", name)


def make_release_0_4(database_url: str) -> None:
    """Make a database as release 0.4.0 left it."""
    with psycopg.connect(database_url) as connection:
        connection.execute(Path(__file__).with_name("release_0_4.sql").read_bytes())


class Databases:
    """Copies of a template, which nobody writes to any more. One thread uses it."""

    def __init__(self, server_url: str, template: str, copying: LiteralString) -> None:
        self._server_url, self._template, self._copying = server_url, template, copying
        self._server = psycopg.connect(server_url, autocommit=True)
        self._free: list[str] = []
        with self._connected(template) as connection:
            self._kept = sorted(table for table, _ in connection.execute(_WRITTEN))
            self._as_new = self._seen(connection)

    def take(self) -> str:
        """The URL of one that is as the template, until `give_back`."""
        if self._free:
            return named(self._server_url, self._free.pop())
        name = database_name()
        self._execute("CREATE DATABASE {} TEMPLATE {} " + self._copying, name, self._template)
        return named(self._server_url, name)

    def give_back(self, url: str) -> bool:
        """Make one ready for another test, even if others are connected; False if it was dropped."""
        old, new = urlsplit(url).path[1:], database_name()
        self._server.execute(_ENDS, [old])
        try:
            self._execute("ALTER DATABASE {} RENAME TO {}", old, new)
        except psycopg.errors.ObjectInUse:
            new = old  # another client keeps connecting
        else:
            if self._is_emptied(new):
                self._free.append(new)
                return True
        self._execute("DROP DATABASE {} WITH (FORCE)", new)
        return False

    def close(self) -> None:
        while self._free:
            self._execute("DROP DATABASE {} WITH (FORCE)", self._free.pop())
        self._server.close()

    def _execute(self, statement: LiteralString, *names: str) -> None:
        self._server.execute(sql.SQL(statement).format(*map(sql.Identifier, names)))

    def _connected(self, name: str) -> "psycopg.Connection[tuple[Any, ...]]":
        return psycopg.connect(named(self._server_url, name), autocommit=True)

    def _is_emptied(self, name: str) -> bool:
        with self._connected(name) as connection:
            written = {table: size for table, size in connection.execute(_WRITTEN) if table not in self._kept}
            if any(size > LARGE for size in written.values()):
                connection.execute(f"TRUNCATE {', '.join(written)} CASCADE".encode())
            elif written:
                # In one statement: references are checked at its end.
                parts = ", ".join(f"_{number} AS (DELETE FROM {table})" for number, table in enumerate(written))
                connection.execute(f"WITH {parts} SELECT".encode())
            connection.execute(_SEQUENCES)
            return self._seen(connection) == self._as_new

    def _seen(self, connection: "psycopg.Connection[tuple[Any, ...]]") -> list[Any]:
        """What a database has besides what tests put into its tables."""
        rows = (f"SELECT md5(string_agg(t::text, ',' ORDER BY t::text)) FROM {table} t" for table in self._kept)
        question = " UNION ALL ".join(f"SELECT ({each})" for each in (*_SHAPE, *rows))
        return connection.execute(question.encode()).fetchall()
