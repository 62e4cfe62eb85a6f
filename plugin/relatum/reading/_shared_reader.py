"""A reader that several threads share, opened when one of them first needs it."""

import threading
from functools import partial
from typing import Any

from relatum.errors import ReadTimeout, UsedAfterClose
from relatum.processes import after_fork
from relatum.reading._address import AnyBroker
from relatum.reading._reader import StreamReader
from relatum.waiting import left_s


class SharedReader:
    """Opens a reader at most once, as `opened`. `options` are those of `StreamReader.open`.

    `refusing`: The message of `UsedAfterClose`.
    """

    def __init__(
        self,
        broker: AnyBroker,
        *,
        timeout_s: float = 10.0,
        refusing: str = "the reader was closed: open another one",
        **options: Any,
    ) -> None:
        self._open = partial(StreamReader.open, broker, timeout_s=timeout_s, **options)
        self._timeout_s = timeout_s
        self._refusing = refusing
        self.opened: StreamReader | None = None
        self._is_closed = False
        self._renew()
        after_fork(self, SharedReader._renew)

    def _renew(self) -> None:
        self._opening = threading.Lock()

    def get(self) -> StreamReader:
        """Return the reader. Raises the errors of `StreamReader.open`, and `UsedAfterClose` after `close`."""
        reader = self.opened
        if reader is None and not self._is_closed:
            # The first caller may spend all its time on a silent broker. The others wait only for their own time.
            if not self._opening.acquire(timeout=left_s(self._timeout_s)):
                raise ReadTimeout("the broker has not answered earlier calls yet")
            try:
                reader = self.opened = self.opened or self._open()
            finally:
                self._opening.release()
        if reader is None or self._is_closed:
            # This thread may have opened it while another closed, and nobody else would close it.
            self.close()
            raise UsedAfterClose(self._refusing)
        return reader

    def close(self) -> None:
        """Close the reader, without waiting for one that is being opened: its opener closes it. Idempotent."""
        self._is_closed = True
        if self.opened is not None:
            self.opened.close()
