"""The meaning of a partition's messages for the order of serialization contexts.

Most messages are the application's. A router publishes them under a placement, in the header `relatum_placed`. Moves of
contexts add three kinds of control messages:

- a `Fence` in the source: after it, messages with an earlier epoch are invalid (strays);
- a `Marker` in the target: messages of its epoch are held until the source is consumed up to the fence;
- an `Adoption` in the context's present partition: it stands for a stray.

Their fields are JSON in the body, so that no key of an application finds them in headers.
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
        """Parse a header's value; None if it is invalid."""
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
    """Return the headers and the body of a control message."""
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
    """Returns the entries of messages, and decodes no more of them than needed."""

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
    """Whether a control message's field is valid."""
    if name == "contexts":
        return isinstance(value, frozenset) and all(map(_is_text, value))
    if name in _TEXTS:
        return _is_text(value)
    return type(value) is int and 0 <= value <= INTEGER_MAX


def _is_text(value: object) -> bool:
    """Whether PostgreSQL can store the value."""
    try:
        return isinstance(value, str) and b"\0" not in value.encode()
    except UnicodeEncodeError:
        return False


def _is_number(text: str) -> bool:
    # The number of digits is limited: Python refuses to parse very long numbers.
    return text.isascii() and text.isdecimal() and len(text) <= _DIGITS_MAX
