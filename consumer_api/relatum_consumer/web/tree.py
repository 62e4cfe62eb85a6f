"""A conversation as a tree: below each message the ones that a value connects with it. Pure: no input, no output."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import TYPE_CHECKING, Final

from relatum.ids import MessageId
from relatum_consumer.web.messages import KeyValue

if TYPE_CHECKING:
    from relatum_consumer.web.trace import TraceAnswer

SAME: Final = "same"
"""Messages that have a value in common."""
CAUSED: Final = "caused"
"""Messages that name the one above as their cause."""
CAUSE: Final = "cause"
"""The message that the one above names as its cause."""


@dataclass(frozen=True, slots=True, eq=False)
class Link:
    """What a value connects. `SAME`: all of `messages` have it. `CAUSED`: the first is the cause of the others."""

    kind: str
    key: KeyValue
    messages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Row:
    """A message of the tree.

    Attributes:
        message: Its number among the answer's messages.
        depth: How many messages are between it and the top of its branch.
        kind: How it is connected with the message above: `SAME`, `CAUSED` or `CAUSE`.
        key: By which key's value; None where a conversation starts at a value, which all messages of depth 0 have.
    """

    message: int
    depth: int
    kind: str = SAME
    key: KeyValue | None = None


@dataclass(frozen=True, slots=True)
class Branch:
    """The messages that one value connects with the start.

    Attributes:
        kind: `SAME`, `CAUSED` or `CAUSE`.
        key: The key's value; None where it is the start itself.
        stems: The messages connected directly, by time, each with the rows below it.
        count: How many messages there are, further ones included.
    """

    kind: str
    key: KeyValue | None
    stems: tuple[tuple[Row, tuple[Row, ...]], ...]
    count: int


class Tree:
    """Each message of a conversation once, on the shortest way from its start.

    Args:
        answer: The conversation.

    Attributes:
        starts: The messages that it starts at; none where it starts at a value.
        branches: What belongs to them, the smallest branch first.
        others: Values that several messages have which the tree connects by other ones.
        unknown: Values that name a cause which is not among the messages, each with the message that names it.
        places: Of each message, where its time is drawn, in per cent of a picture's width; None without a time.
    """

    def __init__(self, answer: "TraceAnswer") -> None:
        self.starts = tuple(number for number, hop in enumerate(answer.hops) if not hop)
        times = [each.time for each in answer.messages]
        self.places = places(times, next((times[each] for each in self.starts), None))
        number_of = {MessageId(each.stream, each.offset): number for number, each in enumerate(answer.messages)}
        links = [
            Link(SAME, KeyValue(each.key, each.value), tuple(number_of[where] for where in each.ids))
            for each in answer.shared
        ]
        self.unknown: list[tuple[KeyValue, int]] = []
        named: dict[tuple[MessageId | None, KeyValue], list[int]] = {}
        for edge in answer.edges:
            key, effect = KeyValue(edge.key, edge.value), number_of[edge.effect]
            named.setdefault((edge.cause, key), []).append(effect)
            if edge.cause is None:
                self.unknown.append((key, effect))
        for (cause, key), effects in named.items():
            first = () if cause is None else (number_of[cause],)
            links.append(Link(CAUSED if first else SAME, key, (*first, *effects)))
        # A cause says more than a value in common, and a value of few messages more than a value of many.
        links.sort(key=lambda link: (link.kind == SAME, len(link.messages)))
        found: dict[tuple[str, KeyValue | None], list[tuple[Row, list[Row]]]] = {}
        stems: list[tuple[Row, list[Row]]] = []
        rows = rows_of(answer.hops, links)
        used = {row.key for row in rows}
        self.others = [each for each in answer.shared if KeyValue(each.key, each.value) not in used]
        for row in rows:
            if row.depth:
                stems[-1][1].append(row)
            else:
                stems = found.setdefault((row.kind, row.key), [])
                stems.append((row, []))
        branches = (
            Branch(
                kind, key, tuple((row, tuple(below)) for row, below in stems), sum(1 + len(below) for _, below in stems)
            )
            for (kind, key), stems in found.items()
        )
        self.branches = tuple(sorted(branches, key=lambda each: each.count))


def rows_of(hops: Sequence[int], links: Sequence[Link]) -> list[Row]:
    """All messages but the start, each below the one that it was found from, from the top.

    Args:
        hops: Of each message, in order of time, how far it is from the start: 0 for the start, which may have copies.
            Without a start those of one hop are at the top.
        links: What connects messages, by their numbers.
    """
    first = min(hops, default=0)
    tops = [number for number, hop in enumerate(hops) if hop == first]
    below, alone = _below(tops, len(hops), links)
    rows: list[Row] = []
    for top in tops:
        for each in [Row(top, 0)] if first else sorted(below.get(top, ()), key=_number):
            rows += _walk(each, below)
    for number in alone:
        rows += _walk(Row(number, 0), below)
    return rows


def _below(tops: Sequence[int], count: int, links: Sequence[Link]) -> tuple[dict[int, list[Row]], list[int]]:
    """The messages below each one, from which they are found first; and those that nothing leads to."""
    of: list[list[Link]] = [[] for _ in range(count)]
    for link in links:
        for number in link.messages:
            of[number].append(link)
    below: dict[int, list[Row]] = {}
    alone: list[int] = []
    found: set[int] = set()
    followed: set[Link] = set()
    for sources in (tops, *([number] for number in range(count))):
        queue = [number for number in sources if number not in found]
        found.update(queue)
        if sources is not tops:
            alone += queue
        for number in queue:
            for link in [each for each in of[number] if each not in followed]:
                kind, others = _led_to(number, link)
                if kind != CAUSE:
                    followed.add(link)
                new = [each for each in dict.fromkeys(others) if each not in found]
                found.update(new)
                below.setdefault(number, []).extend(Row(each, 0, kind, link.key) for each in new)
                queue += new
    return below, alone


def _led_to(number: int, link: Link) -> tuple[str, tuple[int, ...]]:
    """What a link leads to from one of its messages, and how that is connected with the message."""
    if link.kind == SAME or number == link.messages[0]:
        return link.kind, link.messages
    # Messages that name the same cause are connected with it, and only so with each other.
    return CAUSE, link.messages[:1]


def _walk(top: Row, below: Mapping[int, Sequence[Row]]) -> Iterator[Row]:
    """A message and all that is below it, from the top."""
    stack = [top]
    while stack:
        row = stack.pop()
        yield row
        further = sorted(below.get(row.message, ()), key=_number, reverse=True)
        stack += [replace(each, depth=row.depth + 1) for each in further]


def _number(row: Row) -> int:
    return row.message


def places(times: Sequence[datetime | None], start: datetime | None) -> tuple[float | None, ...]:
    """Where times are drawn, in per cent of a picture's width: on a logarithmic scale around the start.

    Args:
        times: Of each message its time.
        start: The time in the middle; None for the first one at the left.
    """
    known = [each for each in times if each is not None]
    middle = start or min(known, default=None)
    if middle is None:
        return (None,) * len(times)
    spans = [None if each is None else (each - middle).total_seconds() for each in times]
    far = [abs(each) for each in spans if each]
    least, most = min(far, default=1.0), max(far, default=1.0)
    left, width = (50.0, 50.0) if start else (0.0, 100.0)

    def place(span: float) -> float:
        return round(left + math.copysign(width * math.log1p(abs(span) / least) / math.log1p(most / least), span), 2)

    return tuple(None if each is None else place(each) for each in spans)
