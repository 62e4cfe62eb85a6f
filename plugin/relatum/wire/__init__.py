"""The wire formats, without I/O: frames, chunks and sessions of the stream protocol, and AMQP 1.0's encoding.

Two modules are public as a whole, for callers that need many of their names: `amqp10` and `frames`.
"""

from relatum.wire import _amqp10 as amqp10
from relatum.wire import _frames as frames
from relatum.wire._amqp10 import find_head, pick, pick_list
from relatum.wire._chunk import Chunk, UnreadableRecord, record_at, records_at, small_records, split
from relatum.wire._frames import (
    FIRST,
    LAST,
    NEXT,
    Code,
    Confirmed,
    NodeAddress,
    Refused,
    Start,
    StartSpec,
    StreamPlaces,
)
from relatum.wire._scalars import Opaque
from relatum.wire._session import (
    SUBSCRIPTIONS,
    AnotherProtocol,
    Answer,
    CreditRefused,
    Damaged,
    Event,
    StreamMoved,
    StreamSession,
    code_name,
)

__all__ = [
    "FIRST",
    "LAST",
    "NEXT",
    "SUBSCRIPTIONS",
    "AnotherProtocol",
    "Answer",
    "Chunk",
    "Code",
    "Confirmed",
    "CreditRefused",
    "Damaged",
    "Event",
    "NodeAddress",
    "Opaque",
    "Refused",
    "Start",
    "StartSpec",
    "StreamMoved",
    "StreamPlaces",
    "StreamSession",
    "UnreadableRecord",
    "amqp10",
    "code_name",
    "find_head",
    "frames",
    "pick",
    "pick_list",
    "record_at",
    "records_at",
    "small_records",
    "split",
]
