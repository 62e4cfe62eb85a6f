"""What a lookup gives: the messages found, and how sure it is that there are no more."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, NamedTuple, overload

from relatum.ids import MessageId
from relatum.reading import Message
from relatum.store.catalog import backfill_command


class Status(StrEnum):
    """What an answer says."""

    FOUND = "found"
    """There is at least one message, and each was read and checked."""
    ABSENT = "absent"
    """There is none: every message that the streams named in the answer retain was recorded, or read just now, and none
    is meant. Never said of no stream. Where `missing_keys` names keys, nothing was looked for: the message has
    none of them."""
    NOT_RECORDED_YET = "not_recorded_yet"
    """None was found, but a part of the streams is not recorded: there may be one. Ask with `complete=True`."""
    EXPIRED = "expired"
    """There was at least one, and retention has dropped it."""
    DELETED = "deleted"
    """There was at least one, and its stream was deleted. Where retention has dropped another one, it is `EXPIRED`."""
    UNPROVEN = "unproven"
    """What was found is there, and nobody can prove from here whether there is more: a stream's leader cannot be
    reached, messages could not be unpacked, the index names some that could not be read, or one of the streams
    cannot be used (`unreadable_streams`). Mostly there is no message; with `complete=True`, and where `unread` names
    some, there may be."""

    @property
    def words(self) -> str:
        """What it says, for a person."""
        return _WORDS[self]


_WORDS: Final = {
    Status.FOUND: "found",
    Status.ABSENT: "absent: all that these streams retain is recorded, or was read, and there is none",
    Status.EXPIRED: "expired: there was one, and retention has dropped it",
    Status.DELETED: "deleted: there was one, and its stream was deleted",
    Status.NOT_RECORDED_YET: "not recorded yet: a part of the streams is not recorded",
    Status.UNPROVEN: "unproven: none was found, and nobody can prove from here that there is none (a leader that "
    "cannot be reached, or batches that are not to be unpacked)",
}


@dataclass(frozen=True, slots=True)
class Hit:
    """One message found.

    Attributes:
        message: The message, read and checked.
        keys: The names of the keys asked by whose values it shares, in the order asked; empty for a lookup by time
            alone.
    """

    message: Message
    keys: tuple[str, ...] = ()

    @property
    def id(self) -> MessageId:
        """Where the message is."""
        return self.message.id


class UnreadableStream(NamedTuple):
    """A stream that an answer says nothing of: its name, and why it cannot be used."""

    stream: str
    reason: str


class MissingKey(NamedTuple):
    """A key that was asked by and that the message in hand cannot share: its name, and why."""

    key: str
    reason: str


class NewKey(NamedTuple):
    """A key that is newer than what is recorded: its name, and the streams with messages not looked at for it."""

    key: str
    streams: tuple[str, ...]


NAMED_MAX: Final = 5
"""Keys or streams named in an explanation; it counts the others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Covered:
    """What an answer or a trace covers, and what could not be in it.

    Attributes:
        streams: The names of the streams it holds over, in order; a super stream's partitions, not itself. Of others
            nothing is said. An answer that is found names the recorded ones, as known within the last second.
        expired: Where messages were that were recorded as sought and that retention has dropped since, as far as the
            lookup met them.
        deleted: Where messages were that were recorded as sought and whose streams were deleted since.
        unread: Where messages are that the index names and that could not be read, without a proof that they are gone.
        unreadable_streams: If you named no stream, those recorded ones that you may not read, that are another
            broker's, or that are not what was recorded. Nothing holds over them, and the status is unproven where one
            of them could change it.
        unrecorded_streams: With `NOT_RECORDED_YET`, the streams of which a part is not recorded and that nobody
            records now: asking later does not help. Of other streams, a recorder is behind.
        new_keys: With `NOT_RECORDED_YET`, the keys asked by that are newer than what is recorded, with the streams of
            which older messages were not looked at for them: `relatum backfill` does that, and no recorder.
        missing_keys: If your message has none of the keys asked by: each of them, with the reason. Nothing was looked
            for then, and `ABSENT` says only that no message can share what is not there.
    """

    streams: tuple[str, ...] = ()
    expired: tuple[MessageId, ...] = ()
    deleted: tuple[MessageId, ...] = ()
    unread: tuple[MessageId, ...] = ()
    unreadable_streams: tuple[UnreadableStream, ...] = ()
    unrecorded_streams: tuple[str, ...] = ()
    new_keys: tuple[NewKey, ...] = ()
    missing_keys: tuple[MissingKey, ...] = ()

    def _cure(self, status: Status) -> str:
        """What to do about what is not recorded or gone, in words; else empty."""
        if self.unrecorded_streams or self.new_keys:
            return to_be_recorded(self.unrecorded_streams, self.new_keys)
        if status is Status.EXPIRED:
            return "a longer retention of the stream (max-age, max-length-bytes) keeps the next one"
        if status is not Status.DELETED:
            return ""
        streams = list(dict.fromkeys(where.stream for where in self.deleted))
        names = _some([repr(stream) for stream in streams])
        forget = f"relatum forget {' '.join(streams[:NAMED_MAX])}"
        return f"the broker has no {names} any more: {forget} removes what was recorded of it"


@dataclass(frozen=True, slots=True)
class Answer(Covered, Sequence[Message]):
    """The messages a lookup found, in the order asked for, and its status. It does not change.

    It is a sequence of messages: `len(answer)`, `answer[0]`, `for message in answer`; true where there is one. What it
    covers, and what could not be in it, are the attributes of `Covered`.

    Attributes:
        status: Found, absent, not recorded yet, expired, deleted, or unproven.
        hits: The messages with the keys they share.
        self_ids: Places of the message you asked about, if a client gave it to you without its place. They are not
            among the hits.
    """

    status: Status
    hits: tuple[Hit, ...] = ()
    self_ids: tuple[MessageId, ...] = field(default=(), kw_only=True)

    @property
    def words(self) -> str:
        """What the status says, for a person; with `explanation` where keys are missing or new."""
        if self.missing_keys or self.new_keys:
            return f"{self.status.words.partition(':')[0]}: {self.explanation}"
        return self.status.words

    @property
    def explanation(self) -> str:
        """Why nothing was looked for, or what to do about what is not recorded or gone, in words; else empty."""
        if self.missing_keys:
            keys = _some([f"{key} ({reason})" for key, reason in self.missing_keys])
            return f"this message has no value of {keys}: nothing was looked for"
        return self._cure(self.status)

    @property
    def messages(self) -> tuple[Message, ...]:
        """The messages."""
        return tuple(hit.message for hit in self.hits)

    @property
    def ids(self) -> tuple[MessageId, ...]:
        """Where the messages are."""
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
        why = f"; {self.explanation}" if self.explanation else ""
        return f"<Answer {self.status}: {len(self.hits)} messages of {len(self.streams)} streams{why}>"


def to_be_recorded(unrecorded_streams: Sequence[str], new_keys: Sequence[NewKey]) -> str:
    """What no recorder will record, and the commands that do; empty where there is nothing."""
    told = []
    if unrecorded_streams:
        names = _some([repr(stream) for stream in unrecorded_streams])
        told.append(f"nobody records {names}: relatum record {' '.join(unrecorded_streams[:NAMED_MAX])}")
    if new_keys:
        keys, are, them = (", ".join(repr(each.key) for each in new_keys), "are new keys", "them")
        if len(new_keys) == 1:
            are, them = "is a new key", "it"
        streams = _some([repr(stream) for stream in sorted({stream for each in new_keys for stream in each.streams})])
        cure = backfill_command(each.key for each in new_keys)
        told.append(f"{keys} {are}: older messages of {streams} were not looked at for {them}: {cure}")
    return "; ".join(told)


def _some(names: Sequence[str]) -> str:
    """The first of names, and how many more there are."""
    more = len(names) - NAMED_MAX
    return ", ".join(names[:NAMED_MAX]) + (f" and {more:,} more" if more > 0 else "")
