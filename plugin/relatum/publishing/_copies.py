"""Copies, in a stream, of what goes to queues by the default exchange: made by the broker, under one confirm."""

from collections.abc import Mapping
from decimal import Decimal
from typing import Any, Final

from relatum.errors import HeadersRefused

COPIES: Final = "BCC"
"""The header with more routing keys, which the broker takes out before anybody gets the message.

Source: https://www.rabbitmq.com/docs/sender-selected
"""


def is_copied(stream: str, exchange: Any, routing_key: Any, mandatory: Any) -> bool:
    """Whether a message gets a copy in the stream.

    Not what is to come back where its queue is gone: the stream would take it.
    """
    return bool(exchange == "" and routing_key != stream and not mandatory)


def with_copy(headers: Mapping[str, Any] | None, stream: str) -> dict[str, Any]:
    """Headers by which the broker puts a copy into the stream, beside the copies that the caller wants.

    Raises:
        HeadersRefused: one is a decimal number, which RabbitMQ cannot write into a stream: it ends the connection.
    """
    given = headers or {}
    for name, value in given.items():
        if isinstance(value, Decimal):
            raise HeadersRefused(
                f"header {name!r} is a decimal number, of which no stream takes a copy: give it as text; nothing was "
                "sent",
                reason="decimal",
            )
    copies = given.get(COPIES, [])
    return {**given, COPIES: [*copies, stream] if isinstance(copies, list | tuple) else copies}
