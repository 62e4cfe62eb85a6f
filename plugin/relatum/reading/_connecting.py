"""Connects to one of a broker's addresses, and translates errors of connecting.

Of several addresses, the one that answered last in this process is tried first, for both protocols, so that only one
caller waits for a silent node. There is no failback: the nodes of a cluster are equal, and a return would close working
connections (docs/adr/0042).

Client libraries wrap TLS errors in their own errors. Some TLS errors never arrive: with TLS 1.3, the server refuses a
certificate after the client's handshake is complete. If the client has sent data by then, the kernel drops the refusal,
and only the broker's log shows it.
"""

import logging
import os
import select
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from typing import Final, TypeVar

from pika.adapters.utils.connection_workflow import AMQPConnectorStackTimeout
from pika.exceptions import ConnectionOpenAborted

from relatum.common.waiting import LEAST_S, LOOK_S, Deadline, call_in_time, current, ended, has_passed
from relatum.errors import (
    AccessRefused,
    BrokerUnavailable,
    ConfigurationError,
    ProtocolError,
    ReadTimeout,
    RelatumError,
    TlsRefused,
)
from relatum.reading._address import BrokerAddress

logger = logging.getLogger("relatum.broker")

HEARTBEAT_S: Final = 10
"""The requested heartbeat interval in seconds. A frozen broker is detected after 1.5 times as long."""

SHARE_S_MIN: Final = 0.01
"""Minimum seconds for one of a host's addresses. A timeout of 0 would make the socket non-blocking."""

BROKERS_MAX: Final = 256
"""Maximum brokers whose last address is remembered; more than a process uses."""

WOULD_BLOCK: Final = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)
"""Errors of a socket that is not ready to be read or written."""

TRY_NEXT_AFTER: Final = (BrokerUnavailable, ReadTimeout, AccessRefused, ConfigurationError, ProtocolError)
"""Errors after which the next address is tried, because nodes may be configured differently."""

_Connection = TypeVar("_Connection")

# No lock guards it, because a fork could leave the lock locked; single operations of a dictionary are atomic.
_used: dict[BrokerAddress, int] = {}
"""By broker: the index of the address that answered last."""


# --- one of several addresses ----------------------------------------------------------------------------------------


def ordered_addresses(address: BrokerAddress) -> list[BrokerAddress]:
    """Return a broker's single addresses in the order in which to try them."""
    each, first = list(address.each), _used.get(address, 0)
    return each[first:] + each[:first]


def first_answering(
    address: BrokerAddress, within_s: float, connect: Callable[[BrokerAddress, float], _Connection]
) -> _Connection:
    """Connect to the first address that answers. Each gets an equal share of the remaining seconds.

    If none answers, this raises the first error that is not transient, else one error that names all.
    """
    until, addresses, errors = time.monotonic() + within_s, ordered_addresses(address), list[RelatumError]()
    for number, one in enumerate(addresses):
        share_s = max(min(LEAST_S, within_s), (until - time.monotonic()) / (len(addresses) - number))
        try:
            connection = connect(one, share_s)
        except TRY_NEXT_AFTER as error:
            errors.append(error)
        else:
            _remember(address, one, errors)
            return connection
    if len(errors) == 1:
        raise errors[0]
    for each in errors:
        if not isinstance(each, BrokerUnavailable | ReadTimeout):
            raise each
    raise BrokerUnavailable(f"No address answers. {' '.join(map(str, errors))}") from errors[-1]


def _remember(address: BrokerAddress, one: BrokerAddress, errors: list[RelatumError]) -> None:
    """Remember the address that answered, and log a change."""
    before, index = _used.get(address, 0), address.each.index(one)
    if before == index:
        return
    if len(_used) >= BROKERS_MAX:
        _used.clear()
    _used[address] = index
    reason = f": {ended(errors[0])}" if errors else ""
    logger.warning("RabbitMQ at %s is used from now on instead of %s%s", one.where, address.each[before].where, reason)


# --- sockets ---------------------------------------------------------------------------------------------------------


def open_socket(host: str, port: int, tls: ssl.SSLContext | None, name: str | None, within_s: float) -> socket.socket:
    """Return a connected socket. TLS compares the server's certificate with `name`; None: with no name.

    Another thread connects, because name resolution ignores deadlines. The caller waits until its deadline at most.
    """
    until = time.monotonic() + within_s
    deadline = Deadline(within_s if tls is None else within_s + LEAST_S, current())
    return call_in_time(deadline, _connected, host, port, tls, name, until, unwanted=socket.socket.close)


def _connected(host: str, port: int, tls: ssl.SSLContext | None, name: str | None, until: float) -> socket.socket:
    """Connect to the first of a host's addresses that answers. Each gets its share of the time."""
    error: OSError = OSError(f"{host} has no address")
    addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    for number, (family, kind, protocol, _, where) in enumerate(addresses):
        stream = socket.socket(family, kind, protocol)
        try:
            stream.settimeout(max(SHARE_S_MIN, (until - time.monotonic()) / (len(addresses) - number)))
            stream.connect(where)
            break
        except OSError as failed:
            stream.close()
            error = failed
    else:
        raise error
    try:
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        stream.settimeout(max(LEAST_S, until - time.monotonic()))
        return stream if tls is None else tls.wrap_socket(stream, server_hostname=name)
    except BaseException:
        stream.close()
        raise


def wait_ready(stream: socket.socket, event: int, until: float) -> bool:
    """Wait until a socket can be read or written, for `LOOK_S` at most, and return whether it can.

    Raises `TimeoutError` if no time is left. The caller repeats the call, which checks the deadline.
    """
    left_s = until - time.monotonic()
    if left_s <= 0 or has_passed():
        raise TimeoutError("timed out")
    poll = select.poll()
    poll.register(stream, event)
    return bool(poll.poll(min(left_s, LOOK_S) * 1000))


# --- errors ----------------------------------------------------------------------------------------------------------

_TIMEOUTS: Final = (TimeoutError, ReadTimeout, AMQPConnectorStackTimeout, ConnectionOpenAborted)
"""Timeouts: Relatum's, the system's, and pika's."""

_FOREIGN_PORTS: Final = {5432: "PostgreSQL", 15672: "RabbitMQ's management pages"}
"""Ports that users often give by mistake, with their usual servers."""

_UNKNOWN_ISSUERS: Final = frozenset({18, 19, 20, 21})
"""OpenSSL's verify codes for a certificate that no trusted authority issued."""

_WRONG_NAMES: Final = frozenset({62, 63, 64})
"""OpenSSL's verify codes for a certificate of another host, e-mail or IP address."""

_NO_TLS: Final = frozenset({"WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "UNKNOWN_PROTOCOL", "HTTP_REQUEST"})
"""OpenSSL's reasons for an answer that is not TLS."""

_TRANSIENT_ALERTS: Final = frozenset({"INTERNAL_ERROR", "USER_CANCELLED", "BAD_RECORD_MAC", "DECODE_ERROR"})
"""Transient alerts, as the ends of OpenSSL's reasons. Source: RFC 8446, section 6."""


def reach_error(error: BaseException, protocol: str, host: str, port: int) -> TlsRefused | BrokerUnavailable:
    """Translate the error of a failed connection: the server was not reached, did not answer in time, or TLS failed."""
    where, found = f"{host}:{port}", list(nested_errors(error))
    for each in found:
        if isinstance(each, ssl.SSLError) and (refused := _tls_refusal(each, where)) is not None:
            return refused
    hint = f" ({port} is usually the port of {_FOREIGN_PORTS[port]})" if port in _FOREIGN_PORTS else ""
    if any(isinstance(each, _TIMEOUTS) for each in found):
        return BrokerUnavailable(f"Nothing at {where} answered as {protocol} in time{hint}: check the address.")
    reason, why = next((each for each in found if isinstance(each, OSError)), None), ""
    if isinstance(reason, ssl.SSLError):
        why = f": TLS failed ({reason.reason or 'the connection was closed'})"
    elif isinstance(reason, socket.gaierror):
        why = f": the host name {host!r} does not resolve ({reason.strerror or reason})"
    elif reason is not None and reason.errno is not None:
        why = f": {os.strerror(reason.errno)}"
    return BrokerUnavailable(f"Cannot connect to {where} by {protocol}{why}{hint}.")


def nested_errors(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and all errors inside it, wherever pika puts them."""
    yield error
    for part in (error.__cause__, getattr(error, "exception", None), *error.args):
        if isinstance(part, BaseException):
            yield from nested_errors(part)


def _tls_refusal(error: ssl.SSLError, where: str) -> TlsRefused | None:
    if isinstance(error, ssl.SSLCertVerificationError):
        message = f"The certificate of {where} is not trusted: {error.verify_message.rstrip('.')}."
        if error.verify_code in _UNKNOWN_ISSUERS:
            message += " Name its certificate authority: cacertfile= in the URL, an ssl_context, or SSL_CERT_FILE."
        elif error.verify_code in _WRONG_NAMES:
            message += " If this is the right broker, set server_name_indication= in the URL."
        return TlsRefused(message)
    reason = error.reason or ""
    if reason in _NO_TLS:
        return TlsRefused(f"{where} does not speak TLS: correct the port, or use amqp:// or rabbitmq-stream://.")
    _, alert, alert_name = reason.partition("_ALERT_")
    if alert and alert_name not in _TRANSIENT_ALERTS:
        words = alert_name.lower().replace("_", " ")
        return TlsRefused(f"{where} refuses TLS ({words}): check the client certificate and the broker's log.")
    return None
