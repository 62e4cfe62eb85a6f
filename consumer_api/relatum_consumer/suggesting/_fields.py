"""What messages have that could be a key: headers, properties and members of JSON, with their values, by a sample."""

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from relatum.keys import PROPERTIES, Content, InvalidValue, KeyType, canonical, path_text
from relatum.reading import Message, StreamReader

FIELDS_MAX: Final = 400
"""Fields of one stream; a body whose members are called after its values has any number."""

DEPTH_MAX: Final = 6
"""Steps of a path that is looked at."""

_LEAVES_MAX: Final = 1_000
"""Values of one body that are looked at."""

_NAMELESS: Final = frozenset({"id", "uuid", "guid", "key", "number", "no", "code", "ref", "value"})
"""Members that are called so in whatever they lie."""

_TRACES: Final = {"traceparent", "b3"}


@dataclass(slots=True)
class Field:
    """What a stream's messages have in one place.

    Attributes:
        source: The place, as a definition writes it.
        messages: How many have it.
        invalid: How many of its values cannot be a key's.
        values: How often each value is there.
    """

    source: str
    messages: int = 0
    invalid: int = 0
    values: Counter[str] = field(default_factory=Counter)

    @property
    def name(self) -> str:
        """What it is called where it lies: the last member of a path, with whose it is where that says nothing."""
        name = self.source.partition(":")[2]
        if not name.startswith("$"):
            return name
        *owners, last = [_one_of(each) for each in name.split(".")[1:]] or [name]
        return f"{owners[-1]}_{last}" if owners and last.lower() in _NAMELESS else last

    @property
    def count(self) -> int:
        """How many values there are, each time they are there."""
        return self.values.total()

    @property
    def characters(self) -> float:
        """How long a value is, on average."""
        return sum(len(value) * times for value, times in self.values.items()) / max(1, self.count)


class Sample:
    """A stream's sample.

    Args:
        stream: The stream's name.
    """

    def __init__(self, stream: str) -> None:
        self.stream = stream
        self.messages = 0
        self.fields: dict[str, Field] = {}

    def add(self, message: Message) -> None:
        """Look at one message."""
        self.messages += 1
        found: dict[str, list[Any]] = {}
        for source, value in _places(message):
            found.setdefault(source, []).append(value)
        for source, values in found.items():
            if source in self.fields or len(self.fields) < FIELDS_MAX:
                self._note(self.fields.setdefault(source, Field(source)), values)

    def _note(self, known: Field, values: list[Any]) -> None:
        texts = set()
        for value in values:
            try:
                texts.add(canonical(value, KeyType.TEXT))
            except InvalidValue:
                known.invalid += 1
        known.messages += bool(texts)
        known.values.update(texts)


def _one_of(step: str) -> str:
    """A step of a path as one calls an item of it: `patient` for `patients[*]`."""
    word = step.replace("[*]", "")
    return word.removesuffix("s") if word != step and not word.endswith("ss") else word


def _places(message: Message) -> Iterator[tuple[str, Any]]:
    for name, value in message.headers.items():
        # What Relatum adds says nothing of what the message is about.
        if name.startswith("relatum_"):
            continue
        if isinstance(value, dict | list):
            yield from ((f"header:{path_text((name, *path))}", leaf) for path, leaf in _leaves(value, ()))
        elif value is not None and name.lower() in _TRACES:
            yield f"trace-id:{name}", value
        elif value is not None:
            yield f"header:{name}", value
    get = partial(getattr, message.properties)
    yield from ((f"property:{name}", value) for name in PROPERTIES if (value := get(name)) is not None)
    if not message.is_amqp:
        return
    try:
        document = Content(get("content_type"), get("content_encoding"), lambda: message.body).document("", b"")
    except InvalidValue:
        return
    for number, (path, leaf) in enumerate(_leaves(document, ())):
        if number == _LEAVES_MAX:
            return
        if path:
            yield f"body:{path_text(path)}", leaf


def _leaves(value: Any, path: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """What lies in tables and arrays, with its path; each item of an array is at the same one."""
    if len(path) > DEPTH_MAX or value is None:
        return
    if isinstance(value, Mapping):
        for name, each in value.items():
            if isinstance(name, str) and name:
                yield from _leaves(each, (*path, name))
    elif isinstance(value, list):
        for each in value:
            yield from _leaves(each, (*path, None))
    else:
        yield path, value


SAMPLE_MESSAGES: Final = 4_000
"""Messages of each stream that are looked at, unless told otherwise."""

_WINDOWS: Final = 8
"""Places of a stream at which messages are read one after another: those of a moment belong together."""

_BYTES_MAX: Final = 64 << 20
"""Bytes of bodies of one stream that are looked at."""


def sample(reader: StreamReader, stream: str, messages: int = SAMPLE_MESSAGES) -> Sample:
    """Look at so many messages of a stream, at the same places of each.

    Raises:
        StreamNotFound, NotAStream, AccessRefused: it cannot be read.
    """
    found = Sample(stream)
    first, last = reader.bounds(stream)
    if first is None or last is None:
        return found
    window = max(1, messages // _WINDOWS)
    span, size, read_to = last + 1 - first, 0, first
    for number in range(_WINDOWS):
        # A stream may have begun anew meanwhile: what is not there is not read.
        start = max(read_to, first + span * number // _WINDOWS)
        with closing(reader.iterate(stream, start, stop=last + 1)) as following:
            for message, _ in zip(following, range(window), strict=False):
                found.add(message)
                read_to = message.offset + 1
                size += len(message.body)
        if size > _BYTES_MAX or read_to > last:
            break
    return found
