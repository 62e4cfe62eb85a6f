"""All paths of the page, built in one place, which knows the root path of a proxy."""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Final
from urllib.parse import urlencode

MCP_PATH: Final = "/mcp"
"""The path of the tools for agents."""

FOR_PROGRAMS: Final = ("/api/", MCP_PATH)
"""Paths for programs; errors there are JSON."""


@dataclass(frozen=True, slots=True)
class Links:
    """Builds the page's paths, absolute on the host.

    Attributes:
        root_path: The prefix of all paths, such as "/relatum". Default: empty.
        version: The hash of the static files.
    """

    root_path: str = ""
    version: str = ""

    def to(self, path: str, **query: object) -> str:
        """Return a path with a query. None, False and empty values are left out; a list repeats the parameter."""
        given = [(name, value) for name, values in query.items() for value in _several(values)]
        return f"{self.root_path}{path}{'?' if given else ''}{urlencode(given)}"

    def static(self, name: str) -> str:
        """Return the path of a static file, which changes when a static file does."""
        return self.to(f"/static/{self.version}/{name}")

    def search(self, **query: object) -> str:
        """Return the path of a search."""
        return self.to("/", **query)

    def stream(self, stream: str) -> str:
        """Return the path of a stream."""
        return self.to("/stream", stream=stream)

    def message(self, stream: str, offset: int, part: str = "", **query: object) -> str:
        """Return the path of a message, or of its `body`. It is valid as long as the message exists."""
        return self.to(f"/message{part and '/'}{part}", stream=stream, offset=offset, **query)


def _several(value: object) -> Iterable[str]:
    if isinstance(value, tuple | list):
        return [text for each in value for text in _several(each)]
    # An undefined value of a template is an empty text.
    if value is None or value is False or str(value) == "":
        return ()
    if isinstance(value, datetime):
        return [value.isoformat()]
    return ["1" if value is True else str(value)]
