"""Records that are held in a file until their turn comes, where there are too many to be held in memory."""

import os
import tempfile
from collections.abc import Sequence
from typing import IO, Final, TypeAlias

SPILL_BYTES_MAX: Final = 1 << 30
"""Bytes of records that one batched read holds in its file."""


InFile: TypeAlias = tuple[int, int, int]
"""Where a record begins in the file, how long it is, and when its chunk was written."""


class Spill:
    """A file without a name in the system's directory for such (`TMPDIR`): it is gone with the process at the latest.

    It is written from its start again once all that was in it has been taken.
    """

    def __init__(self, bytes_max: int = SPILL_BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        self._file: IO[bytes] | None = None
        self._end = 0
        self._count = 0

    def put(self, records: Sequence[bytes], time_ms: int) -> list[InFile]:
        """Hold records of a chunk, by one write; fewer where there is no room, or none: no such file can be had."""
        begin = at = self._end
        places: list[InFile] = []
        for record in records:
            if at + len(record) > self._bytes_max:
                break
            places.append((at, len(record), time_ms))
            at += len(record)
        try:
            if self._file is None:
                self._file = tempfile.TemporaryFile(prefix="relatum-", buffering=0)  # noqa: SIM115 - see `clear`
            if os.pwrite(self._file.fileno(), b"".join(records[: len(places)]), begin) != at - begin:
                return []
        except OSError:
            return []
        self._end = at
        self._count += len(places)
        return places

    def read(self, place: InFile) -> bytes:
        """A record.

        Raises:
            OSError: The file cannot be read.
        """
        assert self._file is not None, "something was put there"
        begin, length, _ = place
        record = os.pread(self._file.fileno(), length, begin)
        if len(record) != length:
            raise OSError("A file of records that wait for their turn is not what was written.")
        return record

    def drop(self) -> None:
        """Hold one record less."""
        self._count -= 1
        if not self._count:
            self._end = 0

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
