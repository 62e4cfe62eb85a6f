"""Bindings of exchanges and their routes: requests that crash some brokers, and are therefore made with care.

If a broker ends the connection during a request, it has crashed over it, and a repetition would crash it again; or it
just stopped at that moment, and a later request is harmless. So the request is not repeated for half a minute, and then
for twice as long each time.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Final

from relatum.errors import BrokerUnavailable, ConnectionLost, NotFound
from relatum.headers import BROKERS_OWN, NAME_BYTES_MAX
from relatum.reading._address import BrokerAddress
from relatum.reading._bounds import refusal
from relatum.reading._connection import SocketConnection
from relatum.reading._nodes import Nodes, missing
from relatum.waiting import pause
from relatum.wire import frames
from relatum.wire.frames import Code
from relatum.wire.session import Answer

ROUTE_SINCE: Final = (4, 3)
"""The version from which Route is known to be safe. In 3.10.8 the one process that serves all stream connections of a
node evaluates it, with a message that has no content: any exchange that looks into messages (headers, hash by header,
recent history, JMS topic) crashes it, reached directly, as alternate exchange or through a binding between exchanges.
4.3.6 evaluates it in the connection's process, with an empty message. The versions between were not tested."""

RECOVERED_SINCE: Final = (4, 3)
"""The version from which a broker is known to have its bindings before it admits clients. 3.10.8 answers while it
recovers them: of 40 there were none for up to 0.6 s, then some for 20 to 50 ms, never the same for over 20 ms. The
versions between were not tested."""

RECOVERING_S: Final = 0.1
"""Seconds in which a broker that is recovering bindings certainly recovers another one."""

REPEATED_S: Final = (30.0, 3600.0)
"""Least and most seconds before a request that lost its connection is repeated."""

LOST_MAX: Final = 1000
"""The most requests remembered for a lost connection."""

# Changed by single operations of a dictionary: a fork could leave a lock locked.
_lost: Final[dict[tuple[str, int | None, str, str], tuple[float, float]]] = {}
"""By broker, virtual host and exchange: when the request may be repeated, and the pause after that.

Shared by the whole process: another reader would crash the broker as well.
"""


def bound(nodes: Nodes, exchange: str) -> list[str]:
    if exchange.startswith(BROKERS_OWN):
        return []
    with _once(nodes.address, exchange):
        found, may_lack = nodes.ask(lambda connection: _partitions(connection, exchange, None))
        while may_lack:
            pause(RECOVERING_S)
            found, may_lack = nodes.ask(partial(_partitions, exchange=exchange, before=found))
        return found


def routes(nodes: Nodes, exchange: str, routing_key: str) -> list[str] | None:
    if not exchange:
        return nodes.ask(lambda connection: _named(connection, routing_key))
    with _once(nodes.address, exchange):
        return nodes.ask(lambda connection: _routes(connection, exchange, routing_key))


@contextmanager
def _once(address: BrokerAddress, exchange: str) -> Iterator[None]:
    """Query an exchange in the block; `BrokerUnavailable` if such a query lost a connection recently."""
    question = (address.stream_host, address.stream_port, address.vhost, exchange)
    until, pause_s = _lost.get(question, (0.0, REPEATED_S[0]))
    if time.monotonic() < until:
        raise BrokerUnavailable(
            f"Asking the broker about exchange {exchange!r} ended the connection; it is not repeated for now."
        )
    try:
        yield
    except ConnectionLost:
        if len(_lost) >= LOST_MAX:
            _lost.clear()
        _lost[question] = time.monotonic() + pause_s, min(2 * pause_s, REPEATED_S[1])
        raise
    _lost.pop(question, None)


def _routes(connection: SocketConnection, exchange: str, routing_key: str) -> list[str] | None:
    """Return the streams that an exchange routes a key to; None if this broker cannot be queried safely."""
    # A version that cannot be parsed is not known to answer Route.
    parts = connection.session.server_properties.get("version", "").split(".")[:2]
    is_known = len(parts) == 2 and all(part.isdecimal() for part in parts)
    if exchange.startswith(BROKERS_OWN) or not is_known or tuple(map(int, parts)) < ROUTE_SINCE:
        return None
    _prove_alive(connection)
    answer = connection.answer(frames.named_request, frames.Command.ROUTE, routing_key, exchange)
    if answer.code == Code.STREAM_DOES_NOT_EXIST:
        raise NotFound(f"There is no exchange {exchange!r}.")
    return _strings(answer, exchange)


def _named(connection: SocketConnection, name: str) -> list[str]:
    """Return the stream of that name, if there is one: the default exchange routes to nothing else.

    Route is never used: RabbitMQ 3.10 delivers an empty message if the key is an address of direct reply-to.
    """
    if name.startswith(BROKERS_OWN) or not 1 <= len(name.encode(errors="replace")) <= NAME_BYTES_MAX:
        return []
    return [] if missing(connection, [name]) else [name]


def _partitions(connection: SocketConnection, exchange: str, before: list[str] | None) -> tuple[list[str], bool]:
    """Return the streams bound to an exchange, in order, and whether the broker may be recovering more.

    The request lists bindings and routes nothing, so it is safe for exchanges of every kind. `before` is its last
    result, if the broker may have been recovering more.
    """
    _prove_alive(connection)
    answer = connection.answer(frames.named_request, frames.Command.PARTITIONS, exchange)
    if answer.code == Code.STREAM_DOES_NOT_EXIST:
        return [], False
    found = _strings(answer, exchange)
    if found == before:
        connection.settled.add(exchange)
    may_lack = exchange not in connection.settled and connection.session.is_older_than(RECOVERED_SINCE)
    return found, bool(found) and may_lack


def _prove_alive(connection: SocketConnection) -> None:
    """Exchange something harmless, so that a connection lost afterwards was lost over the request, not while idle."""
    connection.answer(frames.metadata, [])
    connection.is_reused = False


def _strings(answer: Answer, name: str) -> list[str]:
    if answer.code != Code.OK:
        raise refusal(name, answer.code)
    return frames.decode_strings(answer.body)
