"""Values that are shown as digests: the same value has the same digest, and nobody reads the value off it.

What is masked is where a value comes from: a header or a property, or a path in a body. So no other key, and no list
of headers, shows what a masked key has. The secret is the database's: a digest is the same in each process, and after
each start.
"""

import hashlib
import hmac
from collections.abc import Iterable, Sequence
from typing import Any, Final

from relatum.keys import (
    InvalidValue,
    KeyDefinition,
    KeyType,
    Place,
    bases_of,
    canonical,
    masked_places,
    units_of,
)
from relatum.reading import Message

_DIGITS: Final = 10
"""Hexadecimal digits of a digest: 40 bits tell the values of a page apart."""

NOT_SAID: Final = "~"
"""Shown in place of a value that may be masked, while the keys cannot be read."""


class Masking:
    """Says what is masked, and how it is shown.

    Args:
        keys: Names of keys that are masked whatever their definitions say.
        bodies: Whether all bodies are masked.
        show_bodies: Whether bodies are shown of messages that have a masked value, too.

    Attributes:
        definitions: The keys by name, as they were last known; empty before any were taken.
        is_known: Whether any were: before that nothing can be shown.
    """

    def __init__(self, keys: Iterable[str], *, bodies: bool, show_bodies: bool) -> None:
        self._keys = frozenset(keys)
        self._bodies = bodies
        self._show_bodies = show_bodies
        self.is_known = False
        self.definitions: dict[str, KeyDefinition] = {}
        # The type is that of the key, by which the same value has the same text wherever it stands.
        self._places: dict[Place, KeyType] = {}
        self.secret: bytes | None = None

    def lacks_secret(self, definitions: tuple[KeyDefinition, ...]) -> bool:
        """Whether digests are needed for these definitions, and cannot be made yet."""
        return self.secret is None and any(each.masked or each.name in self._keys for each in definitions)

    def take(self, definitions: tuple[KeyDefinition, ...]) -> None:
        """Go by these definitions from now on."""
        if not self.is_known or definitions != tuple(self.definitions.values()):
            self._places = masked_places(definitions, self._keys)
            self.definitions = {each.name: each for each in definitions}
            self.is_known = True

    def is_masked(self, definition: KeyDefinition) -> bool:
        """Whether a key's values are masked: by itself, or since they come from where those of a masked key do."""
        assert self.is_known, "definitions come from `Site.keys`"
        return not self._places.keys().isdisjoint(units_of(definition.components))

    def is_masked_place(self, kind: str, name: str) -> bool:
        """Whether a header, or a property, is masked."""
        assert self.is_known, "definitions come from `Site.keys`"
        return Place(kind, name) in self._places

    def hides_body(self, message: Message) -> bool:
        """Whether a message's body is not shown: a body may hold the value that is masked."""
        if self._bodies or self._show_bodies:
            return self._bodies
        base_of = bases_of(message)
        try:
            return any(place.within(base_of(place)) for place in self._places)
        except InvalidValue:
            return True  # A body that cannot be read may hold it.

    @property
    def hides_reasons(self) -> bool:
        """Whether it is not shown why executors failed: they say there what they like, a masked value too."""
        return self._bodies or (bool(self._places) and not self._show_bodies)

    def digest(self, value: str) -> str:
        """How a masked value is shown."""
        assert self.secret is not None, "the secret comes with `Site.keys`"
        given = value.encode("utf-8", "surrogatepass")
        return f"~{hmac.new(self.secret, given, hashlib.sha256).hexdigest()[:_DIGITS]}"

    def shown(self, definition: KeyDefinition, value: str) -> str:
        """A key's canonical value as it is shown."""
        return self.digest(value) if self.is_masked(definition) else value

    def digest_at(self, kind: str, name: str, value: Any, text: str) -> str:
        """How the value of a masked header or property is shown: with the digest that its key's value has.

        `text`: The value where it is none that the key can have.
        """
        try:
            return self.digest(canonical(value, self._places[Place(kind, name)]))
        except InvalidValue:
            return self.digest(text)


def sought(definition: KeyDefinition, values: Sequence[str]) -> str:
    """A key's canonical value, of what somebody asks for; what is none stays as it is."""
    try:
        return definition.canonical_query(values[0] if len(values) == 1 else tuple(values))
    except (InvalidValue, ValueError):
        return " + ".join(values)
