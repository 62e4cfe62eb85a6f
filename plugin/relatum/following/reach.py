"""Whether a member that shares streams with others reaches the broker. If not, it leaves its streams to them.

A member may reach PostgreSQL but not the broker: the broker's node or the network is down, or a password or certificate
has expired. The member would renew its lease, and no member would read its streams.
"""

import math
import time
from collections.abc import Callable
from typing import Final

from relatum.errors import BrokerUnavailable, ReadTimeout
from relatum.following._follower import StreamFollower, refuses_login
from relatum.waiting import Outages, Server, Threads

CUT_OFF_S: Final = 15.0
"""Seconds without the broker after which others may take a member's streams: the time in which a silent connection is
detected."""

_ASKS: Final = 3
"""Queries to the broker in this time, if no attached stream shows that it is reachable."""

RETURN_S: Final = 5.0
"""Seconds in which all members return after a restart of the broker: the longest pause of a follower."""

_WHO: Final = "reaching the broker"


class BrokerReach:
    """Whether a member reaches the broker. For one thread; does not block.

    While any stream of `follower` is attached, the broker is reachable. Otherwise, a query about a shared stream,
    which `stream` returns, checks that; but only while something waits for the broker, since members may be many.

    `is_cut_off`: Whether the broker has been unreachable for so long that others may take the member's streams.
    `is_returning`: Whether the member was cut off until just now, or may be cut off soon. It must not take streams
    then: all members may be cut off, and return to their own.
    """

    def __init__(self, follower: StreamFollower, outages: Outages, stream: Callable[[], str]) -> None:
        self.is_cut_off = self.is_returning = False
        self._follower = follower
        self._outages = outages
        self._stream = stream
        self._threads = Threads(1, "relatum-follower-asks")
        self._may_ask, self._is_closed = True, False
        self._cut_off_at = -math.inf
        self._reached_at = self._asked_at = self._looked_at = time.monotonic()

    def look(self) -> None:
        """Update the attributes; call this at least every few seconds."""
        now = time.monotonic()
        stood_still, self._looked_at = now - self._looked_at > CUT_OFF_S / 2, now
        if stood_still and not self.is_cut_off:
            # The process was suspended, which proves nothing about the broker.
            self._reached_at = max(self._reached_at, now - CUT_OFF_S / _ASKS)
        is_up = self._outages.is_up(Server.BROKER) and self._follower.may_log_in
        is_attached = self._follower.is_attached
        if is_attached:
            # No further query would report the end of the outage.
            self._outages.over(_WHO)
        if is_attached or (is_up and not self.is_cut_off):
            self._reached_at = now
        elif self._may_ask and (self.is_cut_off or now - self._asked_at >= CUT_OFF_S / _ASKS):
            stream = self._stream()
            self._may_ask, self._asked_at = False, now
            self._threads.submit(self._ask, stream)
        self.is_cut_off = now - self._reached_at >= CUT_OFF_S
        if self.is_cut_off:
            self._cut_off_at = now
        is_unsure = now - min(self._reached_at, now) >= CUT_OFF_S / _ASKS
        self.is_returning = not self.is_cut_off and (is_unsure or now - self._cut_off_at < RETURN_S)

    def close(self) -> None:
        """Stop the queries. `look` may still be called."""
        self._may_ask, self._is_closed = False, True
        self._threads.shutdown()

    def _ask(self, stream: str) -> None:
        error: Exception | None = None
        try:
            self._follower.reader().bounds(stream)
        except Exception as raised:  # noqa: BLE001 - logged, or it is an answer of the broker
            error = raised
        if isinstance(error, BrokerUnavailable | ReadTimeout) or refuses_login(error):
            self._outages.failed(_WHO, error)
        else:
            self._reached_at = time.monotonic()
            self._outages.answered(Server.BROKER)
            self._outages.over(_WHO)
        self._may_ask = not self._is_closed
