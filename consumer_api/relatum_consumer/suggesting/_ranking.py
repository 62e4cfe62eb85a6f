"""Which fields would make keys: those whose values are in several streams, come again, or tell messages apart. Pure."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Final

from relatum.keys import KeyDefinition
from relatum_consumer.suggesting._fields import Field, Sample

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
    for field in sample.fields.values():
        is_fit = (
            field.messages >= SHARE_MIN * sample.messages
            and field.invalid <= _INVALID_MAX * (field.count + field.invalid)
            and field.characters <= _CHARACTERS_MAX
            and len(field.values) > (2 if field.count >= _FLAG else 1)
            and not field.values.keys() <= {"true", "false"}
        )
        if is_fit and not any(other.field.values == field.values for other in kept):
            kept.append(_Candidate(sample, field))
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
