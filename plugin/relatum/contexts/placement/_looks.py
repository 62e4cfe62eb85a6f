"""Looking at the database in the background, and keeping the session of those who publish."""

import logging
import threading
from collections.abc import Callable
from typing import Final

from relatum.contexts.placement._session import BUSY
from relatum.errors import DatabaseUnavailable
from relatum.waiting import Outages, ended

logger = logging.getLogger("relatum.placement")

_WHO: Final = "looking for changed placements"

AWAY_S: Final = 1.0
"""Seconds after a look that failed; those who publish look for themselves meanwhile."""

CLOSE_S: Final = 1.0
"""Seconds to wait for a look under way, at the end."""


class Looks:
    """A thread that looks while messages are published, and sleeps while none are.

    It spares publishers the journey, and nothing else: whether their session holds is for each of them to see.

    Args:
        keep: Looks; it is told how many messages were published since the last time, and gives whether to look again
            though no further one is.
        every_s: Seconds between two looks.
    """

    def __init__(self, keep: Callable[[int], bool], every_s: float) -> None:
        self._keep = keep
        self._every_s = every_s
        self._published = 0
        self._wanted = threading.Event()
        self._hurry = threading.Event()
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._outages = Outages(logger)
        self._thread: threading.Thread | None = None

    def want(self) -> None:
        """Note that a message was published: more may follow, and this one may have to be checked."""
        self._published += 1  # one that gets lost between threads does not matter
        if self._published == BUSY:
            self._hurry.set()
        if not self._wanted.is_set():
            self._wanted.set()
            if self._thread is None:
                self._begin()

    def close(self) -> None:
        """End the thread."""
        self._stop.set()
        self._wanted.set()
        self._hurry.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(CLOSE_S)

    def _begin(self) -> None:
        with self._lock:
            if self._thread is None and not self._stop.is_set():
                self._thread = threading.Thread(target=self._run, name="relatum looks", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        goes_on = False
        while True:
            if goes_on:
                self._stop.wait(self._every_s)
            else:
                self._wanted.wait()
                # For a session nobody need wait: those who publish much ask for each message until it holds.
                self._hurry.wait(self._every_s)
            if self._stop.is_set():
                return
            # Before the look: what is published meanwhile wants another one.
            self._wanted.clear()
            self._hurry.clear()
            published, self._published = self._published, 0
            try:
                goes_on = self._keep(published)
                self._outages.over(_WHO)
            except Exception as error:  # noqa: BLE001 it is logged, and the thread goes on
                if self._stop.is_set():
                    return  # Nobody needs it any more, and the connections are closed.
                self._note(error)
                self._wanted.set()
                self._stop.wait(AWAY_S)

    def _note(self, error: Exception) -> None:
        """Log what those who publish are not told; that the database is away they find themselves."""
        if isinstance(error, DatabaseUnavailable):
            logger.debug("not looked: %s", ended(error))
        else:
            self._outages.failed(_WHO, error)
