"""Names of headers that Relatum adds or reads."""

from typing import Final

TIME_HEADER: Final = "relatum_time"
"""The message's time: an integer, microseconds since 1970, UTC. A caller may set it; the interceptor adds it to a
message whose `message_id` is the caller's: its own ids carry the time.

Not `x-…`: RabbitMQ 3.13 and later move headers of that form out of the application properties.
"""

RECEIPT_HEADER: Final = "relatum_receipt"
"""Asks the recorder to store the message's place: True, under its `message_id`; or a text, under this: the name of a
receipt whose `message_id` is the caller's own and may have been used before."""

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
"""The message whose affinity set this one joins: a `message_id`, or its place as "stream:offset"."""

PLACED_HEADER: Final = "relatum_placed"
"""The placement under which a message was published, and its number there; see `relatum.contexts`."""

CONTROL_HEADER: Final = "relatum_control"
"""The kind of a message of Relatum's own: "fence", "marker" or "adoption". Consumers of a stream skip such messages.

Serial consumers search a record's bytes for this name before they decode it, so no other header may begin with it.
"""

BROKERS_OWN: Final = "amq.rabbitmq."
"""Prefix of the broker's own names: direct reply-to, its log, its trace. The broker is not asked about them."""

NAME_BYTES_MAX: Final = 255
"""Bytes of the name of an exchange or queue, and of a routing key, in AMQP 0.9.1."""
