"""Converts values to JSON for the command's `--json`, the page's API and the tools for agents. Pure."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, is_dataclass
from datetime import UTC, datetime
from enum import Enum
from math import isfinite
from typing import Any


def document(value: Any, text: Callable[[str], str] = str) -> Any:  # noqa: PLR0911
    """Return a value as JSON objects: dataclasses and named tuples by field, times as ISO 8601 in UTC, others as text.

    `text` converts each text in the result.
    """
    if isinstance(value, Enum):
        value = value.value
    if isinstance(value, str):
        return text(value)
    if isinstance(value, float) and not isfinite(value):
        return text(str(value))  # JSON has neither NaN nor infinity.
    if value is None or isinstance(value, int | float):
        return value
    if isinstance(value, datetime):
        # The database returns times in its session's zone.
        return (value if value.tzinfo is None else value.astimezone(UTC)).isoformat()
    if isinstance(value, bytes | bytearray):
        return text(bytes(value).decode("utf-8", "backslashreplace"))
    if isinstance(value, Mapping):
        return {text(str(name)): document(each, text) for name, each in value.items()}
    if names := field_names(type(value)):
        return {name: document(getattr(value, name), text) for name in names}
    if isinstance(value, set | frozenset):
        return document(sorted(value), text)
    if isinstance(value, Iterable):
        return [document(each, text) for each in value]
    return text(str(value))


def field_names(kind: Any) -> tuple[str, ...]:
    """Return the names of the fields of a dataclass or a named tuple; () for other types."""
    return tuple(each.name for each in fields(kind)) if is_dataclass(kind) else getattr(kind, "_fields", ())
