"""The one reader by which messages of a connection are looked for, lent to whoever looks.

Many messages are in doubt at once where a broker has just come back: a connection for each is a crowd at its door.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from relatum.errors import BrokerUnavailable, ReadTimeout
from relatum.processes import after_fork
from relatum.reading import BrokerAddress, StreamReader
from relatum.waiting import left_s

CONNECT_S: Final = 10.0
"""Seconds to reach the broker, and for each of its answers, at most: where the call around it has no less."""


class _Lent:
    """A reader that is open, and how many use it now."""

    def __init__(self, reader: StreamReader) -> None:
        self.reader = reader
        self.users = 0
        self.has_failed = False


class LentReader:
    """Opened when first asked for, kept until `close`. There is one at a time, however many look. Threads share it."""

    def __init__(self, address: BrokerAddress) -> None:
        self._address = address
        self._lock = threading.Lock()
        self._lent: _Lent | None = None
        self._is_closed = False
        after_fork(self, LentReader._renew)

    def _renew(self) -> None:
        """In a child: who used it is in the parent; the reader sees to itself."""
        self._lock = threading.Lock()
        if self._lent is not None:
            self._lent.users = 0

    @contextmanager
    def lend(self) -> Iterator[StreamReader]:
        """The reader, for a look. Its questions end with the call around them (`relatum.waiting._deadline.within`)."""
        self._close_unused()
        lent = self._take()
        try:
            yield lent.reader
        except BrokerUnavailable:
            lent.has_failed = True
            raise
        finally:
            with self._lock:
                lent.users -= 1
            self._close_unused()

    def _take(self) -> _Lent:
        # Who opens it may take all of its own time, if the broker is silent; others have theirs.
        if not self._lock.acquire(timeout=left_s(CONNECT_S)):
            raise ReadTimeout("The broker was not reached yet by those who asked before.")
        try:
            if self._lent is None:
                reader = StreamReader.open(self._address, timeout_s=CONNECT_S)
                self._lent = _Lent(reader)
            self._lent.users += 1
            return self._lent
        finally:
            self._lock.release()

    @property
    def _is_unused(self) -> bool:
        lent = self._lent
        return lent is not None and not lent.users and (self._is_closed or lent.has_failed)

    def _close_unused(self) -> None:
        # Waits for nobody: whoever has the lock comes here afterwards, or uses the reader now.
        while self._is_unused and self._lock.acquire(blocking=False):
            try:
                lent = self._lent if self._is_unused else None
                self._lent = self._lent if lent is None else None
            finally:
                self._lock.release()
            if lent is not None:
                lent.reader.close()

    def close(self) -> None:
        """Keep none from now on: it is closed once nobody uses it. Whoever looks later opens one for that look."""
        self._is_closed = True
        self._close_unused()
