"""Which cluster an address means, asked by AMQP 0.9.1, whose port was given.

A stream port that was not given is a guess: anybody may listen there. Servers of the stream protocol say which cluster
they are before a login: credentials are sent only to the cluster that the AMQP port belongs to.
"""

from typing import Final

from relatum.errors import ConfigurationError, TlsRefused
from relatum.reading._address import BrokerAddress
from relatum.reading._pika_opening import asking
from relatum.wire import AnotherProtocol, MechanismNotTaken

ADDRESSES_MAX: Final = 256
"""Addresses whose cluster is remembered; more than a process has brokers."""

_Key = tuple[str, int | None, bool]

_known: dict[_Key, str] = {}
"""By AMQP address. Single operations of a dictionary: no lock that a fork could leave locked."""


class NamelessCluster(ConfigurationError):
    """The broker does not name its cluster: nobody can prove to be it, so its stream port cannot be guessed."""


NOT_BY_STREAMS: Final = (AnotherProtocol, TlsRefused, MechanismNotTaken, NamelessCluster)
"""Errors that are final where the stream port was given, and say of a guessed one that it is another's."""


def cluster_meant(address: BrokerAddress, *, timeout_s: float) -> str:
    """The name of the cluster that must answer on an address's guessed stream port; asked once, and it may block.

    Raises:
        BrokerUnavailable, AccessRefused: AMQP 0.9.1 cannot be asked.
        NamelessCluster: the broker does not say.
    """
    key = _key(address)
    name = _known.get(key)
    if name is None:
        with asking(address, timeout_s) as connection:
            name = _name_of(connection._impl.server_properties.get("cluster_name"))
        if name is not None:
            if len(_known) >= ADDRESSES_MAX:
                _known.clear()
            _known[key] = name
    if name is None:
        raise NamelessCluster(
            "The broker does not say which cluster it is, so the stream port cannot be guessed: give a "
            "rabbitmq-stream:// URL."
        )
    return name


def forget_cluster(address: BrokerAddress) -> None:
    """Ask again the next time: another cluster answered. The broker may have been set up anew."""
    _known.pop(_key(address), None)


def _name_of(given: object) -> str | None:
    name = given.decode(errors="replace") if isinstance(given, bytes) else given
    return name if isinstance(name, str) and name else None


def _key(address: BrokerAddress) -> _Key:
    return address.host, address.amqp_port, address.amqp_tls
