"""Which fields name another message: their values are the ids of messages that came before. Pure."""

from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Final, NamedTuple

from relatum_consumer.suggesting._fields import Field

UNIQUE: Final = 0.98
"""Of the values of an id, those that one message alone has, at least."""

NAMED_MIN: Final = 0.1
"""Of the values of a field, those that are ids of the sample, at least: others lie beside it."""

_LATER_MIN: Final = 0.8
"""Of those, the ids that were there before they were named, at least: else the message has its own id twice."""

_PLACES_MAX: Final = 8
"""Places in which the same id is looked for: a body may repeat it in all of its members."""

_TELLING: Final = 6
"""Characters of values from which on they are no numbers that are alike by chance."""


class Naming(NamedTuple):
    """A place whose values are ids, the place of those, and of the first one's values the share that is."""

    source: str
    id_source: str
    share: float


def namings(fields: Iterable[Field]) -> list[Naming]:
    """The places that name messages, each with the ids that it names most of; of fields that are candidates."""
    merged: dict[str, Field] = {}
    for each in fields:
        whole = merged.setdefault(each.source, Field(each.source))
        whole.values.update(each.values)
        for value, moment in each.first.items():
            whole.first[value] = min(moment, whole.first.get(value, moment))
    telling = [each for each in merged.values() if each.characters >= _TELLING]
    ids_of: dict[str, list[Field]] = defaultdict(list)
    for each in telling:
        if len(each.values) >= UNIQUE * each.count:
            for value in each.values:
                if len(ids_of[value]) < _PLACES_MAX:
                    ids_of[value].append(each)
    return [naming for each in telling if (naming := _naming(each, ids_of)) is not None]


def _naming(field: Field, ids_of: dict[str, list[Field]]) -> Naming | None:
    named, later = Counter[str](), Counter[str]()
    for value in field.values:
        for each in ids_of.get(value, ()):
            if each is not field:
                named[each.source] += 1
                later[each.source] += each.first[value] < field.first[value]
    for source, count in named.most_common():
        if count < 2 or count < NAMED_MIN * len(field.values):
            break
        if later[source] >= _LATER_MIN * count:
            return Naming(field.source, source, count / len(field.values))
    return None
