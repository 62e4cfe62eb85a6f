"""What a message says beside its body: its AMQP properties, and where its time is from."""

from dataclasses import dataclass
from datetime import datetime
from enum import Enum


class TimeSource(Enum):
    """Where a message's time comes from, the first that there is."""

    HEADER = "header"
    """The header `relatum_time`, microseconds."""
    PROPERTY = "property"
    """The property `timestamp`, seconds."""
    MESSAGE_ID = "message_id"
    """The property `message_id`, where an intercepted connection made it: microseconds, up to 1.25 too few."""
    CHUNK = "chunk"
    """When the broker wrote the chunk, milliseconds; AMQP 0.9.1 does not show it."""
    UNKNOWN = "unknown"
    """There is none."""


@dataclass(frozen=True, slots=True)
class Properties:
    """A message's AMQP 0.9.1 properties, under pika's names. None where the publisher gave none.

    Attributes:
        delivery_mode: 2 for persistent, else 1: RabbitMQ 4 no longer tells "not persistent" from "not given".
        timestamp: The publisher's, whole seconds, UTC.
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
