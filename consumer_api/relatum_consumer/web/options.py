"""The options of the page."""

import ipaddress
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

from relatum.common.checks import checked_count, checked_seconds
from relatum.errors import ConfigurationError
from relatum.reading import Broker

LOOPBACK_NAMES: Final = frozenset({"localhost", "127.0.0.1", "[::1]"})
"""Host names of a page on loopback. It refuses other names: DNS rebinding points a foreign name at 127.0.0.1."""

TIMEOUT_S_MAX: Final = 86_400.0

TOKEN_MIN: Final = 16
"""Minimum characters of a token: the page does not limit guesses."""


@dataclass(frozen=True, slots=True)
class WebOptions:
    """The options of the page: address, servers, access, masking, limits.

    Attributes:
        broker: The broker's URL, or a `Broker`. The page only needs the permission `read` on the streams.
        database: PostgreSQL's URL. Sessions are read-only, regardless of the role's rights.
        host: The address to listen on. Default: 127.0.0.1. Addresses other than loopback need a `token`.
        port: The port. Default: 8440. 0 chooses a free port.
        root_path: The prefix of all paths if a proxy serves the page below a path, such as "/relatum". Default: empty.
        hosts: Host names of the page, besides `host` and loopback's names; requests with other names are refused.
            Default: only these names on a loopback address, any name elsewhere.
        token: The secret for access: at least 16 random ASCII characters. Send it once in the URL as `?token=…`, or as
            `Authorization: Bearer …`. Default: None, free access, which only a loopback address allows.
        is_https: Whether a proxy serves the page over https; the cookie is then sent only over https. Default: False.
        masked_keys: Names of keys whose values are shown as digests, besides keys masked by definition.
        mask_bodies: Whether to hide all bodies. Default: False.
        show_bodies: Whether to show bodies that may contain a masked value. Default: False.
        mcp: Whether to serve tools for agents at `/mcp`; needs the extra `mcp`. Default: False.
        timeout_s: How long one lookup may take, in seconds, at most a day; an answer, three times as long. Default: 10.
        database_connections_max: Maximum number of PostgreSQL sessions for lookups. Default: 6.

    Raises:
        ConfigurationError: an option is invalid, options exclude each other, or the page would be open to anyone.
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
    timeout_s: float = 10.0
    database_connections_max: int = 6

    def __post_init__(self) -> None:
        checked_count("database_connections_max", self.database_connections_max)
        checked_count("port", self.port, least=0, most=65_535)
        checked_seconds("timeout_s", self.timeout_s, most=TIMEOUT_S_MAX)
        if self.root_path and (not self.root_path.startswith("/") or self.root_path.endswith("/")):
            raise ConfigurationError(f"root_path={self.root_path!r} must begin with / and must not end with /")
        if self.token is not None and not (len(self.token) >= TOKEN_MIN and self.token.isascii()):
            raise ConfigurationError(
                f"a token needs at least {TOKEN_MIN} ASCII characters: `openssl rand -hex 32` generates one"
            )
        if self.mask_bodies and self.show_bodies:
            raise ConfigurationError("bodies cannot be both masked and shown: choose --mask-bodies or --show-bodies")
        if not is_loopback(self.host) and self.token is None:
            raise ConfigurationError(
                f"on {self.host} anyone could read all messages: give a token (`token=`, or RELATUM_WEB_TOKEN for "
                "`relatum web`), or listen on 127.0.0.1"
            )

    @property
    def allowed_hosts(self) -> list[str]:
        """The host names of requests that the page accepts; `*` for any."""
        return [*LOOPBACK_NAMES, self.host, *self.hosts] if is_loopback(self.host) or self.hosts else ["*"]


@contextmanager
def of_extra(extra: str = "web") -> Iterator[None]:
    """Turn an `ImportError` in the block into a `ConfigurationError` that says how to install the extra."""
    try:
        yield
    except ImportError as error:
        raise ConfigurationError(f"the extra {extra!r} is missing: pip install 'relatum[{extra}]' ({error})") from error


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
