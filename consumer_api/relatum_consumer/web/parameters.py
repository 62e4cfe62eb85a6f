"""What an endpoint is asked, as a dataclass: parsed from a query, and described for OpenAPI and for agents.

@dataclass(frozen=True, slots=True)
class Asked:
    stream: Annotated[str, Parameter("The stream.")]
    limit: Annotated[int, Parameter("At most so many.", least=1, most=1000)] = 100
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import MISSING, dataclass, fields
from datetime import UTC, datetime
from types import NoneType
from typing import Annotated, Any, Final, Literal, TypeVar, get_args, get_origin, get_type_hints

from relatum.errors import InvalidInput
from relatum.limits import INTEGER_MAX

_Asked = TypeVar("_Asked")

PLAIN: Final[dict[Any, dict[str, Any]]] = {
    str: {"type": "string"},
    int: {"type": "integer"},
    float: {"type": "number"},
    bool: {"type": "boolean"},
    datetime: {"type": "string", "format": "date-time"},
}

_BOOLEANS: Final = dict.fromkeys(("1", "true", "yes", "on"), True) | dict.fromkeys(
    ("", "0", "false", "no", "off"), False
)

_TEXT_MAX: Final = 4_096
"""Characters of one value: a key's value has 1,024 bytes at most, and a stream's name 255."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """What a field of a question is, and its bounds. Its choices are a `Literal`."""

    description: str
    least: int = 0
    most: int = INTEGER_MAX


@dataclass(frozen=True, slots=True)
class Nothing:
    """A question without parameters."""


@dataclass(frozen=True, slots=True)
class Described:
    """A field of a question: its name, the type of one value, and whether it is required, or takes several values."""

    name: str
    kind: type
    choices: tuple[str, ...]
    parameter: Parameter
    is_required: bool
    is_several: bool
    default: Any


def described(asked: type) -> list[Described]:
    """The fields of a question."""
    hints, found = get_type_hints(asked, include_extras=True), []
    for field in fields(asked):
        hint = hints[field.name]
        assert get_origin(hint) is Annotated, f"{asked.__name__}.{field.name} has no Parameter"
        kind, parameter = get_args(hint)
        choices = tuple(filter(None, get_args(kind))) if get_origin(kind) is Literal else ()
        # Without None, and without the tuple around it.
        one = str if choices else next((each for each in get_args(kind) if each is not NoneType), kind)
        is_required, is_several = field.default is MISSING, get_origin(kind) is tuple
        found.append(Described(field.name, one, choices, parameter, is_required, is_several, field.default))
    return found


def schema_of(field: Described) -> dict[str, Any]:
    """The JSON schema of a field."""
    schema = dict(PLAIN[field.kind])
    if field.kind in (int, float):
        schema |= {"minimum": field.parameter.least, "maximum": field.parameter.most}
    if field.choices:
        schema["enum"] = list(field.choices)
    if field.is_several:
        return {"type": "array", "items": schema}
    return schema if field.is_required or field.default in (None, "") else schema | {"default": field.default}


def parsed(asked: type[_Asked], query: Sequence[tuple[str, str]]) -> _Asked:
    """The question that a query asks.

    Raises:
        InvalidInput: a parameter is wrong, missing, or not known.
    """
    return asked(**values_given(described(asked), query))


def values_given(asked: Iterable[Described], pairs: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """The values of the fields that are given, by name; of those that take several, always.

    Raises:
        InvalidInput: as `parsed`.
    """
    known = {field.name: field for field in asked}
    given: dict[str, list[str]] = {}
    for name, text in pairs:
        if name not in known:
            raise InvalidInput(f"there is no parameter {name[:80]!r}; there are {', '.join(known) or 'none'}")
        given.setdefault(name, []).append(text)
    values: dict[str, Any] = {}
    for name, field in known.items():
        texts = given.get(name, [])
        if field.is_several:
            values[name] = tuple(_value(field, text) for text in texts if text)
        elif len(texts) > 1:
            raise InvalidInput(f"{name} is given {len(texts)} times")
        elif texts and (texts[0] or (field.kind is str and not field.choices)):
            values[name] = _value(field, texts[0])
        elif field.is_required:
            raise InvalidInput(f"{name} is missing: {field.parameter.description}")
    return values


def _value(field: Described, text: str) -> Any:
    if len(text) > _TEXT_MAX or "\0" in text:
        raise InvalidInput(f"{field.name} has a NUL character, or more than {_TEXT_MAX:,} characters")
    if field.kind in (int, float):
        return _number(field, text)
    if field.kind is datetime:
        return _moment(field.name, text)
    if field.kind is bool:
        if text.lower() not in _BOOLEANS:
            raise InvalidInput(f"{field.name} is 1 or 0")
        return _BOOLEANS[text.lower()]
    if field.choices and text not in field.choices:
        raise InvalidInput(f"{field.name} is one of {', '.join(field.choices)}")
    return text


def _number(field: Described, text: str) -> float:
    low, high = field.parameter.least, field.parameter.most
    number: float = math.nan
    try:
        if field.kind is float:
            number = float(text)
        elif text.isascii() and text.isdigit() and len(text) <= 20:
            number = int(text)
    except ValueError:
        pass
    if not low <= number <= high:
        whole = "number" if field.kind is float else "whole number"
        raise InvalidInput(f"{field.name} is a {whole} from {low:,} to {high:,}")
    return number


def _moment(name: str, text: str) -> datetime:
    """A moment of ISO 8601; without a zone, UTC."""
    try:
        moment = datetime.fromisoformat(text.strip())
    except ValueError:
        raise InvalidInput(f"{name} is a moment as 2026-11-23T09:30 or 2026-11-23T09:30:00+01:00") from None
    return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment
