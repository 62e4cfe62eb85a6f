"""What the page is told when it starts."""

import ipaddress
from dataclasses import dataclass, field
from typing import Final

from relatum.checks import checked_count, checked_seconds
from relatum.errors import ConfigurationError
from relatum_consumer.web._passwords import check_hash
from relatum_consumer.web._traces_elsewhere import check_trace_url

LOOPBACK_NAMES: Final = frozenset({"localhost", "127.0.0.1", "[::1]"})
"""What a browser on this machine may call it; a page of elsewhere whose name was turned to 127.0.0.1 is refused."""


_COUNTS: Final = ("requests_per_s", "requests_burst", "requests_at_once", "bytes_per_s", "max_connections")


@dataclass(frozen=True, slots=True)
class WebOptions:
    """Where the page listens, what it stands on, who may see what of it, and how much of it at once.

    Attributes:
        broker: The broker's URL; `read` on the streams is all that the page needs.
        database: PostgreSQL's URL; its sessions are read-only, whatever the role may do.
        stream_url: Where the stream protocol is, if that cannot be told from the broker's URL.
        host: The address it listens at. Any but a loopback one needs `password_hash` or `trust_header`.
        port: The port; 0 for a free one. Default 8440.
        root_path: What stands before every path where a proxy serves the page below one, as "/relatum".
        hosts: Names by which the page may be called besides those of loopback: a request by another name is refused.
            Without them, and where it does not listen on loopback, any.
        password_hash: What `relatum web --hash-password` printed; None for no password.
        trust_header: A header by which a proxy names the person; only of requests from `trusted_proxies`.
        trusted_proxies: Networks, as "10.0.0.0/8".
        is_https: Whether a proxy serves it by https: cookies are then sent by https alone.
        masked_keys: Names of keys whose values are shown as digests, besides those that are masked by definition.
        mask_bodies: Whether bodies are not shown at all.
        show_bodies: Whether bodies are shown of messages that have a masked value, too: they may hold it.
        mcp: Whether tools for agents are there, too, at `/mcp`. Default False; needs the extra `mcp`.
        trace_url: The URL of a trace elsewhere, with `{trace_id}` in it: a message's page links to it where the message
            carries a trace's id (`traceparent`, `b3`); None for no link.
        audit_path: A file that a line of JSON is added to for each request; None for the log `relatum.web.audit`.
        requests_per_s: Requests a second of one client, over time. Default 20.
        requests_burst: Requests of one client in a moment. Default 100.
        requests_at_once: Requests of one client under way. Default 12.
        bytes_per_s: Bytes a second of one client, over time; ten times as many in a moment. Default 16 MiB.
        timeout_s: Seconds for one look-up. Default 10.
        max_connections: Sessions of PostgreSQL at most. Default 6.
        drain_s: Seconds that requests under way have to end in, once it is told to stop. Default 10.

    Raises:
        ConfigurationError: they cannot go together, or would show the page to anyone.
    """

    broker: str = field(repr=False)
    database: str = field(repr=False)
    stream_url: str | None = field(default=None, repr=False)
    host: str = "127.0.0.1"
    port: int = 8440
    root_path: str = ""
    hosts: tuple[str, ...] = ()
    password_hash: str | None = field(default=None, repr=False)
    trust_header: str | None = None
    trusted_proxies: tuple[str, ...] = ()
    is_https: bool = False
    masked_keys: tuple[str, ...] = ()
    mask_bodies: bool = False
    show_bodies: bool = False
    mcp: bool = False
    trace_url: str | None = None
    audit_path: str | None = None
    requests_per_s: int = 20
    requests_burst: int = 100
    requests_at_once: int = 12
    bytes_per_s: int = 16 << 20
    timeout_s: float = 10.0
    max_connections: int = 6
    drain_s: float = 10.0

    def __post_init__(self) -> None:
        for name in _COUNTS:
            checked_count(name, getattr(self, name))
        checked_count("port", self.port, least=0, most=65_535)
        checked_seconds("timeout_s", self.timeout_s)
        checked_seconds("drain_s", self.drain_s)
        if self.root_path and (not self.root_path.startswith("/") or self.root_path.endswith("/")):
            raise ConfigurationError(f"a root path begins with / and does not end with it, not {self.root_path!r}")
        if self.password_hash is not None:
            check_hash(self.password_hash)
        if self.mask_bodies and self.show_bodies:
            raise ConfigurationError("bodies are masked (--mask-bodies) or shown (--show-bodies), not both")
        for network in self.trusted_proxies:
            self._check_network(network)
        if self.trace_url is not None:
            check_trace_url(self.trace_url)
        if (self.trust_header is None) != (not self.trusted_proxies):
            raise ConfigurationError(
                "a header is trusted of a proxy that is named: --trust-header with --trusted-proxy"
            )
        if not self.is_loopback and self.password_hash is None and self.trust_header is None:
            raise ConfigurationError(
                f"at {self.host} anyone could read all messages: give a password (--password-file, made by "
                "`relatum web --hash-password`) or name a proxy that tells who asks (--trust-header), or listen at "
                "127.0.0.1"
            )

    def _check_network(self, network: str) -> None:
        try:
            ipaddress.ip_network(network)
        except ValueError as error:
            raise ConfigurationError(f"{network!r} is no network of a proxy, as 10.0.0.0/8 is: {error}") from None

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach it."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    @property
    def allowed_hosts(self) -> frozenset[str]:
        """The names by which the page may be called; none for any."""
        if self.is_loopback or self.hosts:
            return LOOPBACK_NAMES | {host.lower() for host in self.hosts}
        return frozenset()
