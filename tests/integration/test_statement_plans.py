"""Every statement written as SQL parses, and names what the newest schema has."""

import pkgutil
import re
from collections.abc import Iterator
from importlib import import_module
from types import ModuleType
from typing import Any

import psycopg
import sqlalchemy as sa

import relatum
import relatum_consumer
from tests.support.plans import text_of

STATEMENT = re.compile(r"\s*(SELECT|WITH|INSERT|UPDATE|DELETE|LOCK)\b")
"""How one begins; what begins otherwise is a part of others."""


def product_modules() -> Iterator[ModuleType]:
    """All modules of the product, but those of extras that are not installed."""
    for package in (relatum, relatum_consumer):
        for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            try:
                yield import_module(found.name)
            except ModuleNotFoundError as error:
                if (error.name or "").startswith("relatum"):
                    raise


def statements_of(module: ModuleType) -> Iterator[tuple[str, sa.TextClause]]:
    """The texts among a module's constants, by name; those in its mappings, tuples and own objects, too."""
    for name, value in vars(module).items():
        is_own = type(value).__module__.startswith("relatum") and hasattr(value, "__dict__")
        inside: Any = vars(value) if is_own else value
        if isinstance(inside, sa.TextClause):
            yield f"{module.__name__}.{name}", inside
        elif isinstance(inside, dict | tuple):
            items = inside.items() if isinstance(inside, dict) else enumerate(inside)
            texts = ((key, each) for key, each in items if isinstance(each, sa.TextClause))
            yield from ((f"{module.__name__}.{name}[{key!r}]", each) for key, each in texts)


def explain(connection: psycopg.Connection[Any], statement: sa.TextClause) -> None:
    """Prepare a statement and plan it, for whatever its parameters are. Nothing is carried out."""
    text = text_of(statement)
    with connection.transaction(force_rollback=True):
        if text.lstrip().startswith("LOCK"):  # which cannot be prepared
            connection.execute(text.encode())
            return
        names = list(dict.fromkeys(re.findall(r"%\((\w+)\)s", text)))
        numbered = re.sub(r"%\((\w+)\)s", lambda found: f"${names.index(found[1]) + 1}", text).replace("%%", "%")
        given = f"({', '.join(['NULL'] * len(names))})" if names else ""
        connection.execute("SET LOCAL plan_cache_mode = force_generic_plan")
        connection.execute(f"PREPARE asked AS {numbered}".encode())
        connection.execute(f"EXPLAIN EXECUTE asked{given}".encode())
        connection.execute("DEALLOCATE asked")


def test_every_statement_that_is_a_text_can_be_prepared(database_url: str) -> None:
    """Every statement that is a text parses and names columns that exist; one that does not is named."""
    statements: dict[int, tuple[str, sa.TextClause]] = {}
    for module in product_modules():
        for name, statement in statements_of(module):
            if STATEMENT.match(statement.text):
                statements.setdefault(id(statement), (name, statement))
    refused = {}
    with psycopg.connect(database_url, autocommit=True) as connection:
        for name, statement in statements.values():
            try:
                explain(connection, statement)
            except psycopg.Error as error:
                refused[name] = str(error)
                connection.execute("DEALLOCATE ALL")
    assert refused == {}
    assert len(statements) > 40
