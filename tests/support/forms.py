"""The form of JSON: which names are in it, and of which types their values are."""

from typing import Any


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


def in_words(found: dict[str, set[str]]) -> dict[str, str]:
    """The same as it is kept in a file: the types of each name in one text."""
    return {name: " ".join(sorted(kinds)) for name, kinds in found.items()}
