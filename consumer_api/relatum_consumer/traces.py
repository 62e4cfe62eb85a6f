"""The result of a trace: the connected messages, their links, where it stopped, and how certain each step is."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final, NamedTuple

from relatum.documents import document, field_names
from relatum.ids import MessageId
from relatum.reading import Message
from relatum_consumer.lookups.answer import Covered, Status
from relatum_consumer.lookups.proof import Uncovered

_SEVERITY: Final = (
    Status.UNPROVEN,
    Status.NOT_RECORDED_YET,
    Status.FOUND,
    Status.EXPIRED,
    Status.DELETED,
    Status.ABSENT,
)


class Edge(NamedTuple):
    """One message names another as its cause.

    Attributes:
        cause: The named message; None if it is not in the trace.
        effect: The message whose key has the value.
        key: The name of the key by which it names the cause.
        value: The value, in canonical form.
    """

    cause: MessageId | None
    effect: MessageId
    key: str
    value: str


class Shared(NamedTuple):
    """Two or more messages that share a key's value, by time, stream and offset. The link has no direction."""

    key: str
    value: str
    ids: tuple[MessageId, ...]


class StopReason(StrEnum):
    """Which bound left something out."""

    FAN_OUT = "fan_out"
    """More than `fan_out` messages have the value, so it was not followed. `count` is a lower bound of their number."""
    TIME = "time"
    """`count` or more messages with the value are before `since`, at or after `until`, or without a known time."""
    LIMIT = "limit"
    """`count` more messages were found and not read."""
    HOPS = "hops"
    """`count` values of the last messages were not followed."""


@dataclass(frozen=True, slots=True)
class Stop:
    """Where a trace stopped.

    Attributes:
        reason: The bound.
        count: Of messages or values; see `StopReason`.
        key: The key's name if the stop concerns one value, else None.
        value: The value, in canonical form.
    """

    reason: StopReason
    count: int
    key: str | None = None
    value: str | None = None


class Step(NamedTuple):
    """What one hop searched and found.

    Attributes:
        hop: 1 for the hop from the start, and so on.
        values: The number of values searched.
        found: The number of new messages found.
        status: `found`, also if a value has too many messages to follow. If nothing new was found, what is known:
            `absent` says that there was no more when the trace began, except by `Trace.new_keys`. `unproven` with
            `unread`, or if `complete` could not prove something.
    """

    hop: int
    values: int
    found: int
    status: Status


@dataclass(frozen=True)
class Trace(Covered):
    """The messages connected with a start. Immutable.

    Its coverage is described by the attributes of `Covered`. Unlike an answer's, `new_keys` are listed with any status:
    by these keys there may be more messages; for the other keys the steps say how certain it is. A new key that was
    named, or that the trace begins with, makes the status `NOT_RECORDED_YET`. With `complete` there are none.

    Attributes:
        messages: All messages, the start included, by time, stream and offset; each was read and checked.
        hops: The number of hops from the start to each message: 0 for the start, and for its copies if a client did not
            say its stream and offset. A start without a copy in a stream is not among the messages.
        edges: Which message names which, in the order of the messages.
        shared: Values that messages share, in the order of their first messages.
        stopped: What bounds left out; empty if nothing.
        steps: What each hop searched, and how certain it is.
        uncovered: Retained offsets that are not recorded for all the keys, by stream: there may be more messages among
            them, at any hop. Empty if only `new_keys` are not recorded, and with `complete`, which reads them.
    """

    messages: tuple[Message, ...]
    hops: Mapping[MessageId, int]
    edges: tuple[Edge, ...] = ()
    shared: tuple[Shared, ...] = ()
    stopped: tuple[Stop, ...] = ()
    steps: tuple[Step, ...] = ()
    uncovered: tuple[Uncovered, ...] = field(default=(), kw_only=True)

    @property
    def status(self) -> Status:
        """The worst status of the steps: `unproven` and `not_recorded_yet` mean that there may be more messages.

        `found`: messages were found, and each step is certain, except for `new_keys`. Otherwise `expired`, `deleted` or
        `absent`, which a trace by a new key never is.
        """
        worst = min((step.status for step in self.steps), key=_SEVERITY.index, default=Status.ABSENT)
        is_open = bool(self.uncovered) or (bool(self.new_keys) and worst is not Status.FOUND)
        return Status.NOT_RECORDED_YET if is_open and worst is not Status.UNPROVEN else worst

    @property
    def explanation(self) -> str:
        """What to do about messages that no recorder will record, or that are gone; else empty."""
        return self._remedy(self.status)

    def __len__(self) -> int:
        return len(self.messages)

    def __iter__(self) -> Iterator[Message]:
        return iter(self.messages)

    def to_json(self) -> str:
        """Return the trace without the messages' bodies as a JSON document."""
        return json.dumps(self.to_document(), ensure_ascii=False)

    def to_document(self) -> dict[str, Any]:
        """Return the trace without the messages' bodies as JSON-compatible values."""
        messages = [
            {**message.id._asdict(), "time": document(message.time), "hop": self.hops[message.id]} for message in self
        ]
        names = [name for name in field_names(Trace) if name not in ("messages", "hops")]
        rest = {name: document(getattr(self, name)) for name in names}
        return {"status": str(self.status), "messages": messages} | rest
