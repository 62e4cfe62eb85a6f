"""The page's own user of PostgreSQL: all pages answer, and it writes nothing whatever it tries."""

import logging

import psycopg
import pytest
from psycopg import sql

from tests.support import wait_until
from tests.support.web import asking
from tests.web.conftest import World
from tests.web.test_api import examples

READS = {"rows_of", "stream_of"}
"""Functions it may call: those that look up."""


def test_every_page_answers_it_as_it_does_the_owner(world: World, reader_url: str) -> None:
    """Each path of the API, and each page: nothing is refused, and the status is the one that the owner gets."""
    paths = [path for each in examples(world).values() for path in each]
    pages = ["/", *(path for path in paths if not path.startswith("/search"))]
    with asking(world.page()) as owner, asking(world.page(database=reader_url)) as reader:
        for path in [*(f"/api{path}" for path in paths), *pages]:
            given = reader.get(path)
            assert given.status_code == owner.get(path).status_code, (path, given.text)
            assert given.status_code in (200, 400, 404), (path, given.text)


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
        for statement_text in (b"CREATE TABLE relatum.mine (a int)", b"SELECT nextval('relatum.placement_epochs')"):
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                connection.execute(statement_text)


@pytest.mark.parametrize("table", ["receipts", "settlements"])
def test_it_reads_nothing_that_no_page_needs(reader_url: str, table: str) -> None:
    """What publishers and writers keep for themselves is theirs."""
    with psycopg.connect(reader_url) as connection, pytest.raises(psycopg.errors.InsufficientPrivilege):
        connection.execute(sql.SQL("SELECT * FROM {}").format(sql.Identifier("relatum", table)))


def test_a_user_who_may_write_is_told_of(world: World, reader_url: str, caplog: pytest.LogCaptureFixture) -> None:
    """The log says that it may, and how a user is made who may not; nothing is said of one of the role."""

    def told() -> list[str]:
        return [record.getMessage() for record in caplog.records if "IN ROLE relatum_reader" in record.getMessage()]

    with asking(world.page()) as page:
        wait_until(lambda: page.get("/alive").status_code == 200 and bool(told()), what="it is told")
    assert len(told()) == 1
    assert caplog.records[0].levelno == logging.WARNING
    caplog.clear()
    with asking(world.page(database=reader_url)) as page:
        # What it asks first is asked before this.
        assert page.get("/api/health").status_code == 200
        assert page.get("/api/keys").status_code == 200
    assert told() == []
