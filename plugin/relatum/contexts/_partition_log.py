"""What a serial consumer does with each message of a partition. Only the order of the log decides; no input or output.

By two rules, all consumers of a partition come to the same verdicts:

- Each context has a **floor**: the highest epoch of its fences and markers in this partition so far. Messages with an
  earlier epoch are strays: a router that did not know of the move published them after the fence. They are skipped
  here, and valid where their publisher adopts them. So a publisher that was suspended cannot break the order.
- Messages after a marker are **held** until the source is consumed up to the fence, and holds none of these contexts'
  messages. Other contexts are not affected.

Repeated or late fences and markers have an epoch that is not above the floor, and change nothing. So a mover may write
them again without asking whether another mover has.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from itertools import takewhile
from typing import Any, NamedTuple

from relatum.contexts._entries import Adoption, Data, Entry, Fence, Marker


class Verdict(Enum):
    """What to do with an entry."""

    DELIVER = "deliver"
    """Deliver it to the application; for an adoption, the message it names."""
    HOLD = "hold"
    """Keep it: it was added to a hold, and is delivered when the hold is released."""
    STRAY = "stray"
    """Skip it: it follows the fence of its context."""
    CONTROL = "control"
    """Skip it: it is not an application's message."""


@dataclass(slots=True)
class Hold:
    """Contexts that wait in a partition until earlier messages in another one, their source, are consumed."""

    move_id: int
    epoch: int
    contexts: frozenset[str]
    source: str
    fence_offset: int
    """The source must be consumed past this offset."""
    marker_offset: int
    cursor: int
    """Entries before this offset have been delivered."""
    held: dict[int, Data | Adoption] = field(default_factory=dict)
    """The held entries by offset, ascending."""


class PartitionLog:
    """The verdicts on one partition's messages, in the order of their offsets.

    It begins with the floors at the offset where reading begins. Entries below the position were handled before; of
    them, only those still in open holds (by their cursors) are delivered.
    """

    def __init__(
        self,
        floors: Mapping[str, int] | None = None,
        *,
        open_holds: Mapping[int, int] | None = None,
        position: int = 0,
    ) -> None:
        self.floors: dict[str, int] = dict(floors or {})
        self.holds: dict[int, Hold] = {}
        """The open holds, by move, in the order of their markers."""
        self._open = dict(open_holds or {})
        self._position = position
        self._next = 0
        self._held_in: dict[str, Hold] = {}

    @property
    def is_plain(self) -> bool:
        """Whether only control messages need judging, since no context ever moved here."""
        return not self.floors and self.is_caught_up

    @property
    def is_caught_up(self) -> bool:
        """Whether everything below the position was judged again. Before that, holds are incomplete."""
        return self._next >= self._position

    def judge(self, offset: int, entry: Entry) -> Verdict | None:
        """Judge the entry at an offset; None if it was handled before. Offsets ascend from call to call."""
        self._next = offset + 1
        if isinstance(entry, Fence):
            self._raise_floors(entry.contexts, entry.epoch)
            return Verdict.CONTROL
        if isinstance(entry, Marker):
            self._begin(offset, entry)
            return Verdict.CONTROL
        if self._is_stray(entry):
            return Verdict.STRAY
        hold = None if entry.context is None else self._held_in.get(entry.context)
        if hold is None:
            return Verdict.DELIVER if offset >= self._position else None
        if offset < hold.cursor:
            return None
        hold.held[offset] = entry
        return Verdict.HOLD

    def lost_to(self, offset: int) -> None:
        """Skip to an offset, since earlier entries no longer exist."""
        self._next = max(self._next, offset)

    def delivered(self, move_id: int, offset: int) -> None:
        """Note that a held entry, and all held before it, were delivered."""
        hold = self.holds[move_id]
        hold.cursor = offset + 1
        for at in list(takewhile(lambda at: at <= offset, hold.held)):
            del hold.held[at]

    def end(self, move_id: int) -> None:
        """End a hold whose entries were all read again and delivered."""
        hold = self.holds[move_id]
        if not self.is_caught_up:
            raise ValueError(
                f"entries below {self._position} may be of move {move_id}, and are read up to {self._next}"
            )
        if hold.held:
            raise ValueError(f"the hold of move {move_id} has {len(hold.held)} entries that are not delivered")
        del self.holds[move_id]
        for context in hold.contexts:
            if self._held_in.get(context) is hold:
                del self._held_in[context]

    def _is_stray(self, entry: Data | Adoption) -> bool:
        if isinstance(entry, Adoption):
            return entry.epoch < self.floors.get(entry.context, 0)
        if entry.context is None or entry.placed is None:
            # Messages without a router have no promised order, and are not skipped.
            return False
        return entry.placed.epoch < self.floors.get(entry.context, 0)

    def _raise_floors(self, contexts: Collection[str], epoch: int) -> frozenset[str]:
        """Raise floors to the epoch; return the contexts whose floor was lower."""
        raised = frozenset(context for context in contexts if self.floors.get(context, 0) < epoch)
        for context in raised:
            self.floors[context] = epoch
        return raised

    def _begin(self, offset: int, marker: Marker) -> None:
        raised = self._raise_floors(marker.contexts, marker.epoch)
        if marker.move_id in self.holds:
            # A move has one hold in a partition: a second marker is a repetition, or not ours.
            return
        for context in raised:
            # A hold that has ended took its contexts out of earlier ones, which may still be open.
            self._held_in.pop(context, None)
        cursor = offset + 1
        if offset < self._position:
            if marker.move_id not in self._open:
                return
            cursor = max(cursor, self._open[marker.move_id])
        if not raised:
            return
        hold = Hold(marker.move_id, marker.epoch, raised, marker.source, marker.fence_offset, offset, cursor)
        self.holds[marker.move_id] = hold
        for context in raised:
            self._held_in[context] = hold


class MovedBefore(NamedTuple):
    """A move, for a consumer that begins in the middle of the log."""

    source: Any
    target: Any
    fence_offset: int | None
    begins: int
    """The offset of its marker in the target, or an earlier offset."""


def consistent_starts(starts: Mapping[Any, int], moves: Iterable[MovedBefore]) -> dict[Any, int]:
    """Return the offsets to begin at, so that each context's messages arrive in order.

    The ends of several partitions are read one after the other. So one partition may begin after a marker while another
    begins before its fence: it then begins at the marker, and holds the messages after it. A consumer that begins so
    gets some earlier messages, and misses none.

    The starts must be read before the moves, which are all of the super stream. A move without a known fence has no
    marker yet, and does not matter.
    """
    consistent = dict(starts)
    known = [move for move in moves if move.fence_offset is not None]
    goes_on = True
    while goes_on:
        goes_on = False
        for move in known:
            source, target = consistent.get(move.source), consistent.get(move.target)
            if source is None or target is None or move.fence_offset is None:
                continue
            if source <= move.fence_offset and move.begins < target:
                consistent[move.target], goes_on = move.begins, True
    return consistent
