"""How to log in, as URLs tell it: the query parameters of RabbitMQ, and of aiormq and aio-pika.

Source: https://www.rabbitmq.com/docs/uri-query-parameters, the clients' own documentation.
"""

import base64
import logging
import ssl
from collections.abc import Callable
from typing import Any, Final
from urllib.parse import parse_qsl

from relatum.errors import ConfigurationError
from relatum.reading._login import MECHANISMS, BrokerLogin

logger = logging.getLogger("relatum.broker")

_Given = dict[str, Any]
"""Fields of `BrokerLogin`."""

_warned: Final[set[str]] = set()
"""Parameters of which the log has said that they are ignored."""


def login_of_query(query: str, *, ssl_context: ssl.SSLContext | None = None, is_clients: bool = False) -> BrokerLogin:
    """How to log in by a URL's query.

    - `ssl_context`: Used in place of the query's files, as aiormq does.
    - `is_clients`: True where it is a client's own URL, which may hold other parameters: they need no warning.

    Raises:
        ConfigurationError: A parameter has a value that cannot be, or two contradict each other. Values are not shown.
    """
    given: _Given = {}
    for name, value in parse_qsl(query, keep_blank_values=True):
        read = _READ.get(name)
        if read is not None:
            try:
                found = read(value)
            except (ValueError, KeyError):
                raise ConfigurationError(f"the URL's parameter {name!r} cannot have that value") from None
            _add(given, name, found)
        elif not is_clients and name not in _warned:
            _warned.add(name)
            known = ", ".join(sorted(_READ))
            logger.warning("the parameter %s in the broker's URL is ignored; known are %s", ascii(name)[:80], known)
    if ssl_context is not None:
        given = {name: value for name, value in given.items() if name in ("mechanism", "server_name")}
    return BrokerLogin(**given, ssl_context=ssl_context)


def _add(given: _Given, name: str, found: _Given) -> None:
    for field, value in found.items():
        if given.setdefault(field, value) != value:
            raise ConfigurationError(f"the broker's URL says two things of {field!r}, one by {name!r}")


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
    "verify": _verified,
}
