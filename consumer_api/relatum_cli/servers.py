"""`relatum web`, `mcp`, `up` and `migrate`: the page, tools for agents, private servers, and the database schema.

The packages of the extras `web` and `mcp` are imported only when a command needs them.
"""

import os
import secrets
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlencode

import typer

from relatum.errors import ServerStartFailed
from relatum.local import LocalServers, reader_url
from relatum.reading import Broker
from relatum_cli.exits import stop_signals
from relatum_cli.options import DatabaseOptions, Json, Port, ServerOptions, option, print_exports
from relatum_cli.show import answer
from relatum_consumer.web.options import WebOptions, is_loopback, of_extra
from relatum_migrations import LOCK_S, current, head, missing_roles, sql, upgrade

if TYPE_CHECKING:
    from relatum_consumer.web.application import WebServer

WATCH_S: Final = 0.5
"""Seconds between two checks whether the page or the servers still run."""


@dataclass(frozen=True)
class DisplayOptions:
    """The options that mask parts of messages."""

    masked_keys: list[str] | None = option(
        None, "Show this key's values as digests; repeatable.", "--mask", metavar="KEY"
    )
    mask_bodies: bool = option(False, "Hide all bodies.", "--mask-bodies")
    show_bodies: bool = option(False, "Also show the bodies of messages with a masked value.", "--show-bodies")

    def options(self, servers: ServerOptions, **others: Any) -> WebOptions:
        shown = asdict(self) | {"masked_keys": tuple(self.masked_keys or ())}
        return WebOptions(servers.broker, servers.database_url, **shown, **others)


def web(
    *,
    host: str = option("127.0.0.1", "The address to listen on; addresses other than loopback need a token."),
    port: Port = 8440,
    root_path: str = option("", "The prefix of all paths behind a proxy, such as /relatum.", metavar="PATH"),
    mcp: bool = option(False, "Also serve tools for agents at /mcp (Model Context Protocol).", "--mcp"),
    host_name: list[str] | None = option(None, "A host name of the page, in addition to localhost; repeatable."),
    https: bool = option(False, "A proxy serves the page over https: send the cookie only over https.", "--https"),
    shown: DisplayOptions,
    servers: ServerOptions,
) -> None:
    """The page only reads. Its URL is printed to stdout. Addresses other than loopback need a token, from the
    environment variable RELATUM_WEB_TOKEN; if it is not set, the command makes one, which the printed URL contains.
    """
    token = os.environ.get("RELATUM_WEB_TOKEN") or None
    new_token = secrets.token_urlsafe(32) if token is None and not is_loopback(host) else None
    access = {"hosts": tuple(host_name or ()), "is_https": https, "token": token or new_token}
    options = shown.options(servers, host=host, port=port, root_path=root_path, mcp=mcp, **access)
    serve(options, query=f"?token={new_token}" if new_token else "")


def mcp(*, shown: DisplayOptions, servers: ServerOptions) -> None:
    """The tools only read. Logs go to stderr. `relatum web --mcp` serves the same tools over HTTP."""
    with of_extra("mcp"):
        import anyio

        from relatum_consumer.web.mcp_server import over_stdio
    anyio.run(over_stdio, shown.options(servers))


def serve(options: WebOptions, begin: Mapping[str, str] | None = None, *, query: str = "") -> None:
    """Serve the page until SIGTERM or Ctrl-C. Print its URL with `query`, and the URL of the message `begin`."""
    with stop_signals() as stopped, served(options) as server:
        typer.echo(f"RELATUM_WEB_URL={server.url}{query}")
        where = "" if begin is None else f" Begin at {server.url}message?{urlencode(begin)}"
        typer.echo(f"The page is served.{where} (Ctrl-C stops it)", err=True)
        if options.mcp:
            typer.echo(f"Tools for agents are at {server.url}mcp", err=True)
        while not stopped.wait(WATCH_S):
            if not server.is_running:
                raise ServerStartFailed("the page stopped unexpectedly: see the log above")


def served(options: WebOptions) -> "WebServer":
    """Start serving the page. The caller closes the server."""
    with of_extra():
        from relatum_consumer.web.application import WebServer
    return WebServer(options)


def up(
    directory: Path = option(Path(".servers"), "The directory for the servers' data.", "--directory", "-d"),
    web: bool = option(False, "Also serve the page; needs the extra `web`.", "--web"),
    port: Port = 0,
) -> None:
    """The URLs are printed as `export` lines for another shell. If you start `relatum up` again with the same
    directory, it has the same data, and the same URLs if their ports are free.
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
                        raise ServerStartFailed(f"{server.name} exited unexpectedly. Its last lines:\n{lines}")


def migrate(
    *,
    show_current: bool = option(False, "Only show the revision.", "--current"),
    show_sql: bool = option(False, "Only print the SQL of the whole schema.", "--sql"),
    lock_timeout: float = option(LOCK_S, "Seconds to wait for a lock that another session holds.", min=0.001),
    given: DatabaseOptions,
    as_json: Json = False,
) -> None:
    """At any revision, it also creates missing roles, if the user may create roles, and grants each role its
    privileges. Roles that it could not create are listed on stderr.

    `--sql` needs no database. `--json` prints one document: revision (null without a schema) and head.
    """
    if show_current and show_sql:
        raise typer.BadParameter("--current and --sql cannot be combined")
    if show_sql:
        typer.echo(sql())
        return
    url = given.database_url
    if not show_current:
        upgrade(url, lock_timeout_s=lock_timeout)
        if roles := missing_roles(url):
            statements = " ".join(f"CREATE ROLE {role} NOLOGIN;" for role in roles)
            typer.echo(
                f"warning: this user may not create roles, and PostgreSQL does not have {', '.join(roles)}. Ask a user "
                f"with CREATEROLE to run: {statements} Then run `relatum migrate` again to grant their privileges.",
                err=True,
            )
    revision, newest = current(url), head()
    words = "the newest" if revision == newest else f"the newest is {newest}"
    text = f"revision {revision} ({words})" if revision else f"no schema `relatum` ({words})"
    answer({"revision": revision, "head": newest}, text, as_json=as_json)
