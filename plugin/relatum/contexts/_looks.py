"""Queries of the database in the background while messages are published."""

import logging
import threading
from collections.abc import Callable
from typing import Final

from relatum.errors import DatabaseUnavailable
from relatum.waiting import Outages, ended

logger = logging.getLogger("relatum.placement")

_WHO: Final = "looking for changed placements"

LOOK_EVERY_S: Final = 0.05
"""Seconds between two queries: a quarter of the time that one is valid, so that some may fail or be late."""

BUSY: Final = 2
"""From so many messages between two queries on, a query in the background pays."""

AWAY_S: Final = 1.0
"""Seconds to pause after a failed query; publishers query for themselves then."""

CLOSE_S: Final = 1.0
"""Seconds that `close` waits for a running query."""


class BackgroundLooks:
    """A thread that queries the database while messages are published, and sleeps otherwise.

    It saves publishers the round trip; each publisher checks how old the last query is. `look` gets the number of
    messages published since its last call.
    """

    def __init__(self, look: Callable[[int], None], every_s: float = LOOK_EVERY_S) -> None:
        self._look = look
        self._every_s = every_s
        self._published = 0
        self._wanted = threading.Event()
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._outages = Outages(logger)
        self._thread: threading.Thread | None = None

    def want(self) -> None:
        """Request a query, since a message was published."""
        self._published += 1  # a lost update between threads does not matter
        if not self._wanted.is_set():
            self._wanted.set()
            with self._lock:
                if self._thread is None and not self._stop.is_set():
                    self._thread = threading.Thread(target=self._run, name="relatum looks", daemon=True)
                    self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._wanted.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(CLOSE_S)

    def _run(self) -> None:
        while self._wanted.wait() and not self._stop.wait(self._every_s):
            # Clear before the query: messages published during it need another one.
            self._wanted.clear()
            published, self._published = self._published, 0
            try:
                self._look(published)
                self._outages.over(_WHO)
            except Exception as error:  # noqa: BLE001 it is logged, and the thread continues
                if self._stop.is_set():
                    return  # the connections are closed
                if isinstance(error, DatabaseUnavailable):
                    logger.debug("not looked: %s", ended(error))  # publishers see it themselves
                else:
                    self._outages.failed(_WHO, error)
                self._wanted.set()
                self._stop.wait(AWAY_S)
