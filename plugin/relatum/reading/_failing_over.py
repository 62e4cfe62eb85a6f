"""Which of a broker's several addresses is used: the one that answered last; the next, where it does not answer.

All who connect ask here, whatever the protocol, and what one of them found the whole process knows: who comes later
does not wait for a silent node once more. Nobody goes back by himself to an address that answers again, which would be
a reason to lose a connection: the nodes of a cluster are alike. With one address nothing here does anything.

See docs/adr/0042.
"""

import logging
import time
from types import TracebackType
from typing import Final

from relatum.errors import (
    AccessRefused,
    BrokerUnavailable,
    ConfigurationError,
    ProtocolError,
    ReadTimeout,
    RelatumError,
    UsedAfterClose,
)
from relatum.reading._address import BrokerAddress
from relatum.reading._time import CONNECT_S_MIN
from relatum.waiting import ended

logger = logging.getLogger("relatum.broker")

BROKERS_MAX: Final = 256
"""Brokers of which is remembered who answered; more than a process has."""

_PASSED_OVER: Final = (BrokerUnavailable, ReadTimeout, AccessRefused, ConfigurationError, ProtocolError)
"""Errors after which the next address is tried: a node may be there and be set up otherwise."""

_used: dict[BrokerAddress, int] = {}
"""Which address answered last. Single operations of a dictionary: no lock that a fork could leave locked."""


def in_turn(address: BrokerAddress) -> list[BrokerAddress]:
    """The addresses, each by itself, in the order in which they are to be tried now."""
    each, first = list(address.each), _used.get(address, 0)
    return each[first:] + each[:first]


def answered(address: BrokerAddress, one: BrokerAddress, why: Exception | None) -> None:
    """Note that one of the addresses answers; a line in the log where it was another one before.

    `why`: What the one before said, where it was tried.
    """
    if not address.others:
        return
    before, index = _used.get(address, 0), address.each.index(one)
    if before == index:
        return
    if len(_used) >= BROKERS_MAX:
        _used.clear()
    _used[address] = index
    reason = "" if why is None else f": {ended(why)}"
    logger.warning("RabbitMQ at %s is used from now on, not at %s%s", one.where, address.each[before].where, reason)


class Attempts:
    """Tries to connect, each to another address; used as `with attempts as (address, within_s)`, for ever.

    What fails inside is passed over as long as there is an address left; the last one's block raises.

    Args:
        address: The broker, with one address or more.
        within_s: Seconds for all tries together; each has its share of what is left.
    """

    def __init__(self, address: BrokerAddress, within_s: float) -> None:
        self._address = address
        self._left = in_turn(address)
        self._least_s = min(CONNECT_S_MIN, within_s)
        self._until = time.monotonic() + within_s
        self._errors: list[RelatumError] = []

    def __enter__(self) -> tuple[BrokerAddress, float]:
        return self._left[0], max(self._least_s, (self._until - time.monotonic()) / len(self._left))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if error is None:
            answered(self._address, self._left[0], self._errors[0] if self._errors else None)
        if not isinstance(error, _PASSED_OVER) or isinstance(error, UsedAfterClose) or not self._address.others:
            return False
        self._errors.append(error)
        del self._left[0]
        if self._left:
            return True
        raise _of_all(self._errors) from error


def _of_all(errors: list[RelatumError]) -> RelatumError:
    """What all tries amount to: what somebody has to change, else that nobody answers."""
    final = next((each for each in errors if not isinstance(each, BrokerUnavailable | ReadTimeout)), None)
    return final or BrokerUnavailable(f"No address answers. {' '.join(map(str, errors))}")
