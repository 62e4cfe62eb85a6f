"""What an executor is handed and may answer, and what the store knows of the same messages."""

import secrets
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import Enum
from operator import attrgetter
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Protocol, Self, TypeVar

from relatum.errors import InvalidInput
from relatum.ids import MessageId
from relatum.outcomes import OutcomeStatus
from relatum.reading import Message
from relatum.store import Position

if TYPE_CHECKING:
    import sqlalchemy as sa


MESSAGE_ID_BYTES_MAX: Final = 2000
"""Bytes of a property `message_id` that a message is known by. AMQP 0.9.1 has 255 at most, the stream protocol any
number; an index of PostgreSQL takes 2,704 bytes a row, and with them goes what else the row holds."""


def id_of(message: Message) -> str:
    """What a message is asked for by: its property `message_id`, or "stream:offset" where it has none.

    One with a NUL, which PostgreSQL's text can't hold, and one too long for its index count as none.
    """
    return checked_id(message.id, message.properties.message_id)


def checked_id(place: MessageId, given: str | None) -> str:
    """The property `message_id` where it can be stored and asked for; else "stream:offset"."""
    return given if given and "\0" not in given and not _is_long(given) else id_of_place(place)


def _is_long(given: str) -> bool:
    # Four bytes a character at most: only what is long is encoded to be measured.
    return len(given) > MESSAGE_ID_BYTES_MAX // 4 and len(given.encode()) > MESSAGE_ID_BYTES_MAX


def id_of_place(place: MessageId) -> str:
    """What a message without a property `message_id` is asked for by."""
    return f"{place.stream}:{place.offset}"


REASON_CHARACTERS_MAX: Final = 1000
"""Characters of a failure's reason that are kept."""

NO_RESULT: Final = "the executor gave no result for this message"


class FlushReason(Enum):
    """Why a bulk was closed and handed on."""

    BYTES = "bytes"
    """Its bytes reached `bulk_bytes`."""
    MESSAGES = "messages"
    """Its messages reached `bulk_messages`."""
    AGE = "age"
    """Its first message waited `max_age_s`."""
    IDLE = "idle"
    """No message of its type came for `idle_s`."""
    TOTAL_BYTES = "total_bytes"
    """The bytes of all bulks reached `bytes_max`, and it was the largest."""
    ACTIVE_BULKS = "active_bulks"
    """The bulks being filled reached `bulks_max`, and it was the oldest."""
    EXPLICIT = "explicit"
    """`flush` was called."""
    STOP = "stop"
    """The collector stops."""


@dataclass(frozen=True, slots=True)
class Failure:
    """The result of a message that could not be consumed.

    Attributes:
        reason: Why, for people; at most 1,000 characters are kept.
        retry: False where trying again would not help.
    """

    reason: str
    retry: bool = True

    @classmethod
    def of(cls, error: BaseException) -> "Failure":
        """The failure an exception stands for."""
        try:
            text = str(error)
        except Exception:  # noqa: BLE001 - an exception of the user's own may fail at this, too
            text = "it cannot say why"
        return cls(f"{type(error).__name__}: {text}")

    @property
    def stored_reason(self) -> str:
        """The reason as it is stored: cut to 1,000 characters, without what PostgreSQL's text can't hold."""
        text = str(self.reason).replace("\0", "").encode("utf-8", "replace").decode()
        return text[:REASON_CHARACTERS_MAX]


_Value = TypeVar("_Value", covariant=True)


class _ReadOnly(Protocol[_Value]):
    """An attribute that is read, and never set from outside."""

    def __get__(self, instance: object, owner: type | None = None) -> _Value: ...


def _read_only(name: str) -> Any:
    """A property that reads a slot, in C: bulks are looked at for each of their messages."""
    return property(attrgetter(name))


class Collected:
    """A message in a bulk. Read-only: what became of it is told by `Bulk.succeeded` and `Bulk.failed`.

    Attributes:
        place: Where it lies.
        message_id: Its property `message_id`; "stream:offset" where it has none.
        type: The type its executor was chosen by.
        bytes: Its bytes as the stream holds them.
        attempts: Which attempt this is, from 1.
        collected_at: When it was collected.
        forwarded_at: When an executor was last handed it.
        body: The message itself; None while it is left in its stream.
    """

    __slots__ = ("_attempts", "_body", "_bytes", "_collected_at", "_forwarded_at", "_message_id", "_place", "_type")

    def __init__(
        self,
        place: MessageId,
        message_id: str,
        type: str,  # noqa: A002 - RabbitMQ's word for it
        bytes: int,  # noqa: A002 - reads as what it is
        body: Message | None,
        attempts: int = 0,
        collected_at: datetime | None = None,
    ) -> None:
        self._place = place
        self._message_id = message_id
        self._type = type
        self._bytes = bytes
        self._body = body
        self._attempts = attempts
        self._collected_at = collected_at
        self._forwarded_at: datetime | None = None

    # An executor that could change these would lose its messages' results: they are found by them.
    place: "_ReadOnly[MessageId]" = _read_only("_place")
    message_id: "_ReadOnly[str]" = _read_only("_message_id")
    type: "_ReadOnly[str]" = _read_only("_type")
    bytes: "_ReadOnly[int]" = _read_only("_bytes")
    attempts: "_ReadOnly[int]" = _read_only("_attempts")
    collected_at: "_ReadOnly[datetime | None]" = _read_only("_collected_at")
    forwarded_at: "_ReadOnly[datetime | None]" = _read_only("_forwarded_at")
    body: "_ReadOnly[Message | None]" = _read_only("_body")

    def _note_collected(self, at: datetime, renamed: str | None = None) -> None:
        """Note when it was stored, and what it is asked for by where that is not its property."""
        self._collected_at = at
        self._message_id = self._message_id if renamed is None else renamed

    def _note_forwarded(self, at: datetime) -> None:
        """Note another attempt."""
        self._attempts += 1
        self._forwarded_at = at

    def _leave(self) -> None:
        """Leave the body in its stream, from where it is read when its turn comes."""
        self._body = None

    def _note_read(self, body: Message) -> None:
        """Note the body, as it was read from its stream."""
        self._body = body

    @property
    def message(self) -> Message:
        """The message."""
        assert self.body is not None, "executors are handed messages that were read"
        return self.body

    def __repr__(self) -> str:
        return f"<Collected {self.message_id} at {self.place}>"


class Bulk:
    """Messages of one type, to be consumed together. Its attributes are read-only.

    Attributes:
        id: The bulk's id, 63 bits by chance.
        type: The messages' type.
        messages: The messages, in the order they were collected.
        reason: Why the bulk was closed.
        bytes: The messages' bytes.
        connection: With `joins_transaction`: the open transaction to write in; don't commit it. Else None.
        is_forwarded: Whether it is stored that an executor is handed it.
        taken: All messages the bulk was closed with; `messages` are those of them that are left to be consumed.
    """

    __slots__ = (
        "_bytes",
        "_connection",
        "_id",
        "_is_forwarded",
        "_messages",
        "_places",
        "_reason",
        "_results",
        "_taken",
        "_type",
    )

    def __init__(
        self,
        id: int,  # noqa: A002 - as PostgreSQL calls it
        type: str,  # noqa: A002
        messages: tuple[Collected, ...],
        reason: FlushReason,
    ) -> None:
        self._id = id
        self._type = type
        self._messages = messages
        self._taken = messages
        self._reason = reason
        self._bytes = sum(message.bytes for message in messages)
        self._connection: sa.Connection | None = None
        self._is_forwarded = False
        self._results: dict[MessageId, Failure | None] = {}
        self._places: frozenset[MessageId] | None = None

    @classmethod
    def of(
        cls,
        type: str,  # noqa: A002 - RabbitMQ's word for it
        messages: Iterable[Message],
        *,
        connection: "sa.Connection | None" = None,
    ) -> Self:
        """A bulk as an executor is handed it, for tests of executors: `executor(Bulk.of("order", messages))`.

        Args:
            type: The messages' type.
            messages: Messages that were read, or made by `Message.from_amqp`.
            connection: A transaction for an executor with `joins_transaction`; None (default) for none.

        Raises:
            InvalidInput: One of them is no `relatum.reading.Message`.
        """
        now, collected = datetime.now(UTC), list[Collected]()
        for message in messages:
            if not isinstance(message, Message):
                raise InvalidInput(f"a bulk has relatum.reading.Message, not {message.__class__.__name__}")
            size = len(message.body if message.raw is None else message.raw)
            collected.append(Collected(message.id, id_of(message), type, size, message, collected_at=now))
        bulk = cls(secrets.randbits(63), type, tuple(collected), FlushReason.EXPLICIT)
        bulk._note_forwarded(now)
        bulk._begin_attempt(connection)
        return bulk

    @property
    def results(self) -> Mapping[MessageId, Failure | None]:
        """What `succeeded` and `failed` have noted so far, by message: None for success."""
        return MappingProxyType(self._results)

    # An executor that could change these would leave messages without a final status.
    id: "_ReadOnly[int]" = _read_only("_id")
    type: "_ReadOnly[str]" = _read_only("_type")
    messages: "_ReadOnly[tuple[Collected, ...]]" = _read_only("_messages")
    taken: "_ReadOnly[tuple[Collected, ...]]" = _read_only("_taken")
    reason: "_ReadOnly[FlushReason]" = _read_only("_reason")
    bytes: "_ReadOnly[int]" = _read_only("_bytes")
    connection: "_ReadOnly[sa.Connection | None]" = _read_only("_connection")
    is_forwarded: "_ReadOnly[bool]" = _read_only("_is_forwarded")

    def succeeded(self, message: Collected) -> None:
        """Note that a message succeeded; it stays so though the executor raises later (unless it joined).

        Args:
            message: One of `messages`.

        Raises:
            InvalidInput: It is none of them.
        """
        self._results[self._place_of(message)] = None

    def failed(self, message: Collected, error: BaseException | Failure | str, *, retry: bool = True) -> None:
        """Note that a message failed, and why.

        Args:
            message: One of `messages`.
            error: An exception, a `Failure`, or the reason.
            retry: False where trying again would not help; a `Failure` says so itself.

        Raises:
            InvalidInput: It is none of them, or `error` is nothing of the kind.
        """
        place = self._place_of(message)
        if isinstance(error, Failure):
            self._results[place] = error
        elif isinstance(error, str | BaseException):
            self._results[place] = Failure(error if isinstance(error, str) else Failure.of(error).reason, retry)
        else:
            raise InvalidInput(f"error is an exception, a Failure or the reason, not {type(error).__name__}")

    def _place_of(self, message: Collected) -> MessageId:
        """Where one of this bulk's messages lies."""
        if not isinstance(message, Collected):
            raise InvalidInput(f"message is one of bulk.messages, not {type(message).__name__}")
        if self._places is None:
            self._places = frozenset(each.place for each in self.taken)
        if message.place not in self._places:
            raise InvalidInput(f"message {message.message_id} at {message.place} is not in this bulk")
        return message.place

    def _keep(self, places: Collection[MessageId]) -> None:
        """Leave only these messages to be consumed; the others are another member's, or cannot be read."""
        self._messages = tuple(message for message in self._messages if message.place in places)
        self._bytes = sum(message.bytes for message in self._messages)

    def _note_forwarded(self, at: datetime) -> None:
        """Note, once, that an executor is handed the messages that are left."""
        if not self._is_forwarded:
            for message in self._messages:
                message._note_forwarded(at)
        self._is_forwarded = True

    def _begin_attempt(self, connection: "sa.Connection | None" = None) -> None:
        """Forget results: the executor is called anew, in a transaction or in none."""
        self._results = {}
        self._connection = connection

    def _end_transaction(self) -> None:
        """Take the connection away."""
        self._connection = None

    def __len__(self) -> int:
        return len(self.messages)

    def __repr__(self) -> str:
        return f"<Bulk of {len(self.messages)} {self.type!r}: {self.reason.value}>"


Answer = None | Sequence[Any] | Mapping[Any, Any]
"""What an executor returns: None (all without another result succeeded), a result for each message in order, or a
mapping from messages, places or message ids to results. A result is None for success, a `Failure` or an exception."""

Executor = Callable[[Bulk], Answer]


def results_of(bulk: Bulk, answer: Any, raised: BaseException | None = None) -> dict[MessageId, Failure | None]:
    """The result of each message of a bulk after its executor returned or raised."""
    noted = bulk._results
    if raised is not None:
        failure = Failure.of(raised)
        kept = noted if bulk.connection is None else {}
        return {message.place: kept.get(message.place, failure) for message in bulk.messages}
    try:
        given = _answered(bulk, answer)
    except InvalidInput as error:
        given = {message.place: Failure(str(error)) for message in bulk.messages}
    if not noted:
        return given
    return {message.place: noted.get(message.place, given[message.place]) for message in bulk.messages}


def _answered(bulk: Bulk, answer: Any) -> dict[MessageId, Failure | None]:
    if answer is None:
        return dict.fromkeys((message.place for message in bulk.messages), None)
    if isinstance(answer, Mapping):
        return {message.place: _in_mapping(answer, message) for message in bulk.messages}
    if not isinstance(answer, Sequence) or isinstance(answer, str | bytes):
        raise InvalidInput(f"the executor returned {type(answer).__name__}, not None, a sequence or a mapping")
    if len(answer) != len(bulk.messages):
        raise InvalidInput(f"the executor returned {len(answer)} results for {len(bulk.messages)} messages")
    return {message.place: _result(each) for message, each in zip(bulk.messages, answer, strict=True)}


def _in_mapping(answer: Mapping[Any, Any], message: Collected) -> Failure | None:
    for key in (message, message.place, message.message_id):
        if key in answer:
            return _result(answer[key])
    return Failure(NO_RESULT)


def _result(given: Any) -> Failure | None:
    if given is None or isinstance(given, Failure):
        return given
    if isinstance(given, BaseException):
        return Failure.of(given)
    return Failure(f"the executor's result is {type(given).__name__}, not None, a Failure or an exception")


@dataclass(frozen=True, slots=True)
class Entry:
    """A collected message as the store knows it: everything but the body."""

    place: MessageId
    message_id: str
    type: str
    bytes: int
    attempts: int = 0
    due_in_s: float = 0.0
    collected_at: datetime | None = None


@dataclass(frozen=True, slots=True)
class Advance:
    """A followed stream's position moves: everything in [from_offset, to_offset) is collected or passed over."""

    stream: str
    from_offset: int
    to_offset: int
    known_by: Position | None = None
    passed_over: int = 0
    passed_over_types: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Followed:
    """A stream this member follows now."""

    next_offset: int
    known_by: Position | None = None
    is_new: bool = False


@dataclass(frozen=True, slots=True)
class Result:
    """What an attempt came to, to be stored."""

    place: MessageId
    status: OutcomeStatus
    reason: str | None = None
    retry_in_s: float | None = None


@dataclass(frozen=True, slots=True)
class Stored:
    """What a call to the store came to."""

    places: frozenset[MessageId]
    at: datetime
    renamed: Mapping[MessageId, str] = field(default_factory=dict)


class Abandoned(Exception):
    """The collector was closed before a server came back; what was under way is left to another member."""
