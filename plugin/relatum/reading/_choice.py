"""Which transport reads: decided by the URL and by what answers."""

from collections.abc import Mapping
from enum import Enum
from typing import Any, Literal

from relatum.errors import ConfigurationError
from relatum.reading._address import BrokerAddress

TransportName = Literal["auto", "stream", "amqp"]


class Choice(Enum):
    """What to try."""

    STREAM = "stream"
    """The stream protocol, nothing else."""
    AMQP = "amqp"
    """AMQP 0.9.1, nothing else."""
    EITHER = "either"
    """The stream protocol if the same broker answers on the port next to its AMQP port; else AMQP 0.9.1."""


def choose(address: BrokerAddress, transport: TransportName) -> Choice:
    """What an address and a caller's wish amount to.

    Raises:
        ConfigurationError: The address has no port for that transport, or there is no transport of that name.
    """
    if transport == "amqp" or (transport == "auto" and address.stream_port is None):
        if address.amqp_port is None:
            raise ConfigurationError("AMQP 0.9.1 needs an amqp:// or amqps:// URL.")
        return Choice.AMQP
    if transport == "stream":
        if address.stream_port is None:
            raise ConfigurationError("The stream protocol needs a rabbitmq-stream:// URL.")
        return Choice.STREAM
    if transport != "auto":
        raise ConfigurationError(f"A transport is 'auto', 'stream' or 'amqp', not {transport!r}.")
    return Choice.EITHER if address.stream_port_guessed else Choice.STREAM


def is_same_broker(stream_properties: Mapping[str, str], amqp_properties: Mapping[str, Any]) -> bool:
    """True where two connections lead to one cluster: a guessed port may belong to another."""
    name = amqp_properties.get("cluster_name")
    if isinstance(name, bytes):
        name = name.decode(errors="replace")
    return name is not None and name == stream_properties.get("cluster_name")
