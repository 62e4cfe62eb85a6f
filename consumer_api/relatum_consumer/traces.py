"""What a trace gives: the messages that are connected, how they are, where it stopped, and how sure each step is."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import Any, Final, NamedTuple

from relatum.documents import document, field_names
from relatum.ids import MessageId
from relatum.reading import Message
from relatum_consumer.lookups.answer import Covered, Status
from relatum_consumer.lookups.proof import Uncovered

_LABEL_MAX: Final = 60
"""Characters of a value in a graph; the rest is cut."""

_REPLACEMENT: Final = "\N{REPLACEMENT CHARACTER}"
"""What a graph shows of a character that cannot be printed."""

_SEVERITY: Final = (
    Status.UNPROVEN,
    Status.NOT_RECORDED_YET,
    Status.FOUND,
    Status.EXPIRED,
    Status.DELETED,
    Status.ABSENT,
)


class Edge(NamedTuple):
    """One message names another: it came from that one.

    Attributes:
        cause: The message that is named; None where none of the trace is.
        effect: The message whose key has the value.
        key: The name of the key by which it names the other.
        value: The value, in canonical form.
    """

    cause: MessageId | None
    effect: MessageId
    key: str
    value: str


class Shared(NamedTuple):
    """Messages that share a key's value: two or more, by time, stream and offset. It has no direction."""

    key: str
    value: str
    ids: tuple[MessageId, ...]


class StopReason(StrEnum):
    """Which bound left something out."""

    FAN_OUT = "fan_out"
    """More messages than `fan_out` have the value: it was not followed. `count` is how many at least."""
    TIME = "time"
    """The value is recorded for messages before `since`, from `until` on, or of unknown time, too: `count` at least."""
    LIMIT = "limit"
    """`count` messages more were found, and not read."""
    HOPS = "hops"
    """`count` values of the last messages were not followed."""


@dataclass(frozen=True, slots=True)
class Stop:
    """Where a trace stopped.

    Attributes:
        reason: The bound.
        count: Of what, `StopReason` says.
        key: The key's name, where one value is meant; else None.
        value: The value, in canonical form.
    """

    reason: StopReason
    count: int
    key: str | None = None
    value: str | None = None


class Step(NamedTuple):
    """What one hop asked and found.

    Attributes:
        hop: 1 for what the start leads to, and so on.
        values: Values asked for.
        found: Messages found that were not known before.
        status: `found`, also where a value has too many messages to follow; or what is known where nothing new was
            found: `absent` says that there is no more, as of the beginning of the trace and but for `Trace.new_keys`.
            With `unread`, or with `complete` where something cannot be proven, `unproven`.
    """

    hop: int
    values: int
    found: int
    status: Status


@dataclass(frozen=True)
class Trace(Covered):
    """The messages connected with a start. It does not change.

    What it covers, and what could not be in it, are the attributes of `Covered`; `new_keys` are there whatever the
    status: by these keys there may be more, by all others the steps say how sure it is. A new key that was asked for
    by name, or that the trace begins with, makes it `NOT_RECORDED_YET`. With `complete` there are none.

    Attributes:
        messages: All of them, the start among them, by time, stream and offset; each was read and checked.
        hops: How many hops each message is from the start: 0 for the message itself, and for its copies where a client
            gave it without a place. One that has no copy in a stream is not among the messages.
        edges: Who named whom, in the order of the messages.
        shared: Values that messages share, in the order of their first messages.
        stopped: What bounds left out; empty where nothing was.
        steps: What each hop asked, and how sure it is.
        uncovered: Offsets that are retained and are not recorded for all the keys, by stream: among them there may be
            more, by whatever hop. None where they lack `new_keys` alone, and with `complete`, which reads them.
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
        """The worst of the steps: `unproven` and `not_recorded_yet` say that there may be more, as `uncovered` does.

        `found`: something was, and each step is sure, but for `new_keys`. Else `expired`, `deleted` or `absent`,
        which no trace by a new key is.
        """
        worst = min((step.status for step in self.steps), key=_SEVERITY.index, default=Status.ABSENT)
        is_open = bool(self.uncovered) or (bool(self.new_keys) and worst is not Status.FOUND)
        return Status.NOT_RECORDED_YET if is_open and worst is not Status.UNPROVEN else worst

    @property
    def explanation(self) -> str:
        """What to do about what no recorder will record, or about what is gone, in words; else empty."""
        return self._cure(self.status)

    def __len__(self) -> int:
        return len(self.messages)

    def __iter__(self) -> Iterator[Message]:
        return iter(self.messages)

    @cached_property
    def _by_id(self) -> dict[MessageId, Message]:
        return {message.id: message for message in self.messages}

    def message(self, where: MessageId) -> Message:
        """The message at a place; `KeyError` where it is not among them."""
        return self._by_id[where]

    @cached_property
    def _causes(self) -> dict[MessageId, dict[MessageId, None]]:
        return _ends((edge.effect, edge.cause) for edge in self.edges if edge.cause is not None)

    @cached_property
    def _effects(self) -> dict[MessageId, dict[MessageId, None]]:
        return _ends((edge.cause, edge.effect) for edge in self.edges if edge.cause is not None)

    def causes(self, where: MessageId) -> tuple[MessageId, ...]:
        """The messages that the one at a place names, each once, in the order of the edges."""
        return tuple(self._causes.get(where, ()))

    def effects(self, where: MessageId) -> tuple[MessageId, ...]:
        """The messages that name the one at a place, each once, in the order of the edges."""
        return tuple(self._effects.get(where, ()))

    @property
    def roots(self) -> tuple[MessageId, ...]:
        """Where messages are that name none of the others, by time: what the others came from, and who stands alone."""
        return tuple(message.id for message in self.messages if message.id not in self._causes)

    def to_mermaid(self) -> str:
        """A flowchart for Mermaid: messages as boxes, shared values rounded, arrows from cause to effect."""
        names = {message.id: f"m{n}" for n, message in enumerate(self)}
        lines = ["flowchart LR"]
        for message in self:
            time = "no time" if message.time is None else message.time.isoformat(sep=" ", timespec="milliseconds")
            lines.append(f'  {names[message.id]}["{_label(str(message.id), time)}"]')
        for n, shared in enumerate(self.shared):
            lines.append(f'  v{n}("{_label(f"{shared.key} = {shared.value}")}")')
            lines += [f"  v{n} -.- {names[where]}" for where in shared.ids]
        for n, edge in enumerate(self.edges):
            cause = f"u{n}" if edge.cause is None else names[edge.cause]
            if edge.cause is None:
                lines.append(f'  {cause}("{_label(f"{edge.key} = {edge.value}", "not found")}")')
            lines.append(f'  {cause} -- "{_label(edge.key)}" --> {names[edge.effect]}')
        return "\n".join([*lines, ""])

    def to_json(self) -> str:
        """All of it but the messages' bodies, as one JSON document."""
        return json.dumps(self.to_document(), ensure_ascii=False)

    def to_document(self) -> dict[str, Any]:
        """The same as values for JSON."""
        messages = [
            {**message.id._asdict(), "time": document(message.time), "hop": self.hops[message.id]} for message in self
        ]
        names = [name for name in field_names(Trace) if name not in ("messages", "hops")]
        rest = {name: document(getattr(self, name)) for name in names}
        return {"status": str(self.status), "messages": messages} | rest


def _ends(pairs: Any) -> dict[MessageId, dict[MessageId, None]]:
    found: dict[MessageId, dict[MessageId, None]] = {}
    for one, other in pairs:
        found.setdefault(one, {})[other] = None
    return found


def _label(*lines: str) -> str:
    """Text as Mermaid has it in quotes: whatever could be markup there is given by its number."""
    cut = (line if len(line) <= _LABEL_MAX else line[: _LABEL_MAX - 1] + "…" for line in lines)
    return "<br/>".join("".join(map(_entity, line)) for line in cut)


def _entity(character: str) -> str:
    if character.isalnum() or character in " =@.:-_+,…":
        return character
    return f"#{ord(character if character.isprintable() else _REPLACEMENT)};"
