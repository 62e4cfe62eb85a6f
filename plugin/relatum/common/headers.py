"""Names of headers that Relatum adds or reads."""

from typing import Final

TIME_HEADER: Final = "relatum_time"
"""The message's time: an integer, microseconds since 1970, UTC. The caller may set it. The interceptor adds it to a
message with the caller's own `message_id`; ids made by Relatum carry the time themselves.

The name is not `x-…`: RabbitMQ 3.13 and later move such headers out of the application properties.
"""

RECEIPT_HEADER: Final = "relatum_receipt"
"""Asks the recorder to store the message's place. True: under its `message_id`. A text: under that text, since the
`message_id` is the caller's own and may have been used before."""

GROUP_ID_HEADER: Final = "group_id"
"""The id of the group a message belongs to: 24 bytes as 48 hexadecimal digits in lower case."""

GROUP_SEQUENCE_HEADER: Final = "group_sequence"
"""The message's number in its group, an integer of at least 1."""

GROUP_LAST_HEADER: Final = "group_last"
"""Whether the group ends with the message: True or False. The interceptor adds False."""

CONTEXT_HEADER: Final = "serialization_context"
"""The serialization context of a message. Messages of a context are consumed in the order of publishing."""

AFFINITY_HEADER: Final = "affinity_set"
"""The affinity set of a message. All messages of a set go to one partition."""

AFFINITY_LAST_HEADER: Final = "affinity_last"
"""True in the last message of an affinity set."""

PREDECESSOR_HEADER: Final = "affinity_predecessor"
"""The message whose affinity set this one joins: a `message_id`, or its place as "stream:offset"."""

PLACED_HEADER: Final = "relatum_placed"
"""The placement under which a message was published, and its number there; see `relatum.contexts`."""

CONTROL_HEADER: Final = "relatum_control"
"""The kind of a control message: "fence", "marker" or "adoption". Consumers of a stream skip control messages.

Serial consumers search a record's bytes for this name before they decode it, so no other header may begin with it.
"""

BROKERS_OWN: Final = "amq.rabbitmq."
"""Prefix of the broker's own names: direct reply-to, log, trace. Relatum does not ask the broker about them."""

NAME_BYTES_MAX: Final = 255
"""Bytes of an exchange's or queue's name, or of a routing key, in AMQP 0.9.1."""
