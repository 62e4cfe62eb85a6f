"""Which broker a client's connection leads to, and a blocking connection to it where one is needed."""

import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, NamedTuple
from urllib.parse import quote, urlsplit, urlunsplit

from pika import BlockingConnection
from pika.adapters.blocking_connection import BlockingChannel
from pika.channel import Channel
from pika.connection import Connection, Parameters
from pika.exceptions import AMQPError, ChannelClosedByBroker

from relatum.errors import AccessRefused, BrokerUnavailable, ConfigurationError, ConnectionLost
from relatum.reading import BrokerAddress
from relatum.reading import _amqp_blocking as amqp
from relatum.reading._socket import HEARTBEAT_S

TIMEOUT_S: Final = 10.0
"""Seconds until a broker that does not answer counts as unavailable."""

ACCESS_REFUSED: Final = 403
"""AMQP's reply code for a user without the permission."""


class Reach(NamedTuple):
    """How to reach a broker: its address, and the TLS context of the connection it was taken from."""

    address: BrokerAddress
    tls: ssl.SSLContext | None = None


def pika_url(connection: "BlockingConnection | Connection") -> str:
    """The URL of the broker a pika connection is to, credentials in it."""
    parameters = _parameters(connection)
    credentials = parameters.credentials
    user = quote(getattr(credentials, "username", "guest"), safe="")
    password = quote(getattr(credentials, "password", "guest"), safe="")
    scheme = "amqps" if parameters.ssl_options is not None else "amqp"
    vhost = quote(parameters.virtual_host, safe="")
    host = f"[{parameters.host}]" if ":" in parameters.host else parameters.host
    return f"{scheme}://{user}:{password}@{host}:{parameters.port}/{vhost}"


def aio_pika_url(connection: Any) -> str:
    """The URL of the broker an aio-pika or aiormq connection is to, credentials in it."""
    # Without the query: it holds the client's own options.
    return urlunsplit(urlsplit(str(connection.url))._replace(query="", fragment=""))


def reach_of(source: Any, stream_url: str | None = None) -> Reach:
    """How to reach the broker that is meant.

    Args:
        source: A URL or an address, a pika connection or channel of any kind, or an aio-pika or aiormq connection.
        stream_url: Where the stream protocol is, if not at its usual distance from the AMQP port. An address says so
            itself.

    Raises:
        ConfigurationError: it is none of these, or the URL cannot be read.
    """
    if isinstance(source, BrokerAddress):
        return Reach(source)
    if isinstance(source, str):
        return Reach(BrokerAddress.parse(source, stream_url))
    if isinstance(source, BlockingChannel | Channel):
        source = source.connection
    if isinstance(source, BlockingConnection | Connection):
        options = _parameters(source).ssl_options
        return Reach(BrokerAddress.parse(pika_url(source), stream_url), None if options is None else options.context)
    if hasattr(source, "url"):
        return Reach(BrokerAddress.parse(aio_pika_url(source), stream_url))
    raise ConfigurationError(f"broker is a URL, or a connection or channel of a client, not {type(source).__name__}")


def vhost_of(channel: Any) -> str:
    """The virtual host a channel of pika, or a connection of aiormq, is in."""
    if isinstance(channel, BlockingChannel | Channel):
        vhost: str = _parameters(channel.connection).virtual_host
    else:
        vhost = channel.vhost
    return vhost


@contextmanager
def blocking_connection(source: Any, reach: Reach) -> Iterator[BlockingConnection]:
    """A blocking connection to a broker: the one that was given, or one that is closed at the end.

    Raises:
        BrokerUnavailable, AccessRefused: none can be opened.
        ConnectionLost, AccessRefused: what the body met, translated from pika's errors.
    """
    if isinstance(source, BlockingChannel):
        source = source.connection
    borrowed = isinstance(source, BlockingConnection)
    connection = (
        source
        if borrowed
        else amqp.blocking_connection(reach.address, reach.tls, timeout_s=TIMEOUT_S, heartbeat_s=HEARTBEAT_S)
    )
    try:
        yield connection
    except ChannelClosedByBroker as error:
        if error.reply_code == ACCESS_REFUSED:
            raise AccessRefused(f"The broker refuses the user {reach.address.user!r}: {error.reply_text}") from error
        raise BrokerUnavailable(f"The broker ended the channel: {error.reply_text}") from error
    except (AMQPError, OSError) as error:
        raise ConnectionLost("The AMQP connection to the broker was lost.") from error
    finally:
        if not borrowed and connection.is_open:
            connection.close()


def _parameters(connection: "BlockingConnection | Connection") -> Parameters:
    return connection._impl.params if isinstance(connection, BlockingConnection) else connection.params
