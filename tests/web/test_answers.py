"""The form of all answers: what `/api` and each tool say, by name and type, as it is kept in `answers.json`.

A change of form is made on purpose: `RELATUM_KEEP_ANSWERS=1` writes the file anew, and the change log says it.
"""

import json
import os
from pathlib import Path
from typing import Any, Final

from relatum_consumer.web import WebServer
from tests.support.agents import over_http
from tests.support.web import Asking
from tests.web.conftest import HOSTILE, World
from tests.web.test_api import examples

KEPT: Final = Path(__file__).with_name("answers.json")


def form(value: Any, where: str = "", found: dict[str, set[str]] | None = None) -> dict[str, set[str]]:
    """The names in a value, each with the types that it has."""
    found = {} if found is None else found
    if isinstance(value, dict):
        for name, inner in value.items():
            form(inner, f"{where}.{name}" if where else name, found)
    elif isinstance(value, list) and value:
        for inner in value:
            form(inner, f"{where}[]", found)
    else:
        found.setdefault(where, set()).add(type(value).__name__)
    return found


def calls(world: World) -> list[tuple[str, dict[str, Any]]]:
    """What each tool is asked."""
    message = {"stream": world.orders, "offset": 0}
    return [
        ("keys", {}),
        ("streams", {"q": world.orders}),
        ("values", {"key": "host"}),
        ("find", {"key": "host", "value": "busy", "limit": 3}),
        ("find", {"key": "order_id", "value": "late"}),
        ("related", {**message, "limit": 3}),
        ("trace", {"key": "order_id", "value": f"o-{HOSTILE}", "limit": 5}),
        ("trace", {**message, "fan_out": 5}),
        ("around", {**message, "limit": 3}),
        ("read", message),
        ("expectations", {"span": "all"}),
        ("missing", {"name": "swift", "span": "all", "limit": 3}),
        ("missing", {"name": "patient", "span": "all", "limit": 3}),
    ]


def test_answers_keep_their_form(page: Asking, world: World) -> None:
    """Each path of the API and each tool: the same names and types as are kept."""
    found: dict[str, dict[str, set[str]]] = {}
    for path, asked in examples(world).items():
        for each in asked:
            response = page.get(f"/api{each}")
            if response.status_code == 200:
                form(response.json(), found=found.setdefault(path, {}))
    with WebServer(world.page(port=0, mcp=True)) as server, over_http(server.url) as agent:
        for tool, arguments in calls(world):
            form(agent.result(tool, **arguments), found=found.setdefault(tool, {}))
    said = {path: {name: " ".join(sorted(kinds)) for name, kinds in forms.items()} for path, forms in found.items()}
    if os.environ.get("RELATUM_KEEP_ANSWERS"):
        KEPT.write_text(json.dumps(said, indent=1, sort_keys=True) + "\n")
    assert said == json.loads(KEPT.read_text())
