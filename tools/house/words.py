"""Habits of speech to avoid in documentation, command help and errors, each with its plain words."""

import ast
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from tools.house.sources import Module

PAGES: Final = ("README.md", "CONTRIBUTING.md", "docs/*.md", "docs/adr/*.md")

HABITS: Final[Mapping[str, str]] = {
    "look-up": r"look-ups?",  # lookup
    "who asks": r"who(?:ever)? (?:asks|comes|gives|has|is|looks|publishes|reads|waits|wants)",  # the caller, a reader
    "lies": r"lie|lies|lay|lain|lying",  # is at, is in
    "stands": r"(?:stand|stands|stood)(?! by| in for)",  # is in, means, pauses
    "is told": r"(?:is|are|was|were|be|been) told(?! apart)",  # gets, is passed, is reported
    "tells of": r"tells? of",  # reports
    "be it": r"be it",  # whether
    "so do": r"so (?:do|does|did|are|has|have)",  # name the other subject
    "let be": r"let \w+ be",  # an imperative
    "meanwhile": r"meanwhile",  # while …
    "amid": r"amid",  # during, in the middle of
    "goes on": r"(?:go|goes|going|went) on",  # continues
    "in vain": r"in vain",  # without a result
    "is no": r"(?<!there )(?:is|are|was|were) no (?!longer|more|such)",  # is not a
}

_HIDDEN: Final = re.compile(r"^```.*?^```|`[^`]*`|\]\([^)]*\)", re.MULTILINE | re.DOTALL)
"""The parts of a page that are not prose: code blocks, inline code, and the targets of links."""


def habits(modules: Mapping[str, Module], checkout: Path) -> list[str]:
    """Return `place <- habit number` for each habit found; the place is a page, `help` or `errors`."""
    found = Counter(
        (place, habit)
        for place, text in [*_pages(checkout), *_help(modules), *_errors(modules)]
        for habit, words in HABITS.items()
        for _ in re.findall(rf"\b(?:{words})\b", text, re.IGNORECASE)
    )
    return [f"{place} <- {habit} {n}" for (place, habit), most in sorted(found.items()) for n in range(1, most + 1)]


def _pages(checkout: Path) -> Iterator[tuple[str, str]]:
    for path in sorted(path for pattern in PAGES for path in checkout.glob(pattern)):
        yield str(path.relative_to(checkout)), _HIDDEN.sub(" ", path.read_text())


def _help(modules: Mapping[str, Module]) -> Iterator[tuple[str, str]]:
    for module in modules.values():
        if module.package == "relatum_cli" or "command" in module.name:
            texts = (node.value for node in module.nodes if isinstance(node, ast.Constant))
            yield "help", "\n".join(text for text in texts if isinstance(text, str))


def _errors(modules: Mapping[str, Module]) -> Iterator[tuple[str, str]]:
    for module in modules.values():
        raised = (node for node in module.nodes if isinstance(node, ast.Raise))
        texts = (each.value for node in raised for each in ast.walk(node) if isinstance(each, ast.Constant))
        yield "errors", "\n".join(text for text in texts if isinstance(text, str))
