"""A conversation: all messages that are connected with one, or with a key's value, and what came from what."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from itertools import groupby, pairwise
from typing import Annotated, Final

from starlette.responses import Response

from relatum.errors import InvalidInput
from relatum.ids import MessageId
from relatum.keys import KeyDefinition
from relatum_consumer import Lacking, Status, Trace
from relatum_consumer.traces import Step, StopReason
from relatum_consumer.web.documents import FOR_PAGES
from relatum_consumer.web.endpoint import endpoint, file_of
from relatum_consumer.web.masking import NOT_SAID
from relatum_consumer.web.messages import (
    LETTERS,
    HoldsOver,
    KeyValue,
    held_over,
    key_value,
    key_values,
    sought_text,
)
from relatum_consumer.web.parameters import Parameter
from relatum_consumer.web.rendering import csv_text
from relatum_consumer.web.site import Site
from relatum_consumer.web.timeline import Branch, Line, Timeline, branches, timeline

MESSAGES_MAX: Final = 1_000
"""Messages of a conversation that are read and drawn."""


@dataclass(frozen=True, slots=True)
class TraceAsked:
    """Where a conversation begins: with a message, or with a key's value; and what bounds it."""

    stream: Annotated[str, Parameter("The stream of the message that it begins with …")] = ""
    offset: Annotated[int | None, Parameter("… and its offset.")] = None
    key: Annotated[str, Parameter("Instead of a message: a key's name …")] = ""
    value: Annotated[tuple[str, ...], Parameter("… and its value; of a composite key, its values in order.")] = ()
    by: Annotated[tuple[str, ...], Parameter("Keys to follow, and what they name; all where left out.")] = ()
    hops: Annotated[int, Parameter("Hops from the start at most.", least=1, most=1_000)] = 8
    limit: Annotated[int, Parameter("Messages at most.", least=1, most=MESSAGES_MAX)] = 200
    fan_out: Annotated[int, Parameter("Values that more messages have are not followed.", least=1, most=10_000)] = 200
    since: Annotated[datetime | None, Parameter("Only of this moment or later; UTC where no zone is given.")] = None
    until: Annotated[datetime | None, Parameter("Only before this moment.")] = None
    complete: Annotated[bool, Parameter("Also read what is not recorded yet.")] = False

    @property
    def is_asked(self) -> bool:
        """Whether anything was filled in that says where it begins."""
        return bool(self.stream or self.key or self.value or self.offset is not None)


# --- as it is answered, and drawn -------------------------------------------------------------------------

_BESIDE: Final = (3, -3, 5, -5)
"""Points that the lines of a key are beside the middle of a message, whose half is 6."""


@dataclass(frozen=True, slots=True)
class TracedMessage:
    """A message of a conversation: `hop` is how far it is from the start, 0 for the start itself."""

    stream: str
    offset: int
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
    """A value that several of the messages have, by their places in `messages`."""

    key: KeyValue
    messages: tuple[int, ...]
    label: str = field(metadata=FOR_PAGES)


@dataclass(frozen=True, slots=True)
class TraceStop:
    """What a bound left out: `reason` is fan_out, time, limit or hops."""

    reason: StopReason
    words: str
    count: int
    key: KeyValue | None
    href: str = field(metadata=FOR_PAGES)


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceAnswer(HoldsOver):
    """The messages that are connected with a start, by time, and how.

    `status` is that of the worst step; `words` says it for a person, `advice` what to do. `edges` have a direction,
    `shared` have none. It holds over `streams`, the first hundred of `streams_count`.
    """

    status: Status
    words: str
    advice: str
    start: str
    messages: tuple[TracedMessage, ...]
    edges: tuple[TracedEdge, ...]
    shared: tuple[TracedValue, ...]
    stopped: tuple[TraceStop, ...]
    steps: tuple[Step, ...]
    lacking: tuple[Lacking, ...]
    complete_href: str | None = field(metadata=FOR_PAGES)

    @property
    def tree(self) -> tuple[Branch, ...]:
        """Each message once, what came from it behind and below it."""
        numbers = [(edge.cause, edge.effect) for edge in self.edges if edge.cause is not None]
        return branches(len(self.messages), numbers)

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


# --- following --------------------------------------------------------------------------------------------


async def trace(site: Site, asked: TraceAsked) -> TraceAnswer:
    """Follow a conversation."""
    found = await _traced(site, asked)
    definitions = await site.keys()
    shown = _Shown(site, definitions, found)
    is_open = bool(found.new_keys) or found.status in (Status.NOT_RECORDED_YET, Status.UNPROVEN)
    may_help = is_open and not asked.complete
    return TraceAnswer(
        status=found.status,
        words=_words(found),
        advice=_advice(found, may_help=may_help),
        start=_start(site, definitions, asked),
        messages=shown.messages(),
        edges=shown.edges(),
        shared=shown.shared(),
        stopped=tuple(_stops(site, asked, shown)),
        steps=found.steps,
        lacking=found.lacking,
        complete_href=site.links.asked("/trace", replace(asked, complete=True)) if may_help else None,
        **held_over(found),
    )


async def _traced(site: Site, asked: TraceAsked) -> Trace:
    """The trace, from a message or from a value."""
    if asked.stream and (asked.key or asked.value):
        raise InvalidInput(
            "a conversation begins with a message (stream, offset) or with a value (key, value), not both"
        )
    bounds = {name: getattr(asked, name) for name in ("hops", "limit", "fan_out", "since", "until", "complete")}
    if asked.stream:
        if asked.offset is None:
            raise InvalidInput("offset is missing: the message's offset in the stream")
        message = await site.relations.read(asked.stream, asked.offset)
        return await site.relations.trace(message, by=asked.by or None, **bounds)
    if not asked.key or not asked.value:
        missing = "key is missing: the key's name" if not asked.key else "value is missing: the key's value"
        raise InvalidInput(f"{missing}; or give stream and offset of a message")
    value = asked.value[0] if len(asked.value) == 1 else asked.value
    return await site.relations.trace((asked.key, value), by=asked.by or None, **bounds)


class _Shown:
    """What a trace has, as it is shown: values of masked keys as digests."""

    def __init__(self, site: Site, definitions: Sequence[KeyDefinition], found: Trace) -> None:
        self._site = site
        self._definitions = definitions
        self.found = found
        self._keys = {each.name: each for each in definitions}
        self._places = {message.id: number for number, message in enumerate(found)}

    def value(self, key: str, value: str, where: MessageId | None) -> KeyValue:
        """A key's value."""
        if key not in self._keys:
            # Removed since: whether it was masked nobody knows.
            return KeyValue(key, NOT_SAID, True, 0, "")
        return key_value(self._site, self._definitions, self._keys[key], value, where)

    def messages(self) -> tuple[TracedMessage, ...]:
        """The messages, by time."""
        return tuple(
            TracedMessage(
                each.stream,
                each.offset,
                each.time,
                self.found.hops[each.id],
                key_values(self._site, self._definitions, each),
            )
            for each in self.found
        )

    def edges(self) -> tuple[TracedEdge, ...]:
        """Who named whom."""
        edges = []
        for each in self.found.edges:
            cause = None if each.cause is None else self.found.message(each.cause).time
            effect = self.found.message(each.effect).time
            took_s = None if cause is None or effect is None else (effect - cause).total_seconds()
            place = None if each.cause is None else self._places[each.cause]
            key = self.value(each.key, each.value, each.effect)
            edges.append(TracedEdge(key, place, self._places[each.effect], took_s))
        return tuple(edges)

    def shared(self) -> tuple[TracedValue, ...]:
        """Values that several have, each with its key's letter and a number."""
        found: list[TracedValue] = []
        counts: dict[int, int] = {}
        for each in self.found.shared:
            key = self.value(each.key, each.value, each.ids[0])
            counts[key.hue] = counts.get(key.hue, 0) + 1
            label = f"{LETTERS[key.hue]}{counts[key.hue]}"
            found.append(TracedValue(key, tuple(self._places[where] for where in each.ids), label))
        return tuple(found)


# --- in words ---------------------------------------------------------------------------------------------


def _start(site: Site, definitions: Sequence[KeyDefinition], asked: TraceAsked) -> str:
    if asked.stream:
        return f"{asked.stream} · {asked.offset:,}"
    return f"{asked.key} {sought_text(site, definitions, asked.key, asked.value)}"


_BY_NEW_KEYS: Final = {
    Status.FOUND: "found: this is all by the older keys",
    Status.NOT_RECORDED_YET: "not recorded yet: there may be more by the new keys",
}


def _words(found: Trace) -> str:
    if found.lacking:
        return "absent: the message has no value of the keys, so nothing was looked for"
    if found.new_keys and not found.unattended and found.status in _BY_NEW_KEYS:
        return _BY_NEW_KEYS[found.status]
    if found.status is Status.FOUND:
        return "found, as far as its bounds go" if found.stopped else "found: this is all"
    if not found.messages or found.status in (Status.NOT_RECORDED_YET, Status.EXPIRED, Status.DELETED):
        return found.status.words
    if found.status is Status.UNPROVEN:
        return "unproven: there may be more, which nobody can prove or rule out"
    return "absent: nothing else is connected with it"


def _advice(found: Trace, *, may_help: bool) -> str:
    if found.explanation:
        return found.explanation
    if may_help:
        return "More may be in what is not recorded yet, which can be read from the streams."
    return ""


_STOPS: Final = {
    "fan_out": "{count:,} messages or more have this value, which was not followed",
    "time": "{count:,} messages or more of other times have this value",
    "limit": "{count:,} messages more were found, and not read",
    "hops": "{count:,} values of the last messages were not followed",
}


def _stops(site: Site, asked: TraceAsked, shown: _Shown) -> list[TraceStop]:
    """What the bounds left out, each with what asks for it."""
    ways = {
        "limit": replace(asked, limit=min(MESSAGES_MAX, 5 * asked.limit)),
        "hops": replace(asked, hops=min(1_000, 4 * asked.hops)),
        "time": replace(asked, since=None, until=None),
    }
    stops = []
    for each in shown.found.stopped:
        key = None if each.key is None else shown.value(each.key, each.value or "", None)
        way = ways.get(each.reason.value, asked)
        href = "" if way == asked else site.links.asked("/trace", way)
        stops.append(TraceStop(each.reason, _STOPS[each.reason].format(count=each.count), each.count, key, href))
    return stops


# --- as a table -------------------------------------------------------------------------------------------


async def _csv(site: Site, asked: TraceAsked) -> Response:
    """A line for each message, with a column for each key."""
    found = await _traced(site, asked)
    definitions = await site.keys()
    shown = _Shown(site, definitions, found)
    head = ["time", "stream", "offset", "hop", "caused_by", *(f"key:{each.name}" for each in definitions)]
    rows = []
    for each in shown.messages():
        values = {key.key: key.value for key in each.keys}
        causes = " ".join(str(where) for where in found.causes(MessageId(each.stream, each.offset)))
        moment = "" if each.time is None else each.time.isoformat()
        known = [moment, each.stream, each.offset, each.hop, causes]
        rows.append([*known, *(values.get(definition.name, "") for definition in definitions)])
    text = csv_text(head, rows).encode("utf-8", "replace")
    return file_of(text, "text/csv; charset=utf-8", "conversation.csv")


endpoint(
    "/trace",
    "A conversation: all messages that are connected with one, or with a key's value.",
    template="trace.html",
    page="trace",
    is_asked=lambda asked: asked.is_asked,
    files={"csv": _csv},
)(trace)
