"""What goes to the terminal: data to stdout, everything else to stderr."""

import json
from collections.abc import Collection
from datetime import datetime
from typing import Any

from rich.console import Console
from rich.table import Column, Table

console = Console(highlight=False)
"""Data for people."""

errors = Console(stderr=True, highlight=False)
"""Errors and progress."""


def table_of(*columns: str, whole: Collection[str] = ()) -> Table:
    """A table whose cells go on in the next line where they are too long: a name that is cut off names nothing.

    Args:
        columns: The columns' titles.
        whole: Those with cells that are short, and stay in one line.
    """
    return Table(*(Column(column, overflow="fold", no_wrap=column in whole) for column in columns))


def print_json(document: Any, *, one_line: bool = False) -> None:
    """Print one JSON document.

    Args:
        document: What `json` can write; a `datetime` becomes ISO 8601 text.
        one_line: True for JSON lines; else it is indented.
    """
    print(json.dumps(document, indent=None if one_line else 2, ensure_ascii=False, default=_plain), flush=True)


def _plain(value: Any) -> Any:
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, (bytes, bytearray)):
        return bytes(value).decode("utf-8", "backslashreplace")
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    return str(value)


def print_error(message: str) -> None:
    """Print one error for people."""
    errors.print(f"error: {message}", style="red", markup=False, soft_wrap=True)


def ranges_text(ranges: list[tuple[int, int]], *, most: int = 3) -> str:
    """Offset ranges [from, to) as people read them: first to last offset."""
    shown = [f"{start:,}–{end - 1:,}" for start, end in ranges[:most]]
    more = len(ranges) - most
    return ", ".join(shown) + (f" and {more} more" if more > 0 else "") if shown else "–"


def size_text(count: float | None) -> str:
    """A number of bytes as people read it."""
    if count is None:
        return "–"
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:,.0f} {unit}" if unit == "B" else f"{count:,.1f} {unit}"
        count /= 1000
    return f"{count:,.1f} TB"
