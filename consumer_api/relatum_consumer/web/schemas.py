"""JSON schemas of answers, and the OpenAPI description of `/api`."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import Enum
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, Final, Literal, Union, get_args, get_origin, get_type_hints

from relatum.documents import field_names
from relatum.errors import RelatumError
from relatum.reading import Message
from relatum_consumer.web.parameters import properties_of, required_of

if TYPE_CHECKING:
    from relatum_consumer.web.endpoint import Endpoint

_PLAIN: Final[dict[Any, dict[str, Any]]] = {
    str: {"type": "string"},
    int: {"type": "integer"},
    float: {"type": "number"},
    bool: {"type": "boolean"},
    datetime: {"type": "string", "format": "date-time"},
    RelatumError: {"type": "string"},
}


@dataclass(frozen=True, slots=True)
class Schemas:
    """Schemas of answers, by class name.

    Attributes:
        at: The path of the schemas in the document.
        found: The schemas made so far, by class name.
    """

    at: str = "#/components/schemas/"
    found: dict[str, Any] = field(default_factory=dict)

    def of(self, kind: Any) -> dict[str, Any]:  # noqa: PLR0911
        """Return the schema of a type."""
        if kind in _PLAIN:
            return _PLAIN[kind]
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
        if kind is Message:
            raise TypeError("a message is shown by message_rows, which masks it")
        name = kind.__name__
        if name not in self.found:
            self.found[name] = {}  # a class may contain itself
            hints, names = get_type_hints(kind), field_names(kind)
            self.found[name] = object_schema({each: self.of(hints[each]) for each in names}, _summary(kind))
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


def _summary(kind: Any) -> str:
    """Return a class's docstring on one line, without its list of attributes."""
    return " ".join((kind.__doc__ or "").partition("Attributes:")[0].split())


# --- OpenAPI ----------------------------------------------------------------------------------------------

_ERROR: Final = object_schema(
    {
        "error": object_schema(
            {name: {"type": "string"} for name in ("code", "message", "hint")},
            "A code for scripts, what failed, and what to do.",
        )
    },
    "Why there is no answer.",
)


def openapi(endpoints: Iterable["Endpoint"], root_path: str, version: str) -> dict[str, Any]:
    """Return the OpenAPI 3.1 description of `/api`, made from the endpoints' declarations."""
    schemas = Schemas(found={"Error": _ERROR})
    description = "What the page shows, as JSON. Read-only."
    return {
        "openapi": "3.1.0",
        "info": {"title": "Relatum", "version": version, "description": description},
        "servers": [{"url": f"{root_path}/api"}],
        "paths": {endpoint.path: {"get": _operation(endpoint, schemas)} for endpoint in endpoints},
        "components": {"schemas": schemas.found},
    }


def _operation(endpoint: "Endpoint", schemas: Schemas) -> dict[str, Any]:
    def response(description: str, schema: dict[str, Any]) -> dict[str, Any]:
        return {"description": description, "content": {"application/json": {"schema": schema}}}

    return {
        "summary": endpoint.summary,
        "operationId": re.sub(r"\W+", "_", endpoint.path).strip("_"),
        "parameters": [
            {
                "name": name,
                "in": "query",
                "required": name in required_of(endpoint.asked),
                "description": schema["description"],
                "schema": schema,
            }
            for name, schema in properties_of(endpoint.asked).items()
        ],
        "responses": {
            "200": response(_summary(endpoint.gives), schemas.of(endpoint.gives)),
            "default": response("There is no answer.", {"$ref": f"{schemas.at}Error"}),
        },
    }
