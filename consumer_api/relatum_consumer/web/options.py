"""What the page is told when it starts."""

import ipaddress
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import urlsplit

from relatum.checks import checked_count, checked_seconds, shown
from relatum.errors import ConfigurationError
from relatum.reading import Broker

LOOPBACK_NAMES: Final = frozenset({"localhost", "127.0.0.1", "[::1]"})
"""What a browser on this machine may call it; a page of elsewhere whose name was turned to 127.0.0.1 is refused."""

TOKEN_MIN: Final = 16
"""Characters of a token at least: nothing keeps anybody from trying them."""

TRACE_ID: Final = "{trace_id}"
"""What stands in the URL of a trace for its id."""

_URL: Final = re.compile(r"[!#$%&()*+,\-./:;=?@\[\]_~0-9A-Za-z]+")
"""Characters of a URL: no space, no quote, and no brace."""


@dataclass(frozen=True, slots=True)
class WebOptions:
    """Where the page listens, what it stands on, and who may see what of it.

    Attributes:
        broker: The broker's URL, or a `Broker`; `read` on the streams is all that the page needs.
        database: PostgreSQL's URL; its sessions are read-only, whatever the role may do.
        host: The address it listens at. Any but a loopback one needs a `token`.
        port: The port; 0 for a free one. Default 8440.
        root_path: What stands before every path where a proxy serves the page below one, as "/relatum".
        hosts: Names by which the page may be called besides those of loopback: a request by another name is refused.
            Without them, and where it does not listen on loopback, any.
        token: What one needs to see the page: in its address once, as `?token=…`, or as `Authorization: Bearer …`; 16
            random characters of ASCII or more. None, on a loopback address alone, for anybody.
        is_https: Whether a proxy serves it by https: the cookie is then sent by https alone.
        masked_keys: Names of keys whose values are shown as digests, besides those that are masked by definition.
        mask_bodies: Whether bodies are not shown at all.
        show_bodies: Whether bodies are shown of messages that have a masked value, too: they may hold it.
        mcp: Whether tools for agents are there, too, at `/mcp`. Default False; needs the extra `mcp`.
        trace_url: The URL of a trace elsewhere, with `{trace_id}` in it: a message's page links to it where the message
            carries a trace's id (`traceparent`, `b3`); None for no link.
        timeout_s: Seconds for one look-up. Default 10.
        database_connections_max: Sessions of PostgreSQL at most. Default 6.
        drain_s: Seconds that requests under way have to end in, once it is told to stop. Default 10.

    Raises:
        ConfigurationError: they cannot go together, or would show the page to anyone.
    """

    broker: str | Broker = field(repr=False)
    database: str = field(repr=False)
    host: str = "127.0.0.1"
    port: int = 8440
    root_path: str = ""
    hosts: tuple[str, ...] = ()
    token: str | None = field(default=None, repr=False)
    is_https: bool = False
    masked_keys: tuple[str, ...] = ()
    mask_bodies: bool = False
    show_bodies: bool = False
    mcp: bool = False
    trace_url: str | None = None
    timeout_s: float = 10.0
    database_connections_max: int = 6
    drain_s: float = 10.0

    def __post_init__(self) -> None:
        checked_count("database_connections_max", self.database_connections_max)
        checked_count("port", self.port, least=0, most=65_535)
        checked_seconds("timeout_s", self.timeout_s)
        checked_seconds("drain_s", self.drain_s)
        if self.root_path and (not self.root_path.startswith("/") or self.root_path.endswith("/")):
            raise ConfigurationError(f"a root path begins with / and does not end with it, not {self.root_path!r}")
        if self.token is not None and not (len(self.token) >= TOKEN_MIN and self.token.isascii()):
            raise ConfigurationError(
                f"a token has {TOKEN_MIN} characters of ASCII at least: `openssl rand -hex 32` makes one"
            )
        if self.mask_bodies and self.show_bodies:
            raise ConfigurationError("bodies are masked (--mask-bodies) or shown (--show-bodies), not both")
        if self.trace_url is not None:
            _check_trace_url(self.trace_url)
        if not self.is_loopback and self.token is None:
            raise ConfigurationError(
                f"at {self.host} anyone could read all messages: give a token (`token=`, or RELATUM_WEB_TOKEN for "
                "`relatum web`), or listen at 127.0.0.1"
            )

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach it."""
        return is_loopback(self.host)

    @property
    def allowed_hosts(self) -> list[str]:
        """The names by which the page may be called; `*` for any."""
        return [*LOOPBACK_NAMES, *self.hosts] if self.is_loopback or self.hosts else ["*"]


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


def is_loopback(host: str) -> bool:
    """Whether an address is this machine's alone."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _check_trace_url(pattern: str) -> None:
    try:
        parts = urlsplit(pattern)
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and "@" not in parts.netloc
    except ValueError:
        is_url = False
    rest = pattern.replace(TRACE_ID, "")
    if not is_url or TRACE_ID not in pattern or TRACE_ID in parts.netloc or not _URL.fullmatch(rest):
        raise ConfigurationError(
            f"a trace's URL is as https://jaeger.example/trace/{TRACE_ID}: http or https, and {TRACE_ID} behind the "
            f"host; not {shown(pattern)}"
        )
