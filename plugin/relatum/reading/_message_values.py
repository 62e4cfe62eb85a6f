"""A message's AMQP properties, and the source of its time."""

from dataclasses import dataclass
from datetime import datetime
from enum import Enum


class TimeSource(Enum):
    """The source of a message's time, in order of precedence."""

    HEADER = "header"
    """The header `relatum_time`, microseconds."""
    PROPERTY = "property"
    """The property `timestamp`, whole seconds."""
    MESSAGE_ID = "message_id"
    """The property `message_id` of an intercepted connection: microseconds, up to 1.25 microseconds too early."""
    CHUNK = "chunk"
    """When the broker wrote the message's chunk, milliseconds; not available over AMQP 0.9.1."""
    UNKNOWN = "unknown"
    """The message has no time."""


@dataclass(frozen=True, slots=True)
class Properties:
    """A message's AMQP 0.9.1 properties, under pika's names. A property that the publisher did not give is None.

    Attributes:
        delivery_mode: 2 for persistent, else 1: RabbitMQ 4 does not distinguish "not persistent" from "not given".
        timestamp: The publisher's timestamp, in whole seconds, UTC.
    """

    content_type: str | None = None
    content_encoding: str | None = None
    delivery_mode: int = 1
    priority: int | None = None
    correlation_id: str | None = None
    reply_to: str | None = None
    expiration: str | None = None
    message_id: str | None = None
    timestamp: datetime | None = None
    type: str | None = None
    user_id: str | None = None
    app_id: str | None = None
