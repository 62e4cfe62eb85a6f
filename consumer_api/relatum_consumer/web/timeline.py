"""Where the messages of a conversation are drawn: a lane for each stream, idle time folded; and as a tree. Pure.

Across, places are per cent of a picture that is as wide as its window, and at least `Timeline.width` points: it is
scrolled where the window is narrower, so that each message has room to be seen and touched. Down, they are points.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import groupby, pairwise
from typing import Any, Final

_UNITS: Final = ((86_400, "d"), (3_600, "h"), (60, "min"))

LANES_MAX: Final = 24
"""Lanes; the messages of all other streams are in one more."""

LANE: Final = 40
"""Points of a lane, as the style sheet has it."""

HEAD: Final = 28
"""Points above the lanes: how long the breaks are. As many are below: how much time had gone."""

LINES_MAX: Final = 600
"""Lines between messages; of more a browser draws nothing but a blot."""

_STEP: Final = 16
"""Points from a message to the next, where time alone would have them closer."""

_EDGE: Final = 48
_FOLD: Final = 88
"""Points of a break: as wide as its words."""

_FOLDS_MAX: Final = 40
_LONG: Final = 6
"""A silence is folded that is so many times as long as those that are shorter, on average."""

_TIMED: Final = 640
"""Points for all time that is not folded."""


@dataclass(frozen=True, slots=True)
class Lane:
    """A stream's lane; `stream` is empty where it is that of `others` streams. `y` is its middle."""

    stream: str
    others: int
    y: int


@dataclass(frozen=True, slots=True)
class Dot:
    """A message; `after` says how long after the first it was."""

    x: float
    y: int
    after: str


@dataclass(frozen=True, slots=True)
class Line:
    """From a message to another: which of those that were asked for, and where."""

    link: int
    x1: float
    y1: int
    x2: float
    y2: int


@dataclass(frozen=True, slots=True)
class Fold:
    """A long silence: from where on, how wide, and how long it was."""

    x: float
    width: float
    middle: float
    words: str


@dataclass(frozen=True, slots=True)
class Timeline:
    """All of it. `marks` are places with the time that had gone by then; `lines_left_out` are not drawn."""

    width: int
    height: int
    lanes: tuple[Lane, ...]
    dots: tuple[Dot, ...]
    lines: tuple[Line, ...]
    lines_left_out: int
    folds: tuple[Fold, ...]
    marks: tuple[tuple[float, str], ...]


def timeline(
    streams: Sequence[str], times: Sequence[datetime | None], links: Sequence[tuple[int, int, int]]
) -> Timeline | None:
    """Draw messages; None where there is none.

    Args:
        streams: Of each message its stream.
        times: Of each its time, in order; those of unknown time come last.
        links: From one message to another, by their numbers, and how many points beside the middle of both: so lines
            of several keys do not hide each other.
    """
    if not streams:
        return None
    lanes, lane_of = _lanes(streams)
    moments = list(dict.fromkeys(times))
    folded = _folded(moments)
    places, folds, width = _along(times, [lane_of[each] for each in streams], moments, folded)
    share = 100 / width
    y_of = [lane.y for lane in lanes]
    first = moments[0]
    dots = tuple(
        Dot(_round(x * share), y_of[lane_of[stream]], _after(first, time))
        for x, stream, time in zip(places, streams, times, strict=True)
    )
    lines = [
        Line(number, dots[one].x, dots[one].y + beside, dots[other].x, dots[other].y + beside)
        for number, (one, other, beside) in enumerate(links[:LINES_MAX])
    ]
    begins = [0, *(number for number, moment in enumerate(moments) if moment in folded)]
    place_of = {time: x for x, time in zip(reversed(places), reversed(times), strict=True)}
    return Timeline(
        width,
        2 * HEAD + LANE * len(lanes),
        lanes,
        dots,
        tuple(lines),
        max(0, len(links) - LINES_MAX),
        tuple(
            Fold(_round(x * share), _round(_FOLD * share), _round((x + _FOLD / 2) * share), words) for x, words in folds
        ),
        tuple((_round(place_of[moments[n]] * share), _after(first, moments[n])) for n in begins),
    )


def _lanes(streams: Sequence[str]) -> tuple[tuple[Lane, ...], Mapping[str, int]]:
    """The lanes from above, by the first message; and which is whose."""
    names = list(dict.fromkeys(streams))
    own = names if len(names) <= LANES_MAX else names[: LANES_MAX - 1]
    others = len(names) - len(own)
    lanes = [*((name, 0) for name in own), *([("", others)] if others else [])]
    middles = (HEAD + LANE * n + LANE // 2 for n in range(len(lanes)))
    found = tuple(Lane(name, count, y) for (name, count), y in zip(lanes, middles, strict=True))
    return found, {name: min(n, len(own)) for n, name in enumerate(names)}


def _folded(moments: Sequence[datetime | None]) -> dict[datetime | None, str]:
    """The moments before which a silence is folded, each with how long it was; unknown time is behind one, too."""
    gaps = sorted(((b - a).total_seconds(), b) for a, b in pairwise(moments) if a is not None and b is not None)
    whole = sum(gap_s for gap_s, _ in gaps)
    long: list[tuple[float, datetime]] = []
    while len(gaps) > 1 and len(long) < _FOLDS_MAX:
        gap_s, moment = gaps.pop()
        whole -= gap_s
        if gap_s <= _LONG * whole / len(gaps):
            break
        long.append((gap_s, moment))
    folded: dict[datetime | None, str] = {moment: span_text(gap_s) for gap_s, moment in long}
    if None in moments and len(moments) > 1:
        folded[None] = "no time"
    return folded


def _along(
    times: Sequence[datetime | None],
    lanes: Sequence[int],
    moments: Sequence[datetime | None],
    folded: Mapping[datetime | None, str],
) -> tuple[list[float], list[tuple[float, str]], int]:
    """Where each message is, where each break begins with its words, and how wide all is; in points."""
    open_s = sum((b - a).total_seconds() for a, b in pairwise(moments) if b not in folded and a and b)
    scale = _TIMED / open_s if open_s else 0.0
    at: float = _EDGE
    places: list[float] = []
    folds: list[tuple[float, str]] = []
    beside: Counter[int] = Counter()
    for number, (time, lane) in enumerate(zip(times, lanes, strict=True)):
        if number and time != times[number - 1]:
            # Behind all that were at the moment before.
            at += _STEP * max(beside.values())
            beside.clear()
            if time in folded:
                folds.append((at, folded[time]))
                at += _FOLD + _STEP
            else:
                at += max(0.0, _gap_s(times[number - 1], time) * scale - _STEP)
        places.append(at + _STEP * beside[lane])
        beside[lane] += 1
    return places, folds, round(at + _STEP * max(beside.values()) + _EDGE)


def _gap_s(earlier: datetime | None, later: datetime | None) -> float:
    return (later - earlier).total_seconds() if earlier is not None and later is not None else 0.0


def _after(first: datetime | None, time: datetime | None) -> str:
    if first is None or time is None:
        return "no time"
    return f"+{span_text((time - first).total_seconds())}"


def _round(place: float) -> float:
    return round(place, 2)


def span_text(seconds: float) -> str:
    """A span of time in its two largest units: "3 d 4 h", "2 min 5 s", "1.25 s", "0.4 ms", "0 s"."""
    if seconds < 0:
        return f"−{span_text(-seconds)}"
    for (size, unit), (less, smaller) in zip(_UNITS, (*_UNITS[1:], (1, "s")), strict=True):
        whole = round(seconds / less) * less
        if whole >= size:
            rest = whole % size // less
            return f"{whole // size:,} {unit}" + (f" {rest} {smaller}" if rest else "")
    if seconds >= 1:
        return f"{seconds:.3g} s"
    return f"{1000 * seconds:.3g} ms" if seconds else "0 s"


# --- what came from what ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Branch:
    """A message's line: how deep it is, what it stands below (None at the top), and what it came from besides that."""

    message: int
    depth: int
    cause: int | None
    others: tuple[int, ...]


def branches(count: int, edges: Sequence[tuple[int, int]]) -> tuple[Branch, ...]:
    """The lines, from the top.

    Args:
        count: How many messages there are; they are known by their numbers from 0 on, in the order of time.
        edges: Pairs of a cause and what came from it.
    """
    causes: list[dict[int, None]] = [{} for _ in range(count)]
    effects: list[dict[int, None]] = [{} for _ in range(count)]
    for source, target in edges:
        causes[target][source] = None
        effects[source][target] = None
    found: dict[int, Branch] = {}
    # Those that came from none first; then of a circle, in which each came from another, whichever was first.
    for top in sorted(range(count), key=lambda number: (bool(causes[number]), number)):
        stack: list[tuple[int, int, int | None]] = [(top, 0, None)]
        while stack:
            number, depth, cause = stack.pop()
            if number in found:
                continue
            others = tuple(each for each in causes[number] if each != cause)
            found[number] = Branch(number, depth, cause, others)
            stack += [(each, depth + 1, number) for each in sorted(effects[number], reverse=True)]
    return tuple(found.values())


# --- a conversation ---------------------------------------------------------------------------------------

LETTERS: Final = "ABCDEFGH"
"""Of keys, one for each colour, since colour alone tells nobody anything."""

_BESIDE: Final = (3, -3, 5, -5)
"""Points that the lines of a key are beside the middle of a message, whose half is 6."""


@dataclass(frozen=True, slots=True)
class Link:
    """What a line between two messages looks like; `label` stands in its middle."""

    hue: int
    label: str
    is_arrow: bool


class Drawing:
    """A conversation as a page draws it.

    Args:
        answer: Its messages, edges and shared values (a `TraceAnswer`).
        hue_of: The colour of a key, by its name.

    Attributes:
        picture: Where messages and lines are.
        tree: Each message once, what came from it behind and below it.
        links: What the lines of the picture look like.
        runs: The lines in runs of those that look the same, each with its look; arrows last, on top.
        legend: The keys of the lines, each once, and whether it has a direction.
        names: A name for each shared value: its key's letter and a number.
        labels: Of each message the keys and names of the values that it shares with others.
        between: The first edge from one message to another.
    """

    def __init__(self, answer: Any, hue_of: Callable[[str], int]) -> None:
        edges = [each for each in answer.edges if each.cause is not None]
        self.tree = branches(len(answer.messages), [(each.cause, each.effect) for each in edges])
        self.between = {(each.cause, each.effect): each for each in reversed(edges)}
        self.legend = {each.key.key: False for each in answer.shared} | {each.key.key: True for each in answer.edges}
        self.links: list[Link] = []
        ends: list[tuple[int, int, int]] = []
        for edge in edges:
            hue = hue_of(edge.key.key)
            label = "" if any(each.hue == hue for each in self.links) else LETTERS[hue]
            self.links.append(Link(hue, label, is_arrow=True))
            ends.append((edge.cause, edge.effect, 0))
        self.names: list[str] = []
        self.labels: dict[int, list[tuple[str, str]]] = {}
        counts: Counter[int] = Counter()
        shifts: dict[int, int] = {}
        for each in answer.shared:
            hue = hue_of(each.key.key)
            counts[hue] += 1
            name = f"{LETTERS[hue]}{counts[hue]}"
            self.names.append(name)
            for number in each.messages:
                self.labels.setdefault(number, []).append((each.key.key, name))
            beside = shifts.setdefault(hue, _BESIDE[len(shifts) % len(_BESIDE)])
            for n, (one, other) in enumerate(pairwise(each.messages)):
                self.links.append(Link(hue, "" if n else name, is_arrow=False))
                ends.append((one, other, beside))
        self.picture = timeline(
            [each.stream for each in answer.messages], [each.time for each in answer.messages], ends
        )
        lines = self.picture.lines if self.picture else ()
        looks = groupby(lines, lambda line: (self.links[line.link].hue, self.links[line.link].is_arrow))
        self.runs = [(look, list(run)) for look, run in looks][::-1]
