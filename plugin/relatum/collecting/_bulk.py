"""Bulks and their messages, as executors get them; executors' options, and the results that executors return."""

import logging
import secrets
import sys
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import Enum
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Literal, Self, get_args

from relatum.common.checks import checked_choice, checked_count, checked_seconds, is_clean
from relatum.common.ids import MessageId
from relatum.common.limits import INTEGER_MAX
from relatum.common.waiting import ended
from relatum.errors import DataError, InvalidInput
from relatum.own_messages import REASON_CHARACTERS_MAX
from relatum.reading import Message, type_and_id_of

if TYPE_CHECKING:
    import sqlalchemy as sa


MESSAGE_ID_BYTES_MAX: Final = 2000
"""Maximum bytes of a property `message_id` that is used as an id. AMQP 0.9.1 allows 255, the stream protocol any
number; an index row of PostgreSQL has at most 2,704 bytes, other columns included."""


def id_of(place: MessageId, given: str | None) -> str:
    """Return the id of a message's outcome: its property `message_id`; "stream:offset" if it has none.

    A `message_id` that PostgreSQL cannot store, or that is too long for its index, is ignored.
    """
    is_usable = given and is_clean(given) and len(given.encode()) <= MESSAGE_ID_BYTES_MAX
    return given if given and is_usable else id_of_place(place)


def id_of_place(place: MessageId) -> str:
    return f"{place.stream}:{place.offset}"


class FlushReason(Enum):
    """Why a bulk was closed."""

    BYTES = "bytes"
    """Its bytes reached `bulk_bytes`."""
    MESSAGES = "messages"
    """Its messages reached `bulk_messages`."""
    AGE = "age"
    """Its first message had waited `max_age_s`."""
    IDLE = "idle"
    """No message of its type arrived for `idle_s`."""
    TOTAL_BYTES = "total_bytes"
    """The bytes of all bulks reached `bytes_max`, and this bulk was the largest."""
    ACTIVE_BULKS = "active_bulks"
    """The bulks being filled reached `bulks_max`, and this bulk was the oldest."""
    EXPLICIT = "explicit"
    """`flush` was called."""
    STOP = "stop"
    """The collector is closing."""


@dataclass(frozen=True, slots=True)
class Failure:
    """The result of a message that could not be consumed.

    Attributes:
        reason: The reason, as a text for people; at most 1,000 characters are stored.
        retry: False if a retry would not help. Default: True.
    """

    reason: str
    retry: bool = True

    @classmethod
    def of(cls, error: BaseException) -> "Failure":
        """Return the failure for an exception."""
        try:
            text = str(error)
        except Exception:  # noqa: BLE001 - a user's exception class may fail here, too
            text = "its message is unavailable"
        return cls(f"{type(error).__name__}: {text}")

    @property
    def stored_reason(self) -> str:
        """The reason to store: at most 1,000 characters, without characters that PostgreSQL's text cannot hold."""
        text = str(self.reason).replace("\0", "").encode("utf-8", "replace").decode()
        return text[:REASON_CHARACTERS_MAX]


# Read-only: results are found by these values, and an executor that changed one would lose its result.
@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Collected:
    """A message in a bulk. Read-only; `Bulk.succeeded` and `Bulk.failed` set its result.

    Attributes:
        place: The message's stream and offset.
        message_id: The property `message_id`; "stream:offset" if the message has none.
        type: The type by which its executor was chosen.
        bytes: The message's size in the stream, in bytes.
        body: The message itself; None while it is only in its stream, not in memory.
        attempts: The number of this attempt, from 1.
        collected_at: When the message was collected.
        forwarded_at: When an executor last got the message.
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
        """Set attributes, which are read-only for users."""
        for name, value in facts.items():
            object.__setattr__(self, name, value)

    @property
    def message(self) -> Message:
        """The message itself, with properties, headers and body."""
        assert self.body is not None, "executors get messages with bodies"
        return self.body

    def __repr__(self) -> str:
        return f"<Collected {self.message_id} at {self.place}>"


WhenFull = Literal["block", "spill"]
"""The reaction to a lack of room: "block" makes `collect` wait; "spill" drops bodies of waiting bulks from memory, and
workers read them again."""

BACKOFF_MAX_S: Final = 3600.0
"""Maximum seconds that a message waits before its next attempt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorOptions:
    """How bulks of a type are filled and consumed.

    Attributes:
        bulk_bytes: Close a bulk at this number of bytes. Default: 1 MiB.
        bulk_messages: Close a bulk at this number of messages. Default: 500.
        max_age_s: Close a bulk when its first message has waited this many seconds. Default: 1.
        idle_s: Close a bulk when nothing was added for this many seconds. None (default): never.
        workers: Number of bulks consumed at the same time, each in a thread or task. Default: 1.
        queue_bulks: Number of closed bulks that may wait for a worker; when all do, the type is full. Default: 8.
        when_full: "block" (default): `collect` waits, and followed streams are not read. "spill": messages are still
            taken, but their bodies are dropped from memory and read again from the streams.
        joins_transaction: Whether the executor writes through `bulk.connection`, in the transaction that stores its
            results, so that each write happens exactly once. Default: False.
        attempts: Attempts before a message fails for good, from 1 to 1,000. Default: 3.
        backoff_s: Seconds before the second attempt; doubled for each further one, up to an hour. Default: 1.

    Raises:
        InvalidInput: An option is out of range.
    """

    bulk_bytes: int = 1024 * 1024
    bulk_messages: int = 500
    max_age_s: float = 1.0
    idle_s: float | None = None
    workers: int = 1
    queue_bulks: int = 8
    when_full: WhenFull = "block"
    joins_transaction: bool = False
    attempts: int = 3
    backoff_s: float = 1.0

    def __post_init__(self) -> None:
        for name in ("bulk_bytes", "bulk_messages", "workers", "queue_bulks"):
            checked_count(name, getattr(self, name), most=INTEGER_MAX)
        checked_count("attempts", self.attempts, most=1_000)
        checked_seconds("max_age_s", self.max_age_s, zero=False)
        checked_seconds("backoff_s", self.backoff_s)
        if self.idle_s is not None:
            checked_seconds("idle_s", self.idle_s, zero=False)
        checked_choice("when_full", self.when_full, get_args(WhenFull))
        if not isinstance(self.joins_transaction, bool):
            raise InvalidInput(f"joins_transaction= takes True or False, not {self.joins_transaction!r}")

    def backoff_after(self, attempts: int) -> float:
        """Return the seconds to wait after this number of attempts."""
        return min(BACKOFF_MAX_S, self.backoff_s * 2.0 ** min(attempts - 1, 32))


TypeOf = Callable[[Message], str | None]
"""Returns a message's type; None for a message that must not be consumed."""


def type_of_property(message: Message) -> str | None:
    return message.properties.type


def describe(message: Message, type_of: TypeOf) -> Collected:
    """Return a message with its type, id and size. While it waits, its decoded values would double its memory."""
    place, raw = message.id, message.raw
    kind, given = type_and_id_of(message)
    if type_of is not type_of_property:
        kind = None
        with suppress(DataError):
            kind = type_of(message)
    if kind is not None and not isinstance(kind, str):
        raise InvalidInput(f"type_of must return text or None, not {type(kind).__name__}, for message {place}")
    # Interned: otherwise each message would keep a copy of its type.
    kind, message_id = sys.intern(kind or ""), id_of(place, given)
    # A record that cannot be unpacked has no bytes, and `body` raises its error.
    size = len(raw or message.body)
    if raw is not None:
        message = Message.from_record(message.stream, message.offset, raw, message.chunk_ms)
    return Collected(place, message_id, kind, size, message)


def describe_given(messages: Iterable[Message], type_of: TypeOf) -> list[Collected]:
    """Check all messages passed to `collect_many`, then return each with its type, id and size."""
    if not isinstance(messages, Iterable):
        raise InvalidInput(f"collect_many takes messages, not {type(messages).__name__}")
    given: list[Any] = list(messages)
    for message in given:
        if not isinstance(message, Message):
            name = type(message).__name__
            raise InvalidInput(f"a collector takes messages read from a stream (relatum.reading.Message), not {name}")
    return [describe(message, type_of) for message in given]


def describe_followed(messages: Iterable[Message], type_of: TypeOf) -> list[Collected]:
    """Describe messages just read. One that cannot be described gets no type and is passed over."""
    described, unreadable = list[Collected](), None
    for message in messages:
        try:
            described.append(describe(message, type_of))
        except BaseException as error:  # noqa: BLE001 - the caller's function must not stop a stream
            # The messages of a batch that cannot be unpacked share one record. The log names the first of them.
            if message.raw is None or message.raw is not unreadable:
                text = "passed over message %s, whose type is unknown: %s"
                logging.getLogger("relatum.collector").warning(text, message.id, ended(error))
            unreadable = message.raw
            described.append(Collected(message.id, id_of_place(message.id), "", len(message.raw or b""), message))
    return described


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Bulk:
    """Messages of one type, consumed together. Read-only.

    Attributes:
        id: The bulk's id, 63 random bits.
        type: The messages' type.
        messages: The messages to consume, in the order in which they were collected.
        reason: Why the bulk was closed.
        connection: With `joins_transaction`, the connection to write through; do not commit or close it. Else None.
        bytes: The sum of the messages' sizes, in bytes.
    """

    id: int
    type: str
    messages: tuple[Collected, ...]
    reason: FlushReason
    connection: "sa.Connection | None" = None
    bytes: int = field(init=False)
    _places: frozenset[MessageId] = field(init=False)
    _results: dict[MessageId, Failure | None] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "bytes", sum(message.bytes for message in self.messages))
        object.__setattr__(self, "_places", frozenset(message.place for message in self.messages))

    @classmethod
    def of(
        cls,
        type: str,  # noqa: A002 - RabbitMQ's word for it
        messages: Iterable[Message],
        *,
        connection: "sa.Connection | None" = None,
    ) -> Self:
        """Create a bulk for a test of an executor: `executor(Bulk.of("order", messages))`.

        Args:
            type: The messages' type.
            messages: Messages from a reader or from `Message.from_amqp`.
            connection: For an executor with `joins_transaction`: a connection in a transaction. Default: None.

        Raises:
            InvalidInput: A message is not a `relatum.reading.Message`.
        """
        now, described = datetime.now(UTC), describe_given(messages, type_of_property)
        for each in described:
            each._note(type=type, attempts=1, collected_at=now, forwarded_at=now)
        return cls(secrets.randbits(63), type, tuple(described), FlushReason.EXPLICIT, connection)

    @property
    def results(self) -> Mapping[MessageId, Failure | None]:
        """The results that `succeeded` and `failed` have set so far, by place; None means success."""
        return MappingProxyType(self._results)

    def succeeded(self, message: Collected) -> None:
        """Set a message's result to success. Unless `joins_transaction` is set, it remains if the executor then raises.

        Args:
            message: One of `messages`.

        Raises:
            InvalidInput: The message is not in this bulk.
        """
        self._results[self._place_of(message)] = None

    def failed(self, message: Collected, error: BaseException | Failure | str, *, retry: bool = True) -> None:
        """Set a message's result to a failure.

        Args:
            message: One of `messages`.
            error: An exception, a `Failure`, or the reason.
            retry: False if a retry would not help. Default: True. Ignored if `error` is a `Failure`.

        Raises:
            InvalidInput: The message is not in this bulk, or `error` has the wrong type.
        """
        place = self._place_of(message)
        if isinstance(error, Failure):
            self._results[place] = error
        elif isinstance(error, str | BaseException):
            self._results[place] = Failure(error if isinstance(error, str) else Failure.of(error).reason, retry)
        else:
            raise InvalidInput(f"error= takes an exception, a Failure or a reason's text, not {type(error).__name__}")

    def _place_of(self, message: Collected) -> MessageId:
        """Return the place of a message, which must be in this bulk."""
        if not isinstance(message, Collected):
            raise InvalidInput(f"message= takes one of bulk.messages, not {type(message).__name__}")
        if message.place not in self._places:
            raise InvalidInput(f"message {message.message_id} at {message.place} is not in this bulk")
        return message.place

    def __len__(self) -> int:
        return len(self.messages)

    def __repr__(self) -> str:
        return f"<Bulk of {len(self.messages)} {self.type!r}: {self.reason.value}>"


Answer = None | Sequence[Any] | Mapping[Any, Any]
"""What an executor returns: None (messages without another result succeeded), one result per message in order, or a
mapping by message, place or message id. A result is None for success, a `Failure` or an exception."""

Executor = Callable[[Bulk], Answer]

AnyExecutor = Callable[[Bulk], Answer | Awaitable[Answer]]
"""With asyncio, a coroutine function is awaited in the application's loop; others are called in a thread."""


def results_of(bulk: Bulk, answer: Any, raised: BaseException | None = None) -> dict[MessageId, Failure | None]:
    """Return each message's result after the executor returned or raised."""
    messages, places = bulk.messages, [message.place for message in bulk.messages]
    if raised is not None:
        preset = bulk._results if bulk.connection is None else {}
        return {**dict.fromkeys(places, Failure.of(raised)), **preset}
    results: dict[MessageId, Failure | None]
    if answer is None:
        results = dict.fromkeys(places)
    elif isinstance(answer, Mapping):
        results = {message.place: _in_mapping(answer, message) for message in messages}
    elif not isinstance(answer, Sequence) or isinstance(answer, str | bytes):
        wrong = Failure(f"the executor returned {type(answer).__name__}, not None, a sequence or a mapping")
        results = dict.fromkeys(places, wrong)
    elif len(answer) != len(messages):
        wrong = Failure(f"the executor returned {len(answer)} results for {len(messages)} messages")
        results = dict.fromkeys(places, wrong)
    else:
        results = {place: _result(each) for place, each in zip(places, answer, strict=True)}
    return results | bulk._results


def _in_mapping(answer: Mapping[Any, Any], message: Collected) -> Failure | None:
    for key in (message, message.place, message.message_id):
        if key in answer:
            return _result(answer[key])
    return Failure("the executor returned no result for this message")


def _result(given: Any) -> Failure | None:
    if given is None or isinstance(given, Failure):
        return given
    if isinstance(given, BaseException):
        return Failure.of(given)
    return Failure(f"the executor's result is {type(given).__name__}, not None, a Failure or an exception")
