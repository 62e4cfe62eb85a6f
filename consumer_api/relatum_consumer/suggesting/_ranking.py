"""Which fields would make keys: those whose values tell messages apart, and come again. Pure."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from relatum.keys import PLACES_MAX, KeyDefinition
from relatum_consumer.suggesting._fields import Field, Sample
from relatum_consumer.suggesting._naming import namings

ROW_BYTES: Final = 80
"""Bytes of a row of a short value, with its entry in the index, once its part is closed: docs/scale.md."""

SHARE_MIN: Final = 0.05
"""Of a stream's messages, those that must have it."""

OVERLAP_MIN: Final = 0.1
"""Of the values of the one that has fewer, those that must be in the other stream, too."""

SELECTIVE: Final = 0.98
"""How likely two messages must have different values where a key stays in one stream: 1 of 50 shares one, at most."""

_APART: Final = 4
"""How much more counts what tells messages apart than what few values do: so a patient comes before a ward."""

_FLAG: Final = 20
"""Messages from which on two different values are a flag, and not two things."""

_INVALID_MAX: Final = 0.1
_AGAIN: Final = 1.2
"""How often values that come again are there at least, on average."""

_LESS: Final = 1e-6
_TELLING: Final = 6
"""Characters of values from which on the same value in places of different names is no chance."""

_MOMENT: Final = re.compile(r"\d{4}-\d\d-\d\d[T ]\d\d:|1[4-9]\d{11}(?:\d{3})?\Z")
"""ISO 8601, or milliseconds or microseconds since 1970."""
_NUMBER: Final = re.compile(r"-?\d+\Z")
_IS_ID: Final = re.compile(
    r"(?:^|[^0-9A-Za-z])(?:id|no|nr|number|ref|key)\Z|(?<=[a-z0-9])(?:Id|ID|No|Nr|Number|Ref|Key)\Z|^(?i:id)\Z"
)
"""Names of which even small numbers tell one thing from another: `order_id`, `orderNo`."""
_WORD: Final = re.compile(r"[^0-9A-Za-z]+")


@dataclass(frozen=True, slots=True)
class Found:
    """A field of one stream.

    Attributes:
        stream: The stream.
        source: The place, as a definition writes it.
        share: Of the messages looked at, those that have it: 0 to 1.
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
        overlap: Of the values of one stream, those that are in another, too; the greatest share. Of a key that names
            another, its values that were found as that one's. 0 where it is in one stream alone.
        bytes_per_message: What a message of these streams would cost in PostgreSQL, on average.
        score: By which suggestions are ranked.
    """

    definition: KeyDefinition
    found: tuple[Found, ...]
    overlap: float
    bytes_per_message: float
    score: float


@dataclass(frozen=True, slots=True)
class _Candidate:
    stream: str
    share: float
    field: Field

    @property
    def differs(self) -> float:
        """How likely two messages have different values: two of the sample, and no message with itself."""
        pairs = self.field.count * (self.field.count - 1)
        return 1 - sum(times * (times - 1) for times in self.field.values.values()) / max(1, pairs)

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
        return sum(bool(_MOMENT.match(value)) for value in self.field.values) > 0.9 * len(self.field.values)

    @property
    def word(self) -> str:
        return _WORD.sub("", self.field.name).lower()


def suggest(samples: Sequence[Sample]) -> list[Suggestion]:
    """The keys that samples of streams suggest, the best first."""
    candidates = [each for sample in samples for each in _candidates(sample)]
    groups = _groups(candidates, {(sample.stream, source) for sample in samples for source in sample.fields})
    found = _without_twins([each for group in groups if (each := _judged(group, samples)) is not None], samples)
    found = [_everywhere(each, candidates, samples) for each in _with_names(found, candidates, samples)]
    return sorted(found, key=lambda each: (-each.score, each.definition.name))


def _everywhere(each: Suggestion, candidates: Sequence[_Candidate], samples: Sequence[Sample]) -> Suggestion:
    """The same, with the streams of which it reads one of its places, too, whatever values they have there."""
    group = {one.stream: one.source for one in each.found}
    for place in each.definition.sources[0].split(" or "):
        for one in candidates:
            if one.field.source == place:
                group.setdefault(one.stream, place)
    if len(group) == len(each.found):
        return each
    fields = [one for one in candidates if group.get(one.stream) == one.field.source]
    whole = _suggested(fields, samples, each.overlap, each.score)
    return replace(each, found=whole.found, bytes_per_message=whole.bytes_per_message)


def _without_twins(found: list[Suggestion], samples: Sequence[Sample]) -> list[Suggestion]:
    """The same, each place in one key, and without what has in each message of its stream what a better one has."""
    fields = {sample.stream: sample.fields for sample in samples}
    kept: dict[str, Suggestion] = {}
    seen: list[tuple[str, Field]] = []
    for each in sorted(found, key=lambda each: (-len(each.found), -each.score)):
        source, mine = each.definition.sources[0], [(one.stream, fields[one.stream][one.source]) for one in each.found]
        if source in kept:
            kept[source] = replace(kept[source], found=kept[source].found + each.found)
        elif len(mine) > 1 or not any(_is_twin(*mine[0], *other) for other in seen):
            kept[source] = each
        else:
            continue
        seen += mine
    return list(kept.values())


def _is_twin(stream: str, field: Field, other_stream: str, other: Field) -> bool:
    """Whether two fields are as often the same, and each for the first time in the same message."""
    return stream == other_stream and field.values == other.values and field.first == other.first


def _with_names(
    found: list[Suggestion], candidates: Sequence[_Candidate], samples: Sequence[Sample]
) -> list[Suggestion]:
    """The same, with those that name messages, and the ids that they name, which come before them."""
    named = namings(each.field for each in candidates if not each.is_moment)
    known = {one.source for each in found for one in each.found}
    for each in named:
        for source in (each.id_source, each.source):
            if source not in known:
                known.add(source)
                group = [one for one in candidates if one.field.source == source]
                found.append(_suggested(group, samples, 0.0, 1 + 2 * each.share))
    apart = _named_apart(found)
    place = {one.source: number for number, each in enumerate(apart) for one in each.found}
    for each in sorted(named, key=lambda each: -each.share):
        here, there = place[each.source], place[each.id_source]
        naming, ids = apart[here], apart[there]
        # One key for both, or one that names what names it, has no direction.
        if here != there and naming.definition.names is None and ids.definition.names != naming.definition.name:
            definition = replace(naming.definition, names=ids.definition.name)
            score = min(naming.score, ids.score * (1 - _LESS))
            overlap = max(naming.overlap, each.share)
            apart[here] = replace(naming, definition=definition, overlap=overlap, score=score)
    return apart


def _candidates(sample: Sample) -> list[_Candidate]:
    """The fields that are often enough there, and say something; of two that say the same, the first."""
    kept: list[_Candidate] = []
    # Headers come first: they cost less than bodies.
    for field in sample.fields.values():
        share = field.messages / max(1, sample.messages)
        if share < SHARE_MIN or field.invalid > _INVALID_MAX * (field.count + field.invalid) or len(field.values) < 2:
            continue
        if len(field.values) == 2 and field.count >= _FLAG:
            continue
        each = _Candidate(sample.stream, share, field)
        is_same = any(other.word == each.word and other.field.values == field.values for other in kept)
        if not is_same and each.field.values.keys() - {"true", "false"} and field.characters <= 200:
            kept.append(each)
    return kept


def _groups(candidates: Sequence[_Candidate], places: set[tuple[str, str]]) -> list[list[_Candidate]]:
    """Fields of different streams that hold the same values: one of each stream, the most alike first.

    `places`: All streams with all their places: where one stream has the place of the other's field, too, "A or B"
    would take that.
    """
    pairs = []
    for number, one in enumerate(candidates):
        for other in candidates[number + 1 :]:
            if one.stream == other.stream:
                continue
            is_apart = (one.stream, other.field.source) in places or (other.stream, one.field.source) in places
            overlap = 0.0 if is_apart and one.word != other.word else _overlap(one, other)
            if overlap >= OVERLAP_MIN:
                pairs.append((one.word == other.word, overlap, number, candidates.index(other)))
    group_of: dict[int, list[int]] = {number: [number] for number in range(len(candidates))}
    for _, _, here, there in sorted(pairs, key=lambda pair: (not pair[0], -pair[1])):
        first, second = group_of[here], group_of[there]
        streams = [candidates[number].stream for number in (*first, *second)]
        if first is not second and len(set(streams)) == len(streams):
            first += second
            for number in second:
                group_of[number] = first
    return [[candidates[n] for n in group] for n, group in group_of.items() if group[0] == n]


def _overlap(one: _Candidate, other: _Candidate) -> float:
    """Of the values of the one that has fewer, those that the other has, too; 0 where that may be by chance."""
    shared = one.field.values.keys() & other.field.values.keys()
    is_telling = one.word == other.word or sum(map(len, shared)) >= _TELLING * max(1, len(shared))
    if len(shared) < 2 or not is_telling:
        return 0.0
    return len(shared) / min(len(one.field.values), len(other.field.values))


def _judged(group: Sequence[_Candidate], samples: Sequence[Sample]) -> Suggestion | None:
    best = max(group, key=lambda each: (each.share, each.field.count))
    overlap = max((_overlap(one, other) for one in group for other in group if one.stream != other.stream), default=0)
    weight, differs = min(each.weight for each in group), max(each.differs for each in group)
    if len(group) > 1:
        # What many messages share relates them, and tells little: a ward is less than a patient.
        score = weight * differs**_APART * (1 + 2 * overlap)
        # The hour of a flight comes again; the moment of an event is its own, whatever else happened then.
        is_worth = weight >= 0.5 and not all(each.is_moment and each.times < _AGAIN for each in group)
    else:
        score = weight * differs * min(best.times, 4) / 4
        # Values that never come again relate nothing, and those that come too often too much.
        is_worth = weight == 1 and differs >= SELECTIVE and best.times >= _AGAIN and not best.is_moment
    if not is_worth:
        return None
    return _suggested(group, samples, float(overlap), score)


def _suggested(group: Sequence[_Candidate], samples: Sequence[Sample], overlap: float, score: float) -> Suggestion:
    """A key of fields of different streams."""
    best = max(group, key=lambda each: (each.share, each.field.count))
    sources = dict.fromkeys(each.field.source for each in sorted(group, key=lambda each: -each.share))
    definition = KeyDefinition(_key_name(best.field.name), source=" or ".join(list(sources)[:PLACES_MAX]))
    read = {sample.stream: sample.messages for sample in samples}
    rows = sum(each.field.count for each in group)
    size = sum(each.field.count * (ROW_BYTES + 2 * max(0.0, each.field.characters - 8)) for each in group)
    found = tuple(
        Found(each.stream, each.field.source, each.share, len(each.field.values))
        for each in sorted(group, key=lambda each: (-each.share, each.stream))
    )
    messages = sum(read[each.stream] for each in group)
    share = rows / messages
    return Suggestion(definition, found, overlap, size / messages, score * min(1.0, share))


def _key_name(name: str) -> str:
    return re.sub(r"[^0-9A-Za-z_.-]+", "_", name).strip("_") or "key"


def _named_apart(found: Iterable[Suggestion]) -> list[Suggestion]:
    """The suggestions, those of one name numbered: two cannot be defined by it."""
    taken: dict[str, int] = {}
    apart = []
    for each in sorted(found, key=lambda each: -each.score):
        name = each.definition.name
        taken[name] = taken.get(name, 0) + 1
        if taken[name] > 1:
            definition = KeyDefinition(f"{name}_{taken[name]}", source=tuple(each.definition.sources))
            each = Suggestion(definition, each.found, each.overlap, each.bytes_per_message, each.score)
        apart.append(each)
    return apart
