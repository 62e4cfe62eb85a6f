"""`intercept`, `release` and `statistics`; and `stamped` for other clients."""

from collections.abc import Iterable, Mapping
from contextlib import suppress
from importlib import import_module
from time import time_ns
from typing import Any, Final, TypeVar
from weakref import WeakKeyDictionary

from pika import BlockingConnection
from pika.connection import Connection

from relatum.common.checks import checked_names
from relatum.common.uuid7 import uuid7
from relatum.errors import ConfigurationError, RelatumError
from relatum.keys import KeyDefinition, as_definitions
from relatum.publishing import _pika as pika_connections
from relatum.publishing._apps import Celery, Dramatiq, ProcessInterceptions
from relatum.publishing._interception import (
    Interception,
    Options,
    PublisherCounts,
    PublisherStatistics,
    RecorderChoice,
    interception_of,
)
from relatum.publishing._stamp import OnInvalid, Stamper
from relatum.reading import Broker
from relatum.store.database import AnyDatabase

_Connection = TypeVar("_Connection")

_CLIENTS: Final[Mapping[str, Any]] = {
    "aio_pika": "_aio_pika",
    "celery.app.base": Celery,
    "dramatiq.brokers.rabbitmq": Dramatiq,
    "faststream.rabbit.broker.broker": "_faststream",
}
"""Adapters by the module or package of the connection's class. Text names a module, which imports an extra."""

_FORKING_CLIENTS: Final = frozenset({"celery", "dramatiq", "faststream"})
"""Clients whose app or broker objects exist before their processes fork."""

_STAMPER: Final = Stamper(())
"""Stamps messages that other clients publish. Their keys are unknown, so their values are not checked."""

_released: Final[WeakKeyDictionary[object, PublisherCounts]] = WeakKeyDictionary()
"""The counts of released connections, until these are garbage-collected."""


def intercept(
    connection: _Connection,
    *,
    database: "AnyDatabase | None" = None,
    keys: Iterable["str | KeyDefinition"] = (),
    recorder: RecorderChoice = "embedded",
    on_invalid: OnInvalid = "raise",
    streams: Iterable[str] = (),
    broker: str | Broker | None = None,
    confirm_timeout_s: float | None = None,
    copy_to: str | None = None,
) -> _Connection:
    """Make a connection publish messages that Relatum can relate, and return the connection.

    A message without a `message_id` gets a UUIDv7, which carries the message's time. A message with an id of its own,
    or one published for a receipt, gets the header `relatum_time` (microseconds since 1970, UTC), unless it has the
    property `timestamp`. Key values are checked, except those at paths in bodies. Bodies and the caller's properties
    and headers do not change. All channels are intercepted, including open ones.

    Except with Celery, an error after sending has both the client's class and a Relatum class: `PublishUnroutable`,
    `PublishNacked`, `PublishRejected` or `PublishOutcomeUnknown`. For the last, `error.settle(timeout_s)` reads the
    streams to find the outcome (await it if you awaited the publish). Before sending, Relatum raises its own errors for
    keys, groups and headers; all others are the client's.

    Args:
        connection: A pika BlockingConnection, a pika callback connection (such as SelectConnection), an aio-pika
            connection, robust or not; a Celery app, dramatiq's RabbitmqBroker, or FastStream's RabbitBroker. For
            the last three, `intercept` opens nothing: a process starts its recorder, and gets any error, at its first
            publish. Each forked process has its own recorder.
        database: PostgreSQL's URL, or a `Database`. None (default): messages are stamped and checked, not recorded.
        keys: Names of headers, or definitions.
        recorder: `"embedded"` (default): with a database, a thread of this process records the streams it publishes to;
            if several processes publish to a stream, one records it. `"external"`: `relatum record` records them.
        on_invalid: `"raise"` (default): a value that cannot be recorded is an error before anything is sent.
            `"skip"`: the message is published anyway; the value is counted and not recorded.
        streams: Streams that the embedded recorder records even before the first message to them. Receipts and `settle`
            search them in addition to the streams bound to an exchange. Name streams that are bound through other
            exchanges: Relatum cannot find those.
        broker: The broker to read streams from: its URL, or a `Broker`, whose TLS and login are used. None (default):
            the connection's broker, TLS and login; for Celery and dramatiq also their other URLs.
        confirm_timeout_s: aio-pika: seconds to wait for a confirm if `publish` has no `timeout`; after that the outcome
            is unknown. None (default): until a lost connection is detected, after about two heartbeats.
        copy_to: Celery and dramatiq: a stream that gets a copy of each non-mandatory message to the default exchange,
            such as a task. A missing stream is declared like a tap's: 5 GB and 7 days.

    Returns:
        The connection itself. A second call with the same options changes nothing.

    Raises:
        ConfigurationError: an argument is invalid, or the connection is intercepted already with other options.
        UsedAfterFork: the pika or aio-pika connection was intercepted in another process.
        InvalidKeyDefinition: one of `keys` is invalid, or the database has too many keys.
        KeyDefinitionConflict: the database defines one of `keys` differently. If the database has not answered yet (it
            is unavailable, or the call runs in an event loop), later publishes raise the error and send nothing; with
            `on_invalid="skip"`, only publishes with a receipt raise it.
    """
    options = Options(
        database=database,
        definitions=tuple(as_definitions(keys)),
        recorder=recorder,
        on_invalid=on_invalid,
        streams=checked_names("streams", (streams,) if isinstance(streams, str) else streams),
        broker=broker,
        confirm_timeout_s=confirm_timeout_s,
        copy_to=copy_to,
    )
    client = _client_of(connection)
    interception = interception_of(connection)
    if isinstance(interception, Interception):
        interception.check_usable()
    if interception is not None:
        if interception.options != options:
            raise ConfigurationError(
                "this connection is intercepted with other options: call relatum.release(connection) first"
            )
    elif options.copy_to is not None and client not in (Celery, Dramatiq):
        # FastStream's messages are mandatory: the broker would count the copy as delivery.
        raise ConfigurationError(
            f"copy_to= is for Celery and dramatiq, not for {client.NAME}: publish to the stream, or use `relatum tap` "
            "for the exchange"
        )
    elif client.NAME in _FORKING_CLIENTS:
        client.intercept(connection, ProcessInterceptions(options, client.NAME))
    else:
        interception = Interception(options, connection, client.NAME)
        try:
            # An event loop must not wait here. Instead, its first publishes wait, or later ones raise the conflict.
            interception.await_agreement(may_wait=isinstance(connection, BlockingConnection))
        except RelatumError:
            interception.release()
            raise
        client.intercept(connection, interception)
    return connection


def release(connection: _Connection) -> _Connection:
    """Undo `intercept` and return the connection. Later wrappers of other libraries stay, and pass calls through.

    Releasing the last connection that uses an embedded recorder closes the recorder, which first records the published
    messages. The call takes at most two seconds, even if no server answers. Unrecorded messages are logged as a warning
    and counted in `statistics(connection).left`; the next recorder of these streams records them. In an event loop:
    `await asyncio.to_thread(relatum.release, connection)`. A connection that is not intercepted does not change.
    """
    interception = interception_of(connection)
    if interception is not None:
        _client_of(connection).release(connection)
        with suppress(TypeError):
            # `celery.current_app` does not support weak references.
            _released[connection] = interception.counts
        interception.release()
    return connection


def statistics(connection: object) -> PublisherStatistics:
    """Return the counts of an intercepted connection; after its release, the final counts. No I/O.

    Raises:
        ConfigurationError: the connection was never intercepted.
    """
    interception = interception_of(connection)
    counts: PublisherCounts | None = None if interception is None else interception.counts
    with suppress(TypeError):
        counts = counts or _released.get(connection)
    if counts is None:
        raise ConfigurationError("this connection was never intercepted: call relatum.intercept(connection, …)")
    return counts.statistics()


def _client_of(connection: object) -> Any:
    """Return a connection's adapter: it has `NAME`, `intercept` and `release`."""
    if isinstance(connection, BlockingConnection | Connection):
        return pika_connections
    # `__class__` of a proxy is the class of its object; `type(…)` is not.
    for kind in connection.__class__.__mro__:
        client = _CLIENTS.get(kind.__module__) or _CLIENTS.get(kind.__module__.partition(".")[0])
        if client is not None:
            return import_module(f"relatum.publishing.{client}") if isinstance(client, str) else client
    raise ConfigurationError(
        "intercept takes a connection of pika or aio-pika, a Celery app, or a broker of dramatiq or faststream.rabbit, "
        f"not {type(connection).__qualname__}; for other clients, use relatum.stamped(…) and `relatum record`"
    )


def stamped(headers: Mapping[str, Any] | None = None) -> tuple[dict[str, Any], str]:
    """Return headers and a message id for one message that any client publishes.

    Args:
        headers: The message's headers; not changed. None (default): no headers.

    Returns:
        A copy of the headers, and a new id. The header `relatum_time` (microseconds since 1970, UTC) is added if it is
        missing. Pass the id, a UUIDv7, to the client as the property `message_id`.

    Raises:
        InvalidRelationshipKey: the header `relatum_time` is invalid.
        HeadersRefused: the headers are too many, too deep or too large.
    """
    stamp = _STAMPER.stamp(headers, uuid7(time_ns()), None, None, b"")
    return stamp.headers or {}, stamp.message_id
