"""Values that are shown as digests: the same value has the same digest, and nobody reads the value off it.

Which keys are masked is told by the page's options; the secret is this process's own: a digest holds as long as it
runs.
"""

import hashlib
import hmac
import secrets
from collections.abc import Iterable
from typing import Final

from relatum.keys import KeyDefinition

_DIGITS: Final = 10
"""Hexadecimal digits of a digest: 40 bits tell the values of a page apart."""


class Masking:
    """Says which values are masked, and how they are shown.

    Args:
        keys: Names of keys.
        bodies: Whether bodies are masked.
    """

    def __init__(self, keys: Iterable[str], *, bodies: bool) -> None:
        self._keys = frozenset(keys)
        self.bodies = bodies
        self._secret = secrets.token_bytes(32)

    def is_masked(self, definition: KeyDefinition) -> bool:
        """Whether a key's values are masked."""
        return definition.name in self._keys

    def masked_places(self, definitions: Iterable[KeyDefinition]) -> frozenset[tuple[str, str]]:
        """The headers and properties that masked keys come from, as ("header", name): masked wherever they stand."""
        return frozenset(
            (component.kind, component.name)
            for definition in definitions
            if self.is_masked(definition)
            for component in definition.components
        )

    def digest(self, value: str) -> str:
        """How a masked value is shown."""
        return f"~{hmac.new(self._secret, value.encode(), hashlib.sha256).hexdigest()[:_DIGITS]}"
