"""All that can be asked: as the page's own user of PostgreSQL, behind a pgbouncer, and the form of each answer.

The form of answers, by name and type, is kept in `answers.json`. A change is made on purpose: `RELATUM_KEEP_ANSWERS=1`
writes the file anew, and the change log says it.
"""

import json
import os
from pathlib import Path
from typing import Final

import jsonschema
import psycopg
import pytest
from psycopg import sql

from tests.support import wait_until
from tests.support.forms import form, in_words
from tests.support.pgbouncer import holds_statements, pgbouncer
from tests.support.web import Asking, asking
from tests.web.conftest import World
from tests.web.test_api import examples

KEPT: Final = Path(__file__).with_name("answers.json")


def test_answers_keep_their_form(page: Asking, world: World) -> None:
    """Each answer of the API, errors too, has the form that OpenAPI describes and the names and types kept here."""
    wait_until(lambda: page.get("/api/health").status_code == 200, what="both servers answer")
    found: dict[str, dict[str, set[str]]] = {}
    document = page.get("/api/openapi.json").json()
    assert set(document["paths"]) == set(examples(world))
    for path, asked in examples(world).items():
        described = document["paths"][path]["get"]["responses"]
        for each in asked:
            response = page.get(f"/api{each}")
            content = described["200" if response.status_code == 200 else "default"]["content"]
            schema = content["application/json"]["schema"] | {"components": document["components"]}
            jsonschema.validate(response.json(), schema)
            if response.status_code == 200:
                form(response.json(), found=found.setdefault(path, {}))
    said = {path: in_words(forms) for path, forms in found.items()}
    if os.environ.get("RELATUM_KEEP_ANSWERS"):
        KEPT.write_text(json.dumps(said, indent=1, sort_keys=True) + "\n")
    kept = json.loads(KEPT.read_text())
    changed = {path: said.get(path, {}).items() ^ kept.get(path, {}).items() for path in said.keys() | kept.keys()}
    assert {path: sorted(names) for path, names in changed.items() if names} == {}


READS = {"rows_of", "stream_of"}
"""Functions it may call: those that look up."""


def test_postgresql_refuses_what_it_would_write(reader_url: str) -> None:
    """Each table of the schema by each statement, its functions, and new tables; by its rights, not by its session."""
    with psycopg.connect(reader_url, autocommit=True) as connection:
        tables = connection.execute(
            "SELECT relname, min(attname) FROM pg_class c JOIN pg_attribute a ON a.attrelid = c.oid AND attnum > 0 "
            "WHERE relnamespace = 'relatum'::regnamespace AND relkind IN ('r', 'p') GROUP BY relname"
        ).fetchall()
        assert len(tables) > 30
        for name, column in tables:
            table = sql.Identifier("relatum", name)
            for statement in (
                sql.SQL("INSERT INTO {} DEFAULT VALUES").format(table),
                sql.SQL("UPDATE {} SET {} = DEFAULT").format(table, sql.Identifier(column)),
                sql.SQL("DELETE FROM {}").format(table),
                sql.SQL("TRUNCATE {}").format(table),
                sql.SQL("SELECT FROM {} FOR SHARE").format(table),
                sql.SQL("DROP TABLE {}").format(table),
            ):
                with pytest.raises(psycopg.errors.InsufficientPrivilege):
                    connection.execute(statement)
        may_call = connection.execute(
            "SELECT proname FROM pg_proc WHERE pronamespace = 'relatum'::regnamespace "
            "AND prorettype <> 'trigger'::regtype AND has_function_privilege(oid, 'EXECUTE')"
        ).fetchall()
        assert {name for (name,) in may_call} == READS
        for statement_text in (
            b"CREATE TABLE relatum.mine (a int)",
            b"SELECT nextval('relatum.placement_epochs')",
            # Tables that only publishers and writers use.
            b"SELECT * FROM relatum.receipts",
            b"SELECT * FROM relatum.settlements",
        ):
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                connection.execute(statement_text)


SESSIONS = 3

MORE = ["", "max_prepared_statements = 0"] if holds_statements() else [""]


@pytest.mark.parametrize("more", MORE)
def test_all_answers_are_those_of_without_it(world: World, reader_url: str, tmp_path: Path, more: str) -> None:
    """Behind pgbouncer each path, alone or with many at once, has the status and messages that it has without it."""
    asked = [path for each in examples(world).values() for path in each]
    paths = [*(f"/api{path}" for path in asked), "/", *(path for path in asked if not path.startswith("/search"))]
    searches = ["/api/search?key=host&value=busy&limit=50", f"/api/message?stream={world.orders}&offset=1"] * 25
    settings = f"ignore_startup_parameters = options\n{more}"
    with (
        pgbouncer(reader_url, tmp_path, pool_size=SESSIONS, more=settings) as pooled,
        asking(world.page()) as direct,
        asking(world.page(database=pooled)) as page,
    ):
        for path in paths:
            given = page.get(path)
            assert given.status_code == direct.get(path).status_code, (path, given.text)
            assert given.status_code in (200, 400, 404), (path, given.text)
        expected = {path: direct.get(path).json() for path in set(searches)}
        for path, given in zip(searches, page.together(searches), strict=True):
            assert given.status_code == 200, given.text
            for part in ("results", "keys", "headers"):
                assert given.json().get(part) == expected[path].get(part)


def test_a_pooler_that_refuses_its_sessions_is_told_of(world: World, reader_url: str, tmp_path: Path) -> None:
    """Without `ignore_startup_parameters` there is no answer, and the error says which setting is missing."""
    with pgbouncer(reader_url, tmp_path) as pooled, asking(world.page(database=pooled)) as page:
        given = page.get("/api/search?key=host&value=busy")
        assert (given.status_code, "ignore_startup_parameters" in given.text) == (503, True)
