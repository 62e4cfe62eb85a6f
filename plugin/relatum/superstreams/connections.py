"""Which broker a client's connection leads to, and a blocking connection to it where one is needed."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
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
from relatum.reading import HEARTBEAT_S, Broker, BrokerAddress, BrokerLogin, HeldPassword, login_of_query
from relatum.reading import blocking_connection as new_connection

TIMEOUT_S: Final = 10.0
"""Seconds until a broker that does not answer counts as unavailable."""

_KOMBU_AMQP: Final = ("amqp", "amqps", "pyamqp", "librabbitmq")
"""What kombu calls transports to RabbitMQ."""

_NOTED: Final = "_relatum_told"
"""The attribute of a connection that keeps its latest secret, where its client does not."""

ACCESS_REFUSED: Final = 403
"""AMQP's reply code for a user without the permission."""


def address_of(source: Any, nodes: Iterable[Parameters] = ()) -> BrokerAddress:
    """The address of the broker that is meant, and how to log in to it: as the connection that is given does.

    At each login the password is that of now: a function that kombu was given is asked; of others it is what the client
    keeps for its own next login, or what it told the broker (`note_secret`) and keeps nowhere.

    Args:
        source: A URL, a `Broker` or an address, a pika connection or channel of any kind, an aio-pika or aiormq
            connection, or a kombu connection. Of several URLs that kombu was given, the one it is connected to comes
            first.
        nodes: Where else a pika connection could lead: to other nodes of the same cluster.

    Raises:
        ConfigurationError: it is none of these, or the URL cannot be read; or its credentials are erased.
    """
    if isinstance(source, str | Broker | BrokerAddress):
        return BrokerAddress.of(source)
    if isinstance(source, BlockingChannel | Channel):
        source = source.connection
    others: list[str] = []
    says: Callable[[Any], Any] = _secret_of
    if isinstance(source, BlockingConnection | Connection):
        url, login = _of_pika(_parameters(source))
        others = [_of_pika(node)[0] for node in nodes]
    elif hasattr(source, "url"):
        url, login = _of_aio_pika(source)
        says = lambda connection: connection.url.password  # noqa: E731
    elif hasattr(source, "transport_options"):
        (url, *others), login = _of_kombu(source)
        says = lambda connection: connection.password  # noqa: E731
    else:
        kind = type(source).__name__
        raise ConfigurationError(f"broker is a URL, a Broker, or a connection or channel of a client, not {kind}")
    address = BrokerAddress.parse(url)
    address = address.beside(_alike(address, others))
    # A function of kombu's says it at each login: that of now may be another already.
    asked = getattr(source, "password", None)
    others_say = [(node, _password_of) for node in nodes]
    held = HeldPassword(source, address.password, says, *others_say)
    address = address.with_password(asked if callable(asked) else held)
    return address.with_login(login) if login.is_of_tls else address


def note_secret(connection: Any, secret: Any) -> None:
    """Keep the secret that a connection logs in with from now on, where its client keeps it nowhere."""
    setattr(connection, _NOTED, secret)


def _secret_of(connection: Any) -> Any:
    return vars(connection).get(_NOTED)


def _password_of(parameters: Any) -> Any:
    return getattr(parameters.credentials, "password", None)


def _alike(address: BrokerAddress, urls: Iterable[str]) -> Iterator[BrokerAddress]:
    """The addresses of other nodes that a client goes on to: where the same streams are, and the same login will do."""
    for url in urls:
        # What only the client understands stops nobody.
        with suppress(ConfigurationError):
            other = BrokerAddress.parse(url)
            if (other.vhost, other.amqp_tls) == (address.vhost, address.amqp_tls):
                yield other


def _of_pika(parameters: Parameters) -> tuple[str, BrokerLogin]:
    """The URL of the broker a pika connection is to, credentials in it, and how it logs in."""
    credentials = parameters.credentials
    user, password = getattr(credentials, "username", "guest"), getattr(credentials, "password", "guest")
    if password is None:
        raise ConfigurationError(
            "The connection's credentials were erased when it connected (erase_on_connect): pass broker=, as which "
            "streams are read, or intercept the connection before it is open"
        )
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
    login = login_of_query(parts.query, ssl_context=context, is_clients=True)
    return url, login


def _of_kombu(connection: Any) -> tuple[list[str], BrokerLogin]:
    """The URLs of the broker a kombu connection is to, credentials in them, and how it logs in. With TLS it is opened.

    The first is the node's that it is connected to, or is to be; then those it would go on to.
    """
    from kombu.utils.url import parse_url

    scheme = "amqps" if connection.ssl else "amqp"

    def url_of(given: Mapping[str, Any]) -> str:
        user, password = given.get("userid") or "guest", given.get("password") or "guest"
        # A function is asked when somebody logs in, and not in the thread that publishes.
        password = "" if callable(password) else password
        host, vhost = given.get("hostname") or "localhost", given.get("virtual_host") or "/"
        port = given.get("port") or (5671 if connection.ssl else 5672)
        return _url(scheme, user, password, host, port, vhost)

    urls = [url_of(vars(connection))]
    for other in connection.alt or ():
        # As kombu switches: some are mere names of hosts, and a URL's virtual host may be left out.
        said = parse_url(other) if "://" in other else {"hostname": other}
        if said.get("transport", "amqp") in _KOMBU_AMQP:
            said["virtual_host"] = said.get("virtual_host") or connection.virtual_host
            urls.append(url_of({**connection._initial_params, **said}))
    if not connection.ssl:
        return urls, BrokerLogin()
    named = connection.connection.sock.server_hostname
    return urls, BrokerLogin(
        mechanism="EXTERNAL" if connection.login_method == "EXTERNAL" else "PLAIN",
        ssl_context=connection.connection.sock.context,
        server_name=named if named and named != connection.hostname else None,
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
