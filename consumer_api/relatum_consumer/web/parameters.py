"""An endpoint's parameters: a pydantic model, which parses a query or a tool's arguments, and has their schemas.

class StreamParameters(Parameters):
    stream: str = Field(description="The stream.")
    limit: int = Field(100, ge=1, le=1_000, description="The most messages.")
"""

import base64
import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, Final, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    field_validator,
)

from relatum.errors import InvalidInput
from relatum.limits import INTEGER_MAX

_TEXT_MAX: Final = 4_096
"""The longest value, in characters: a key's value has at most 1,024 bytes, and a stream's name 255."""

_SEVERAL_MAX: Final = 200
"""The most values of one parameter."""

_NAME_CHARACTERS: Final = 80
"""The most characters of an unknown parameter's name in its error."""


class Parameters(BaseModel):
    """The parameters of an endpoint."""

    model_config = ConfigDict(frozen=True, extra="forbid", coerce_numbers_to_str=True, str_max_length=_TEXT_MAX)

    @field_validator("*")
    @classmethod
    def _has_no_nul(cls, value: Any) -> Any:
        """Refuse NUL: PostgreSQL's texts cannot contain it."""
        if any(isinstance(each, str) and "\0" in each for each in (value if isinstance(value, tuple) else [value])):
            raise ValueError("it has a NUL character")
        return value


class NoParameters(Parameters):
    """No parameters."""


def _in_utc(moment: datetime) -> datetime:
    return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment


Several = Annotated[
    tuple[str, ...],
    BeforeValidator(lambda value: value if isinstance(value, list | tuple) else [value]),
    Field(max_length=_SEVERAL_MAX),
]
"""A parameter that may be repeated."""

Moment = Annotated[datetime, AfterValidator(_in_utc)]
"""A moment in ISO 8601; UTC without a zone."""

Number = Annotated[int, Field(ge=0, le=INTEGER_MAX)]
"""An offset, or another number of 0 or more."""

_Question = TypeVar("_Question", bound=Parameters)


def query_of(pairs: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """Return a query's parameters: a text for each, or a list if it is repeated."""
    given: dict[str, list[str]] = {}
    for name, text in pairs:
        given.setdefault(name, []).append(text)
    return {name: texts if len(texts) > 1 else texts[0] for name, texts in given.items()}


def parsed(kind: type[_Question], given: Mapping[str, Any]) -> _Question:
    """Parse parameters. Empty ones are left out, like the fields of a form that was not filled in.

    Raises:
        InvalidInput: a parameter is invalid, missing, or unknown.
    """
    lists = {name: [each for each in value if each != ""] for name, value in given.items() if isinstance(value, list)}
    filled = {name: value for name, value in {**given, **lists}.items() if value not in ("", None, [])}
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


def properties_of(kind: type[Parameters]) -> dict[str, dict[str, Any]]:
    """Return the JSON schema of each parameter."""
    found: dict[str, dict[str, Any]] = kind.model_json_schema().get("properties", {})
    return {name: {key: value for key, value in schema.items() if key != "title"} for name, schema in found.items()}


def required_of(kind: type[Parameters]) -> list[str]:
    """Return the names of the required parameters."""
    return [name for name, field in kind.model_fields.items() if field.is_required()]


# --- cursors ----------------------------------------------------------------------------------------------


def cursor_of(*values: str | int | datetime | None) -> str:
    """Return the values as a cursor."""
    return base64.urlsafe_b64encode(json.dumps(values, default=datetime.isoformat).encode()).decode()


def read_cursor(text: str, kind: Any) -> Any:
    """Return the values of a cursor as a tuple of the given type; None without a cursor.

    Raises:
        InvalidInput: the cursor comes from no answer.
    """
    try:
        return TypeAdapter(kind).validate_json(base64.urlsafe_b64decode(text.encode())) if text else None
    except ValueError:
        raise InvalidInput("this cursor is invalid: take `next` of the previous page") from None
