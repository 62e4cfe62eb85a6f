"""Which fields of messages would make keys, by samples of streams: those whose values relate or tell apart."""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import combinations
from typing import Any, Final

from relatum.keys import PROPERTIES, Content, InvalidValue, KeyDefinition, KeyType, canonical, path_text
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


ROW_BYTES: Final = 80
"""Bytes of a row of a short value, with its entry in the index, once its part is closed: docs/performance.md."""

SHARE_MIN: Final = 0.05
"""Share of a stream's messages that must have the field."""

OVERLAP_MIN: Final = 0.1
"""Share of the values of the stream that has fewer which must be in the other stream, too."""

_SELECTIVE: Final = 0.02
"""Share of the other messages that have the same value as one, at most, where a key stays in one stream."""

_RELATED: Final = 2
"""Messages that may have the same value as one in however small a sample: an order that was placed, paid and sent."""

_APART: Final = 4
"""How much more counts what tells messages apart than what few values do: so a patient comes before a ward."""

_FLAG: Final = 20
"""Messages from which on two different values are a flag, and not two things."""

_INVALID_MAX: Final = 0.1
_CHARACTERS_MAX: Final = 200
_AGAIN: Final = 1.2
"""How often values that come again are there at least, on average."""

_TELLING: Final = 6
"""Digits from which on numbers are more than measures or counts."""

_MOMENT: Final = re.compile(r"\d{4}-\d\d-\d\d[T ]\d\d:|1[4-9]\d{11}(?:\d{3})?\Z")
"""ISO 8601, or milliseconds or microseconds since 1970."""
_NUMBER: Final = re.compile(r"-?\d+\Z")
_IS_ID: Final = re.compile(
    r"(?:^|[^0-9A-Za-z])(?:id|no|nr|number|ref|key)\Z|(?<=[a-z0-9])(?:Id|ID|No|Nr|Number|Ref|Key)\Z|^(?i:id)\Z"
)
"""Names of which even small numbers tell one thing from another: `order_id`, `orderNo`."""


@dataclass(frozen=True, slots=True)
class Found:
    """A field of one stream.

    Attributes:
        stream: The stream.
        source: The place, as a definition writes it.
        share: Share of the sampled messages that have it: 0 to 1.
        distinct: Different values among them.
    """

    stream: str
    source: str
    share: float
    distinct: int


@dataclass(frozen=True, slots=True)
class Suggestion:
    """A key that could be defined.

    Attributes:
        definition: The key.
        found: Where it was found, the stream with most of it first.
        overlap: Share of the values of one stream that are in another, too; the greatest. 0 where there are none.
        is_unique: Whether each value is there once: it relates messages only where another stream has it, too.
        bytes_per_message: What a message of these streams would cost in PostgreSQL, on average.
        score: By which suggestions are ranked, after those that are not unique.
    """

    definition: KeyDefinition
    found: tuple[Found, ...]
    overlap: float
    is_unique: bool
    bytes_per_message: float
    score: float


@dataclass(frozen=True, slots=True)
class _Candidate:
    sample: Sample
    field: Field

    @property
    def share(self) -> float:
        return self.field.messages / max(1, self.sample.messages)

    @property
    def pairs(self) -> int:
        """Pairs of messages with the same value, each counted from both sides."""
        return sum(times * (times - 1) for times in self.field.values.values())

    @property
    def differs(self) -> float:
        """How likely two messages of the sample have different values."""
        return 1 - self.pairs / max(1, self.field.count * (self.field.count - 1))

    @property
    def is_selective(self) -> bool:
        """Whether few messages have the same value."""
        return self.pairs / self.field.count <= max(_RELATED, _SELECTIVE * (self.field.count - 1))

    @property
    def weight(self) -> float:
        """How much a value says: a code or a text says more than a small number."""
        numbers = sum(times for value, times in self.field.values.items() if _NUMBER.match(value)) / self.field.count
        if numbers < 0.9 or self.field.characters >= _TELLING or _IS_ID.search(self.field.name):
            return 1.0
        return 0.15 if self.field.characters < 4 else 0.5

    @property
    def times(self) -> float:
        """How often a value is there, on average."""
        return self.field.count / len(self.field.values)

    @property
    def is_moment(self) -> bool:
        return self._are_mostly(lambda value: bool(_MOMENT.match(value)))

    @property
    def is_text(self) -> bool:
        """Whether values are words for people, as names and remarks are."""
        return self._are_mostly(lambda value: " " in value)

    def _are_mostly(self, kind: Callable[[str], bool]) -> bool:
        return sum(map(kind, self.field.values)) > 0.9 * len(self.field.values)


def suggest(samples: Sequence[Sample]) -> list[Suggestion]:
    """The keys that samples of streams suggest, the best first: those whose values are there once come last."""
    by_source: dict[str, list[_Candidate]] = {}
    for sample in samples:
        for each in _candidates(sample):
            by_source.setdefault(each.field.source, []).append(each)
    judged = [judged for group in by_source.values() if (judged := _judged(group)) is not None]
    found: dict[str, Suggestion] = {}
    for make in sorted(judged, key=lambda each: (each.is_unique, -each.score, each.definition.name)):
        # Two keys cannot have one name: the second is called after its whole place.
        if make.definition.name in found:
            source = make.definition.sources[0]
            make = replace(make, definition=KeyDefinition(_key_name(source), source=source))
        found[make.definition.name] = make
    return list(found.values())


def _candidates(sample: Sample) -> list[_Candidate]:
    """The fields that are often there and have different values; of two with the same values, the first."""
    kept: list[_Candidate] = []
    # Headers come first: they cost less than bodies.
    for each in sample.fields.values():
        is_fit = (
            each.messages >= SHARE_MIN * sample.messages
            and each.invalid <= _INVALID_MAX * (each.count + each.invalid)
            and each.characters <= _CHARACTERS_MAX
            and len(each.values) > (2 if each.count >= _FLAG else 1)
            and not each.values.keys() <= {"true", "false"}
        )
        if is_fit and not any(other.field.values == each.values for other in kept):
            kept.append(_Candidate(sample, each))
    return kept


def _judged(group: Sequence[_Candidate]) -> Suggestion | None:
    """The key of one place in one or more streams, if it is worth one."""
    overlap = max((_overlap(one.field, other.field) for one, other in combinations(group, 2)), default=0.0)
    weight, differs = min(each.weight for each in group), max(each.differs for each in group)
    telling = [each for each in group if each.weight == 1 and each.is_selective and not each.is_moment]
    again = [each for each in telling if each.times >= _AGAIN]
    # The hour of a flight comes again; the moment of an event is its own, whatever else happened then.
    if overlap and weight >= 0.5 and not all(each.is_moment and each.times < _AGAIN for each in group):
        score = weight * differs**_APART * (1 + 2 * overlap)
    elif again:
        score = max(each.differs * min(each.times, 4) / 4 for each in again)
    elif any(not each.is_text for each in telling):
        score = differs
    else:
        return None
    group = sorted(group, key=lambda each: (-each.share, each.sample.stream))
    rows, messages = sum(each.field.count for each in group), sum(each.sample.messages for each in group)
    size = sum(each.field.count * (ROW_BYTES + 2 * max(0.0, each.field.characters - 8)) for each in group)
    return Suggestion(
        KeyDefinition(_key_name(group[0].field.name), source=group[0].field.source),
        tuple(Found(each.sample.stream, each.field.source, each.share, len(each.field.values)) for each in group),
        overlap,
        not (overlap or again),
        size / messages,
        score * min(1.0, rows / messages),
    )


def _overlap(one: Field, other: Field) -> float:
    """Share of the values of the one that has fewer that the other has, too; 0 where that may be by chance."""
    shared = len(one.values.keys() & other.values.keys())
    overlap = shared / min(len(one.values), len(other.values))
    return overlap if shared >= 2 and overlap >= OVERLAP_MIN else 0.0


def _key_name(name: str) -> str:
    return re.sub(r"[^0-9A-Za-z_.-]+", "_", name).strip("_") or "key"
