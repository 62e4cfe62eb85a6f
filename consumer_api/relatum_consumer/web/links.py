"""Every address of the page, made in one place, which knows what a proxy puts before it."""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Final
from urllib.parse import urlencode

MCP_PATH: Final = "/mcp"
"""Where tools for agents are."""

FOR_PROGRAMS: Final = ("/api/", MCP_PATH)
"""Paths for programs: their errors are JSON."""


@dataclass(frozen=True, slots=True)
class Links:
    """Paths, from the root of the host on.

    Attributes:
        root_path: What stands before all of them; empty, or as "/relatum".
        version: Of the static files, a sum of what is in them.
    """

    root_path: str = ""
    version: str = ""

    def to(self, path: str, **query: object) -> str:
        """A path of the page with a query; what is None, False or empty is left out, and a list is several."""
        given = [(name, value) for name, values in query.items() for value in _several(values)]
        return f"{self.root_path}{path}{'?' if given else ''}{urlencode(given)}"

    def static(self, name: str) -> str:
        """A static file, by a path that changes when the file does."""
        return self.to(f"/static/{self.version}/{name}")

    def search(self, **query: object) -> str:
        """The search, with what is asked for."""
        return self.to("/", **query)

    def stream(self, stream: str) -> str:
        """A stream."""
        return self.to("/stream", stream=stream)

    def message(self, stream: str, offset: int, part: str = "", **query: object) -> str:
        """A message, or a part of it: `body`, `image`. It stays as long as the message does."""
        return self.to(f"/message{part and '/'}{part}", stream=stream, offset=offset, **query)


def _several(value: object) -> Iterable[str]:
    if isinstance(value, tuple | list):
        return [text for each in value for text in _several(each)]
    # What a template leaves undefined is empty as text.
    if value is None or value is False or str(value) == "":
        return ()
    if isinstance(value, datetime):
        return [value.isoformat()]
    return ["1" if value is True else str(value)]
