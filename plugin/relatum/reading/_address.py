"""`Broker`, which users pass to connect, and `BrokerAddress`, its parsed form: hosts, ports, TLS and login."""

import re
import ssl
from collections.abc import Callable, Iterable
from dataclasses import KW_ONLY, dataclass, field, fields, replace
from functools import cached_property
from typing import Any, Final, Self, TypeAlias
from urllib.parse import SplitResult, unquote, urlsplit

from relatum.common.checks import checked_host, checked_text, shown
from relatum.errors import ConfigurationError, InvalidInput
from relatum.reading._login import (
    SSL_CONTEXT_NOT_PICKLABLE,
    AuthMechanism,
    BrokerLogin,
    HeldPassword,
    PasswordFunction,
    is_valid_password,
    login_of_query,
)

AMQP_TO_STREAM_PORT: Final = 120
"""RabbitMQ's default AMQP port minus its stream port: 5672 - 5552 without TLS, 5671 - 5551 with TLS."""

_PORTS: Final = {"amqp": 5672, "amqps": 5671, "rabbitmq-stream": 5552, "rabbitmq-stream+tls": 5551}
_TLS: Final = frozenset({"amqps", "rabbitmq-stream+tls"})
_STREAM: Final = frozenset({"rabbitmq-stream", "rabbitmq-stream+tls"})

_URL_SEPARATOR: Final = re.compile(r"[;,]\s*(?=(?:amqps?|rabbitmq-stream(?:\+tls)?)://|$)", re.IGNORECASE)
"""Separates several URLs. It requires a scheme to follow, because user names and passwords may contain `;` and `,`."""

_SEPARATOR: Final = re.compile("[;,]")


@dataclass(frozen=True)
class Broker:
    """A broker's addresses and the login to it. Pass it as `broker` if a URL alone is not enough.

    Immutable; compares by value. It can be sent to other processes unless it has an `ssl_context`, or a password
    function that cannot be pickled. `repr` does not show the password.

    Args:
        url: `amqp://`, `amqps://`, `rabbitmq-stream://` or `rabbitmq-stream+tls://`, with user, password, host, port
            and virtual host as usual. Query parameters for the login are those of RabbitMQ's URIs (`cacertfile`,
            `certfile`, `keyfile`, `password`, `verify`, `server_name_indication`, `auth_mechanism`) and aiormq's
            (`cafile`, `capath`, `cadata`, `no_verify_ssl`, `auth`). Others are ignored, each with one warning. To name
            several nodes of one cluster, separate whole URLs with the same virtual host by `;` or `,`: if a node does
            not answer, the next one is used ([ADR 42](../adr/0042-several-addresses.md)).
        stream_url: `rabbitmq-stream://HOST:PORT` or `rabbitmq-stream+tls://HOST:PORT`, where the broker must answer.
            Give as many as in `url`, in the same order. Omit it if `url` is a stream URL. None (default): the AMQP port
            minus 120, if the same broker answers there.
        ssl_context: The TLS context. None (default): a context with the files that the URL names, or the system's
            certificate authorities. It verifies certificate and host name unless the URL disables this.
        auth_mechanism: "PLAIN" logs in with user and password, "EXTERNAL" with the client certificate. None (default):
            the URL's, or "PLAIN".
        password: The password, instead of the URL's; or a function that returns the current one, such as a token. Each
            login calls the function in a separate thread, one call at a time, and waits up to 5 s. If the function
            raises or takes longer, the login fails with `BrokerUnavailable` and is retried; errors show only the type
            of what it raised or returned. None (default): the URL's.

    Raises:
        ConfigurationError: A URL cannot be parsed; its options contradict each other or the arguments; TLS options are
            given without TLS; several URLs have different virtual hosts, or not as many stream URLs. The message
            shows no password. TLS files are read later, when connecting.
        InvalidInput: The password is neither text nor a function, or the user, password or virtual host contains a NUL
            character or a lone surrogate.
    """

    url: str
    _: KW_ONLY
    stream_url: str | None = None
    ssl_context: ssl.SSLContext | None = None
    auth_mechanism: AuthMechanism | None = None
    password: str | Callable[[], str | None] | None = None

    def __post_init__(self) -> None:
        self._address  # noqa: B018 - parses the URL, to raise its errors now

    @property
    def vhost(self) -> str:
        """The virtual host."""
        return self._address.vhost

    @cached_property
    def _address(self) -> "BrokerAddress":
        # Cached, so that the users of one object share its calls of the password function.
        address = BrokerAddress.parse(self.url, self.stream_url)
        options: dict[str, Any] = {"ssl_context": self.ssl_context, "mechanism": self.auth_mechanism}
        options = {name: value for name, value in options.items() if value is not None}
        address = address._map(lambda one: replace(one, login=replace(one.login, **options)))
        return address if self.password is None else address.with_password(self.password)

    def __repr__(self) -> str:
        return f"Broker({str(self._address)!r})"

    def __getstate__(self) -> dict[str, Any]:
        if self.ssl_context is not None:
            raise ConfigurationError(SSL_CONTEXT_NOT_PICKLABLE)
        return {each.name: getattr(self, each.name) for each in fields(self)}


@dataclass(frozen=True, slots=True)
class BrokerAddress:
    """The parsed address of a broker. Neither `repr` nor `str` shows the password.

    A guessed stream port is derived from the AMQP port, and used only if the same broker answers there. `stream_port`
    is None if it cannot be derived. `others` are other nodes of the same cluster. `password_now` returns the current
    password: it is the user's function, or reads an intercepted connection. A pickled address contains the function,
    or the connection's current password.
    """

    host: str
    user: str = "guest"
    password: str = field(default="guest", repr=False)
    vhost: str = "/"
    amqp_port: int | None = None
    amqp_tls: bool = False
    stream_host: str = ""
    stream_port: int | None = None
    stream_tls: bool = False
    stream_port_guessed: bool = False
    login: BrokerLogin = field(default_factory=BrokerLogin)
    others: "tuple[BrokerAddress, ...]" = ()
    password_now: PasswordFunction | HeldPassword | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("user", "vhost"):
            checked_text(name, getattr(self, name))
        if not is_valid_password(self.password):
            raise InvalidInput("password= takes text without NUL characters and lone surrogates")
        if self.login.needs_tls and not (self.amqp_tls or self.stream_tls):
            raise ConfigurationError(
                "TLS options need a URL with TLS: amqps:// or rabbitmq-stream+tls://, not "
                f"{'amqp' if self.amqp_port else 'rabbitmq-stream'}://"
            )
        if any(other.vhost != self.vhost for other in self.others):
            raise ConfigurationError("several URLs of one broker must name the same virtual host")

    @classmethod
    def of(cls, broker: "AnyBroker") -> "BrokerAddress":
        """Return the address of `broker`. This checks TLS files, so that errors occur before anything connects."""
        if isinstance(broker, str):
            address: BrokerAddress = cls.parse(broker)
        elif isinstance(broker, Broker | BrokerAddress):
            address = broker._address if isinstance(broker, Broker) else broker
        else:
            raise InvalidInput(f"broker= takes a URL or a Broker, not {shown(broker)}")
        for each in address.each:
            if each.amqp_tls or each.stream_tls:
                each.login.tls_context()
        return address

    @property
    def each(self) -> "tuple[BrokerAddress, ...]":
        """The addresses of the single nodes, in the given order."""
        return (replace(self, others=()), *self.others) if self.others else (self,)

    def beside(self, others: "Iterable[BrokerAddress]") -> "BrokerAddress":
        """Return a copy of this address whose `others` are the nodes of the given addresses, without duplicates."""
        first = replace(self, others=())
        each = dict.fromkeys(node for other in others for node in other.each)
        return replace(first, others=tuple(other for other in each if other != first))

    def with_login(self, login: BrokerLogin) -> "BrokerAddress":
        """Return a copy of this address with another login for all nodes, which must use TLS if the login needs it."""
        return self._map(lambda one: replace(one, login=login))

    def with_password(self, password: str | Callable[[], str | None]) -> "BrokerAddress":
        """Return this address with another password or function, also for `others` with equal credentials."""
        mine = (self.user, self.password)
        if isinstance(password, str):
            changes: dict[str, Any] = {"password": password}
        elif callable(password):
            changes = {"password_now": password if isinstance(password, HeldPassword) else PasswordFunction(password)}
        else:
            raise InvalidInput(f"password= takes text or a function, not {type(password).__name__}")
        return self._map(lambda one: replace(one, **changes) if (one.user, one.password) == mine else one)

    def _map(self, change: "Callable[[BrokerAddress], BrokerAddress]") -> "BrokerAddress":
        first, *others = map(change, self.each)
        return replace(first, others=tuple(others))

    def secret(self) -> str:
        """Return the current password. If a password function is called, this blocks for up to 5 s."""
        now = None if self.password_now is None or self.login.mechanism != "PLAIN" else self.password_now()
        return self.password if now is None else now

    @property
    def password_function(self) -> PasswordFunction | None:
        return self.password_now if isinstance(self.password_now, PasswordFunction) else None

    def is_joined_by(self, other: "BrokerAddress") -> bool:
        """Return whether another connection has the same broker and user; if so, use its password from now on.

        True if the addresses are equal. If only the passwords differ, true if both connections have the same current
        password, or if this address's connections are closed. Two open connections with different passwords may be two
        users, because a token can come with any user name.
        """
        mine, theirs = self.password_now, other.password_now
        if self == other:
            password = None
        elif self._without_password() == other._without_password() and isinstance(mine, HeldPassword):
            password = other.secret()
            if not mine.is_orphaned and self.secret() != password:
                return False
        else:
            return False
        if isinstance(mine, HeldPassword) and isinstance(theirs, HeldPassword):
            mine.join(theirs, password)
        return True

    def _without_password(self) -> "BrokerAddress":
        return self._map(lambda one: replace(one, password=""))

    @property
    def who(self) -> str:
        """The user, in the form for error messages."""
        return f"the user {self.user!r}" if self.login.mechanism == "PLAIN" else "the client certificate's user"

    @classmethod
    def parse(cls, url: str, stream_url: str | None = None) -> Self:
        """Return the address of a URL, or of several. Arguments and errors are those of `Broker`."""
        urls = _split_urls(url)
        stream_urls = [None] * len(urls) if stream_url is None else _split_urls(stream_url)
        if len(urls) != len(stream_urls):
            raise ConfigurationError(f"Give as many stream URLs as AMQP URLs, not {len(stream_urls)} for {len(urls)}.")
        first, *others = (cls._of_pair(*pair) for pair in zip(urls, stream_urls, strict=True))
        return replace(first, others=tuple(others)) if others else first

    @classmethod
    def _of_pair(cls, url: str, stream_url: str | None) -> Self:
        address = cls._of(url)
        if stream_url is None:
            return address
        stream = cls._of(stream_url)
        if stream.stream_port_guessed or address.amqp_port is None:
            raise ConfigurationError("stream_url= takes a rabbitmq-stream:// URL, and only if url= is an amqp:// URL.")
        if stream.login.needs_tls and address.login.needs_tls and stream.login != address.login:
            raise ConfigurationError("The broker's URL and the stream URL have different TLS options: give one set.")
        return replace(
            address,
            login=address.login if address.login.needs_tls else stream.login,
            stream_host=stream.stream_host,
            stream_port=stream.stream_port,
            stream_tls=stream.stream_tls,
            stream_port_guessed=False,
        )

    @classmethod
    def _of(cls, url: str) -> Self:
        parts, port = _parse_url(url)
        is_stream, is_tls = parts.scheme in _STREAM, parts.scheme in _TLS
        guess = port - AMQP_TO_STREAM_PORT
        return cls(
            host=parts.hostname or "localhost",
            user=unquote(parts.username) if parts.username is not None else "guest",
            password=unquote(parts.password) if parts.password is not None else "guest",
            vhost=unquote(parts.path[1:]) if len(parts.path) > 1 else "/",
            amqp_port=None if is_stream else port,
            amqp_tls=is_tls and not is_stream,
            stream_host=parts.hostname or "localhost",
            stream_port=port if is_stream else guess if guess > 0 else None,
            stream_tls=is_tls,
            stream_port_guessed=not is_stream,
            login=login_of_query(parts.query),
        )

    @property
    def where(self) -> str:
        """Host and port, in the form for error messages."""
        return f"{self.host}:{self.amqp_port or self.stream_port}"

    def __reduce__(self) -> tuple[Any, ...]:
        sent = self
        if isinstance(self.password_now, HeldPassword):
            sent = replace(self, password=self.secret(), password_now=None)
        return BrokerAddress, tuple(getattr(sent, each.name) for each in fields(sent))

    def __str__(self) -> str:
        port, tls = (self.amqp_port, self.amqp_tls) if self.amqp_port else (self.stream_port, self.stream_tls)
        scheme = ("amqps" if tls else "amqp") if self.amqp_port else f"rabbitmq-stream{'+tls' if tls else ''}"
        user = f"{self.user}@" if self.login.mechanism == "PLAIN" else ""
        others = f" (or {', '.join(other.where for other in self.others)})" if self.others else ""
        return f"{scheme}://{user}{self.host}:{port}{'' if self.vhost == '/' else '/' + self.vhost}{others}"


AnyBroker: TypeAlias = str | Broker | BrokerAddress
"""A URL or a `Broker` from users, or a parsed address from another component."""


def _split_urls(urls: str) -> list[Any]:
    found = [url.strip() for url in _URL_SEPARATOR.split(urls) if url.strip()] if isinstance(urls, str) else []
    return found or [urls]


def _parse_url(url: str) -> tuple[SplitResult, int]:
    if not isinstance(url, str):
        raise ConfigurationError(f"A broker's URL must be text, not {type(url).__name__}.")
    scheme = url.partition("://")[0].lower()
    if scheme not in _PORTS:
        raise ConfigurationError(f"A broker's URL must begin with one of {', '.join(f'{name}://' for name in _PORTS)}.")
    # Messages show no part of the URL, because it may be the password's. Those of `urlsplit` would show some.
    try:
        parts = urlsplit(url)
    except ValueError:
        raise ConfigurationError(
            "The broker's URL cannot be read: an IPv6 address is written as [::1]:5672, and [ and ] in a password "
            "as %5B and %5D."
        ) from None
    _check_quoted(parts)
    try:
        port = parts.port
    except ValueError:
        raise ConfigurationError(
            "The port in the broker's URL is not a number from 1 to 65535. An IPv6 address is written as [::1]:5672."
        ) from None
    if _SEPARATOR.search(parts.hostname or ""):
        raise ConfigurationError("Each of several URLs of a broker must be complete: amqp://…;amqp://…")
    checked_host(parts.hostname or "localhost", "The broker's URL")
    return parts, port if port is not None else _PORTS[parts.scheme]


def _check_quoted(parts: SplitResult) -> None:
    """Raise if an unquoted `/`, `?` or `#` in the password ended the host, so that an `@` follows."""
    rest = parts.path + parts.fragment + ("" if "@" in parts.netloc else parts.query)
    if "@" in rest:
        raise ConfigurationError(
            "The broker's URL has an @ after the host: percent-encode special characters of user, password and virtual "
            "host (@ as %40, / as %2F, : as %3A, ? as %3F, # as %23)."
        )
