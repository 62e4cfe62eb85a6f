"""A database that is filled once for the tests of a module, and the plans that statements have there."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
from psycopg.sql import SQL, Literal

from tests.support._streams import unique_name


@contextmanager
def filled_database(server_url: str, template: str, fill: str) -> Iterator[psycopg.Connection[Any]]:
    """A connection to a new database of the schema, with rows by `fill`, analysed; the database goes at the end."""
    name = unique_name("relatum_plans").replace("-", "_")
    with psycopg.connect(server_url, autocommit=True) as administration:
        administration.execute(f"CREATE DATABASE {name} TEMPLATE {template}".encode())
        try:
            url = f"{server_url.rpartition('/')[0]}/{name}"
            with psycopg.connect(url, autocommit=True, prepare_threshold=None) as connection:
                connection.execute(fill.encode())
                connection.execute("VACUUM ANALYZE")
                yield connection
        finally:
            administration.execute(f"DROP DATABASE {name} WITH (FORCE)".encode())


def plan_of(connection: psycopg.Connection[Any], mode: str, sql: str, parameters: dict[str, Any]) -> dict[str, Any]:
    """The plan of a prepared statement as it ran, with what it read; what it wrote is rolled back."""
    names = list(dict.fromkeys(re.findall(r"%\((\w+)\)s", sql)))
    numbered = re.sub(r"%\((\w+)\)s", lambda found: f"${names.index(found[1]) + 1}", sql)
    values = SQL(", ").join(Literal(parameters[name]) for name in names)
    explain = SQL("EXPLAIN (ANALYZE, BUFFERS, TIMING OFF, FORMAT JSON) EXECUTE planned({})").format(values)
    with connection.transaction(force_rollback=True):
        connection.execute(f"SET LOCAL plan_cache_mode = {mode}".encode())
        connection.execute(f"PREPARE planned AS {numbered}".encode())
        (plan,) = connection.execute(explain).fetchone() or ()
        connection.execute("DEALLOCATE planned")
    found: dict[str, Any] = plan[0]["Plan"]
    return found


def nodes_of(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A plan's node and all below it."""
    yield plan
    for inner in plan.get("Plans", ()):
        yield from nodes_of(inner)
