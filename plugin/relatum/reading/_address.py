"""Where a broker is, by which protocols, and who asks: taken from one URL or two."""

import ssl
from dataclasses import dataclass, field, replace
from typing import Any, Final, Self
from urllib.parse import SplitResult, unquote, urlsplit

from relatum.checks import checked_count, checked_text, shown
from relatum.errors import ConfigurationError, InvalidInput
from relatum.reading._login import AuthMechanism, BrokerLogin
from relatum.reading._login_query import login_of_query
from relatum.wire import checked_host

AMQP_TO_STREAM_PORT: Final = 120
"""How far RabbitMQ's default stream ports lie below its AMQP ports: 5672 and 5552, 5671 and 5551."""

PORT_MAX: Final = 65_535
"""The highest port of TCP."""

_PORTS: Final = {"amqp": 5672, "amqps": 5671, "rabbitmq-stream": 5552, "rabbitmq-stream+tls": 5551}
_TLS: Final = frozenset({"amqps", "rabbitmq-stream+tls"})
_STREAM: Final = frozenset({"rabbitmq-stream", "rabbitmq-stream+tls"})


@dataclass(frozen=True, slots=True)
class BrokerAddress:
    """A broker's address. Neither `repr` nor `str` shows the password.

    Attributes:
        host: Host name or address of the AMQP 0.9.1 port, and of the stream port unless `stream_host` is given.
        user: User name.
        password: Password.
        vhost: Virtual host.
        amqp_port: Port of AMQP 0.9.1; None where only a stream URL was given.
        amqp_tls: True for amqps.
        stream_host: Host of the stream port.
        stream_port: Port of the stream protocol; None where it cannot be guessed.
        stream_tls: True for rabbitmq-stream+tls.
        stream_port_guessed: True where the stream port was derived from the AMQP port. It is then used only when the
            same broker answers there.
        login: What TLS trusts and shows, and whether a password or a client certificate logs in.

    Raises:
        ConfigurationError: `login` asks for TLS, and neither port has it.
        InvalidInput: a name is no text, or a port no number.
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

    def __post_init__(self) -> None:
        checked_text("host", self.host, least=1, what="a name")
        for name in ("user", "vhost", "stream_host"):
            checked_text(name, getattr(self, name))
        if not _can_be_sent(self.password):
            raise InvalidInput("password= takes text without NUL characters and halves of surrogate pairs")
        for name in ("amqp_port", "stream_port"):
            if getattr(self, name) is not None:
                checked_count(name, getattr(self, name), least=0, most=PORT_MAX, otherwise=", or None")
        if not isinstance(self.login, BrokerLogin):
            raise InvalidInput(f"login= takes a BrokerLogin, not {shown(self.login)}")
        if self.login.is_of_tls and not (self.amqp_tls or self.stream_tls):
            raise ConfigurationError(
                "options of TLS need a URL with TLS: amqps:// or rabbitmq-stream+tls://, not "
                f"{'amqp' if self.amqp_port else 'rabbitmq-stream'}://"
            )

    @classmethod
    def of(
        cls,
        broker: "str | BrokerAddress",
        stream_url: str | None = None,
        *,
        ssl_context: ssl.SSLContext | None = None,
        auth_mechanism: AuthMechanism | None = None,
    ) -> "BrokerAddress":
        """The address that is meant, checked before anything connects: files of TLS are there and fit together.

        Args:
            broker: A URL, as of `parse`, or an address.
            stream_url: As of `parse`; an address says so itself.
            ssl_context: The TLS context; None: what `broker` says.
            auth_mechanism: "PLAIN" or "EXTERNAL"; None: what `broker` says.

        Raises:
            ConfigurationError: the URL cannot be read, its options cannot be, or contradict these.
            InvalidInput: `broker` is neither URL nor address.
        """
        if isinstance(broker, str):
            address: BrokerAddress = cls.parse(broker, stream_url)
        elif isinstance(broker, BrokerAddress):
            address = broker
        else:
            raise InvalidInput(f"broker= takes a URL or a BrokerAddress, not {shown(broker)}")
        asked: dict[str, Any] = {"ssl_context": ssl_context, "mechanism": auth_mechanism}
        asked = {name: value for name, value in asked.items() if value is not None}
        if asked:
            address = replace(address, login=replace(address.login, **asked))
        if address.amqp_tls or address.stream_tls:
            address.login.tls_context()
        return address

    @property
    def who(self) -> str:
        """Who logs in, as errors name it."""
        return f"the user {self.user!r}" if self.login.mechanism == "PLAIN" else "the client certificate's user"

    @classmethod
    def parse(cls, url: str, stream_url: str | None = None) -> Self:
        """The address in a URL.

        Args:
            url: `amqp://`, `amqps://`, `rabbitmq-stream://` or `rabbitmq-stream+tls://`, with user, password, host,
                port and virtual host as usual. Query parameters are those of RabbitMQ's URIs that are about logging in
                (`cacertfile`, `certfile`, `keyfile`, `password`, `verify`, `server_name_indication`,
                `auth_mechanism`), aiormq's (`cafile`, `capath`, `cadata`, `no_verify_ssl`, `auth`) and pika's
                (`ssl_options`); their other ones are ignored.
            stream_url: Where the stream protocol is, when `url` is an AMQP URL and its stream port is not the usual
                distance away.

        Raises:
            ConfigurationError: A URL cannot be read, has a parameter that nobody knows, or options of TLS without TLS;
                the message does not show it.
        """
        address = cls._of(url)
        if stream_url is None:
            return address
        stream = cls._of(stream_url)
        if stream.stream_port_guessed or address.amqp_port is None:
            raise ConfigurationError("A stream URL beside the broker's URL must be rabbitmq-stream://HOST:PORT.")
        if stream.login.is_of_tls and address.login.is_of_tls and stream.login != address.login:
            raise ConfigurationError(
                "The broker's URL and the stream URL have different options of TLS: give them once."
            )
        return replace(
            address,
            login=address.login if address.login.is_of_tls else stream.login,
            stream_host=stream.stream_host,
            stream_port=stream.stream_port,
            stream_tls=stream.stream_tls,
            stream_port_guessed=False,
        )

    @classmethod
    def _of(cls, url: str) -> Self:
        parts, port = _split(url)
        tls = parts.scheme in _TLS
        common = cls(
            host=parts.hostname or "localhost",
            user=unquote(parts.username) if parts.username is not None else "guest",
            password=unquote(parts.password) if parts.password is not None else "guest",
            vhost=unquote(parts.path[1:]) if len(parts.path) > 1 else "/",
            stream_host=parts.hostname or "localhost",
        )
        login = login_of_query(parts.query)
        if parts.scheme in _STREAM:
            return replace(common, stream_port=port, stream_tls=tls, login=login)
        guess = port - AMQP_TO_STREAM_PORT
        return replace(
            common,
            amqp_port=port,
            amqp_tls=tls,
            stream_tls=tls,
            login=login,
            stream_port=guess if guess > 0 else None,
            stream_port_guessed=True,
        )

    def __str__(self) -> str:
        port, tls = (self.amqp_port, self.amqp_tls) if self.amqp_port else (self.stream_port, self.stream_tls)
        scheme = ("amqps" if tls else "amqp") if self.amqp_port else f"rabbitmq-stream{'+tls' if tls else ''}"
        user = f"{self.user}@" if self.login.mechanism == "PLAIN" else ""
        return f"{scheme}://{user}{self.host}:{port}{'' if self.vhost == '/' else '/' + self.vhost}"


def _can_be_sent(password: Any) -> bool:
    """Asked without an error that would show it."""
    return isinstance(password, str) and "\0" not in password and password == password.encode(errors="ignore").decode()


def _split(url: str) -> tuple[SplitResult, int]:
    if not isinstance(url, str):
        raise ConfigurationError(f"A broker's URL is text, not {type(url).__name__}.")
    scheme = url.partition("://")[0].lower()
    if scheme not in _PORTS:
        raise ConfigurationError(f"A broker's URL begins with one of {', '.join(f'{name}://' for name in _PORTS)}.")
    # No error shows a part of the URL: it may be one of the password. Those of `urlsplit` would.
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
            "The port in the broker's URL is no number from 1 to 65535 (an IPv6 address is written as [::1]:5672)."
        ) from None
    checked_host(parts.hostname or "localhost", "The broker's URL")
    return parts, port if port is not None else _PORTS[parts.scheme]


def _check_quoted(parts: SplitResult) -> None:
    """Refuse what an unquoted `/`, `?` or `#` in a password makes of a URL: a host that is a part of the password."""
    rest = parts.path + parts.fragment + ("" if "@" in parts.netloc else parts.query)
    if "@" in rest:
        raise ConfigurationError(
            "The broker's URL has an @ behind the host: percent-encode special characters of the user's name, the "
            "password and the virtual host (@ as %40, / as %2F, : as %3A, ? as %3F, # as %23)."
        )
