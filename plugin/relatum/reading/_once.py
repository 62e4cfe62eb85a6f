"""Questions about exchanges that cost a connection: not asked again for a while, whoever asks.

A broker that ends the connection over a question has crashed over it, and asking again would crash it again. Where it
only happened to stop at that moment, asking later is harmless: so the pause begins with half a minute, and doubles.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from relatum.errors import BrokerUnavailable, ConnectionLost
from relatum.reading._address import BrokerAddress

PAUSE_S: Final = (30.0, 3600.0)
"""Least and most seconds before a question is asked again that lost its connection."""

REMEMBERED_MAX: Final = 1000
"""Questions remembered; the oldest are forgotten first."""

_lock: Final = threading.Lock()

_lost: Final[dict[tuple[str, int | None, str, str], tuple[float, float]]] = {}
"""By broker, virtual host and exchange: when the question may be asked again, and the pause after that.

Of the whole process: another reader would crash the broker as well.
"""


@contextmanager
def once(address: BrokerAddress, exchange: str) -> Iterator[None]:
    """Ask about an exchange inside.

    Raises:
        BrokerUnavailable: the question was not asked, since it lost a connection lately.
    """
    if not exchange:
        # The default exchange is never asked about; what is asked instead crashes nothing.
        yield
        return
    question = (address.stream_host, address.stream_port, address.vhost, exchange)
    until, pause_s = _lost.get(question, (0.0, PAUSE_S[0]))
    if time.monotonic() < until:
        raise BrokerUnavailable(
            f"Asking the broker about exchange {exchange!r} ended the connection; it is not asked again for now."
        )
    try:
        yield
    except ConnectionLost:
        with _lock:
            _lost.pop(question, None)
            _lost[question] = time.monotonic() + pause_s, min(2 * pause_s, PAUSE_S[1])
            if len(_lost) > REMEMBERED_MAX:
                del _lost[next(iter(_lost))]
        raise
    with _lock:
        _lost.pop(question, None)
