"""Identifies streams and brokers: whether a stream is the one that was read before, and which broker this is.

A broker's id is the first message of a stream in the virtual host (docs/adr/0043). If several recorders publish an id
at the same time, the first message counts, which all of them read.
"""

import time
import uuid
from collections.abc import Mapping
from contextlib import closing, suppress
from enum import Enum
from shlex import quote
from typing import TYPE_CHECKING, Final

from relatum.common.ids import IDENTITY_STREAM, BrokerIdentity, Position, broker_id_of, fingerprint
from relatum.common.waiting import left_s
from relatum.errors import (
    AccessRefused,
    AnotherBroker,
    NotFound,
    OffsetExpired,
    OffsetNotFound,
    RelatumError,
    StreamUnavailable,
)
from relatum.reading._bounds import StreamBounds, concerns_broker
from relatum.reading._connection import SocketConnection
from relatum.reading._message import Message, type_and_id_of
from relatum.reading._message_parts import body_of_record
from relatum.wire import amqp10, frames
from relatum.wire.frames import Code, Confirmed, Refused

if TYPE_CHECKING:
    from relatum.reading._many import ChunkCache
    from relatum.reading._reader import StreamReader

CLAIM_S: Final = 5.0
"""Time limit for giving a broker its id, in seconds. A new stream needs a few hundredths of a second."""

_PAUSE_S: Final = 0.05


class Agreement(Enum):
    """Whether a stream still has a message that was read from it before."""

    SAME = "same"
    """The message is unchanged, and so are all before it."""

    EXPIRED = "expired"
    """Retention has dropped the offset. So the message cannot be compared, but nothing contradicts it."""

    OTHER = "other"
    """The offset has another message, or none by the leader's word: the stream was declared again, or lost its tail."""

    UNKNOWN = "unknown"
    """The answer proves nothing: a node lags or is starting, or the leader is unreachable. Query again later."""


def agreement(reader: "StreamReader", stream: str, position: Position) -> Agreement:
    """Return whether a stream still has the message that was at a position.

    Only `OTHER` means that the stream has changed. Even then, a prefix may be unchanged. A caller that knows more
    positions can find the prefix's end by bisection.

    Raises:
        StreamNotFound, NotAStream, AccessRefused: The stream cannot be read.
        Transient: As for `StreamReader.read`, except that `StreamUnavailable` is returned as `UNKNOWN`.
    """
    try:
        found: Message | OffsetNotFound | StreamUnavailable = reader.read(stream, position.offset)
    except (OffsetNotFound, StreamUnavailable) as error:
        found = error
    return agreement_of(position, found)


def agreements(
    reader: "StreamReader", positions: Mapping[str, Position], kept: "ChunkCache | None" = None
) -> dict[str, Agreement]:
    """Return the `agreement` of each stream with its position. Chunks in the cache `kept` are not read again."""
    ids = [(stream, position.offset) for stream, position in positions.items()]
    agreed: dict[str, Agreement] = {}
    try:
        for (stream, position), found in zip(positions.items(), reader.read_all(ids, kept=kept), strict=True):
            if not isinstance(found, Message | OffsetNotFound):
                raise found
            agreed[stream] = agreement_of(position, found)
    except StreamUnavailable:
        # One stream is unavailable; read each alone.
        return {stream: agreement(reader, stream, position) for stream, position in positions.items()}
    return agreed


def agreement_of(position: Position, found: Message | OffsetNotFound | StreamUnavailable) -> Agreement:
    """Return the agreement of a position, given the result of reading its offset. Does no I/O."""
    if isinstance(found, Message):
        is_same = position.agrees(_fingerprint_of(found), found.chunk_ms)
        return Agreement.SAME if is_same else Agreement.OTHER
    if isinstance(found, OffsetExpired):
        return Agreement.EXPIRED
    return Agreement.OTHER if isinstance(found, OffsetNotFound) and found.is_proven else Agreement.UNKNOWN


def position_of(message: Message) -> Position:
    """Return the position of a message, with which the stream can be identified later."""
    return Position(message.offset, _fingerprint_of(message), message.chunk_ms)


def _fingerprint_of(message: Message) -> int:
    # This decodes only id and body. A record that cannot be unpacked identifies its stream as an empty body.
    body = message.body if message.raw is None else body_of_record(message.raw)
    return fingerprint(type_and_id_of(message)[1], body)


# --- the broker's identity -------------------------------------------------------------------------------------------


def claimed_identity(reader: "StreamReader") -> BrokerIdentity:
    """Return the broker's identity. A broker without an id gets one.

    The id is None if this user may not read, create or write to `relatum.broker`, or if that is no stream with an id.

    Raises:
        Transient: The identity cannot be read now.
    """
    known = reader.identity()
    if known.broker_id is not None:
        return known
    broker_id = None
    with closing(reader.link(None)) as link, suppress(NotFound, AccessRefused):
        broker_id = _claimed(reader, link)
    return BrokerIdentity(broker_id, known.cluster_name)


def _claimed(reader: "StreamReader", link: SocketConnection) -> uuid.UUID | None:
    until = link.deadline = time.monotonic() + left_s(CLAIM_S)
    is_missing = IDENTITY_STREAM in reader.missing([IDENTITY_STREAM])
    if is_missing and link.answer(frames.create, IDENTITY_STREAM, {}).code not in (Code.OK, Code.STREAM_EXISTS):
        return None
    has_published = False
    while time.monotonic() < until:
        with suppress(StreamUnavailable):
            try:
                return broker_id_of(reader.read(IDENTITY_STREAM, 0).body)
            except OffsetNotFound:
                # The next iteration reads the first message, which may be another client's.
                has_published = has_published or _publish(link, str(uuid.uuid4()))
        time.sleep(_PAUSE_S)
    message = f"the stream {IDENTITY_STREAM!r} cannot be read now, so the broker's identity is unknown: try again"
    raise StreamUnavailable(message, stream=IDENTITY_STREAM)


def _publish(link: SocketConnection, text: str) -> bool:
    """Publish a message, and return whether the broker confirmed it. False, too, if the stream is not ready yet."""
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
    """Return the error for a stream that was recorded from another broker."""
    return AnotherBroker(
        f"the stream {stream!r} was recorded from the broker {recorded}, but this is {connected}: use a separate "
        f"database for each broker. If this broker replaces the other: `relatum forget --origin {quote(stream)}`",
        stream=stream,
        recorded=str(recorded),
        connected=str(connected),
    )


def bounds_or_error(reader: "StreamReader", stream: str) -> StreamBounds | RelatumError:
    """Return a stream's bounds, or the error that says why they cannot be read.

    Raises:
        BrokerUnavailable: The broker is unavailable, which concerns all streams.
    """
    try:
        return reader.bounds(stream)
    except RelatumError as error:
        if concerns_broker(error):
            raise
        return error


def bounds_of_known(reader: "StreamReader", stream: str) -> StreamBounds:
    """Return the bounds of a stream that was read before. Use this before you discard knowledge of its messages.

    Raises:
        StreamUnavailable: The leader returns no message at present, which proves nothing. Call again later.
        RelatumError: As for `StreamReader.bounds`.
    """
    bounds = reader.bounds(stream)
    if bounds.is_silence:
        raise StreamUnavailable(
            f"the leader of {stream!r} returns no message at present: it waits for its replicas, or the stream was "
            "declared again; try again, since its next message shows which",
            stream=stream,
        )
    return bounds


def leaders_bounds(reader: "StreamReader", stream: str) -> StreamBounds:
    """Return a stream's bounds by its leader's word. Use this before you discard messages, or what concerns them.

    Raises:
        StreamUnavailable: The leader is unreachable, or returns no message at present. Call again later.
        RelatumError: As for `StreamReader.bounds`.
    """
    bounds = bounds_of_known(reader, stream)
    if not bounds.is_proven:
        raise StreamUnavailable(
            f"the leader of {stream!r} is unreachable, and other nodes may have fewer messages: try again; if its node "
            "is up, it advertises a name that does not resolve here (stream.advertised_host)",
            stream=stream,
        )
    return bounds
