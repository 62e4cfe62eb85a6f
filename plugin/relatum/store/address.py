"""Parses the database's URL with libpq: several hosts, sockets, services, and Relatum's own options."""

import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import parse_qsl, quote, urlencode

import psycopg
from psycopg.conninfo import conninfo_to_dict
from sqlalchemy.engine import URL

from relatum.common.checks import checked_host, is_clean, shown
from relatum.errors import ConfigurationError

_SCHEMES: Final = ("postgresql", "postgres")

POOLER: Final = "pgbouncer"
"""Option: whether a pooler assigns sessions by transaction, so that statements must not be prepared."""

STATEMENT: Final = "statement_timeout_s"
"""Option: maximum seconds of a statement; 0: no limit."""

_FALSE_TEXTS: Final = frozenset({"", "0", "none", "off", "false", "no"})

_NOT_A_URL: Final = "the database must be a URL like postgresql://user@host:5432/name"

_INVALID_CHARACTERS: Final = "the database's URL contains a NUL character or a lone surrogate, which PostgreSQL refuses"

_INTEGER_OPTIONS: Final = (
    "connect_timeout", "keepalives", "keepalives_idle", "keepalives_interval", "keepalives_count", "tcp_user_timeout",
)  # fmt: skip
"""libpq's options that are whole numbers. libpq itself checks only some of them, and only when it connects."""


@dataclass(frozen=True, slots=True)
class DatabaseAddress:
    """The address of a database, with the login.

    `parameters` are libpq's in the URL, by libpq's names; several hosts and ports are separated by commas. `is_pooled`:
    Whether a pooler assigns sessions by transaction. None: each connection detects it. `statement_s`: The time limit of
    a statement that the URL sets, in seconds; 0: no limit. None: the URL sets none.
    """

    parameters: Mapping[str, str] = field(repr=False)
    is_pooled: bool | None = None
    statement_s: float | None = None

    def hosts(self) -> list[tuple[str, int | None]]:
        """Return each host with its port (None: libpq's default), in the order of attempts to connect."""
        hosts = (self.parameters.get("host") or self.parameters.get("hostaddr", "")).split(",")
        ports = self.parameters.get("port", "").split(",")
        if len(ports) == 1:
            ports *= len(hosts)
        if len(ports) != len(hosts):
            raise ConfigurationError("the numbers of hosts and ports in the database's URL do not match")
        return [(host, int(port) if port else None) for host, port in zip(hosts, ports, strict=True)]

    def url(self) -> URL:
        """Return the address for SQLAlchemy. Its query contains the hosts, since there may be several."""
        return URL.create(
            "postgresql+psycopg",
            username=self.parameters.get("user"),
            password=self.parameters.get("password"),
            database=self.parameters.get("dbname"),
            query={
                name: value for name, value in self.parameters.items() if name not in ("user", "password", "dbname")
            },
        )

    @property
    def name(self) -> str:
        """Hosts, ports and database for logs, without user and password."""
        hosts = ",".join(host if port is None else f"{host}:{port}" for host, port in self.hosts())
        return f"{hosts}/{self.parameters.get('dbname', '')}"


def parse_database(database: str | URL) -> DatabaseAddress:
    """Parse a URL like `postgresql://user:password@h1:5432,h2/name?target_session_attrs=read-write`.

    libpq itself parses the URL, so all of libpq's options are valid. `?pgbouncer=true` says that a pooler assigns
    sessions by transaction, and `?statement_timeout_s=` limits each statement. SQLAlchemy's scheme
    `postgresql+psycopg://` and its URL objects are also valid.

    Raises:
        ConfigurationError: the value is not a valid PostgreSQL URL; the message does not contain the URL.
    """
    if isinstance(database, URL):
        base, question, query = database.render_as_string(hide_password=False).partition("?")
        # SQLAlchemy leaves spaces as they are, which libpq refuses.
        database = f"{base.replace(' ', '%20')}{question}{query.replace('+', '%20')}"
    if not isinstance(database, str):
        raise ConfigurationError(f"database= takes PostgreSQL's URL, or a Database, not {shown(database)}")
    # libpq would ignore everything after a NUL, and psycopg cannot encode a lone surrogate.
    if not is_clean(database):
        raise ConfigurationError(_INVALID_CHARACTERS)
    scheme, separator, rest = database.strip().partition("://")
    kind = scheme.partition("+")[0].lower()
    if not separator:
        raise ConfigurationError(_NOT_A_URL)
    if kind not in _SCHEMES:
        raise ConfigurationError(f"the database's URL must begin with postgresql://, not {kind!r}")
    base, _, query = rest.partition("?")
    # libpq does not decode + as a space.
    options = parse_qsl(query.replace("+", "%2B"), keep_blank_values=True)
    for name, count in Counter(name for name, _ in options).items():
        if count > 1:
            raise ConfigurationError(f"the database's URL has {name} more than once (hosts are one list: h1:5432,h2)")
    libpq_options = dict(options)
    pooler, statement = libpq_options.pop(POOLER, None), libpq_options.pop(STATEMENT, None)
    parameters = _parsed(
        f"postgresql://{base}{'?' if libpq_options else ''}{urlencode(libpq_options, quote_via=quote)}"
    )
    is_pooled = None if pooler is None else pooler.lower() not in _FALSE_TEXTS
    address = DatabaseAddress(parameters, is_pooled, _seconds(statement))
    _check(address)
    return address


def _parsed(url: str) -> dict[str, str]:
    try:
        return {name: str(value) for name, value in conninfo_to_dict(url).items()}
    except psycopg.ProgrammingError as error:
        if "forbidden value %00" in str(error):
            raise ConfigurationError(_INVALID_CHARACTERS) from None
        # Only this message of libpq quotes no part of a password, except of one with a question mark.
        unknown = str(error).strip()
        if unknown.startswith("invalid URI query parameter") and "@" not in url.partition("?")[2].replace("%40", "@"):
            raise ConfigurationError(f"the database's URL has an option that libpq does not know: {unknown}") from None
        raise ConfigurationError(_NOT_A_URL) from None


def _seconds(text: str | None) -> float | None:
    if text is None:
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < math.inf:
        raise ConfigurationError(f"{STATEMENT} in the database's URL must be a number of seconds, at least 0")
    return seconds


def _check(address: DatabaseAddress) -> None:
    """Refuse passwords with `@`, `/` or `?` that are not percent-encoded: later errors would be misleading."""
    for name in _INTEGER_OPTIONS:
        if not re.fullmatch(r"\s*[+-]?\d{1,9}\s*", address.parameters.get(name, "0"), re.ASCII):
            raise ConfigurationError(f"{name} in the database's URL must be a whole number")
    if "@" in address.parameters.get("host", "").removeprefix("@"):
        raise ConfigurationError("the database's URL has an @ in its user's name or password: write it as %40")
    for host in address.parameters.get("host", "").split(","):
        if host.count(":") == 1:
            raise ConfigurationError(
                "the database's URL has a port in the option host: write it in ?port=, or host and port before the path"
            )
        if not host.startswith(("/", "@")):
            checked_host(host, "the database's URL")
    ports = address.parameters.get("port", "")
    if not all(port.isdecimal() and int(port) < 65_536 for port in ports.split(",") if port):
        raise ConfigurationError(
            f"{_NOT_A_URL}: its port is not a number up to 65535 (write / in a password as %2F, ? as %3F)"
        )
    address.hosts()
