"""The login to a broker: certificate authorities and certificates, the SASL mechanism, and changing passwords.

Each login gets the current password, which may change while a process runs.
`PasswordFunction` wraps a user's function, which may request a token from a server, raise, or never return. It runs in
a separate thread, one call at a time, and a login waits a few seconds for it. Its error message may contain the secret,
and is never shown. `HeldPassword` reads the password with which an intercepted connection would log in; aio-pika's
`update_secret`, for example, changes it. Connections with equal logins share one recorder, so it may read several: the
latest change applies, even after that connection has closed.
"""

import base64
import logging
import os
import ssl
import weakref
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass, field, fields
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias
from urllib.parse import parse_qsl

from relatum.common.checks import checked_text, is_clean, seconds_text, shown
from relatum.common.waiting import Threads, left_s
from relatum.errors import BrokerUnavailable, ConfigurationError

logger = logging.getLogger("relatum.broker")

AuthMechanism: TypeAlias = Literal["PLAIN", "EXTERNAL"]
"""The SASL mechanism: PLAIN uses user and password, EXTERNAL the client certificate of the TLS connection."""

MECHANISMS: Final = ("PLAIN", "EXTERNAL")

NO_SERVER_NAME: Final = "disable"
"""RabbitMQ's value of `server_name_indication` to send no server name, and to verify none."""

CONTEXTS_MAX: Final = 64
"""Maximum cached TLS contexts: more than a process has logins."""

SSL_CONTEXT_NOT_PICKLABLE: Final = "an ssl_context cannot be sent to another process: name its files in the URL instead"

PASSWORD_S: Final = 5.0
"""Maximum seconds that a login waits for a password function. After that, it fails and is retried."""

_PEM: Final = "-----BEGIN "

_PARAMETERS: Final = {
    "auth": "mechanism",
    "auth_mechanism": "mechanism",
    "cacertfile": "ca",
    "cadata": "ca_text",
    "cafile": "ca",
    "capath": "ca_directory",
    "certfile": "certificate",
    "keyfile": "key",
    "no_verify_ssl": "verifies",
    "password": "key_password",
    "server_name_indication": "server_name",
    "verify": "verifies",
}
"""Query parameters of RabbitMQ, aiormq and aio-pika, each with the field of `BrokerLogin` that it sets.

Source: https://www.rabbitmq.com/docs/uri-query-parameters, and the clients' documentation.
"""

_warned: Final[set[str]] = set()
"""Ignored parameters that were already logged."""


@dataclass(frozen=True, slots=True)
class BrokerLogin:
    """The login to a broker. Neither `repr` nor errors show keys and passwords.

    Files are read when connecting, and again if they have changed. An `ssl_context` replaces the files, and is used
    unchanged. Comparisons ignore it, since each connection may have a context of its own.
    """

    mechanism: AuthMechanism = "PLAIN"
    ssl_context: ssl.SSLContext | None = field(default=None, repr=False, compare=False)
    ca: str | None = None
    ca_text: str | None = field(default=None, repr=False)
    ca_directory: str | None = None
    certificate: str | None = None
    key: str | None = None
    key_password: str | None = field(default=None, repr=False)
    verifies: bool = True
    server_name: str | None = None

    def __post_init__(self) -> None:
        if self.mechanism not in MECHANISMS:
            raise ConfigurationError(f"auth_mechanism= takes 'PLAIN' or 'EXTERNAL', not {shown(self.mechanism)}")
        if self.ssl_context is not None and not isinstance(self.ssl_context, ssl.SSLContext):
            raise ConfigurationError(f"ssl_context= takes an ssl.SSLContext, not {type(self.ssl_context).__name__}")
        for name in ("ca", "ca_text", "ca_directory", "certificate", "key", "server_name"):
            given = getattr(self, name)
            if given is not None and _PEM in checked_text(name, given) and name != "ca_text":
                raise ConfigurationError(f"{name} takes the name of a file, not its content")
        if self.ssl_context is not None and self._has_files:
            raise ConfigurationError("both an ssl_context and TLS files or options were given: give only one of them")
        if self.key is not None and self.certificate is None:
            raise ConfigurationError("a client key needs its certificate: give both")
        if self.mechanism == "EXTERNAL" and self.ssl_context is None and self.certificate is None:
            raise ConfigurationError("EXTERNAL needs a client certificate: give certfile=, or an ssl_context with one")

    @property
    def _has_files(self) -> bool:
        files = (self.ca, self.ca_text, self.ca_directory, self.certificate, self.key, self.key_password)
        return any(given is not None for given in files) or not self.verifies

    @property
    def needs_tls(self) -> bool:
        """Whether an option needs TLS."""
        named = self.server_name is not None or self.mechanism == "EXTERNAL"
        return named or self.ssl_context is not None or self._has_files

    def server_name_for(self, host: str) -> str | None:
        """Return the name to send to a server and to verify in its certificate; None for no name."""
        if self.server_name == NO_SERVER_NAME:
            return None
        return self.server_name or host

    def tls_context(self) -> ssl.SSLContext:
        """Return the TLS context. It verifies certificate and host name unless the options disable this."""
        if self.ssl_context is not None:
            return self.ssl_context
        has_ca = not (self.ca is self.ca_text is self.ca_directory is None)
        ca = self.ca if has_ca else os.environ.get("SSL_CERT_FILE")
        files = filter(None, (ca, self.ca_directory, self.certificate, self.key))
        return _context(self, tuple(map(_file_state, files)))

    def __reduce__(self) -> tuple[Any, ...]:
        if self.ssl_context is not None:
            raise ConfigurationError(SSL_CONTEXT_NOT_PICKLABLE)
        return BrokerLogin, tuple(getattr(self, each.name) for each in fields(self))


def login_of_query(query: str, *, ssl_context: ssl.SSLContext | None = None, is_clients: bool = False) -> BrokerLogin:
    """Return the login of a URL's query. An `ssl_context` replaces the query's files, as in aiormq.

    `is_clients`: True for a client library's URL, whose other parameters need no warning.
    """
    options: dict[str, Any] = {}
    for name, text in parse_qsl(query, keep_blank_values=True):
        if name in _PARAMETERS:
            value = _parameter(name, text)
            if options.setdefault(_PARAMETERS[name], value) != value:
                same = ", ".join(each for each in _PARAMETERS if _PARAMETERS[each] == _PARAMETERS[name])
                raise ConfigurationError(f"the broker's URL has different values for one option ({same}): give one")
        elif not is_clients and name not in _warned:
            _warned.add(name)
            known = ", ".join(_PARAMETERS)
            text = "the parameter %s in the broker's URL is unknown and ignored: correct or remove it; known are %s"
            logger.warning(text, ascii(name)[:80], known)
    if ssl_context is not None:
        options = {name: value for name, value in options.items() if name in ("mechanism", "server_name")}
    return BrokerLogin(**options, ssl_context=ssl_context)


def _parameter(name: str, text: str) -> str | bool:
    try:
        if name == "verify":
            return {"verify_peer": True, "verify_none": False}[text]
        if name == "no_verify_ssl":
            return text == "0"  # As in aiormq, any other value disables verification.
        if name in ("auth", "auth_mechanism"):
            return MECHANISMS[MECHANISMS.index(text.upper())]
        if name == "cadata":
            # As in aiormq: base64 of a certificate in DER, or of PEM text.
            data = base64.b64decode(text, validate=True)
            text = data.decode("ascii") if _PEM.encode() in data else ssl.DER_cert_to_PEM_cert(data)
    except (KeyError, ValueError):
        text = ""
    if not text:
        raise ConfigurationError(f"the URL's parameter {name!r} has an invalid value: correct or remove it")
    return text


@lru_cache(CONTEXTS_MAX)
def _context(login: BrokerLogin, _file_state: tuple[Any, ...]) -> ssl.SSLContext:
    """Return a TLS context, cached until its files change, so that connections use a renewed certificate."""
    try:
        context = ssl.create_default_context(cafile=login.ca, capath=login.ca_directory, cadata=login.ca_text)
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        source = login.ca or login.ca_directory or "cadata="
        raise ConfigurationError(f"the certificate authorities in {source!r} have no certificate in PEM") from error
    if login.server_name == NO_SERVER_NAME or not login.verifies:
        context.check_hostname = False
    if not login.verifies:
        context.verify_mode = ssl.CERT_NONE
    if login.certificate is not None:
        try:
            # With a function, OpenSSL does not ask for an encrypted key's password on the terminal.
            context.load_cert_chain(login.certificate, login.key, lambda: login.key_password or "")
        except (OSError, ValueError) as error:
            key = "" if login.key is None else f", the client key {login.key!r}"
            why = "no certificate with its key in PEM, or the key's password is missing or wrong"
            if getattr(error, "reason", None) == "KEY_VALUES_MISMATCH":
                why = "the key does not belong to this certificate"
            raise ConfigurationError(f"the client certificate {login.certificate!r}{key} is unusable: {why}") from None
    return context


def _file_state(path: str) -> tuple[int, int]:
    """Return when a file or directory was last written, and its size; `ConfigurationError` if it is unreadable."""
    file = Path(path)
    try:
        if file.is_dir():
            next(file.iterdir(), None)
        else:
            file.open("rb").close()
        found = file.stat()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is not a valid path"
        raise ConfigurationError(f"the TLS file {path!r} cannot be read: {reason}") from error
    return found.st_mtime_ns, found.st_size


# --- passwords that change -------------------------------------------------------------------------------------------


class PasswordFunction:
    """A function that returns the current password. Two objects with the same function are equal."""

    def __init__(self, function: Callable[[], str | None]) -> None:
        self._function = function
        self._threads = Threads(1, "relatum-password")
        self._call: Future[Any] | None = None
        self._process = os.getpid()

    def __call__(self) -> str:
        """Return the function's result, from a new call or from one that is still running."""
        call, process = self._call, os.getpid()
        # A parent's call never ends in a forked child. `after_fork` would keep only one of several equal objects.
        if call is None or call.done() or self._process != process:
            call, self._process = self._threads.submit(self._function), process
            self._call = call
        wait_s = left_s(PASSWORD_S)
        if not wait([call], wait_s).done:
            raise BrokerUnavailable(f"The broker's password function did not return within {seconds_text(wait_s)}.")
        if (error := call.exception()) is not None:
            raise BrokerUnavailable(f"The broker's password function raised {type(error).__name__}.")
        answer = call.result()
        if not is_valid_password(answer):
            raise ConfigurationError(
                f"The broker's password function returned {type(answer).__name__}, not a valid password: it must "
                "return text without NUL characters or lone surrogates."
            )
        return str(answer)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PasswordFunction) and bool(self._function == other._function)

    def __hash__(self) -> int:
        return hash(PasswordFunction)

    def __reduce__(self) -> tuple[Any, ...]:
        return PasswordFunction, (self._function,)


class HeldPassword:
    """Reads the password with which a connection would log in now. The connection is referenced weakly.

    `read` returns the connection's password; None: unchanged. `others` are more objects with such functions, such as
    the parameters of its next connection. They are referenced weakly if possible.
    """

    def __init__(
        self, connection: object, password: str, read: Callable[[Any], Any], *others: tuple[Any, Callable[[Any], Any]]
    ) -> None:
        self._connections = [weakref.ref(connection)]
        self._sources = [
            _Source(_reference(connection), read, password),
            *(_Source(_reference(each), read, read(each)) for each, read in others),
        ]
        self._last: str | None = None

    def __call__(self) -> str | None:
        """Return the latest changed password; None if no password has changed."""
        for source in self._sources:
            owner = source.owner()
            now = None if owner is None else source.read(owner)
            if now != source.before and is_valid_password(now):
                source.before = self._last = now
        return self._last

    @property
    def is_orphaned(self) -> bool:
        """Whether all of its connections were closed or dropped, so that the password cannot change any more."""
        connections = (connection() for connection in self._connections)
        return all(each is None or getattr(each, "is_closed", False) is True for each in connections)

    def join(self, others: "HeldPassword", password: str | None) -> None:
        """Also read the passwords of other connections. `password` is used from now on; None: unchanged."""
        self()
        self._connections = [each for each in self._connections if each() is not None] + others._connections
        self._sources = [each for each in self._sources if each.owner() is not None] + others._sources
        self._last = password or self._last


@dataclass(slots=True)
class _Source:
    """An object that has a password, the function that reads it, and the value that was read last."""

    owner: Callable[[], Any]
    read: Callable[[Any], Any]
    before: Any


def _reference(owner: Any) -> Callable[[], Any]:
    try:
        return weakref.ref(owner)
    except TypeError:
        # pika's parameters do not support weak references. They are few and live long anyway.
        return lambda: owner


def is_valid_password(password: Any) -> bool:
    """Whether a password is valid text. Raises no error, which could show the password."""
    return isinstance(password, str) and is_clean(password)
