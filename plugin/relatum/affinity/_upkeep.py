"""What a router does to its sets in the background: closes those that ended, and says which are in use.

Publishers never wait for it, but for one case: a set that ended here and is published to again.
"""

import logging
import threading
import time
from typing import Final

from relatum.collecting._state import backoff
from relatum.errors import RelatumError
from relatum.placement._store import PlacementStore
from relatum.recording._writer import ended

logger = logging.getLogger("relatum.affinity")

BATCH_S: Final = 0.01
"""Seconds after a set's end in which further ends are gathered into the same transaction."""

USED_S_MAX: Final = 15.0
"""Seconds between two times at which the sets in use are written down, at most."""

USED_SHARE: Final = 4
"""How often sets in use are written down within the time after which they would be closed."""


class Upkeep:
    """A thread that keeps a router's sets.

    Args:
        store: The sets' placements.
        idle_s: Seconds without use after which a set is closed; None: never.
    """

    def __init__(self, store: PlacementStore, *, idle_s: float | None) -> None:
        self._store = store
        self._idle_s = idle_s
        self._use_every_s = USED_S_MAX if idle_s is None else min(USED_S_MAX, idle_s / USED_SHARE)
        self._changed = threading.Condition()
        self._used: set[str] = set()
        self._ending: dict[str, int] = {}
        self._thread: threading.Thread | None = None
        self._is_closed = False
        self._stop = threading.Event()
        if idle_s is not None:
            self._begin()

    def used(self, name: str) -> None:
        """Note that a set is in use."""
        with self._changed:
            self._used.add(name)
            self._begin()

    def end(self, name: str, epoch: int) -> None:
        """Close a set soon, unless it is another by then."""
        with self._changed:
            self._ending[name] = epoch
            self._used.discard(name)
            self._begin()
            self._changed.notify_all()

    def is_ending(self, name: str) -> bool:
        """Whether a set is to be closed, and is not yet."""
        return name in self._ending

    def wait_ended(self, name: str, timeout_s: float) -> bool:
        """Wait until a set that was to be closed is; gives whether it is."""
        with self._changed:
            return self._changed.wait_for(lambda: name not in self._ending, timeout_s)

    def close(self, timeout_s: float = 5.0) -> None:
        """Close the sets that are still to be closed, and end the thread; waits at most so long for PostgreSQL."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        thread = self._thread
        if thread is None:
            return
        thread.join(timeout_s)
        self._stop.set()
        if self._ending:
            logger.warning(
                "%s affinity sets that ended are still open: `relatum affinity close` closes them", len(self._ending)
            )

    def _begin(self) -> None:
        if self._thread is None and not self._is_closed:
            self._thread = threading.Thread(target=self._run, name="relatum affinity sets", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        pauses = backoff()
        use_at = time.monotonic() + self._use_every_s
        while not self._stop.is_set():
            with self._changed:
                self._changed.wait_for(lambda: self._ending or self._is_closed, max(0.0, use_at - time.monotonic()))
                is_last = self._is_closed
            if not is_last:
                self._stop.wait(BATCH_S)
            try:
                is_done = self._end()
                if is_last or time.monotonic() >= use_at:
                    use_at = time.monotonic() + self._use_every_s
                    self._use()
            except RelatumError as error:
                logger.warning("affinity sets not closed yet: %s", ended(error))
                is_done = False
            if is_last and is_done:
                return
            if not is_done:
                self._stop.wait(next(pauses))
            else:
                pauses = backoff()

    def _end(self) -> bool:
        """Close what ended; gives whether all of it is closed."""
        with self._changed:
            ending = dict(self._ending)
        if not ending:
            return True
        waiting = self._store.release(ending.items())
        with self._changed:
            for name, epoch in ending.items():
                if name not in waiting and self._ending.get(name) == epoch:
                    del self._ending[name]
            self._changed.notify_all()
        return not waiting

    def _use(self) -> None:
        with self._changed:
            used, self._used = self._used, set()
        try:
            if used:
                self._store.touch(used)
            if self._idle_s is not None:
                close_idle(self._store, self._idle_s)
        except RelatumError:
            with self._changed:
                self._used |= used
            raise


def close_idle(store: PlacementStore, idle_s: float) -> int:
    """Close the sets that nobody used for so many seconds; gives their number.

    Those that move are left for the next time.
    """
    closed = 0
    while idle := store.idle(idle_s):
        waiting = store.release([(each.name, each.epoch) for each in idle])
        closed += len(idle) - len(waiting)
        if waiting:
            break
    return closed
