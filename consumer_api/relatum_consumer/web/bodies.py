"""Detects the kind of a body and formats it: JSON, text, or bytes. No body is ever treated as HTML."""

import json
import re
from collections.abc import Sequence
from typing import Any, Final, Literal

BodyKind = Literal["empty", "json", "text", "binary", "masked"]

_LOOKED_AT: Final = 65_536
"""How many characters of a text are searched for control characters."""

HEX_BYTES_MAX: Final = 4_096
"""The most bytes shown in hexadecimal."""

JSON_BYTES_MAX: Final = 1 << 20
"""The largest body parsed as JSON, in bytes; a larger one counts as text."""

_PREVIEW_CHARACTERS: Final = 160

_INDENT_MAX: Final = 80
"""The deepest indentation, in characters; deeper values stay on one line."""

_COMPARED_BYTES_MAX: Final = 1 << 14
"""The largest JSON body compared with those of other messages of a list, in bytes."""

_NO_TEXT: Final = re.compile(r"[\x01-\x08\x0b\x0e-\x1f\x7f]")

_CHARACTERS_OF_A_NUL: Final = 4
"""The fewest characters for each NUL in a text: UTF-16 and binary numbers have more NULs."""


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
    return text if is_text and not _NO_TEXT.search(text, 0, _LOOKED_AT) else None


def whole_characters(body: bytes, at: int) -> int:
    """Return the offset, moved back to the start of a character if it is inside one."""
    while 0 < at < len(body) and body[at] & 0xC0 == 0x80:
        at -= 1
    return at


def kind_of(body: bytes) -> BodyKind:
    """Return the kind of a body, judged by its bytes."""
    if not body:
        return "empty"
    if body[:1] in b"{[" and len(body) <= JSON_BYTES_MAX and _loaded(body) is not None:
        return "json"
    return "binary" if text_of(body) is None else "text"


def preview(body: bytes) -> str:
    """Return the beginning of a body on one line."""
    # One character more than is shown, of at most four bytes each.
    text = text_of(body[: whole_characters(body, 4 * (_PREVIEW_CHARACTERS + 1))])
    shown = body[:32].hex(" ") if text is None else " ".join(text.split())
    return shown if len(shown) <= _PREVIEW_CHARACTERS else f"{shown[: _PREVIEW_CHARACTERS - 1]}…"


def previews(bodies: Sequence[bytes]) -> list[str]:
    """Return the beginnings of the bodies of one stream; JSON objects lose the members that all of them share."""
    loaded = (_loaded(body) if body[:1] == b"{" and len(body) <= _COMPARED_BYTES_MAX else None for body in bodies)
    objects = [each for each in loaded if isinstance(each, dict)]
    if not 1 < len(objects) == len(bodies):
        return [*map(preview, bodies)]
    shared = {name for name in objects[0] if all(name in each and each[name] == objects[0][name] for each in objects)}
    if not shared or any(len(each) == len(shared) for each in objects):
        return [*map(preview, bodies)]
    rest = ({name: value for name, value in each.items() if name not in shared} for each in objects)
    return [preview(f"{{… {_written(each)[1:]}".encode("utf-8", "replace")) for each in rest]


def _written(value: Any, line: str = "") -> str:
    """Return a JSON value as text, numbers as written. With the start of a line, each member gets its own line."""
    if isinstance(value, _Number):
        return value
    if not value or not isinstance(value, dict | list):
        return json.dumps(value, ensure_ascii=False)
    inner = f"{line}  " if 0 < len(line) < _INDENT_MAX else ""
    if isinstance(value, dict):
        start, end = "{}"
        members = [f"{json.dumps(name, ensure_ascii=False)}: {_written(each, inner)}" for name, each in value.items()]
    else:
        start, end = "[]"
        members = [_written(each, inner) for each in value]
    separator = f",{inner or ' '}"
    return f"{start}{inner}{separator.join(members)}{line}{end}"


def indented(text: str) -> str | None:
    """Return JSON with one member a line; None if the text is not JSON, or is nested too deeply."""
    try:
        loaded = _loaded(text.encode())
        return None if loaded is None else _written(loaded, "\n")
    except RecursionError:
        return None


def hex_lines(body: bytes) -> list[str]:
    """Return the beginning of a body as `hexdump -C` shows it."""
    lines = []
    for start in range(0, min(len(body), HEX_BYTES_MAX), 16):
        row = body[start : start + 16]
        letters = "".join(chr(byte) if 32 <= byte < 127 else "·" for byte in row)
        lines.append(f"{start:08x}  {row[:8].hex(' '):23}  {row[8:].hex(' '):23}  {letters}")
    return lines


def _loaded(body: bytes) -> Any:
    """Return the JSON value; None if it is null, or the body is not JSON."""
    try:
        return json.loads(body.decode(), parse_int=_Number, parse_float=_Number, parse_constant=_Number)
    except (ValueError, RecursionError):
        return None
