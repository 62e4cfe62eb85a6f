"""The broker of a client's connection, and a blocking connection to it if one is needed."""

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
"""Seconds after which a broker that does not answer counts as unavailable."""

_KOMBU_AMQP: Final = ("amqp", "amqps", "pyamqp", "librabbitmq")
"""kombu's names of transports to RabbitMQ."""

_NOTED: Final = "_relatum_told"
"""The attribute that holds a connection's latest secret if the client does not keep it."""

ACCESS_REFUSED: Final = 403
"""AMQP's reply code for a missing permission."""


def address_of(source: Any, nodes: Iterable[Parameters] = ()) -> BrokerAddress:
    """Return the broker's address, with the login of the given connection.

    Each login uses the current password: from the function given to kombu; else the one that the client keeps for its
    own next login, or the one that was sent to the broker and noted by `note_secret`.

    Args:
        source: A URL, a `Broker` or an address, a pika connection or channel of any kind, an aio-pika or aiormq
            connection, or a kombu connection. If kombu has several URLs, the one it is connected to comes first.
        nodes: Parameters of other nodes of the same cluster that a pika connection could connect to.

    Raises:
        ConfigurationError: The source is none of these, the URL is invalid, or the credentials were erased.
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
        raise ConfigurationError(f"broker= takes a URL, a Broker, or a client's connection or channel, not {kind}")
    address = BrokerAddress.parse(url)
    address = address.beside(_of_equal_login(address, others))
    # kombu calls its function at each login: the current password may differ already.
    asked = getattr(source, "password", None)
    others_say = [(node, _password_of) for node in nodes]
    held = HeldPassword(source, address.password, says, *others_say)
    address = address.with_password(asked if callable(asked) else held)
    return address.with_login(login) if login.is_of_tls else address


def note_secret(connection: Any, secret: Any) -> None:
    """Note the secret that a connection uses from now on, for clients that do not keep it."""
    setattr(connection, _NOTED, secret)


def _secret_of(connection: Any) -> Any:
    return vars(connection).get(_NOTED)


def _password_of(parameters: Any) -> Any:
    return getattr(parameters.credentials, "password", None)


def _of_equal_login(address: BrokerAddress, urls: Iterable[str]) -> Iterator[BrokerAddress]:
    """Yield the addresses of other nodes with the same virtual host and TLS setting: the same streams and login."""
    for url in urls:
        # Ignore URLs that only the client understands.
        with suppress(ConfigurationError):
            other = BrokerAddress.parse(url)
            if (other.vhost, other.amqp_tls) == (address.vhost, address.amqp_tls):
                yield other


def _of_pika(parameters: Parameters) -> tuple[str, BrokerLogin]:
    """Return the broker's URL of a pika connection, with credentials, and how it logs in."""
    credentials = parameters.credentials
    user, password = getattr(credentials, "username", "guest"), getattr(credentials, "password", "guest")
    if password is None:
        raise ConfigurationError(
            "The connection's credentials were erased when it connected (erase_on_connect): pass broker= to log in for "
            "reading streams, or intercept the connection before it opens"
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
        # Otherwise each node of a cluster is checked against its own host name.
        server_name=named if named and named != parameters.host else None,
    )


def _url(scheme: str, user: str, password: str, host: str, port: int, vhost: str) -> str:
    user, password, vhost = (quote(text, safe="") for text in (user, password, vhost))
    return f"{scheme}://{user}:{password}@{f'[{host}]' if ':' in host else host}:{port}/{vhost}"


def _of_aio_pika(connection: Any) -> tuple[str, BrokerLogin]:
    """Return the broker's URL of an aio-pika or aiormq connection, with credentials, and how it logs in."""
    parts = urlsplit(str(connection.url))
    # Without the query, which has the client's own options.
    url = urlunsplit(parts._replace(query="", fragment=""))
    if parts.scheme != "amqps":
        return url, BrokerLogin()
    context = getattr(connection, "ssl_context", None) or getattr(connection, "kwargs", {}).get("context")
    login = login_of_query(parts.query, ssl_context=context, is_clients=True)
    return url, login


def _of_kombu(connection: Any) -> tuple[list[str], BrokerLogin]:
    """Return the broker's URLs of a kombu connection, with credentials, and how it logs in. With TLS this connects.

    The first URL is the one that kombu is connected to, or will be; then come its alternatives.
    """
    from kombu.utils.url import parse_url

    scheme = "amqps" if connection.ssl else "amqp"

    def url_of(given: Mapping[str, Any]) -> str:
        user, password = given.get("userid") or "guest", given.get("password") or "guest"
        # A function is called at a login, not in the thread that publishes.
        password = "" if callable(password) else password
        host, vhost = given.get("hostname") or "localhost", given.get("virtual_host") or "/"
        port = given.get("port") or (5671 if connection.ssl else 5672)
        return _url(scheme, user, password, host, port, vhost)

    urls = [url_of(vars(connection))]
    for other in connection.alt or ():
        # As kombu reads them: some are mere host names, and URLs may lack the virtual host.
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
    """Return the virtual host of a pika channel or an aiormq connection."""
    if isinstance(channel, BlockingChannel | Channel):
        vhost: str = _parameters(channel.connection).virtual_host
    else:
        vhost = channel.vhost
    return vhost


@contextmanager
def blocking_connection(source: Any, address: BrokerAddress) -> Iterator[BlockingConnection]:
    """Provide a blocking connection to a broker: the given one, or a new one that is closed at the end.

    Raises:
        BrokerUnavailable, AccessRefused: No connection can be opened, or the broker refused a call of the body.
        ConnectionLost: The connection was lost in the body.
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
        raise BrokerUnavailable(f"The broker closed the channel: {error.reply_text}") from error
    except (AMQPError, OSError) as error:
        raise ConnectionLost("The AMQP connection to the broker was lost.") from error
    finally:
        if not borrowed and connection.is_open:
            with own_connection():
                connection.close()


def _parameters(connection: "BlockingConnection | Connection") -> Parameters:
    return connection._impl.params if isinstance(connection, BlockingConnection) else connection.params
