"""Which broker a client's connection leads to, and a blocking connection to it where one is needed."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, Final
from urllib.parse import quote, urlsplit, urlunsplit

from pika import BlockingConnection
from pika.adapters.blocking_connection import BlockingChannel
from pika.channel import Channel
from pika.connection import Connection, Parameters
from pika.credentials import ExternalCredentials
from pika.exceptions import AMQPError, ChannelClosedByBroker

from relatum.client_logs import own_connection
from relatum.errors import AccessRefused, BrokerUnavailable, ConfigurationError, ConnectionLost
from relatum.reading import HEARTBEAT_S, AuthMechanism, BrokerAddress, BrokerLogin, login_of_query
from relatum.reading import blocking_connection as new_connection

TIMEOUT_S: Final = 10.0
"""Seconds until a broker that does not answer counts as unavailable."""

ACCESS_REFUSED: Final = 403
"""AMQP's reply code for a user without the permission."""


def address_of(source: Any, stream_url: str | None = None) -> BrokerAddress:
    """The address of the broker that is meant, and how to log in to it: as the connection that is given does.

    Args:
        source: A URL or an address, a pika connection or channel of any kind, an aio-pika or aiormq connection, a kombu
            connection, a producer of rstream, or a connection of rabbitmq-amqp-python-client.
        stream_url: Where the stream protocol is, if not at its usual distance from the AMQP port. An address says so
            itself.

    Raises:
        ConfigurationError: it is none of these, or the URL cannot be read.
    """
    if isinstance(source, str | BrokerAddress):
        return BrokerAddress.of(source, stream_url)
    if isinstance(source, BlockingChannel | Channel):
        source = source.connection
    if isinstance(source, BlockingConnection | Connection):
        url, login = _of_pika(source)
    elif _is_of(source, "rstream"):
        url, login = _of_rstream(source._pool)
    elif _is_of(source, "rabbitmq_amqp_python_client"):
        url, login = _of_amqp10(getattr(source, "_connection", source))
    elif hasattr(source, "url"):
        url, login = _of_aio_pika(source)
    elif hasattr(source, "transport_options"):
        url, login = _of_kombu(source)
    else:
        kind = type(source).__name__
        raise ConfigurationError(f"broker is a URL, or a connection or channel of a client, not {kind}")
    address = BrokerAddress.parse(url, stream_url)
    return replace(address, login=login) if login.is_of_tls else address


def _of_pika(connection: "BlockingConnection | Connection") -> tuple[str, BrokerLogin]:
    """The URL of the broker a pika connection is to, credentials in it, and how it logged in."""
    parameters = _parameters(connection)
    credentials = parameters.credentials
    user, password = getattr(credentials, "username", "guest"), getattr(credentials, "password", "guest")
    options = parameters.ssl_options
    scheme = "amqps" if options is not None else "amqp"
    url = _url(scheme, user, password, parameters.host, parameters.port, parameters.virtual_host)
    if options is None:
        return url, BrokerLogin()
    named = options.server_hostname
    return url, BrokerLogin(
        mechanism="EXTERNAL" if isinstance(credentials, ExternalCredentials) else "PLAIN",
        ssl_context=options.context,
        # The host's own name is left to each node of a cluster.
        server_name=named if named and named != parameters.host else None,
    )


def _url(scheme: str, user: str, password: str, host: str, port: int, vhost: str) -> str:
    user, password, vhost = (quote(text, safe="") for text in (user, password, vhost))
    return f"{scheme}://{user}:{password}@{f'[{host}]' if ':' in host else host}:{port}/{vhost}"


def _of_aio_pika(connection: Any) -> tuple[str, BrokerLogin]:
    """The URL of the broker an aio-pika or aiormq connection is to, credentials in it, and how it logs in."""
    parts = urlsplit(str(connection.url))
    # Without the query: it holds the client's own options.
    url = urlunsplit(parts._replace(query="", fragment=""))
    if parts.scheme != "amqps":
        return url, BrokerLogin()
    context = getattr(connection, "ssl_context", None) or getattr(connection, "kwargs", {}).get("context")
    login = login_of_query(parts.query, ssl_context=context, is_lenient=True)
    return url, login


def _of_kombu(connection: Any) -> tuple[str, BrokerLogin]:
    """The URL of the broker a kombu connection is to, credentials in it, and how it logs in. With TLS it is opened."""
    user, password = connection.userid or "guest", connection.password or "guest"
    if callable(password):
        password = password()
    host, vhost = connection.hostname or "localhost", connection.virtual_host or "/"
    port = connection.port or (5671 if connection.ssl else 5672)
    url = _url("amqps" if connection.ssl else "amqp", user, password, host, port, vhost)
    if not connection.ssl:
        return url, BrokerLogin()
    named = connection.connection.sock.server_hostname
    return url, BrokerLogin(
        mechanism="EXTERNAL" if connection.login_method == "EXTERNAL" else "PLAIN",
        ssl_context=connection.connection.sock.context,
        server_name=named if named and named != connection.hostname else None,
    )


def _is_of(source: Any, package: str) -> bool:
    """Whether an object is of that package's classes; nobody need have it."""
    return any(kind.__module__.partition(".")[0] == package for kind in type(source).__mro__)


def _of_rstream(pool: Any) -> tuple[str, BrokerLogin]:
    """The URL of the broker whose connections a producer of rstream has, credentials in it, and how it logs in."""
    context = pool.ssl_context
    scheme = "rabbitmq-stream" if context is None else "rabbitmq-stream+tls"
    url = _url(scheme, pool.username, pool.password, pool.addr.host, pool.addr.port, pool.vhost)
    is_external = context is not None and pool._sasl_configuration_mechanism.value == "EXTERNAL"
    return url, BrokerLogin(mechanism="EXTERNAL" if is_external else "PLAIN", ssl_context=context)


def _of_amqp10(connection: Any) -> tuple[str, BrokerLogin]:
    """The URL of the broker an AMQP 1.0 connection is to, or is to be to, credentials in it, and how it logs in."""
    url = connection._addr or connection._addrs[0]
    token = getattr(connection._oauth2_options, "token", None)
    if token is not None:
        # RabbitMQ takes a token for a password, whatever the user's name is.
        parts = urlsplit(url)
        at = parts.netloc.rpartition("@")[2]
        url = urlunsplit(parts._replace(netloc=f"token:{quote(token, safe='')}@{at}"))
    asked = connection._conf_ssl_context
    if asked is None:
        return url, BrokerLogin()
    if not isinstance(asked.ca_cert if hasattr(asked, "ca_cert") else None, str):
        raise ConfigurationError("certificates out of a store of Windows: say where streams are read by broker_url=")
    own = asked.client_cert
    if own is None:
        return url, BrokerLogin(ca=asked.ca_cert)
    mechanism: AuthMechanism = "PLAIN" if urlsplit(url).username else "EXTERNAL"
    return url, BrokerLogin(
        mechanism=mechanism,
        ca=asked.ca_cert,
        certificate=own.client_cert,
        key=own.client_key,
        key_password=own.password,
    )


def vhost_of(channel: Any) -> str:
    """The virtual host a channel of pika, or a connection of aiormq, is in."""
    if isinstance(channel, BlockingChannel | Channel):
        vhost: str = _parameters(channel.connection).virtual_host
    else:
        vhost = channel.vhost
    return vhost


@contextmanager
def blocking_connection(source: Any, address: BrokerAddress) -> Iterator[BlockingConnection]:
    """A blocking connection to a broker: the one that was given, or one that is closed at the end.

    Raises:
        BrokerUnavailable, AccessRefused: none can be opened.
        ConnectionLost, AccessRefused: what the body met, translated from pika's errors.
    """
    if isinstance(source, BlockingChannel):
        source = source.connection
    borrowed = isinstance(source, BlockingConnection)
    connection = source if borrowed else new_connection(address, timeout_s=TIMEOUT_S, heartbeat_s=HEARTBEAT_S)
    try:
        with nullcontext() if borrowed else own_connection():
            yield connection
    except ChannelClosedByBroker as error:
        if error.reply_code == ACCESS_REFUSED:
            raise AccessRefused(f"The broker refuses {address.who}: {error.reply_text}") from error
        raise BrokerUnavailable(f"The broker ended the channel: {error.reply_text}") from error
    except (AMQPError, OSError) as error:
        raise ConnectionLost("The AMQP connection to the broker was lost.") from error
    finally:
        if not borrowed and connection.is_open:
            with own_connection():
                connection.close()


def _parameters(connection: "BlockingConnection | Connection") -> Parameters:
    return connection._impl.params if isinstance(connection, BlockingConnection) else connection.params
