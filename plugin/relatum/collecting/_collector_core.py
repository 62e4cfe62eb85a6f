"""Decides from sizes and times which bulks to close and which messages must wait. No I/O, no clock."""

import heapq
import secrets
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import Enum
from typing import Final, NamedTuple

from relatum.collecting._bulk import Bulk, Collected, ExecutorOptions, FlushReason
from relatum.common.checks import checked_count
from relatum.common.ids import MessageId
from relatum.common.limits import INTEGER_MAX
from relatum.errors import InvalidInput
from relatum.outcomes import OutcomeStatus
from relatum.reading import Position, position_of

BYTES_MAX: Final = 64 * 1024 * 1024
"""Default maximum bytes of all bulks."""

BULKS_MAX: Final = 64
"""Default maximum number of bulks being filled."""

ENTRY_BYTES: Final = 640
"""Overhead of a held message in bytes: 490 to 550 with Python 3.11, measured by tracemalloc; rounded up."""


@dataclass(frozen=True, slots=True)
class Advance:
    """Moves a followed stream's position: all messages in [from_offset, to_offset) are collected or passed over."""

    stream: str
    from_offset: int
    to_offset: int
    known_by: Position | None = None
    passed_over: int = 0


@dataclass(frozen=True, slots=True)
class Followed:
    """The position from which a member follows a stream. `is_new`: the collector never followed the stream before."""

    next_offset: int
    known_by: Position | None = None
    is_new: bool = False


class Result(NamedTuple):
    """The result of an attempt, for the store."""

    place: MessageId
    status: OutcomeStatus
    reason: str | None = None
    retry_in_s: float | None = None


@dataclass(frozen=True, slots=True)
class Stored:
    """The places of the messages that a call to the store changed, and the time (None: no message changed)."""

    places: frozenset[MessageId]
    at: datetime | None


class Abandoned(BaseException):
    """The collector was closed while a server was unavailable. Another member takes over the unfinished messages.

    Not an `Exception`: nothing has failed, and all retries must end.
    """


class Verdict(Enum):
    """The answer to an offered message."""

    TAKEN = "taken"
    """Room is reserved: store the message, then `add` it."""
    KNOWN = "known"
    """The message is held already."""
    NO_EXECUTOR = "no executor"
    """Its type has no executor here."""
    REFUSED = "refused"
    """The collector is stopping."""
    WAIT = "wait"
    """There is no room now: offer the message again after a bulk was consumed."""


class TypeBulks:
    """The bulks of one type, within the limits of its options. `Core` enforces the limits over all types."""

    def __init__(self, type: str, options: ExecutorOptions) -> None:  # noqa: A002 - RabbitMQ's word for it
        self.type = type
        self.options = options
        self.filling: list[Collected] = []
        self.bytes = 0
        self.first_at = self.last_at = 0.0
        self.waiting: deque[Bulk] = deque()
        self.running = 0
        self._expected = 0
        self._expected_bytes = 0
        self._retries: list[tuple[float, MessageId, Collected]] = []

    def expect(self, message: Collected, count: int = 1) -> None:
        """Reserve room in a bulk for a message that is being stored; with `count=-1`, release it."""
        self._expected += count
        self._expected_bytes += count * message.bytes

    @property
    def reached(self) -> FlushReason | None:
        """The size limit that the bulk being filled has reached; None if it has reached none."""
        if self.filling and self.bytes >= self.options.bulk_bytes:
            return FlushReason.BYTES
        return FlushReason.MESSAGES if len(self.filling) >= self.options.bulk_messages else None

    def deadlines(self) -> Iterator[tuple[float, FlushReason | None]]:
        """Yield when the bulk being filled must be closed, and why; and when the next retry is due."""
        if self.filling:
            yield self.first_at + self.options.max_age_s, FlushReason.AGE
            if self.options.idle_s is not None:
                yield self.last_at + self.options.idle_s, FlushReason.IDLE
        if self._retries:
            yield self._retries[0][0], None

    @property
    def is_full(self) -> bool:
        """Whether `queue_bulks` bulks wait for a worker, including those that messages now being stored will fill."""
        messages, size = self._expected + len(self.filling), self._expected_bytes + self.bytes
        coming = max(messages // self.options.bulk_messages, size // self.options.bulk_bytes)
        return len(self.waiting) + coming >= self.options.queue_bulks

    def retry_at(self, message: Collected, due_at: float) -> None:
        heapq.heappush(self._retries, (due_at, message.place, message))

    def retries_due(self, now: float) -> list[Collected]:
        """Remove and return the messages whose next attempt is due."""
        ready: list[Collected] = []
        while self._retries and self._retries[0][0] <= now:
            ready.append(heapq.heappop(self._retries)[2])
        return ready

    def drop_retries(self, places: Collection[MessageId]) -> list[Collected]:
        """Remove and return messages that wait for a retry."""
        dropped = [message for _, place, message in self._retries if place in places]
        # A sorted list is a heap.
        self._retries = sorted(each for each in self._retries if each[1] not in places)
        return dropped


class Core:
    """The bulks of a collector. For the collector's loop.

    A message is offered (`admit`), stored by the caller, added to a bulk, taken by a worker, and settled. It is held,
    and counts towards the limits, from `admit` to `settle`. Times are seconds of any monotonic clock.
    """

    def __init__(self, bytes_max: int = BYTES_MAX, bulks_max: int = BULKS_MAX) -> None:
        self.bytes_max = checked_count("bytes_max", bytes_max, most=INTEGER_MAX)
        self.bulks_max = checked_count("bulks_max", bulks_max, most=INTEGER_MAX)
        self.held_bytes = self.passed_over = 0
        self.is_stopping = False
        self._types: dict[str, TypeBulks] = {}
        self._held: dict[MessageId, int] = {}
        self._unstored: set[MessageId] = set()

    # --- types --------------------------------------------------------------------------------------------------------

    def register(self, type: str, options: ExecutorOptions) -> None:  # noqa: A002 - RabbitMQ's word for it
        if type in self._types:
            raise InvalidInput(f"the type {type!r} already has an executor")
        self._types[type] = TypeBulks(type, options)

    # --- messages in --------------------------------------------------------------------------------------------------

    def admit(self, message: Collected) -> Verdict:
        """Offer a message. If the verdict is TAKEN, the message is held from now on."""
        bulks = self._types.get(message.type)
        if bulks is None:
            self.passed_over += 1
            return Verdict.NO_EXECUTOR
        if self.is_stopping:
            return Verdict.REFUSED
        if message.place in self._held:
            return Verdict.KNOWN
        if bulks.is_full and bulks.options.when_full != "spill":
            return Verdict.WAIT
        if self.held_bytes >= self.bytes_max:
            self._spill_waiting()
            if self.held_bytes >= self.bytes_max:
                return Verdict.WAIT
        self._hold(message)
        self._unstored.add(message.place)
        bulks.expect(message)
        return Verdict.TAKEN

    def _hold(self, message: Collected) -> None:
        """Count the memory that a message takes now, or correct its count."""
        size = ENTRY_BYTES + (message.bytes if message.body is not None else 0)
        self.held_bytes += size - self._held.get(message.place, 0)
        self._held[message.place] = size

    def add(self, messages: Sequence[Collected], now: float) -> None:
        """Put stored messages into bulks, and close bulks that reach a limit."""
        for message in messages:
            self._types[message.type].expect(message, -1)
            self._unstored.discard(message.place)
        self._add_all(messages, now)

    def _add_all(self, messages: Sequence[Collected], now: float) -> None:
        for message in messages:
            self._add(message, now)
        if messages and self.held_bytes >= self.bytes_max:
            # Once for all messages: at the limit, each would otherwise become a separate bulk.
            being_filled = [bulks for bulks in self._types.values() if bulks.filling]
            if being_filled:
                self._close(max(being_filled, key=lambda each: each.bytes), FlushReason.TOTAL_BYTES)
        if self.is_stopping:
            self.flush(None, FlushReason.STOP)

    def _add(self, message: Collected, now: float) -> None:
        bulks = self._types[message.type]
        opens = not bulks.filling
        if opens:
            bulks.first_at = now
        bulks.filling.append(message)
        bulks.bytes += message.bytes
        bulks.last_at = now
        reached = bulks.reached
        if reached is not None:
            self._close(bulks, reached)
        elif opens:
            being_filled = [each for each in self._types.values() if each.filling]
            if len(being_filled) >= self.bulks_max:
                self._close(min(being_filled, key=lambda each: each.first_at), FlushReason.ACTIVE_BULKS)

    def adopt(self, taken_over: Iterable[tuple[Collected, float]], now: float) -> list[MessageId]:
        """Hold messages taken over, each with the seconds until it is due; return the places that were held already.

        Workers read the bodies later.
        """
        ready, held = list[Collected](), list[MessageId]()
        for message, due_in_s in taken_over:
            if message.place in self._held:
                held.append(message.place)
                continue
            self._hold(message)
            if due_in_s > 0:
                self._types[message.type].retry_at(message, now + due_in_s)
            else:
                ready.append(message)
        self._add_all(ready, now)
        return held

    def room_for_others(self, messages_max: int) -> tuple[int, list[str]]:
        """Return how many messages, without bodies, can be taken over now, and the types that have room."""
        # At least one message if none is held, however small `bytes_max` is.
        room = max((self.bytes_max - self.held_bytes) // (2 * ENTRY_BYTES), int(not self._held))
        types = [name for name, bulks in self._types.items() if not bulks.is_full]
        return 0 if self.is_stopping else max(0, min(messages_max, room)), types

    # --- bulks closed -------------------------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Close due bulks, and put messages whose retry is due into bulks."""
        for bulks in self._types.values():
            reason = next((why for at, why in bulks.deadlines() if why is not None and at <= now), None)
            if reason is not None:
                self._close(bulks, reason)
            self._add_all(bulks.retries_due(now), now)

    def deadline(self) -> float | None:
        """Return when to call `tick` next; None if nothing will become due."""
        return min((at for bulks in self._types.values() for at, _ in bulks.deadlines()), default=None)

    def flush(self, type: str | None = None, reason: FlushReason = FlushReason.EXPLICIT) -> None:  # noqa: A002
        for name, bulks in self._types.items():
            if type is None or name == type:
                self._close(bulks, reason)

    def stop(self) -> None:
        self.is_stopping = True
        self.flush(None, FlushReason.STOP)
        self.lose(self._held.copy())

    def _close(self, bulks: TypeBulks, reason: FlushReason) -> None:
        """Queue the bulk being filled, if there is one."""
        if not bulks.filling:
            return
        bulk = Bulk(secrets.randbits(63), bulks.type, tuple(bulks.filling), reason)
        bulks.filling, bulks.bytes = [], 0
        bulks.waiting.append(bulk)
        if len(bulks.waiting) > bulks.options.queue_bulks and bulks.options.when_full == "spill":
            self._spill(bulk)

    def _spill_waiting(self) -> None:
        """Drop bodies of waiting bulks of types that spill, last bulks first, until there is room."""
        for bulks in self._types.values():
            if bulks.options.when_full != "spill":
                continue
            for bulk in reversed(bulks.waiting):
                if self.held_bytes < self.bytes_max:
                    return
                self._spill(bulk)

    def _spill(self, bulk: Bulk) -> None:
        for message in bulk.messages:
            message._note(body=None)
            self._hold(message)

    # --- bulks consumed -----------------------------------------------------------------------------------------------

    def take(self, type: str) -> Bulk | None:  # noqa: A002
        bulks = self._types[type]
        if not bulks.waiting or bulks.running >= bulks.options.workers:
            return None
        bulks.running += 1
        return bulks.waiting.popleft()

    def loaded(self, bulk: Bulk) -> None:
        """Count the bodies that a worker has read for a bulk."""
        for message in bulk.messages:
            self._hold(message)

    def settle(self, bulk: Bulk, results: Sequence[Result], now: float) -> None:
        """Finish a bulk: hold the messages to retry until they are due, and release all others."""
        bulks = self._types[bulk.type]
        bulks.running -= 1
        retried = () if self.is_stopping else results
        retries = {each.place: each.retry_in_s or 0.0 for each in retried if each.status is OutcomeStatus.COLLECTED}
        for message in bulk.messages:
            if message.place in retries:
                bulks.retry_at(message, now + retries[message.place])
        self._release(message for message in bulk.messages if message.place not in retries)

    def cancel(self, messages: Iterable[Collected]) -> None:
        """Release admitted messages that could not be stored or need not be consumed here."""
        for message in messages:
            self._types[message.type].expect(message, -1)
            self._unstored.discard(message.place)
            self._release([message])

    def lose(self, places: Collection[MessageId]) -> None:
        """Release messages that this member no longer owns. Those in bulks are released when their bulk is settled."""
        for bulks in self._types.values():
            self._release(bulks.drop_retries(places))
        self.flush()

    def _release(self, messages: Iterable[Collected]) -> None:
        for message in messages:
            self.held_bytes -= self._held.pop(message.place, 0)

    # --- state --------------------------------------------------------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        return all(not (bulks.filling or bulks.waiting or bulks.running) for bulks in self._types.values())

    @property
    def is_running(self) -> bool:
        return any(bulks.running for bulks in self._types.values())

    @property
    def held(self) -> Collection[MessageId]:
        """The places of messages taken and not settled. Lookups are thread-safe."""
        return self._held

    def is_unstored(self, message: Collected) -> bool:
        """Whether a message taken at this place is being stored, which may fail."""
        return message.place in self._unstored

    def held_of(self, stream: str) -> list[MessageId]:
        return [place for place in self._held if place.stream == stream]

    def waiting_bulks(self, type: str) -> int:  # noqa: A002
        return len(self._types[type].waiting)


@dataclass(slots=True, eq=False)
class Lot:
    """Messages to store in one transaction, and the move of their stream's position (None: from `collect`)."""

    messages: list[Collected] = field(default_factory=list)
    advance: Advance | None = None

    def take(self, core: Core, messages: Sequence[Collected], from_offset: int) -> int:
        """Take messages of a stream in order until one must wait; return how many were taken or passed over."""
        taken = passed_over = 0
        for message in messages:
            # The position must not move over a message of `collect` before that is stored.
            if core.is_unstored(message) or (verdict := core.admit(message)) in (Verdict.WAIT, Verdict.REFUSED):
                break
            taken += 1
            if verdict is Verdict.TAKEN:
                self.messages.append(message)
            passed_over += verdict is Verdict.NO_EXECUTOR
        if taken:
            last = messages[taken - 1].message
            self.advance = Advance(last.stream, from_offset, last.offset + 1, position_of(last), passed_over)
        return taken
