"""How an answer comes about: from what the index names, or by evidence, the index once more, and the rest read.

A stream that is not the one that was recorded is met here, and messages are gathered within the bounds of one answer.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final, TypeAlias, TypeVar

from relatum.errors import AccessRefused, InvalidInput, NotFound, StreamReplaced, Transient
from relatum.ids import MessageId
from relatum.limits import MESSAGE_BYTES
from relatum.reading import Message, StreamBounds
from relatum.store.coverage import last_position
from relatum_consumer.lookups import limits
from relatum_consumer.lookups.answer import Answer, Hit, Status, UnreadableStream
from relatum_consumer.lookups.catalog import Catalog
from relatum_consumer.lookups.proof import Evidence, evidence_together
from relatum_consumer.lookups.stream_states import coverage_by_stream
from relatum_consumer.lookups.verified import Lost

_Result = TypeVar("_Result")


def again_if_replaced(catalog: Catalog, ask: Callable[[], _Result], *, leaves_out: bool = False) -> _Result:
    """Ask; once more from the start where the recorder replaced a stream under our hands.

    `leaves_out`: True leaves out a stream that stays another than what was recorded: where none is named.

    Raises:
        StreamReplaced: it is not the stream that was recorded; where that can be found out, the error says why.
    """
    try:
        return ask()
    except StreamReplaced:
        pass
    while True:
        try:
            return ask()
        except StreamReplaced as error:
            if leaves_out and catalog.leave_out(error):
                continue
            became = _became(catalog, error.stream)
            if not became:
                raise
            raise StreamReplaced(f"the stream {error.stream!r} {became}", stream=error.stream) from error


def _became(catalog: Catalog, stream: str) -> str:
    """What happened to a stream that is not the one that was recorded, and what to do; empty where nobody can say.

    A stream that begins with a message younger than the last one recorded is another stream.
    """
    try:
        rows = coverage_by_stream(catalog.servers, catalog.streams([stream]))
        last = last_position(row for ranges in rows.values() for row in ranges)
        bounds: StreamBounds = catalog.servers.bounds(stream)
        if last is None or last.chunk_ms is None or bounds.first is None:
            return ""
        first = catalog.servers.read([MessageId(stream, bounds.first)])[0]
    except (NotFound, AccessRefused, Transient):
        return ""
    if not isinstance(first, Message) or first.chunk_ms is None:
        return ""
    if first.chunk_ms > last.chunk_ms:
        return f"was deleted and declared again: relatum record {stream} records it anew"
    return f"has lost its tail: relatum record {stream} records it again from there, and its publishers know the rest"


_SPARE: Final = 64
"""Messages held beyond twice the limit before the last ones are dropped: small limits need not sort each time."""


class Gathered:
    """Takes messages as they are read, whichever streams they come from."""

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
        """What was taken, each once, in no order."""
        return list(self._messages.values())

    def consider(self, message: Message) -> None:
        """Take a message if it is meant; `InvalidInput` where there are too many, though all were asked for."""
        if self._is_meant(message):
            self.take(message)

    def take(self, message: Message) -> None:
        """Take a message that is meant; the same one again changes nothing."""
        if message.id in self._messages:
            return
        self._messages[message.id] = message
        if self._first is not None and self._held_max is not None:
            if len(self._messages) > self._held_max:
                self._messages = {each.id: each for each in self._first(self._messages.values())}
            return
        self._bytes += MESSAGE_BYTES + len(message.body if message.raw is None else message.raw)
        self.check(0)

    def check(self, more: int) -> None:
        """See that so many messages more are not too many."""
        check_count(len(self._messages) + more, self._advice)
        if self._bytes > limits.ANSWER_BYTES_MAX:
            raise InvalidInput(f"messages of more than {limits.ANSWER_BYTES_MAX >> 20} MiB: {self._advice}")


def check_count(messages: int, advice: str) -> None:
    """Refuse an answer that is too large as soon as that shows, before more of it is read."""
    if messages > limits.ANSWER_MESSAGES_MAX:
        raise InvalidInput(f"more than {limits.ANSWER_MESSAGES_MAX} messages: {advice}")


@dataclass(frozen=True, slots=True)
class Found:
    """What was found, each hit checked; and what became of the rest that the index names."""

    hits: tuple[Hit, ...] = ()
    lost: Lost = field(default_factory=Lost)

    def answer(self, status: Status, streams: tuple[str, ...], unreadable: tuple[UnreadableStream, ...]) -> Answer:
        """The answer, by its status and the streams it holds over."""
        lost = self.lost
        return Answer(
            status,
            self.hits,
            tuple(lost.expired),
            streams=streams,
            unread=tuple(lost.unread),
            unreadable_streams=unreadable,
            deleted=tuple(lost.deleted),
        )


Find: TypeAlias = Callable[[Evidence | None], Found]
"""Finds what the index names and, where evidence is given, what is not recorded."""


def answered(
    catalog: Catalog, names: Sequence[str] | None, key_ids: Iterable[int], find: Find, *, complete: bool
) -> Answer:
    """The answer to what is found in streams, once more from the start where one was replaced under our hands."""
    ask = partial(_answered, catalog, names, list(key_ids), find, complete=complete)
    return again_if_replaced(catalog, ask, leaves_out=names is None)


def _answered(
    catalog: Catalog, names: Sequence[str] | None, key_ids: Sequence[int], find: Find, *, complete: bool
) -> Answer:
    if not complete:
        found = find(None)
        if found.hits:
            return recorded_answer(catalog, names, found)
    known = evidence_together(catalog, names, key_ids)
    found = find(known if complete else None)
    if complete or not found.hits:
        known.check_present(catalog, names)
    return concluded(catalog, known, found, was_read=complete)


def recorded_answer(catalog: Catalog, names: Sequence[str] | None, found: Found) -> Answer:
    """The answer where the table knows something: nothing needs a proof, and nothing more is asked."""
    streams = catalog.recorded(names, (hit.message.stream for hit in found.hits))
    unreadable = catalog.leaves_out(names)
    return found.answer(Status.UNPROVEN if found.lost.unread or unreadable else Status.FOUND, streams, unreadable)


def concluded(catalog: Catalog, known: Evidence, found: Found, *, was_read: bool) -> Answer:
    """The answer that evidence and what was found after it amount to."""
    lost = found.lost
    if not known.streams and not (found.hits or lost.is_sure or lost.deleted):
        if known.unreadable_streams:
            raise catalog.why_left_out(known.unreadable_streams[0])
        catalog.nothing_recorded(known.gone)
    status = known.status(
        is_found=bool(found.hits),
        was_read=was_read,
        is_whole=not lost.unread,
        has_expired=lost.is_sure,
        was_deleted=bool(lost.deleted),
    )
    # What was recorded of a stream that was deleted is known: the answer holds over it, too.
    streams = tuple(sorted({*known.streams, *(where.stream for where in lost.deleted)}))
    answer = found.answer(status, streams, known.unreadable_streams)
    if status is not Status.NOT_RECORDED_YET:
        return answer
    return replace(answer, unrecorded_streams=known.unrecorded_streams(catalog), new_keys=known.named_new_keys(catalog))
