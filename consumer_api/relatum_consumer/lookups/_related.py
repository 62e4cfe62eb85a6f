"""Look-ups by key: one probe of the index, one read of what it names, and proof where nothing is found."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final, NamedTuple, Protocol, TypeVar

from relatum.errors import (
    AccessRefused,
    NotAStream,
    NotFound,
    OffsetExpired,
    OffsetNotFound,
    RelatumError,
    StreamNotFound,
    StreamReplaced,
    StreamUnavailable,
)
from relatum.ids import MessageId
from relatum.limits import INTEGER_MAX
from relatum.reading import KeptChunks, Message
from relatum.store.coverage import TIME
from relatum.store.database import Either
from relatum_consumer.consumed import InHand
from relatum_consumer.lookups._answer import Answer, Hit, Lacking, Status
from relatum_consumer.lookups._answering import Found, Gathered, answered, check_count
from relatum_consumer.lookups._catalog import Catalog, Wanted, named
from relatum_consumer.lookups._limits import ANSWER_MESSAGES_MAX
from relatum_consumer.lookups._probe import FEW_STREAMS, Order, probe_statement
from relatum_consumer.lookups._proof import Evidence
from relatum_consumer.lookups._servers import Servers
from relatum_consumer.lookups._stream_states import coverage_by_stream, replaced

_Result = TypeVar("_Result")


_ADVICE: Final = "ask with limit=, or for a span of time (since=, until=)"


class Itself:
    """Where the message in hand lies itself: in one place, or wherever a copy of it is met while messages are read."""

    def __init__(self, held: InHand | None = None) -> None:
        self._is_copy = None if held is None else held.is_copy
        self.ids: set[MessageId] = set() if held is None or held.id is None else {held.id}

    @property
    def first(self) -> MessageId | None:
        """One of the places."""
        return min(self.ids, default=None)

    @property
    def copies(self) -> tuple[MessageId, ...]:
        """The places that only reading told, in order."""
        return () if self._is_copy is None else tuple(sorted(self.ids))

    def holds(self, message: Message) -> bool:
        """Whether a message that was read is the one in hand."""
        if self._is_copy is None:
            return bool(self.ids) and message.id in self.ids
        if message.id not in self.ids and self._is_copy(message):
            self.ids.add(message.id)
        return message.id in self.ids


def is_in_span(time_us: int | None, since: int | None, until: int | None) -> bool:
    """Whether a time is from `since` to before `until`; None stands for no bound, and for a time that is not known."""
    if time_us is None:
        return since is None and until is None
    return (since is None or time_us >= since) and (until is None or time_us < until)


@dataclass(frozen=True, slots=True)
class Question:
    """What is sought by key: messages that carry one of the values, but not the one in hand itself.

    Names of None are all streams that are recorded; times, microseconds since 1970, are from `since` to before `until`.
    """

    wanted: tuple[Wanted, ...]
    names: tuple[str, ...] | None = None
    order: Order = "oldest"
    limit: int | None = None
    since: int | None = None
    until: int | None = None
    itself: "Itself" = field(default_factory=lambda: Itself())
    lacking: tuple[Lacking, ...] = ()

    @property
    def is_bounded(self) -> bool:
        """Whether only a span of time is meant."""
        return self.since is not None or self.until is not None

    @property
    def most(self) -> int:
        """Rows to probe for in each stream: one more than asked, for the message itself or to notice too many."""
        return max(1, len(self.itself.ids)) + (ANSWER_MESSAGES_MAX if self.limit is None else self.limit)

    def named(self, answer: Answer) -> Answer:
        """The answer, which names where the message in hand lies itself, if that had to be found out."""
        copies = self.itself.copies
        return replace(answer, itself=copies) if copies else answer

    def is_meant(self, message: Message) -> bool:
        """Whether a message read from a stream is sought."""
        if not any(each.is_of(message) for each in self.wanted) or self.itself.holds(message):
            return False
        return is_in_span(message.time_us, self.since, self.until)

    def rank(self, stream: str, offset: int, time_us: int | None) -> tuple[Any, ...]:
        """Where a message stands in the order; one without a time counts as later than all."""
        if self.order == "offset":
            return (stream, offset)
        return (time_us is None, time_us or 0, stream, offset)

    def gathering(self) -> Gathered:
        """What takes the messages that are sought, of those that are read: as many as asked."""

        def first(messages: Iterable[Message]) -> list[Message]:
            return self.sort(messages, lambda message: (message.stream, message.offset, message.time_us))

        return Gathered(self.is_meant, _ADVICE, first=first, limit=self.limit)

    def sort(self, items: Iterable[_Result], place: Callable[[_Result], tuple[str, int, int | None]]) -> list[_Result]:
        """Items in the order of the answer, as many as asked."""
        ordered = sorted(items, key=lambda item: self.rank(*place(item)), reverse=self.order == "newest")
        if self.limit is None:
            check_count(len(ordered), _ADVICE)
        return ordered[: self.limit]


@dataclass(slots=True)
class Row:
    """Where the table says a message lies, and by which keys."""

    id: MessageId
    time_us: int | None
    key_ids: set[int] = field(default_factory=set)


class HasPlace(Protocol):
    """What says where a message lies."""

    @property
    def id(self) -> MessageId: ...


_Placed = TypeVar("_Placed", bound=HasPlace)


def answer(catalog: Catalog, question: Question, *, complete: bool = False) -> Answer:
    """Answer a question."""
    catalog.check_names(question.names)
    if not question.wanted:
        return without_values(catalog, question.names, question.lacking)
    key_ids = [wanted.key_id for wanted in question.wanted] + ([TIME] if question.is_bounded else [])
    find = partial(_find, catalog, question)
    found = answered(catalog, question.names, key_ids, find, complete=complete)
    return question.named(found)


def without_values(catalog: Catalog, names: Sequence[str] | None, lacking: tuple[Lacking, ...]) -> Answer:
    """The answer for a message that has no value to be shared: no message of any stream can share it."""
    streams: set[str] = set(catalog.recorded(names))
    for name in names or ():
        if not catalog.recorded([name]):
            streams.update(catalog.servers.partitions(name) or [name])
    if not streams:
        catalog.nothing_recorded()
    return Answer(Status.ABSENT, streams=tuple(sorted(streams)), lacking=lacking)


def _find(catalog: Catalog, question: Question, known: Evidence | None) -> Found:
    found = probe(catalog, question)
    if known is None:
        return found
    gathered = question.gathering()
    known.scan(catalog.servers, gathered.consider)
    return replace(found, hits=_with(question, found.hits, gathered.messages))


def _with(question: Question, hits: Iterable[Hit], scanned: Iterable[Message]) -> tuple[Hit, ...]:
    """Hits of the index and messages read from the rest, together in order, each once."""
    by_id = {hit.id: hit for hit in hits}
    for message in scanned:
        by_id.setdefault(message.id, Hit(message, _keys_of(question.wanted, message)))
    return tuple(
        question.sort(by_id.values(), lambda hit: (hit.message.stream, hit.message.offset, hit.message.time_us))
    )


def _keys_of(wanted: Sequence[Wanted], message: Message) -> tuple[str, ...]:
    return tuple(dict.fromkeys(each.definition.name for each in wanted if each.is_of(message)))


# --- the index --------------------------------------------------------------------------------------------


def probe(catalog: Catalog, question: Question, unread: list[MessageId] | None = None) -> Found:
    """What the index names, read and checked.

    Where retention has dropped some of it, or some are the message in hand itself, and the limit may have hidden what
    comes after, the index is asked again. Each round knows a stream's first offset or those places better, so they end.

    `unread`: Is given what is being read, for as long as that takes.
    """
    floors: dict[str, int] = dict.fromkeys(catalog.left_out() if question.names is None else (), INTEGER_MAX)
    lost: dict[MessageId, Gone] = {}
    while True:
        known = len(question.itself.ids)
        probed = catalog.servers.rows(*_probe(catalog, question, floors))
        rows = _merged(question, probed)
        if unread is not None:
            unread[:] = [row.id for row in rows]
        read, gone = verified(catalog, question.wanted, rows, is_named=question.names is not None)
        if unread is not None:
            unread.clear()
        hits = tuple(hit for hit in read if not question.itself.holds(hit.message))
        lost.update(gone)
        floors.update({where.stream: each.first for where, each in gone.items()})
        is_whole = not gone and len(question.itself.ids) == known
        if is_whole or question.limit is None or len(rows) < question.limit:
            return Found(
                hits,
                expired=tuple(where for where, each in lost.items() if each.is_sure and not each.is_deleted),
                unread=tuple(where for where, each in lost.items() if not each.is_sure),
                deleted=tuple(where for where, each in lost.items() if each.is_deleted),
            )


def _probe(catalog: Catalog, question: Question, floors: Mapping[str, int]) -> tuple[Either, dict[str, Any]]:
    names, wanted = question.names, question.wanted
    parameters: dict[str, Any] = {"vhost": catalog.vhost, "limit": question.most} | named(names)
    for n, each in enumerate(wanted):
        parameters[f"key_id_{n}"] = each.key_id
        parameters[f"value_{n}"] = each.value
    if question.is_bounded:
        parameters |= {"since": question.since, "until": question.until}
    if floors:
        parameters |= {"floor_names": list(floors), "floors": list(floors.values())}
    statement = probe_statement(
        question.order,
        keys=len(wanted),
        names=None if names is None else len(names),
        bounded=question.is_bounded,
        floored=bool(floors),
        many=len(catalog.known(names)) > FEW_STREAMS,
    )
    return statement, parameters


def _merged(question: Question, probed: Iterable[tuple[str, int, int | None, int]]) -> list[Row]:
    """One row a message, in the order of the answer, as many as asked, without the message itself."""
    rows: dict[MessageId, Row] = {}
    for stream, offset, time_us, key_id in probed:
        where = MessageId(stream, offset)
        if where not in question.itself.ids:
            rows.setdefault(where, Row(where, time_us)).key_ids.add(key_id)
    if len(rows) == 1:
        return list(rows.values())
    return question.sort(rows.values(), lambda row: (row.id.stream, row.id.offset, row.time_us))


class Gone(NamedTuple):
    """A row whose message is not there: the first offset retained, and whether the stream's leader says so."""

    first: int
    is_sure: bool

    @property
    def is_deleted(self) -> bool:
        """Whether its stream is gone, rather than that retention has taken the message."""
        return self.is_sure and self.first == INTEGER_MAX


def verified(
    catalog: Catalog, wanted: Sequence[Wanted], rows: Sequence[Row], *, is_named: bool
) -> tuple[tuple[Hit, ...], dict[MessageId, Gone]]:
    """The rows' messages, each checked against its row; and the rows whose messages are gone, or not as they say."""
    hits: list[Hit] = []
    others: dict[MessageId, StreamReplaced] = {}

    def take(row: Row, message: Message) -> None:
        try:
            hits.append(check(wanted, row.id, row.time_us, row.key_ids, message))
        except StreamReplaced as error:
            others[row.id] = error

    gone = read_rows(catalog.servers, rows, take, is_named=is_named)
    if others:
        # As if retention had taken it, for all that is known: what is asked for again comes behind it.
        seen_otherwise = seen_over_amqp(catalog, others)
        gone |= {where: Gone(where.offset + 1, is_sure=False) for where in seen_otherwise}
    return tuple(hits), gone


def seen_over_amqp(catalog: Catalog, others: Mapping[MessageId, StreamReplaced]) -> Collection[MessageId]:
    """The places of messages that are not as their rows say: AMQP 0.9.1 showed them otherwise, a number of 42.7 as 42.

    Releases up to 0.4 recorded over it.

    Raises:
        StreamReplaced: One was not recorded so.
    """
    for where, error in others.items():
        ranges = coverage_by_stream(catalog.servers, catalog.streams([where.stream]))
        rows = (row for of_stream in ranges.values() for row in of_stream)
        if not any(row.over_amqp and row.from_offset <= where.offset < row.to_offset for row in rows):
            raise error
    return others.keys()


def read_rows(
    servers: Servers,
    rows: Sequence[_Placed],
    take: Callable[[_Placed, Message], object],
    *,
    is_named: bool,
    kept: KeptChunks | None = None,
) -> dict[MessageId, Gone]:
    """Show each row with its message to `take`, which checks it; the rows whose messages are gone.

    `kept`: As for `Servers.read`.
    """
    if not rows:
        return {}
    gone: dict[MessageId, Gone] = {}
    messages = servers.read([row.id for row in rows], kept)
    for row, message in zip(rows, messages, strict=True):
        if isinstance(message, Message):
            take(row, message)
        elif isinstance(message, AccessRefused) and not is_named:
            # All of a stream that was not asked for is unread: nothing of it is asked for again.
            gone[row.id] = Gone(INTEGER_MAX, is_sure=False)
        else:
            first = first_retained(row.id, message, is_named=is_named)
            gone[row.id] = Gone(first, is_sure(message))
    return gone


def check(
    wanted: Sequence[Wanted], where: MessageId, time_us: int | None, key_ids: Iterable[int], message: Message
) -> Hit:
    """The hit a message is, once it carries the keys and the time of its row."""
    found = [each for each in wanted if each.is_of(message)]
    # A row that was recorded over AMQP 0.9.1 may lack the time; what both have must agree.
    if time_us is not None and message.time_us is not None and time_us != message.time_us:
        raise replaced(*where)
    if not {each.key_id for each in found}.issuperset(key_ids):
        raise replaced(*where)
    # A message may share several values of one key.
    return Hit(message, tuple(dict.fromkeys(each.definition.name for each in found)))


def first_retained(where: MessageId, error: RelatumError, *, is_named: bool) -> int:
    """The first offset the stream retains, after a row's message was not there; see `is_sure`.

    Raises:
        StreamReplaced: it is not retention that took it, and the leader says so.
        StreamNotFound, NotAStream: the stream was deleted, and was asked for by name.
        AccessRefused: this user may not read the stream.
        Transient: nothing can be known now. The whole answer is this error then: a message that is there, on a node
            that is behind or starting, must not be left out of it.
    """
    if isinstance(error, OffsetExpired):
        return error.first
    if isinstance(error, (StreamNotFound, NotAStream)):
        if is_named:
            raise error
        # All of a deleted stream is gone: nothing of it is asked for again.
        return INTEGER_MAX
    if isinstance(error, OffsetNotFound):
        if is_sure(error):
            raise replaced(*where) from error
        message = f"the message at {where} is recorded, and this node does not have it yet: repeat it later"
        raise StreamUnavailable(message, stream=where.stream) from error
    raise error


def is_sure(error: RelatumError) -> bool:
    """Whether nobody need doubt that a message is not there: its stream is gone, or the stream's leader says so."""
    if isinstance(error, OffsetNotFound):
        return error.is_proven
    return isinstance(error, NotFound)
