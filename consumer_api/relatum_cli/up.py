"""`relatum up`: both private servers, until Ctrl-C."""

from contextlib import ExitStack
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from relatum.errors import ConfigurationError, ServerStartFailed
from relatum.local import LocalServer, LocalServers, reader_url
from relatum.terminal import print_exports, stop_signals

SETUP_GROUP: Final = "relatum.setup"
"""Entry points that make a database ready: callables of its URL. The packages above the kernel have them."""

PAGE_GROUP: Final = "relatum.page"
"""Entry point that serves the page: a callable of the broker's, the database's and the stream protocol's URL."""

WATCH_S: Final = 0.5
"""Seconds between two looks at whether both servers still run."""


def up(
    directory: Annotated[
        Path,
        typer.Option("--directory", "-d", help="Where the servers keep their data; made where missing."),
    ] = Path(".servers"),
    web: Annotated[bool, typer.Option("--web", help="Serve the page on them, too; needs the extra `web`.")] = False,
    port: Annotated[int, typer.Option(help="The page's port; 0 for a free one.", min=0, max=65_535)] = 0,
) -> None:
    """Run a private RabbitMQ and PostgreSQL, print their URLs, and stop both on Ctrl-C.

    The URLs are printed as lines for another terminal's shell. They stay the same as long as their ports are free, so
    that `relatum up` can be started again in the directory. The data stays too.
    """
    with stop_signals() as stopped, LocalServers(directory) as servers:
        if stopped.is_set():
            return
        set_up(servers.database_url)
        print_exports(servers.broker_url, servers.stream_url, servers.database_url)
        with ExitStack() as stack:
            if web:
                page = stack.enter_context(_page_on(servers, port))
                typer.echo(f"export RELATUM_WEB_URL={page.url}")
            typer.echo("Both servers run. Ctrl-C stops them.", err=True)
            while not stopped.wait(WATCH_S):
                _check(servers.rabbitmq)
                _check(servers.postgresql)


def set_up(database_url: str) -> None:
    """Make a database ready by what the installed packages registered, as its schema by the migrations."""
    for entry_point in entry_points(group=SETUP_GROUP):
        make_ready: Any = entry_point.load()
        make_ready(database_url)


def _page_on(servers: LocalServers, port: int) -> Any:
    """The page, by the package that has one."""
    for entry_point in entry_points(group=PAGE_GROUP):
        serve: Any = entry_point.load()
        return serve(servers.broker_url, reader_url(servers.database_url), servers.stream_url, port=port)
    raise ConfigurationError("no package that is installed has a page")


def _check(server: LocalServer) -> None:
    if not server.running:
        raise ServerStartFailed(f"{server.name} ended by itself. Its last lines:\n{server.last_lines()}")
