"""`relatum migrate`: make the schema, bring it up to date, or show the SQL."""

from typing import Annotated

import typer

from relatum.command import DatabaseOption, JsonOption, console, print_json, require_database
from relatum_migrations import LOCK_S, head, sql, upgrade
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
    revision = current_revision(url)
    if as_json:
        print_json({"revision": revision, "head": head()})
        return
    newest = "the newest" if revision == head() else f"the newest is {head()}"
    console.print(f"revision {revision} ({newest})" if revision else f"no schema `relatum` ({newest})", markup=False)
