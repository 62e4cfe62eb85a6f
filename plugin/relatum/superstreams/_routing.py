"""Which stream of a super stream a routing key belongs to: the rule of RabbitMQ's own clients.

Source: HashRoutingStrategy and HashUtils of the RabbitMQ stream Java client; those for Go, .NET and Rust agree.
"""

from typing import Final

import mmh3

from relatum.checks import shown
from relatum.errors import InvalidInput

SEED: Final = 104_729
"""The seed all clients share."""


def partition_of(routing_key: str | bytes, partitions: int) -> int:
    """The place, from 0, of a routing key's stream among those of a super stream in their order.

    Args:
        routing_key: Text counts as its UTF-8 bytes.
        partitions: How many streams there are, from 1.

    Raises:
        InvalidInput: the key cannot be sent: no text and no bytes, or half a surrogate pair in it.
    """
    # Encoded here: half a surrogate pair in a text ends the process in mmh3 5.2.
    if isinstance(routing_key, str):
        try:
            routing_key = routing_key.encode()
        except UnicodeEncodeError:
            raise InvalidInput(f"a key cannot have half a surrogate pair: {shown(routing_key)}") from None
    elif not isinstance(routing_key, bytes):
        raise InvalidInput(f"a key is text or bytes, not {shown(routing_key)}")
    return mmh3.hash(routing_key, SEED, signed=False) % partitions
