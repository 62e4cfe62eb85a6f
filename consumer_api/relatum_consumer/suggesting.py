"""Suggestions of keys, by samples of streams: fields whose values relate messages or tell them apart."""

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
"""The most fields of a stream: a body with values as member names has any number."""

DEPTH_MAX: Final = 6
"""The most steps of a path."""

_LEAVES_MAX: Final = 1_000
"""The most values of a body."""

_NAMELESS: Final = frozenset({"id", "uuid", "guid", "key", "number", "no", "code", "ref", "value"})
"""Member names that need the name of their parent to be meaningful."""

_TRACES: Final = {"traceparent", "b3"}


@dataclass(slots=True)
class Field:
    """The values that a stream's messages have in one place.

    Attributes:
        source: The place, as in a key definition.
        messages: How many messages have it.
        invalid: How many of its values are invalid for a key.
        values: How often each value occurs.
    """

    source: str
    messages: int = 0
    invalid: int = 0
    values: Counter[str] = field(default_factory=Counter)

    @property
    def name(self) -> str:
        """The last member of its path, with the parent's name if it says nothing by itself."""
        name = self.source.partition(":")[2]
        if not name.startswith("$"):
            return name
        *owners, last = [_one_of(each) for each in name.split(".")[1:]] or [name]
        return f"{owners[-1]}_{last}" if owners and last.lower() in _NAMELESS else last

    @property
    def count(self) -> int:
        """How many valid values occur, with repetitions."""
        return self.values.total()

    @property
    def characters(self) -> float:
        """The average length of a value."""
        return sum(len(value) * times for value, times in self.values.items()) / max(1, self.count)


class Sample:
    """The sample of a stream.

    Args:
        stream: The stream's name.
    """

    def __init__(self, stream: str) -> None:
        self.stream = stream
        self.messages = 0
        self.fields: dict[str, Field] = {}

    def add(self, message: Message) -> None:
        """Add a message to the sample."""
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
    """Return the singular of a path step: `patient` for `patients[*]`."""
    word = step.replace("[*]", "")
    return word.removesuffix("s") if word != step and not word.endswith("ss") else word


def _places(message: Message) -> Iterator[tuple[str, Any]]:
    for name, value in message.headers.items():
        # Relatum's own headers say nothing about the subject.
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
    """Yield the values in tables and arrays with their paths; the items of an array share one path."""
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
"""Default number of sampled messages of each stream."""

_WINDOWS: Final = 8
"""Places of a stream to sample; messages in a row are read at each, because neighbours belong together."""

_BYTES_MAX: Final = 64 << 20
"""The most bytes of bodies read from a stream."""


def sample(reader: StreamReader, stream: str, messages: int = SAMPLE_MESSAGES) -> Sample:
    """Sample so many messages of a stream, spread over its length.

    Raises:
        StreamNotFound, NotAStream, AccessRefused: the stream cannot be read.
    """
    found = Sample(stream)
    first, last = reader.bounds(stream)
    if first is None or last is None:
        return found
    window = max(1, messages // _WINDOWS)
    span, size, read_to = last + 1 - first, 0, first
    for number in range(_WINDOWS):
        # The iterator may start later than asked, because retention dropped offsets: do not read messages twice.
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
"""Bytes of a row of a short value, with its index entry, once its part is closed: docs/performance.md."""

SHARE_MIN: Final = 0.05
"""The least share of a stream's messages that must have the field."""

OVERLAP_MIN: Final = 0.1
"""The least share of the values of the stream with fewer values that must occur in the other stream, too."""

_SELECTIVE: Final = 0.02
"""The largest share of other messages with the same value, for a key of one stream."""

_RELATED: Final = 2
"""Messages that may share a value however small the sample is: an order that was placed, paid and sent."""

_APART: Final = 4
"""Exponent of how well values tell messages apart: a patient ranks above a ward."""

_FLAG: Final = 20
"""From this many messages on, a field of two different values is a flag."""

_INVALID_MAX: Final = 0.1
_CHARACTERS_MAX: Final = 200
_AGAIN: Final = 1.2
"""The least average number of messages of a value, for values that recur."""

_TELLING: Final = 6
"""From this many digits on, numbers are more than measures or counts."""

_MOMENT: Final = re.compile(r"\d{4}-\d\d-\d\d[T ]\d\d:|1[4-9]\d{11}(?:\d{3})?\Z")
"""ISO 8601, or milliseconds or microseconds since 1970."""
_NUMBER: Final = re.compile(r"-?\d+\Z")
_IS_ID: Final = re.compile(
    r"(?:^|[^0-9A-Za-z])(?:id|no|nr|number|ref|key)\Z|(?<=[a-z0-9])(?:Id|ID|No|Nr|Number|Ref|Key)\Z|^(?i:id)\Z"
)
"""Names for which even small numbers are identifiers: `order_id`, `orderNo`."""


@dataclass(frozen=True, slots=True)
class Found:
    """A field of one stream.

    Attributes:
        stream: The stream's name.
        source: The place, as in a key definition.
        share: The share of the sampled messages that have it: 0 to 1.
        distinct: The number of different values among them.
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
        found: Where it was found, the stream with the largest share first.
        overlap: The largest share of one stream's values that occur in another stream, too; 0 if there is no other.
        is_unique: Whether each value occurs once in its stream and in no other, so that it relates no messages yet.
        bytes_per_message: The average storage in PostgreSQL of a message of these streams, in bytes.
        score: The rank, higher is better. Suggestions that are unique rank behind the others.
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
        """The number of pairs of messages with the same value, counted from both sides."""
        return sum(times * (times - 1) for times in self.field.values.values())

    @property
    def differs(self) -> float:
        """The probability that two messages of the sample have different values."""
        return 1 - self.pairs / max(1, self.field.count * (self.field.count - 1))

    @property
    def is_selective(self) -> bool:
        """Whether few messages share a value."""
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
        """How often a value occurs, on average."""
        return self.field.count / len(self.field.values)

    @property
    def is_moment(self) -> bool:
        return self._are_mostly(lambda value: bool(_MOMENT.match(value)))

    @property
    def is_text(self) -> bool:
        """Whether values are words for people, such as names and remarks."""
        return self._are_mostly(lambda value: " " in value)

    def _are_mostly(self, kind: Callable[[str], bool]) -> bool:
        return sum(map(kind, self.field.values)) > 0.9 * len(self.field.values)


def suggest(samples: Sequence[Sample]) -> list[Suggestion]:
    """Return the keys that samples of streams suggest, the best first; unique ones come last."""
    by_source: dict[str, list[_Candidate]] = {}
    for sample in samples:
        for each in _candidates(sample):
            by_source.setdefault(each.field.source, []).append(each)
    judged = [judged for group in by_source.values() if (judged := _judged(group)) is not None]
    found: dict[str, Suggestion] = {}
    for make in sorted(judged, key=lambda each: (each.is_unique, -each.score, each.definition.name)):
        # Two keys cannot share a name: the second is named after its whole place.
        if make.definition.name in found:
            source = make.definition.sources[0]
            make = replace(make, definition=KeyDefinition(_key_name(source), source=source))
        found[make.definition.name] = make
    return list(found.values())


def _candidates(sample: Sample) -> list[_Candidate]:
    """Return the frequent fields with different values; of two with equal values, the first."""
    kept: list[_Candidate] = []
    # Headers come first, because they cost less than bodies.
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
    """Return the key of one place in one or more streams, if it is useful."""
    overlap = max((_overlap(one.field, other.field) for one, other in combinations(group, 2)), default=0.0)
    weight, differs = min(each.weight for each in group), max(each.differs for each in group)
    telling = [each for each in group if each.weight == 1 and each.is_selective and not each.is_moment]
    again = [each for each in telling if each.times >= _AGAIN]
    # The hour of a flight recurs; the moment of an event belongs to it alone, whatever else happened then.
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
    """Return the share of the smaller set of values that the other has, too; 0 if it may be chance."""
    shared = len(one.values.keys() & other.values.keys())
    overlap = shared / min(len(one.values), len(other.values))
    return overlap if shared >= 2 and overlap >= OVERLAP_MIN else 0.0


def _key_name(name: str) -> str:
    return re.sub(r"[^0-9A-Za-z_.-]+", "_", name).strip("_") or "key"
