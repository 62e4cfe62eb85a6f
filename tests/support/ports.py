"""Ports that are free, chosen as private servers choose theirs: no test takes one that a server is about to take."""

from relatum.local._server import Identity, claim, free_port

__all__ = ["DISTRIBUTION_OFFSET", "STREAM_OFFSET", "Identity", "claim", "free_port"]

STREAM_OFFSET = -120
"""From a broker's AMQP port to its stream port: 5672 to 5552."""

DISTRIBUTION_OFFSET = 1
"""From a private broker's AMQP port to that of Erlang's distribution."""
