"""Looking at the database in the background while messages are published."""

import logging
import threading
from collections.abc import Callable
from typing import Final

from relatum.errors import DatabaseUnavailable
from relatum.waiting import Outages, ended

logger = logging.getLogger("relatum.placement")

_WHO: Final = "looking for changed placements"

LOOK_EVERY_S: Final = 0.05
"""Seconds between two looks: a quarter of what one serves for, so that some may fail or be late."""

BUSY: Final = 2
"""Messages between two looks from which on a look in the background pays."""

AWAY_S: Final = 1.0
"""Seconds to pause after a look that failed; publishers look for themselves then."""

CLOSE_S: Final = 1.0
"""Seconds to wait for a look under way, at the end."""


class Looks:
    """A thread that looks while messages are published, and sleeps while none are.

    It only saves publishers the round trip; each publisher checks how old the last look is. The look gets the number of
    messages published since the last one.
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
        """Note that a message was published: more may follow, and this one may have to be checked."""
        self._published += 1  # one that gets lost between threads does not matter
        if not self._wanted.is_set():
            self._wanted.set()
            with self._lock:
                if self._thread is None and not self._stop.is_set():
                    self._thread = threading.Thread(target=self._run, name="relatum looks", daemon=True)
                    self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._stop.set()
        self._wanted.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(CLOSE_S)

    def _run(self) -> None:
        while self._wanted.wait() and not self._stop.wait(self._every_s):
            # Before the look: messages published during it need another one.
            self._wanted.clear()
            published, self._published = self._published, 0
            try:
                self._look(published)
                self._outages.over(_WHO)
            except Exception as error:  # noqa: BLE001 it is logged, and the thread goes on
                if self._stop.is_set():
                    return  # Nobody needs it any more, and the connections are closed.
                if isinstance(error, DatabaseUnavailable):
                    logger.debug("not looked: %s", ended(error))  # publishers see it themselves
                else:
                    self._outages.failed(_WHO, error)
                self._wanted.set()
                self._stop.wait(AWAY_S)
