"""Knowing streams and brokers again: whether a stream is the one that was read, and which broker this is.

A broker is known by the first message of a stream in its virtual host (docs/adr/0043). Any number of recorders may give
it one at once: the first message wins, and all read that one.
"""

import time
import uuid
from collections.abc import Iterable, Mapping
from contextlib import closing, suppress
from enum import Enum
from typing import TYPE_CHECKING, Any, Final

from relatum.errors import (
    AccessRefused,
    AnotherBroker,
    NotFound,
    OffsetExpired,
    OffsetNotFound,
    StreamUnavailable,
    UndecodableMessage,
)
from relatum.ids import IDENTITY_STREAM, BrokerIdentity, Position, broker_id_of, fingerprint
from relatum.reading._connection import SocketConnection
from relatum.reading._message import Message
from relatum.reading._message_parts import property_text
from relatum.reading._plan import Result
from relatum.waiting import left_s
from relatum.wire import Code, Confirmed, Refused, amqp10, frames

if TYPE_CHECKING:
    from relatum.reading._many import KeptChunks
    from relatum.reading._reader import StreamReader

CLAIM_S: Final = 5.0
"""Seconds for giving a broker its id: a stream that somebody has just declared takes some hundredths of one."""

_PAUSE_S: Final = 0.05


class Agreement(Enum):
    """How a stream stands to a message that was once read of it."""

    SAME = "same"
    """That message lies there: all before it is as it was, too."""

    EXPIRED = "expired"
    """Retention has taken the offset: whether it was this message cannot be said any more, and nothing speaks against
    it."""

    OTHER = "other"
    """Something else lies there: the stream was declared again, or lost its tail and its offsets were used again."""

    ENDS_BEFORE = "ends before"
    """The stream ends before the offset, and its leader says so: its tail was lost, or it was declared again and is
    shorter."""

    UNKNOWN = "unknown"
    """Nobody may conclude anything: a node that lags, starts, or cannot ask the leader. Wait, and ask again."""


def agreement(reader: "StreamReader", stream: str, position: Position) -> Agreement:
    """How a stream stands to what lay at an offset.

    Only `OTHER` and `ENDS_BEFORE` mean that the stream is not what it was; then what agrees is a prefix, and whoever
    remembers more positions finds the last one that does by halving.

    Raises:
        StreamNotFound, NotAStream, AccessRefused: The broker says so of the stream.
        Transient: As of `StreamReader.read`, other than `StreamUnavailable`, which is `UNKNOWN`.
    """
    try:
        found: Message | OffsetNotFound | StreamUnavailable = reader.read(stream, position.offset)
    except (OffsetNotFound, StreamUnavailable) as error:
        found = error
    return agreement_of(position, found)


def agreements(
    reader: "StreamReader", positions: Mapping[str, Position], kept: "KeptChunks | None" = None
) -> dict[str, Agreement]:
    """As `agreement`, of many streams, which are read together. What is kept is not read again."""
    ids = [(stream, position.offset) for stream, position in positions.items()]
    with suppress(StreamUnavailable):
        return _agreements(positions, reader.read_all(ids, kept=kept))
    # Of one of them; the others may be there.
    return {stream: agreement(reader, stream, position) for stream, position in positions.items()}


def _agreements(positions: Mapping[str, Position], found: Iterable[Result]) -> dict[str, Agreement]:
    agreed: dict[str, Agreement] = {}
    for (stream, position), each in zip(positions.items(), found, strict=True):
        if not isinstance(each, Message | OffsetNotFound):
            raise each
        agreed[stream] = agreement_of(position, each)
    return agreed


def agreement_of(position: Position, found: Message | OffsetNotFound | StreamUnavailable) -> Agreement:
    """As `agreement`, by what reading the position's offset gave: pure, for those who read many at once."""
    if isinstance(found, StreamUnavailable):
        return Agreement.UNKNOWN
    if isinstance(found, OffsetExpired):
        return Agreement.EXPIRED
    if isinstance(found, OffsetNotFound):
        if not found.is_proven:
            return Agreement.UNKNOWN
        last: int | None = found.last
        # An offset within the stream at which lies no message is the broker's own: it once was a message's.
        return Agreement.ENDS_BEFORE if last is None or last < position.offset else Agreement.OTHER
    is_same = position.agrees(_fingerprint_of(found), found.chunk_ms)
    return Agreement.SAME if is_same else Agreement.OTHER


def position_of(message: Message) -> Position:
    """What lies at a message's offset, to know the stream again."""
    return Position(message.offset, _fingerprint_of(message), message.chunk_ms)


def _fingerprint_of(message: Message) -> int:
    """The sum of its `message_id` and body; of a record these alone are decoded, which takes a tenth of the time."""
    raw = message.raw
    if raw is None:
        return fingerprint(message.properties.message_id, message.body)
    try:
        sections = amqp10.find_sections(raw)
        body = amqp10.body_of(raw, sections)
    except UndecodableMessage:
        return fingerprint(None, raw)
    first: list[Any] = []
    for code, start, _ in sections:
        if code == amqp10.PROPERTIES:
            with suppress(UndecodableMessage):
                first = amqp10.decode_list(raw, start, 1)
    return fingerprint(property_text(first[0]) if first else None, body)


# --- which broker this is --------------------------------------------------------------------------------------------


def claimed_identity(reader: "StreamReader") -> BrokerIdentity:
    """Which broker this is. Where it has no id yet, it is given one.

    The id is None where this user may not read or declare the stream of it, or something else has its name.

    Raises:
        Transient: That cannot be said now.
    """
    known = reader.identity()
    if known.broker_id is not None:
        return known
    with closing(reader.link(None)) as link:
        return BrokerIdentity(_claimed(reader, link), known.cluster_name)


def _claimed(reader: "StreamReader", link: SocketConnection) -> uuid.UUID | None:
    until = link.deadline = time.monotonic() + left_s(CLAIM_S)
    # Else whoever declared it is about to publish. An empty stream of several nodes does not prove that it is.
    publishes_at = until - CLAIM_S / 2
    if IDENTITY_STREAM in reader.missing([IDENTITY_STREAM]):
        declared = link.answer(frames.create, IDENTITY_STREAM, {}).code
        if declared == Code.OK:
            publishes_at = 0.0
        elif declared != Code.STREAM_EXISTS:
            return None
    while True:
        try:
            return broker_id_of(reader.read(IDENTITY_STREAM, 0).body)
        except OffsetNotFound:
            is_empty = True
        except (NotFound, AccessRefused):
            return None
        except StreamUnavailable:
            is_empty = False
        try:
            if is_empty and time.monotonic() >= publishes_at:
                # It is read anew then: somebody else may have been faster.
                publishes_at = until if _publish(link, str(uuid.uuid4())) else publishes_at
        except AccessRefused:
            return None
        if time.monotonic() >= until:
            message = f"the stream {IDENTITY_STREAM!r} does not answer: which broker this is cannot be told"
            raise StreamUnavailable(message, stream=IDENTITY_STREAM)
        time.sleep(_PAUSE_S)


def _publish(link: SocketConnection, text: str) -> bool:
    """Publish a message, and wait for what became of it; False where the stream cannot take one yet."""
    code = link.answer(frames.declare_publisher, 0, "", IDENTITY_STREAM).code
    if code == Code.ACCESS_REFUSED:
        raise AccessRefused(f"this user may not write to {IDENTITY_STREAM!r}")
    if code != Code.OK:
        return False
    message = amqp10.data_section(text.encode())
    link.session.send(frames.publish(0, [frames.entry(0, message)]))
    while True:
        for event in link.exchange():
            if isinstance(event, Confirmed | Refused):
                return isinstance(event, Confirmed)


def another_broker(stream: str, recorded: BrokerIdentity, connected: BrokerIdentity) -> AnotherBroker:
    """The error for a stream that was recorded from another broker."""
    return AnotherBroker(
        f"the stream {stream!r} was recorded from the broker {recorded}, and this one is {connected}: give each broker "
        f"a database of its own. If this one has taken the other's place: `relatum forget --origin {stream}`",
        stream=stream,
        recorded=str(recorded),
        connected=str(connected),
    )
