"""Answers as tools give them: without what only a page needs, what cannot be seen made visible, and never too long."""

import json
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from datetime import datetime
from typing import Any, Final

ANSWER_CHARACTERS_MAX: Final = 40_000
"""Characters of an answer: some 12,000 tokens, of the 25,000 that hosts take."""

_CHARACTERS, _ITEMS = 80, 8
"""Characters of a text, and items of a list, to which an answer is cut that is too long even with one message."""

_CHARACTERS_KEPT: Final = 10_000

_WHOLE: Final = frozenset({"next", "stream", "part"})
"""Texts that are of no use in part, or bounded by themselves."""

_FOR_PAGES: Final = frozenset({"href", "hue", "bar", "label", "tree", "took_ms"})


class _Visible(dict[int, str]):
    """Characters as they are shown, each found out once."""

    def __missing__(self, code: int) -> str:
        if len(self) >= _CHARACTERS_KEPT:
            self.clear()
        character = chr(code)
        is_seen = character.isprintable() or character in "\n\t"
        self[code] = shown = character if is_seen else f"⟨{code:x}⟩"
        return shown


_VISIBLE: Final = _Visible()


def is_for_pages(name: str) -> bool:
    """Whether a field of an answer is of use to a page alone."""
    return name in _FOR_PAGES or name.endswith("_href")


def plain(value: Any) -> Any:
    """An answer as JSON has it."""
    if isinstance(value, str):
        return visible(value)
    if isinstance(value, datetime):
        return value.isoformat()
    if is_dataclass(value):
        return {each.name: plain(getattr(value, each.name)) for each in fields(value) if not is_for_pages(each.name)}
    if isinstance(value, tuple | list):
        return [plain(each) for each in value]
    return value


def visible(text: str) -> str:
    """Text of others: what would not be seen, or turn what follows around, is written as its number."""
    return text if text.isprintable() else text.translate(_VISIBLE)


def text_of(value: Any) -> str:
    """JSON in a line."""
    return json.dumps(value, ensure_ascii=False)


def shortened(answer: Any) -> tuple[Any, str]:
    """An answer, its texts and lists cut where it is too long, and what was done to it; empty where it was not."""
    if len(text_of(answer)) <= ANSWER_CHARACTERS_MAX:
        return answer, ""
    said = f"This was too long: texts were cut to {_CHARACTERS} characters, and lists to {_ITEMS}. "
    return _cut(answer), said


def _cut(value: Any, name: str = "") -> Any:
    if isinstance(value, str):
        return value if name in _WHOLE or len(value) <= _CHARACTERS else f"{value[: _CHARACTERS - 1]}…"
    if isinstance(value, list):
        return [_cut(each) for each in value[:_ITEMS]]
    if isinstance(value, Mapping):
        return {each: _cut(inner, each) for each, inner in value.items()}
    return value
