"""Messages as answers show them: masked, and as text, so that no number is rounded."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from relatum.documents import field_names
from relatum.errors import InvalidInput
from relatum.keys import InvalidValue, KeyDefinition
from relatum.reading import Message
from relatum_consumer.lookups.answer import Covered
from relatum_consumer.web.bodies import previews
from relatum_consumer.web.masking import NOT_SAID
from relatum_consumer.web.site import Site

_LISTED: Final = 100
"""The most items of each list that says what an answer covers."""


@dataclass(frozen=True, slots=True)
class KeyValue:
    """A key's value in a message; a digest if it is masked. `of_value` is its index among the key's values."""

    key: str
    value: str
    of_value: int = 0


@dataclass(frozen=True, slots=True)
class MessageRow:
    """A message in a list. `preview` is the beginning of its body on one line; empty if the body is masked.

    Members that all listed JSON objects of a stream share are left out of their previews ("{… ").
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
    """A header or property. `text` is its whole value; a digest if it is masked."""

    name: str
    type: str
    text: str
    is_masked: bool


def covered(found: Covered) -> dict[str, Any]:
    """Return the fields of `Covered`, each list cut to its beginning."""
    return {name: getattr(found, name)[:_LISTED] for name in field_names(Covered)}


def values_of(definition: KeyDefinition, message: Message) -> list[Any]:
    """Return a key's values in a message as lookups take them: a composite value as a tuple."""
    values: list[Any] = definition.values_of(message)
    return [tuple(definition.parts_of(message))] if values and definition.is_composite else values


def given_value(value: tuple[str, ...]) -> Any:
    """Return the value in a query as lookups take it: several parts as a tuple.

    Raises:
        InvalidInput: no value was given.
    """
    if not value:
        raise InvalidInput("value is missing: the key's value")
    return value[0] if len(value) == 1 else value


def sought_text(site: Site, key: str, values: Sequence[Any]) -> str:
    """Return the searched value of a key for display; its digest if the key is masked."""
    definition, texts = site.definitions.get(key), [*map(str, values)]
    text = " + ".join(texts)
    if definition is None or not site.masking.is_masked(definition):
        return text
    # A value that the key cannot have stays as it is.
    with suppress(InvalidValue, ValueError):
        text = definition.canonical_query(texts[0] if len(texts) == 1 else tuple(texts))
    return site.masking.digest(text)


def shown_value(site: Site, key: str, value: str) -> str:
    """Return a key's canonical value for display."""
    definition = site.definitions.get(key)
    # A key that was removed may have been masked.
    return NOT_SAID if definition is None else site.masking.shown(definition, value)


def key_values(site: Site, message: Message) -> tuple[KeyValue, ...]:
    """Return the keys' values in a message; a key with several values has one entry for each."""
    return tuple(
        KeyValue(each.name, site.masking.shown(each, value), number)
        for each in site.definitions.values()
        for number, value in enumerate(each.values_of(message))
    )


def message_rows(site: Site, messages: Sequence[Message]) -> tuple[MessageRow, ...]:
    """Return messages as rows of a list; previews leave out what all bodies of their stream share."""
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


def named_values(site: Site, kind: str, given: dict[str, Any]) -> tuple[Named, ...]:
    """Return headers or properties for display."""
    shown = []
    for name, value in given.items():
        text, type_ = _text_of(value)
        is_masked = site.masking.is_masked_place(kind, name)
        if is_masked:
            text = site.masking.digest_at(kind, name, value, text)
        shown.append(Named(name, type_, text, is_masked))
    return tuple(shown)


def _text_of(value: Any) -> tuple[str, str]:
    """Return a header's or property's value as text, and its type."""
    if value is None:
        return "", "null"
    # bool is a subclass of int, so it comes first in the table.
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
