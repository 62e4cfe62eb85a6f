"""A conversation as it is answered and drawn: messages, edges, shared values, and the lines between them."""

from dataclasses import dataclass
from datetime import datetime
from itertools import groupby, pairwise
from typing import Final, Literal

from relatum_consumer.web._api._shown import LETTERS, KeyValue, Place, Reason
from relatum_consumer.web._branches import Branch
from relatum_consumer.web._timeline import Line, Timeline, timeline

_BESIDE: Final = (3, -3, 5, -5)
"""Points that the lines of a key are beside the middle of a message, whose half is 6."""


@dataclass(frozen=True, slots=True)
class TracedMessage:
    """A message of a conversation: `hop` is how far it is from the start, 0 for the start itself."""

    stream: str
    offset: int
    href: str
    time: datetime | None
    hop: int
    keys: tuple[KeyValue, ...]


@dataclass(frozen=True, slots=True)
class TracedEdge:
    """One message names another: `effect` came from `cause`, both by their places in `messages`, from 0 on.

    `cause` is None where the message that is named is not there. `took_s` is the time between both.
    """

    key: KeyValue
    cause: int | None
    effect: int
    took_s: float | None


@dataclass(frozen=True, slots=True)
class TracedValue:
    """A value that several of the messages have, by their places in `messages`; `label` is what it is drawn as."""

    label: str
    key: KeyValue
    messages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TraceStop:
    """What a bound left out: `reason` is fan_out, time, limit or hops. `href` asks for more, where that helps."""

    reason: Literal["fan_out", "time", "limit", "hops"]
    words: str
    count: int
    key: KeyValue | None
    href: str


@dataclass(frozen=True, slots=True)
class TraceStep:
    """What a hop asked and found."""

    hop: int
    values: int
    found: int
    status: Literal["found", "absent", "not_recorded_yet", "expired", "deleted", "unproven"]


@dataclass(frozen=True, slots=True)
class TraceAnswer:
    """The messages that are connected with a start, by time, and how.

    `status` is that of the worst step; `words` says it for a person, `advice` what to do. `edges` have a direction,
    `shared` have none. `tree` has each message once, what came from it behind and below it. It holds over `streams`,
    the first hundred of `streams_count`.
    """

    status: Literal["found", "absent", "not_recorded_yet", "expired", "deleted", "unproven"]
    words: str
    advice: str
    start: str
    messages: tuple[TracedMessage, ...]
    edges: tuple[TracedEdge, ...]
    shared: tuple[TracedValue, ...]
    tree: tuple[Branch, ...]
    stopped: tuple[TraceStop, ...]
    steps: tuple[TraceStep, ...]
    complete_href: str | None
    api_href: str
    csv_href: str
    streams: tuple[str, ...]
    streams_count: int
    expired: tuple[Place, ...]
    deleted: tuple[Place, ...]
    unread: tuple[Place, ...]
    left_out: tuple[Reason, ...]
    lacking: tuple[Reason, ...]
    unattended: tuple[str, ...]
    new_keys: tuple[str, ...]
    took_ms: float

    @property
    def lines(self) -> list["TraceLine"]:
        """What is drawn between messages: arrows first, then each shared value from message to message."""
        found: list[TraceLine] = []
        named: set[int] = set()
        for edge in self.edges:
            if edge.cause is not None:
                label = "" if edge.key.hue in named else LETTERS[edge.key.hue]
                named.add(edge.key.hue)
                found.append(TraceLine(edge.cause, edge.effect, edge.key.hue, label, 0, is_arrow=True))
        shifts: dict[int, int] = {}
        for each in self.shared:
            beside = shifts.setdefault(each.key.hue, _BESIDE[len(shifts) % len(_BESIDE)])
            for n, (one, other) in enumerate(pairwise(each.messages)):
                found.append(TraceLine(one, other, each.key.hue, "" if n else each.label, beside, is_arrow=False))
        return found

    @property
    def picture(self) -> Timeline | None:
        """Where all of it is drawn."""
        streams, times = [each.stream for each in self.messages], [each.time for each in self.messages]
        return timeline(streams, times, [(line.source, line.target, line.beside) for line in self.lines])

    def runs(self, picture: Timeline) -> list[tuple["TraceLine", list[Line]]]:
        """The lines of a picture in runs of those that look the same, each with the first; arrows last, on top."""
        lines = self.lines
        runs = groupby(picture.lines, lambda each: (lines[each.link].hue, lines[each.link].is_arrow))
        return [(lines[run[0].link], run) for run in reversed([list(each) for _, each in runs])]

    @property
    def legend(self) -> list[tuple[KeyValue, bool]]:
        """The keys of the lines, each once, and whether it has a direction."""
        found = {each.key.key: (each.key, True) for each in self.edges}
        found |= {each.key.key: (each.key, False) for each in self.shared if each.key.key not in found}
        return list(found.values())

    @property
    def labels(self) -> dict[int, list[TracedValue]]:
        """Of each message the values that it shares with others."""
        found: dict[int, list[TracedValue]] = {}
        for each in self.shared:
            for number in each.messages:
                found.setdefault(number, []).append(each)
        return found

    @property
    def between(self) -> dict[tuple[int, int], TracedEdge]:
        """The first edge from one message to another."""
        return {(each.cause, each.effect): each for each in reversed(self.edges) if each.cause is not None}


@dataclass(frozen=True, slots=True)
class TraceLine:
    """A line from a message to another, so many points beside their middles; `label` stands in its middle."""

    source: int
    target: int
    hue: int
    label: str
    beside: int
    is_arrow: bool
