"""What a look-up gives: the messages found, and how sure it is that there are no more."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple, overload

from relatum._ids import MessageId
from relatum.reading import Message


class Status(StrEnum):
    """What an answer says."""

    FOUND = "found"
    """There is at least one message, and each was read and checked."""
    ABSENT = "absent"
    """There is none: every message that the streams named in the answer retain was recorded, or read just now, and none
    is meant. Never said of no stream."""
    NOT_RECORDED_YET = "not_recorded_yet"
    """None was found, but a part of the streams is not recorded: there may be one. Ask with `complete=True`."""
    EXPIRED = "expired"
    """There was at least one, and retention has dropped them all."""
    UNPROVEN = "unproven"
    """What was found is there, and whether there is more nobody can prove from here: AMQP 0.9.1 alone tells where the
    streams end, messages could not be unpacked, the index names some that could not be read, or this user may not read
    one of the streams. Mostly there is no
    message; with `complete=True`, and where `unread` names some, there may be."""


@dataclass(frozen=True, slots=True)
class Hit:
    """One message found.

    Attributes:
        message: The message, read and checked.
        keys: The names of the keys asked by whose values it shares, in the order asked; empty for a look-up by time
            alone.
    """

    message: Message
    keys: tuple[str, ...] = ()

    @property
    def id(self) -> MessageId:
        """Where the message lies."""
        return self.message.id


class LeftOut(NamedTuple):
    """A stream that an answer says nothing of: its name, and why this user cannot read it."""

    stream: str
    reason: str


@dataclass(frozen=True, slots=True)
class Answer(Sequence[Message]):
    """The messages a look-up found, in the order asked for, and its status. It does not change.

    It is a sequence of messages: `len(answer)`, `answer[0]`, `for message in answer`; true where there is one.

    Attributes:
        status: Found, absent, not recorded yet, expired, or unproven.
        hits: The messages with the keys they share.
        expired: Where messages lay that were recorded as sought and that retention has dropped since, as far as the
            look-up met them.
        streams: The names of the streams that the answer holds over, in order; a super stream's partitions, not itself.
            With `FOUND` they are the recorded ones, as they were known within the last second: of others nothing is
            said. There is at least one.
        unread: Where messages lie that the index names and that could not be read, without a proof that they are gone.
        left_out: Recorded streams that this user may not read, where none was named: the answer does not hold over
            them, and where they could hold one it is unproven.
    """

    status: Status
    hits: tuple[Hit, ...] = ()
    expired: tuple[MessageId, ...] = ()
    streams: tuple[str, ...] = field(default=(), kw_only=True)
    unread: tuple[MessageId, ...] = field(default=(), kw_only=True)
    left_out: tuple[LeftOut, ...] = field(default=(), kw_only=True)

    @property
    def messages(self) -> tuple[Message, ...]:
        """The messages."""
        return tuple(hit.message for hit in self.hits)

    @property
    def ids(self) -> tuple[MessageId, ...]:
        """Where the messages lie."""
        return tuple(hit.message.id for hit in self.hits)

    @property
    def first(self) -> Message | None:
        """The first message; None where there is none."""
        return self.hits[0].message if self.hits else None

    def __len__(self) -> int:
        return len(self.hits)

    def __iter__(self) -> Iterator[Message]:
        return (hit.message for hit in self.hits)

    @overload
    def __getitem__(self, index: int) -> Message: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Message, ...]: ...
    def __getitem__(self, index: int | slice) -> Message | tuple[Message, ...]:
        if isinstance(index, slice):
            return tuple(hit.message for hit in self.hits[index])
        return self.hits[index].message

    def __repr__(self) -> str:
        return f"<Answer {self.status}: {len(self.hits)} messages of {len(self.streams)} streams>"
