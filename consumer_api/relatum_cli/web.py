"""`relatum web` and `relatum mcp`, and the page beside other commands.

What they need of the extras `web` and `mcp` is imported when they run.
"""

import os
import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from relatum.errors import ServerStartFailed
from relatum.terminal import ServerOptions, option, spread, stop_signals
from relatum_consumer.web.options import WebOptions, is_loopback, of_extra

if TYPE_CHECKING:
    from relatum_consumer.web.server import WebServer

_WATCH_S: Final = 0.5
"""Seconds between two looks at whether the page still runs."""


@dataclass(frozen=True, slots=True)
class Shown:
    """What a command line says of what is shown."""

    mask: Annotated[list[str] | None, option("Show this key's values as digests; repeatable.", metavar="KEY")] = None
    mask_bodies: Annotated[bool, typer.Option("--mask-bodies", help="Show no bodies.")] = False
    show_bodies: Annotated[
        bool, typer.Option("--show-bodies", help="Show bodies of messages that have a masked value, too.")
    ] = False
    trace_url: Annotated[
        str | None, option("Link messages to their traces: as https://jaeger.example/trace/{trace_id}.", metavar="URL")
    ] = None

    def options(self, servers: ServerOptions, **others: Any) -> WebOptions:
        """The options of the page."""
        return WebOptions(
            servers.broker_url,
            servers.database_url,
            servers.stream_url,
            masked_keys=tuple(self.mask or ()),
            mask_bodies=self.mask_bodies,
            show_bodies=self.show_bodies,
            trace_url=self.trace_url,
            **others,
        )


@spread
def web(
    host: Annotated[str, typer.Option(help="The address it listens at; any but loopback wants a token.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="The port; 0 for a free one.", min=0, max=65_535)] = 8440,
    root_path: Annotated[str, option("What a proxy has before every path, as /relatum.", metavar="PATH")] = "",
    mcp: Annotated[
        bool, typer.Option("--mcp", help="Serve tools for agents, too, at /mcp (Model Context Protocol).")
    ] = False,
    host_name: Annotated[
        list[str] | None, option("A name by which it is called, besides localhost; repeatable.")
    ] = None,
    https: Annotated[
        bool, typer.Option("--https", help="A proxy serves it by https: the cookie goes by that alone.")
    ] = False,
    *,
    shown: Shown,
    servers: ServerOptions,
) -> None:
    """Serve a page, and a JSON API, to look at messages and what belongs to them, until SIGTERM or Ctrl-C.

    It only reads. On this machine (127.0.0.1) anybody may look; elsewhere it wants a token: that in the variable
    RELATUM_WEB_TOKEN, or one that it makes, and prints in its address. The address is printed to stdout.
    """
    token = os.environ.get("RELATUM_WEB_TOKEN") or None
    made = secrets.token_urlsafe(32) if token is None and not is_loopback(host) else None
    options = shown.options(
        servers,
        host=host,
        port=port,
        root_path=root_path,
        mcp=mcp,
        hosts=tuple(host_name or ()),
        is_https=https,
        token=token or made,
    )
    serve(options, query=f"?token={made}" if made else "")


@spread
def mcp(*, shown: Shown, servers: ServerOptions) -> None:
    """Serve look-ups to an agent, as tools of the Model Context Protocol over stdin and stdout; they only read.

    Logs go to stderr. Over HTTP: `relatum web --mcp`.
    """
    with of_extra("mcp"):
        import anyio

        from relatum_consumer.web.mcp_server import over_stdio
    anyio.run(over_stdio, shown.options(servers))


def serve(options: WebOptions, begin: tuple[str, int] | None = None, *, query: str = "") -> None:
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
            while not stopped.wait(_WATCH_S):
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
        from relatum_consumer.web.server import WebServer
    return WebServer(WebOptions(broker, database, stream_url, **options))
