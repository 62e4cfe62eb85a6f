"""What an executor is handed and may answer, and what the store knows of the same messages."""

import secrets
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import Enum
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Self

from relatum.collecting._handlers import logger
from relatum.errors import DataError, InvalidInput
from relatum.ids import MessageId
from relatum.reading import Message, type_and_id_of
from relatum.waiting import ended

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
    # Four bytes a character at most: only what is long is encoded to be measured.
    is_long = given and len(given) > MESSAGE_ID_BYTES_MAX // 4 and len(given.encode()) > MESSAGE_ID_BYTES_MAX
    return given if given and "\0" not in given and not is_long else id_of_place(place)


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


# An executor that could change what it is handed would lose its messages' results, which are found by it.
@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Collected:
    """A message in a bulk. Read-only: what became of it is told by `Bulk.succeeded` and `Bulk.failed`.

    Attributes:
        place: Where it lies.
        message_id: Its property `message_id`; "stream:offset" where it has none.
        type: The type its executor was chosen by.
        bytes: Its bytes as the stream holds them.
        body: The message itself; None while it is left in its stream.
        attempts: Which attempt this is, from 1.
        collected_at: When it was collected.
        forwarded_at: When an executor was last handed it.
    """

    place: MessageId
    message_id: str
    type: str
    bytes: int
    body: Message | None
    attempts: int = 0
    collected_at: datetime | None = None
    forwarded_at: datetime | None = None

    def _note(self, **facts: Any) -> None:
        """Change what is known of it."""
        for name, value in facts.items():
            object.__setattr__(self, name, value)

    @property
    def message(self) -> Message:
        """The message."""
        assert self.body is not None, "executors are handed messages that were read"
        return self.body

    def __repr__(self) -> str:
        return f"<Collected {self.message_id} at {self.place}>"


TypeOf = Callable[[Message], str | None]
"""Tells a message's type; None for a message nobody consumes."""


def type_of_property(message: Message) -> str | None:
    """The property `type`: what a collector goes by unless it is told otherwise."""
    return message.properties.type


def describe(message: Message, type_of: TypeOf, *, is_new: bool = False) -> Collected:
    """What a collector needs to know of a message.

    The message kept is undecoded again: decoded, it would take twice the memory while it waits.

    `is_new`: Whether nobody has decoded it yet. Default: False.
    """
    place, raw = message.id, message.raw
    kind, given = type_and_id_of(message)
    if type_of is not type_of_property:
        kind = None
        with suppress(DataError):
            kind = type_of(message)
    if kind is not None and not isinstance(kind, str):
        raise InvalidInput(f"type_of gives a text or None, not {type(kind).__name__}, for message {place}")
    # Interned: as many messages as there are would each keep a copy of the few types.
    kind, message_id = sys.intern(kind or ""), checked_id(place, given)
    size = len(message.body if raw is None else raw)
    if raw is not None and not (is_new and type_of is type_of_property):
        message = Message.from_record(message.stream, message.offset, raw, message.chunk_ms)
    return Collected(place, message_id, kind, size, message)


def describe_followed(message: Message, type_of: TypeOf) -> Collected:
    """As `describe`, of a followed message: one that cannot be described has no type, and so is passed over."""
    try:
        return describe(message, type_of, is_new=True)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - the caller's own function must not stop a stream
        logger.warning("passed over, its type cannot be told: %s: %s", message.id, ended(error))
        raw = message.raw
        return Collected(message.id, id_of_place(message.id), "", 0 if raw is None else len(raw), message)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
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

    id: int
    type: str
    messages: tuple[Collected, ...]
    reason: FlushReason
    taken: tuple[Collected, ...] = field(init=False)
    bytes: int = field(init=False, default=0)
    connection: "sa.Connection | None" = field(init=False, default=None)
    is_forwarded: bool = field(init=False, default=False)
    _results: dict[MessageId, Failure | None] = field(init=False, default_factory=dict)
    _places: frozenset[MessageId] = field(init=False)

    def __post_init__(self) -> None:
        places = frozenset(message.place for message in self.messages)
        self._note(taken=self.messages, _places=places)
        self._leave(self.messages)

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
        if message.place not in self._places:
            raise InvalidInput(f"message {message.message_id} at {message.place} is not in this bulk")
        return message.place

    def _keep(self, places: Collection[MessageId]) -> None:
        """Leave only these messages to be consumed; the others are another member's, or cannot be read."""
        self._leave(tuple(message for message in self.messages if message.place in places))

    def _leave(self, messages: tuple[Collected, ...]) -> None:
        self._note(messages=messages, bytes=sum(message.bytes for message in messages))

    def _note_forwarded(self, at: datetime) -> None:
        """Note, once, that an executor is handed the messages that are left."""
        if not self.is_forwarded:
            for message in self.messages:
                message._note(attempts=message.attempts + 1, forwarded_at=at)
        self._note(is_forwarded=True)

    def _begin_attempt(self, connection: "sa.Connection | None" = None) -> None:
        """Forget results: the executor is called anew, in a transaction or in none."""
        self._note(connection=connection, _results={})

    def _note(self, **facts: Any) -> None:
        """Change what is known of it."""
        for name, value in facts.items():
            object.__setattr__(self, name, value)

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
