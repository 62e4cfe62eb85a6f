"""Messages and their bodies as answers show them: masked, and as text, so that no number is rounded."""

import json
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from types import NoneType
from typing import Any, Final, Literal

from relatum.common.documents import document, field_names
from relatum.errors import InvalidInput, UndecodableMessage
from relatum.keys import InvalidValue, KeyDefinition
from relatum.reading import Message
from relatum_consumer.lookups.answer import Covered
from relatum_consumer.web.site import Site

_ITEMS_MAX: Final = 100
"""Maximum items of each list in `Covered`."""


@dataclass(frozen=True, slots=True)
class KeyValue:
    """A key's value in a message, or its digest if masked. `of_value` is its index among the key's values."""

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
    """A header or property. `text` is its whole value, or its digest if masked."""

    name: str
    type: str
    text: str
    is_masked: bool


def covered(found: Covered) -> dict[str, Any]:
    """Return the fields of `Covered`, each list cut to `_ITEMS_MAX`."""
    return {name: getattr(found, name)[:_ITEMS_MAX] for name in field_names(Covered)}


def values_of(definition: KeyDefinition, message: Message) -> list[Any]:
    """Return a key's values in a message in the form that lookups accept: a composite value as a tuple."""
    values: list[Any] = definition.values_of(message)
    return [tuple(definition.parts_of(message))] if values and definition.is_composite else values


def query_value(value: tuple[str, ...]) -> Any:
    """Return a query's value in the form that lookups accept, several parts as a tuple; `InvalidInput` without one."""
    if not value:
        raise InvalidInput("value is missing: give the key's value")
    return value[0] if len(value) == 1 else value


def query_text(site: Site, key: str, values: Sequence[Any]) -> str:
    """Return the searched value of a key for display, or its digest if the key is masked."""
    definition, texts = site.masking.definitions.get(key), [*map(str, values)]
    text = " + ".join(texts)
    if definition is None or not site.masking.is_masked(definition):
        return text
    # A value that the key cannot have is digested unchanged.
    with suppress(InvalidValue, ValueError):
        text = definition.canonical_query(texts[0] if len(texts) == 1 else tuple(texts))
    return site.masking.digest(text)


def key_values(site: Site, message: Message) -> tuple[KeyValue, ...]:
    """Return the keys' values in a message; a key with several values has one entry for each."""
    return tuple(
        KeyValue(each.name, site.masking.shown(each.name, value), number)
        for each in site.masking.definitions.values()
        for number, value in enumerate(each.values_of(message))
    )


def message_rows(site: Site, messages: Sequence[Message]) -> tuple[MessageRow, ...]:
    """Return messages as rows of a list; previews leave out members that all bodies of their stream share."""
    shown: dict[str, list[Message]] = {}
    for each in messages:
        if not site.masking.hides_body(each):
            shown.setdefault(each.stream, []).append(each)
    texts = {
        each.id: text
        for of_stream in shown.values()
        for each, text in zip(of_stream, previews([*map(_known_body, of_stream)]), strict=True)
    }
    return tuple(
        MessageRow(
            *each.id,
            each.time,
            each.time_source.value,
            key_values(site, each),
            len(_known_body(each)),
            texts.get(each.id, ""),
        )
        for each in messages
    )


def _known_body(message: Message) -> bytes:
    """Return the body of a message in a list, which shows a body that cannot be unpacked as empty."""
    with suppress(UndecodableMessage):
        return message.body
    return b""


def named_values(site: Site, kind: str, given: dict[str, Any]) -> tuple[Named, ...]:
    shown = []
    for name, value in given.items():
        text, type_ = _value_text(value)
        is_masked = site.masking.is_masked_place(kind, name)
        if is_masked:
            text = site.masking.digest_at(kind, name, value, text)
        shown.append(Named(name, type_, text, is_masked))
    return tuple(shown)


_TYPES: Final = {NoneType: "null", bool: "boolean", int: "integer", str: "text", datetime: "timestamp"}
"""The names of types that differ from Python's."""


def _value_text(value: Any) -> tuple[str, str]:
    """Return a header's or property's value as text, and the name of its type."""
    text = "" if value is None else str(value)
    if isinstance(value, bool | list | dict):
        text = _json_text(document(value))
    elif isinstance(value, datetime):
        text = value.isoformat()
    elif isinstance(value, bytes):
        text = value.hex(" ")
    return text, _TYPES.get(type(value), type(value).__name__)


# --- bodies: no body is ever treated as HTML --------------------------------------------------------------

BodyKind = Literal["empty", "json", "text", "binary", "masked", "unreadable"]

_CHECKED_CHARACTERS: Final = 65_536
"""How many characters of a text are searched for control characters."""

JSON_BYTES_MAX: Final = 1 << 20
"""Maximum bytes of a body parsed as JSON; a larger body counts as text."""

_PREVIEW_CHARACTERS: Final = 160

_INDENT_MAX: Final = 80
"""Maximum indentation, in characters; deeper values stay on one line."""

_COMPARED_BYTES_MAX: Final = 1 << 14
"""Maximum bytes of a JSON body that is compared with the other bodies of a list."""

_CONTROL_CHARACTERS: Final = re.compile(r"[\x01-\x08\x0b\x0e-\x1f\x7f]")

_CHARACTERS_OF_A_NUL: Final = 4
"""Minimum characters of a text for each NUL in it; UTF-16 and binary numbers have more NULs."""


class _Number(str):
    """A JSON number as it was written, without rounding."""

    __slots__ = ()


def text_of(body: bytes) -> str | None:
    """Return a body as text, which may contain a few NULs; None if it is not text."""
    try:
        text = body.decode()
    except UnicodeDecodeError:
        return None
    is_text = text.count("\0") * _CHARACTERS_OF_A_NUL <= len(text)
    return text if is_text and not _CONTROL_CHARACTERS.search(text, 0, _CHECKED_CHARACTERS) else None


def character_start(body: bytes, at: int) -> int:
    """Return the offset of the first byte of the UTF-8 character at an offset."""
    while 0 < at < len(body) and body[at] & 0xC0 == 0x80:
        at -= 1
    return at


def kind_of(body: bytes) -> BodyKind:
    """Return the kind of a body, judged by its bytes."""
    if not body:
        return "empty"
    if body[:1] in b"{[" and len(body) <= JSON_BYTES_MAX and _parsed_json(body) is not None:
        return "json"
    return "binary" if text_of(body) is None else "text"


def preview(body: bytes) -> str:
    """Return the beginning of a body on one line."""
    # Room for one character more than is shown, at four bytes each.
    text = text_of(body[: character_start(body, 4 * (_PREVIEW_CHARACTERS + 1))])
    shown = body[:32].hex(" ") if text is None else " ".join(text.split())
    return shown if len(shown) <= _PREVIEW_CHARACTERS else f"{shown[: _PREVIEW_CHARACTERS - 1]}…"


def previews(bodies: Sequence[bytes]) -> list[str]:
    """Return the beginnings of one stream's bodies; JSON objects lose the members that all of them share."""
    is_compared = all(body[:1] == b"{" and len(body) <= _COMPARED_BYTES_MAX for body in bodies)
    objects = [*map(_parsed_json, bodies)] if is_compared and len(bodies) > 1 else []
    shared = set()
    if objects and all(isinstance(each, dict) for each in objects):
        shared = {name for name, value in objects[0].items() if all((name, value) in each.items() for each in objects)}
    if not shared or any(len(each) == len(shared) for each in objects):
        return [*map(preview, bodies)]
    rest = ({name: value for name, value in each.items() if name not in shared} for each in objects)
    return [preview(f"{{… {_json_text(each)[1:]}".encode()) for each in rest]


def _json_text(value: Any, line: str = "") -> str:
    """Return a JSON value as text. Given a line break with indentation, each member gets its own line."""
    if isinstance(value, _Number):
        return value
    if not value or not isinstance(value, dict | list):
        return _scalar_text(value)
    inner = f"{line}  " if 0 < len(line) < _INDENT_MAX else ""
    if isinstance(value, dict):
        start, end = "{}"
        members = [f"{_scalar_text(name)}: {_json_text(each, inner)}" for name, each in value.items()]
    else:
        start, end = "[]"
        members = [_json_text(each, inner) for each in value]
    separator = f",{inner or ' '}"
    return f"{start}{inner}{separator.join(members)}{line}{end}"


def _scalar_text(value: Any) -> str:
    # A lone surrogate stays escaped, as its sender wrote it, since UTF-8 cannot encode it.
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "backslashreplace").decode()


def indented(text: str) -> str | None:
    """Return JSON with one member per line; None if the text is not JSON, or is nested too deeply."""
    try:
        value = _parsed_json(text.encode())
        return None if value is None else _json_text(value, "\n")
    except RecursionError:
        return None


def hex_lines(body: bytes) -> list[str]:
    """Return a body as `hexdump -C` shows it."""
    lines = []
    for start in range(0, len(body), 16):
        row = body[start : start + 16]
        letters = "".join(chr(byte) if 32 <= byte < 127 else "·" for byte in row)
        lines.append(f"{start:08x}  {row[:8].hex(' '):23}  {row[8:].hex(' '):23}  {letters}")
    return lines


def _parsed_json(body: bytes) -> Any:
    """Return the JSON value; None if it is null, or the body is not JSON."""
    try:
        return json.loads(body.decode(), parse_int=_Number, parse_float=_Number, parse_constant=_Number)
    except (ValueError, RecursionError):
        return None
