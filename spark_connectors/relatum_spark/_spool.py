"""The messages of a task, numbered and held until the last of them is known to be good."""

import struct
import tempfile
from collections.abc import Iterator
from typing import Final

MEMORY_BYTES: Final = 64 << 20
"""Bytes held in memory; what is more goes to a temporary file."""

_HEAD: Final = struct.Struct(">HQI")
_TARGET_BYTES: Final = 2


class Spool:
    """Messages in the order they were added, each for one of some streams; the file is gone when it is closed."""

    def __init__(self) -> None:
        self._file = tempfile.SpooledTemporaryFile(MEMORY_BYTES)  # noqa: SIM115 closed by close()

    def add(self, target: int, publishing_id: int, message: bytes) -> None:
        """Add a message for the stream of that place."""
        self._file.write(_HEAD.pack(target, publishing_id, len(message)) + message)

    def ids(self) -> Iterator[tuple[int, int]]:
        """(target, publishing id) of each, in order."""
        file = self._file
        file.seek(0)
        while head := file.read(_HEAD.size):
            target, publishing_id, size = _HEAD.unpack(head)
            file.seek(size, 1)
            yield target, publishing_id

    def entries(self) -> Iterator[tuple[int, int, bytes]]:
        """(target, publishing id, the message as an entry of a Publish frame) of each, in order."""
        file = self._file
        file.seek(0)
        while head := file.read(_HEAD.size):
            target, publishing_id, size = _HEAD.unpack(head)
            # An entry of a frame is just what follows the target here.
            yield target, publishing_id, head[_TARGET_BYTES:] + file.read(size)

    def close(self) -> None:
        """Forget the messages."""
        self._file.close()
