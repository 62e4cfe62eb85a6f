"""Taps and untaps exchanges.

Taps are stored in the database, since a broker does not list its bindings to ordinary users. A tap is stored before it
is bound, so that no binding is forgotten.
"""

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Any, Final

import sqlalchemy as sa
from pika import BlockingConnection
from pika.exceptions import ChannelClosedByBroker

from relatum.checks import checked_name, checked_names, checked_text, shown
from relatum.errors import Conflict, InvalidInput, NotFound
from relatum.limits import INTEGER_MAX, INTEGER_MIN
from relatum.reading import Broker, BrokerAddress
from relatum.store.database import AnyDatabase, as_engine, sql
from relatum.store.translation import translated_errors
from relatum.superstreams import StreamOptions
from relatum.superstreams.administration import bound_streams
from relatum.superstreams.connections import blocking_connection
from relatum.superstreams.layout import checked_stream_name
from relatum.superstreams.streams import KEPT, declare_stream, stream_exists
from relatum.tapping import _broker_side as broker_side
from relatum.tapping._broker_side import SHARING, Tap

ARGUMENTS_CHARACTERS_MAX: Final = 1000
"""Maximum characters of a binding's arguments as JSON: they are part of an index entry."""

TAPS: Final = sql("""
    SELECT exchange, kind, stream, binding_key, arguments, made_stream, created_at, tap_id FROM relatum.taps
    WHERE vhost = :vhost::text ORDER BY exchange, stream, tap_id""")

STORE: Final = sql("""
    INSERT INTO relatum.taps (vhost, exchange, kind, stream, binding_key, arguments, made_stream)
    VALUES (:vhost::text, :exchange::text, :kind::text, :stream::text, :binding_key::text, :arguments::text,
        :made_stream::boolean)
    ON CONFLICT DO NOTHING RETURNING tap_id""")

REMOVE: Final = sql("DELETE FROM relatum.taps WHERE tap_id = ANY (:numbers::int[])")


def tap(
    broker: str | Broker,
    database: AnyDatabase,
    exchanges: str | Sequence[str],
    *,
    stream: str | None = None,
    binding_keys: Sequence[str] = (),
    arguments: Mapping[str, Any] | None = None,
    options: StreamOptions = KEPT,
) -> list[Tap]:
    """Copy each message of exchanges to a stream. Idempotent.

    Publishers, exchanges, queues, policies and bindings of others are not changed. An existing stream is bound
    unchanged. If a tap is refused, everything made before is removed.

    Args:
        broker: The broker's URL, or a `Broker`.
        database: PostgreSQL's URL, or a `Database`, which stores the taps.
        exchanges: Names of existing exchanges.
        stream: The stream for all copies. None (default): `tap.EXCHANGE` for each exchange.
        binding_keys: Select the messages to copy. Empty (default): all, which is impossible for a direct exchange.
        arguments: The arguments of bindings to headers exchanges, like `{"x-match": "any", "format": "pdf"}`. None
            (default): all messages.
        options: Options for a stream that does not exist yet. Default: `KEPT`.

    Returns:
        The taps, one for each binding, in the order of the exchanges.

    Raises:
        NotFound: There is no such exchange; nothing was changed.
        InvalidInput: An exchange of this type cannot be tapped in this way; nothing was changed.
        NotAStream: There is a queue with the stream's name; nothing was changed.
        AccessRefused: The broker refuses the user; what was made has been removed.
        BrokerUnavailable, DatabaseUnavailable: A server is unavailable; safe to retry.
    """
    names = _names(exchanges)
    keys = _checked_keys(binding_keys)
    given = _checked_arguments(arguments)
    if stream is not None:
        checked_stream_name(stream, "The stream's name")
    address = BrokerAddress.of(broker)
    with as_engine(database) as engine, blocking_connection(address, address) as connection:
        wanted: list[Tap] = []
        for exchange in dict.fromkeys(names):
            broker_side.check_exchange(connection, exchange)
            kind = broker_side.kind_of(connection, exchange)
            into = stream or checked_stream_name(f"tap.{exchange}", "The stream's name (choose one by --stream)")
            if kind in ("direct", None):
                _check_no_super_stream(engine, connection, address, exchange, into)
            for key, of_binding in _bindings(exchange, kind, keys, given):
                wanted.append(Tap(exchange, kind, into, key, of_binding))
        return _tapped(engine, address, connection, wanted, options)


def _check_no_super_stream(
    engine: sa.Engine, connection: BlockingConnection, address: BrokerAddress, exchange: str, into: str
) -> None:
    """Check that an exchange does not belong to a super stream: only taps' streams are bound to it.

    Clients consider all bound streams as partitions, and hash over their number: a tap among them would send keys to
    other partitions than before, and consumers would get messages twice.

    Raises:
        InvalidInput: Another stream is bound to it; nothing was changed.
    """
    ours = {each.stream for each in _stored(engine, address.vhost).values() if each.exchange == exchange}
    theirs = [name for name in bound_streams(connection, address, exchange) if name not in {into, *ours}]
    if theirs:
        raise InvalidInput(
            f"Stream {theirs[0]!r} is bound to exchange {exchange!r}, like a partition of a super stream: clients "
            "would use a tap as another partition. Its messages are in streams already: use relatum record "
            f"{exchange}; nothing was changed."
        )


def untap(
    broker: str | Broker,
    database: AnyDatabase,
    exchanges: str | Sequence[str],
    *,
    stream: str | None = None,
    delete: bool = False,
) -> list[Tap]:
    """Remove taps. The copies remain in the stream, and their records in the database.

    Args:
        broker: The broker's URL, or a `Broker`.
        database: PostgreSQL's URL, or a `Database`.
        exchanges: Names of tapped exchanges, which may no longer exist.
        stream: Remove only taps to this stream. None (default): all taps of the exchanges.
        delete: True: also delete the streams with all messages, if they were declared for taps and no other tap uses
            them. Default: False.

    Returns:
        The removed taps.

    Raises:
        NotFound: An exchange is not tapped, or not to this stream; nothing was changed.
        Conflict: A stream must not be deleted; nothing was changed.
        AccessRefused, BrokerUnavailable, DatabaseUnavailable: Taps that are still stored may be bound; safe to retry.
    """
    names = _names(exchanges)
    address = BrokerAddress.of(broker)
    with as_engine(database) as engine:
        there = _stored(engine, address.vhost)
        going = {
            number: each
            for number, each in there.items()
            if each.exchange in names and (stream is None or each.stream == stream)
        }
        for exchange in names:
            if not any(each.exchange == exchange for each in going.values()):
                what = f"Exchange {exchange!r}" if stream is None else f"Exchange {exchange!r}, into {stream!r},"
                raise NotFound(f"{what} is not tapped in virtual host {address.vhost!r}: see relatum tap --list")
        streams = list(dict.fromkeys(each.stream for each in going.values()))
        if delete:
            _check_deletable(streams, [each for number, each in there.items() if number not in going], going.values())
        with blocking_connection(address, address) as connection:
            for each in going.values():
                broker_side.unbind(connection, each)
            for name in streams if delete else ():
                broker_side.delete_queue(connection, name)
        _remove(engine, going)
    return list(going.values())


def _check_deletable(streams: Sequence[str], others: Sequence[Tap], going: Iterable[Tap]) -> None:
    made = {each.stream for each in going if each.made_stream}
    for name in streams:
        if name not in made:
            raise Conflict(f"Stream {name!r} was not declared for a tap, and so is not deleted with its taps.")
        other = next((each for each in others if each.stream == name), None)
        if other is not None:
            raise Conflict(f"Stream {name!r} cannot be deleted: exchange {other.exchange!r} is tapped into it, too.")


def _names(exchanges: str | Sequence[str]) -> tuple[str, ...]:
    return checked_names("exchanges", (exchanges,) if isinstance(exchanges, str) else exchanges, least=1)


def _checked_keys(keys: Sequence[str]) -> tuple[str, ...]:
    """Return the binding keys without duplicates; the empty key selects messages published without a key."""
    named = [key for key in keys if key != ""] if isinstance(keys, list | tuple) else keys
    found = checked_names("binding_keys", named)
    return tuple(dict.fromkeys(found if len(found) == len(keys) else ("", *found)))


def _checked_arguments(arguments: Mapping[str, Any] | None) -> dict[str, Any]:
    if arguments is None:
        return {}
    if not isinstance(arguments, Mapping) or not all(
        isinstance(name, str) and isinstance(value, str | int | bool) for name, value in arguments.items()
    ):
        raise InvalidInput(f"arguments= takes names with texts, numbers or booleans, not {shown(arguments)}")
    for name, value in arguments.items():
        checked_name("arguments", name)
        if isinstance(value, str):
            checked_text("arguments", value)
        elif not INTEGER_MIN <= value <= INTEGER_MAX:
            raise InvalidInput(f"arguments= takes 64-bit numbers; {name!r} is {shown(value)}")
    if len(_as_json(arguments)) > ARGUMENTS_CHARACTERS_MAX:
        raise InvalidInput(f"A binding's arguments have at most {ARGUMENTS_CHARACTERS_MAX} characters as JSON.")
    return dict(arguments)


def _bindings(
    exchange: str, kind: str | None, keys: Sequence[str], arguments: dict[str, Any]
) -> list[tuple[str, dict[str, Any]]]:
    """Return the keys and arguments of a stream's bindings to an exchange.

    Raises:
        InvalidInput: An exchange of this type cannot be tapped in this way.
    """
    if kind in SHARING:
        raise InvalidInput(
            f"Exchange {exchange!r} is of type {kind}, which routes each message to one binding only: a tap would "
            "take messages from other queues. Tap the exchange that routes to it."
        )
    if kind == "headers":
        if keys:
            raise InvalidInput(f"Exchange {exchange!r} routes by headers, not by keys: give --arguments.")
        return [("", {"x-match": "all", **arguments})]
    if arguments and kind is not None:
        raise InvalidInput(f"Exchange {exchange!r} is of type {kind}, which ignores arguments.")
    if kind == "fanout":
        if keys:
            raise InvalidInput(f"Exchange {exchange!r} is of type fanout, which has no keys: all messages are copied.")
        return [("", {})]
    if not keys and kind not in ("topic", None):
        raise InvalidInput(
            f"Exchange {exchange!r} is of type {kind}, which has no key for all messages: select some by "
            "--binding-key KEY, once for each key."
        )
    if kind is None:
        # Works for topic, fanout and headers exchanges.
        return [(key, {"x-match": "all", **arguments}) for key in keys or ("#",)]
    return [(key, {}) for key in keys or ("#",)]


def _tapped(
    engine: sa.Engine,
    address: BrokerAddress,
    connection: BlockingConnection,
    wanted: Sequence[Tap],
    options: StreamOptions,
) -> list[Tap]:
    """Store taps, then bind them; if one is refused, undo all."""
    if not isinstance(options, StreamOptions):
        raise InvalidInput(f"options= takes StreamOptions, not {shown(options)}")
    streams = dict.fromkeys(each.stream for each in wanted)
    lacking = [name for name in streams if not stream_exists(connection, address, name)]
    known = _stored(engine, address.vhost).values()
    ours = {*lacking, *(each.stream for each in known if each.made_stream)}
    wanted = [replace(each, made_stream=each.stream in ours) for each in wanted]
    new = _store(engine, address.vhost, wanted)
    declared: list[str] = []
    try:
        for name in lacking:
            declare_stream(connection, name, options)
            declared.append(name)
        for each in wanted:
            broker_side.bind(connection, each)
    except Exception:
        # A tap that cannot be undone now remains stored, so that it can be untapped.
        with suppress(Exception):
            for each in new.values():
                # A user without permission to bind may not unbind either.
                with suppress(ChannelClosedByBroker):
                    broker_side.unbind(connection, each)
            for name in declared:
                broker_side.delete_queue(connection, name)
            _remove(engine, new)
        raise
    return wanted


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
    """Return the taps of a virtual host by id."""
    with translated_errors(), engine.connect() as connection:
        rows = connection.execute(TAPS, {"vhost": vhost}).all()
    return {
        number: Tap(exchange, kind, stream, key, json.loads(arguments), made_stream, created_at)
        for exchange, kind, stream, key, arguments, made_stream, created_at, number in rows
    }


def _store(engine: sa.Engine, vhost: str, wanted: Iterable[Tap]) -> dict[int, Tap]:
    """Store taps that are not stored yet, and return them by id."""
    new = {}
    with translated_errors(), engine.begin() as connection:
        for each in wanted:
            row = {"vhost": vhost, **asdict(each), "arguments": _as_json(each.arguments)}
            number = connection.execute(STORE, row).scalar()
            if number is not None:
                new[number] = each
    return new


def _remove(engine: sa.Engine, numbers: Collection[int]) -> None:
    with translated_errors(), engine.begin() as connection:
        connection.execute(REMOVE, {"numbers": list(numbers)})


def _as_json(arguments: Mapping[str, Any]) -> str:
    return json.dumps(dict(arguments), sort_keys=True, ensure_ascii=False)
