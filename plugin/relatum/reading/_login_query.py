"""How to log in, as URLs tell it: the query parameters of RabbitMQ, of aiormq and aio-pika, and of pika.

Source: https://www.rabbitmq.com/docs/uri-query-parameters, the clients' own documentation.
"""

import ast
import base64
import ssl
from collections.abc import Callable
from typing import Any, Final
from urllib.parse import parse_qsl

from relatum.errors import ConfigurationError
from relatum.reading._login import MECHANISMS, BrokerLogin

_Given = dict[str, Any]
"""Fields of `BrokerLogin`."""

_OTHERS: Final = frozenset(
    [
        "heartbeat",
        "connection_timeout",
        "channel_max",
        "frame_max",
        "depth",
        "fail_if_no_peer_cert",
        "timeout",
        "name",
        "reconnect_interval",
        "fail_fast",
        "interleave",
        "happy_eyeballs_delay",
        "backpressure_detection",
        "blocked_connection_timeout",
        "client_properties",
        "connection_attempts",
        "locale",
        "retry_delay",
        "socket_timeout",
        "stack_timeout",
        "tcp_options",
    ]
)
"""Parameters of the same clients that are about other things."""

_SSL_OPTIONS: Final = {
    "ca_certs": "ca",
    "cafile": "ca",
    "ca_path": "ca_directory",
    "capath": "ca_directory",
    "ca_data": "ca",
    "cadata": "ca",
    "certfile": "certificate",
    "keyfile": "key",
    "password": "key_password",
    "server_hostname": "server_name",
}
"""What pika's `ssl_options` may hold."""


def login_of_query(query: str, *, ssl_context: ssl.SSLContext | None = None, is_lenient: bool = False) -> BrokerLogin:
    """How to log in by a URL's query.

    - `ssl_context`: Used in place of the query's files, as aiormq does.
    - `is_lenient`: True where it is a client's own, which puts other things there, too: what is not known is passed by.

    Raises:
        ConfigurationError: A parameter is unknown, is none that can be, or two contradict each other. Values are not
            shown.
    """
    given: _Given = {}
    for name, value in parse_qsl(query, keep_blank_values=True):
        read = _READ.get(name)
        if read is not None:
            try:
                found = read(value)
            except (ValueError, SyntaxError, KeyError):
                raise ConfigurationError(f"the URL's parameter {name!r} cannot have that value") from None
            _add(given, name, found)
        elif name not in _OTHERS and not is_lenient:
            raise ConfigurationError(f"unknown parameter {name!r} in the broker's URL; known are: {_known()}")
    if ssl_context is not None:
        given = {name: value for name, value in given.items() if name in ("mechanism", "server_name")}
    return BrokerLogin(**given, ssl_context=ssl_context)


def _add(given: _Given, name: str, found: _Given) -> None:
    for field, value in found.items():
        if given.setdefault(field, value) != value:
            raise ConfigurationError(f"the broker's URL says two things of {field!r}, one by {name!r}")


def _known() -> str:
    return ", ".join(sorted(_READ))


def _verified(value: str) -> _Given:
    return {"verifies": {"verify_peer": True, "verify_none": False}[value]}


def _unverified(value: str) -> _Given:
    # As aiormq: whatever is not 0.
    return {"verifies": value == "0"}


def _mechanism(value: str) -> _Given:
    name = value.upper()
    if name not in MECHANISMS:
        raise ValueError(value)
    return {"mechanism": name}


def _ca_data(value: str) -> _Given:
    """aiormq's: base64 of a certificate in DER, or of PEM text."""
    data = base64.b64decode(value, validate=True)
    return {"ca": data.decode("ascii") if b"-----BEGIN" in data else ssl.DER_cert_to_PEM_cert(data)}


def _ssl_options(value: str) -> _Given:
    """pika's: a dict, written as in Python."""
    options = ast.literal_eval(value)
    if options is None:
        return {}
    if not isinstance(options, dict):
        raise ValueError("no dict")  # noqa: TRY004 - as all values that cannot be
    found: _Given = {}
    for name, option in options.items():
        if name == "cert_reqs":
            found["verifies"] = option != ssl.CERT_NONE
        elif option is not None:
            found[_SSL_OPTIONS[name]] = str(option)
    return found


def _text(field: str) -> Callable[[str], _Given]:
    def read(value: str) -> _Given:
        if not value:
            raise ValueError("empty")
        return {field: value}

    return read


_READ: Final[dict[str, Callable[[str], _Given]]] = {
    "auth": _mechanism,
    "auth_mechanism": _mechanism,
    "cacertfile": _text("ca"),
    "cadata": _ca_data,
    "cafile": _text("ca"),
    "capath": _text("ca_directory"),
    "certfile": _text("certificate"),
    "keyfile": _text("key"),
    "no_verify_ssl": _unverified,
    "password": _text("key_password"),
    "server_name_indication": _text("server_name"),
    "ssl_options": _ssl_options,
    "verify": _verified,
}
