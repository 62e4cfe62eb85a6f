"""The names of the headers that Relatum adds or reads, and AMQP's limits of names."""

from typing import Final

TIME_HEADER: Final = "relatum_time"
"""The message's time: an integer, microseconds since 1970, UTC. The caller may set it. The interceptor adds it if the
caller has set a `message_id`; an id made by Relatum contains the time.

The name does not begin with `x-`: RabbitMQ 3.13 and later move such headers out of the application properties.
"""

RECEIPT_HEADER: Final = "relatum_receipt"
"""Asks the recorder to store the message's place: under its `message_id` if True, or under this text. The text is used
if the caller has set the `message_id`, which other messages may have, too."""

GROUP_ID_HEADER: Final = "group_id"
"""The id of the group a message belongs to: 24 bytes as 48 hexadecimal digits in lower case."""

GROUP_SEQUENCE_HEADER: Final = "group_sequence"
"""The message's sequence number in its group, an integer of at least 1."""

GROUP_LAST_HEADER: Final = "group_last"
"""Whether the message is the last of its group: True or False. The interceptor adds False if the header is missing."""

CONTEXT_HEADER: Final = "serialization_context"
"""The serialization context of a message. Messages of a context are consumed in the order of publishing."""

AFFINITY_HEADER: Final = "affinity_set"
"""The affinity set of a message. All messages of a set go to one partition."""

AFFINITY_LAST_HEADER: Final = "affinity_last"
"""True in the last message of an affinity set."""

PREDECESSOR_HEADER: Final = "affinity_predecessor"
"""The predecessor, whose affinity set the message joins: its `message_id`, or its place as "stream:offset"."""

PLACED_HEADER: Final = "relatum_placed"
"""The placement under which a message was published, and the message's number in it; see `relatum.contexts`."""

CONTROL_HEADER: Final = "relatum_control"
"""The kind of a control message: "fence", "marker" or "adoption". Consumers of a stream skip control messages.

Serial consumers search a record's bytes for this name before they decode it, so no other header may begin with it.
"""

RESERVED_PREFIX: Final = "amq.rabbitmq."
"""Prefix of the names that the broker reserves: direct reply-to, log, trace. Relatum sends no queries about them."""

NAME_BYTES_MAX: Final = 255
"""Maximum bytes of the name of an exchange or a queue, or of a routing key, in AMQP 0.9.1."""
