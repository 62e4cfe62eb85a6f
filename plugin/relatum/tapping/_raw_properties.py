"""Properties of messages as bytes, on a connection of pika's: it neither decodes what comes nor encodes what goes."""

from typing import Any, Final

from pika import BasicProperties, BlockingConnection
from pika.frame import Header

_HEADER_FRAME: Final = 2
_PROPERTIES_AT: Final = 19
"""Where a content header's properties begin: after type, channel, size, class, weight and the body's size."""


class RawProperties(BasicProperties):  # type: ignore[misc]
    """Properties as they stand in a content header, from their flags on."""

    def __init__(self, raw: bytes) -> None:
        super().__init__()
        self.raw = raw

    def encode(self) -> list[bytes]:
        """The pieces of the content header, as pika asks for them."""
        return [self.raw]


def keep_raw(connection: BlockingConnection) -> None:
    """Have all messages that come on a connection of our own with `RawProperties`."""
    below: Any = connection._impl
    read_others = below._read_frame

    def read_frame() -> tuple[int, Any]:
        data = below._frame_buffer
        if not data or data[0] != _HEADER_FRAME:
            found: tuple[int, Any] = read_others()
            return found
        end = 8 + int.from_bytes(data[3:7], "big")
        if len(data) < 7 or end > len(data):
            return 0, None
        channel, body_size = int.from_bytes(data[1:3], "big"), int.from_bytes(data[11:_PROPERTIES_AT], "big")
        return end, Header(channel, body_size, RawProperties(bytes(data[_PROPERTIES_AT : end - 1])))

    below._read_frame = read_frame
