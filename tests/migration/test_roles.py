"""Owners that may make no roles: what `relatum migrate` says, and that running it again is the way out."""

import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

import psycopg
import pytest
from psycopg import sql
from typer.testing import CliRunner

from relatum.keys import as_definitions
from relatum.local import LocalPostgreSQL
from relatum.store.catalog import add_keys
from relatum.store.database import make_engine
from relatum_cli.app import app
from relatum_migrations import current, head, upgrade
from tests.support import START_S

PASSWORD = "x"
ROLES = ("relatum_recorder", "relatum_consumer", "relatum_reader", "relatum_collector", "relatum_router")
PAGES = [Path(__file__).parents[2] / "docs" / name for name in ("operations.md", "troubleshooting.md")]


@pytest.fixture
def server_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A PostgreSQL of its own, since roles belong to the server: there are none of Relatum's."""
    with LocalPostgreSQL(tmp_path_factory.mktemp("postgresql"), durable=False, start_timeout_s=START_S) as server:
        yield server.database_url


def owned(server_url: str, name: str) -> str:
    """A new database of an owner of the same name, who may make no roles."""
    with psycopg.connect(server_url, autocommit=True) as administrator:
        named = sql.Identifier(name)
        administrator.execute(sql.SQL("CREATE ROLE {} LOGIN PASSWORD {}").format(named, sql.Literal(PASSWORD)))
        administrator.execute(sql.SQL("CREATE DATABASE {} OWNER {}").format(named, named))
    return as_user(server_url, name, name)


def as_user(url: str, user: str, database: str) -> str:
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=f"{user}:{PASSWORD}@{parts.hostname}:{parts.port}", path=f"/{database}"))


def migrate(url: str) -> str:
    done = CliRunner().invoke(app, ["migrate", "--database", url])
    assert done.exit_code == 0, done.output
    return done.stderr


def granted(url: str) -> set[tuple[str, str, str, str]]:
    """Who may do what: table or sequence of Relatum's schema, column, role, right. Without sequences of identities."""
    with psycopg.connect(url) as connection:
        rows = connection.execute(
            "SELECT c.relname, '', a.grantee::regrole::text, a.privilege_type "
            "FROM pg_class c, aclexplode(c.relacl) a WHERE c.relnamespace = 'relatum'::regnamespace "
            "AND (c.relkind <> 'S' OR c.relname = 'placement_epochs') AND a.grantee <> c.relowner "
            "UNION ALL SELECT c.relname, t.attname, a.grantee::regrole::text, a.privilege_type "
            "FROM pg_class c JOIN pg_attribute t ON t.attrelid = c.oid, aclexplode(t.attacl) a "
            "WHERE c.relnamespace = 'relatum'::regnamespace AND a.grantee <> c.relowner "
            "UNION ALL SELECT nspname, '', a.grantee::regrole::text, a.privilege_type "
            "FROM pg_namespace, aclexplode(nspacl) a WHERE nspname = 'relatum' AND a.grantee <> nspowner"
        ).fetchall()
    return {(str(a), str(b), str(c), str(d)) for a, b, c, d in rows}


def test_roles_that_could_not_be_made_are_named_and_granted_by_another_migrate(server_url: str) -> None:
    """Roles that an owner cannot make are named, and once they are there the next migrate grants as a first does."""
    first, second = owned(server_url, "first"), owned(server_url, "second")
    for url in (first, second, second):
        said = migrate(url)
        assert all(f"CREATE ROLE {role} NOLOGIN" in said for role in ROLES), said
        assert granted(url) == set()
    with psycopg.connect(server_url, autocommit=True) as administrator:
        administrator.execute("CREATE ROLE relatum_router NOLOGIN")
        said = migrate(first)
        assert "relatum_recorder" in said
        assert "relatum_router" not in said
        administrator.execute("ALTER ROLE first CREATEROLE")
    assert (migrate(first), migrate(second)) == ("", "")
    # The revisions also grant if the roles exist from the start.
    fresh = owned(server_url, "fresh")
    assert migrate(fresh) == ""
    assert granted(first) == granted(second) == granted(fresh)
    before = granted(first)
    upgrade(first)
    assert granted(first) == before
    # A user in a role that was granted late has that role's rights.
    with psycopg.connect(server_url, autocommit=True) as administrator:
        administrator.execute("CREATE ROLE somebody LOGIN PASSWORD 'x' IN ROLE relatum_recorder")
    engine = make_engine(as_user(second, "somebody", "second"))
    try:
        add_keys(engine, as_definitions(["order"]))
    finally:
        engine.dispose()


def block(first: str) -> str:
    """The block of SQL that begins so on the pages about deployment and upkeep."""
    text = "".join(page.read_text() for page in PAGES)
    found = re.search(rf"```sql\n\s*({first}.*?)```", text, re.DOTALL)
    assert found, first
    return found[1]


def test_each_table_is_some_roles(database_url: str) -> None:
    """A table that is added is granted to somebody, in roles.sql."""
    with psycopg.connect(database_url) as connection:
        rows = connection.execute(
            "SELECT relname FROM pg_class WHERE relnamespace = 'relatum'::regnamespace AND (relkind IN ('r', 'p', 'v') "
            "OR relname = 'placement_epochs') AND NOT relispartition"
        ).fetchall()
    assert {name for (name,) in rows} <= {name for name, _, role, _ in granted(database_url) if role in ROLES}


def test_what_the_page_shows_is_all_that_a_server_needs(server_url: str) -> None:
    """The pages' SQL is all that the owners of two databases need to migrate and grant, and each login to read."""

    def url(user: str, database: str = "relatum") -> str:
        return as_user(server_url, user, database).replace(f":{PASSWORD}@", ":secret@")

    def count(user: str, table: str, database: str = "relatum") -> None:
        with psycopg.connect(url(user, database)) as connection:
            assert connection.execute(f"SELECT count(*) FROM relatum.{table}".encode()).fetchone() == (0,)

    with psycopg.connect(server_url, autocommit=True) as administrator:
        for statement in block("CREATE ROLE relatum_owner").split(";"):
            if statement.strip():
                administrator.execute(statement.encode())
        assert migrate(url("relatum_owner")) == ""
        with psycopg.connect(url("relatum_owner")) as owner:
            owner.execute("SELECT nextval('relatum.placement_epochs')")
            assert owner.execute(block("SELECT setval").encode()).fetchone() == (1,)
        readers = {"consumer": "relations", "collector": "collectors", "router": "placements", "page": "keys"}
        for user, table in readers.items():
            count(f"{user}_user", table)
        administrator.execute("CREATE ROLE second_owner LOGIN CREATEROLE PASSWORD 'secret'")
        administrator.execute("CREATE DATABASE second OWNER second_owner")
        administrator.execute("REVOKE relatum_consumer FROM consumer_user")
        grants = block("GRANT relatum_recorder TO recorder_user").encode()
        upgrade(url("second_owner", "second"))
        with psycopg.connect(url("second_owner", "second"), autocommit=True) as second:
            if second.info.server_version >= 160_000:
                # Before, any user with CREATEROLE may grant any.
                with pytest.raises(psycopg.errors.InsufficientPrivilege):
                    second.execute(grants)
            administrator.execute(block("GRANT relatum_recorder, relatum_consumer").encode())
            second.execute(grants)
        count("consumer_user", "relations", "second")


def test_who_owns_the_schema_needs_no_right_to_create_schemas(server_url: str) -> None:
    """An administrator may create the schema for its owner, who may create nothing else in the database."""
    with psycopg.connect(server_url, autocommit=True) as administrator:
        administrator.execute("CREATE ROLE owner_of_schema LOGIN PASSWORD 'x'")
        administrator.execute("CREATE DATABASE of_administrator")
    url = as_user(server_url, "owner_of_schema", "of_administrator")
    with psycopg.connect(server_url, dbname="of_administrator", autocommit=True) as administrator:
        administrator.execute("CREATE SCHEMA relatum AUTHORIZATION owner_of_schema")
    upgrade(url)
    assert current(url) == head()
