"""When reading pauses a little, so that what many streams bring is read, handed on and taken together."""

import time
from typing import Final

from relatum.following._followed import Followed

STREAMS: Final = 16
"""Streams of which something came in one window, from which on the next one is waited for: each turn of the thread that
reads, and of those behind it, costs more than a small chunk does."""

BYTES: Final = 1 << 20
"""Bytes that came in one window from which on nothing is waited for: those are large turns by themselves."""


class Gathering:
    """Judges, by what came in the last window of time, whether the thread that reads pauses until the next one ends.

    A few streams, and a lone message, are read at once.

    Args:
        gather_s: Seconds of a window; 0 for no pause at all.
    """

    def __init__(self, gather_s: float) -> None:
        self._gather_s = gather_s
        self._window = 1
        self._streams = self._bytes = 0
        self._until = 0.0
        self._is_pausing = False

    def came(self, followed: Followed, bytes_: int) -> None:
        """Something came of a stream."""
        self._bytes += bytes_
        if followed.window != self._window:
            followed.window = self._window
            self._streams += 1

    def pause_s(self) -> float:
        """Seconds for which nothing is to be read; asked after each turn."""
        if not self._gather_s:
            return 0.0
        now = time.monotonic()
        if now >= self._until:
            self._is_pausing = self._streams >= STREAMS and self._bytes < BYTES
            self._window += 1
            self._streams = self._bytes = 0
            self._until = now + self._gather_s
        return self._until - now if self._is_pausing else 0.0
