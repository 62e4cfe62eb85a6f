"""Where masked values come from: no other key, and no list of headers, is to show what a masked key has."""

from collections.abc import Collection, Iterable

from relatum.keys._canonical import KeyType
from relatum.keys._component import Component, Place
from relatum.keys._definition import KeyDefinition


def masked_places(definitions: Iterable[KeyDefinition], names: Collection[str] = ()) -> dict[Place, KeyType]:
    """Where masked keys' values come from, and those of keys that name them, which have the same; with their types.

    Args:
        definitions: All that are in force.
        names: Keys that are masked whatever their definitions say.
    """
    by_name = {each.name: each for each in definitions}
    masked = [each for each in by_name.values() if each.masked or each.name in names]
    places = {unit: each.value_type for each in masked for unit in units_of(each.components)}
    pairs = [
        (units_of(pair), each.value_type)
        for each in by_name.values()
        if each.names in by_name
        for pair in zip(each.components, by_name[each.names].components, strict=False)
    ]
    count = -1
    while count != len(places):
        count = len(places)
        for pair, value_type in pairs:
            if not places.keys().isdisjoint(pair):
                places |= dict.fromkeys(pair, value_type)
    return places


def units_of(components: Iterable[Component]) -> tuple[Place, ...]:
    """What is masked with a value: all of a header or property; of a body, the path, in each item of an array."""
    places = (place for component in components for place in component.places)
    return tuple(
        Place(each.kind, each.name, tuple(None if isinstance(step, int) else step for step in each.path))
        if each.kind == "body"
        else Place(each.kind, each.name)
        for each in places
    )
