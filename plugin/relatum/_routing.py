"""Which stream of a super stream a routing key belongs to: the rule of RabbitMQ's own clients.

Source: HashRoutingStrategy and HashUtils of the RabbitMQ stream Java client; those for Go, .NET and Rust agree.
"""

from typing import Final

import mmh3

SEED: Final = 104_729
"""The seed all clients share."""


def partition_of(routing_key: str | bytes, partitions: int) -> int:
    """The place, from 0, of a routing key's stream among those of a super stream in their order.

    Args:
        routing_key: Text counts as its UTF-8 bytes.
        partitions: How many streams there are, from 1.
    """
    return mmh3.hash(routing_key, SEED, signed=False) % partitions
