"""Connecting to a broker: at which of its addresses, as whom, and what an error means.

Of several addresses, the one that answered last in this process is tried first, whatever the protocol, so that only one
caller waits for a silent node. There is no failback: the nodes of a cluster are alike, and a return would end
connections that work (docs/adr/0042).

A stream port that was not given is a guess, and anybody may listen there. Servers of the stream protocol name their
cluster before a login: credentials are sent only to the cluster that the AMQP port belongs to.

Errors of TLS are wrapped by the client libraries' own, and some never arrive: with TLS 1.3 a server refuses a client's
certificate after the client has finished the handshake, and what the client has sent by then makes the kernel drop the
refusal. The broker's log has it.
"""

import logging
import os
import re
import socket
import ssl
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, Final

import pika
from pika.adapters.utils.connection_workflow import AMQPConnectorException, AMQPConnectorStackTimeout
from pika.exceptions import AMQPError, AuthenticationError, ConnectionBlockedTimeout, ConnectionOpenAborted

from relatum.checks import seconds_text
from relatum.client_logs import own_connection
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
from relatum.waiting import ended, left_s
from relatum.wire import AnotherProtocol, Login, MechanismNotTaken

logger = logging.getLogger("relatum.broker")

HEARTBEAT_S: Final = 10
"""Seconds of heartbeat asked for: a frozen broker is noticed in 1.5 times that."""

SILENCE_HEARTBEATS: Final = 1.5
"""Heartbeats without any byte after which the peer counts as gone; it sends two in each."""

CONNECT_S_MIN: Final = 0.5
"""Seconds a port has to answer at least, however much of the time-out others have taken before."""

CONNECT_S_LEAST: Final = 0.01
"""Seconds for connecting where a call has none left: 0 would mean something else to sockets."""

GOODBYE_S: Final = 0.5
"""Seconds the broker has to answer a close by AMQP 0.9.1."""

REMEMBERED_MAX: Final = 256
"""Brokers of which something is remembered; more than a process has."""

PASSED_OVER: Final = (BrokerUnavailable, ReadTimeout, AccessRefused, ConfigurationError, ProtocolError)
"""Errors after which the next address is tried: a node may be there and be set up otherwise."""

# Both are changed by single operations of a dictionary: no lock that a fork could leave locked.
_used: dict[BrokerAddress, int] = {}
"""Which address of a broker answered last."""

_clusters: dict[tuple[str, bool], str] = {}
"""By host and port of AMQP 0.9.1, and whether it speaks TLS: the name of the cluster there."""


# --- one of several addresses ----------------------------------------------------------------------------------------


def in_turn(address: BrokerAddress) -> list[BrokerAddress]:
    """The addresses, each by itself, in the order in which to try them now."""
    each, first = list(address.each), _used.get(address, 0)
    return each[first:] + each[:first]


def shares(address: BrokerAddress, within_s: float) -> Iterator[tuple[BrokerAddress, float]]:
    """The addresses to try, each with its share of the seconds that are left."""
    until, left = time.monotonic() + within_s, in_turn(address)
    for tried, one in enumerate(left):
        yield one, max(min(CONNECT_S_MIN, within_s), (until - time.monotonic()) / (len(left) - tried))


def answered(address: BrokerAddress, one: BrokerAddress, errors: Sequence[RelatumError]) -> None:
    """Remember the address that answered, and log a change; `errors` are those of the addresses tried before it."""
    before, index = _used.get(address, 0), address.each.index(one)
    if before == index:
        return
    if len(_used) >= REMEMBERED_MAX:
        _used.clear()
    _used[address] = index
    reason = f": {ended(errors[0])}" if errors else ""
    logger.warning("RabbitMQ at %s is used from now on, not at %s%s", one.where, address.each[before].where, reason)


def none_answered(errors: Sequence[RelatumError]) -> RelatumError:
    """The error where every address failed: the first that somebody has to act on, else that none answers."""
    if len(errors) == 1:
        return errors[0]
    for error in errors:
        if not isinstance(error, BrokerUnavailable | ReadTimeout):
            return error
    none = BrokerUnavailable(f"No address answers. {' '.join(map(str, errors))}")
    none.__cause__ = errors[-1]
    return none


# --- by the stream protocol ------------------------------------------------------------------------------------------


class NamelessCluster(ConfigurationError):
    """The broker does not name its cluster, so nothing can prove that a guessed stream port belongs to it."""


NOT_BY_STREAMS: Final = (AnotherProtocol, TlsRefused, MechanismNotTaken, NamelessCluster)
"""Errors that are final for a stream port that was given; a guessed port with one of them is another server's."""


def connect_left_s(most_s: float) -> float:
    """Seconds for connecting: so many, or what the call has left."""
    return max(CONNECT_S_LEAST, left_s(most_s))


def login_for(address: BrokerAddress, heartbeat_s: int = HEARTBEAT_S, cluster_name: str | None = None) -> Login:
    """How to log in now, to the cluster of that name alone if one is given. Blocks as `BrokerAddress.secret`."""
    mechanism = address.login.mechanism
    return Login(address.user, address.secret(), address.vhost, mechanism, heartbeat_s, cluster_name)


def cluster_meant(address: BrokerAddress, *, timeout_s: float) -> str:
    """The name of the cluster that must answer on a guessed stream port: asked over AMQP 0.9.1, once. It may block.

    Raises:
        BrokerUnavailable, AccessRefused: AMQP 0.9.1 cannot be asked.
        NamelessCluster: The broker does not name it.
    """
    name = _clusters.get((address.where, address.amqp_tls))
    if name is None:
        with asking(address, timeout_s) as connection:
            given = connection._impl.server_properties.get("cluster_name")
        name = given.decode(errors="replace") if isinstance(given, bytes) else given
        if not isinstance(name, str) or not name:
            raise NamelessCluster(
                "The broker does not say which cluster it is, so the stream port cannot be guessed: give a "
                "rabbitmq-stream:// URL."
            )
        if len(_clusters) >= REMEMBERED_MAX:
            _clusters.clear()
        _clusters[address.where, address.amqp_tls] = name
    return name


def forget_cluster(address: BrokerAddress) -> None:
    """Ask again next time: another cluster answered, and the broker may have been reinstalled."""
    _clusters.pop((address.where, address.amqp_tls), None)


def not_opened(error: BaseException, host: str, port: int) -> BaseException:
    """The error for a stream connection that could not be opened, as its caller can act on it."""
    where = f"{host}:{port}"
    if isinstance(error, AnotherProtocol):
        return AnotherProtocol(f"{where} does not speak RabbitMQ's stream protocol, which usually has port 5552.")
    if isinstance(error, AccessRefused):
        return AccessRefused(f"{where}: {error}")
    told = _not_reached(error, "the stream protocol", host, port)
    if isinstance(error, ConnectionRefusedError):
        return BrokerUnavailable(f"{told} {_ENABLE}")
    return told if isinstance(told, TlsRefused) or isinstance(error, OSError | ReadTimeout) else error


# --- by AMQP 0.9.1 ---------------------------------------------------------------------------------------------------


def blocking_connection(address: BrokerAddress, *, timeout_s: float, heartbeat_s: int) -> pika.BlockingConnection:
    """Open a blocking connection of pika's: to the first of the addresses that answers.

    Raises:
        BrokerUnavailable, AccessRefused: None can be opened.
        TlsRefused: A certificate is refused, or one side does not speak TLS.
        ConfigurationError: The address has no AMQP port, or a TLS file cannot be used.
    """
    errors: list[RelatumError] = []
    for one, share_s in shares(address, timeout_s):
        try:
            connection = _connect(one, share_s, timeout_s, heartbeat_s)
        except PASSED_OVER as error:
            errors.append(error)
        else:
            answered(address, one, errors)
            return connection
    raise none_answered(errors)


def _connect(address: BrokerAddress, within_s: float, timeout_s: float, heartbeat_s: int) -> pika.BlockingConnection:
    if address.amqp_port is None:
        raise ConfigurationError("AMQP 0.9.1 needs an amqp:// URL.")
    login = address.login
    credentials: Any = pika.PlainCredentials(address.user, address.secret())
    if login.mechanism == "EXTERNAL":
        credentials = pika.credentials.ExternalCredentials()
    tls = pika.SSLOptions(login.tls_context(), login.server_name_for(address.host)) if address.amqp_tls else None
    parameters = pika.ConnectionParameters(
        host=address.host,
        port=address.amqp_port,
        virtual_host=address.vhost,
        credentials=credentials,
        ssl_options=tls,
        heartbeat=heartbeat_s,
        socket_timeout=within_s,
        stack_timeout=within_s,
        blocked_connection_timeout=timeout_s,
    )
    try:
        with own_connection():
            return pika.BlockingConnection(parameters)
    # A broker that accepts and never answers ends as an AMQPConnectorException, which is no AMQPError.
    except (AMQPError, AMQPConnectorException, OSError) as error:
        raise _amqp_error(error, address, address.amqp_port) from error


@contextmanager
def in_time(connection: pika.BlockingConnection, timeout_s: float) -> Iterator[None]:
    """End the connection if the block takes longer: pika itself waits for ever."""
    # As pika's own timer does for brokers that block publishers: only timers of the loop run while it waits.
    loop = connection._impl
    end = partial(loop._terminate_stream, ConnectionBlockedTimeout(f"no answer within {seconds_text(timeout_s)}"))
    timer = loop._adapter_call_later(timeout_s, end)
    try:
        yield
    finally:
        loop._adapter_remove_timeout(timer)


@contextmanager
def asking(address: BrokerAddress, timeout_s: float) -> Iterator[pika.BlockingConnection]:
    """A connection for one question, ended if the answer takes longer. Errors as of `blocking_connection`."""
    connection = blocking_connection(address, timeout_s=timeout_s, heartbeat_s=HEARTBEAT_S)
    with own_connection():
        try:
            with in_time(connection, timeout_s):
                yield connection
        finally:
            if connection.is_open:
                with suppress(AMQPError, OSError), in_time(connection, GOODBYE_S):
                    connection.close()


def _amqp_error(error: BaseException, address: BrokerAddress, port: int) -> RelatumError:
    """Pika calls every connection that ends while it opens a "probable" refusal: only the broker's word counts."""
    closed = _CLOSED_BY_BROKER.search(f"{error} {error!r}")
    if closed is not None and int(closed[1]) in _REFUSED and _FULL not in closed[2]:
        refuses = f"The broker at {address.where} refuses {address.who} in the virtual host {address.vhost!r}"
        if int(closed[1]) == _NO_VHOST:
            return AccessRefused(f"{refuses}: there is no such virtual host, or this user may not use it.")
        return AccessRefused(
            f"{refuses}: the name, the password or the certificate is wrong; RabbitMQ does not say which."
        )
    if any(isinstance(each, AuthenticationError) for each in _all_inside(error)):
        mechanism = address.login.mechanism
        return ConfigurationError(f"The broker at {address.where} does not offer {mechanism} to log in by.")
    return _not_reached(error, "AMQP 0.9.1", address.host, port)


_NO_VHOST: Final = 530
"""NOT_ALLOWED: the reply code of a virtual host that is not there or that the user may not use."""

_REFUSED: Final = frozenset({403, _NO_VHOST})
"""Reply codes of a refused user, password or virtual host. Others are transient: a node that stops, for one."""

_FULL: Final = "is reached"
"""Ends the text of a 530 that says "connection limit (10) is reached", of a user, a virtual host or a node."""

_CLOSED_BY_BROKER: Final = re.compile(r"\((\d+)\) (.*)", re.DOTALL)
"""What pika's errors keep of a Close frame: the reply code and the text."""


# --- what an error means, by either ----------------------------------------------------------------------------------

_OUT_OF_TIME: Final = (TimeoutError, ReadTimeout, AMQPConnectorStackTimeout, ConnectionOpenAborted)
"""Ours and the system's, and pika's for an attempt that it has given up."""

_OTHER_PORTS: Final = {5432: "PostgreSQL", 15672: "RabbitMQ's management pages"}
"""Ports often given by mistake, and whose they usually are."""

_ENABLE: Final = "Where RabbitMQ runs there, its stream plugin does not: rabbitmq-plugins enable rabbitmq_stream."

_UNKNOWN_ISSUERS: Final = frozenset({18, 19, 20, 21})
"""OpenSSL's verify codes of a certificate that no trusted authority issued."""

_OTHER_NAMES: Final = frozenset({62, 63, 64})
"""OpenSSL's verify codes of a certificate for another host, e-mail or IP address."""

_NO_TLS: Final = frozenset({"WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "UNKNOWN_PROTOCOL", "HTTP_REQUEST"})
"""OpenSSL's reasons for an answer that is not TLS."""

_PASSING_ALERTS: Final = frozenset({"INTERNAL_ERROR", "USER_CANCELLED", "BAD_RECORD_MAC", "DECODE_ERROR"})
"""Ends of OpenSSL's reasons for alerts that may pass. Source: RFC 8446, section 6."""


def _not_reached(error: BaseException, protocol: str, host: str, port: int) -> TlsRefused | BrokerUnavailable:
    """The error for a server that was not reached, or not in time, or not by TLS."""
    where, found = f"{host}:{port}", list(_all_inside(error))
    for each in found:
        if isinstance(each, ssl.SSLError) and (refused := _tls_refusal(each, where)) is not None:
            return refused
    hint = f" ({port} is usually the port of {_OTHER_PORTS[port]})" if port in _OTHER_PORTS else ""
    if any(isinstance(each, _OUT_OF_TIME) for each in found):
        return BrokerUnavailable(f"Nothing at {where} answered as {protocol} in time{hint}.")
    reason, why = next((each for each in found if isinstance(each, OSError)), None), ""
    if isinstance(reason, ssl.SSLError):
        why = f": TLS failed ({reason.reason or 'it hung up'})"
    elif isinstance(reason, socket.gaierror):
        why = f": the host name {host!r} does not resolve ({reason.strerror or reason})"
    elif reason is not None and reason.errno is not None:
        why = f": {os.strerror(reason.errno)}"
    return BrokerUnavailable(f"No {protocol.removeprefix('the ')} at {where}{why}{hint}.")


def _all_inside(error: BaseException) -> Iterator[BaseException]:
    """An error, and those inside it, as pika keeps them."""
    yield error
    for part in (error.__cause__, getattr(error, "exception", None), *error.args):
        if isinstance(part, BaseException):
            yield from _all_inside(part)


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
