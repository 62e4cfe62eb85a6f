"""The form of JSON: which names are in it, and of which types their values are."""

import re
from typing import Any, Final

_MADE_UP: Final = re.compile(r".*-[0-9a-f]{12}\b.*", re.DOTALL)
"""What `unique_name` makes, with whatever a test adds."""


def form(value: Any, where: str = "", found: dict[str, set[str]] | None = None) -> dict[str, set[str]]:
    """The names in a value, each with the types that it has. Names of test streams in a mapping count as one."""
    found = {} if found is None else found
    if isinstance(value, dict):
        for name, inner in value.items():
            known = _MADE_UP.sub("STREAM", name)
            form(inner, f"{where}.{known}" if where else known, found)
    elif isinstance(value, list) and value:
        for inner in value:
            form(inner, f"{where}[]", found)
    else:
        found.setdefault(where, set()).add(type(value).__name__)
    return found


def in_words(found: dict[str, set[str]]) -> dict[str, str]:
    return {name: " ".join(sorted(kinds)) for name, kinds in found.items()}
