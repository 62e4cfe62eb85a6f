"""Records that are held in a file until their turn comes, where there are too many to be held in memory."""

import os
import tempfile
from typing import IO, Final, NamedTuple

SPILL_BYTES_MAX: Final = 1 << 30
"""Bytes of records that one batched read holds in its file."""


class Spilled(NamedTuple):
    """Where a record lies in the file, and when its chunk was written."""

    position: int
    length: int
    time_ms: int


class Spill:
    """A file without a name in the system's directory for such (`TMPDIR`): it is gone with the process at the latest.

    It is written from its start again once all that was in it has been taken.
    """

    def __init__(self, bytes_max: int = SPILL_BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        self._file: IO[bytes] | None = None
        self._end = 0
        self._count = 0

    def put(self, record: bytes, time_ms: int) -> Spilled | None:
        """Hold a record; None where there is no room for it, or no such file can be had."""
        begin, length = self._end, len(record)
        if begin + length > self._bytes_max:
            return None
        try:
            if self._file is None:
                self._file = tempfile.TemporaryFile(prefix="relatum-", buffering=0)  # noqa: SIM115 - see `clear`
            if os.pwrite(self._file.fileno(), record, begin) != length:
                return None
        except OSError:
            return None
        self._end = begin + length
        self._count += 1
        return Spilled(begin, length, time_ms)

    def take(self, spilled: Spilled) -> bytes:
        """A record, which is held no longer.

        Raises:
            OSError: The file cannot be read.
        """
        assert self._file is not None, "something was put there"
        record = os.pread(self._file.fileno(), spilled.length, spilled.position)
        if len(record) != spilled.length:
            raise OSError("A file of records that wait for their turn is not what was written.")
        self._count -= 1
        if not self._count:
            self._end = 0
        return record

    @property
    def bytes_held(self) -> int:
        """How far the file is filled."""
        return self._end

    def clear(self) -> None:
        """Hold nothing, and give the room back."""
        if self._file is not None:
            self._file.close()
            self._file = None
        self._end = self._count = 0
