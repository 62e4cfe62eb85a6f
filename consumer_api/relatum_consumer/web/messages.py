"""Messages as answers show them: masked where that is asked for, and as text, so that no number is rounded."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from relatum.documents import field_names
from relatum.errors import InvalidInput
from relatum.keys import KeyDefinition
from relatum.reading import Message
from relatum_consumer.lookups.answer import Covered
from relatum_consumer.web.bodies import previews
from relatum_consumer.web.masking import NOT_SAID, sought
from relatum_consumer.web.site import Site

_LISTED: Final = 100
"""Streams and places listed of what an answer covers."""


@dataclass(frozen=True, slots=True)
class KeyValue:
    """A key's value in a message: a digest where it is masked. `of_value` is its place among those of the key."""

    key: str
    value: str
    of_value: int = 0


@dataclass(frozen=True, slots=True)
class MessageRow:
    """A message in a list. `preview` is the beginning of its body in a line; empty where it is masked.

    Members that the JSON objects of one stream all share are left out of the previews of a list ("{… ").
    """

    stream: str
    offset: int
    time: datetime | None
    time_source: str
    keys: tuple[KeyValue, ...]
    bytes: int
    preview: str


@dataclass(frozen=True, slots=True)
class Named:
    """A header or property; `text` is its value whole, a digest where it is masked."""

    name: str
    type: str
    text: str
    is_masked: bool


def covered(found: Covered) -> dict[str, Any]:
    """The fields of `Covered`, of each list its beginning."""
    return {name: getattr(found, name)[:_LISTED] for name in field_names(Covered)}


def values_of(definition: KeyDefinition, message: Message) -> list[Any]:
    """A key's values in a message as look-ups take them: a composite one in its parts."""
    values: list[Any] = definition.values_of(message)
    return [tuple(definition.parts_of(message))] if values and definition.is_composite else values


def given_value(value: tuple[str, ...]) -> Any:
    """The value that a question names, as look-ups take it: of several parts, a tuple.

    Raises:
        InvalidInput: there is none.
    """
    if not value:
        raise InvalidInput("value is missing: the key's value")
    return value[0] if len(value) == 1 else value


def sought_text(site: Site, key: str, values: Sequence[Any]) -> str:
    """The value that is sought of a key, as it is shown: of a masked one its digest."""
    definition = site.definitions.get(key)
    if definition is None or not site.masking.is_masked(definition):
        return " + ".join(map(str, values))
    return site.masking.digest(sought(definition, [*map(str, values)]))


def shown_value(site: Site, key: str, value: str) -> str:
    """A key's canonical value, as it is shown."""
    definition = site.definitions.get(key)
    # Of a key that was removed since, nobody knows whether it was masked.
    return NOT_SAID if definition is None else site.masking.shown(definition, value)


def key_values(site: Site, message: Message) -> tuple[KeyValue, ...]:
    """The keys that a message has a value of; one that it has several values of, once for each."""
    return tuple(
        KeyValue(each.name, site.masking.shown(each, value), number)
        for each in site.definitions.values()
        for number, value in enumerate(each.values_of(message))
    )


def message_rows(site: Site, messages: Sequence[Message]) -> tuple[MessageRow, ...]:
    """A list of messages: of each stream, what its bodies all share is left out of their previews."""
    shown: dict[str, list[Message]] = {}
    for each in messages:
        if not site.masking.hides_body(each):
            shown.setdefault(each.stream, []).append(each)
    texts = {
        each.id: text
        for some in shown.values()
        for each, text in zip(some, previews([each.body for each in some]), strict=True)
    }
    return tuple(
        MessageRow(
            each.stream,
            each.offset,
            each.time,
            each.time_source.value,
            key_values(site, each),
            len(each.body),
            texts.get(each.id, ""),
        )
        for each in messages
    )


def properties_of(found: Message) -> dict[str, Any]:
    """The properties that a message has."""
    given = {name: getattr(found.properties, name) for name in found.properties.__dataclass_fields__}
    return {name: value for name, value in given.items() if value is not None}


def named_values(site: Site, kind: str, given: dict[str, Any]) -> tuple[Named, ...]:
    """Headers or properties as they are shown."""
    shown = []
    for name, value in given.items():
        text, type_ = _text_of(value)
        is_masked = site.masking.is_masked_place(kind, name)
        if is_masked:
            text = site.masking.digest_at(kind, name, value, text)
        shown.append(Named(name, type_, text, is_masked))
    return tuple(shown)


def _text_of(value: Any) -> tuple[str, str]:
    """A value of a header or property as text, and its type."""
    if value is None:
        return "", "null"
    # A boolean is an integer, too: it comes first.
    kind = next((name for kinds, name in _TYPES if isinstance(value, kinds)), type(value).__name__)
    if kind == "bytes":
        return bytes(value).hex(" "), kind
    if kind == "timestamp":
        return value.isoformat(), kind
    return str(value).lower() if kind == "boolean" else str(value), kind


_TYPES: Final = (
    (str, "text"),
    (bool, "boolean"),
    (int, "integer"),
    (float, "float"),
    (datetime, "timestamp"),
    ((bytes, bytearray, memoryview), "bytes"),
)
