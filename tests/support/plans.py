"""A database that is filled once for the tests of a module, and the plans that statements have there."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
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


def plan_of_statement(connection: Any, mode: str, statement: Any, parameters: dict[str, Any]) -> dict[str, Any]:
    compiled = statement.compile(dialect=dialect.dialect())
    return plan_of(connection, mode, str(compiled), {**compiled.params, **parameters})


def text_of(statement: Any) -> str:
    return str(statement.compile(dialect=dialect.dialect()))


def plan_of(connection: psycopg.Connection[Any], mode: str, sql: str, parameters: dict[str, Any]) -> dict[str, Any]:
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
