"""Answers as plain JSON, and the schemas of it: one form for `/api` and for agents' tools."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from datetime import datetime
from enum import Enum
from functools import cache
from types import NoneType, UnionType
from typing import Any, Final, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from relatum.errors import RelatumError
from relatum.reading import Message

_Kind = TypeVar("_Kind")

FOR_PAGES: Final = {"for_pages": True}
"""Metadata of a field that a template needs and no program: a link, a colour."""

PLAIN: Final[dict[Any, dict[str, Any]]] = {
    str: {"type": "string"},
    int: {"type": "integer"},
    float: {"type": "number"},
    bool: {"type": "boolean"},
    datetime: {"type": "string", "format": "date-time"},
    RelatumError: {"type": "string"},
}


def copied(kind: type[_Kind], source: Any, **given: Any) -> _Kind:
    """A dataclass with the fields of another object that have the same names, and some that are given."""
    names = (each.name for each in fields(kind) if each.name not in given)  # type: ignore[arg-type]
    return kind(**{name: getattr(source, name) for name in names}, **given)


def document(value: Any, text: Callable[[str], str] = str) -> Any:  # noqa: PLR0911
    """A value as JSON has it: dataclasses and named tuples by their fields, times as ISO 8601.

    Args:
        value: An answer. A `Message` is refused: `message_row` shows it, and masks what is masked.
        text: What is done to each text.
    """
    if isinstance(value, str):
        return text(value)
    if value is None or isinstance(value, int | float):
        return value
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, Enum | RelatumError):
        return text(str(value.value if isinstance(value, Enum) else value))
    if isinstance(value, Mapping):
        return {text(str(name)): document(each, text) for name, each in value.items()}
    if isinstance(value, Message):
        raise TypeError("a message is shown by message_row, which masks it")
    if is_dataclass(value) or hasattr(value, "_fields"):
        kind: Any = type(value)
        return {name: document(getattr(value, name), text) for name in _names_of(kind)}
    if isinstance(value, Iterable):
        return [document(each, text) for each in value]
    raise TypeError(type(value).__name__)


@cache
def _names_of(kind: Any) -> tuple[str, ...]:
    """The fields that a document has."""
    if not is_dataclass(kind):
        return tuple(kind._fields)
    return tuple(each.name for each in fields(kind) if each.metadata != FOR_PAGES)


def said(kind: Any) -> str:
    """What a class says of itself, in a line, without its list of attributes."""
    return " ".join((kind.__doc__ or "").partition("Attributes:")[0].split())


@dataclass(frozen=True, slots=True)
class Schemas:
    """Schemas of answers, by the names of their classes, as they are met.

    Attributes:
        at: Where they will stand in the document.
    """

    at: str = "#/components/schemas/"
    found: dict[str, Any] = field(default_factory=dict)

    def of(self, kind: Any) -> dict[str, Any]:  # noqa: PLR0911
        """The schema of a type."""
        if kind in PLAIN:
            return dict(PLAIN[kind])
        origin, arguments = get_origin(kind), get_args(kind)
        if origin in (Union, UnionType):
            return {"anyOf": [{"type": "null"} if each is NoneType else self.of(each) for each in arguments]}
        if origin is Literal:
            return {"type": "string", "enum": list(arguments)}
        if origin is None and issubclass(kind, Enum):
            return {"type": "string", "enum": [each.value for each in kind]}
        if origin is None:
            return self._reference(kind)
        if issubclass(origin, Mapping):
            return {"type": "object", "additionalProperties": self.of(arguments[1])}
        if len(arguments) == 1 or arguments[1:] == (...,):
            return {"type": "array", "items": self.of(arguments[0])}
        return {"type": "array", "prefixItems": [self.of(each) for each in arguments], "items": False}

    def _reference(self, kind: Any) -> dict[str, Any]:
        name = kind.__name__
        if name not in self.found:
            self.found[name] = {}  # It may have itself within.
            hints = get_type_hints(kind)
            names = list(_names_of(kind))
            self.found[name] = {
                "type": "object",
                "description": said(kind),
                "properties": {each: self.of(hints[each]) for each in names},
                "required": names,
                "additionalProperties": False,
            }
        return {"$ref": f"{self.at}{name}"}
