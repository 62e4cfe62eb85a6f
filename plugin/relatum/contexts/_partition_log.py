"""What a serial consumer does with each message of a partition. Pure: the order of the log alone decides.

Two rules, and all consumers of a partition come to the same verdicts by them:

- Each context has a **floor**, the highest epoch that a fence or a marker of it has named in this partition so far.
  What was placed under an earlier epoch is a stray: it was published behind the fence, by a router that did not know of
  the move. It is passed over, and counts where its publisher adopts it. So a publisher that slept cannot break the
  order.
- What follows a marker is **held** until the source is consumed up to the fence, and until nothing of these contexts is
  held there either. All other contexts go on.

Fences and markers that are repeated, or come late, name an epoch that is not above the floor; they change nothing. So
a mover may write them again without asking whether another has.
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
    """Hand it to the application (of an adoption: the message it names)."""
    HOLD = "hold"
    """Keep it: it was added to a hold, and is delivered when that is released."""
    STRAY = "stray"
    """Pass over it: it is behind the fence of its context."""
    CONTROL = "control"
    """Pass over it: it is no application's message."""


@dataclass(slots=True)
class Hold:
    """Contexts that wait in a partition for what is before them in another, their source."""

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
    """What waits, by offset, ascending."""


class PartitionLog:
    """The verdicts on one partition's messages, in the order of their offsets.

    It begins with the floors at the offset where reading begins. What is below the position was dealt with before: of
    that, only what the holds that were open then (with their cursors) still hold is delivered.
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
        """Whether nothing but control messages needs a look: no context was ever moved here."""
        return not self.floors and self.is_caught_up

    @property
    def is_caught_up(self) -> bool:
        """Whether all below the position was judged again. Before, holds do not hold all that they must yet."""
        return self._next >= self._position

    def judge(self, offset: int, entry: Entry) -> Verdict | None:
        """What to do with the entry at an offset; None where that was done before.

        Offsets ascend from call to call.
        """
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
        """Note that what is below an offset is not there any more, and is not to be judged."""
        self._next = max(self._next, offset)

    def delivered(self, move_id: int, offset: int) -> None:
        """Note that a held entry was delivered, and with it all that are held before it."""
        hold = self.holds[move_id]
        hold.cursor = offset + 1
        for at in list(takewhile(lambda at: at <= offset, hold.held)):
            del hold.held[at]

    def end(self, move_id: int) -> None:
        """End a hold whose contexts wait no more, and of which all is read again and delivered."""
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
            # What no router published was promised nothing, and is not passed over either.
            return False
        return entry.placed.epoch < self.floors.get(entry.context, 0)

    def _raise_floors(self, contexts: Collection[str], epoch: int) -> frozenset[str]:
        """Raise floors to the epoch; gives the contexts whose floor was lower."""
        raised = frozenset(context for context in contexts if self.floors.get(context, 0) < epoch)
        for context in raised:
            self.floors[context] = epoch
        return raised

    def _begin(self, offset: int, marker: Marker) -> None:
        raised = self._raise_floors(marker.contexts, marker.epoch)
        if marker.move_id in self.holds:
            # A move has one hold in a partition: a second marker is the same again, or none that we wrote.
            return
        for context in raised:
            # A hold that has ended by now took its contexts out of earlier ones, which may still be open.
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
    """What matters of a move to a consumer that begins in the middle."""

    source: Any
    target: Any
    fence_offset: int | None
    begins: int
    """Where its marker is in the target, or an offset below that."""


def consistent_starts(starts: Mapping[Any, int], moves: Iterable[MovedBefore]) -> dict[Any, int]:
    """Offsets to begin at, from which each context's messages come in order.

    The ends of several partitions, or their messages of one time, are read one after the other. So one may begin behind
    a marker while the other begins before its fence: then it begins at the marker, to hold what is behind it. Those who
    begin so get some messages from before they began, and miss none.

    The starts were read before the moves, which are all of the super stream. A move whose fence is not known has no
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
