"""What a message in a partition means for the order of serialization contexts.

Most are an application's, some of them placed: published under a placement, which their header `relatum_placed` names.
Three kinds are Relatum's own, and are what a move of contexts looks like in the streams:

- a `Fence` in the source: nothing placed under an earlier epoch counts behind it;
- a `Marker` in the target: what follows under its epoch is held until the source is consumed up to the fence;
- an `Adoption` in whichever partition the context is in: it stands for a message that arrived behind a fence.

Their facts are JSON in the body, so that no key of an application is found in their headers.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Self, TypeAlias

from relatum.errors import UndecodableMessage
from relatum.headers import CONTROL_HEADER, PLACED_HEADER
from relatum.limits import INTEGER_MAX
from relatum.reading import Message, header_value
from relatum.wire import amqp10

CONTROL_BYTES: Final = CONTROL_HEADER.encode()
"""What the bytes of a control message contain; few others do."""

CONTENT_TYPE: Final = "application/json"
"""The property `content_type` of control messages."""

_TEXTS: Final = frozenset({"source", "stream", "context"})
"""The fields of control messages that are text."""

_DIGITS_MAX: Final = len(str(INTEGER_MAX))


class Placed(NamedTuple):
    """What the header `relatum_placed` says: `<epoch>-<session>-<number>`."""

    epoch: int
    """That of the placement it was published under. Later placements of a context have higher ones."""
    session: str
    """The router that published it, 16 hexadecimal digits; new with each one that is opened."""
    number: int
    """Its number there, ascending in the order of publishing."""

    @classmethod
    def parse(cls, text: object) -> Self | None:
        """What a header's value says; None where it is none of ours."""
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
    """The end of contexts in a partition: behind it, what was placed under an earlier epoch is a stray."""

    move_id: int
    epoch: int
    contexts: frozenset[str]


@dataclass(frozen=True, slots=True)
class Marker:
    """The beginning of contexts, under an epoch, in a partition.

    They come from `source`, where the move's fence is at `fence_offset`; from this partition if the move was aborted.
    """

    move_id: int
    epoch: int
    contexts: frozenset[str]
    source: str
    fence_offset: int


@dataclass(frozen=True, slots=True)
class Adoption:
    """A stray, taken into its context again: it counts here under this epoch, not where it is (stream and offset)."""

    context: str
    epoch: int
    stream: str
    offset: int


@dataclass(frozen=True, slots=True)
class Data:
    """An application's message, with its context, if any; `placed` is None if no router published it."""

    context: str | None
    placed: Placed | None


Control: TypeAlias = Fence | Marker | Adoption
Entry: TypeAlias = Control | Data

_KINDS: Final = {"fence": Fence, "marker": Marker, "adoption": Adoption}
_NAMES: Final = {kind: name for name, kind in _KINDS.items()}


def encode(control: Control) -> tuple[dict[str, Any], bytes]:
    """The headers and the body of a control message."""
    facts = {name: getattr(control, name) for name in control.__slots__}
    if not isinstance(control, Adoption):
        facts["contexts"] = sorted(control.contexts)
    return {CONTROL_HEADER: _NAMES[type(control)]}, json.dumps(facts, ensure_ascii=False).encode()


def decode(kind: object, body: bytes) -> Control | None:
    """What a control message says; None where it is an application's message after all."""
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
    # Any publisher may write anything; values that no column can hold must be refused here.
    return control if all(_is_fact(name, getattr(control, name)) for name in control.__slots__) else None


def entry_of(headers: Mapping[str, Any], body: bytes, context_header: str) -> Entry:
    """What a message with these headers and this body is; `context_header` names contexts in this super stream."""
    kind = headers.get(CONTROL_HEADER)
    if kind is not None and (control := decode(kind, body)) is not None:
        return control
    context = headers.get(context_header)
    return Data(context if isinstance(context, str) else None, Placed.parse(headers.get(PLACED_HEADER)))


class EntryReader:
    """Reads the entries that messages are, and decodes no more of a message than that takes."""

    def __init__(self, header: str) -> None:
        self._header = header
        self._wanted = {header.encode(): 0, PLACED_HEADER.encode(): 1}
        # Such headers are not where the others are from RabbitMQ 3.13 on.
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
    """Whether a control message's field is as we write it."""
    if name == "contexts":
        return isinstance(value, frozenset) and all(map(_is_text, value))
    if name in _TEXTS:
        return _is_text(value)
    return type(value) is int and 0 <= value <= INTEGER_MAX


def _is_text(value: object) -> bool:
    """Whether PostgreSQL stores it."""
    try:
        return isinstance(value, str) and b"\0" not in value.encode()
    except UnicodeEncodeError:
        return False


def _is_number(text: str) -> bool:
    # As many digits as INTEGER_MAX has: Python refuses to read very long numbers.
    return text.isascii() and text.isdecimal() and len(text) <= _DIGITS_MAX
