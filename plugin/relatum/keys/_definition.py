"""Key definitions: a key's name, the places of its values in a message, and the values' type. Pure."""

import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from typing import Any, Final, TypeAlias, cast

from relatum.common.checks import shown
from relatum.errors import InvalidKeyDefinition, RelatumError
from relatum.keys._canonical import InvalidValue, KeyType, SkipReason, canonical, is_integer_text, join_components
from relatum.keys._places import PROPERTIES, Component, Content, Place, check_name, invalid, is_compressed

VALUES_MAX: Final = 64
"""Maximum values of one key in one message. More values are dropped, and counted as an error."""

BodyFunction: TypeAlias = Callable[[bytes], Any]
Source: TypeAlias = "str | Sequence[str] | BodyFunction | None"


@dataclass(frozen=True)
class KeyDefinition:
    """A relationship key: a named value in headers, properties or bodies that relates messages to each other.

    Args:
        name: The key's name, 1 to 255 bytes of UTF-8.
        source: Where the value comes from. None (default): the header with the key's name. `"header:NAME"` or
            `"property:NAME"` (see `PROPERTIES`): that header or property. `"header:$.a.b[0]"`: a value inside a
            header's tables and arrays. `"body:$.order.id"`: a value in a body of JSON; `[*]` is each item of an array,
            and then a message has several values. `"trace-id:traceparent"`: the trace's id in that header, or in a
            body: `"trace-id:body:$.parent"`. `"… or …"`: the first of several sources that has a value. A sequence of
            sources: a composite of their values in order, which has a value if each component has one. A function: the
            interceptor calls it with each message's body and writes the result into the header with the key's name
            (None: no header), where recorders and consumers find it.
        type: `"text"` (default), `"integer"` or `"timestamp"`; see `relatum.keys` for which values are equal.
        names: The name of another key: a value of this key refers to the earlier message that has the same value of
            that key (a reply's `correlation_id` to a request's `message_id`). Both keys have the same type and number
            of components. None (default): messages that share the value are related.
        masked: Whether the values are secret: the page shows digests of them. False (default) does not unmask a key
            that is in force.
        since: When the key was defined; set by the database.
        key_id: The key's id, set by the database; 0 before that.

    Raises:
        InvalidKeyDefinition: an argument is invalid.
    """

    name: str
    source: Source = None
    type: KeyType | str = KeyType.TEXT
    since: datetime | None = field(default=None, compare=False)
    key_id: int = field(default=0, compare=False)
    components: tuple[Component, ...] = field(init=False, compare=False)
    from_body: BodyFunction | None = field(init=False, compare=False)
    names: str | None = field(default=None, kw_only=True)
    masked: bool = field(default=False, kw_only=True)
    _only_place: Place | None = field(init=False, compare=False, repr=False, default=None)

    def __post_init__(self) -> None:
        check_name(self.name, key=self.name)
        try:
            object.__setattr__(self, "type", KeyType(self.type))
        except ValueError:
            unknown = f"unknown type {shown(self.type)}; types are {', '.join(KeyType)}"
            raise invalid(self.name, unknown) from None
        if self.since is not None and not isinstance(self.since, datetime):
            raise invalid(self.name, f"since= takes a datetime, not {shown(self.since)}")
        if not isinstance(self.masked, bool):
            raise invalid(self.name, f"masked= takes True or False, not {shown(self.masked)}")
        object.__setattr__(self, "from_body", self.source if callable(self.source) else None)
        components = self._components()
        object.__setattr__(self, "components", components)
        has_one_place = len(components) == 1 == len(components[0].places) and not self.is_many
        object.__setattr__(self, "_only_place", components[0].places[0] if has_one_place else None)
        if self.names is not None:
            check_name(self.names, key=self.name)
            if self.names == self.name:
                raise invalid(self.name, "it cannot name itself: leave out names= if messages share its value")

    def _components(self) -> tuple[Component, ...]:
        source = self.source
        if source is None or callable(source):
            return (Component((Place("header", self.name),)),)
        texts = [source] if isinstance(source, str) else list(source) if isinstance(source, Iterable) else []
        if not texts or not all(isinstance(text, str) for text in texts):
            raise invalid(self.name, "its source must be text, a sequence of texts, or a function")
        components = tuple(Component.parse(text, key=self.name) for text in texts)
        if len(components) > 1 and any(component.is_many for component in components):
            raise invalid(self.name, "[*] has several values, and a component of a composite has one: use an index")
        return components

    @property
    def sources(self) -> list[str]:
        """The components' texts, in order, as the database stores them: equal components have equal texts."""
        return [str(component) for component in self.components]

    @property
    def meaning(self) -> str:
        """A description in one line: source, type, the key that this key names, and whether it is masked."""
        names = "" if self.names is None else f", names {self.names!r}"
        return f"{' + '.join(self.sources)}, {self.value_type}{names}{', masked' if self.masked else ''}"

    @property
    def code(self) -> str:
        """The definition as Python code."""
        source = self.sources[0] if len(self.components) == 1 else tuple(self.sources)
        key_type = "" if self.value_type is KeyType.TEXT else f", type={self.value_type.value!r}"
        names = "" if self.names is None else f", names={self.names!r}"
        masked = ", masked=True" if self.masked else ""
        return f"KeyDefinition({self.name!r}, source={source!r}{key_type}{names}{masked})"

    @property
    def hint(self) -> str:
        """A hint if the source is a bare name, which means a header, and a property has that name; else ""."""
        source = self.name if self.source is None else self.source
        for text in [source] if isinstance(source, str) else () if callable(source) else source:
            # The misspelt `propety:type` counts as a header's name.
            name = text.rpartition(":")[2]
            if name in PROPERTIES and not text.startswith(("header:", "property:")):
                other = f"there is an AMQP property of that name: --source property:{name}"
                return f"key {self.name!r} is taken from the header {text!r}; {other}"
        return ""

    @property
    def value_type(self) -> KeyType:
        """The type as a `KeyType`."""
        return cast(KeyType, self.type)  # faster than `KeyType(…)`

    @property
    def is_composite(self) -> bool:
        """Whether the value has several components."""
        return len(self.components) > 1

    @property
    def places(self) -> tuple[Place, ...]:
        """All places of all components."""
        return tuple(place for component in self.components for place in component.places)

    @property
    def is_plain(self) -> bool:
        """Whether each component is a whole header or property, without alternatives."""
        return all(component.lone for component in self.components)

    @property
    def is_many(self) -> bool:
        """Whether a message may have several values."""
        return self.components[0].is_many

    def values_of(self, message: Any) -> list[str]:
        """Return the key's recordable canonical values in a `Message`: at most one, unless `is_many`."""
        place = self._only_place
        if place is None or not place.is_plain:
            return self.read(bases_of(message))[0]
        # The usual case, three times as fast as `read`.
        value = message.headers.get(place.name) if place.kind == "header" else getattr(message.properties, place.name)
        try:
            return [] if value is None else [canonical(value, self.value_type)]
        except InvalidValue:
            return []

    def parts_of(self, message: Any) -> list[Any]:
        """Return the raw value of each component in a `Message`; None for a component without a value."""
        base_of = bases_of(message)
        return [next(iter(component.read(base_of)), None) for component in self.components]

    def read(self, base_of: Callable[[Place], Any]) -> tuple[list[str], list[SkipReason]]:
        """Return the key's distinct canonical values in a message, in order, and the reasons why others are invalid.

        Args:
            base_of: Returns the header, the property or the body's JSON that contains a place; None if it is missing.
        """
        try:
            place = self._only_place
            if place is not None:
                found = place.within(base_of(place))
                return ([canonical(found[0], self.value_type)] if found else []), []
            raw = [component.read(base_of) for component in self.components]
            if not all(raw):
                return [], []
            if not self.is_many:
                text = self.canonical_of([values[0] for values in raw])
                return [] if text is None else [text], []
        except InvalidValue as invalid:
            return [], [invalid.reason]
        values: dict[str, None] = {}
        reasons: list[SkipReason] = []
        for value in raw[0]:
            try:
                values[canonical(value, self.value_type)] = None
            except InvalidValue as invalid:
                reasons.append(invalid.reason)
            if len(values) > VALUES_MAX or len(reasons) > VALUES_MAX:
                return list(values)[:VALUES_MAX], [*reasons[:VALUES_MAX], SkipReason.TOO_MANY]
        return list(values), reasons

    def canonical_of(self, values: Sequence[Any]) -> str | None:
        """Return the canonical value of one raw value per component; None if a raw value is None.

        Raises:
            InvalidValue: a raw value is invalid for this key.
        """
        if any(value is None for value in values):
            return None
        key_type = self.value_type
        if len(values) == 1:
            return canonical(values[0], key_type)
        # Composites compare as text, regardless of the key's type.
        return join_components([canonical(value, key_type) for value in values])

    def canonical_query(self, value: Any) -> str:
        """Return the canonical form of a value to look up; for a composite, pass a sequence of its components' values.

        A value may already be in canonical form: a timestamp may be the text of its microseconds.

        Raises:
            InvalidValue: no message can have that value.
            InvalidKeyDefinition: the number of values is wrong, or a value is None.
        """
        if not self.is_composite:
            if isinstance(value, list | tuple):
                raise invalid(self.name, "it takes one value, not a list")
            if self.value_type is KeyType.TIMESTAMP and is_integer_text(value):
                value = int(value)
            return canonical(value, self.value_type)
        if isinstance(value, str) or not isinstance(value, Sequence) or len(value) != len(self.components):
            raise invalid(self.name, f"it has {len(self.components)} components: pass a tuple with one value for each")
        found = self.canonical_of(value)
        if found is None:
            raise invalid(self.name, "None is not a value: pass a value for each component")
        return found


def bases_of(message: Any) -> Callable[[Place], Any]:
    """Return the argument `base_of` of `KeyDefinition.read` for a `Message`, whose body is parsed at most once."""
    # A message that is not AMQP is only a body, and no key is recorded from it.
    return bases(
        message.headers, partial(getattr, message.properties), lambda: message.body if message.is_amqp else b""
    )


def bases(
    headers: Mapping[str, Any], get_property: Callable[[str], Any], get_body: Callable[[], bytes]
) -> Callable[[Place], Any]:
    """Like `bases_of`, but for the parts of a message."""
    content: Content | None = None

    def base_of(place: Place) -> Any:
        nonlocal content
        if place.kind == "header":
            return headers.get(place.name)
        if place.kind == "property":
            return get_property(place.name)
        if content is None:
            content = Content(get_property("content_type"), get_property("content_encoding"), get_body)
        return content.document(place.media_type, place.mark)

    return base_of


def as_definitions(keys: Iterable["str | KeyDefinition"]) -> list[KeyDefinition]:
    """Return key definitions for names and definitions. A name means a text key from the header of that name.

    Raises:
        InvalidKeyDefinition: a definition is invalid, or one name has two different definitions.
    """
    if isinstance(keys, str | bytes) or not isinstance(keys, Iterable):
        raise InvalidKeyDefinition(f"keys= takes names and definitions, not {shown(keys)}", key=str(keys))
    definitions: dict[str, KeyDefinition] = {}
    for key in keys:
        definition = key if isinstance(key, KeyDefinition) else KeyDefinition(key)
        if definitions.setdefault(definition.name, definition) != definition:
            raise invalid(definition.name, "it has two different definitions: pass one")
    return list(definitions.values())


def masked_places(definitions: Iterable[KeyDefinition], names: Collection[str] = ()) -> dict[Place, KeyType]:
    """Return the places and types of masked keys and of the keys `names`, and of keys that share their values."""
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


def may_hold(message: Any, places: Iterable[Place]) -> bool:
    """Return whether a `Message` has a value in one of the places, or its body cannot be read and may have one."""
    base_of, properties = bases_of(message), message.properties
    # A compressed body without a content type may be JSON.
    is_packed = not properties.content_type and is_compressed(properties.content_encoding)
    try:
        return any((is_packed and place.kind == "body") or place.within(base_of(place)) for place in places)
    except InvalidValue:
        return True


def units_of(components: Iterable[Component]) -> tuple[Place, ...]:
    """Return the places to mask: a whole header or property; in a body, the path with every item of its arrays."""
    places = (place for component in components for place in component.places)
    return tuple(
        Place(each.kind, each.name, tuple(None if isinstance(step, int) else step for step in each.path))
        if each.kind == "body"
        else Place(each.kind, each.name)
        for each in places
    )


AGREE_S: Final = 1.0
"""Seconds after which publishes no longer wait for the database's first answer."""


class KeyAgreement:
    """Whether the database's key definitions agree with a publisher's. Thread-safe."""

    def __init__(self) -> None:
        # `KeyDefinitionConflict`, or `InvalidKeyDefinition` if there are too many keys.
        self.conflict: RelatumError | None = None
        self._queried = threading.Event()

    @property
    def is_asked(self) -> bool:
        """Whether the database was queried at least once, even if it did not answer."""
        return self._queried.is_set()

    def tell(self, conflict: RelatumError | None) -> None:
        """Store the latest result; None if the database agrees, or is unavailable and no conflict was known before."""
        self.conflict = conflict
        self._queried.set()

    def wait(self, timeout_s: float = AGREE_S) -> None:
        """Wait until the database was queried at least once, for at most `timeout_s` seconds."""
        self._queried.wait(max(0.0, timeout_s))

    def check(self) -> None:
        """Raise the conflict, if one is known."""
        if (conflict := self.conflict) is not None:
            # A new error each time, since each raise adds its traceback.
            raise type(conflict)(f"{conflict}; nothing was sent", **conflict.__dict__) from conflict
