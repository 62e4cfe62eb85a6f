"""What a collector needs of its store: one protocol, kept by PostgreSQL (`_store`) and by memory (`_memory`)."""

from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Protocol
from uuid import UUID

from relatum.ids import MessageId
from relatum.outcomes import Outcome, OutcomeStatus
from relatum.store import Position

if TYPE_CHECKING:
    import sqlalchemy as sa


@dataclass(frozen=True, slots=True)
class Entry:
    """A collected message as the store knows it: everything but the body.

    Attributes:
        place: Where the message lies; that is its identity.
        message_id: The property `message_id`, or "stream:offset".
        type: The type its executor is chosen by.
        bytes: The message's bytes, for the sizes of bulks.
        attempts: How often an executor was handed it.
        due_in_s: Seconds until its next attempt; 0 for at once.
        collected_at: When it was collected; None before it is.
    """

    place: MessageId
    message_id: str
    type: str
    bytes: int
    attempts: int = 0
    due_in_s: float = 0.0
    collected_at: datetime | None = None


@dataclass(frozen=True, slots=True)
class Advance:
    """A followed stream's position moves: everything in [from_offset, to_offset) is collected or passed over.

    Attributes:
        stream: The stream's name.
        from_offset: Where the position must be.
        to_offset: Where it is then: the next offset to be read.
        known_by: What lies at the last offset read, to know the stream again.
        passed_over: Messages whose type has no executor.
        refused: Messages refused because there was no room, with `when_full="refuse"`.
        passed_over_types: The types of those passed over.
        for_others: Messages that other members have executors of, to be stored for them to take over.
    """

    stream: str
    from_offset: int
    to_offset: int
    known_by: Position | None = None
    passed_over: int = 0
    refused: int = 0
    passed_over_types: frozenset[str] = frozenset()
    for_others: tuple[Entry, ...] = ()


@dataclass(frozen=True, slots=True)
class Followed:
    """A stream this member follows now.

    Attributes:
        next_offset: The position: where to read on.
        known_by: What lay at the last offset read; None where none was.
        types_of_others: The types other running members have executors of.
        is_new: Whether it was never followed before, and so begins where it was told to.
    """

    next_offset: int
    known_by: Position | None = None
    types_of_others: frozenset[str] = frozenset()
    is_new: bool = False


@dataclass(frozen=True, slots=True)
class Result:
    """What an attempt came to, to be stored.

    Attributes:
        place: The message's place.
        status: SUCCEEDED, FAILED or DEAD; COLLECTED where it is to be tried again.
        reason: Why it failed, at most 1,000 characters; None where it succeeded.
        retry_in_s: With COLLECTED: seconds until the next attempt.
    """

    place: MessageId
    status: OutcomeStatus
    reason: str | None = None
    retry_in_s: float | None = None


@dataclass(frozen=True, slots=True)
class Stored:
    """What a call to the store came to.

    Attributes:
        places: Those of the places asked for that are this member's and are now as asked. What is missing belongs to
            another member, or was finished before.
        at: The store's time, aware: what it wrote as `collected_at`, `forwarded_at`, `finished_at`.
        renamed: With `add`: the names of messages whose own it cannot hold.
    """

    places: frozenset[MessageId]
    at: datetime
    renamed: Mapping[MessageId, str] = field(default_factory=dict)


class Abandoned(Exception):
    """The collector was closed before a server came back; what was under way is left to another member."""


class Store(Protocol):
    """Keeps ids and states of the messages of one collector name. Blocking, one transaction a call, thread-safe.

    Each call may raise `DatabaseUnavailable`; it is then repeated with the same arguments, although the transaction
    may have been committed. So a repetition changes nothing, and answers as the first call would have.

    A member is one running collector. What it collected is its own until its lease has lapsed and another takes over.
    Fencing is by row: a member whose row another took over finds that place missing in `Stored.places`.
    """

    @property
    def name(self) -> str:
        """The collector's name."""

    @property
    def server(self) -> str:
        """The database's name in the log; empty where there is none."""

    def open(self, types: Collection[str], lease_s: float) -> int:
        """Join as a new member with executors of these types, whose lease holds for `lease_s` seconds; gives its id."""

    def renew(self, member: int) -> bool:
        """Extend the lease, and with it that of the streams followed; also one that lapsed, if nobody minded.

        Returns:
            False where the member is gone (all it had was taken over): join anew.
        """

    def close(self, member: int) -> None:
        """Leave: what is unfinished, and the streams followed, may be taken over at once."""

    def follow(self, member: int, stream: str, initial: int) -> Followed | None:
        """Follow a stream, if no member with a lease does.

        Args:
            member: Who.
            stream: The stream.
            initial: The position of a stream this collector never followed before.

        Returns:
            Where to go on; None where another member follows it.
        """

    def held(self, member: int) -> frozenset[str]:
        """The streams that other members with a lease follow: those it is of no use to ask for."""

    def begin_anew(self, member: int, stream: str, initial: int) -> None:
        """Begin a new generation of a stream this member follows: it was declared again, or lost its tail.

        What is unfinished of the old generation becomes FAILED: its bodies are gone.
        """

    def last_collected(self, stream: str, until: int) -> tuple[int, str] | None:
        """The last message of a stream's present generation up to an offset: its offset, and its id; None for none."""

    def cut_back(self, member: int, stream: str, behind: int) -> None:
        """Go on behind an offset in a stream this member follows, which has lost its end.

        What lay behind it is over: unfinished messages become FAILED, and the places are free for others.
        """

    def unfollow(self, member: int, stream: str) -> None:
        """Let another member follow the stream."""

    def add(self, member: int, entries: Sequence[Entry], advance: Advance | None = None) -> Stored:
        """Store messages as collected, and with `advance` move the position of their stream, in one transaction.

        Without `advance`, entries may lie in several streams; what was collected before, by whomever, is left as it is.

        Returns:
            The places that are this member's to consume.

        Raises:
            Conflict: The position is not at `from_offset` (nor, by this very call before, at `to_offset`), another
                member follows the stream, or what is passed over and what is for others is not what the members
                running now would have it be: `follow` anew. Nothing was written.
        """

    def forward(self, member: int, bulk_id: int, places: Collection[MessageId]) -> Stored:
        """Note that an executor is handed these now: attempts + 1."""

    def finish(
        self, member: int, bulk_id: int, results: Sequence[Result], *, connection: "sa.Connection | None" = None
    ) -> Stored:
        """Store what an attempt came to, for those that are still forwarded in this bulk by this member.

        Args:
            member: Who.
            bulk_id: The bulk's id, as in `forward`.
            results: What became of each.
            connection: The transaction of `transaction` to write in; else one of its own.
        """

    def give_back(self, member: int, places: Collection[MessageId]) -> bool:
        """Let others take up unfinished messages that this member cannot go on with.

        Returns:
            Whether none of them is this member's any more; False where no other that lives consumes their type.
        """

    def came_through(self, token: UUID) -> bool:
        """Whether a joined transaction whose commit nobody answered was committed; where not, it never is.

        Args:
            token: The field of the error it ended with.
        """

    def transaction(self) -> "AbstractContextManager[sa.Connection]":
        """A transaction that an executor may join: committed at the end of the block, rolled back where it raises.

        Raises:
            ConfigurationError: The store has none: it is memory.
        """

    def take_over(self, member: int, types: Collection[str], entries_max: int) -> list[Entry]:
        """Make unfinished messages of these types this member's: at most so many.

        Those whose member's lease has lapsed, and those that were stored for others. They are `collected` again,
        oldest first.
        """

    def outcomes_of(self, message_ids: Collection[str]) -> Mapping[str, Outcome]:
        """The outcome of each id, "unknown" ones too; of several messages with one id, the least advanced."""

    def end_in(self, seconds: float) -> None:
        """Let go of what does not answer after so many seconds, from any thread; `open` begins anew."""

    def dispose(self) -> None:
        """Give connections back; the store is not used any more."""
