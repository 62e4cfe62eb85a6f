"""Connections of pika to an address, and what it means where none can be opened."""

import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, Final

import pika
from pika.adapters.utils.connection_workflow import AMQPConnectorException, AMQPConnectorStackTimeout
from pika.exceptions import (
    AMQPError,
    AuthenticationError,
    ConnectionBlockedTimeout,
    ConnectionOpenAborted,
)

from relatum.checks import seconds_text
from relatum.client_logs import own_connection
from relatum.errors import AccessRefused, BrokerUnavailable, ConfigurationError, RelatumError
from relatum.reading._address import BrokerAddress
from relatum.reading._failing_over import Attempts
from relatum.reading._opening import HEARTBEAT_S, inside, port_hint, refusal_inside, unreached

GOODBYE_S: Final = 0.5
"""Seconds the broker has to answer a close."""


def pika_parameters(address: BrokerAddress, timeout_s: float, heartbeat_s: int) -> pika.ConnectionParameters:
    """What pika needs to connect to an address, and to log in as that says now. Blocks as `BrokerAddress.secret`."""
    if address.amqp_port is None:
        raise ConfigurationError("AMQP 0.9.1 needs an amqp:// URL.")
    credentials: Any = pika.PlainCredentials(address.user, address.secret())
    login = address.login
    if login.mechanism == "EXTERNAL":
        credentials = pika.credentials.ExternalCredentials()
    options = None
    if address.amqp_tls:
        options = pika.SSLOptions(login.tls_context(), login.server_name_for(address.host))
    return pika.ConnectionParameters(
        host=address.host,
        port=address.amqp_port,
        virtual_host=address.vhost,
        credentials=credentials,
        ssl_options=options,
        heartbeat=heartbeat_s,
        socket_timeout=timeout_s,
        stack_timeout=timeout_s,
        blocked_connection_timeout=timeout_s,
    )


def blocking_connection(address: BrokerAddress, *, timeout_s: float, heartbeat_s: int) -> pika.BlockingConnection:
    """A blocking connection of pika's to an address; of several, to one that answers.

    Raises:
        BrokerUnavailable, AccessRefused: none can be opened.
        TlsRefused: TLS cannot be, for a reason that it names.
        ConfigurationError: the address has no AMQP port, or a file of TLS cannot be used.
    """
    attempts = Attempts(address, timeout_s)
    while True:
        with attempts as (one, share_s):
            parameters = pika_parameters(one, share_s, heartbeat_s)
            # Only connecting is shared out.
            parameters.blocked_connection_timeout = timeout_s
            try:
                with own_connection():
                    return pika.BlockingConnection(parameters)
            # A broker that accepts and never answers ends as an AMQPConnectorException, which is no AMQPError.
            except (AMQPError, AMQPConnectorException, OSError) as error:
                raise connection_error(error, one) from error


@contextmanager
def in_time(connection: pika.BlockingConnection, timeout_s: float) -> Iterator[None]:
    """End a connection whose broker does not answer in time: pika itself waits for ever."""
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
    """A connection for one question, answered in time or ended. Errors as of `blocking_connection`."""
    connection = blocking_connection(address, timeout_s=timeout_s, heartbeat_s=HEARTBEAT_S)
    with own_connection():
        try:
            with in_time(connection, timeout_s):
                yield connection
        finally:
            if connection.is_open:
                with suppress(AMQPError, OSError), in_time(connection, GOODBYE_S):
                    connection.close()


def connection_error(error: BaseException | None, address: BrokerAddress) -> RelatumError:
    """The error for a connection that could not be opened.

    pika calls a connection that ended during the opening a "probable" refusal. It is one where the broker said so.
    """
    where = address.where
    closed = _CLOSED_BY_BROKER.search(f"{error} {error!r}")
    if closed is not None and int(closed[1]) in _REFUSED and _FULL not in closed[2]:
        refuses = f"The broker at {where} refuses {address.who} in the virtual host {address.vhost!r}"
        if int(closed[1]) == _NO_VHOST:
            return AccessRefused(f"{refuses}: there is no such virtual host, or this user may not use it.")
        # The broker does not tell a user that it does not know from a wrong password.
        return AccessRefused(
            f"{refuses}: the name, the password or the certificate is wrong; RabbitMQ does not say which."
        )
    if inside(error, AuthenticationError) is not None:
        return ConfigurationError(f"The broker at {where} does not offer {address.login.mechanism} to log in by.")
    port = address.amqp_port or 0
    where = f"{address.host}:{port}"
    refused = refusal_inside(error, where)
    if refused is not None:
        return refused
    if error is None or any(inside(error, kind) for kind in _OUT_OF_TIME):
        return BrokerUnavailable(f"Nothing at {where} answered as AMQP 0.9.1 in time{port_hint(port)}.")
    reason = inside(error, socket.gaierror) or inside(error, OSError)
    return BrokerUnavailable(f"No AMQP 0.9.1 at {where}{unreached(reason, address.host)}{port_hint(port)}.")


_OUT_OF_TIME: Final = (TimeoutError, AMQPConnectorStackTimeout, ConnectionOpenAborted)
"""asyncio's, and pika's for an attempt that pika itself has given up, of a blocking connection and of another."""

_NO_VHOST: Final = 530
"""NOT_ALLOWED: the reply code of a virtual host that is not there or that the user may not use."""

_REFUSED: Final = frozenset({403, _NO_VHOST})
"""Reply codes of a refused user or password, and of a virtual host. Others pass: a node that stops, for one."""

_FULL: Final = "is reached"
"""Ends the text of a 530 that says "connection limit (10) is reached", of a user, a virtual host or a node."""

_CLOSED_BY_BROKER: Final = re.compile(r"\((\d+)\) (.*)", re.DOTALL)
"""What pika's errors keep of a Close frame: the reply code and the text."""
