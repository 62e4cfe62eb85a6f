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

_Question = tuple[str, int | None, str, str]


class LostQuestions:
    """Which questions lost their connection, and until when they are not asked. Threads may share it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._until: dict[_Question, tuple[float, float]] = {}

    @contextmanager
    def once(self, address: BrokerAddress, exchange: str) -> Iterator[None]:
        """Ask about an exchange inside.

        Raises:
            BrokerUnavailable: the question was not asked, since it lost a connection lately.
        """
        if not exchange:
            # The default exchange is never asked about; what is asked instead crashes nothing.
            yield
            return
        question = (address.stream_host, address.stream_port, address.vhost, exchange)
        until, pause_s = self._until.get(question, (0.0, PAUSE_S[0]))
        if time.monotonic() < until:
            raise BrokerUnavailable(
                f"Asking the broker about exchange {exchange!r} ended the connection; it is not asked again for now."
            )
        try:
            yield
        except ConnectionLost:
            with self._lock:
                self._until.pop(question, None)
                self._until[question] = time.monotonic() + pause_s, min(2 * pause_s, PAUSE_S[1])
                if len(self._until) > REMEMBERED_MAX:
                    del self._until[next(iter(self._until))]
            raise
        with self._lock:
            self._until.pop(question, None)


lost_questions: Final = LostQuestions()
"""Those of this process: another reader would crash the broker as well."""
