"""Whether a stream is still the one that was read: the same, behind, or another. In one place, for all who remember."""

from collections.abc import Iterable, Mapping
from contextlib import suppress
from enum import Enum
from typing import TYPE_CHECKING, Any

from relatum.errors import AnotherBroker, OffsetExpired, OffsetNotFound, StreamUnavailable, UndecodableMessage
from relatum.reading._batches import StreamBounds
from relatum.reading._message import Message
from relatum.reading._message_parts import property_text
from relatum.reading._plan import Result
from relatum.wire import BrokerIdentity, Position, amqp10, fingerprint

if TYPE_CHECKING:
    from relatum.reading._kept import KeptChunks
    from relatum.reading._reader import StreamReader


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


def ends_of_known(reader: "StreamReader", stream: str) -> StreamBounds:
    """The ends of a stream of which something was read once, for who is about to forget that.

    Raises:
        StreamUnavailable: Its leader shows nothing now, which proves nothing. Wait, and ask again.
        RelatumError: As of `StreamReader.bounds`.
    """
    bounds = reader.bounds(stream)
    if bounds.is_silence:
        raise StreamUnavailable(
            f"the leader of {stream!r} shows no message now: it waits for its replicas, or the stream was declared "
            "again; the next message tells",
            stream=stream,
        )
    return bounds


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


def another_broker(stream: str, recorded: BrokerIdentity, connected: BrokerIdentity) -> AnotherBroker:
    """The error for a stream that was recorded from another broker."""
    return AnotherBroker(
        f"the stream {stream!r} was recorded from the broker {recorded}, and this one is {connected}: give each broker "
        f"a database of its own. If this one has taken the other's place: `relatum forget --origin {stream}`",
        stream=stream,
        recorded=str(recorded),
        connected=str(connected),
    )
