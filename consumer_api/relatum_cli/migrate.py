"""`relatum migrate`: make the schema, bring it up to date, or show the SQL."""

from typing import Annotated

import typer

from relatum.terminal import DatabaseOption, JsonOption, console, print_json, require_database
from relatum_migrations import LOCK_S, head, missing_roles, sql, upgrade
from relatum_migrations import current as current_revision

__all__ = ["migrate"]


def migrate(
    show_current: Annotated[bool, typer.Option("--current", help="Show the revision and change nothing.")] = False,
    show_sql: Annotated[bool, typer.Option("--sql", help="Print the SQL of the whole schema and run nothing.")] = False,
    lock_timeout: Annotated[
        float, typer.Option("--lock-timeout", min=0.001, help="Seconds to wait for a lock that others hold.")
    ] = LOCK_S,
    database: DatabaseOption = None,
    as_json: JsonOption = False,
) -> None:
    """Make the schema `relatum`, or bring it to this release's revision. Safe to run again.

    It makes the roles too, where the user may, and grants each what it needs, whatever the revision was. Roles that
    could not be made are named on stderr.

    `--sql` needs no database. `--json` prints one document: revision (null where there is no schema) and head.
    """
    if show_current and show_sql:
        raise typer.BadParameter("--current and --sql exclude each other")
    if show_sql:
        typer.echo(sql())
        return
    url = require_database(database)
    if not show_current:
        upgrade(url, lock_timeout_s=lock_timeout)
        _warn_of(missing_roles(url))
    revision = current_revision(url)
    if as_json:
        print_json({"revision": revision, "head": head()})
        return
    newest = "the newest" if revision == head() else f"the newest is {head()}"
    console.print(f"revision {revision} ({newest})" if revision else f"no schema `relatum` ({newest})")


def _warn_of(roles: list[str]) -> None:
    """Say which roles are not there, and what to do."""
    if not roles:
        return
    made = " ".join(f"CREATE ROLE {role} NOLOGIN;" for role in roles)
    lacking = f"warning: this user may make no roles, and PostgreSQL does not have {', '.join(roles)}."
    cure = f"Let somebody with CREATEROLE run: {made} Then run `relatum migrate` again: it grants them what they need."
    typer.echo(f"{lacking} {cure}", err=True)
