"""What a message in a partition is: told by the layer of placements, whose routers write what serial consumers read."""

from relatum.placement._entries import (
    CONTENT_TYPE,
    CONTROL_BYTES,
    Adoption,
    Control,
    Data,
    Entry,
    Fence,
    Marker,
    Placed,
    decode,
    encode,
    entry_of,
)

__all__ = [
    "CONTENT_TYPE",
    "CONTROL_BYTES",
    "Adoption",
    "Control",
    "Data",
    "Entry",
    "Fence",
    "Marker",
    "Placed",
    "decode",
    "encode",
    "entry_of",
]
