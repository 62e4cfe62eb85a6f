"""Looks after the parts of the table while a process records: see docs/adr/0023."""

import logging
import threading
import time
from typing import Final

import sqlalchemy as sa

from relatum.recording._track import Tracks, Worker
from relatum.store.parts import PART_BYTES, close_parts, drop_parts, empty_parts, turn_parts
from relatum.waiting import Outages

logger = logging.getLogger("relatum.recorder")

TURN_S: Final = 5.0
"""Seconds between two looks at what the open part holds: at 200,000 rows a second it grows by a million meanwhile."""

TEND_S: Final = 60.0
"""Seconds between two looks at the others. A try that gives way to a reader keeps look-ups waiting for 50 ms."""

_WHO: Final = "looking after the parts of the table"


class PartTender(Worker):
    """Makes the next part ahead of time, closes full ones, and drops those of which nothing is retained.

    In a thread of its own: to build an index anew takes a while. Each recorder has one; who comes second finds nothing
    to do.
    """

    def __init__(self, engine: sa.Engine, tracks: Tracks, outages: Outages, stop: threading.Event) -> None:
        super().__init__("relatum-parts")
        self._engine = engine
        self._tracks = tracks
        self._outages = outages
        self._stop = stop
        self._tended_at = time.monotonic() - TEND_S

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                if self._tracks.recorded():
                    self._look()
            except Exception as error:  # noqa: BLE001 - said once, and tried again
                if self._stop.is_set():
                    return
                self._outages.failed(_WHO, error)
            else:
                self._outages.over(_WHO)
            # Also woken by whoever finds that what was away is back: else this one would be the last to say so.
            self._outages.wait(TURN_S)

    def _look(self) -> None:
        found = turn_parts(self._engine, PART_BYTES)
        if time.monotonic() - self._tended_at < TEND_S:
            return
        self._tended_at = time.monotonic()
        close_parts(self._engine, found)
        empty_parts(self._engine)
        if dropped := drop_parts(self._engine):
            rows = sum(dropped.values())
            logger.info("dropped %d rows of messages that are not retained", rows, extra={"rows": rows})
