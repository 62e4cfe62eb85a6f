"""`relatum web` and `relatum mcp`. What they need of the extras `web` and `mcp` is imported when they run."""

import os
import secrets
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from relatum.terminal import ServerOptions, option, spread
from relatum_consumer.web.serving import of_extra, serve


@dataclass(frozen=True, slots=True)
class Access:
    """What a command line says of who may look."""

    host_name: Annotated[list[str] | None, option("A name by which it is called, besides localhost; repeatable.")] = (
        None
    )
    https: Annotated[
        bool, typer.Option("--https", help="A proxy serves it by https: the cookie goes by that alone.")
    ] = False

    @property
    def options(self) -> dict[str, Any]:
        """The same as options of the page."""
        return {
            "hosts": tuple(self.host_name or ()),
            "is_https": self.https,
        }


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

    @property
    def options(self) -> dict[str, Any]:
        """The same as options of the page."""
        return {
            "masked_keys": tuple(self.mask or ()),
            "mask_bodies": self.mask_bodies,
            "show_bodies": self.show_bodies,
            "trace_url": self.trace_url,
        }


@spread
def web(
    host: Annotated[str, typer.Option(help="The address it listens at; any but loopback wants a token.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="The port; 0 for a free one.", min=0, max=65_535)] = 8440,
    root_path: Annotated[str, option("What a proxy has before every path, as /relatum.", metavar="PATH")] = "",
    mcp: Annotated[
        bool, typer.Option("--mcp", help="Serve tools for agents, too, at /mcp (Model Context Protocol).")
    ] = False,
    *,
    access: Access,
    shown: Shown,
    servers: ServerOptions,
) -> None:
    """Serve a page, and a JSON API, to look at messages and what belongs to them, until SIGTERM or Ctrl-C.

    It only reads. On this machine (127.0.0.1) anybody may look; elsewhere it wants a token: that in the variable
    RELATUM_WEB_TOKEN, or one that it makes, and prints in its address. The address is printed to stdout.
    """
    with of_extra():
        from relatum_consumer.web import WebOptions
        from relatum_consumer.web.options import is_loopback
    token = os.environ.get("RELATUM_WEB_TOKEN") or None
    made = secrets.token_urlsafe(32) if token is None and not is_loopback(host) else None
    options = WebOptions(
        servers.broker_url,
        servers.database_url,
        servers.stream_url,
        host=host,
        port=port,
        root_path=root_path,
        mcp=mcp,
        token=token or made,
        **access.options,
        **shown.options,
    )
    serve(options, query=f"?token={made}" if made else "")


@spread
def mcp(*, shown: Shown, servers: ServerOptions) -> None:
    """Serve look-ups to an agent, as tools of the Model Context Protocol over stdin and stdout; they only read.

    Logs go to stderr. Over HTTP: `relatum web --mcp`.
    """
    with of_extra("mcp"):
        import anyio

        from relatum_consumer.web import WebOptions
        from relatum_consumer.web.mcp_server import over_stdio
    options = WebOptions(servers.broker_url, servers.database_url, servers.stream_url, **shown.options)
    anyio.run(over_stdio, options)
