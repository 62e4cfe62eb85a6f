"""The description of `/api` in OpenAPI 3.1, made of what the endpoints declare: it says what they do."""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields, is_dataclass
from datetime import datetime
from types import NoneType, UnionType
from typing import Any, Final, Literal, Union, get_args, get_origin, get_type_hints

from relatum_consumer.web._endpoint import Endpoint
from relatum_consumer.web._parameters import Described, described

_PLAIN: Final[dict[Any, dict[str, Any]]] = {
    str: {"type": "string"},
    int: {"type": "integer"},
    float: {"type": "number"},
    bool: {"type": "boolean"},
    datetime: {"type": "string", "format": "date-time"},
}

_ERROR: Final = {
    "type": "object",
    "description": "Why there is no answer: a code for scripts, what failed, and what to do.",
    "properties": {
        "error": {
            "type": "object",
            "properties": {name: {"type": "string"} for name in ("code", "message", "hint")},
            "required": ["code", "message", "hint"],
            "additionalProperties": False,
        }
    },
    "required": ["error"],
    "additionalProperties": False,
}


@dataclass(frozen=True, slots=True)
class Schemas:
    """Schemas of answers, by their dataclasses' names, as they are met.

    Attributes:
        at: Where they will stand in the document.
        leaves_out: Whether a field of that name is left out.
    """

    at: str = "#/components/schemas/"
    leaves_out: Callable[[str], bool] = lambda _: False
    found: dict[str, Any] = field(default_factory=dict)

    def of(self, kind: Any) -> dict[str, Any]:
        """The schema of a type."""
        if kind in _PLAIN:
            return dict(_PLAIN[kind])
        if is_dataclass(kind):
            return self._reference(kind)
        origin, arguments = get_origin(kind), get_args(kind)
        if origin in (Union, UnionType):
            several = [{"type": "null"} if each is NoneType else self.of(each) for each in arguments]
            return {"anyOf": several}
        if origin is Literal:
            return {"type": "string", "enum": list(arguments)}
        assert origin is tuple, f"{kind} has no schema yet"
        if arguments[1:] == (...,):
            return {"type": "array", "items": self.of(arguments[0])}
        return {"type": "array", "prefixItems": [self.of(each) for each in arguments], "items": False}

    def _reference(self, kind: Any) -> dict[str, Any]:
        name = kind.__name__
        if name not in self.found:
            self.found[name] = {}  # It may have itself within.
            hints = get_type_hints(kind)
            names = [each.name for each in fields(kind) if not self.leaves_out(each.name)]
            self.found[name] = {
                "type": "object",
                "description": self._said(kind),
                "properties": {each: self.of(hints[each]) for each in names},
                "required": names,
                "additionalProperties": False,
            }
        return {"$ref": f"{self.at}{name}"}

    def _said(self, kind: Any) -> str:
        """What a dataclass says of itself, without what it says of fields that are left out."""
        absent = [f"`{each.name}`" for each in fields(kind) if self.leaves_out(each.name)]
        sentences = re.split(r"(?<=[.;]) ", _said(kind))
        return " ".join(each for each in sentences if not any(name in each for name in absent))


def openapi(endpoints: Iterable[Endpoint], root_path: str, version: str) -> dict[str, Any]:
    """The document."""
    schemas = Schemas(found={"Error": _ERROR})
    paths = {_path(endpoint.path): {"get": _operation(endpoint, schemas)} for endpoint in endpoints}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Relatum",
            "version": version,
            "description": "What the page shows, as JSON. Read-only. Names in paths are percent-encoded.",
        },
        "servers": [{"url": f"{root_path}/api"}],
        "paths": paths,
        "components": {"schemas": schemas.found},
    }


def _path(path: str) -> str:
    return re.sub(r"{(\w+):\w+}", r"{\1}", path)


def _operation(endpoint: Endpoint, schemas: Schemas) -> dict[str, Any]:
    answer = {"application/json": {"schema": schemas.of(endpoint.gives)}}
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    return {
        "summary": endpoint.summary,
        "operationId": re.sub(r"\W+", "_", _path(endpoint.path)).strip("_"),
        "parameters": [_parameter(field) for field in described(endpoint.asked)],
        "responses": {
            "200": {"description": _said(endpoint.gives), "content": answer},
            "default": {"description": "There is no answer.", "content": error},
        },
    }


def _parameter(field: Described) -> dict[str, Any]:
    return {
        "name": field.name,
        "in": "path" if field.parameter.in_path else "query",
        "required": field.is_required,
        "description": field.parameter.description,
        "schema": schema_of(field),
    }


def schema_of(field: Described) -> dict[str, Any]:
    """The schema of what may be given for a field."""
    bounds = {"minimum": field.parameter.least, "maximum": field.parameter.most}
    schema = _PLAIN[field.kind] | {name: bound for name, bound in bounds.items() if bound is not None}
    if field.parameter.choices:
        schema["enum"] = list(field.parameter.choices)
    if field.is_several:
        schema = {"type": "array", "items": schema}
    elif not field.is_required and field.default not in (None, ""):
        schema["default"] = field.default
    return schema


def _said(kind: Any) -> str:
    """What a dataclass says of itself, in a line."""
    return " ".join((kind.__doc__ or "").split())
