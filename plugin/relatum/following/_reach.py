"""Whether the broker is reached, as a member has to know that has a share of streams: who does not leaves it to others.

PostgreSQL may answer a member whose node of the broker is down, or whose line to it is, or whom the broker does not let
in any more, as its password or certificate has expired: it would renew its lease, and nobody would read what it has.
"""

import math
import time
from collections.abc import Callable
from typing import Final

from relatum.errors import BrokerUnavailable, ReadTimeout
from relatum.following._follower import StreamFollower, refuses_login
from relatum.waiting import Outages, Server, Threads

CUT_OFF_S: Final = 15.0
"""Seconds without the broker after which others may have a member's streams: a silent connection is noticed in as many.
"""

_ASKS: Final = 3
"""How often the broker is asked in that time where nothing is followed by which it would be seen."""

RETURN_S: Final = 5.0
"""Seconds in which all come back who were cut off together, as by a broker's restart: so long is the pause between the
tries of a follower."""

_WHO: Final = "reaching the broker"


class Reach:
    """Whether a member reaches the broker. For one thread; it never waits.

    Args:
        follower: Follows its streams: while any is attached, the broker is reached.
        outages: Where to tell that the broker is away.
        stream: One of the streams that members share, of which the broker is asked while somebody waits for it, and
            none is attached. A member for which all is well asks nothing: there may be many that stand by.

    Attributes:
        is_cut_off: Whether it has not been reached for so long that others may have its streams.
        is_returning: Whether it was cut off, and reaches the broker again only just; or does not now, and may be cut
            off soon. It takes nothing: all may be cut off, and come back to what is theirs.
    """

    def __init__(self, follower: StreamFollower, outages: Outages, stream: Callable[[], str]) -> None:
        self.is_cut_off = self.is_returning = False
        self._follower = follower
        self._outages = outages
        self._stream = stream
        self._threads = Threads(1, "relatum-follower-asks")
        self._is_asking = False
        self._cut_off_at = -math.inf
        self._reached_at = self._asked_at = self._looked_at = time.monotonic()

    def look(self) -> None:
        """See how it is now; to be called several times a second, or every few."""
        now = time.monotonic()
        stood_still, self._looked_at = now - self._looked_at > CUT_OFF_S / 2, now
        if stood_still and not self.is_cut_off:
            # It knows nothing of that time.
            self._reached_at = max(self._reached_at, now - CUT_OFF_S / _ASKS)
        is_up = self._outages.is_up(Server.BROKER) and self._follower.is_let_in
        is_attached = self._follower.is_attached
        if is_attached:
            # Nobody asks any more, so no answer says that it is back.
            self._outages.over(_WHO)
        if is_attached or (is_up and not self.is_cut_off):
            self._reached_at = now
        elif not self._is_asking and (self.is_cut_off or now - self._asked_at >= CUT_OFF_S / _ASKS):
            stream = self._stream()
            self._is_asking, self._asked_at = True, now
            self._threads.submit(self._ask, stream)
        self.is_cut_off = now - self._reached_at >= CUT_OFF_S
        if self.is_cut_off:
            self._cut_off_at = now
        is_unsure = now - min(self._reached_at, now) >= CUT_OFF_S / _ASKS
        self.is_returning = not self.is_cut_off and (is_unsure or now - self._cut_off_at < RETURN_S)

    def close(self) -> None:
        """Ask nothing more."""
        self._threads.shutdown()

    def _ask(self, stream: str) -> None:
        error: Exception | None = None
        try:
            self._follower.reader().bounds(stream)
        except Exception as raised:  # noqa: BLE001 - it is told, or the broker has answered
            error = raised
        if isinstance(error, BrokerUnavailable | ReadTimeout) or refuses_login(error):
            self._outages.failed(_WHO, error)
        else:
            self._reached_at = time.monotonic()
            self._outages.answered(Server.BROKER)
            self._outages.over(_WHO)
        self._is_asking = False
