"""A database that is filled once for the tests of a module, and the plans that statements have there."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest
from psycopg.sql import SQL, Literal
from sqlalchemy.dialects.postgresql import psycopg as dialect

from tests.support.databases import new_database

PARTS = 30
"""Parts of `relationships` that plans are looked at with."""

MAKE_PARTS = f"""
DO $$ BEGIN
  FOR part IN 2..{PARTS - 1} LOOP
    PERFORM relatum.make_part();
    UPDATE relatum.table_parts SET opened_at = now();
  END LOOP;
END $$;
"""

CLOSE_PARTS = f"""
SELECT relatum.close_part(part) FROM generate_series(1, {PARTS - 2}) AS part;
SELECT relatum.finish_part(part) FROM generate_series(1, {PARTS - 2}) AS part;
"""
"""All that can be: not part 0, and not the last."""

CATALOG = {"table_parts", "part_streams", "part_keys"}
"""Tables of a few rows for each part, which say what may be left out."""

EACH_MODE = pytest.mark.parametrize("mode", ["force_custom_plan", "force_generic_plan"])

_PART = re.compile(r"^relationships_\d+")
_NAMES = ("Relation Name", "Index Name")


@contextmanager
def filled_database(server_url: str, template: str, fill: str, *, then: str = "VACUUM ANALYZE") -> Iterator[Any]:
    """A connection to a new database of the schema, with rows by `fill`, then analysed unless `then` says otherwise."""
    with (
        new_database(server_url, "CREATE DATABASE {} TEMPLATE {}", template) as url,
        psycopg.connect(url, autocommit=True, prepare_threshold=None) as connection,
    ):
        connection.execute(fill.encode())
        connection.execute(then.encode())
        yield connection


def text_of(statement: Any) -> str:
    return str(statement.compile(dialect=dialect.dialect()))


def plan_of_statement(connection: Any, mode: str, statement: Any, parameters: dict[str, Any]) -> dict[str, Any]:
    compiled = statement.compile(dialect=dialect.dialect())
    return plan_of(connection, mode, str(compiled), {**compiled.params, **parameters})


def plan_of(connection: Any, mode: str, sql: str, parameters: dict[str, Any] | None = None) -> dict[str, Any]:
    """The plan by which a statement was carried out; without parameters, that for any, and nothing is carried out."""
    names = list(dict.fromkeys(re.findall(r"%\((\w+)\)s", sql)))
    numbered = re.sub(r"%\((\w+)\)s", lambda found: f"${names.index(found[1]) + 1}", sql).replace("%%", "%")
    values = SQL(", ").join(Literal(parameters and parameters[name]) for name in names)
    how = SQL("FORMAT JSON" if parameters is None else "ANALYZE, BUFFERS, TIMING OFF, FORMAT JSON")
    explain = SQL("EXPLAIN ({}) EXECUTE planned" + "({})" * bool(names)).format(how, values)
    with connection.transaction(force_rollback=True):
        connection.execute(f"SET LOCAL plan_cache_mode = {mode}".encode())
        connection.execute(f"PREPARE planned AS {numbered}".encode())
        (plan,) = connection.execute(explain).fetchone() or ()
        connection.execute("DEALLOCATE planned")
    found: dict[str, Any] = plan[0]["Plan"]
    return found


def changed_in_place(connection: Any, table: str, statement: Any, parameters: dict[str, Any]) -> int:
    """How many rows of a table a statement changes within their pages, in a transaction that is open."""
    query = f"SELECT pg_stat_get_xact_tuples_hot_updated('relatum.{table}'::regclass)".encode()
    [(before,)] = connection.execute(query).fetchall()
    connection.execute(text_of(statement).encode(), parameters)
    [(after,)] = connection.execute(query).fetchall()
    return int(after - before)


def nodes_of(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A plan's node and all below it. A part of `relationships` goes by the table's name, as its indexes do."""
    yield {key: _PART.sub("relationships", value) if key in _NAMES else value for key, value in plan.items()}
    for inner in plan.get("Plans", ()):
        yield from nodes_of(inner)


def pages_in(plan: dict[str, Any]) -> int:
    return int(plan["Shared Hit Blocks"] + plan["Shared Read Blocks"])


def scanned_in(plan: dict[str, Any]) -> set[str]:
    """The tables of which a plan read all pages. A part that is empty has none."""
    scans = (node for node in nodes_of(plan) if node["Node Type"] == "Seq Scan")
    return {node["Relation Name"] for node in scans if pages_in(node)}
