"""Looks after the parts of the table while a process records: see docs/adr/0023."""

import logging
import time
from typing import Final

import sqlalchemy as sa

from relatum.store.parts import PART_BYTES, close_parts, drop_parts, empty_parts, turn_parts

logger = logging.getLogger("relatum.recorder")

TURN_S: Final = 5.0
"""Seconds between two looks at what the open part holds: at 200,000 rows a second it grows by a million meanwhile."""

TEND_S: Final = 60.0
"""Seconds between two looks at the others. A try that gives way to a reader keeps look-ups waiting for 50 ms."""


class PartTender:
    """Makes the next part ahead of time, closes full ones, and drops those of which nothing is retained.

    Each recorder has one; who comes second finds nothing to do.
    """

    def __init__(self, engine: sa.Engine) -> None:
        self._engine = engine
        self._tended_at = time.monotonic() - TEND_S

    def tend(self) -> float:
        """Do what is due; gives the seconds until the next time. To build an index anew takes a while."""
        found = turn_parts(self._engine, PART_BYTES)
        if time.monotonic() - self._tended_at >= TEND_S:
            self._tended_at = time.monotonic()
            close_parts(self._engine, found)
            empty_parts(self._engine)
            if dropped := drop_parts(self._engine):
                rows = sum(dropped.values())
                logger.info("dropped %d rows of messages that are not retained", rows, extra={"rows": rows})
        return TURN_S
