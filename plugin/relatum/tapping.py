"""Taps: a stream gets a copy of each message of an exchange, and publishers need no change. See docs/adr/0032.

Taps are stored in the database, since a broker does not list its bindings to ordinary users. A tap is stored before its
stream is bound, so that no binding is unknown to the database.
"""

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import datetime
from shlex import quote
from typing import Final

import sqlalchemy as sa
from pika import BlockingConnection
from pika.exceptions import ChannelClosedByBroker
from pika.spec import ACCESS_REFUSED, NOT_FOUND, PRECONDITION_FAILED

from relatum.common.checks import checked_name, checked_names, shown
from relatum.common.headers import RESERVED_PREFIX
from relatum.errors import AccessRefused, InvalidInput, NotFound, StreamUnavailable
from relatum.reading import Broker, BrokerAddress
from relatum.store.database import AnyDatabase, as_engine, sql, transaction
from relatum.superstreams import StreamOptions
from relatum.superstreams.administration import bound_streams
from relatum.superstreams.connections import (
    KEPT,
    blocking_connection,
    declare_stream,
    exchange_exists,
    queue_exists,
    stream_exists,
)
from relatum.superstreams.layout import checked_stream_name

__all__ = ["Tap", "defined_taps", "tap", "untap"]

ARGUMENTS: Final = {"x-match": "all", "x-relatum": "tap"}
"""Arguments of a tap's binding, which distinguish it from other bindings with the same key: `untap` removes only taps.

A headers exchange ignores arguments that begin with "x-", so it copies all messages.
"""

_TYPE: Final = re.compile(r"inequivalent arg 'type'.* but current is '+([^']+)'")
"""Finds an exchange's type in the broker's text, which has two pairs of quotes around a name with a hyphen."""

SHARING: Final = frozenset({"x-consistent-hash", "x-modulus-hash", "x-random", "x-local-random", "x-super-stream"})
"""Exchange types that route each message to one binding only: a tap would take messages from other queues."""

TAPS: Final = sql("""
    SELECT exchange, kind, stream, binding_key, created_at, tap_id FROM relatum.taps
    WHERE vhost = :vhost::text ORDER BY exchange, stream, tap_id""")

STORE: Final = sql("""
    INSERT INTO relatum.taps (vhost, exchange, kind, stream, binding_key)
    VALUES (:vhost::text, :exchange::text, :kind::text, :stream::text, :binding_key::text)
    ON CONFLICT DO NOTHING RETURNING tap_id""")

REMOVE: Final = sql("DELETE FROM relatum.taps WHERE tap_id = ANY (:numbers::int[])")


@dataclass(frozen=True, slots=True)
class Tap:
    """A binding that copies messages of an exchange to a stream.

    Attributes:
        exchange: The exchange's name.
        kind: The exchange's type ("topic", …); None if unknown, because the user may not declare the exchange.
        stream: The stream of the copies.
        binding_key: Selects the messages to copy, by the rules of the exchange's type.
        created_at: When the tap was stored; None if it is not stored yet.
    """

    exchange: str
    kind: str | None
    stream: str
    binding_key: str
    created_at: datetime | None = field(default=None, compare=False)


def tap(
    broker: str | Broker,
    database: AnyDatabase,
    exchanges: str | Sequence[str],
    *,
    stream: str | None = None,
    binding_keys: Sequence[str] = (),
    options: StreamOptions = KEPT,
) -> list[Tap]:
    """Tap exchanges: the broker copies their new messages to a stream. Return the taps. Idempotent.

    Publishers, exchanges, queues, policies and other bindings are not changed. An existing stream is bound unchanged.
    If a tap is refused, everything that this call created is removed.

    Args:
        broker: The broker's URL, or a `Broker`.
        database: PostgreSQL's URL, or a `Database`, which stores the taps.
        exchanges: Names of existing exchanges.
        stream: The stream for all copies. None (default): `tap.EXCHANGE` for each exchange.
        binding_keys: Select the messages to copy. Empty (default): all, for topic, fanout and headers exchanges only;
            the latter two accept no keys.
        options: Options for a stream that does not exist yet. Default: `KEPT`.

    Returns:
        The taps, one for each binding, in the order of the exchanges.

    Raises:
        NotFound: There is no such exchange; nothing was changed.
        InvalidInput: The exchange cannot be tapped, or not with these keys; nothing was changed.
        NotAStream: A queue has the stream's name; nothing was changed.
        AccessRefused: The user lacks a permission. New taps and streams were removed; if that failed, taps stay stored.
        BrokerUnavailable, DatabaseUnavailable: A server is unavailable; safe to retry.
    """
    names = checked_names("exchanges", (exchanges,) if isinstance(exchanges, str) else exchanges, least=1)
    keys = _checked_keys(binding_keys)
    if stream is not None:
        checked_stream_name(stream, "The stream's name")
    address = BrokerAddress.of(broker)
    with as_engine(database) as engine, blocking_connection(address, address) as connection:
        requested: list[Tap] = []
        for exchange in dict.fromkeys(names):
            kind = _kind_of(connection, exchange)
            target = stream or checked_stream_name(f"tap.{exchange}", "The stream's name (choose one by --stream)")
            if kind in ("direct", None):
                _check_no_super_stream(engine, connection, address, exchange, target)
            requested += [Tap(exchange, kind, target, key) for key in _keys_of(exchange, kind, keys)]
        return _tapped(engine, address, connection, requested, options)


def _check_no_super_stream(
    engine: sa.Engine, connection: BlockingConnection, address: BrokerAddress, exchange: str, target: str
) -> None:
    """Refuse an exchange of a super stream: one to which streams are bound that are not taps.

    Clients treat all bound streams as partitions, and hash over their number. With a tap among them, they would send
    keys to other partitions than before, and consumers would get messages twice.
    """
    tapped = {each.stream for each in _stored(engine, address.vhost).values() if each.exchange == exchange}
    partitions = [name for name in bound_streams(connection, address, exchange) if name not in {target, *tapped}]
    if partitions:
        raise InvalidInput(
            f"Stream {partitions[0]!r} is bound to exchange {exchange!r}, like a partition of a super stream: clients "
            "would use a tap as another partition. The exchange's messages are already in streams: record them by "
            f"`relatum record {quote(exchange)}`; nothing was changed."
        )


def untap(
    broker: str | Broker,
    database: AnyDatabase,
    exchanges: str | Sequence[str],
    *,
    stream: str | None = None,
) -> list[Tap]:
    """Remove taps, and return them. The copies remain in the stream, and their records in the database.

    Args:
        broker: The broker's URL, or a `Broker`.
        database: PostgreSQL's URL, or a `Database`.
        exchanges: Names of tapped exchanges, which may no longer exist.
        stream: Remove only taps to this stream. None (default): all taps of the exchanges.

    Returns:
        The removed taps.

    Raises:
        NotFound: An exchange is not tapped, or not to this stream; nothing was changed.
        AccessRefused, BrokerUnavailable, DatabaseUnavailable: All taps stay stored, some without their binding; safe to
            retry.
    """
    names = checked_names("exchanges", (exchanges,) if isinstance(exchanges, str) else exchanges, least=1)
    address = BrokerAddress.of(broker)
    with as_engine(database) as engine:
        removed = {
            tap_id: each
            for tap_id, each in _stored(engine, address.vhost).items()
            if each.exchange in names and (stream is None or each.stream == stream)
        }
        for exchange in names:
            if not any(each.exchange == exchange for each in removed.values()):
                target = "" if stream is None else f" into {stream!r}"
                where = f"{target} in virtual host {address.vhost!r}"
                raise NotFound(f"Exchange {exchange!r} is not tapped{where}: see `relatum tap --list`")
        with blocking_connection(address, address) as connection:
            for each in removed.values():
                _unbind(connection, each)
        with transaction(engine) as stored:
            stored.execute(REMOVE, {"numbers": list(removed)})
    return list(removed.values())


def _checked_keys(keys: Sequence[str]) -> tuple[str, ...]:
    """Return the binding keys without duplicates. The empty key is valid: it selects messages without a routing key."""
    nonempty = [key for key in keys if key != ""] if isinstance(keys, list | tuple) else keys
    names = checked_names("binding_keys", nonempty)
    return tuple(dict.fromkeys(names if len(names) == len(keys) else ("", *names)))


def _keys_of(exchange: str, kind: str | None, keys: Sequence[str]) -> Sequence[str]:
    """Return the binding keys for an exchange. Raises `InvalidInput` if it cannot be tapped, or not with these keys."""
    if kind in SHARING:
        raise InvalidInput(
            f"Exchange {exchange!r} is of type {kind}, which routes each message to one binding only: a tap would "
            "take messages from other queues. Tap the exchange that routes to it."
        )
    if kind in ("headers", "fanout"):
        if keys:
            raise InvalidInput(
                f"Exchange {exchange!r} is of type {kind}, which ignores binding keys: omit them to copy all messages."
            )
        return ("",)
    if not keys and kind not in ("topic", None):
        raise InvalidInput(
            f"Exchange {exchange!r} is of type {kind}, which has no key for all messages: select some by "
            "`--binding-key KEY`, once for each key."
        )
    # If the type is unknown, this key copies all messages of topic, fanout and headers exchanges.
    return keys or ("#",)


def _tapped(
    engine: sa.Engine,
    address: BrokerAddress,
    connection: BlockingConnection,
    requested: Sequence[Tap],
    options: StreamOptions,
) -> list[Tap]:
    """Store taps, then bind their streams; undo everything if a tap is refused."""
    if not isinstance(options, StreamOptions):
        raise InvalidInput(f"options= takes StreamOptions, not {shown(options)}")
    streams = dict.fromkeys(each.stream for each in requested)
    missing = [name for name in streams if not stream_exists(connection, address, name)]
    new: dict[int, Tap] = {}
    with transaction(engine) as stored:
        for each in requested:
            # A tap that was stored before returns no number.
            if (tap_id := stored.execute(STORE, {"vhost": address.vhost, **asdict(each)}).scalar()) is not None:
                new[tap_id] = each
        stored_taps = {each: each for each in _read(stored, address.vhost).values()}
    declared: list[str] = []
    try:
        for name in missing:
            declare_stream(connection, name, options)
            declared.append(name)
        for each in requested:
            _bind(connection, each)
    except Exception:
        # A tap that cannot be undone now remains stored, so that it can be untapped.
        with suppress(Exception):
            for each in new.values():
                # A user that may not bind may not unbind either.
                with suppress(ChannelClosedByBroker):
                    _unbind(connection, each)
            # A concurrent call may have tapped other exchanges into these streams.
            used = {each.stream for tap_id, each in _stored(engine, address.vhost).items() if tap_id not in new}
            for name in [name for name in declared if name not in used]:
                with connection.channel() as channel:
                    channel.queue_delete(name)
            with transaction(engine) as stored:
                stored.execute(REMOVE, {"numbers": list(new)})
        raise
    # A tap that was stored when its exchange's type was unknown is not equal to the wanted one.
    return [stored_taps.get(each, each) for each in requested]


def defined_taps(database: AnyDatabase, *, vhost: str = "/") -> list[Tap]:
    """Return the taps of a virtual host, ordered by exchange and stream.

    Args:
        database: PostgreSQL's URL, or a `Database`, which is left open.
        vhost: The virtual host. Default: "/".

    Raises:
        SchemaMissing, DatabaseUnavailable: The database could not be read.
    """
    checked_name("vhost", vhost)
    with as_engine(database) as engine:
        return list(_stored(engine, vhost).values())


def _stored(engine: sa.Engine, vhost: str) -> dict[int, Tap]:
    with transaction(engine) as connection:
        return _read(connection, vhost)


def _read(connection: sa.Connection, vhost: str) -> dict[int, Tap]:
    return {tap_id: Tap(*fields) for *fields, tap_id in connection.execute(TAPS, {"vhost": vhost})}


# --- requests to the broker: each uses its own channel, since the broker closes a channel when it refuses a request ---


def _kind_of(connection: BlockingConnection, exchange: str) -> str | None:
    """Return the type of an exchange; None if it is unknown because the user may not declare the exchange.

    The broker names the type only when it refuses a different declaration. It always refuses this one: no exchange is
    internal, durable, auto-deleted and of type direct.
    """
    if exchange.startswith(RESERVED_PREFIX):
        raise InvalidInput(f"Exchange {exchange!r} is one of the broker's own, and cannot be tapped.")
    if not exchange_exists(connection, exchange):
        raise NotFound(f"There is no exchange {exchange!r}: its publishers must declare it first; nothing was changed.")
    try:
        with connection.channel() as channel:
            channel.exchange_declare(exchange, "direct", durable=True, auto_delete=True, internal=True)
    except ChannelClosedByBroker as error:
        if error.reply_code == ACCESS_REFUSED:
            return None
        match = _TYPE.search(error.reply_text)
        if match is not None:
            return match[1]
        if error.reply_code != PRECONDITION_FAILED:
            raise
    return "direct"


def _bind(connection: BlockingConnection, tap: Tap) -> None:
    """Bind a tap's stream. Idempotent."""
    try:
        with connection.channel() as channel:
            channel.queue_bind(tap.stream, tap.exchange, tap.binding_key, ARGUMENTS)
    except ChannelClosedByBroker as error:
        if error.reply_code == NOT_FOUND:
            raise StreamUnavailable(
                f"The stream {tap.stream!r} cannot be bound now: {error.reply_text}. Try again.", stream=tap.stream
            ) from error
        if error.reply_code != ACCESS_REFUSED:
            raise
        raise AccessRefused(
            f"The broker refuses to bind {tap.stream!r} to {tap.exchange!r}: {error.reply_text}. This needs "
            "permission to write to the stream and to read from the exchange"
        ) from error


def _unbind(connection: BlockingConnection, tap: Tap) -> None:
    """Remove a tap's binding. Idempotent, also if the exchange or the stream is gone."""
    if not (exchange_exists(connection, tap.exchange) and queue_exists(connection, tap.stream)):
        return
    with connection.channel() as channel:
        channel.queue_unbind(tap.stream, tap.exchange, tap.binding_key, ARGUMENTS)
