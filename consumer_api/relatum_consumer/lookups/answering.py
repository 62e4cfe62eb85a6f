"""Builds an answer: from indexed messages alone, or from evidence, indexed messages and unrecorded messages.

It also detects streams that are not the recorded ones, and collects messages within the limits of one answer.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar

from relatum.common.ids import MessageId
from relatum.common.limits import INTEGER_MAX, MESSAGE_BYTES
from relatum.errors import (
    AccessRefused,
    InvalidInput,
    NotAStream,
    NotFound,
    OffsetExpired,
    OffsetNotFound,
    RelatumError,
    StreamNotFound,
    StreamReplaced,
    StreamUnavailable,
)
from relatum.reading import ChunkCache, Message
from relatum_consumer.lookups.answer import Answer, Hit, Status, UnreadableStream, union_of
from relatum_consumer.lookups.catalog import Catalog, replaced
from relatum_consumer.lookups.proof import Evidence, coverage_by_stream, evidence_together

ANSWER_MESSAGES_MAX: Final = 100_000
"""Maximum number of messages in one answer, which is held in memory. For more, use several time spans."""

ANSWER_BYTES_MAX: Final = 1 << 30
"""Maximum bytes of messages in an answer without `limit=`; each message counts `MESSAGE_BYTES` more than its size."""

_Result = TypeVar("_Result")


def retry_if_replaced(catalog: Catalog, attempt: Callable[[], _Result], *, leaves_out: bool = False) -> _Result:
    """Call `attempt`. If a stream is gone or not the recorded one, repeat it: that may have become known by now.

    `leaves_out`: If that happens again, leave the stream out and repeat the call; for calls without named streams.
    """
    is_first = True
    while True:
        try:
            return attempt()
        except (StreamReplaced, StreamNotFound, NotAStream) as error:
            if not (is_first or (leaves_out and catalog.leave_out(error))):
                raise
            is_first = False


_SPARE: Final = 64
"""Messages held beyond twice the limit before surplus ones are dropped, so that small limits rarely sort."""


class Matches:
    """Collects matching messages of several streams while they are read."""

    def __init__(
        self,
        is_meant: Callable[[Message], bool],
        advice: str,
        *,
        first: Callable[[Iterable[Message]], list[Message]] | None = None,
        limit: int | None = None,
    ) -> None:
        self._is_meant = is_meant
        self._advice = advice
        self._first = first
        self._held_max = None if limit is None else 2 * limit + _SPARE
        self._messages: dict[MessageId, Message] = {}
        self._bytes = 0

    @property
    def messages(self) -> list[Message]:
        """The collected messages without duplicates, unordered."""
        return list(self._messages.values())

    def consider(self, message: Message) -> None:
        """Add a message if it matches; raises `InvalidInput` if an answer without a limit becomes too large."""
        if not self._is_meant(message) or message.id in self._messages:
            return
        self._messages[message.id] = message
        if self._first is not None and self._held_max is not None:
            if len(self._messages) > self._held_max:
                self._messages = {each.id: each for each in self._first(self._messages.values())}
            return
        self._bytes += MESSAGE_BYTES + len(message.body if message.raw is None else message.raw)
        check_count(len(self._messages), self._advice)
        if self._bytes > ANSWER_BYTES_MAX:
            raise InvalidInput(f"the messages found exceed {ANSWER_BYTES_MAX >> 20:,} MiB: {self._advice}")


def check_count(messages: int, advice: str) -> None:
    """Raise `InvalidInput` if an answer has too many messages."""
    if messages > ANSWER_MESSAGES_MAX:
        raise InvalidInput(f"more than {ANSWER_MESSAGES_MAX:,} messages match: {advice}")


@dataclass(slots=True)
class Row:
    """An indexed message: its id, its time, and the values the index has for it: key ids, or (key id, value) pairs."""

    id: MessageId
    time_us: int | None
    carries: set[Any] = field(default_factory=set)


def in_time(each: Row | Message) -> tuple[bool, int, MessageId]:
    """A sort key: by time, then stream and offset. A message without a time sorts as later than all others."""
    time_us = each.time_us
    return time_us is None, time_us or 0, each.id


@dataclass(slots=True)
class LostMessages:
    """Indexed messages that cannot be returned.

    Attributes:
        statuses: By id: `EXPIRED`, `DELETED`, or `UNPROVEN` for a message that is unread.
        floors: The first retained offset, for streams with such messages; `INTEGER_MAX` skips the whole stream.
        is_sure: Whether retention certainly dropped a matching message, even if its id is not known.
        left_out: The streams that were left out of the search, which lookups may try again by now.
    """

    statuses: dict[MessageId, Status] = field(default_factory=dict)
    floors: dict[str, int] = field(default_factory=dict)
    is_sure: bool = False
    left_out: tuple[UnreadableStream, ...] = ()

    def take(self, where: MessageId, first: int, *, is_sure: bool) -> None:
        """Add a missing message, with its stream's first retained offset; `is_sure` if the stream's leader says so."""
        self.floors[where.stream] = first
        gone = Status.DELETED if first == INTEGER_MAX else Status.EXPIRED
        self.statuses[where] = gone if is_sure else Status.UNPROVEN
        self.is_sure = self.is_sure or self.statuses[where] is Status.EXPIRED

    def ids(self, status: Status) -> tuple[MessageId, ...]:
        """Return the ids with a status, in the order in which they were noticed."""
        return tuple(where for where, each in self.statuses.items() if each is status)

    @property
    def outcome(self) -> Status:
        """What a search says about its lost messages if it finds none; `ABSENT` if none is certainly gone."""
        if self.is_sure:
            return Status.EXPIRED
        return Status.DELETED if Status.DELETED in self.statuses.values() else Status.ABSENT


class Found(NamedTuple):
    """What a search found: the messages, those that it lost, and the ids of the given message's copies."""

    hits: tuple[Hit, ...]
    lost: LostMessages
    self_ids: tuple[MessageId, ...] = ()

    def answer(self, status: Status, **covered: Any) -> Answer:
        """Return the answer with a status; `covered`: its other attributes."""
        expired, deleted, unread = map(self.lost.ids, (Status.EXPIRED, Status.DELETED, Status.UNPROVEN))
        return Answer(
            status, self.hits, expired=expired, deleted=deleted, unread=unread, self_ids=self.self_ids, **covered
        )


def verified(
    catalog: Catalog,
    rows: Sequence[Row],
    carried: Callable[[Row, Message], _Result | None],
    lost: LostMessages,
    *,
    is_named: bool,
    chunks: ChunkCache | None = None,
) -> list[_Result]:
    """Read the messages of rows, check each, and return the results of `carried`, which returns None for a mismatch.

    Missing messages are added to `lost`, and so are mismatches of rows recorded over AMQP 0.9.1, which showed some
    values differently (the number 42.7 as 42). Another mismatch raises `StreamReplaced`.
    """
    found: list[_Result] = []
    for row, message in zip(rows, catalog.servers.read([row.id for row in rows], chunks) if rows else (), strict=True):
        if isinstance(message, Message):
            # A row recorded over AMQP 0.9.1 may lack the time. If row and message both have one, they must agree.
            is_other = row.time_us is not None and message.time_us not in (None, row.time_us)
            result = None if is_other else carried(row, message)
            if result is not None:
                found.append(result)
            elif _was_recorded_over_amqp(catalog, row.id):
                # Raising the floor makes the next probe start behind this message.
                lost.take(row.id, row.id.offset + 1, is_sure=False)
            else:
                raise replaced(*row.id)
        elif isinstance(message, AccessRefused) and not is_named:
            # No error, since the stream was not named: its messages are unread, and it is not probed again.
            lost.take(row.id, INTEGER_MAX, is_sure=False)
        else:
            first = first_retained(row.id, message, is_named=is_named)
            lost.take(row.id, first, is_sure=is_sure(message))
    return found


def _was_recorded_over_amqp(catalog: Catalog, where: MessageId) -> bool:
    """Whether the message was recorded over AMQP 0.9.1, by release 0.4 or earlier."""
    ranges = coverage_by_stream(catalog.servers, catalog.streams([where.stream]))
    rows = (row for of_stream in ranges.values() for row in of_stream)
    return any(row.over_amqp and row.from_offset <= where.offset < row.to_offset for row in rows)


def first_retained(where: MessageId, error: RelatumError, *, is_named: bool) -> int:
    """Return the stream's first retained offset, given the error of reading a row's message; see `is_sure`.

    It raises the error if a named stream was deleted, may not be read, or if it is unknown now whether the message
    exists; `StreamReplaced` if the leader says that it does not exist, and that retention did not drop it.
    """
    if isinstance(error, OffsetExpired):
        return error.first
    if isinstance(error, (StreamNotFound, NotAStream)):
        if is_named:
            raise error
        # A deleted stream has no messages: it is not probed again.
        return INTEGER_MAX
    if isinstance(error, OffsetNotFound):
        if is_sure(error):
            raise replaced(*where) from error
        message = f"the message at {where} is recorded, but this node does not have it yet: retry later"
        raise StreamUnavailable(message, stream=where.stream) from error
    raise error


def is_sure(error: RelatumError) -> bool:
    """Whether a message certainly does not exist: its stream was deleted, or the stream's leader says so."""
    return error.is_proven if isinstance(error, OffsetNotFound) else isinstance(error, NotFound)


Find: TypeAlias = Callable[[Evidence | None], Found]
"""Finds indexed messages and, if evidence is given, messages that are not recorded."""


def answered(
    catalog: Catalog, names: Sequence[str] | None, key_ids: Sequence[int], find: Find, *, complete: bool
) -> Answer:
    """Return the answer from the results of `find`; start over if a stream is not the recorded one."""
    catalog.check_names(names)

    def attempt() -> Answer:
        if not complete:
            found = find(None)
            if found.hits:
                return recorded_answer(catalog, names, found)
        known = evidence_together(catalog, names, key_ids)
        found = find(known if complete else None)
        if complete or not found.hits:
            known.check_present(catalog, names, key_ids)
        return _concluded(catalog, known, found, was_read=complete)

    return retry_if_replaced(catalog, attempt, leaves_out=names is None)


def recorded_answer(catalog: Catalog, names: Sequence[str] | None, found: Found) -> Answer:
    """Return the answer from indexed messages alone, without a proof."""
    streams = catalog.recorded(names, (hit.message.stream for hit in found.hits))
    unreadable = union_of(found.lost.left_out, catalog.unreadable_streams(names))
    status = Status.UNPROVEN if unreadable or found.lost.ids(Status.UNPROVEN) else Status.FOUND
    return found.answer(status, streams=streams, unreadable_streams=unreadable)


def _concluded(catalog: Catalog, known: Evidence, found: Found, *, was_read: bool) -> Answer:
    known = replace(known, unusable=union_of(known.unusable, found.lost.left_out))
    outcome = Status.FOUND if found.hits else found.lost.outcome
    if not known.streams and outcome is Status.ABSENT:
        known.nothing_searched(catalog)
    status = known.status(outcome, was_read=was_read, is_whole=not found.lost.ids(Status.UNPROVEN))
    # The answer also covers deleted streams with matches: their recorded part is known.
    streams = tuple(sorted({*known.streams, *(where.stream for where in found.lost.ids(Status.DELETED))}))
    answer = found.answer(status, streams=streams, unreadable_streams=known.unreadable_streams)
    if status is not Status.NOT_RECORDED_YET:
        return answer
    return replace(answer, unrecorded_streams=known.unrecorded_streams(catalog), new_keys=known.named_new_keys(catalog))
