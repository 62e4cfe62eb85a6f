"""Masking: answers show digests instead of values. Equal values have equal digests, which do not reveal the value.

A masked key masks the sources of its values: headers, properties and paths in bodies. So no other key, and no list of
headers, shows its values. The database stores the secret of the digests, so all processes compute the same digests.
"""

import hashlib
import hmac
import logging
from collections.abc import Iterable
from typing import Any, Final

from relatum.keys import InvalidValue, KeyDefinition, KeyType, Place, canonical, masked_places, may_hold, units_of
from relatum.reading import Message

log = logging.getLogger(__name__)

_DIGITS: Final = 10
"""Hexadecimal digits of a digest: 40 bits distinguish the values of a page."""

HIDDEN_VALUE: Final = "~"
"""Shown instead of a removed key's value, which may have been masked."""


class Masking:
    """Knows which keys are masked, by definition or because `keys` names them, and computes digests.

    `definitions` has the last known keys. The first `update` sets `is_known`; before it, no value can be shown.
    """

    def __init__(self, keys: Iterable[str], *, bodies: bool, show_bodies: bool) -> None:
        self._keys = frozenset(keys)
        self._bodies = bodies
        self._show_bodies = show_bodies
        self.is_known = False
        self.definitions: dict[str, KeyDefinition] = {}
        # The type of the place's key gives a value the same text, and thus the same digest, in every place.
        self._places: dict[Place, KeyType] = {}
        self.secret: bytes | None = None

    def lacks_secret(self, definitions: tuple[KeyDefinition, ...]) -> bool:
        """Whether these definitions need digests and the secret is not loaded yet."""
        return self.secret is None and any(each.masked or each.name in self._keys for each in definitions)

    def update(self, definitions: tuple[KeyDefinition, ...]) -> None:
        if not self.is_known or definitions != tuple(self.definitions.values()):
            self._places = masked_places(definitions, self._keys)
            self.definitions = {each.name: each for each in definitions}
            self.is_known = True
            for name in sorted(self._keys - self.definitions.keys()):
                log.warning("no key %r is defined, so nothing is masked for it: check the names given to --mask", name)

    def is_masked(self, definition: KeyDefinition) -> bool:
        """Whether a key's values are masked: the key is masked, or shares a source with a masked key."""
        assert self.is_known, "`Site.keys` loads the definitions"
        return not self._places.keys().isdisjoint(units_of(definition.components))

    def is_masked_key(self, name: str) -> bool:
        """Whether a key's values are digests; a removed key may have been masked, so it counts as masked."""
        return name not in self.definitions or self.is_masked(self.definitions[name])

    def is_masked_place(self, kind: str, name: str) -> bool:
        assert self.is_known, "`Site.keys` loads the definitions"
        return Place(kind, name) in self._places

    def hides_body(self, message: Message) -> bool:
        """Whether to hide a message's body, which may contain a masked value."""
        return self._bodies or (not self._show_bodies and may_hold(message, self._places))

    @property
    def hides_reasons(self) -> bool:
        """Whether to hide executors' reasons, which may contain anything, including masked values."""
        return self._bodies or (bool(self._places) and not self._show_bodies)

    def digest(self, value: str) -> str:
        assert self.secret is not None, "`Site.keys` loads the secret"
        given = value.encode("utf-8", "surrogatepass")
        return f"~{hmac.new(self.secret, given, hashlib.sha256).hexdigest()[:_DIGITS]}"

    def shown(self, key: str, value: str) -> str:
        """Return a key's canonical value, its digest if the key is masked, or `HIDDEN_VALUE` if it was removed."""
        if key not in self.definitions:
            return HIDDEN_VALUE
        return self.digest(value) if self.is_masked(self.definitions[key]) else value

    def digest_at(self, kind: str, name: str, value: Any, text: str) -> str:
        """Return the digest of a header or property: that of its key's value, or of `text` if the key refuses it."""
        try:
            return self.digest(canonical(value, self._places[Place(kind, name)]))
        except InvalidValue:
            return self.digest(text)
