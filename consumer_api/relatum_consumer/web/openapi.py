"""The description of `/api` in OpenAPI 3.1, made of what the endpoints declare: it says what they do."""

import re
from collections.abc import Iterable
from typing import Any, Final

from relatum_consumer.web.documents import Schemas, said
from relatum_consumer.web.endpoint import Endpoint
from relatum_consumer.web.parameters import described, schema_of

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


def openapi(endpoints: Iterable[Endpoint], root_path: str, version: str) -> dict[str, Any]:
    """The document."""
    schemas = Schemas(found={"Error": _ERROR})
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Relatum",
            "version": version,
            "description": "What the page shows, as JSON. Read-only.",
        },
        "servers": [{"url": f"{root_path}/api"}],
        "paths": {endpoint.path: {"get": _operation(endpoint, schemas)} for endpoint in endpoints},
        "components": {"schemas": schemas.found},
    }


def _operation(endpoint: Endpoint, schemas: Schemas) -> dict[str, Any]:
    answer = {"application/json": {"schema": schemas.of(endpoint.gives)}}
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    return {
        "summary": endpoint.summary,
        "operationId": re.sub(r"\W+", "_", endpoint.path).strip("_"),
        "parameters": [
            {
                "name": field.name,
                "in": "query",
                "required": field.is_required,
                "description": field.parameter.description,
                "schema": schema_of(field),
            }
            for field in described(endpoint.asked)
        ],
        "responses": {
            "200": {"description": said(endpoint.gives), "content": answer},
            "default": {"description": "There is no answer.", "content": error},
        },
    }
