"""Decides which messages of a partition are valid, held or strays, from their order alone. No I/O.

docs/contexts-protocol.md defines fences, markers, adoptions, floors, strays and holds. Fences, markers and adoptions
have their fields as JSON in the body, so that an application's keys do not match them in headers.

Repeated or late fences and markers have an epoch that is not above the floor, and change nothing. So a mover may
publish them without checking whether another mover has done so.
"""

import json
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from itertools import takewhile
from typing import Any, Final, NamedTuple, Self, TypeAlias

from relatum.common.headers import CONTROL_HEADER, PLACED_HEADER
from relatum.common.limits import INTEGER_MAX
from relatum.reading import Message

CONTROL_BYTES: Final = CONTROL_HEADER.encode()
"""Bytes that every control message contains, and few other messages do."""

CONTENT_TYPE: Final = "application/json"
"""The property `content_type` of control messages."""

_TEXTS: Final = frozenset({"source", "stream", "context"})
"""The text fields of control messages."""

# At most as many digits as a bigint has: Python refuses to parse very long numbers.
_PLACED: Final = re.compile(r"([0-9]{1,19})-([^-]+)-([0-9]{1,19})")


class Placed(NamedTuple):
    """The header `relatum_placed`: `<epoch>-<session>-<number>`."""

    epoch: int
    """The placement's epoch. Later placements of a context have higher epochs."""
    session: str
    """The router's id, 16 hexadecimal digits; each opened router gets a new one."""
    number: int
    """Rises with each message that the router publishes."""

    @classmethod
    def parse(cls, text: object) -> Self | None:
        match = _PLACED.fullmatch(text) if isinstance(text, str) else None
        return None if match is None else cls(int(match[1]), match[2], int(match[3]))

    def __str__(self) -> str:
        return f"{self.epoch}-{self.session}-{self.number}"


@dataclass(frozen=True, slots=True)
class Fence:
    """Ends contexts in a partition: after it, their messages with an earlier epoch are strays."""

    move_id: int
    epoch: int
    contexts: frozenset[str]


@dataclass(frozen=True, slots=True)
class Marker:
    """The start of contexts in a partition, under a new epoch.

    The contexts come from `source`, which has the move's fence at `fence_offset`. If the move was aborted, `source` is
    the marker's own partition.
    """

    move_id: int
    epoch: int
    contexts: frozenset[str]
    source: str
    fence_offset: int


@dataclass(frozen=True, slots=True)
class Adoption:
    """Makes a stray, at `stream` and `offset`, valid at the position of this message, with this epoch."""

    context: str
    epoch: int
    stream: str
    offset: int


@dataclass(frozen=True, slots=True)
class Data:
    """An application's message. `context`: None without one. `placed`: None if no router placed the message."""

    context: str | None
    placed: Placed | None


NO_ENTRY: Final = Data(None, None)
"""The entry of a message to which no order applies."""

Control: TypeAlias = Fence | Marker | Adoption
Entry: TypeAlias = Control | Data

_KINDS: Final = {"fence": Fence, "marker": Marker, "adoption": Adoption}
_NAMES: Final = {kind: name for name, kind in _KINDS.items()}


def encode(control: Control) -> tuple[dict[str, Any], bytes]:
    fields = {name: getattr(control, name) for name in control.__slots__}
    if not isinstance(control, Adoption):
        fields["contexts"] = sorted(control.contexts)
    return {CONTROL_HEADER: _NAMES[type(control)]}, json.dumps(fields, ensure_ascii=False).encode()


def decode(kind: object, body: bytes) -> Control | None:
    """Return a control message; None: it is an application's message."""
    cls = _KINDS.get(kind) if isinstance(kind, str) else None
    if cls is None:
        return None
    try:
        fields = json.loads(body)
        if "contexts" in fields:
            fields["contexts"] = frozenset(fields["contexts"])
        control: Control = cls(**fields)
    except (ValueError, TypeError, RecursionError):
        return None
    # Any publisher may send such a message: treat values that the database cannot store as an application's.
    return control if all(_is_storable(name, getattr(control, name)) for name in control.__slots__) else None


def entry_of(message: Message, context_header: str) -> Entry:
    """Return the entry of a message; `context_header` names contexts in this super stream."""
    headers = message.headers
    kind = headers.get(CONTROL_HEADER)
    if kind is not None and (control := decode(kind, message.body)) is not None:
        return control
    context = headers.get(context_header)
    return Data(context if isinstance(context, str) else None, Placed.parse(headers.get(PLACED_HEADER)))


def _is_storable(name: str, value: object) -> bool:
    if name == "contexts":
        return isinstance(value, frozenset) and all(map(_is_text, value))
    if name in _TEXTS:
        return _is_text(value)
    return type(value) is int and 0 <= value <= INTEGER_MAX


def _is_text(value: object) -> bool:
    try:
        return isinstance(value, str) and b"\0" not in value.encode()
    except UnicodeEncodeError:
        return False


class Verdict(Enum):
    DELIVER = "deliver"
    """Deliver the message to the application; for an adoption, the message that it names."""
    HOLD = "hold"
    """Keep the message: it was added to a hold, and is delivered when the hold is released."""
    STRAY = "stray"
    """Skip the message: it is behind the fence of its context."""
    CONTROL = "control"
    """Skip the message: it is not an application's."""


@dataclass(slots=True)
class Hold:
    """Contexts that wait in a partition until their earlier messages in the source are consumed."""

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

    `floors`: the floors at the offset where reading begins. `open_holds`: the cursors of open holds, by move. Entries
    below the position were handled before: the log delivers them only if open holds still have them.
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
        """Whether only control messages need judging, because no context has ever moved from or to the partition."""
        return not self.floors and self.is_caught_up

    @property
    def is_caught_up(self) -> bool:
        """Whether all entries below the position were judged again. Before that, holds are incomplete."""
        return self._next >= self._position

    def judge(self, offset: int, entry: Entry) -> Verdict | None:
        """Return the verdict on the entry at an offset; None: it was handled before. Offsets rise from call to call."""
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
        self._next = max(self._next, offset)

    def delivered(self, move_id: int, offset: int) -> None:
        """Drop a delivered entry, and all entries held before it, from a hold."""
        hold = self.holds[move_id]
        hold.cursor = offset + 1
        for at in list(takewhile(lambda at: at <= offset, hold.held)):
            del hold.held[at]

    def end(self, move_id: int) -> None:
        """End a hold. All its entries must have been read again and delivered."""
        hold = self.holds[move_id]
        if not self.is_caught_up:
            raise ValueError(
                f"entries below {self._position} may belong to move {move_id}, but reading is at {self._next}"
            )
        if hold.held:
            raise ValueError(f"the hold of move {move_id} has {len(hold.held)} undelivered entries")
        del self.holds[move_id]
        for context in hold.contexts:
            if self._held_in.get(context) is hold:
                del self._held_in[context]

    def _is_stray(self, entry: Data | Adoption) -> bool:
        if isinstance(entry, Adoption):
            return entry.epoch < self.floors.get(entry.context, 0)
        if entry.context is None or entry.placed is None:
            # The order of messages that no router published is not guaranteed: none is a stray.
            return False
        return entry.placed.epoch < self.floors.get(entry.context, 0)

    def _raise_floors(self, contexts: Collection[str], epoch: int) -> frozenset[str]:
        """Raise floors to the epoch; return the contexts whose floor was lower."""
        raised = frozenset(context for context in contexts if self.floors.get(context, 0) < epoch)
        self.floors.update(dict.fromkeys(raised, epoch))
        return raised

    def _begin(self, offset: int, marker: Marker) -> None:
        raised = self._raise_floors(marker.contexts, marker.epoch)
        if marker.move_id in self.holds:
            # A move has one hold in a partition: a second marker is a repetition, or not Relatum's.
            return
        for context in raised:
            # This marker's hold, even if it has ended, took the context from earlier holds, which may still be open.
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
        self._held_in.update(dict.fromkeys(raised, hold))


class MovedBefore(NamedTuple):
    """The properties of a move that `consistent_starts` needs."""

    source: Any
    target: Any
    fence_offset: int | None
    begins: int
    """The offset of the move's marker in the target, or an earlier offset."""


def consistent_starts(starts: Mapping[Any, int], moves: Iterable[MovedBefore]) -> dict[Any, int]:
    """Return start offsets from which a consumer gets each context's messages in order.

    A consumer reads the ends of partitions one after the other, so one may start behind a marker while the source
    starts before the fence. Such a start moves back to the marker. Read the starts before the moves, and pass all moves
    of the super stream; those without a known fence have no marker yet.
    """
    consistent, moves = dict(starts), list(moves)
    has_changed = True
    while has_changed:
        has_changed = False
        for move in moves:
            source, target = consistent.get(move.source), consistent.get(move.target)
            if source is None or target is None or move.fence_offset is None:
                continue
            if source <= move.fence_offset and move.begins < target:
                consistent[move.target], has_changed = move.begins, True
    return consistent
