"""What opening a stream connection takes, of whichever face: who logs in, by which TLS, and what an error means."""

import ssl
from typing import Final

from relatum.errors import AccessRefused, BrokerUnavailable, ReadTimeout
from relatum.reading._address import BrokerAddress
from relatum.reading._handshake import refusal_inside
from relatum.wire import STREAM, AnotherProtocol, Login, Mechanism, hint, is_another, unreached

HEARTBEAT_S: Final = 10
"""Seconds of heartbeat asked for: a frozen broker is noticed in 1.5 times that."""

ENABLE: Final = "Where RabbitMQ runs there, its stream plugin does not: rabbitmq-plugins enable rabbitmq_stream."

SILENCE_HEARTBEATS: Final = 1.5
"""Heartbeats without any byte after which the peer counts as gone; it sends two in each."""


def login_for(address: BrokerAddress, heartbeat_s: int = HEARTBEAT_S, cluster_name: str | None = None) -> Login:
    """The login an address holds now, for the cluster of that name alone where one is given. Blocks as `secret`."""
    mechanism = Mechanism(address.login.mechanism)
    return Login(address.user, address.secret(), address.vhost, mechanism, heartbeat_s, cluster_name)


def tls_context_for(address: BrokerAddress) -> ssl.SSLContext | None:
    """The TLS context of a stream connection; None for a plain one."""
    return address.login.tls_context() if address.stream_tls else None


def not_opened(error: BaseException, host: str, port: int) -> BaseException:
    """The error for a stream connection that could not be opened, as its caller can act on it."""
    where = f"{host}:{port}"
    if isinstance(error, AnotherProtocol):
        return AnotherProtocol(f"{is_another(error.service, where, STREAM)}.", service=error.service)
    if isinstance(error, AccessRefused):
        refused: BaseException | None = AccessRefused(f"{where}: {error}")
    else:
        refused = refusal_inside(error, where)
    if refused is not None:
        return refused
    if isinstance(error, ssl.SSLError):
        return BrokerUnavailable(f"TLS with {where} failed: {error.reason or 'it hung up'}.")
    if isinstance(error, (TimeoutError, ReadTimeout)):
        return BrokerUnavailable(f"Nothing at {where} answered as the stream protocol in time{hint(port, STREAM)}.")
    if isinstance(error, OSError):
        message = f"No stream protocol at {where}{unreached(error, host)}{hint(port, STREAM)}."
        if isinstance(error, ConnectionRefusedError):
            message += f" {ENABLE}"
        return BrokerUnavailable(message)
    return error
