"""What docs/operations.md says about granting roles works, for the owner of a second database in a cluster, too."""

import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

import psycopg
import pytest
from psycopg import sql

from relatum_migrations import upgrade
from tests.support import unique_name

PAGE = (Path(__file__).parents[2] / "docs" / "operations.md").read_text()
USERS = ("recorder_user", "consumer_user", "collector_user", "publisher_user", "page_user", "second_owner")
PASSWORD = "x"


@pytest.fixture
def users(database_url: str) -> Iterator[dict[str, str]]:
    """A login for each user the page names, by that name; the second owner may make roles."""
    names = {user: unique_name(user).replace("-", "_") for user in USERS}
    with psycopg.connect(database_url, autocommit=True) as administrator:
        for name in names.values():
            made = sql.SQL("CREATE ROLE {} LOGIN CREATEROLE PASSWORD {}")
            administrator.execute(made.format(sql.Identifier(name), sql.Literal(PASSWORD)))
        yield names
        for name in reversed(names.values()):
            administrator.execute(sql.SQL("DROP OWNED BY {} CASCADE").format(sql.Identifier(name)))
            administrator.execute(sql.SQL("DROP ROLE {}").format(sql.Identifier(name)))


def shown(users: dict[str, str], first: str) -> str:
    """The page's block of SQL that begins so, for these users."""
    found = re.search(rf"```sql\n({first}.*?)```", PAGE, re.DOTALL)
    assert found, first
    return re.sub("|".join(USERS), lambda hit: users[hit[0]], found[1])


def as_user(url: str, name: str) -> str:
    """The URL for a user of the tests."""
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=f"{name}:{PASSWORD}@{parts.hostname}:{parts.port}"))


def test_the_owner_of_a_second_database_grants_as_shown(
    database_url: str, empty_database_url: str, users: dict[str, str]
) -> None:
    """Once whoever made the roles has let that owner, the page's grants work there, and a consumer may look up."""
    owner = users["second_owner"]
    second = as_user(empty_database_url, owner)
    with psycopg.connect(empty_database_url, autocommit=True) as administrator:
        name = urlsplit(empty_database_url).path[1:]
        statement = sql.SQL("ALTER DATABASE {} OWNER TO {}")
        administrator.execute(statement.format(sql.Identifier(name), sql.Identifier(owner)))
    upgrade(second)
    grants = shown(users, "GRANT relatum_recorder TO recorder_user")
    with psycopg.connect(second, autocommit=True) as connection:
        if connection.info.server_version >= 160_000:
            # Before, whoever has CREATEROLE may grant any.
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                connection.execute(grants.encode())
        with psycopg.connect(database_url, autocommit=True) as administrator:
            administrator.execute(shown(users, "GRANT relatum_recorder, relatum_consumer").encode())
        connection.execute(grants.encode())
    with psycopg.connect(as_user(empty_database_url, users["consumer_user"])) as consumer:
        assert consumer.execute("SELECT count(*) FROM relatum.relations").fetchone() == (0,)
    with psycopg.connect(empty_database_url, autocommit=True) as administrator:
        statement = sql.SQL("REASSIGN OWNED BY {} TO CURRENT_USER")
        administrator.execute(statement.format(sql.Identifier(owner)))
        administrator.execute(sql.SQL("DROP OWNED BY {}").format(sql.Identifier(owner)))
