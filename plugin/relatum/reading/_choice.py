"""Which transport reads: decided by the URL and by what answers."""

from collections.abc import Mapping
from dataclasses import replace
from enum import Enum
from typing import Any, Final, Literal

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


def is_same_broker(
    address: BrokerAddress, stream_properties: Mapping[str, str], amqp_properties: Mapping[str, Any] | None = None
) -> bool:
    """True where two connections lead to one cluster: a guessed port may belong to another.

    What AMQP 0.9.1 says at an address is remembered in this process, so that recorders and look-ups, which open readers
    all the time, ask once.

    Args:
        address: Where both were opened.
        stream_properties: What the broker said of itself at the stream port.
        amqp_properties: What it said at the AMQP port; None to go by what was said there before.
    """
    where = replace(address, password="")
    if amqp_properties is not None:
        name = amqp_properties.get("cluster_name")
        if len(_CLUSTERS) >= _CLUSTERS_MAX:
            _CLUSTERS.clear()
        _CLUSTERS[where] = name.decode(errors="replace") if isinstance(name, bytes) else name
    known = _CLUSTERS.get(where)
    return known is not None and known == stream_properties.get("cluster_name")


_CLUSTERS: Final[dict[BrokerAddress, str | None]] = {}
"""The name of the cluster at an address, as AMQP 0.9.1 told it. Another name at the stream port is compared anew."""

_CLUSTERS_MAX: Final = 1000
"""Addresses remembered; a process has a few."""
