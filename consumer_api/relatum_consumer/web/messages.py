"""Messages as answers show them: masked where that is asked for, and as text, so that no number is rounded."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final

from relatum.ids import MessageId
from relatum.keys import KeyDefinition
from relatum.reading import Message
from relatum_consumer import Answer, LeftOut, Trace
from relatum_consumer.web.bodies import preview
from relatum_consumer.web.documents import FOR_PAGES
from relatum_consumer.web.masking import sought
from relatum_consumer.web.site import Site

STREAMS_LISTED: Final = 100

HUES: Final = 8
"""Colours of keys; each also has its letter, since colour alone tells nobody anything."""

LETTERS: Final = "ABCDEFGH"


@dataclass(frozen=True, slots=True)
class KeyValue:
    """A key's value in a message; `value` is a digest where it is masked."""

    key: str
    value: str
    is_masked: bool
    hue: int = field(metadata=FOR_PAGES)
    href: str = field(metadata=FOR_PAGES)


@dataclass(frozen=True, slots=True)
class MessageRow:
    """A message in a list. `preview` is the beginning of its body in a line, empty where it is masked."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class HoldsOver:
    """What an answer holds over, the first hundred of `streams_count` streams, and what is not in it."""

    streams: tuple[str, ...]
    streams_count: int
    expired: tuple[MessageId, ...]
    deleted: tuple[MessageId, ...]
    unread: tuple[MessageId, ...]
    left_out: tuple[LeftOut, ...]
    unattended: tuple[str, ...]
    new_keys: tuple[str, ...]


def values_of(definition: KeyDefinition, message: Message) -> list[Any]:
    """A key's values in a message as look-ups take them: a composite one in its parts."""
    values: list[Any] = definition.values_of(message)
    return [tuple(definition.parts_of(message))] if values and definition.is_composite else values


def sought_text(site: Site, definitions: Iterable[KeyDefinition], key: str, values: Sequence[str]) -> str:
    """What is sought of a key, as it is shown: of a masked one its digest."""
    definition = next((each for each in definitions if each.name == key), None)
    if definition is None or not site.masking.is_masked(definition):
        return " + ".join(values)
    return site.masking.digest(sought(definition, values))


def key_values(site: Site, definitions: Sequence[KeyDefinition], message: Message) -> tuple[KeyValue, ...]:
    """The keys that a message has a value of; one that it has several values of, once for each."""
    return tuple(
        key_value(site, definitions, each, value, message.id, number)
        for each in definitions
        for number, value in enumerate(each.values_of(message))
    )


def key_value(
    site: Site,
    definitions: Sequence[KeyDefinition],
    definition: KeyDefinition,
    value: str,
    place: MessageId | None,
    number: int = 0,
) -> KeyValue:
    """A key's value, and a message that has it, with so many others before it.

    Without a message, a value that is masked or composite has no link.
    """
    is_masked = site.masking.is_masked(definition)
    href = ""
    if not is_masked and not definition.is_composite:
        href = site.links.search(key=definition.name, value=value)
    elif place is not None:
        # By the message: so it can be followed all the same.
        of_value = {"of_value": str(number)} if number else {}
        href = site.links.search(key=definition.name, of_stream=place.stream, of_offset=str(place.offset), **of_value)
    shown = site.masking.shown(definition, value)
    return KeyValue(definition.name, shown, is_masked, hue_of(definition), href)


def hue_of(definition: KeyDefinition) -> int:
    """A key's colour, and the place of its letter: other keys that come or go change nothing of it."""
    return (definition.key_id - 1) % HUES


def message_row(site: Site, definitions: Sequence[KeyDefinition], message: Message) -> MessageRow:
    """A message in a list."""
    return MessageRow(
        message.stream,
        message.offset,
        message.time,
        message.time_source.value,
        key_values(site, definitions, message),
        len(message.body),
        "" if site.masking.hides_body(message) else preview(message.body),
    )


def properties_of(found: Message) -> dict[str, Any]:
    """The properties that a message has."""
    given = {name: getattr(found.properties, name) for name in found.properties.__dataclass_fields__}
    return {name: value for name, value in given.items() if value is not None}


def named_values(site: Site, kind: str, given: dict[str, Any]) -> tuple[Named, ...]:
    """Headers or properties as they are shown."""
    shown = []
    for name, value in given.items():
        text, type_ = text_of_value(value)
        is_masked = site.masking.is_masked_place(kind, name)
        if is_masked:
            text = site.masking.digest_at(kind, name, value, text)
        shown.append(Named(name, type_, text, is_masked))
    return tuple(shown)


def text_of_value(value: Any) -> tuple[str, str]:
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


def held_over(found: Answer | Trace) -> dict[str, Any]:
    """The fields of `HoldsOver`."""
    lists = ("streams", "expired", "deleted", "unread", "left_out", "unattended")
    first = {name: getattr(found, name)[:STREAMS_LISTED] for name in lists}
    return first | {"streams_count": len(found.streams), "new_keys": tuple(each.key for each in found.new_keys)}
