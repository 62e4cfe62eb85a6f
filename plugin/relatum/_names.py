"""The names of what Relatum adds to a message's headers."""

from typing import Final

TIME_HEADER: Final = "relatum_time"
"""The message's time: an integer, microseconds since 1970, UTC. A caller may set it; the interceptor adds it.

Not `x-…`: RabbitMQ 3.13 and later move headers of that form out of the application properties.
"""

RECEIPT_HEADER: Final = "relatum_receipt"
"""True where a publisher waits for the message's offset, so that the recorder writes its `message_id` down."""
