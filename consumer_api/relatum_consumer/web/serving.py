"""Serving the page for a command: until it is told to stop, or beside what else the command runs."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import typer

from relatum.errors import ConfigurationError, ServerStartFailed
from relatum.terminal import stop_signals

if TYPE_CHECKING:
    from relatum_consumer.web.options import WebOptions
    from relatum_consumer.web.server import WebServer

WATCH_S: Final = 0.5
"""Seconds between two looks at whether the page still runs."""


@contextmanager
def of_extra(extra: str = "web") -> Iterator[None]:
    """Says how the extra is installed, where what is imported within lacks it.

    Raises:
        ConfigurationError: it does.
    """
    try:
        yield
    except ImportError as error:
        raise ConfigurationError(f"this needs pip install 'relatum[{extra}]': {error}") from error


def serve(options: "WebOptions", begin: tuple[str, int] | None = None, *, query: str = "") -> None:
    """Serve the page, and print its address, until SIGTERM or Ctrl-C.

    Args:
        options: What it is told.
        begin: A message to begin at, whose address is told, too.
        query: What the address that is printed ends with.

    Raises:
        ConfigurationError: the extra is not installed, or an option cannot be.
        ServerStartFailed: it did not start, or ended by itself.
    """
    with of_extra():
        from relatum_consumer.web.links import Links
        from relatum_consumer.web.server import WebServer
    with stop_signals() as stopped:
        if stopped.is_set():
            return
        with WebServer(options) as server:
            typer.echo(f"RELATUM_WEB_URL={server.url}{query}")
            where = "" if begin is None else f" Begin at {server.url}{Links().message(*begin)[1:]}"
            typer.echo(f"The page is served.{where} (Ctrl-C stops it)", err=True)
            if options.mcp:
                typer.echo(f"Tools for agents are at {server.url}mcp", err=True)
            while not stopped.wait(WATCH_S):
                if not server.is_running:
                    raise ServerStartFailed("the page ended by itself: the log says why")


def page_on(broker: str, database: str, stream_url: str | None = None, **options: Any) -> "WebServer":
    """The page on servers, on this machine alone; it serves until it is closed.

    Args:
        broker: The broker's URL.
        database: PostgreSQL's URL.
        stream_url: Where the stream protocol is.
        options: Others of `WebOptions`.

    Raises:
        ConfigurationError: the extra is not installed, or an option cannot be.
        ServerStartFailed: it did not start.
    """
    with of_extra():
        from relatum_consumer.web.options import WebOptions
        from relatum_consumer.web.server import WebServer
    return WebServer(WebOptions(broker, database, stream_url, **options))
