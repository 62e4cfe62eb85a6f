"""`Message`: a message of a stream, with the same value for every protocol and broker version."""

from collections.abc import Callable, Mapping
from datetime import datetime
from types import MappingProxyType
from typing import Any, Self

from relatum.common.checks import checked_count, checked_name, shown
from relatum.common.headers import TIME_HEADER
from relatum.common.ids import MessageId
from relatum.common.limits import INTEGER_MAX
from relatum.errors import InvalidInput, UndecodableMessage
from relatum.reading._message_parts import (
    EPOCH,
    MICROSECOND,
    Parts,
    body_of_record,
    message_time,
    parts_of_delivery,
    parts_of_record,
    time_of_record,
    type_and_id_in,
)
from relatum.reading._message_values import Properties, TimeSource
from relatum.wire.chunk import UnreadableRecord


class _Assignable:
    """A message whose fields can be assigned. This takes a third of the time of `object.__setattr__`."""

    __slots__ = ("_body", "_content", "_decode", "_raw", "_time", "chunk_ms", "offset", "stream")

    def __init__(self, stream: str, offset: int, raw: bytes | None, chunk_ms: int | None, decode: Any = None) -> None:
        self.stream = stream
        self.offset = offset
        self.chunk_ms = chunk_ms
        self._raw = raw
        self._decode: Callable[[], Parts] | None = decode
        self._content: Parts | None = None
        self._body: bytes | None = None
        self._time: tuple[int | None, TimeSource] | None = None


class Message(_Assignable):
    """A message read from a stream. Immutable. It decodes its bytes when one of its parts is first used.

    Two messages are equal if they have the same stream, offset, headers, properties and body.

    Attributes:
        stream: The stream's name.
        offset: The message's offset in the stream.
        chunk_ms: When the broker wrote its chunk, milliseconds since 1970, UTC; None for an AMQP 0.9.1 delivery.
    """

    __slots__ = ()

    def __init__(self, *fields: Any) -> None:
        unsealed = _Assignable(*fields)
        for name in _Assignable.__slots__:
            object.__setattr__(self, name, getattr(unsealed, name))

    @classmethod
    def from_record(cls, stream: str, offset: int, raw: bytes, chunk_ms: int | None = None) -> Self:
        """Return the message of a stream's record, not decoded yet."""
        # Readers call this up to a million times a second, so the class is replaced instead of copying fields.
        message: Any = _Assignable(stream, offset, raw, chunk_ms)
        message.__class__ = cls
        return message  # type: ignore[no-any-return]

    @classmethod
    def from_amqp(cls, stream: str, offset: int, properties: Any, body: bytes) -> Self:
        """Return the message of an AMQP 0.9.1 delivery; `properties` has pika's or aiormq's attributes.

        Raises:
            InvalidInput: The stream, offset or body is invalid, or `properties` has no headers.
        """
        checked_name("stream", stream)
        checked_count("offset", offset, least=0, most=INTEGER_MAX)
        if not hasattr(properties, "headers"):
            raise InvalidInput(f"properties= takes the properties of a delivery, not {shown(properties)}")
        if not isinstance(body, bytes | bytearray | memoryview):
            raise InvalidInput(f"body= takes bytes, not {shown(body)}")
        return cls(stream, offset, None, None, lambda: parts_of_delivery(properties, bytes(body)))

    @property
    def id(self) -> MessageId:
        """The stream and offset."""
        return MessageId(self.stream, self.offset)

    @property
    def headers(self) -> Mapping[str, Any]:
        """The publisher's headers, read-only, as Python types: datetimes are aware; text that is not UTF-8 is bytes.

        The broker's headers are omitted: `x-exchange`, `x-routing-key`, `x-stream-offset`, `x-death`, `x-basic-…`.
        """
        return MappingProxyType(self._parts()[0])

    @property
    def properties(self) -> Properties:
        """The AMQP 0.9.1 properties."""
        return self._parts()[1]

    @property
    def body(self) -> bytes:
        """The body; if the message is not AMQP 1.0, all its bytes.

        Raises:
            UndecodableMessage: The message's compressed batch cannot be unpacked, so its headers and properties are
                unknown, too, and appear empty.
        """
        if isinstance(self._raw, UnreadableRecord):
            raise UndecodableMessage(
                f"the message at offset {self.offset} of {self.stream!r} cannot be read: {self._raw.reason}",
                stream=self.stream,
                offset=self.offset,
            )
        if self._content is not None or self._raw is None:
            return self._parts()[2]
        body = self._body
        if body is None:
            # The body is read without decoding the other parts.
            body = body_of_record(self._raw)
            object.__setattr__(self, "_body", body)
        return body

    @property
    def is_amqp(self) -> bool:
        """Whether the message is encoded as AMQP 1.0. Stream clients may write other bytes, which are then the body."""
        return self._parts()[3]

    @property
    def raw(self) -> bytes | None:
        """The message's bytes in the stream; None for an AMQP 0.9.1 delivery."""
        return self._raw

    @property
    def time_us(self) -> int | None:
        """The message's time, in microseconds since 1970, UTC; None if it has none. See `time_source`."""
        return self._time_and_source()[0]

    @property
    def time(self) -> datetime | None:
        """The message's time as an aware datetime; None if it has none."""
        time_us = self._time_and_source()[0]
        return None if time_us is None else EPOCH + time_us * MICROSECOND

    @property
    def time_source(self) -> TimeSource:
        """The source of the message's time."""
        return self._time_and_source()[1]

    def _parts(self) -> Parts:
        # The order matters: another thread that decodes sets `_content` first, and then `_decode` to None.
        decode, content = self._decode, self._content
        if content is None:
            if self._raw is not None:
                content = parts_of_record(self._raw)
            else:
                assert decode is not None, "a message without bytes has a decoder"
                content = decode()
            object.__setattr__(self, "_content", content)
            object.__setattr__(self, "_decode", None)
            object.__setattr__(self, "_body", None)
        return content

    def _time_and_source(self) -> tuple[int | None, TimeSource]:
        timed = self._time
        if timed is None:
            if self._content is None and self._raw is not None:
                timed = time_of_record(self._raw, self.chunk_ms)
            else:
                headers, properties, _, _ = self._parts()
                stamped = headers.get(TIME_HEADER)
                timed = message_time(stamped, properties.timestamp, properties.message_id, self.chunk_ms)
            object.__setattr__(self, "_time", timed)
        return timed

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"A message is immutable: {name!r} cannot be set.")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"A message is immutable: {name!r} cannot be deleted.")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Message):
            return NotImplemented
        return self.id == other.id and self._parts() == other._parts()

    def __hash__(self) -> int:
        return hash((self.stream, self.offset))

    def __reduce__(self) -> tuple[Any, ...]:
        content = None if self._raw is not None else self._parts()
        return _rebuilt, (self.stream, self.offset, self.raw, self.chunk_ms, content)

    def __repr__(self) -> str:
        return f"<Message {self.stream}@{self.offset}>"


def _rebuilt(stream: str, offset: int, raw: bytes | None, chunk_ms: int | None, content: Parts | None) -> Message:
    return Message(stream, offset, raw, chunk_ms, None if content is None else lambda: content)


def type_and_id_of(message: Message) -> tuple[str | None, str | None]:
    """Return the properties `type` and `message_id`, without decoding the others."""
    raw = message.raw
    if raw is None:
        return message.properties.type, message.properties.message_id
    return type_and_id_in(raw)
