"""The names of what Relatum adds to a message's headers."""

from typing import Final

TIME_HEADER: Final = "relatum_time"
"""The message's time: an integer, microseconds since 1970, UTC. A caller may set it; the interceptor adds it to a
message whose `message_id` is the caller's: its own say the time themselves.

Not `x-…`: RabbitMQ 3.13 and later move headers of that form out of the application properties.
"""

RECEIPT_HEADER: Final = "relatum_receipt"
"""There where a publisher waits for the message's offset: True, then the recorder writes the `message_id` down with it;
or a text, then that: the name of a receipt whose `message_id` is the caller's own and may have been used before."""

GROUP_ID_HEADER: Final = "group_id"
"""The id of the group a message belongs to: 24 bytes as 48 hexadecimal digits in lower case."""

GROUP_SEQUENCE_HEADER: Final = "group_sequence"
"""The message's number in its group, an integer from 1."""

GROUP_LAST_HEADER: Final = "group_last"
"""Whether the group ends with the message: True or False. The interceptor adds False."""

CONTEXT_HEADER: Final = "serialization_context"
"""The serialization context a message belongs to: its messages are consumed in the order they were published."""

AFFINITY_HEADER: Final = "affinity_set"
"""The affinity set a message belongs to: all of a set go to one partition."""

AFFINITY_LAST_HEADER: Final = "affinity_last"
"""True with the last message of an affinity set."""

PREDECESSOR_HEADER: Final = "affinity_predecessor"
"""The message whose affinity set this one joins: a `message_id`, or where it lies, as "stream:offset"."""

PLACED_HEADER: Final = "relatum_placed"
"""Under which placement a message was published, and its number there; see `relatum.contexts`."""

CONTROL_HEADER: Final = "relatum_control"
"""What a message of Relatum's own says: "fence", "marker" or "adoption". Consumers of a stream pass over such messages.

Serial consumers look for these letters in a record's bytes before they decode it, so no other header may begin so.
"""

BROKERS_OWN: Final = "amq.rabbitmq."
"""What begins so is the broker's own: addresses of direct reply-to, its log, its trace. Nothing is asked about it."""

NAME_BYTES_MAX: Final = 255
"""Bytes of the name of an exchange or queue, and of a routing key, in AMQP 0.9.1."""
