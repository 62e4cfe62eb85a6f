"""What is away, said once when it goes and once when it is back, for all streams of a process together."""

import logging
import threading
import time
from collections import defaultdict

from relatum._failures import ended
from relatum.errors import BrokerUnavailable, DatabaseUnavailable, ReadTimeout, RelatumError, StreamUnavailable

logger = logging.getLogger("relatum.recorder")


class Outages:
    """Who waits for what. As long as anybody does, it is away; the first who need not wait any more wakes the others.

    Args:
        stop: Ends all waits; whoever sets it calls `wake` too.
    """

    def __init__(self, stop: threading.Event) -> None:
        self._stop = stop
        self._changed = threading.Condition()
        self._waiting: defaultdict[str, set[str]] = defaultdict(set)
        self._recoveries = 0

    def failed(self, who: str, error: RelatumError) -> None:
        """Note that somebody cannot go on; a line in the log where nobody else had said so."""
        what = _cause(who, error)
        with self._changed:
            is_new = not self._waiting[what]
            self._waiting[what].add(who)
        if is_new:
            logger.warning("%s: %s", what, ended(error), extra={"stream": who})

    def over(self, who: str) -> None:
        """Note that somebody goes on; a line in the log where nobody waits any more."""
        with self._changed:
            mine = [what for what, waiting in self._waiting.items() if who in waiting]
            if not mine:
                return
            for what in mine:
                self._waiting[what].discard(who)
            back = [what for what in mine if not self._waiting[what]]
            for what in back:
                del self._waiting[what]
            self._recoveries += 1
            self._changed.notify_all()
        for what in back:
            logger.warning("%s: back", what)

    def wait(self, pause_s: float) -> None:
        """Wait before the next try: so long, or until somebody else finds that something is back, or the stop."""
        until = time.monotonic() + pause_s
        with self._changed:
            seen = self._recoveries
            while not self._stop.is_set() and self._recoveries == seen:
                left = until - time.monotonic()
                if left <= 0:
                    return
                self._changed.wait(left)

    def wake(self) -> None:
        """Let all look whether they should stop."""
        with self._changed:
            self._changed.notify_all()


def _cause(who: str, error: RelatumError) -> str:
    """What is away."""
    if isinstance(error, DatabaseUnavailable):
        return "database away"
    if isinstance(error, BrokerUnavailable | ReadTimeout) and not isinstance(error, StreamUnavailable):
        return "broker away"
    return f"stream {who!r} not recorded"
