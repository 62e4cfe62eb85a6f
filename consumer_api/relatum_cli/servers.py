"""`relatum up` and `relatum migrate`: private servers, and the schema of a database."""

from contextlib import ExitStack
from pathlib import Path
from typing import Final

import typer

from relatum.errors import ServerStartFailed
from relatum.local import LocalServers, reader_url
from relatum.reading import Broker
from relatum_cli.exits import stop_signals
from relatum_cli.options import DatabaseOptions, Json, Port, option, print_exports
from relatum_cli.show import answer
from relatum_cli.web import served
from relatum_consumer.web.options import WebOptions
from relatum_migrations import LOCK_S, current, head, missing_roles, sql, upgrade

WATCH_S: Final = 0.5
"""Seconds between two checks whether both servers still run."""


def up(
    directory: Path = option(Path(".servers"), "Where the servers keep their data.", "--directory", "-d"),
    web: bool = option(False, "Also serve the page; needs the extra `web`.", "--web"),
    port: Port = 0,
) -> None:
    """Run a private RabbitMQ and PostgreSQL, and print their URLs, until Ctrl-C.

    The URLs are printed as `export` lines for another shell. If `relatum up` is started again in the directory, the
    data is there, and the URLs are the same if their ports are free.
    """
    with stop_signals() as stopped, LocalServers(directory) as servers:
        if stopped.is_set():
            return
        upgrade(servers.database_url)
        broker = Broker(servers.broker_url, stream_url=servers.stream_url)
        print_exports(broker, servers.database_url)
        with ExitStack() as stack:
            if web:
                reader = reader_url(servers.database_url)
                page = stack.enter_context(served(WebOptions(broker, reader, port=port)))
                typer.echo(f"export RELATUM_WEB_URL={page.url}")
            typer.echo("Both servers run. Ctrl-C stops them.", err=True)
            while not stopped.wait(WATCH_S):
                for server in (servers.rabbitmq, servers.postgresql):
                    if not server.running:
                        lines = server.last_lines()
                        raise ServerStartFailed(f"{server.name} ended by itself. Its last lines:\n{lines}")


def migrate(
    *,
    show_current: bool = option(False, "Show the revision and change nothing.", "--current"),
    show_sql: bool = option(False, "Print the SQL of the whole schema and run nothing.", "--sql"),
    lock_timeout: float = option(LOCK_S, "Seconds to wait for a lock that others hold.", min=0.001),
    given: DatabaseOptions,
    as_json: Json = False,
) -> None:
    """Create the schema `relatum`, or bring it up to date. Safe to run again.

    It also creates the roles, if the user may, and grants each what it needs, whatever the revision was. Roles that
    could not be created are named on stderr.

    `--sql` needs no database. `--json` prints one document: revision (null without a schema) and head.
    """
    if show_current and show_sql:
        raise typer.BadParameter("--current and --sql exclude each other")
    if show_sql:
        typer.echo(sql())
        return
    url = given.database_url
    if not show_current:
        upgrade(url, lock_timeout_s=lock_timeout)
        if roles := missing_roles(url):
            made = " ".join(f"CREATE ROLE {role} NOLOGIN;" for role in roles)
            typer.echo(
                f"warning: this user may not create roles, and PostgreSQL does not have {', '.join(roles)}. Ask a user "
                f"with CREATEROLE to run: {made} Then run `relatum migrate` again: it grants them what they need.",
                err=True,
            )
    revision, newest = current(url), head()
    words = "the newest" if revision == newest else f"the newest is {newest}"
    text = f"revision {revision} ({words})" if revision else f"no schema `relatum` ({words})"
    answer({"revision": revision, "head": newest}, text, as_json=as_json)
