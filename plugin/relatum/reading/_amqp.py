"""Requests over AMQP 0.9.1: which cluster a guessed stream port must belong to, and whether a name is a queue's.

Any server may listen on a guessed stream port. Servers of the stream protocol name their cluster before the login, so
credentials are sent only to the cluster that the AMQP port belongs to.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache, partial
from typing import Any, Final

import pika
from pika.adapters.utils.connection_workflow import AMQPConnectorException
from pika.exceptions import AMQPError, AuthenticationError, ChannelClosedByBroker, ConnectionBlockedTimeout

from relatum.common.checks import seconds_text
from relatum.common.client_logs import own_connection
from relatum.common.waiting import LEAST_S, left_s
from relatum.errors import (
    AccessRefused,
    ConfigurationError,
    NotAStream,
    NotFound,
    RelatumError,
    StreamNotFound,
    StreamUnavailable,
)
from relatum.reading._address import BrokerAddress
from relatum.reading._connecting import (
    BROKERS_MAX,
    HEARTBEAT_S,
    first_answering,
    nested_errors,
    reach_error,
)

_NO_VHOST: Final = 530
"""The reply code NOT_ALLOWED: the virtual host does not exist, or the user may not use it."""

_REFUSED: Final = frozenset({403, _NO_VHOST})
"""Reply codes of a refused user, password or virtual host. Other codes are transient, such as a stopping node's."""

_LIMIT_REACHED: Final = "is reached"
"""In the text of a 530 for a connection limit of a user, virtual host or node: "connection limit (10) is reached"."""

_CLOSED_BY_BROKER: Final = re.compile(r"\((\d+)\) (.*)", re.DOTALL)
"""Matches the reply code and text of the broker's Close in pika's errors."""

_NO_QUEUE: Final = "no queue"
"""In the text of a 404 if no queue has the name."""

_EXCLUSIVE: Final = "exclusive"
"""In the text of a 405 if the queue is exclusive to another connection. Streams are never exclusive."""


class UnnamedCluster(ConfigurationError):
    """The broker does not name its cluster, so nothing can prove that a guessed stream port belongs to it."""


@lru_cache(BROKERS_MAX)
def expected_cluster(address: BrokerAddress) -> str:
    """Return the name of the cluster that must answer on a guessed stream port. Cached."""
    with asking(address, max(LEAST_S, left_s())) as connection:
        cluster_name = connection._impl.server_properties.get("cluster_name")
    name = cluster_name.decode(errors="replace") if isinstance(cluster_name, bytes) else cluster_name
    if not isinstance(name, str) or not name:
        raise UnnamedCluster(
            "The broker does not name its cluster, so its stream port cannot be guessed: give a rabbitmq-stream:// URL."
        )
    return name


def blocking_connection(address: BrokerAddress, *, timeout_s: float, heartbeat_s: int) -> pika.BlockingConnection:
    """Return a blocking pika connection to the first address that answers. Raises as `StreamReader.open`."""
    return first_answering(address, timeout_s, lambda one, share_s: _connect(one, share_s, timeout_s, heartbeat_s))


def _connect(address: BrokerAddress, within_s: float, timeout_s: float, heartbeat_s: int) -> pika.BlockingConnection:
    if address.amqp_port is None:
        raise ConfigurationError("This call needs AMQP 0.9.1, and only a stream URL was given: give an amqp:// URL.")
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
    # If a broker accepts the connection and never answers, pika raises AMQPConnectorException, not an AMQPError.
    except (AMQPError, AMQPConnectorException, OSError) as error:
        raise _amqp_error(error, address, address.amqp_port) from error


@contextmanager
def in_time(connection: pika.BlockingConnection, timeout_s: float) -> Iterator[None]:
    """End the connection if the block takes longer than `timeout_s`. Pika itself would wait forever."""
    # It works as pika's timer for blocked connections: while pika waits, only timers of its loop run.
    loop = connection._impl
    end = partial(loop._terminate_stream, ConnectionBlockedTimeout(f"no answer within {seconds_text(timeout_s)}"))
    timer = loop._adapter_call_later(timeout_s, end)
    try:
        yield
    finally:
        loop._adapter_remove_timeout(timer)


@contextmanager
def asking(address: BrokerAddress, timeout_s: float) -> Iterator[pika.BlockingConnection]:
    """Open a connection for one request, and close it after the answer or the timeout."""
    connection = blocking_connection(address, timeout_s=timeout_s, heartbeat_s=HEARTBEAT_S)
    with own_connection():
        try:
            with in_time(connection, timeout_s):
                yield connection
        finally:
            close_in_time(connection)


def close_in_time(connection: pika.BlockingConnection) -> None:
    """Close a connection, even if the broker does not answer."""
    if connection.is_open:
        with suppress(AMQPError, OSError), in_time(connection, LEAST_S):
            connection.close()


def _amqp_error(error: BaseException, address: BrokerAddress, port: int) -> RelatumError:
    """Translate pika's error. Pika calls any failure a "probable" refusal, so only the broker's reply code counts."""
    closed = _CLOSED_BY_BROKER.search(f"{error} {error!r}")
    if closed is not None and int(closed[1]) in _REFUSED and _LIMIT_REACHED not in closed[2]:
        refuses = f"The broker at {address.where} refuses {address.who} in the virtual host {address.vhost!r}"
        if int(closed[1]) == _NO_VHOST:
            return AccessRefused(f"{refuses}: there is no such virtual host, or this user may not use it.")
        wrong = "the name, the password or the certificate is wrong"
        return AccessRefused(f"{refuses}: {wrong}; RabbitMQ does not say which.")
    if any(isinstance(each, AuthenticationError) for each in nested_errors(error)):
        mechanism = address.login.mechanism
        where = f"The broker at {address.where}"
        return ConfigurationError(f"{where} does not accept the login mechanism {mechanism}: use another one.")
    return reach_error(error, "AMQP 0.9.1", address.host, port)


def name_missing(error: StreamNotFound, address: BrokerAddress, timeout_s: float) -> NotFound:
    """Return the error of a name that a node does not know as a stream: `NotAStream` if another kind of queue has it.

    One request over AMQP 0.9.1 decides: only streams accept a consumer with an offset. With two requests, a stream that
    is declared again between them would be missing first, and then look like a queue.

    Only "no queue" means that the name is unused: a starting node or cluster answers 404 for existing streams, too
    ("home node ... is down or inaccessible"). Texts seen with RabbitMQ 3.10.8 and 4.3.6. Raises `StreamUnavailable` if
    the stream exists after all, or may exist.
    """
    name = error.stream
    try:
        with asking(address, timeout_s) as connection:
            channel = connection.channel()
            channel.basic_qos(prefetch_count=1)
            channel.basic_consume(name, lambda *_: None, arguments={"x-stream-offset": "next"})
    except ChannelClosedByBroker as refused:
        code, text = refused.reply_code, refused.reply_text
    except (AMQPError, RelatumError):
        return error
    else:
        raise StreamUnavailable(f"The stream {name!r} was declared just now: read it again.", stream=name)
    if (code == 406 and "x-stream-offset" in text) or (code == 405 and _EXCLUSIVE in text):
        return NotAStream(f"{name!r} is a queue of another type, not a stream: give a stream's name.", stream=name)
    if code == 404 and _NO_QUEUE not in text:
        raise StreamUnavailable(f"The stream {name!r} is starting, or its node is down: try again.", stream=name)
    if code in (405, 406):
        raise StreamUnavailable(f"The stream {name!r} has no running replica on this node: try again.", stream=name)
    return error
