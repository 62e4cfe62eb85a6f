"""An endpoint's parameters, its cursors, and the schemas of its answer.

Parameters are a pydantic model, which parses a query or a tool's arguments, and has their schemas:

    class StreamParameters(Parameters):
        stream: str = Field(description="The stream.")
        limit: int = Field(100, ge=1, le=1_000, description="Maximum messages.")
"""

import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from types import UnionType
from typing import Annotated, Any, Final, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError

from relatum.common.documents import field_names
from relatum.common.limits import INTEGER_MAX
from relatum.errors import InvalidInput, RelatumError

_TEXT_MAX: Final = 4_096
"""Maximum characters of a value: a key's value has at most 1,024 bytes, and a stream's name 255."""

_NAME_CHARACTERS: Final = 80
"""Maximum characters of an unknown parameter's name in its error."""


class Parameters(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", coerce_numbers_to_str=True, str_max_length=_TEXT_MAX)


def _moment(value: Any) -> datetime:
    """Return the moment in UTC. pydantic would read digits, such as 20261122, as seconds since 1970."""
    try:
        moment = datetime.fromisoformat(str(value))
        return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)
    except (ValueError, OverflowError):
        raise ValueError("it is not a moment in ISO 8601, such as 2026-11-22T12:03") from None


TextList = Annotated[
    tuple[str, ...],
    BeforeValidator(lambda value: value if isinstance(value, list | tuple) else [value]),
    Field(max_length=200),
]
"""A parameter that may be repeated."""

Moment = Annotated[datetime, BeforeValidator(_moment)]
"""A moment in ISO 8601; UTC without a zone."""

Number = Annotated[int, Field(ge=0, le=INTEGER_MAX)]
"""An offset, or another number of 0 or more."""

_Parameters = TypeVar("_Parameters", bound=Parameters)


def parsed(kind: type[_Parameters], arguments: Mapping[str, Any]) -> _Parameters:
    """Return the parsed parameters, without empty fields of a form; raise `InvalidInput` if one is not valid."""
    filled: dict[str, Any] = {}
    for name, value in arguments.items():
        # A query has a list of texts for each parameter; a tool's arguments may be single values.
        values = [each for each in (value if isinstance(value, list) else [value]) if each not in ("", None)]
        if any(isinstance(each, str) and "\0" in each for each in values):
            # PostgreSQL's texts cannot contain it.
            raise InvalidInput(f"{name[:_NAME_CHARACTERS]}: it contains a NUL character")
        if values:
            filled[name] = values[0] if len(values) == 1 else values
    try:
        return kind.model_validate(filled)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        name = str(first["loc"][0])
        if first["type"] == "extra_forbidden":
            names = ", ".join(kind.model_fields) or "none"
            raise InvalidInput(f"there is no parameter {name[:_NAME_CHARACTERS]!r}, only {names}") from None
        if first["type"] == "missing":
            raise InvalidInput(f"{name} is missing: {kind.model_fields[name].description}") from None
        raise InvalidInput(f"{name}: {first['msg']}") from None


def schema_of(kind: type[Parameters]) -> dict[str, Any]:
    """Return the parameters' JSON schema without titles, which repeat the names."""
    schema = kind.model_json_schema()
    for each in schema["properties"].values():
        del each["title"]
    return schema


# --- cursors ----------------------------------------------------------------------------------------------


def cursor_of(*values: str | int | datetime | None) -> str:
    return base64.urlsafe_b64encode(json.dumps(values, default=datetime.isoformat).encode()).decode()


def read_cursor(text: str, kind: Any) -> Any:
    """Return the values of a cursor as a tuple of the given type, None without a cursor; raise `InvalidInput`."""
    try:
        return TypeAdapter(kind).validate_json(base64.urlsafe_b64decode(text.encode())) if text else None
    except ValueError:
        raise InvalidInput("this cursor is invalid: take `next` of the previous page") from None


def just_after(moment: datetime) -> datetime | None:
    """Return the moment one microsecond later; None after the year 9999."""
    try:
        return moment + timedelta(microseconds=1)
    except OverflowError:
        return None


# --- schemas of answers -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Schemas:
    """Collects the schemas of answers in `found`, by class name; `at` is their path in the document."""

    at: str = "#/components/schemas/"
    found: dict[str, Any] = field(default_factory=dict)

    def of(self, kind: Any) -> dict[str, Any]:
        origin, arguments = get_origin(kind), get_args(kind)
        if origin in (Union, UnionType):
            return {"anyOf": [self.of(each) for each in arguments]}
        if field_names(kind):
            return self._reference(kind)
        if origin in (None, Literal):
            # An error for a `Message`: answers contain the rows of `message_rows`, which masks them.
            return TypeAdapter(str if kind is RelatumError else kind).json_schema()
        if issubclass(origin, Mapping):
            return {"type": "object", "additionalProperties": self.of(arguments[1])}
        if len(arguments) == 1 or arguments[1:] == (...,):
            return {"type": "array", "items": self.of(arguments[0])}
        return {"type": "array", "prefixItems": [self.of(each) for each in arguments], "items": False}

    def _reference(self, kind: Any) -> dict[str, Any]:
        name = kind.__name__
        if name not in self.found:
            self.found[name] = {}  # a class may contain itself
            hints, names = get_type_hints(kind), field_names(kind)
            self.found[name] = object_schema({each: self.of(hints[each]) for each in names}, summary_of(kind))
        return {"$ref": f"{self.at}{name}"}


def object_schema(properties: dict[str, Any], description: str) -> dict[str, Any]:
    """Return the schema of an object with exactly these properties."""
    return {
        "type": "object",
        "description": description,
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def summary_of(kind: Any) -> str:
    """Return a class's docstring on one line, without its list of attributes."""
    return " ".join((kind.__doc__ or "").partition("Attributes:")[0].split())
