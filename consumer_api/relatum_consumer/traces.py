"""The result of a trace: the connected messages, their links, where the trace stopped, and a tree of it. No I/O."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from enum import StrEnum
from operator import attrgetter
from typing import Any, Final, NamedTuple, TypeAlias

from relatum.common.documents import document, field_names
from relatum.common.ids import MessageId
from relatum.reading import Message
from relatum_consumer.lookups.answer import Covered, Status
from relatum_consumer.lookups.proof import Uncovered

_SEVERITY: Final = (
    Status.UNPROVEN,
    Status.NOT_RECORDED_YET,
    Status.FOUND,
    Status.EXPIRED,
    Status.DELETED,
    Status.ABSENT,
)


class Edge(NamedTuple):
    """A link from a cause to its effect: one message names another as its cause.

    Attributes:
        cause: The id of the named message; None if that message is not in the trace.
        effect: The id of the message that names its cause.
        key: The name of the key by which it names the cause.
        value: The value, in canonical form.
    """

    cause: MessageId | None
    effect: MessageId
    key: str
    value: str


class Shared(NamedTuple):
    """A link without a direction: two or more messages share a key's value. Ids are ordered by time, stream, offset."""

    key: str
    value: str
    ids: tuple[MessageId, ...]


class StopReason(StrEnum):
    """The limit that made a trace skip messages or values."""

    FAN_OUT = "fan_out"
    """More than `fan_out` messages have the value, so it was not followed. `count` is a lower bound of their number."""
    TIME = "time"
    """`count` or more messages with the value are before `since`, at or after `until`, or without a known time."""
    LIMIT = "limit"
    """`count` more messages were found but not read."""
    HOPS = "hops"
    """`count` values of the last hop's messages were not followed."""


@dataclass(frozen=True, slots=True)
class Stop:
    """Where a trace stopped.

    Attributes:
        reason: The bound that stopped it.
        count: Number of messages or values that were left out; see `StopReason`.
        key: The key's name if the stop concerns one value, else None.
        value: The value, in canonical form.
    """

    reason: StopReason
    count: int
    key: str | None = None
    value: str | None = None


class Step(NamedTuple):
    """What one hop searched and found.

    Attributes:
        hop: The hop's number, from 1.
        values: The number of values searched.
        found: The number of new messages found.
        status: `found` if there were new messages, or if a value has too many messages to follow. Otherwise, how
            certain the result is: `absent` means that no further message existed when the trace began, not counting the
            keys in `Trace.new_keys`; `unproven` means that a message could not be read (`unread`), or that `complete`
            could not prove the step.
    """

    hop: int
    values: int
    found: int
    status: Status


@dataclass(frozen=True)
class Trace(Covered):
    """The messages connected with a start. Immutable.

    The attributes of `Covered` describe what the trace covers. Unlike in an answer, `new_keys` are listed with any
    status: there may be more messages by these keys. For the other keys, the steps say how certain the result is. A new
    key that was named, or that the trace begins with, makes the status `NOT_RECORDED_YET`. Empty with `complete`.

    Attributes:
        messages: All messages, including the start, ordered by time, stream and offset; each was read and checked.
        hops: The number of hops from the start to each message. It is 0 for the start, and for the start's copies if
            its client provided no stream and offset. A start without a copy in a stream is not included.
        edges: Links from causes to effects, in the order of the messages.
        shared: Values that messages share, in the order of their first messages.
        stopped: What the bounds left out; empty if nothing was left out.
        steps: What each hop searched, and how certain its result is.
        uncovered: Retained offsets that are not recorded for all the keys, by stream; they may hold more messages, at
            any hop. Empty if only `new_keys` are not recorded, and with `complete`, which reads these offsets.
    """

    messages: tuple[Message, ...]
    hops: Mapping[MessageId, int]
    edges: tuple[Edge, ...] = ()
    shared: tuple[Shared, ...] = ()
    stopped: tuple[Stop, ...] = ()
    steps: tuple[Step, ...] = ()
    uncovered: tuple[Uncovered, ...] = field(default=(), kw_only=True)

    @property
    def status(self) -> Status:
        """The worst status of the steps: `unproven` and `not_recorded_yet` mean that there may be more messages.

        `found`: messages were found, and each step is certain, except for `new_keys`. If none was found: `expired`,
        `deleted` or `absent`; never with `new_keys`.
        """
        worst = min((step.status for step in self.steps), key=_SEVERITY.index, default=Status.ABSENT)
        is_open = bool(self.uncovered) or (bool(self.new_keys) and worst is not Status.FOUND)
        return Status.NOT_RECORDED_YET if is_open and worst is not Status.UNPROVEN else worst

    @property
    def explanation(self) -> str:
        """What to do about messages that no recorder will record, or that are gone; empty if there are none."""
        return self._remedy(self.status)

    def __len__(self) -> int:
        return len(self.messages)

    def __iter__(self) -> Iterator[Message]:
        return iter(self.messages)

    def to_json(self) -> str:
        """Return the trace without the messages' bodies as a JSON document."""
        return json.dumps(self.to_document(), ensure_ascii=False)

    def to_document(self) -> dict[str, Any]:
        """Return the trace without the messages' bodies as JSON-compatible values."""
        messages = [
            {**message.id._asdict(), "time": document(message.time), "hop": self.hops[message.id]} for message in self
        ]
        names = [name for name in field_names(Trace) if name not in ("messages", "hops")]
        rest = {name: document(getattr(self, name)) for name in names}
        return {"status": str(self.status), "messages": messages} | rest


# --- the tree: each message has below it the messages that a value connects with it ------------------------------

SAME: Final = "same"
"""The messages share a value."""
CAUSED: Final = "caused"
"""The messages name the message above them as their cause."""
CAUSE: Final = "cause"
"""The message above names this message as its cause."""


class KeyValue(NamedTuple):
    """A key's name and value: messages share the value, or one names another by it."""

    key: str
    value: str


@dataclass(frozen=True, slots=True, eq=False)
class Link:
    """Messages that a value connects. `SAME`: all have the value. `CAUSED`: the first is the cause of the others."""

    kind: str
    key: KeyValue
    messages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Row:
    """A message of the tree: its index among the messages, and its distance from the top of its branch."""

    message: int
    depth: int
    kind: str = SAME
    """Its connection with the message above."""
    key: KeyValue | None = None
    """The key and value of this connection; None at depth 0 if the conversation starts at a value."""


Stem: TypeAlias = tuple[Row, tuple[Row, ...]]
"""A message next to the start, and the rows below it."""


@dataclass(frozen=True, slots=True)
class Branch:
    """The messages that one value connects with the start; `key` is None if the conversation starts at this value."""

    kind: str
    key: KeyValue | None
    stems: tuple[Stem, ...]
    """The directly connected messages, ordered by time."""
    count: int
    """Number of messages in the branch."""


class Tree:
    """A conversation as a tree: each message once, on the shortest path from the start.

    `messages` are ordered by time, each with `stream`, `offset` and `time`; `hops` are their distances from the start.

    Attributes:
        starts: Indices of the messages at which the conversation starts; empty if it starts at a value.
        branches: The other messages, the smallest branch first.
        others: Shared values that the tree does not show, because other values connect their messages.
        unknown: Values that name a cause outside the messages, each with the message that names it.
        places: Each message's position on the time axis, in per cent of the axis; None without a time.
    """

    def __init__(
        self, messages: Sequence[Any], hops: Sequence[int], edges: Sequence[Edge], shared: Sequence[Shared]
    ) -> None:
        self.starts = tuple(number for number, hop in enumerate(hops) if not hop)
        times = [each.time for each in messages]
        self.places = places(times, next((times[each] for each in self.starts), None))
        number_of = {MessageId(each.stream, each.offset): number for number, each in enumerate(messages)}
        links = [
            Link(SAME, KeyValue(each.key, each.value), tuple(number_of[where] for where in each.ids)) for each in shared
        ]
        self.unknown: list[tuple[KeyValue, int]] = []
        named: dict[tuple[MessageId | None, KeyValue], list[int]] = {}
        for edge in edges:
            key, effect = KeyValue(edge.key, edge.value), number_of[edge.effect]
            named.setdefault((edge.cause, key), []).append(effect)
            if edge.cause is None:
                self.unknown.append((key, effect))
        for (cause, key), effects in named.items():
            first = () if cause is None else (number_of[cause],)
            links.append(Link(CAUSED if first else SAME, key, (*first, *effects)))
        # Causes come before shared values, and values of few messages before values of many: they tell more.
        links.sort(key=lambda link: (link.kind == SAME, len(link.messages)))
        found: dict[tuple[str, KeyValue | None], list[Stem]] = {}
        used: set[KeyValue | None] = set()
        for row, below in stems_of(hops, links):
            found.setdefault((row.kind, row.key), []).append((row, below))
            used.update(each.key for each in (row, *below))
        self.others = [each for each in shared if KeyValue(each.key, each.value) not in used]
        branches = (
            Branch(kind, key, tuple(stems), sum(1 + len(below) for _, below in stems))
            for (kind, key), stems in found.items()
        )
        self.branches = tuple(sorted(branches, key=lambda each: each.count))


def stems_of(hops: Sequence[int], links: Sequence[Link]) -> list[Stem]:
    """Return the messages next to the start, each with the rows below it; without a start, the messages of hop 1."""
    first = min(hops, default=0)
    starts = [number for number, hop in enumerate(hops) if hop == first]
    below, unreachable = _below(starts, len(hops), links)
    tops = [Row(number, 0) for number in starts] if first else []
    if not first:
        for number in starts:
            tops += sorted(below.get(number, ()), key=attrgetter("message"))
    tops += [Row(number, 0) for number in unreachable]
    return [(top, tuple(_walk(top, below))[1:]) for top in tops]


def _below(tops: Sequence[int], count: int, links: Sequence[Link]) -> tuple[dict[int, list[Row]], list[int]]:
    """Return the rows below each message, and the messages that no link reaches. A row is below its first finder."""
    links_of: list[list[Link]] = [[] for _ in range(count)]
    for link in links:
        for number in link.messages:
            links_of[number].append(link)
    below: dict[int, list[Row]] = {}
    unreachable: list[int] = []
    found: set[int] = set()
    followed: set[Link] = set()
    for sources in (tops, *([number] for number in range(count))):
        queue = [number for number in sources if number not in found]
        found.update(queue)
        if sources is not tops:
            unreachable += queue
        for number in queue:
            for link in [each for each in links_of[number] if each not in followed]:
                is_whole = link.kind == SAME or number == link.messages[0]
                # Effects of the same cause are connected only through the cause.
                kind, others = (link.kind, link.messages) if is_whole else (CAUSE, link.messages[:1])
                if kind != CAUSE:
                    followed.add(link)
                new = [each for each in dict.fromkeys(others) if each not in found]
                found.update(new)
                below.setdefault(number, []).extend(Row(each, 0, kind, link.key) for each in new)
                queue += new
    return below, unreachable


def _walk(top: Row, below: Mapping[int, Sequence[Row]]) -> Iterator[Row]:
    """Iterate over a row and all rows below it, from the top."""
    stack = [top]
    while stack:
        row = stack.pop()
        yield row
        further = sorted(below.get(row.message, ()), key=attrgetter("message"), reverse=True)
        stack += [replace(each, depth=row.depth + 1) for each in further]


def places(times: Sequence[datetime | None], start: datetime | None) -> tuple[float | None, ...]:
    """Return positions on an axis, in per cent: logarithmic around the start, or from the first time on the left."""
    known = [each for each in times if each is not None]
    middle = start or min(known, default=None)
    if middle is None:
        return (None,) * len(times)
    spans = [None if each is None else (each - middle).total_seconds() for each in times]
    distances = [abs(each) for each in spans if each]
    least, most = min(distances, default=1.0), max(distances, default=1.0)
    left, width = (50.0, 50.0) if start else (0.0, 100.0)

    def place(span: float) -> float:
        return round(left + math.copysign(width * math.log1p(abs(span) / least) / math.log1p(most / least), span), 2)

    return tuple(None if each is None else place(each) for each in spans)
