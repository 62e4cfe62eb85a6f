"""Which transport reads: decided by the URL and by what answers."""

import time
from collections.abc import Mapping
from enum import Enum
from typing import Any, Final, Literal

from relatum.checks import shown
from relatum.errors import ConfigurationError
from relatum.reading._address import BrokerAddress

TransportName = Literal["auto", "stream", "amqp"]

CONNECT_S_MIN: Final = 0.5
"""Seconds a port has to answer at least, however much of the time-out others have taken before."""


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
        raise ConfigurationError(f"A transport is 'auto', 'stream' or 'amqp', not {shown(transport)}.")
    return Choice.EITHER if address.stream_port_guessed else Choice.STREAM


def cluster_name(amqp_properties: Mapping[str, Any]) -> str | None:
    """The cluster an AMQP connection leads to: a guessed stream port may be another's. None where it does not say."""
    name = amqp_properties.get("cluster_name")
    if isinstance(name, bytes):
        name = name.decode(errors="replace")
    return name if isinstance(name, str) and name else None


class ConnectingTime:
    """The time a reader has for connecting, whatever it tries one after the other."""

    def __init__(self, timeout_s: float) -> None:
        self._deadline = time.monotonic() + timeout_s

    @property
    def left_s(self) -> float:
        """Seconds left; never so few that nobody could answer."""
        return max(CONNECT_S_MIN, self._deadline - time.monotonic())

    def of_streams(self, choice: Choice) -> float:
        """Seconds for the stream port: half of them where AMQP 0.9.1 is still to be tried."""
        return self.left_s if choice is Choice.STREAM else max(CONNECT_S_MIN, self.left_s / 2)
