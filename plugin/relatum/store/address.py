"""The database's URL, read as libpq reads it: several hosts, sockets, services, and what Relatum adds to it."""

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

from relatum.checks import checked_host, shown
from relatum.errors import ConfigurationError

_SCHEMES: Final = ("postgresql", "postgres")

PREPARE: Final = "prepare_threshold"
"""The option that says after how many executions a statement is prepared in the server; none or 0: never."""

POOLER: Final = "pgbouncer"
"""The option that says that a pooler hands out sessions by transaction: nothing is prepared."""

STATEMENT: Final = "statement_timeout_s"
"""The option that says how many seconds one statement may take; 0: any number."""

POOL_SIZE: Final = "pool_size"
"""The option that says how many connections are kept; as many again may be opened."""

POOL: Final = "pool_timeout_s"
"""The option that says how many seconds are waited for a connection while all are in use."""

_LIMITS: Final = (STATEMENT, POOL_SIZE, POOL)

_OFF: Final = frozenset({"", "0", "none", "off", "false", "no"})

_NO_URL: Final = "the database must be a URL like postgresql://user@host:5432/name"

_NO_CHARACTERS: Final = "the database's URL has a NUL character or half a surrogate pair, which PostgreSQL cannot take"

_NUMBERS: Final = (
    "connect_timeout", "keepalives", "keepalives_idle", "keepalives_interval", "keepalives_count", "tcp_user_timeout",
)  # fmt: skip
"""Options of libpq's that are whole numbers. It says so of some when it connects, and psycopg in words of its own."""


@dataclass(frozen=True, slots=True)
class DatabaseAddress:
    """Where a database is, and how to log in.

    Attributes:
        parameters: What the URL gives of libpq's parameters, by libpq's names; several hosts and ports have commas
            between them. What is missing there comes from the environment, a service or libpq's defaults.
        prepare_threshold: After how many executions a statement is prepared in the server; None where that is found
            out when connecting, 0 for never.
        limits: What the URL says of time-outs and the pool, by the options' names.
    """

    parameters: Mapping[str, str] = field(repr=False)
    prepare_threshold: int | None = None
    limits: Mapping[str, float] = field(default_factory=dict)

    def hosts(self) -> list[tuple[str, int | None]]:
        """Each host with its port, in the order they are tried; None where libpq's default holds.

        Raises:
            ConfigurationError: there are ports for other hosts than those that are named.
        """
        hosts = (self.parameters.get("host") or self.parameters.get("hostaddr", "")).split(",")
        ports = self.parameters.get("port", "").split(",")
        if len(ports) == 1:
            ports *= len(hosts)
        if len(ports) != len(hosts):
            raise ConfigurationError("the database's URL lists hosts and ports that do not go together")
        return [(host, int(port) if port else None) for host, port in zip(hosts, ports, strict=True)]

    def url(self) -> URL:
        """As SQLAlchemy has it: a single host in its place, several in the query."""
        (host, port), *others = self.hosts()
        is_placed = not others and not host.startswith(("/", "@"))
        placed = ("user", "password", "dbname", *(("host", "port") if is_placed else ()))
        return URL.create(
            "postgresql+psycopg",
            username=self.parameters.get("user"),
            password=self.parameters.get("password"),
            host=(host or None) if is_placed else None,
            port=port if is_placed else None,
            database=self.parameters.get("dbname"),
            query={name: value for name, value in self.parameters.items() if name not in placed},
        )

    @property
    def name(self) -> str:
        """Its hosts with their ports, and the database, without user and password: for the log."""
        hosts = ",".join(host if port is None else f"{host}:{port}" for host, port in self.hosts())
        return f"{hosts}/{self.parameters.get('dbname', '')}"


def parse_database(database: str | URL) -> DatabaseAddress:
    """The address that a URL names: `postgresql://user:password@h1:5432,h2/name?target_session_attrs=read-write`.

    All that libpq takes is taken, and read by libpq itself. Besides, `?prepare_threshold=` and `?pgbouncer=true` say
    whether statements are prepared; `?statement_timeout_s=`, `?pool_size=` and `?pool_timeout_s=` say how long is
    waited, and how many connections are kept. SQLAlchemy's `postgresql+psycopg://` is understood, and so
    are its URLs.

    Raises:
        ConfigurationError: the text is no PostgreSQL URL; the message does not show it.
    """
    if isinstance(database, URL):
        base, question, query = database.render_as_string(hide_password=False).partition("?")
        database = f"{base}{question}{query.replace('+', '%20')}"
    if not isinstance(database, str):
        raise ConfigurationError(f"database= takes PostgreSQL's URL, or a Database, not {shown(database)}")
    _check_characters(database)
    scheme, separator, rest = database.strip().partition("://")
    kind = scheme.partition("+")[0].lower()
    if not separator:
        raise ConfigurationError(_NO_URL)
    if kind not in _SCHEMES:
        raise ConfigurationError(f"Relatum keeps its table in PostgreSQL, not in {kind!r}")
    base, _, query = rest.partition("?")
    # + is no blank to libpq.
    options = parse_qsl(query.replace("+", "%2B"), keep_blank_values=True)
    for name, count in Counter(name for name, _ in options).items():
        if count > 1:
            raise ConfigurationError(f"the database's URL has {name} more than once (hosts are one list: h1:5432,h2)")
    ours = {name: value for name, value in options if name in (PREPARE, POOLER, *_LIMITS)}
    theirs = [(name, value) for name, value in options if name not in ours]
    parameters = _parsed(f"postgresql://{base}{'?' if theirs else ''}{urlencode(theirs, quote_via=quote)}")
    address = DatabaseAddress(parameters, _threshold(ours), _limits(ours))
    _check(address)
    return address


def _parsed(url: str) -> dict[str, str]:
    try:
        return {name: str(value) for name, value in conninfo_to_dict(url).items()}
    except psycopg.ProgrammingError as error:
        if "forbidden value %00" in str(error):
            raise ConfigurationError(_NO_CHARACTERS) from None
        # Only this of libpq's texts shows no part of a password, unless that holds a question mark.
        unknown = str(error).strip()
        if unknown.startswith("invalid URI query parameter") and "@" not in url.partition("?")[2].replace("%40", "@"):
            raise ConfigurationError(f"the database's URL has an option that libpq does not know: {unknown}") from None
        raise ConfigurationError(_NO_URL) from None


def _threshold(ours: Mapping[str, str]) -> int | None:
    if POOLER in ours:
        return 0 if ours[POOLER].lower() not in _OFF else None
    if PREPARE not in ours:
        return None
    text = ours[PREPARE].lower()
    if text in _OFF:
        return 0
    if not text.isdecimal():
        raise ConfigurationError(f"{PREPARE} in the database's URL is a number, or none")
    return int(text)


def _limits(ours: Mapping[str, str]) -> dict[str, float]:
    found: dict[str, float] = {}
    for name in set(ours).intersection(_LIMITS):
        try:
            found[name] = int(ours[name]) if name == POOL_SIZE else float(ours[name])
        except ValueError:
            found[name] = -1.0
        if not (1 if name == POOL_SIZE else 0) <= found[name] < math.inf:
            what = "a number from 1 on" if name == POOL_SIZE else "a number of seconds from 0 on"
            raise ConfigurationError(f"{name} in the database's URL is {what}")
    return found


def _check_characters(text: str) -> None:
    """Refuse what libpq would read the beginning of, or psycopg not encode: a NUL, half a surrogate pair."""
    if "\0" in text or text != text.encode(errors="ignore").decode():
        raise ConfigurationError(_NO_CHARACTERS)


def _check(address: DatabaseAddress) -> None:
    """Refuse a password's `@`, `/` or `?` that is not percent-encoded: later errors would be misleading."""
    for name in _NUMBERS:
        if not re.fullmatch(r"\s*[+-]?\d{1,9}\s*", address.parameters.get(name, "0"), re.ASCII):
            raise ConfigurationError(f"{name} in the database's URL is a whole number")
    if "@" in address.parameters.get("host", "").removeprefix("@"):
        raise ConfigurationError("in the database's URL, write @ in a user's name or a password as %40")
    for host in address.parameters.get("host", "").split(","):
        if host.count(":") == 1:
            raise ConfigurationError("in the database's URL, a port follows its host, or is in ?port=1,2")
        if not host.startswith(("/", "@")):
            checked_host(host, "the database's URL")
    ports = address.parameters.get("port", "")
    if not all(port.isdecimal() and int(port) < 65_536 for port in ports.split(",") if port):
        raise ConfigurationError(
            f"{_NO_URL}: its port is no number up to 65535 (write / in a password as %2F, ? as %3F)"
        )
    address.hosts()
