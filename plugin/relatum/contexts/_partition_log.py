"""The meaning of a partition's messages for the order of serialization contexts. Only their order decides; no I/O.

Most messages are the application's. A router publishes them under a placement, named in the header `relatum_placed`.
Moves of contexts add three kinds of control messages:

- a `Fence` in the source: after it, messages with an earlier epoch are invalid (strays);
- a `Marker` in the target: messages of its epoch are held until the source is consumed up to the fence;
- an `Adoption` in the context's present partition: it replaces a stray.

Their fields are JSON in the body, so that no key of an application finds them in headers.

By two rules, all consumers of a partition come to the same verdicts:

- Each context has a **floor**: the highest epoch of its fences and markers in this partition so far. Messages with an
  earlier epoch are strays: a router that did not know of the move published them after the fence. They are skipped
  here, and valid where their publisher adopts them. So a publisher that was suspended cannot break the order.
- Messages after a marker are **held** until the source is consumed up to the fence and itself holds no message of
  these contexts. Other contexts are not affected.

Repeated or late fences and markers have an epoch that is not above the floor, and change nothing. So a mover may write
them again without asking whether another mover has.
"""

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from itertools import takewhile
from typing import Any, Final, NamedTuple, Self, TypeAlias

from relatum.common.headers import CONTROL_HEADER, PLACED_HEADER
from relatum.common.limits import INTEGER_MAX
from relatum.errors import UndecodableMessage
from relatum.reading import Message, header_value
from relatum.wire import amqp10

CONTROL_BYTES: Final = CONTROL_HEADER.encode()
"""Bytes that every control message contains, and few others."""

CONTENT_TYPE: Final = "application/json"
"""The property `content_type` of control messages."""

_TEXTS: Final = frozenset({"source", "stream", "context"})
"""The text fields of control messages."""

_DIGITS_MAX: Final = len(str(INTEGER_MAX))


class Placed(NamedTuple):
    """The header `relatum_placed`: `<epoch>-<session>-<number>`."""

    epoch: int
    """The placement's epoch. Later placements of a context have higher epochs."""
    session: str
    """The router's id, 16 hexadecimal digits; each opened router has a new one."""
    number: int
    """Ascends in the router's order of publishing."""

    @classmethod
    def parse(cls, text: object) -> Self | None:
        if not isinstance(text, str):
            return None
        epoch, _, rest = text.partition("-")
        session, _, number = rest.partition("-")
        if not (session and _is_number(epoch) and _is_number(number)):
            return None
        return cls(int(epoch), session, int(number))

    def __str__(self) -> str:
        return f"{self.epoch}-{self.session}-{self.number}"


@dataclass(frozen=True, slots=True)
class Fence:
    """The end of contexts in a partition: after it, messages with an earlier epoch are strays."""

    move_id: int
    epoch: int
    contexts: frozenset[str]


@dataclass(frozen=True, slots=True)
class Marker:
    """The beginning of contexts in a partition, with an epoch.

    The contexts come from `source`, where the move's fence is at `fence_offset`. If the move was aborted, `source` is
    this partition.
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
    """An application's message with its context, if any; `placed` is None if no router published it."""

    context: str | None
    placed: Placed | None


Control: TypeAlias = Fence | Marker | Adoption
Entry: TypeAlias = Control | Data

_KINDS: Final = {"fence": Fence, "marker": Marker, "adoption": Adoption}
_NAMES: Final = {kind: name for name, kind in _KINDS.items()}


def encode(control: Control) -> tuple[dict[str, Any], bytes]:
    facts = {name: getattr(control, name) for name in control.__slots__}
    if not isinstance(control, Adoption):
        facts["contexts"] = sorted(control.contexts)
    return {CONTROL_HEADER: _NAMES[type(control)]}, json.dumps(facts, ensure_ascii=False).encode()


def decode(kind: object, body: bytes) -> Control | None:
    """Parse a control message; None if it is an application's message."""
    cls = _KINDS.get(kind) if isinstance(kind, str) else None
    if cls is None:
        return None
    try:
        facts = json.loads(body)
        if "contexts" in facts:
            facts["contexts"] = frozenset(facts["contexts"])
        control: Control = cls(**facts)
    except (ValueError, TypeError, RecursionError):
        return None
    # Any publisher may send anything: refuse values that the database cannot store.
    return control if all(_is_fact(name, getattr(control, name)) for name in control.__slots__) else None


def entry_of(headers: Mapping[str, Any], body: bytes, context_header: str) -> Entry:
    """Return the entry of a message; `context_header` names contexts in this super stream."""
    kind = headers.get(CONTROL_HEADER)
    if kind is not None and (control := decode(kind, body)) is not None:
        return control
    context = headers.get(context_header)
    return Data(context if isinstance(context, str) else None, Placed.parse(headers.get(PLACED_HEADER)))


class EntryReader:
    """Returns the entries of messages, and decodes only what they need."""

    def __init__(self, header: str) -> None:
        self._header = header
        self._wanted = {header.encode(): 0, PLACED_HEADER.encode(): 1}
        # Since RabbitMQ 3.13, `x-` headers are in another section.
        self._is_plain = not header.startswith("x-")

    def __call__(self, message: Message) -> Entry:
        raw = message.raw
        if raw is None or not self._is_plain or CONTROL_BYTES in raw:
            return entry_of(message.headers, message.body, self._header)
        found: list[object] = [None, None]
        try:
            for code, start, _ in amqp10.find_sections(raw):
                if code == amqp10.APPLICATION_PROPERTIES:
                    amqp10.pick(raw, start, self._wanted, found)
        except UndecodableMessage:
            found = [None, None]
        context = header_value(found[0])
        return Data(context if isinstance(context, str) else None, Placed.parse(header_value(found[1])))


def _is_fact(name: str, value: object) -> bool:
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


def _is_number(text: str) -> bool:
    # The number of digits is limited: Python refuses to parse very long numbers.
    return text.isascii() and text.isdecimal() and len(text) <= _DIGITS_MAX


class Verdict(Enum):
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

    It begins with the floors at the offset where reading begins. Entries below the position were handled before; the
    log delivers them only if they are still in open holds (by their cursors).
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
        self._next = max(self._next, offset)

    def delivered(self, move_id: int, offset: int) -> None:
        """Note that a held entry, and all entries held before it, were delivered."""
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

    The starts must be read before the moves; all moves of the super stream are needed. A move without a known fence has
    no marker yet, and does not matter.
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
