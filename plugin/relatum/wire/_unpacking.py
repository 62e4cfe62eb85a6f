"""Compressed sub-entry batches unpacked, into a place of the size they say and never past it. No I/O."""

import importlib
import zlib
from collections.abc import Callable
from functools import cache
from typing import Any, Final

SUB_ENTRY_BYTES_MAX: Final = 64 << 20
"""Bytes one sub-entry batch may unpack to; a batch travels in one frame of 1 MiB, 64 times is past any real one."""

_STEP_BYTES: Final = 1 << 20
"""Bytes that gzip unpacks at one time into the place that is made for them."""

_CODEC_NAMES: Final = {0: "none", 1: "gzip", 2: "snappy", 3: "lz4", 4: "zstd"}
_SNAPPY_FRAMED: Final = b"\xff\x06\x00\x00sNaPpY"


class UnpackError(Exception):
    """Why a sub-entry batch cannot be unpacked; by nobody, or only by us, here and now."""

    is_broken = True


class NotHereError(UnpackError):
    is_broken = False


def unpacked(codec: int, packed: bytes, size: int) -> bytes | bytearray:
    """A batch's content, exactly `size` bytes; never unpacks more than it says, nor more than the limit."""
    if size > SUB_ENTRY_BYTES_MAX:
        raise NotHereError(f"a sub-entry batch of {size} bytes is over the limit of {SUB_ENTRY_BYTES_MAX}")
    if codec == 0:
        content: bytes | bytearray = packed
        written = len(packed)
    else:
        # Unpacked in place: what an unpacker makes and joins itself takes twice as much at its end.
        content = bytearray(size)
        written = _gunzip(packed, content) if codec == 1 else _unpack_by_cramjam(codec, packed, content)
    if written != size:
        raise UnpackError(f"a sub-entry batch unpacks to another size than the {size} bytes it says")
    return content


def _gunzip(packed: bytes, content: bytearray) -> int:
    """Unpack into a place; how many bytes, or one more than there is room for."""
    unpacker, written, size = zlib.decompressobj(wbits=31), 0, len(content)
    try:
        while not unpacker.eof and written <= size:
            step = unpacker.decompress(packed, min(_STEP_BYTES, size + 1 - written))
            packed = unpacker.unconsumed_tail
            if not step and not packed:
                break
            content[written : written + len(step)] = step
            written += len(step)
    except zlib.error as error:
        raise UnpackError("a sub-entry batch is not gzip") from error
    return written


def _unpack_by_cramjam(codec: int, packed: bytes, content: bytearray) -> int:
    name = _CODEC_NAMES.get(codec)
    if name is None:
        raise NotHereError(f"compression {codec} is not known")
    unpack = _cramjam(name)
    if unpack is None:
        raise NotHereError(f"compression {name} needs cramjam, which is not installed")
    try:
        return unpack(packed, content)
    except Exception as error:
        raise UnpackError(f"a sub-entry batch is not {name}, or larger than it says") from error


@cache
def _cramjam(name: str) -> Callable[[bytes, bytearray], int] | None:
    """The codec's `decompress_into`, which stops at the end of its buffer; None where cramjam is not installed."""
    try:
        module: Any = importlib.import_module("cramjam")
    except ImportError:
        return None
    if name != "snappy":
        return getattr(module, name).decompress_into  # type: ignore[no-any-return]

    def unsnap(packed: bytes, content: bytearray) -> int:
        framed = packed.startswith(_SNAPPY_FRAMED)
        unpack = module.snappy.decompress_into if framed else module.snappy.decompress_raw_into
        return int(unpack(packed, content))

    return unsnap
