"""What is asked of an endpoint, as a dataclass: read from a query, and described for OpenAPI.

@dataclass(frozen=True, slots=True)
class Asked:
    stream: Annotated[str, Parameter("The stream.")]
    limit: Annotated[int, Parameter("At most so many.", least=1, most=1000)] = 100
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import MISSING, Field, dataclass, fields
from datetime import UTC, datetime
from types import NoneType, UnionType
from typing import Annotated, Any, Final, TypeVar, Union, get_args, get_origin, get_type_hints

from relatum.errors import InvalidInput
from relatum.limits import INTEGER_MAX
from relatum_consumer.web.documents import PLAIN

_Asked = TypeVar("_Asked")

_YES: Final = frozenset({"1", "true", "yes", "on"})
_NO: Final = frozenset({"", "0", "false", "no", "off"})

TEXT_MAX: Final = 4_096
"""Characters of one value: a key's value has 1,024 bytes at most, and a stream's name 255."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """What is said of a field: what it is, its bounds, and its choices."""

    description: str
    least: int | None = None
    most: int | None = None
    choices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Nothing:
    """Nothing is asked."""


@dataclass(frozen=True, slots=True)
class Described:
    """A field of what is asked: its name, the type of one value, and whether it may be left out, or be several."""

    name: str
    kind: type
    parameter: Parameter
    is_required: bool
    is_several: bool
    default: Any


def described(asked: type) -> Iterator[Described]:
    """The fields of a dataclass of what is asked."""
    hints = get_type_hints(asked, include_extras=True)
    for field in fields(asked):
        hint = hints[field.name]
        assert get_origin(hint) is Annotated, f"{asked.__name__}.{field.name} says what it is by a Parameter"
        kind, parameter = get_args(hint)
        is_several = get_origin(kind) is tuple
        yield Described(field.name, _one(kind), parameter, _is_required(field), is_several, field.default)


def _is_required(field: "Field[Any]") -> bool:
    return field.default is MISSING and field.default_factory is MISSING


def _one(kind: Any) -> type:
    """The type of one value: without None, and without the tuple around it."""
    if get_origin(kind) in (Union, UnionType):
        return next(each for each in get_args(kind) if each is not NoneType)  # type: ignore[no-any-return]
    return get_args(kind)[0] if get_origin(kind) is tuple else kind  # type: ignore[no-any-return]


def schema_of(field: Described) -> dict[str, Any]:
    """The schema of what may be given for a field."""
    bounds = {"minimum": field.parameter.least, "maximum": field.parameter.most}
    schema = PLAIN[field.kind] | {name: bound for name, bound in bounds.items() if bound is not None}
    if field.parameter.choices:
        schema["enum"] = list(field.parameter.choices)
    if field.is_several:
        schema = {"type": "array", "items": schema}
    elif not field.is_required and field.default not in (None, ""):
        schema["default"] = field.default
    return schema


def parsed(asked: type[_Asked], query: Sequence[tuple[str, str]]) -> _Asked:
    """What is asked, of the parameters of a query. What is not known is refused.

    Raises:
        InvalidInput: one is wrong, missing, or not known.
    """
    return asked(**values_given(described(asked), query))


def values_given(asked: Iterable[Described], pairs: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """The values of fields that are given, by name; of those that may be several, always.

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
        elif texts and (texts[0] or field.kind is str):
            values[name] = _value(field, texts[0])
        elif field.is_required:
            raise InvalidInput(f"{name} is missing: {field.parameter.description}")
    return values


def _value(field: Described, text: str) -> Any:
    if len(text) > TEXT_MAX or "\0" in text:
        raise InvalidInput(f"{field.name} has a NUL character, or more than {TEXT_MAX:,} characters")
    if field.kind is bool:
        return _boolean(field.name, text)
    if field.kind is int:
        return _integer(field, text)
    if field.kind is float:
        return _number(field, text)
    if field.kind is datetime:
        return _moment(field.name, text)
    if field.parameter.choices and text not in field.parameter.choices:
        raise InvalidInput(f"{field.name} is one of {', '.join(field.parameter.choices)}")
    return text


def _boolean(name: str, text: str) -> bool:
    if text.lower() in _YES:
        return True
    if text.lower() in _NO:
        return False
    raise InvalidInput(f"{name} is 1 or 0")


def _integer(field: Described, text: str) -> int:
    least, most = field.parameter.least, field.parameter.most
    low, high = 0 if least is None else least, INTEGER_MAX if most is None else most
    if not text.isascii() or not text.isdigit() or len(text) > 20 or not low <= int(text) <= high:
        raise InvalidInput(f"{field.name} is a whole number from {low:,} to {high:,}")
    return int(text)


def _number(field: Described, text: str) -> float:
    low, high = field.parameter.least or 0, INTEGER_MAX if field.parameter.most is None else field.parameter.most
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not low <= number <= high:
        raise InvalidInput(f"{field.name} is a number from {low:,} to {high:,}")
    return number


def _moment(name: str, text: str) -> datetime:
    """A moment of ISO 8601; without a zone, UTC."""
    try:
        moment = datetime.fromisoformat(text.strip())
    except ValueError:
        raise InvalidInput(f"{name} is a moment as 2026-11-23T09:30 or 2026-11-23T09:30:00+01:00") from None
    return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment
