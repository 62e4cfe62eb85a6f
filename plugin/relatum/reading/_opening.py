"""What opening a connection takes, by whichever client: who logs in, by which TLS, and what an error means.

Errors of TLS lie under those of the client libraries, and some never arrive: with TLS 1.3 a server refuses a client's
certificate after the client counts the handshake as done, and what the client has sent by then makes the kernel drop
the refusal. The broker's log has it then.
"""

import os
import socket
import ssl
from collections.abc import Iterator
from typing import Final, TypeVar

from relatum.errors import AccessRefused, BrokerUnavailable, ReadTimeout, TlsRefused
from relatum.reading._address import BrokerAddress
from relatum.wire import AnotherProtocol, Login

_Error = TypeVar("_Error", bound=BaseException)

HEARTBEAT_S: Final = 10
"""Seconds of heartbeat asked for: a frozen broker is noticed in 1.5 times that."""

SILENCE_HEARTBEATS: Final = 1.5
"""Heartbeats without any byte after which the peer counts as gone; it sends two in each."""

_ENABLE: Final = "Where RabbitMQ runs there, its stream plugin does not: rabbitmq-plugins enable rabbitmq_stream."

_OTHER_PORTS: Final = {5432: "PostgreSQL", 15672: "RabbitMQ's management pages"}
"""Ports that are often given in place of the broker's."""

_NESTED_ERRORS_MAX: Final = 100
"""Errors inside errors that are looked at for a cause."""

_UNKNOWN_ISSUERS: Final = frozenset({18, 19, 20, 21})
"""OpenSSL's verify codes where nobody who is trusted vouches for a certificate."""

_OTHER_NAMES: Final = frozenset({62, 63, 64})
"""OpenSSL's verify codes of a certificate for another host, e-mail or IP address."""

_NO_TLS: Final = frozenset({"WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "UNKNOWN_PROTOCOL", "HTTP_REQUEST"})
"""OpenSSL's reasons for an answer that is none of TLS."""

_PASSING_ALERTS: Final = frozenset({"INTERNAL_ERROR", "USER_CANCELLED", "BAD_RECORD_MAC", "DECODE_ERROR"})
"""Ends of OpenSSL's reasons for alerts that say nothing of how TLS is set up. Source: RFC 8446, section 6."""


def login_for(address: BrokerAddress, heartbeat_s: int = HEARTBEAT_S, cluster_name: str | None = None) -> Login:
    """The login an address holds now, for the cluster of that name alone where one is given. Blocks as `secret`."""
    mechanism = address.login.mechanism
    return Login(address.user, address.secret(), address.vhost, mechanism, heartbeat_s, cluster_name)


def tls_context_for(address: BrokerAddress) -> ssl.SSLContext | None:
    """The TLS context of a stream connection; None for a plain one."""
    return address.login.tls_context() if address.stream_tls else None


def not_opened(error: BaseException, host: str, port: int) -> BaseException:
    """The error for a stream connection that could not be opened, as its caller can act on it."""
    where = f"{host}:{port}"
    if isinstance(error, AnotherProtocol):
        return AnotherProtocol(f"{where} does not speak RabbitMQ's stream protocol, which usually has port 5552.")
    if isinstance(error, AccessRefused):
        refused: BaseException | None = AccessRefused(f"{where}: {error}")
    else:
        refused = refusal_inside(error, where)
    if refused is not None:
        return refused
    if isinstance(error, ssl.SSLError):
        return BrokerUnavailable(f"TLS with {where} failed: {error.reason or 'it hung up'}.")
    if isinstance(error, (TimeoutError, ReadTimeout)):
        return BrokerUnavailable(f"Nothing at {where} answered as the stream protocol in time{port_hint(port)}.")
    if isinstance(error, OSError):
        message = f"No stream protocol at {where}{unreached(error, host)}{port_hint(port)}."
        if isinstance(error, ConnectionRefusedError):
            message += f" {_ENABLE}"
        return BrokerUnavailable(message)
    return error


def port_hint(port: int) -> str:
    """Whose port it usually is, in brackets to be appended, where that is another server's; else nothing."""
    return f" ({port} is usually the port of {_OTHER_PORTS[port]})" if port in _OTHER_PORTS else ""


def unreached(error: BaseException | None, host: str) -> str:
    """Why a server was not reached, to be appended: that its name does not resolve, or what the system says."""
    if isinstance(error, socket.gaierror):
        return f": the host name {host!r} does not resolve ({error.strerror or error})"
    if not isinstance(error, OSError) or not error.strerror:
        return ""
    # asyncio has a text of its own, which shows a tuple.
    if error.errno is not None and error.strerror.startswith("Connect call failed"):
        return f": {os.strerror(error.errno)}"
    return f": {error.strerror}"


def inside(error: BaseException | None, kind: type[_Error]) -> _Error | None:
    """An error of a kind that lies under a client library's own errors, or None."""
    return next((each for each in _all_inside(error) if isinstance(each, kind)), None)


def refusal_inside(error: BaseException | None, where: str) -> TlsRefused | None:
    """What an error says that TLS was refused for, wherever that lies under a client library's own errors."""
    for each in _all_inside(error):
        if isinstance(each, ssl.SSLError) and (found := _tls_refusal(each, where)) is not None:
            return found
    return None


def _all_inside(error: BaseException | None) -> Iterator[BaseException]:
    """An error, and those inside it, as pika and aiormq keep them."""
    waiting, seen = [error], 0
    while waiting and seen < _NESTED_ERRORS_MAX:
        each = waiting.pop()
        seen += 1
        if isinstance(each, BaseException):
            yield each
            parts = (each.__cause__, getattr(each, "exception", None), *getattr(each, "exceptions", ()), *each.args)
            waiting += [part for part in parts if isinstance(part, BaseException)]


def _tls_refusal(error: ssl.SSLError, where: str) -> TlsRefused | None:
    if isinstance(error, ssl.SSLCertVerificationError):
        message = f"The certificate of {where} is not trusted: {error.verify_message.rstrip('.')}."
        if error.verify_code in _UNKNOWN_ISSUERS:
            message += " Name who vouches for it: cacertfile= in the URL, an ssl_context, or SSL_CERT_FILE."
        elif error.verify_code in _OTHER_NAMES:
            message += " Where that is the broker you mean, name it: server_name_indication= in the URL."
        return TlsRefused(message)
    reason = error.reason or ""
    if reason in _NO_TLS:
        return TlsRefused(f"{where} does not speak TLS: its port is another, or the URL amqp:// or rabbitmq-stream://.")
    _, alert, said = reason.partition("_ALERT_")
    if alert and said not in _PASSING_ALERTS:
        words = said.lower().replace("_", " ")
        return TlsRefused(f"{where} refuses TLS ({words}): look at the client certificate, and at the broker's log.")
    return None
