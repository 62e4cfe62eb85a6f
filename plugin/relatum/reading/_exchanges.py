"""Queries bindings and routes of exchanges, with requests that can crash some brokers.

If the connection ends during a request, the request may have crashed the broker, and would crash it again. Or the
broker stopped at that moment, and a later request is harmless. So the request is refused for half a minute, and for
twice as long after each further loss.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Final

from relatum.common.checks import seconds_text
from relatum.common.headers import NAME_BYTES_MAX, RESERVED_PREFIX
from relatum.common.waiting import pause
from relatum.errors import BrokerUnavailable, ConnectionLost, NotFound
from relatum.reading._address import BrokerAddress
from relatum.reading._bounds import refusal
from relatum.reading._connection import SocketConnection
from relatum.reading._nodes import Nodes, missing
from relatum.wire import frames
from relatum.wire.frames import Code
from relatum.wire.session import Answer

ROUTE_SINCE: Final = (4, 3)
"""The version from which Route is known to be safe. 3.10.8 evaluates it with a message without content, in the one
process that serves all stream connections of a node. An exchange that reads messages (headers, hash by header, recent
history, JMS topic) crashes this process, even if it is an alternate exchange or bound to the exchange. 4.3.6 evaluates
Route in the connection's process, with an empty message. The versions in between were not tested."""

RECOVERED_SINCE: Final = (4, 3)
"""The version from which a broker certainly recovers its bindings before it admits clients. 3.10.8 answers while it
recovers them: of 40 bindings it showed none for up to 0.6 s, then some for 20 to 50 ms, with changes at least every
20 ms. The versions in between were not tested."""

RECOVERING_S: Final = 0.1
"""Pause in seconds between two queries. A broker that is recovering bindings certainly recovers one in this time."""

REFUSED_S: Final = (30.0, 3600.0)
"""Minimum and maximum seconds for which a request is refused after it lost its connection."""

LOSSES_MAX: Final = 1000
"""Maximum requests whose lost connections are remembered."""

# No lock guards it, because a fork could leave the lock locked; single operations of a dictionary are atomic.
_losses: Final[dict[tuple[str, int | None, str, str], tuple[float, float]]] = {}
"""By broker, virtual host and exchange: when the request is allowed again, and the pause after the next loss.

All readers of the process share it, since each could crash the broker.
"""


def bound(nodes: Nodes, exchange: str) -> list[str]:
    if exchange.startswith(RESERVED_PREFIX):
        return []
    with _guarded(nodes.address, exchange):
        found, may_lack = nodes.query(lambda connection: _partitions(connection, exchange, None))
        while may_lack:
            pause(RECOVERING_S)
            found, may_lack = nodes.query(partial(_partitions, exchange=exchange, before=found))
        return found


def routes(nodes: Nodes, exchange: str, routing_key: str) -> list[str] | None:
    if not exchange:
        return nodes.query(lambda connection: _default_route(connection, routing_key))
    with _guarded(nodes.address, exchange):
        return nodes.query(lambda connection: _routes(connection, exchange, routing_key))


@contextmanager
def _guarded(address: BrokerAddress, exchange: str) -> Iterator[None]:
    """Guard a query of an exchange in the block. `BrokerUnavailable` if such a query lost a connection recently."""
    query = (address.stream_host, address.stream_port, address.vhost, exchange)
    until, pause_s = _losses.get(query, (0.0, REFUSED_S[0]))
    if (left_s := until - time.monotonic()) > 0:
        raise BrokerUnavailable(
            f"A query of the exchange {exchange!r} may have crashed the broker: try again after {seconds_text(left_s)}."
        )
    try:
        yield
    except ConnectionLost:
        if len(_losses) >= LOSSES_MAX:
            _losses.clear()
        _losses[query] = time.monotonic() + pause_s, min(2 * pause_s, REFUSED_S[1])
        raise
    _losses.pop(query, None)


def _routes(connection: SocketConnection, exchange: str, routing_key: str) -> list[str] | None:
    """Return the streams to which an exchange routes a key; None if this broker cannot be queried safely."""
    # A broker whose version cannot be parsed may be unsafe.
    parts = connection.session.server_properties.get("version", "").split(".")[:2]
    is_known = len(parts) == 2 and all(part.isdecimal() for part in parts)
    if exchange.startswith(RESERVED_PREFIX) or not is_known or tuple(map(int, parts)) < ROUTE_SINCE:
        return None
    _prove_alive(connection)
    answer = connection.answer(frames.named_request, frames.Command.ROUTE, routing_key, exchange)
    if answer.code == Code.STREAM_DOES_NOT_EXIST:
        raise NotFound(f"There is no exchange {exchange!r}.")
    return _strings(answer, exchange)


def _default_route(connection: SocketConnection, name: str) -> list[str]:
    """Return the stream of this name, if it exists: the default exchange routes to no other stream.

    This does not use Route: RabbitMQ 3.10 delivers an empty message if the key is an address of direct reply-to.
    """
    if name.startswith(RESERVED_PREFIX) or not 1 <= len(name.encode(errors="replace")) <= NAME_BYTES_MAX:
        return []
    return [] if missing(connection, [name]) else [name]


def _partitions(connection: SocketConnection, exchange: str, before: list[str] | None) -> tuple[list[str], bool]:
    """Return the streams bound to an exchange, in order, and whether the broker may still be recovering bindings.

    The request only lists bindings, so it is safe for all types of exchanges. `before` is the previous result, None at
    first: two equal results show that all bindings are recovered.
    """
    _prove_alive(connection)
    answer = connection.answer(frames.named_request, frames.Command.PARTITIONS, exchange)
    if answer.code == Code.STREAM_DOES_NOT_EXIST:
        return [], False
    found = _strings(answer, exchange)
    if found == before:
        connection.recovered.add(exchange)
    may_lack = exchange not in connection.recovered and connection.session.is_older_than(RECOVERED_SINCE)
    return found, bool(found) and may_lack


def _prove_alive(connection: SocketConnection) -> None:
    """Send a harmless request. If the connection ends later, the next request ended it, not idleness."""
    connection.answer(frames.metadata, [])
    connection.is_reused = False


def _strings(answer: Answer, name: str) -> list[str]:
    if answer.code != Code.OK:
        raise refusal(name, answer.code)
    return frames.decode_strings(answer.body)
