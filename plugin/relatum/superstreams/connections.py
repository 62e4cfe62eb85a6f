"""The broker's address of a client's connection, blocking connections, and the declaration of single streams."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final
from urllib.parse import quote, urlsplit, urlunsplit

from pika import BlockingConnection
from pika.adapters.blocking_connection import BlockingChannel
from pika.channel import Channel
from pika.connection import Connection, Parameters
from pika.credentials import ExternalCredentials
from pika.exceptions import AMQPError, ChannelClosedByBroker
from pika.spec import ACCESS_REFUSED, NOT_FOUND, PRECONDITION_FAILED

from relatum.common.checks import checked_count, checked_text
from relatum.common.client_logs import own_connection
from relatum.common.limits import INTEGER_MAX
from relatum.errors import (
    AccessRefused,
    BrokerUnavailable,
    ConfigurationError,
    ConnectionLost,
    InvalidInput,
    StreamNotFound,
    SuperStreamConflict,
)
from relatum.reading import HEARTBEAT_S, Broker, BrokerAddress, BrokerLogin, HeldPassword, StreamReader, login_of_query
from relatum.reading import blocking_connection as new_connection

TIMEOUT_S: Final = 10.0
"""Seconds after which a broker that does not answer counts as unavailable."""

_KOMBU_AMQP: Final = ("amqp", "amqps", "pyamqp", "librabbitmq")
"""kombu's names of RabbitMQ transports."""

_NOTED_ATTRIBUTE: Final = "_relatum_secret"
"""The attribute in which `note_secret` stores a connection's latest secret."""

_NAME_UNKNOWN: Final = re.compile(r"no (queue|exchange) '")
"""In the text of a 404 if the name is unknown. Texts seen with RabbitMQ 3.10.8 and 4.3.6."""


def address_of(source: Any, nodes: Iterable[Parameters] = ()) -> BrokerAddress:
    """Return the address, with the login, of a URL, a `Broker`, or a connection of pika, aio-pika, aiormq or kombu.

    Each login uses the current password: the result of kombu's password function; without one, the password that the
    client keeps for its next login, or the latest one given to `note_secret`. `nodes`: Parameters of other nodes of the
    same cluster. If kombu has several URLs, the one to which it is connected comes first.
    """
    if isinstance(source, str | Broker | BrokerAddress):
        return BrokerAddress.of(source)
    if isinstance(source, BlockingChannel | Channel):
        source = source.connection
    others: list[str] = []
    read: Callable[[Any], Any] = lambda connection: vars(connection).get(_NOTED_ATTRIBUTE)  # noqa: E731
    if isinstance(source, BlockingConnection | Connection):
        url, login = _of_pika(_parameters(source))
        others = [_of_pika(node)[0] for node in nodes]
    elif hasattr(source, "url"):
        url, login = _of_aio_pika(source)
        read = lambda connection: connection.url.password  # noqa: E731
    elif hasattr(source, "transport_options"):
        (url, *others), login = _of_kombu(source)
        read = lambda connection: connection.password  # noqa: E731
    else:
        kind = type(source).__name__
        raise ConfigurationError(f"broker= takes a URL, a Broker, or a client's connection or channel, not {kind}")
    address = BrokerAddress.parse(url)
    address = address.beside(_of_equal_login(address, others))
    # kombu's password may be a function, which each login calls.
    password = getattr(source, "password", None)
    of_nodes = [(node, lambda node: getattr(node.credentials, "password", None)) for node in nodes]
    held = HeldPassword(source, address.password, read, *of_nodes)
    address = address.with_password(password if callable(password) else held)
    return address.with_login(login) if login.needs_tls else address


def note_secret(connection: Any, secret: Any) -> None:
    """Store the secret that a connection uses from now on, for clients that do not store it themselves."""
    setattr(connection, _NOTED_ATTRIBUTE, secret)


def _of_equal_login(address: BrokerAddress, urls: Iterable[str]) -> Iterator[BrokerAddress]:
    """Yield the addresses of URLs with the same virtual host and TLS setting, which have the same streams and login."""
    for url in urls:
        # URLs that only the client can parse are ignored.
        with suppress(ConfigurationError):
            other = BrokerAddress.parse(url)
            if (other.vhost, other.amqp_tls) == (address.vhost, address.amqp_tls):
                yield other


def _of_pika(parameters: Parameters) -> tuple[str, BrokerLogin]:
    """Return the broker's URL of a pika connection, with credentials, and its login."""
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
    is_external = isinstance(credentials, ExternalCredentials)
    return url, _tls_login(options.context, options.server_hostname, parameters.host, is_external=is_external)


def _tls_login(context: Any, named: str | None, host: str, *, is_external: bool) -> BrokerLogin:
    # None as the server's name: the certificate of each node of a cluster must name the node's host.
    server_name = named if named and named != host else None
    return BrokerLogin("EXTERNAL" if is_external else "PLAIN", ssl_context=context, server_name=server_name)


def _url(scheme: str, user: str, password: str, host: str, port: int, vhost: str) -> str:
    user, password, vhost = (quote(text, safe="") for text in (user, password, vhost))
    return f"{scheme}://{user}:{password}@{f'[{host}]' if ':' in host else host}:{port}/{vhost}"


def _of_aio_pika(connection: Any) -> tuple[str, BrokerLogin]:
    """Return the broker's URL of an aio-pika or aiormq connection, with credentials, and its login."""
    parts = urlsplit(str(connection.url))
    # Without the query, because it has options of the client.
    url = urlunsplit(parts._replace(query="", fragment=""))
    if parts.scheme != "amqps":
        return url, BrokerLogin()
    context = getattr(connection, "ssl_context", None) or getattr(connection, "kwargs", {}).get("context")
    login = login_of_query(parts.query, ssl_context=context, is_clients=True)
    return url, login


def _of_kombu(connection: Any) -> tuple[list[str], BrokerLogin]:
    """Return the broker's URLs of a kombu connection, the current one first, and its login. With TLS, this connects."""
    from kombu.utils.url import parse_url

    scheme = "amqps" if connection.ssl else "amqp"

    def url_of(given: Mapping[str, Any]) -> str:
        user, password = given.get("userid") or "guest", given.get("password") or "guest"
        # Each login calls the function, not the thread that publishes.
        password = "" if callable(password) else password
        host, vhost = given.get("hostname") or "localhost", given.get("virtual_host") or "/"
        port = given.get("port") or (5671 if connection.ssl else 5672)
        return _url(scheme, user, password, host, port, vhost)

    urls = [url_of(vars(connection))]
    for other in connection.alt or ():
        # Parsed as kombu does: an alternative may be only a host name, or lack the virtual host.
        parts = parse_url(other) if "://" in other else {"hostname": other}
        if parts.get("transport", "amqp") in _KOMBU_AMQP:
            parts["virtual_host"] = parts.get("virtual_host") or connection.virtual_host
            urls.append(url_of({**connection._initial_params, **parts}))
    if not connection.ssl:
        return urls, BrokerLogin()
    sock, is_external = connection.connection.sock, connection.login_method == "EXTERNAL"
    return urls, _tls_login(sock.context, sock.server_hostname, connection.hostname, is_external=is_external)


def vhost_of(channel: Any) -> str:
    """Return the virtual host of a pika channel or an aiormq connection."""
    is_pika = isinstance(channel, BlockingChannel | Channel)
    return str(_parameters(channel.connection).virtual_host if is_pika else channel.vhost)


@contextmanager
def blocking_connection(source: Any, address: BrokerAddress) -> Iterator[BlockingConnection]:
    """Provide a blocking connection to a broker: the given one, or a new one that is closed after the block."""
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
        raise ConnectionLost("The AMQP connection to the broker was lost: try again.") from error
    finally:
        if not borrowed and connection.is_open:
            with own_connection():
                connection.close()


def _parameters(connection: "BlockingConnection | Connection") -> Parameters:
    return connection._impl.params if isinstance(connection, BlockingConnection) else connection.params


# --- single streams ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StreamOptions:
    """The options with which a stream is declared.

    Attributes:
        max_length_bytes: Size above which retention drops the oldest segments. None (default): no limit.
        max_age: Age above which retention drops segments, in whole seconds. None (default): no limit.
        segment_bytes_max: Maximum bytes of a segment. None (default): the broker's default, 500,000,000.
        leader_locator: The placement of leaders: "client-local", "balanced" or "least-leaders". None (default): the
            broker's default.
        initial_cluster_size: The number of nodes with a replica. None (default): all nodes.
    """

    max_length_bytes: int | None = None
    max_age: timedelta | None = None
    segment_bytes_max: int | None = None
    leader_locator: str | None = None
    initial_cluster_size: int | None = None

    def __post_init__(self) -> None:
        for name in ("max_length_bytes", "segment_bytes_max", "initial_cluster_size"):
            value = getattr(self, name)
            if value is not None:
                checked_count(name, value, most=INTEGER_MAX, otherwise=", or None")
        if self.leader_locator is not None:
            checked_text("leader_locator", self.leader_locator)
        if self.max_age is not None and not (
            isinstance(self.max_age, timedelta) and self.max_age >= timedelta(seconds=1)
        ):
            raise InvalidInput(f"max_age= takes a timedelta of at least one second, not {self.max_age!r}.")

    def arguments(self) -> dict[str, Any]:
        """Return the arguments for `queue.declare`."""
        wanted = {
            "x-max-length-bytes": self.max_length_bytes,
            "x-max-age": None if self.max_age is None else f"{int(self.max_age.total_seconds())}s",
            "x-stream-max-segment-size-bytes": self.segment_bytes_max,
            "x-queue-leader-locator": self.leader_locator,
            "x-initial-cluster-size": self.initial_cluster_size,
        }
        return {"x-queue-type": "stream"} | {name: value for name, value in wanted.items() if value is not None}


KEPT: Final = StreamOptions(max_length_bytes=5_000_000_000, max_age=timedelta(days=7), segment_bytes_max=50_000_000)
"""The default options of a stream of copies, such as a tap's.

Retention drops whole segments, and only when a new segment begins. With the broker's default of 500 MB, a stream with
few messages would keep them for years.
"""


def exchange_exists(connection: BlockingConnection, name: str) -> bool:
    """Whether the exchange exists."""
    return _exists(connection, lambda channel: channel.exchange_declare(name, passive=True))


def queue_exists(connection: BlockingConnection, name: str) -> bool:
    """Whether a queue or stream of this name exists."""
    return _exists(connection, lambda channel: channel.queue_declare(name, passive=True))


def _exists(connection: BlockingConnection, ask: Callable[[BlockingChannel], Any]) -> bool:
    # A separate channel, because the broker closes the channel if the name does not exist.
    try:
        with connection.channel() as channel:
            ask(channel)
    except ChannelClosedByBroker as error:
        if error.reply_code != NOT_FOUND:
            raise
        # A node also answers 404 for existing streams that it has not started yet: "home node … is down".
        return _NAME_UNKNOWN.search(error.reply_text) is None
    return True


def stream_exists(connection: BlockingConnection, address: BrokerAddress, stream: str) -> bool:
    """Whether the stream exists. Raises `NotAStream` for a queue of another type."""
    if queue_exists(connection, stream):
        with StreamReader.open(address) as reader, suppress(StreamNotFound):
            reader.bounds(stream)
            return True
    return False


@contextmanager
def refusals(what: str, super_stream: str | None = None) -> Iterator[None]:
    """Translate the broker's refusals of a declaration, into `SuperStreamConflict` or `ConfigurationError`."""
    try:
        yield
    except ChannelClosedByBroker as error:
        if error.reply_code != PRECONDITION_FAILED:
            raise
        if "inequivalent" not in error.reply_text:
            raise ConfigurationError(f"The broker does not accept the stream's options: {error.reply_text}") from error
        if super_stream is None:
            raise ConfigurationError(f"{what}: {error.reply_text}") from error
        raise SuperStreamConflict(f"{what}: {error.reply_text}", super_stream=super_stream, reason=what) from error


def declare_stream(
    connection: BlockingConnection, stream: str, options: StreamOptions, super_stream: str | None = None
) -> None:
    """Declare a stream. Raises as `refusals`."""
    what = f"Stream {stream!r} exists with other arguments"
    with refusals(what, super_stream), connection.channel() as channel:
        channel.queue_declare(stream, durable=True, arguments=options.arguments())


def ensure_stream(address: BrokerAddress, stream: str, options: StreamOptions = KEPT) -> None:
    """Declare a stream, by default like a tap's. An existing stream is left unchanged, another queue `NotAStream`."""
    with blocking_connection(address, address) as connection:
        if not stream_exists(connection, address, stream):
            declare_stream(connection, stream, options)
