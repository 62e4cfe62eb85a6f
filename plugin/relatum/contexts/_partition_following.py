"""A partition that a serial consumer reads: judges messages and gathers them into steps. No I/O.

One commit covers a step: messages for the application, and the position and the holds after them. While a step is being
committed, the next one is gathered. Memory is ahead of the database: a member that loses the partition, or does not
know the outcome of a commit, drops this state and starts again from the stored state.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from typing import Final
from uuid import UUID

from relatum.contexts._context_options import SerialOptions
from relatum.contexts._partition_log import (
    CONTROL_BYTES,
    NO_ENTRY,
    Adoption,
    Entry,
    Hold,
    Marker,
    PartitionLog,
    Verdict,
    entry_of,
)
from relatum.reading import Message, Position, RecordBatch

LAZY_S: Final = 0.5
"""Seconds until a position is stored that passed only held messages and strays. Only `status` shows the delay."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive records of a partition. Their messages are created in the thread that uses them, not in the loop."""

    batch: RecordBatch
    bytes: int
    may_control: bool
    adopted: Mapping[int, Message | None] = field(default_factory=dict)
    """Adopted messages, by the offsets of their adoptions; None: the message no longer exists."""
    foreign: Collection[int] = ()
    """The offsets of control messages that name no partition of this super stream: copies from another one."""

    @classmethod
    def plain(cls, batch: RecordBatch) -> "Piece | None":
        """Return a batch without control messages as a piece; None: the batch may have some."""
        # One search in the joined records is faster than one in each record.
        joined = b"".join(batch.records)
        return None if CONTROL_BYTES in joined else cls(batch, len(joined), may_control=False)

    @classmethod
    def of(
        cls,
        batch: RecordBatch,
        read: Callable[[Adoption], Message | None],
        is_partition: Callable[[str], bool] = lambda stream: True,
    ) -> "Piece":
        adopted: dict[int, Message | None] = {}
        foreign: set[int] = set()
        for message in batch.each_message():
            if message.raw is not None and CONTROL_BYTES not in message.raw:
                continue
            entry = entry_of(message, "")
            named = entry.source if isinstance(entry, Marker) else None
            if isinstance(entry, Adoption):
                named = entry.stream
            if named is not None and not is_partition(named):
                foreign.add(message.offset)
            elif isinstance(entry, Adoption):
                adopted[message.offset] = read(entry)
        return cls(batch, sum(map(len, batch.records)), True, adopted, foreign)

    def __len__(self) -> int:
        return len(self.batch)

    def message(self, at: int) -> Message:
        batch = self.batch
        return Message.from_record(batch.stream, batch.offsets[at], batch.records[at], batch.chunk_ms)

    def cut(self, start: int, end: int) -> RecordBatch:
        batch, offsets = self.batch, self.batch.offsets[start:end]
        return replace(batch, first_offset=offsets[0], offsets=offsets, records=batch.records[start:end])


@dataclass(slots=True)
class Step:
    """The content of one commit: messages, and the position and open holds after them."""

    position: int
    count: int = 0
    bytes: int = 0
    last: Message | None = None
    """The last message read, which may be a control message."""
    begun: list[Hold] = field(default_factory=list)
    holds: tuple[tuple[int, int, int], ...] = ()
    """For each open hold: its move, its cursor (messages before it are delivered), and its number of messages."""
    ended: list[int] = field(default_factory=list)
    is_closed: bool = False
    since: float | None = None
    """When the step's first record was judged."""
    _runs: list[RecordBatch | list[Message]] = field(default_factory=list)

    def add(self, messages: RecordBatch | list[Message], bytes_: int) -> None:
        self._runs.append(messages)
        self.count += len(messages)
        self.bytes += bytes_

    def close(self, now: float) -> None:
        """Commit the step without waiting for more messages, because another partition waits for it."""
        self.is_closed = True
        self.since = now if self.since is None else self.since

    @property
    def messages(self) -> list[Message]:
        runs = (run if isinstance(run, list) else run.each_message() for run in self._runs)
        return list(chain.from_iterable(runs))


@dataclass(frozen=True, slots=True)
class Opened:
    position: int
    version: int
    known_by: Position | None
    """The message at the last offset read, or None."""
    holds: Mapping[int, int]
    """The cursors of open holds, by move."""
    since: Mapping[int, float]
    """Seconds that each hold has been open, by move."""
    floors: Mapping[str, int]
    """The contexts' floors at `read_from`."""
    read_from: int
    """The offset to resume reading at: held messages are below the position."""


class Following:
    """One open partition of this member. Not thread-safe, except `in_doubt`, which the committing thread uses."""

    def __init__(
        self, partition_id: int, stream: str, opened: Opened, *, header: str, options: SerialOptions, now: float
    ) -> None:
        self.partition_id = partition_id
        self.stream = stream
        self.log = PartitionLog(opened.floors, open_holds=opened.holds, position=opened.position)
        self.version = opened.version
        self.position = self._opened_at = opened.position
        self.has_read = False
        self.outstanding: Step | None = None
        self.is_leaving = False
        self.is_over = False
        self.in_doubt: UUID | None = None
        self.stored_holds: set[int] = set(opened.since)
        self._unread_holds: set[int] = set(opened.since)
        self._begun_at = {move_id: now - open_s for move_id, open_s in opened.since.items()}
        self._header = header
        self._options = options
        self._step = Step(opened.position)
        self._returned: Step | None = None
        self._pieces: deque[Piece] = deque()
        self._at = 0
        self._waiting_messages = self._waiting_bytes = 0
        self._held: dict[int, Message] = {}
        self._held_bytes = 0
        self._released: list[int] = []

    @property
    def held(self) -> tuple[int, int]:
        return len(self._held), self._held_bytes

    @property
    def has_room(self) -> bool:
        options = self._options
        return self._waiting_messages < 2 * options.batch_messages and self._waiting_bytes < options.batch_bytes

    def put(self, piece: Piece, now: float) -> None:
        self._pieces.append(piece)
        self._waiting_messages += len(piece)
        self._waiting_bytes += piece.bytes
        self.has_read = True
        self.gather(now)

    def lost_to(self, offset: int, now: float) -> None:
        """Skip to an offset: retention has dropped the messages before it."""
        self.log.lost_to(offset)
        if offset > self._step.position:
            self._step.position = offset
            self._step.close(now)
        self._end_lost_holds(now)

    def gather(self, now: float) -> None:
        """Judge messages until the step is full or no message is left."""
        self._gather_released(now)
        while self._pieces and not self._is_full and not self.is_blocked:
            piece = self._pieces[0]
            if self._step.since is None:
                self._step.since = now
            if self.log.is_plain and not piece.may_control:
                self._gather_plain(piece)
            else:
                self._gather_judged(piece, now)
            if self._at == len(piece):
                self._pieces.popleft()
                self._at = 0
                self._waiting_messages -= len(piece)
                self._waiting_bytes -= piece.bytes
        self._end_lost_holds(now)

    def _end_lost_holds(self, now: float) -> None:
        """End stored holds whose marker retention dropped, and the database lacks, as that of an aborted move."""
        if not self._unread_holds or not self.log.is_caught_up:
            return
        lost = self._unread_holds - self.log.holds.keys()
        self._unread_holds = set()
        if lost:
            self._step.ended += sorted(lost)
            self._step.close(now)

    @property
    def is_blocked(self) -> bool:
        """Whether the limit of held messages is reached. Messages held by an earlier member do not count."""
        options = self._options
        is_too_much = len(self._held) >= options.held_messages_max or self._held_bytes >= options.held_bytes_max
        return is_too_much and self.log.is_caught_up

    @property
    def _is_full(self) -> bool:
        step, options = self._step, self._options
        return step.is_closed or step.count >= options.batch_messages or step.bytes >= options.batch_bytes

    def _room(self, message_bytes: int) -> int:
        """How many more messages of this size fit into the step, at least one."""
        step, options = self._step, self._options
        room = options.batch_messages - step.count
        return max(1, min(room, (options.batch_bytes - step.bytes) // message_bytes)) if message_bytes else room

    def _gather_plain(self, piece: Piece) -> None:
        """Add messages that need no judging: no control message, and no moved context."""
        step, message_bytes, offsets = self._step, piece.bytes // len(piece), piece.batch.offsets
        end = min(len(piece), self._at + self._room(message_bytes))
        start = bisect_left(offsets, self._opened_at, self._at, end)
        self._at = end
        step.last = piece.message(end - 1)
        if start < end:
            step.add(piece.cut(start, end), message_bytes * (end - start))
        step.position = max(step.position, step.last.offset + 1)

    def _gather_judged(self, piece: Piece, now: float) -> None:
        step, message_bytes = self._step, piece.bytes // len(piece)
        while self._at < len(piece) and not self._is_full and not self.is_blocked:
            message = piece.message(self._at)
            self._at += 1
            step.last = message
            step.position = max(step.position, message.offset + 1)
            if message.offset in piece.foreign:
                self.log.lost_to(message.offset + 1)
                continue
            # Only messages of contexts that a fence or marker named can be strays or held.
            context = message.headers.get(self._header)
            has_order = piece.may_control or (isinstance(context, str) and context in self.log.floors)
            entry = entry_of(message, self._header) if has_order else NO_ENTRY
            verdict = self.log.judge(message.offset, entry)
            wanted = piece.adopted.get(message.offset) if isinstance(entry, Adoption) else message
            if verdict is Verdict.CONTROL:
                self._note_control(message.offset, entry, now)
            elif verdict is Verdict.DELIVER and wanted is not None:
                step.add([wanted], message_bytes)
            elif verdict is Verdict.HOLD and wanted is not None:
                self._held[message.offset] = wanted
                self._held_bytes += message_bytes

    def _note_control(self, offset: int, entry: Entry, now: float) -> None:
        """Close the step after a fence or marker: holds in this or other partitions wait for its commit."""
        if offset < self._opened_at:
            return
        # Not `close`: a replayed control message is committed with the next messages.
        self._step.is_closed = True
        hold = self.log.holds.get(entry.move_id) if isinstance(entry, Marker) else None
        if hold is not None and hold.marker_offset == offset:
            self._step.begun.append(hold)
            self._begun_at[hold.move_id] = now

    def replay(self, offset: int, entry: Entry, now: float) -> None:
        """Judge a fence or marker that retention has dropped; it comes from the database."""
        self.log.judge(offset, entry)
        self._note_control(offset, entry, now)

    def waiting_holds(self) -> list[int]:
        """Return the moves of stored holds that wait for their source; none before held messages were read again."""
        if not self.log.is_caught_up:
            return []
        return [move_id for move_id in self.log.holds if move_id in self.stored_holds and move_id not in self._released]

    def youngest_wait_s(self, now: float) -> float:
        return min((now - self._begun_at.get(move_id, now) for move_id in self.waiting_holds()), default=0.0)

    def release(self, move_id: int, now: float) -> None:
        if move_id in self.waiting_holds():
            self._released.append(move_id)
            self.gather(now)

    def _gather_released(self, now: float) -> None:
        step = self._step
        for move_id in list(self._released):
            if self._is_full:
                return
            hold = self.log.holds[move_id]
            # Holds in other partitions may wait for the end of this hold, whose own messages are due.
            step.close(now)
            message_bytes = self._held_bytes // max(1, len(self._held))
            offsets = list(islice(hold.held, self._room(message_bytes)))
            if offsets:
                messages = [self._held.pop(offset) for offset in offsets if offset in self._held]
                step.add(messages, message_bytes * len(messages))
                self._held_bytes = self._held_bytes - message_bytes * len(messages) if self._held else 0
                self.log.delivered(move_id, offsets[-1])
            if hold.held:
                return
            self._released.remove(move_id)
            self.log.end(move_id)
            step.ended.append(move_id)

    def due_at(self) -> float | None:
        """Return when the next batch can be handed out; None: more must be read, or the last batch is still out."""
        if self.outstanding is not None or self.is_over or self.is_leaving:
            return None
        if self._returned is not None:
            return 0.0
        step = self._step
        if step.since is None or not step.count:
            return None
        return 0.0 if self._is_full or self.is_blocked else step.since + self._options.batch_s

    def silent_due_at(self) -> float | None:
        """Return when to store a step without messages, or None."""
        step = self._step
        if self.outstanding is not None or self.is_over or self._returned is not None:
            return None
        # A closed step may have only moved a hold's cursor, past adoptions of messages that no longer exist.
        if step.count or step.since is None or not (step.is_closed or step.position > self.position):
            return None
        return 0.0 if step.is_closed else step.since + LAZY_S

    def take(self, now: float) -> Step:
        if self._returned is not None:
            self.outstanding, self._returned = self._returned, None
            return self.outstanding
        step = self._step
        step.holds = tuple((hold.move_id, hold.cursor, len(hold.held)) for hold in self.log.holds.values())
        self.outstanding, self._step = step, Step(step.position)
        self.gather(now)
        return step

    def give_back(self, step: Step) -> None:
        """Take back the step that was handed out last: the next `take` returns it again."""
        if self.outstanding is step and not self.is_over:
            self._returned, self.outstanding = step, None

    def committed(self, step: Step, now: float) -> list[float]:
        """Continue after a step was stored. Returns the age of each hold that the step ended, in seconds."""
        if step is not self.outstanding and step is not self._returned:
            return []  # The step is from before a reopening.
        self.version += 1
        # A cancelled task, for example, may have given the step back while it was being committed.
        self.outstanding = self._returned = None
        self.position = step.position
        self.stored_holds.update(hold.move_id for hold in step.begun)
        self.stored_holds.difference_update(step.ended)
        self.gather(now)
        return [now - self._begun_at.pop(move_id, now) for move_id in step.ended]
