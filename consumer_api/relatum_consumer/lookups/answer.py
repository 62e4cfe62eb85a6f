"""The result of a lookup: the messages found, and whether there can be more."""

import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, NamedTuple, overload

from relatum.common.ids import MessageId
from relatum.reading import Message
from relatum.store.catalog import backfill_command


class Status(StrEnum):
    """What an answer means."""

    FOUND = "found"
    """At least one message was found; each was read and checked."""
    ABSENT = "absent"
    """No message matches: every message that the answer's streams retain was recorded, or was read by this lookup. If
    `missing_keys` is not empty, nothing was searched, because the message has none of the keys."""
    NOT_RECORDED_YET = "not_recorded_yet"
    """No message was found, but a part of the streams is not recorded and may hold one. Repeat with `complete=True`."""
    EXPIRED = "expired"
    """None was found: a matching message was recorded, and retention has dropped it."""
    DELETED = "deleted"
    """None was found: a matching message was recorded, and its stream was deleted. `EXPIRED` takes precedence."""
    UNPROVEN = "unproven"
    """The messages found exist, but it cannot be proven now that there are no more: a stream's leader is unreachable,
    messages could not be unpacked, indexed messages could not be read, or a stream is unusable (`unreadable_streams`).
    Usually no message was found, except with `complete=True`, or if `unread` is not empty."""

    @property
    def words(self) -> str:
        """The meaning, for display."""
        return _WORDS[self]


_WORDS: Final = {
    Status.FOUND: "found",
    Status.ABSENT: "absent: every message that these streams retain was recorded or read, and none matches",
    Status.EXPIRED: "expired: a message matched, and retention has dropped it",
    Status.DELETED: "deleted: a message matched, and its stream was deleted",
    Status.NOT_RECORDED_YET: "not recorded yet: a part of the streams is not recorded",
    Status.UNPROVEN: "unproven: no message was found, but it cannot be proven now that there is none (a leader is "
    "unreachable, or batches cannot be unpacked)",
}


@dataclass(frozen=True, slots=True)
class Hit:
    """One message found.

    Attributes:
        message: The message, read and checked.
        keys: The names of the searched keys whose values it shares, in the order searched; empty without a key.
    """

    message: Message
    keys: tuple[str, ...] = ()

    @property
    def id(self) -> MessageId:
        """The message's stream and offset."""
        return self.message.id


class UnreadableStream(NamedTuple):
    """A stream that an answer does not cover: its name, and the reason."""

    stream: str
    reason: str


def union_of(one: Iterable[UnreadableStream], other: Iterable[UnreadableStream]) -> tuple[UnreadableStream, ...]:
    """Return the streams of both, each once, in order."""
    return tuple(sorted({each.stream: each for each in (*one, *other)}.values()))


class MissingKey(NamedTuple):
    """A searched key of which the given message has no value: its name, and the reason."""

    key: str
    reason: str


class NewKey(NamedTuple):
    """A key that is newer than some recorded messages: its name, and the streams of these messages."""

    key: str
    streams: tuple[str, ...]


NAMED_MAX: Final = 5
"""Maximum number of keys or streams that an explanation names; it counts the others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Covered:
    """What an answer or a trace covers, and what it may lack.

    Attributes:
        streams: The names of the streams covered, in order; a super stream's partitions, not the super stream. An
            answer says nothing about other streams. With `FOUND`, this list of recorded streams may be a second old.
        expired: Ids of recorded matches that retention has dropped since, as far as the lookup noticed.
        deleted: Ids of recorded matches whose streams were deleted since.
        unread: Ids of indexed messages that could not be read and are not proven to be gone.
        unreadable_streams: If you named no stream: the recorded streams that you may not read, that belong to another
            broker, or that are not the recorded ones. The answer does not cover these streams; the status is
            `UNPROVEN` if one of them could change it.
        unrecorded_streams: With `NOT_RECORDED_YET`: the partly recorded streams that no recorder records now, so a
            later call does not help. In other streams, a recorder is behind, or a new leader retains pruned messages.
        new_keys: With `NOT_RECORDED_YET`: the searched keys that are newer than some recorded messages, each with the
            streams of these messages. Recorders do not add the key to them; `relatum backfill` does.
        missing_keys: If your message has none of the searched keys: each key, with the reason. Nothing was searched
            then, and `ABSENT` says only that no message can share a missing value.
    """

    streams: tuple[str, ...] = ()
    expired: tuple[MessageId, ...] = ()
    deleted: tuple[MessageId, ...] = ()
    unread: tuple[MessageId, ...] = ()
    unreadable_streams: tuple[UnreadableStream, ...] = ()
    unrecorded_streams: tuple[str, ...] = ()
    new_keys: tuple[NewKey, ...] = ()
    missing_keys: tuple[MissingKey, ...] = ()

    def _remedy(self, status: Status) -> str:
        """Return what to do about messages that are not recorded, or that are gone; empty if nothing can be done."""
        if self.unrecorded_streams or self.new_keys:
            return to_be_recorded(self.unrecorded_streams, self.new_keys)
        if status is Status.EXPIRED:
            return "to keep such messages, give the stream a longer retention (max-age, max-length-bytes)"
        if status is not Status.DELETED:
            return ""
        streams = list(dict.fromkeys(where.stream for where in self.deleted))
        names = first_few([*map(repr, streams)])
        forget = shlex.join(["relatum", "forget", *streams[:NAMED_MAX]])
        return f"the broker no longer has {names}: {forget} deletes what was recorded"


@dataclass(frozen=True, slots=True)
class Answer(Covered, Sequence[Message]):
    """The messages that a lookup found, in the requested order, and the status. Immutable.

    An answer is a sequence of messages: `len(answer)`, `answer[0]`, `for message in answer`; truthy if there are any.
    The attributes of `Covered` describe what it covers.

    Attributes:
        status: Found, absent, not recorded yet, expired, deleted, or unproven.
        hits: The messages with the keys they share.
        self_ids: Ids of the given message's copies, if its client provided no offset; they are not among the hits.
    """

    status: Status
    hits: tuple[Hit, ...] = ()
    self_ids: tuple[MessageId, ...] = field(default=(), kw_only=True)

    @property
    def words(self) -> str:
        """The status, for display; with the `explanation` if keys are missing or new."""
        if self.missing_keys or self.new_keys:
            return f"{self.status.words.partition(':')[0]}: {self.explanation}"
        if self.hits and self.status is Status.UNPROVEN:
            return "unproven: there may be more messages; this cannot be proven now"
        return self.status.words

    @property
    def explanation(self) -> str:
        """Why nothing was searched, or what to do about messages that are not recorded or are gone; else empty."""
        if self.missing_keys:
            keys = first_few([f"{key} ({reason})" for key, reason in self.missing_keys])
            return f"this message has no value of {keys}: nothing was searched"
        return self._remedy(self.status)

    @property
    def messages(self) -> tuple[Message, ...]:
        """The messages."""
        return tuple(hit.message for hit in self.hits)

    @property
    def ids(self) -> tuple[MessageId, ...]:
        """The messages' ids."""
        return tuple(hit.message.id for hit in self.hits)

    @property
    def first(self) -> Message | None:
        """The first message; None if there is none."""
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
        reason = f"; {self.explanation}" if self.explanation else ""
        return f"<Answer {self.status}: {len(self.hits)} messages of {len(self.streams)} streams{reason}>"


def to_be_recorded(unrecorded_streams: Sequence[str], new_keys: Sequence[NewKey]) -> str:
    """Return which messages no recorder will record, and the commands that record them; empty if there are none."""
    parts = []
    if unrecorded_streams:
        names = first_few([*map(repr, unrecorded_streams)])
        record = shlex.join(["relatum", "record", *unrecorded_streams[:NAMED_MAX]])
        parts.append(f"no recorder runs for {names}: {record}")
    if new_keys:
        keys, verb, pronoun = (", ".join(repr(each.key) for each in new_keys), "are new keys", "them")
        if len(new_keys) == 1:
            verb, pronoun = "is a new key", "it"
        streams = first_few([*map(repr, sorted({stream for each in new_keys for stream in each.streams}))])
        remedy = backfill_command(each.key for each in new_keys)
        parts.append(f"{keys} {verb}: older messages of {streams} are not recorded for {pronoun}: {remedy}")
    return "; ".join(parts)


def first_few(names: Sequence[str], most: int = NAMED_MAX) -> str:
    """Return the first names as text, and the number of the others."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more:,} more" if more > 0 else "")
