"""`relatum web`: the page, until SIGTERM or Ctrl-C. What it needs of the extra `web` is imported when it runs."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from relatum.errors import ConfigurationError
from relatum.terminal import ServerOptions, spread
from relatum_consumer.web._serving import of_extra, serve

HASH_VARIABLE: Final = "RELATUM_WEB_PASSWORD_HASH"


@dataclass(frozen=True, slots=True)
class Access:
    """What a command line says of who may look."""

    host_name: Annotated[
        list[str] | None,
        typer.Option(help="A name by which it is called, besides localhost; repeatable.", show_default=False),
    ] = None
    password_file: Annotated[
        Path | None,
        typer.Option(
            help=f"A file with what --hash-password printed; else the variable {HASH_VARIABLE}.", show_default=False
        ),
    ] = None
    trust_header: Annotated[
        str | None,
        typer.Option(help="The header by which a proxy says who asks.", metavar="NAME", show_default=False),
    ] = None
    trusted_proxy: Annotated[
        list[str] | None,
        typer.Option(help="The proxy's network, as 10.0.0.0/8; repeatable.", metavar="CIDR", show_default=False),
    ] = None
    https: Annotated[bool, typer.Option("--https", help="A proxy serves it by https: cookies go by that alone.")] = (
        False
    )

    @property
    def options(self) -> dict[str, Any]:
        """The same as options of the page."""
        return {
            "hosts": tuple(self.host_name or ()),
            "password_hash": _password_hash(self.password_file),
            "trust_header": self.trust_header,
            "trusted_proxies": tuple(self.trusted_proxy or ()),
            "is_https": self.https,
        }


@dataclass(frozen=True, slots=True)
class Shown:
    """What a command line says of what is shown, and where it is written down who saw it."""

    mask: Annotated[
        list[str] | None,
        typer.Option(help="Show this key's values as digests; repeatable.", metavar="KEY", show_default=False),
    ] = None
    mask_bodies: Annotated[bool, typer.Option("--mask-bodies", help="Show no bodies.")] = False
    show_bodies: Annotated[
        bool, typer.Option("--show-bodies", help="Show bodies of messages that have a masked value, too.")
    ] = False
    trace_url: Annotated[
        str | None,
        typer.Option(
            help="Link messages to their traces: as https://jaeger.example/trace/{trace_id}.",
            metavar="URL",
            show_default=False,
        ),
    ] = None
    audit: Annotated[
        Path | None,
        typer.Option(help="Write who looked at what to this file; to the log where left out.", show_default=False),
    ] = None

    @property
    def options(self) -> dict[str, Any]:
        """The same as options of the page."""
        return {
            "masked_keys": tuple(self.mask or ()),
            "mask_bodies": self.mask_bodies,
            "show_bodies": self.show_bodies,
            "trace_url": self.trace_url,
            "audit_path": None if self.audit is None else str(self.audit),
        }


@spread
def web(
    host: Annotated[
        str, typer.Option(help="The address it listens at; any but loopback wants a password.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="The port; 0 for a free one.", min=0, max=65_535)] = 8440,
    root_path: Annotated[
        str, typer.Option(help="What a proxy has before every path, as /relatum.", metavar="PATH", show_default=False)
    ] = "",
    hash_password: Annotated[
        bool, typer.Option("--hash-password", help="Instead: ask for a password, and print what to keep of it.")
    ] = False,
    mcp: Annotated[
        bool, typer.Option("--mcp", help="Serve tools for agents, too, at /mcp (Model Context Protocol).")
    ] = False,
    *,
    access: Access,
    shown: Shown,
    servers: ServerOptions,
) -> None:
    """Serve a page, and a JSON API, to look at messages and what belongs to them, until SIGTERM or Ctrl-C.

    It only reads. On this machine (127.0.0.1) anybody may look; elsewhere it wants a password, or a proxy that says who
    asks. Its address is printed to stdout.
    """
    with of_extra():
        from relatum_consumer.web import WebOptions
        from relatum_consumer.web import hash_password as hashed
    if hash_password:
        typer.echo(hashed(typer.prompt("Password", hide_input=True, confirmation_prompt=True, err=True)))
        return
    options = WebOptions(
        servers.broker_url,
        servers.database_url,
        servers.stream_url,
        host=host,
        port=port,
        root_path=root_path,
        mcp=mcp,
        **access.options,
        **shown.options,
    )
    serve(options)


def _password_hash(file: Path | None) -> str | None:
    if file is None:
        return os.environ.get(HASH_VARIABLE)
    try:
        return file.read_text().strip()
    except OSError as error:
        raise ConfigurationError(f"the password's file cannot be read: {error}") from error
