"""What a relationship key is: its name, where in a message it comes from, and its type."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final, TypeAlias, cast

from relatum.checks import shown
from relatum.errors import InvalidKeyDefinition
from relatum.keys._canonical import InvalidValue, KeyType, canonical, join_components
from relatum.limits import KEY_NAME_BYTES_MAX

PROPERTIES: Final = ("correlation_id", "message_id", "type", "app_id", "user_id", "reply_to")
"""The message properties a key can come from, by the names pika and aio-pika give them."""

BodyFunction: TypeAlias = Callable[[bytes], Any]
Source: TypeAlias = "str | Sequence[str] | BodyFunction | None"


@dataclass(frozen=True, slots=True)
class Component:
    """One place a key's value comes from: a header or a property, by name."""

    kind: str
    name: str

    def __str__(self) -> str:
        return f"{self.kind}:{self.name}"

    @classmethod
    def parse(cls, text: str, *, key: str) -> "Component":
        """Read `header:NAME`, `property:NAME`, or a bare NAME, which is a header's."""
        kind, separator, name = text.partition(":")
        if not separator or kind not in ("header", "property"):
            kind, name = "header", text
        if kind == "property" and name not in PROPERTIES:
            raise InvalidKeyDefinition(
                f"key {key!r}: no property {name!r} to take it from; there are {', '.join(PROPERTIES)}",
                key=key,
            )
        _check_name(name, key=key)
        return cls(kind, name)


@dataclass(frozen=True)
class KeyDefinition:
    """A relationship key: a named value in a message's headers or properties that relates it to others.

    Args:
        name: What callers ask by, 1 to 255 bytes of UTF-8.
        source: Where the value comes from. None (the default): the header of the key's own name.
            `"header:NAME"` or `"property:NAME"` (see `PROPERTIES`): that one. A sequence of those: a composite of
            them in that order, which has a value where each of them has one. A callable of the body: the
            interceptor calls it on each message and writes what it returns into the header of the key's name
            (None: no header), so that everybody else finds it there.
        type: `"text"` (default), `"integer"` or `"timestamp"`; see `relatum.keys` for what compares equal.
        names: The name of another key: a value of this key names the message that has the same value of that one, which
            came before (`correlation_id` that of a request's `message_id`). Of the same type, and of as many parts.
            None (default): the value names nothing, it is shared.
        masked: Whether its values are secret to who looks at messages: the page shows digests of them. False (default)
            agrees with either.
        since: When it was defined; set by the database.
        key_id: Its number in the database; set by the database, 0 before.

    Raises:
        InvalidKeyDefinition: name, source, type or names cannot be one.
    """

    name: str
    source: Source = None
    type: KeyType | str = KeyType.TEXT
    since: datetime | None = field(default=None, compare=False)
    key_id: int = field(default=0, compare=False)
    components: tuple[Component, ...] = field(init=False, compare=False)
    from_body: BodyFunction | None = field(init=False, compare=False, default=None)
    names: str | None = field(default=None, kw_only=True)
    masked: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        _check_name(self.name, key=self.name)
        try:
            object.__setattr__(self, "type", KeyType(self.type))
        except ValueError:
            raise InvalidKeyDefinition(
                f"key {self.name!r}: no type {shown(self.type)}; there are {', '.join(KeyType)}", key=self.name
            ) from None
        if self.since is not None and not isinstance(self.since, datetime):
            raise InvalidKeyDefinition(
                f"key {self.name!r}: since= takes a datetime, not {shown(self.since)}", key=self.name
            )
        if not isinstance(self.masked, bool):
            raise InvalidKeyDefinition(
                f"key {self.name!r}: masked= takes True or False, not {shown(self.masked)}", key=self.name
            )
        object.__setattr__(self, "components", self._components())
        if self.names is not None:
            _check_name(self.names, key=self.name)
            if self.names == self.name:
                raise InvalidKeyDefinition(
                    f"key {self.name!r} cannot name itself: leave names= out where messages share its value",
                    key=self.name,
                )

    def _components(self) -> tuple[Component, ...]:
        source = self.source
        if source is None:
            return (Component("header", self.name),)
        if callable(source):
            object.__setattr__(self, "from_body", source)
            return (Component("header", self.name),)
        texts = [source] if isinstance(source, str) else list(source) if isinstance(source, Iterable) else []
        if not texts or not all(isinstance(text, str) for text in texts):
            raise InvalidKeyDefinition(f"key {self.name!r}: its source names no header or property", key=self.name)
        return tuple(Component.parse(text, key=self.name) for text in texts)

    @property
    def sources(self) -> list[str]:
        """The components as the database stores them: `header:NAME` or `property:NAME`, in order."""
        return [str(component) for component in self.components]

    @property
    def meaning(self) -> str:
        """Where the value comes from, its type, what it names, and whether it is masked, in words."""
        names = "" if self.names is None else f", names {self.names!r}"
        return f"{' + '.join(self.sources)}, {self.value_type}{names}{', masked' if self.masked else ''}"

    @property
    def code(self) -> str:
        """The definition as it is written in code."""
        source = self.sources[0] if len(self.components) == 1 else tuple(self.sources)
        key_type = "" if self.value_type is KeyType.TEXT else f", type={self.value_type.value!r}"
        names = "" if self.names is None else f", names={self.names!r}"
        masked = ", masked=True" if self.masked else ""
        return f"KeyDefinition({self.name!r}, source={source!r}{key_type}{names}{masked})"

    @property
    def hint(self) -> str:
        """What may be meant instead, where a bare name became a header's and seems to be a property's; else empty."""
        source = self.name if self.source is None else self.source
        if callable(source):
            return ""
        texts = [source] if isinstance(source, str) else source
        for text in texts:
            # `propety:type` is the name of a header, too.
            name = text.rpartition(":")[2]
            if name in PROPERTIES and not text.startswith(("header:", "property:")):
                other = f"there is an AMQP property of that name: --source property:{name}"
                return f"key {self.name!r} is taken from the header {text!r}; {other}"
        return ""

    @property
    def value_type(self) -> KeyType:
        """The type as the enumeration's member."""
        return cast(KeyType, self.type)  # once it was made: `KeyType(…)` looks it up anew

    @property
    def is_composite(self) -> bool:
        """Whether several components make one value."""
        return len(self.components) > 1

    def value_of(self, headers: Mapping[str, Any], get_property: Callable[[str], Any]) -> str | None:
        """The key's canonical value in a message.

        Args:
            headers: The message's headers.
            get_property: Gives a property's value by its name, None where it is not set.

        Returns:
            The canonical text, or None where the message has no value for the key.

        Raises:
            InvalidValue: the message has a value that cannot be one.
        """
        if len(self.components) == 1:
            component = self.components[0]
            value = headers.get(component.name) if component.kind == "header" else get_property(component.name)
            return None if value is None else canonical(value, self.value_type)
        return self.canonical_of(
            [
                headers.get(component.name) if component.kind == "header" else get_property(component.name)
                for component in self.components
            ]
        )

    def canonical_of(self, values: Sequence[Any]) -> str | None:
        """The canonical value of one raw value a component; None where one of them is None.

        Raises:
            InvalidValue: one of them cannot be a value of this key.
        """
        if any(value is None for value in values):
            return None
        key_type = self.value_type
        if len(values) == 1:
            return canonical(values[0], key_type)
        # The parts of a composite are text whatever the key's type: the whole compares as text.
        return join_components([canonical(value, key_type) for value in values])

    def canonical_query(self, value: Any) -> str:
        """The canonical form of a value someone asks for; a composite's is a sequence of its components' values.

        Raises:
            InvalidValue: no message can carry that value.
        """
        if not self.is_composite:
            if isinstance(value, list | tuple):
                raise InvalidKeyDefinition(f"the key {self.name!r} takes one value, not {len(value)}", key=self.name)
            return canonical(value, self.value_type)
        if isinstance(value, str) or not isinstance(value, Sequence) or len(value) != len(self.components):
            raise InvalidKeyDefinition(
                f"key {self.name!r} has {len(self.components)} components: ask with a tuple of that many values",
                key=self.name,
            )
        found = self.canonical_of(value)
        if found is None:
            raise InvalidKeyDefinition(f"key {self.name!r}: None is no value to ask for", key=self.name)
        return found


def as_definitions(keys: Iterable["str | KeyDefinition"]) -> list[KeyDefinition]:
    """Key definitions from names and definitions; a name alone means the header of that name, as text.

    Raises:
        InvalidKeyDefinition: one cannot be a key, or a name occurs twice with different meanings.
    """
    if isinstance(keys, str | bytes) or not isinstance(keys, Iterable):
        raise InvalidKeyDefinition(f"keys= takes names and definitions, not {shown(keys)}", key=str(keys))
    definitions: dict[str, KeyDefinition] = {}
    for key in keys:
        definition = key if isinstance(key, KeyDefinition) else KeyDefinition(key)
        if definitions.setdefault(definition.name, definition) != definition:
            raise InvalidKeyDefinition(f"key {definition.name!r} is defined twice", key=definition.name)
    return list(definitions.values())


def _check_name(name: Any, *, key: Any) -> None:
    if not isinstance(name, str):
        raise InvalidKeyDefinition(f"a key's name is text, not {type(name).__name__}", key=str(key))
    try:
        size = len(name.encode())
    except UnicodeEncodeError:
        raise InvalidKeyDefinition("the name of a key or of its source must be Unicode text", key=repr(key)) from None
    if not 1 <= size <= KEY_NAME_BYTES_MAX or "\0" in name:
        reason = f"key {shown(key)}: the name of a key or of its source has 1 to {KEY_NAME_BYTES_MAX} bytes and no NUL"
        raise InvalidKeyDefinition(reason, key=str(key))


__all__ = [
    "PROPERTIES",
    "BodyFunction",
    "Component",
    "InvalidValue",
    "KeyDefinition",
    "Source",
    "as_definitions",
]
