"""What the recorder takes from one message: its time, its keys' values, and what it had to leave out.

This is the recorder's hot path. Sections are found by their sizes, only wanted headers are decoded, bodies never are.
The definitions are compiled once into slots: each distinct header or property a key needs gets a place in one list.
"""

from collections.abc import Sequence
from typing import Any, Final, NamedTuple
from uuid import UUID

from relatum._names import RECEIPT_HEADER, TIME_HEADER
from relatum.errors import UndecodableMessage
from relatum.keys import Component, InvalidValue, KeyDefinition, KeyType, SkipReason
from relatum.limits import TIME_US_MAX, TIME_US_MIN
from relatum.reading import Message, TimeSource
from relatum.wire._amqp10 import find_head, pick, pick_list

_PROPERTY_PLACES: Final = {"message_id": 0, "user_id": 1, "reply_to": 4, "correlation_id": 5, "app_id": 10}
"""Places in AMQP 1.0's properties list. `type` has none: RabbitMQ keeps it under `x-basic-type`."""

_CREATION_TIME: Final = 9
_APPLICATION_NAMES: Final = {"type": b"x-basic-type", "app_id": b"x-basic-app-id"}
"""Where RabbitMQ keeps properties that AMQP 1.0 does not have: application properties up to 3.12, annotations later."""


class Extracted(NamedTuple):
    """What one message gives the table.

    `values` holds (key id, canonical value); `skips` holds (key id, reason), key id 0 for the message as a whole.
    `receipt` is the AMQP property `message_id` where the publisher waits for the offset.
    """

    time_us: int | None
    source: TimeSource
    values: list[tuple[int, str]]
    skips: list[tuple[int, SkipReason]]
    receipt: str | None


class Extractor:
    """Takes keys and times out of messages, by the definitions in force.

    Args:
        definitions: The keys to record, with their ids in the database.
    """

    def __init__(self, definitions: Sequence[KeyDefinition]) -> None:
        self.definitions = tuple(definitions)
        self._slots: dict[Component, int] = {}
        self._keys = [
            (definition.key_id, definition, [self._slot(component) for component in definition.components])
            for definition in definitions
        ]
        self._time = self._slot(Component("header", TIME_HEADER))
        self._receipt = self._slot(Component("header", RECEIPT_HEADER))
        self._application: dict[bytes, int] = {}
        self._annotations: dict[bytes, int] = {}
        self._properties: dict[int, int] = {}
        self._uuids: list[int] = []
        for component, slot in self._slots.items():
            self._place(component, slot)
        self._created = len(self._slots)
        self._message_id = self._created + 1
        self._blank: list[Any] = [None] * (self._created + 2)
        # Most keys are one text header: those need neither the definition's checks of type nor of components.
        self._plain = [
            (key_id, definition, slots[0], len(slots) == 1 and definition.value_type is KeyType.TEXT, slots)
            for key_id, definition, slots in self._keys
        ]

    def _slot(self, component: Component) -> int:
        return self._slots.setdefault(component, len(self._slots))

    def _place(self, component: Component, slot: int) -> None:
        """Say where in a message a component is found. RabbitMQ 3.13 and later keep `x-…` headers as annotations."""
        if component.kind == "header":
            name = component.name.encode()
            self._application[name] = slot
            if name.startswith(b"x-"):
                self._annotations[name] = slot
            return
        if component.name in _APPLICATION_NAMES:
            name = _APPLICATION_NAMES[component.name]
            self._application[name] = self._annotations[name] = slot
        if component.name in _PROPERTY_PLACES:
            self._properties[_PROPERTY_PLACES[component.name]] = slot
            self._uuids.append(slot)

    def from_record(self, raw: bytes, chunk_ms: int | None) -> Extracted:
        """The same as `from_message`, from a message's stored bytes.

        Args:
            raw: One message as the stream holds it.
            chunk_ms: When its chunk was written, milliseconds since 1970.

        A message that is not AMQP 1.0 gives no value, one skip (`undecodable_message`) and its chunk's time.
        """
        found = self._blank.copy()
        try:
            annotations, properties, application = find_head(raw)
            if application >= 0:
                pick(raw, application, self._application, found)
            if annotations >= 0 and self._annotations:
                pick(raw, annotations, self._annotations, found)
            if properties >= 0:
                self._pick_properties(raw, properties, found)
        except UndecodableMessage:
            time_us = None if chunk_ms is None else chunk_ms * 1000
            source = TimeSource.UNKNOWN if time_us is None else TimeSource.CHUNK
            return Extracted(time_us, source, [], [(0, SkipReason.UNDECODABLE)], None)
        return self._extracted(found, chunk_ms)

    def _pick_properties(self, raw: bytes, position: int, found: list[Any]) -> None:
        if self._properties:
            pick_list(raw, position, self._properties, found)
            for slot in self._uuids:
                found[slot] = property_text(found[slot])
        if found[self._time] is None:
            pick_list(raw, position, {_CREATION_TIME: self._created}, found)
        if found[self._receipt] is not None:
            pick_list(raw, position, {0: self._message_id}, found)

    def from_message(self, message: Message) -> Extracted:
        """What the message gives, from its decoded form: for transports that hand out no stored bytes."""
        found = self._blank.copy()
        if not message.is_amqp:
            return Extracted(message.time_us, message.time_source, [], [(0, SkipReason.UNDECODABLE)], None)
        for component, slot in self._slots.items():
            if component.kind == "header":
                found[slot] = message.headers.get(component.name)
            else:
                found[slot] = getattr(message.properties, component.name)
        found[self._created] = message.properties.timestamp
        found[self._message_id] = message.properties.message_id
        chunk_ms = None
        if message.time_source is TimeSource.CHUNK and message.time_us is not None:
            chunk_ms = message.time_us // 1000
        return self._extracted(found, chunk_ms)

    def _extracted(self, found: list[Any], chunk_ms: int | None) -> Extracted:
        values: list[tuple[int, str]] = []
        skips: list[tuple[int, SkipReason]] = []
        for key_id, definition, slot, plain, slots in self._plain:
            value = found[slot]
            if value is None:
                continue
            if plain and type(value) is str and len(value) <= 256 and "\0" not in value:
                # Within 256 characters no UTF-8 is over the limit, and decoded text has no lone surrogate.
                values.append((key_id, value))
                continue
            try:
                canonical = definition.canonical_of([found[place] for place in slots])
            except InvalidValue as invalid:
                skips.append((key_id, invalid.reason))
                continue
            if canonical is not None:
                values.append((key_id, canonical))
        time_us, source = message_time(found[self._time], found[self._created], chunk_ms)
        receipt = found[self._message_id] if found[self._receipt] is True else None
        return Extracted(time_us, source, values, skips, receipt if isinstance(receipt, str) else None)


def message_time(header: Any, created: Any, chunk_ms: int | None) -> tuple[int | None, TimeSource]:
    """A message's time and where it is from: our header, else the property `timestamp`, else the chunk.

    The property counts in whole seconds, as AMQP 0.9.1 shows it, so that both transports agree.
    """
    if type(header) is int and TIME_US_MIN <= header <= TIME_US_MAX:
        return header, TimeSource.HEADER
    if created is not None and hasattr(created, "timestamp"):
        return int(created.timestamp() // 1) * 1_000_000, TimeSource.PROPERTY
    if chunk_ms is not None:
        return chunk_ms * 1000, TimeSource.CHUNK
    return None, TimeSource.UNKNOWN


def property_text(value: Any) -> Any:
    """A property as AMQP 0.9.1 shows it: UUIDs, numbers and binary ids of other clients are text there."""
    if isinstance(value, UUID):
        return f"urn:uuid:{value}"
    if isinstance(value, int):
        return str(value)
    return value
