"""Extracts a message's time and key values from its record, with a reason for each value that is skipped.

This is the hot path of recorders and traces. Sections are found by their sizes; only headers that a key needs are
decoded, and the body only if a key needs it. The definitions are compiled once into slots: each distinct header or
property that a key needs has an index in one list.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

from relatum.common.headers import RECEIPT_HEADER, TIME_HEADER
from relatum.common.limits import INTEGER_MAX, INTEGER_MIN, KEY_VALUE_BYTES_MAX, TIME_US_MAX, TIME_US_MIN
from relatum.errors import UndecodableMessage
from relatum.keys import InvalidValue, KeyDefinition, KeyType, Place, SkipReason, bases, checked_text
from relatum.reading._message_parts import header_value, is_header, message_time, property_text, reply_to_text
from relatum.reading._message_values import TimeSource
from relatum.wire import amqp10
from relatum.wire.amqp10 import find_head, pick, pick_list

_PROPERTY_PLACES: Final = {
    "message_id": 0,
    "user_id": 1,
    "reply_to": 4,
    "correlation_id": 5,
    "content_type": 6,
    "content_encoding": 7,
    "app_id": 10,
}
"""Indexes in AMQP 1.0's properties list. `type` has none: RabbitMQ keeps it under `x-basic-type`."""

_BODY_TYPE: Final = (Place("property", "content_type"), Place("property", "content_encoding"))
"""The properties that say whether a body is JSON."""

_ID: Final = 0
_CREATION_TIME: Final = 9

_SHORT_TEXT: Final = 0xA1
_SHORT_LIST_OF_ID: Final = b"\xc0\x24"
"""The constructor of a short list, and the length of its first element, an id of 36 characters."""

_ID_END: Final = 5 + 36
"""Bytes from the list's start to the id's end: constructor, size, count, the id's constructor and length, the id."""

_NULLS: Final = b"@" * _CREATION_TIME
"""Nulls for the elements after the id, up to and including the creation time."""

RECEIPT_NAME_LENGTH_MAX: Final = 64
"""Maximum characters of a receipt's name. The interceptor's names have 36, but any publisher may set the header."""

_APPLICATION_NAMES: Final = {"type": b"x-basic-type", "app_id": b"x-basic-app-id"}
"""RabbitMQ's names of properties that AMQP 1.0 lacks: application properties up to 3.12, annotations later."""

_TEXT_SAFE: Final = KEY_VALUE_BYTES_MAX // 4
"""Text of up to this many characters is within the limit in UTF-8. Decoded text has no lone surrogates."""


class Extracted(NamedTuple):
    """The data extracted from one message.

    `values` holds (key id, canonical value); `skips` holds (key id, reason), with key id 0 for the message as a whole.
    `receipt` is the name of the receipt if the publisher waits for the offset, else None.
    """

    time_us: int | None
    source: TimeSource
    values: list[tuple[int, str]]
    skips: list[tuple[int, SkipReason]]
    receipt: str | None


_new_tuple: Final = tuple.__new__
"""Creates an `Extracted` as fast as a tuple; `Extracted(…)` takes three times as long."""


class Extractor:
    """Extracts keys and times from messages, by the definitions in force."""

    def __init__(self, definitions: Sequence[KeyDefinition]) -> None:
        self.definitions = tuple(definitions)
        self._slots: dict[Place, int] = {}
        keys = [(key, [self._slot(part.places[0]) for part in key.components]) for key in definitions if key.is_plain]
        # The definition itself reads values inside a header or a body, or in several places.
        self._nested_keys = [(key.key_id, key) for key in definitions if not key.is_plain]
        self._nested_slots: dict[Place, int] = {}
        for _, key in self._nested_keys:
            for place in key.places:
                for base in _BODY_TYPE if place.kind == "body" else (Place(place.kind, place.name),):
                    self._nested_slots[base] = self._slot(base)
        self._time = self._slot(Place("header", TIME_HEADER))
        self._receipt = self._slot(Place("header", RECEIPT_HEADER))
        self._created = len(self._slots)
        self._message_id = self._created + 1
        self._id_and_created = {_ID: self._message_id, _CREATION_TIME: self._created}
        self._blank: list[Any] = [None] * (self._created + 2)
        self._application: dict[bytes, int] = {}
        self._annotations: dict[bytes, int] = {}
        self._properties: dict[int, int] = {}
        self._converted: list[tuple[int, Callable[[Any], Any]]] = []
        for place, slot in self._slots.items():
            self._place(place, slot)
        # Most values are texts and numbers that need no checks by the definition.
        self._keys = [(key.key_id, slots[0], key.value_type is KeyType.TEXT, key, slots) for key, slots in keys]

    def _slot(self, place: Place) -> int:
        return self._slots.setdefault(place, len(self._slots))

    def _place(self, place: Place, slot: int) -> None:
        """Map a place's names to its slot. `CC` and `x-…` headers are annotations from RabbitMQ 3.13 on."""
        if place.kind == "header":
            name = place.name.encode()
            if is_header(place.name):
                self._application[name] = slot
                if name.startswith(b"x-") or name == b"CC":
                    self._annotations[b"x-cc" if name == b"CC" else name] = slot
            return
        if place.name in _APPLICATION_NAMES:
            self._application[_APPLICATION_NAMES[place.name]] = slot
        if place.name == "type":
            self._annotations[_APPLICATION_NAMES["type"]] = slot
        if place.name in _PROPERTY_PLACES:
            self._properties[_PROPERTY_PLACES[place.name]] = slot
        self._converted.append((slot, reply_to_text if place.name == "reply_to" else property_text))

    def from_record(self, raw: bytes, chunk_ms: int | None) -> Extracted:
        """Extract a message's data from its stored bytes.

        A message that is not AMQP 1.0 gives no value, one skip (`undecodable_message`) and its chunk's time.
        """
        try:
            head = find_head(raw)
        except UndecodableMessage:
            time_us, source = message_time(None, None, None, chunk_ms)
            return Extracted(time_us, source, [], [(0, SkipReason.UNDECODABLE)], None)
        found = self._blank.copy()
        try:
            self._pick(raw, head, found)
        except UndecodableMessage:
            found, is_too_much = self._pick_each(raw, head)
            extracted = self._extracted(found, chunk_ms, raw)
            if is_too_much:
                extracted.skips.append((0, SkipReason.TOO_MANY))
            return extracted
        return self._extracted(found, chunk_ms, raw)

    def _pick(self, raw: bytes, head: tuple[int, int, int], found: list[Any]) -> None:
        """Fill the slots. The order matters: later sections override earlier ones, as in `Message`."""
        annotations, properties, application = head
        if properties >= 0 and self._properties:
            pick_list(raw, properties, self._properties, found)
        if application >= 0:
            pick(raw, application, self._application, found)
        if annotations >= 0 and self._annotations:
            pick(raw, annotations, self._annotations, found)
        if properties >= 0:
            stamped = found[self._time]
            if type(stamped) is not int or not TIME_US_MIN <= stamped <= TIME_US_MAX:
                if (message_id := _lone_id(raw, properties)) is not None:
                    found[self._message_id] = message_id
                else:
                    pick_list(raw, properties, self._id_and_created, found)
            elif found[self._receipt] is not None:
                pick_list(raw, properties, {_ID: self._message_id}, found)

    def _pick_each(self, raw: bytes, head: tuple[int, int, int]) -> tuple[list[Any], bool]:
        """Like `_pick`, but corrupt sections count as absent. Returns slots, and whether a section is too large."""
        annotations, properties, application = head
        usable, is_too_much = [-1, -1, -1], False
        for place, alone in enumerate(((annotations, -1, -1), (-1, properties, -1), (-1, -1, application))):
            try:
                self._pick(raw, alone, self._blank.copy())
            except UndecodableMessage as error:
                is_too_much |= getattr(error, "is_too_much", False)
            else:
                usable[place] = alone[place]
        found = self._blank.copy()
        self._pick(raw, (usable[0], usable[1], usable[2]), found)
        return found, is_too_much

    def _extracted(self, found: list[Any], chunk_ms: int | None, raw: bytes) -> Extracted:
        values: list[tuple[int, str]] = []
        skips: list[tuple[int, SkipReason]] = []
        for slot, convert in self._converted:
            found[slot] = convert(found[slot])
        for key_id, slot, is_text, definition, slots in self._keys:
            value = found[slot]
            if value is None:
                continue
            if is_text:
                text = _plain(value) if len(slots) == 1 else _joined(found, slots)
                if text is not None:
                    values.append((key_id, text))
                    continue
            try:
                canonical = definition.canonical_of([header_value(found[place]) for place in slots])
            except InvalidValue as invalid:
                skips.append((key_id, invalid.reason))
                continue
            if canonical is not None:
                values.append((key_id, canonical))
        if self._nested_keys:
            self._extract_nested(found, raw, values, skips)
        message_id = found[self._message_id]
        if type(message_id) is not str:
            message_id = property_text(message_id)
        time_us, source = message_time(found[self._time], found[self._created], message_id, chunk_ms)
        requested = found[self._receipt]
        receipt = None if requested is None else _receipt_name(header_value(requested), message_id)
        return _new_tuple(Extracted, (time_us, source, values, skips, receipt))

    def _extract_nested(
        self,
        found: list[Any],
        raw: bytes,
        values: list[tuple[int, str]],
        skips: list[tuple[int, SkipReason]],
    ) -> None:
        """Extract the values that need more than a slot, in the same way as a reader of the message."""
        headers: dict[str, Any] = {}
        properties: dict[str, Any] = {}
        for place, slot in self._nested_slots.items():
            if place.kind == "header":
                headers[place.name] = header_value(found[slot])
            else:
                properties[place.name] = found[slot]
        base_of = bases(headers, properties.get, partial(_body_of, raw))
        for key_id, definition in self._nested_keys:
            texts, reasons = definition.read(base_of)
            values += [(key_id, text) for text in texts]
            skips += [(key_id, reason) for reason in reasons]


def _body_of(raw: bytes) -> bytes:
    return amqp10.body_of(raw, amqp10.find_sections(raw))


def _plain(value: Any) -> str | None:
    """Return a text key's canonical form of a value; None if the value needs further checks."""
    kind = type(value)
    if kind is str:
        text: str = value
        return text if len(text) <= _TEXT_SAFE and "\0" not in text else None
    if kind is bool:
        return "true" if value else "false"
    return str(value) if kind is int and INTEGER_MIN <= value <= INTEGER_MAX else None


def _joined(found: list[Any], slots: list[int]) -> str | None:
    """Like `_plain`, for a composite key; None also if a part has characters to escape."""
    parts: list[str] = []
    for slot in slots:
        part = _plain(found[slot])
        if part is None or "|" in part or "\\" in part:
            return None
        parts.append(part)
    text = "|".join(parts)
    return text if len(text) <= _TEXT_SAFE else None


def _lone_id(raw: bytes, properties: int) -> str | None:
    """Return the `message_id` if the list has no other element up to the creation time, as is common; else None."""
    end = properties + _ID_END
    if raw[properties : properties + 5 : 4] != _SHORT_LIST_OF_ID or raw[properties + 3] != _SHORT_TEXT:
        return None
    count, message_id = raw[properties + 2], raw[properties + 5 : end]
    if not count or end > len(raw) or not message_id.isascii():
        return None
    return str(message_id, "ascii") if count == 1 or raw[end : end + _CREATION_TIME] == _NULLS else None


def _receipt_name(requested: Any, message_id: str | None) -> str | None:
    """Return a receipt's name: the `message_id` if the header is True, else the name in the header.

    The interceptor sets a name if the caller chose the `message_id`, which may have been used before.
    """
    if isinstance(requested, str) and len(requested) > RECEIPT_NAME_LENGTH_MAX:
        return None
    name = message_id if requested is True else requested
    try:
        # Any publisher may set the header: a name that fits no row or index entry would block the recorder forever.
        return checked_text(name) if isinstance(name, str) else None
    except InvalidValue:
        return None
