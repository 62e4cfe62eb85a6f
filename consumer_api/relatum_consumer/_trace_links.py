"""Which values of a message lead to which others, and how messages that were read are linked. No input or output."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

from relatum.ids import MessageId
from relatum.keys import KeyDefinition, bases_of
from relatum.reading import Message
from relatum_consumer.traces import Edge, Shared

Value: TypeAlias = tuple[int, str]
"""A key's number, and a value in canonical form."""


class Directions:
    """The keys of a trace, and what names what.

    Args:
        definitions: The keys; a name that is not of one of them names nothing.
    """

    def __init__(self, definitions: Sequence[KeyDefinition]) -> None:
        self.definitions = {key.key_id: key for key in definitions}
        numbers = {key.name: key.key_id for key in definitions}
        self._named = {key.key_id: numbers[key.names] for key in definitions if key.names in numbers}
        self._namers: dict[int, list[int]] = defaultdict(list)
        for key_id, named in self._named.items():
            self._namers[named].append(key_id)
        self._are_plain = all(key.is_plain for key in definitions)
        self._led_to = {key_id: self._leads_to(key_id) for key_id in self.definitions}

    def _leads_to(self, key_id: int) -> tuple[int, ...]:
        """The keys that messages of the same value are sought by: itself, those it names, and those that name it.

        And those that name what it names: they go together also where nothing is there by that name.
        """
        roots = [key_id, *([self._named[key_id]] if key_id in self._named else [])]
        return tuple(dict.fromkeys(each for root in roots for each in (root, *self._namers[root])))

    def values_of(self, message: Message) -> tuple[Value, ...]:
        """A message's values, in the order of the keys; what cannot be one is not recorded either."""
        if self._are_plain:
            return tuple([(n, text) for n, key in self.definitions.items() for text in key.values_of(message)])
        # A body is parsed once for all keys.
        base_of = bases_of(message)
        return tuple((key_id, text) for key_id, key in self.definitions.items() for text in key.read(base_of)[0])

    def sought(self, values: Iterable[Value]) -> Iterable[Value]:
        """The values to ask for, given some."""
        return ((other, value) for key_id, value in values for other in self._led_to[key_id])

    def links(
        self, values: Mapping[MessageId, Sequence[Value]], too_many: Iterable[Value]
    ) -> tuple[tuple[Edge, ...], tuple[Shared, ...]]:
        """How messages are linked, in their order.

        Args:
            values: Of each message its values.
            too_many: Values that were not followed: that some of the messages share one is not told.
        """
        carriers: dict[Value, list[MessageId]] = defaultdict(list)
        for where, held in values.items():
            for pair in held:
                carriers[pair].append(where)
        edges: list[Edge] = []
        for effect, held in values.items():
            for key_id, value in held:
                if key_id in self._named:
                    named = carriers.get((self._named[key_id], value), ())
                    causes: list[MessageId | None] = [each for each in named if each != effect]
                    name = self.definitions[key_id].name
                    edges += [Edge(cause, effect, name, value) for cause in causes or [None]]
        left_out = set(too_many)
        shared = [
            Shared(self.definitions[key_id].name, value, tuple(ids))
            for (key_id, value), ids in carriers.items()
            if len(ids) > 1 and (key_id, value) not in left_out and not self._is_named_here(key_id, value, carriers)
        ]
        return tuple(edges), tuple(shared)

    def _is_named_here(self, key_id: int, value: str, carriers: Mapping[Value, Sequence[MessageId]]) -> bool:
        """Whether the message that a value names is there: then who has the value is linked by it."""
        return key_id in self._named and (self._named[key_id], value) in carriers
