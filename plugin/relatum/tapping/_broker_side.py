"""A tap's calls to a broker, and its bindings there. Objects of others are only declared passively.

Each call uses a separate channel: the broker closes the channel if the answer is no.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final

from pika import BlockingConnection
from pika.exceptions import ChannelClosedByBroker

from relatum.errors import AccessRefused, InvalidInput, NotFound, StreamUnavailable
from relatum.headers import BROKERS_OWN
from relatum.superstreams.streams import exchange_exists, queue_exists

MARK: Final = "x-relatum"
"""Argument of a tap's bindings: it distinguishes them from others with the same key, which stay when a tap is removed.

Headers exchanges ignore arguments that begin with "x-", unless `x-match` ends in "with-x".
"""

_ACCESS_REFUSED: Final = 403
_NOT_FOUND: Final = 404
_PRECONDITION_FAILED: Final = 406
_TYPE: Final = re.compile(r"inequivalent arg 'type'.* but current is '+([^']+)'")
"""Names with a hyphen have two pairs of quotes in the broker's text."""

SHARING: Final = frozenset({"x-consistent-hash", "x-modulus-hash", "x-random", "x-local-random", "x-super-stream"})
"""Exchange types that route each message to one binding only: a tap would take messages from other queues."""


@dataclass(frozen=True, slots=True)
class Tap:
    """A binding that copies messages of an exchange to a stream.

    Attributes:
        exchange: The exchange's name.
        kind: The exchange's type ("topic", …); None if the user may not know it.
        stream: The stream of the copies.
        binding_key: Selects the messages to copy, by the rules of the exchange's type.
        arguments: The binding's arguments, as given.
        made_stream: Whether the stream was declared for a tap.
        created_at: When the tap was stored; None if it is not stored yet.
    """

    exchange: str
    kind: str | None
    stream: str
    binding_key: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    made_stream: bool = False
    created_at: datetime | None = field(default=None, compare=False)


def check_exchange(connection: BlockingConnection, exchange: str) -> None:
    """Check that an exchange exists and may be tapped.

    Raises:
        NotFound: There is no such exchange.
        InvalidInput: The exchange is the broker's own.
    """
    if exchange.startswith(BROKERS_OWN):
        raise InvalidInput(f"Exchange {exchange!r} is the broker's own, and cannot be tapped.")
    if not exchange_exists(connection, exchange):
        raise NotFound(f"There is no exchange {exchange!r}; nothing was changed. Its publishers declare it, not a tap.")


def kind_of(connection: BlockingConnection, exchange: str) -> str | None:
    """Return the type of an exchange; None if it is unknown because the user may not declare the exchange.

    The broker names the type only when it refuses a different declaration. It always refuses this one: no exchange is
    internal, durable, auto-deleted and of type direct.
    """
    channel = connection.channel()
    try:
        channel.exchange_declare(exchange, "direct", durable=True, auto_delete=True, internal=True)
    except ChannelClosedByBroker as error:
        if error.reply_code == _ACCESS_REFUSED:
            return None
        if error.reply_code != _PRECONDITION_FAILED:
            raise
        found = _TYPE.search(error.reply_text)
        return "direct" if found is None else found[1]
    channel.close()
    return "direct"


def bind(connection: BlockingConnection, tap: Tap) -> None:
    """Bind a tap's stream. Idempotent.

    Raises:
        AccessRefused: The user may not write to the stream, or not read from the exchange.
        InvalidInput: A headers exchange does not accept the arguments.
        StreamUnavailable: The stream's node has not started it yet, or the exchange was just deleted.
    """
    channel = connection.channel()
    try:
        channel.queue_bind(tap.stream, tap.exchange, tap.binding_key, marked(tap.arguments))
    except ChannelClosedByBroker as error:
        if error.reply_code == _PRECONDITION_FAILED:
            raise InvalidInput(f"Exchange {tap.exchange!r} does not accept the binding: {error.reply_text}") from error
        if error.reply_code == _NOT_FOUND:
            raise StreamUnavailable(
                f"The stream {tap.stream!r} cannot be bound now: {error.reply_text}. Try again.", stream=tap.stream
            ) from error
        if error.reply_code != _ACCESS_REFUSED:
            raise
        raise AccessRefused(
            f"The broker refuses to bind {tap.stream!r} to {tap.exchange!r}: {error.reply_text}. This needs "
            "permission to write to the stream and to read from the exchange"
        ) from error
    channel.close()


def unbind(connection: BlockingConnection, tap: Tap) -> None:
    """Remove a tap's binding. No effect if the binding, the exchange or the stream is gone."""
    if not (exchange_exists(connection, tap.exchange) and queue_exists(connection, tap.stream)):
        return
    with connection.channel() as channel:
        channel.queue_unbind(tap.stream, tap.exchange, tap.binding_key, marked(tap.arguments))


def delete_queue(connection: BlockingConnection, name: str) -> None:
    """Delete a stream or a queue with its messages. No effect if it is gone."""
    with connection.channel() as channel:
        channel.queue_delete(name)


def marked(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a tap's binding at the broker."""
    is_compared = str(arguments.get("x-match", "")).endswith("-with-x")
    return dict(arguments) if is_compared else {**arguments, MARK: "tap"}
