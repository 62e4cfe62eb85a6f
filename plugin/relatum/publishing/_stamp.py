"""Stamps messages: adds ids, times and flags, and refuses invalid values. No I/O; changes no argument."""

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from datetime import datetime
from decimal import Decimal
from itertools import repeat
from time import time_ns
from typing import Any, Final, Literal, NamedTuple, NoReturn, TypeAlias

from relatum.common.headers import GROUP_ID_HEADER, GROUP_LAST_HEADER, GROUP_SEQUENCE_HEADER, TIME_HEADER
from relatum.common.limits import (
    HEADERS_BYTES_MAX,
    HEADERS_DEPTH_MAX,
    HEADERS_MAX,
    KEY_VALUE_BYTES_MAX,
    TIME_US_MAX,
    TIME_US_MIN,
)
from relatum.common.uuid7 import uuid7
from relatum.errors import HeadersRefused, InvalidGroup, InvalidRelationshipKey
from relatum.keys import (
    BodyFunction,
    InvalidValue,
    KeyAgreement,
    KeyDefinition,
    KeyType,
    Place,
    SkipReason,
    canonical,
)
from relatum.membership import GROUP_KEY, checked_membership

logger = logging.getLogger("relatum.interception")

OnInvalid: TypeAlias = Literal["raise", "skip"]

SOURCE_FAILED: Final = "source_failed"
"""The reason of a skipped or refused value: the function that reads the key from the body raised an error."""

_SUBSECOND_HINT: Final = " (AMQP sends a datetime in whole seconds: pass integer microseconds or ISO 8601 text)"

_TIMESTAMP_MAX: Final = TIME_US_MAX // 1_000_000
"""Seconds: the greatest valid value of the property `timestamp`."""

_GROUP_HEADERS: Final = frozenset((GROUP_ID_HEADER, GROUP_SEQUENCE_HEADER, GROUP_LAST_HEADER))

_SHORT_CHARACTERS: Final = KEY_VALUE_BYTES_MAX // 4
"""Characters that a key's text may have without a count of its bytes: UTF-8 has at most four bytes per character."""

_BCC_HEADER: Final = "BCC"
"""The header that lists additional routing keys. The broker removes it before delivery.

Source: https://www.rabbitmq.com/docs/sender-selected
"""

_new_tuple: Final = tuple.__new__


class Stamp(NamedTuple):
    """The headers to send (None: no headers), where the caller's come first, and the property `message_id`."""

    headers: dict[str, Any] | None
    message_id: str


class Stamper:
    """Stamps the messages of one connection.

    - `definitions`: The keys whose values are checked. `GROUP_KEY` also checks the headers of groups.
    - `frame_bytes_max`: The negotiated frame size, into which headers must fit; 0: only Relatum's own limit applies.
    - `skipped`: With `on_invalid="skip"`: counts published values that will not be recorded, by (key, reason).
    - `read_property`: Returns a property of the client's object by pika's name; None if it is not set.
    """

    def __init__(
        self,
        definitions: Iterable[KeyDefinition],
        *,
        on_invalid: OnInvalid = "raise",
        frame_bytes_max: int = 0,
        skipped: Counter[tuple[str, str]] | None = None,
        agreement: KeyAgreement | None = None,
        read_property: Callable[[Any, str], Any] = lambda properties, name: getattr(properties, name, None),
    ) -> None:
        self._read_property = read_property
        self._headers_bytes_max = HEADERS_BYTES_MAX
        if frame_bytes_max:
            self._headers_bytes_max = min(HEADERS_BYTES_MAX, frame_bytes_max - _FRAME_BYTES - _ADDED_BYTES)
        # A text header takes 6 bytes, plus at most 4 per character of its name and value.
        self._short_characters = min(_SHORT_CHARACTERS, (self._headers_bytes_max - 10) // 10)
        self._raises = on_invalid == "raise"
        self._agreement = KeyAgreement() if agreement is None else agreement
        self._text_keys: list[tuple[str, KeyDefinition]] = []
        self._other_keys: list[KeyDefinition] = []
        self._body_keys: list[tuple[BodyFunction, KeyDefinition]] = []
        self._checks_groups = False
        for definition in definitions:
            if replace(definition, masked=False) == GROUP_KEY:
                # Group headers are checked only on request: unrelated messages may use the same names.
                self._checks_groups = True
            elif definition.from_body is not None:
                self._body_keys.append((definition.from_body, definition))
            else:
                place = definition.components[0].lone
                is_text = definition.value_type is KeyType.TEXT and not definition.is_composite
                if is_text and place is not None and place.kind == "header":
                    self._text_keys.append((place.name, definition))
                elif any(place.kind != "body" for place in definition.places):
                    self._other_keys.append(definition)
        self.skipped: Counter[tuple[str, str]] = Counter() if skipped is None else skipped

    def stamp(
        self,
        headers: Mapping[str, Any] | None,
        message_id: str | None,
        timestamp: Any,
        properties: Any,
        body: Any,
    ) -> Stamp:
        """Return the headers and the id to send with a message.

        `properties` is the client's object, read only if a key or a limit needs it. Raises `InvalidRelationshipKey`,
        `InvalidGroup`, `HeadersRefused`, and the agreement's conflict.
        """
        if self._raises and self._agreement.conflict is not None:
            self._agreement.check()
        out = dict(headers) if headers else {}
        if self._body_keys:
            self._add_body_keys(out, body)
        if out:
            # A group's sequence number is no text: its TypeError in `_is_short_text` would cost as much as the check.
            if GROUP_SEQUENCE_HEADER in out or not self._is_short_text(out):
                check_headers(out, self._headers_bytes_max)
                self._check_texts(out)
            if self._checks_groups and not _GROUP_HEADERS.isdisjoint(out):
                self._check_group(out)
        for definition in self._other_keys:
            # Keys in bodies are not checked: the recorder counts their invalid values.
            self._check(definition, out, properties)
        now = time_ns()
        if TIME_HEADER in out:
            self._check_time(out[TIME_HEADER])
        elif timestamp is None and message_id is not None:
            # The caller's id may carry no time; Relatum's ids do.
            out[TIME_HEADER] = now // 1000
        elif type(timestamp) is int and not 0 <= timestamp <= _TIMESTAMP_MAX:
            self._invalid("timestamp", SkipReason.OUT_OF_RANGE)
        if message_id is None:
            message_id = uuid7(now)
        sent = None if headers is None and not out else out
        # `Stamp(...)` would be one more function call on the publish path.
        return _new_tuple(Stamp, (sent, message_id))

    def _is_short_text(self, headers: dict[str, Any]) -> bool:
        """Return whether all headers are short printable texts, which no limit and no text key refuses."""
        try:
            values = "".join(headers.values())
            # Printable text has no NUL and no lone surrogate.
            return values.isprintable() and len(values) + len("".join(headers)) <= self._short_characters
        except TypeError:
            return False

    def _add_body_keys(self, out: dict[str, Any], body: Any) -> None:
        """Add the keys read from the body to `out`. A header that the caller set is checked instead."""
        content = body.encode() if isinstance(body, str) else body
        for source, definition in self._body_keys:
            name = definition.name
            if name in out:
                self._check(definition, out)
            elif (value := self._value_from(source, definition, content)) is not None:
                out[name] = value

    def _check_texts(self, out: dict[str, Any]) -> None:
        for header, definition in self._text_keys:
            value = out.get(header)
            is_short = type(value) is str and len(value) <= _SHORT_CHARACTERS and value.isprintable()
            if value is not None and not is_short:
                self._check(definition, out)

    def _check(self, definition: KeyDefinition, out: dict[str, Any], properties: Any = None) -> None:
        """Refuse a value that cannot be recorded, or that changes in transit: no lookup would find it."""

        def value_at(place: Place) -> Any:
            if place.kind == "header":
                return out.get(place.name)
            return self._read_property(properties, place.name) if place.kind == "property" else None

        values, reasons = definition.read(value_at)
        for reason in reasons:
            self._invalid(definition.name, reason)
        # AMQP timestamps count seconds. A stream drops tables and arrays, except in headers named `x-…`, which RabbitMQ
        # keeps from 3.13 on. Other values that change are invalid for keys (floating point), or keep their canonical
        # form (bytes, integers of any size).
        for place in definition.places if values else ():
            value = out.get(place.name) if place.kind == "header" else None
            if isinstance(value, dict | list) and not place.name.startswith("x-"):
                return self._invalid(definition.name, SkipReason.NESTED)
            if isinstance(value, datetime) and value.microsecond:
                return self._invalid(definition.name, SkipReason.SUBSECOND)

    def _value_from(self, source: BodyFunction, definition: KeyDefinition, body: bytes) -> str | int | None:
        key_type = definition.value_type
        try:
            value = source(body)
            if value is None:
                return None
            text = canonical(value, key_type)
        except InvalidValue as error:
            self._invalid(definition.name, error.reason)
            return None
        except Exception as error:  # noqa: BLE001 the caller's function may raise any error; `_invalid` chains it
            self._invalid(definition.name, SOURCE_FAILED, error)
            return None
        # Numbers are sent as integers. Timestamps are sent as microseconds: AMQP timestamps have only seconds.
        return text if key_type is KeyType.TEXT else int(text)

    def _check_group(self, out: dict[str, Any]) -> None:
        """Check the headers of a group, and add a missing `group_last`: the key needs all three headers."""
        try:
            place = checked_membership(out)
        except InvalidGroup as error:
            if self._raises:
                raise
            self._skip(GROUP_KEY.name, error.reason)
            return
        if place is not None and out.get(GROUP_LAST_HEADER) is None:
            out[GROUP_LAST_HEADER] = False

    def _check_time(self, value: Any) -> None:
        if type(value) is bool or not isinstance(value, int):
            self._invalid(TIME_HEADER, SkipReason.NOT_TIMESTAMP)
        elif not TIME_US_MIN <= value <= TIME_US_MAX:
            self._invalid(TIME_HEADER, SkipReason.OUT_OF_RANGE)

    def _invalid(self, key: str, reason: str, cause: Exception | None = None) -> None:
        reason = str(reason)
        if self._raises:
            hint = _SUBSECOND_HINT if reason == SkipReason.SUBSECOND else ""
            raise InvalidRelationshipKey(
                f"key {key!r} has a value that cannot be recorded: {reason}{hint}; nothing was sent",
                key=key,
                reason=reason,
            ) from cause
        self._skip(key, reason)

    def _skip(self, key: str, reason: str) -> None:
        self.skipped[key, reason] += 1
        if self.skipped[key, reason] == 1:
            logger.warning(
                "published a value of key %r that will not be recorded: %s; later ones are only counted", key, reason
            )


# --- limits on headers ----------------------------------------------------------------------------------------------

# The limits protect readers and other channels. The broker accepts tables nested 900 to 2,000 levels deep, which crash
# every pika and aio-pika reader of the stream. A header frame over the negotiated size closes the whole connection.

_FRAME_BYTES: Final = 8 + 14
"""Bytes of a header frame besides the properties: frame header and end, then class, weight, body size and flags."""

_ADDED_BYTES: Final = 128
"""Bytes reserved for what the interceptor adds: the time, the receipt and the property `message_id`."""

_VALUE_BYTES: Final = 9
"""Bytes of the largest value other than text, bytes, tables and arrays: the type and 8 bytes."""


def check_headers(headers: Mapping[str, Any], bytes_max: int) -> None:
    """Raise `HeadersRefused` for too many, too deep or too large headers. May overestimate the size by a few bytes."""
    # Depth and count are checked during the traversal: a table may contain itself.
    size = 4
    count = 0
    stack: list[tuple[Any, int]] = [(headers, 0)]
    while stack:
        container, depth = stack.pop()
        if depth > HEADERS_DEPTH_MAX:
            _refuse("too_deep", f"the headers are nested deeper than {HEADERS_DEPTH_MAX} levels")
        count += len(container)
        if count > HEADERS_MAX:
            _refuse("too_many", f"the message has more than {HEADERS_MAX} header values, including nested ones")
        is_table = type(container) is dict or isinstance(container, Mapping)
        for name, value in container.items() if is_table else zip(repeat(""), container):
            size += 1 + _text_bytes(name)
            kind = type(value)
            if kind is str or isinstance(value, (str, bytes, bytearray)):
                size += 5 + _text_bytes(value)
            elif kind is int or kind is bool or not isinstance(value, (Mapping, list, tuple)):
                size += _VALUE_BYTES
            else:
                size += 5
                stack.append((value, depth + 1))
    if size > bytes_max:
        _refuse("too_large", f"the headers take {size} bytes, and the limit is {bytes_max}")


def _text_bytes(value: Any) -> int:
    if type(value) is str and value.isascii():
        return len(value)
    if isinstance(value, str):
        # The client's encoder refuses a lone surrogate.
        return len(value.encode("utf-8", "surrogatepass"))
    return len(value) if isinstance(value, (bytes, bytearray)) else 0


def _refuse(reason: str, what: str) -> NoReturn:
    raise HeadersRefused(f"{what}; nothing was sent", reason=reason)


# --- copies of messages to queues, which the broker writes to a stream ------------------------------------------------


def is_copied(stream: str, exchange: Any, routing_key: Any, mandatory: Any) -> bool:
    """Return whether to copy a message to `stream`; False for mandatory ones: a copy would count as a delivery."""
    return bool(exchange == "" and routing_key != stream and not mandatory)


def with_copy(headers: Mapping[str, Any] | None, stream: str) -> dict[str, Any]:
    """Return headers that also route the message to `stream`: added to the caller's `BCC`, unless that is no list."""
    given = headers or {}
    for name, value in given.items():
        if isinstance(value, Decimal):
            # RabbitMQ cannot write a decimal number to a stream, and closes the connection.
            raise HeadersRefused(
                f"header {name!r} is a decimal number, which cannot be copied to a stream: send it as text; nothing "
                "was sent",
                reason="decimal",
            )
    copies = given.get(_BCC_HEADER, [])
    return {**given, _BCC_HEADER: [*copies, stream] if isinstance(copies, list | tuple) else copies}
