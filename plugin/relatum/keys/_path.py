"""Paths into tables and arrays: members, indexes, and each item of an array. Pure.

A subset of JSONPath: `$.order.id`, `$['order id']`, `$.items[0].sku`, `$.items[*].sku`.
"""

import re
from typing import Any, Final, TypeAlias

from relatum.checks import shown
from relatum.errors import InvalidKeyDefinition

STEPS_MAX: Final = 16
"""Steps of a path: as many as levels of headers that the interceptor lets through."""

Step: TypeAlias = "str | int | None"
"""A member's name, an item's number, or None for each item."""

Path: TypeAlias = tuple[Step, ...]

_STEP: Final = re.compile(
    r"""\.(?P<plain>[^\s.\[\]'"*$()?@,:\\]+) | \[(?:(?P<index>0|[1-9][0-9]{0,8}) | (?P<each>\*)
    | '(?P<single>(?:[^'\\]|\\['\\])+)' | "(?P<double>(?:[^"\\]|\\["\\])+)")\]""",
    re.VERBOSE,
)
_PLAIN: Final = re.compile(r"""[^\s.\[\]'"*$()?@,:\\]+\Z""")


def parse_path(text: str, *, key: str) -> Path:
    """The steps of a path that begins with `$`.

    Raises:
        InvalidKeyDefinition: it is no path of the subset, has no step, or too many.
    """
    steps: list[Step] = []
    at = 1 if text.startswith("$") else 0
    while at and at < len(text):
        found = _STEP.match(text, at)
        if found is None:
            break
        steps.append(_step(found))
        at = found.end()
    if not steps or at < len(text):
        raise InvalidKeyDefinition(
            f"key {key!r}: {shown(text)} is no path: write members and indexes as $.order.id, $['order id'], "
            "$.items[0].sku, and $.items[*].sku for each item of an array",
            key=key,
        )
    if len(steps) > STEPS_MAX:
        raise InvalidKeyDefinition(f"key {key!r}: its path has more than {STEPS_MAX} steps", key=key)
    return tuple(steps)


def _step(found: "re.Match[str]") -> Step:
    if found["index"] is not None:
        return int(found["index"])
    if found["each"] is not None:
        return None
    quoted = found["single"] or found["double"]
    return found["plain"] if quoted is None else re.sub(r"\\(.)", r"\1", quoted)


def path_text(path: Path) -> str:
    """The one way a path is written: two that mean the same are the same text."""
    return "$" + "".join(map(_step_text, path))


def _step_text(step: Step) -> str:
    if isinstance(step, str):
        if _PLAIN.match(step):
            return f".{step}"
        escaped = step.replace("\\", "\\\\").replace("'", "\\'")
        return f"['{escaped}']"
    return "[*]" if step is None else f"[{step}]"


def walk(value: Any, path: Path) -> list[Any]:
    """What lies at a path, in order; nothing where it leads nowhere, or to a null."""
    for at, step in enumerate(path):
        if step is None:
            rest = path[at + 1 :]
            return [found for item in value for found in walk(item, rest)] if isinstance(value, list) else []
        if isinstance(step, str):
            value = value.get(step) if isinstance(value, dict) else None
        else:
            value = value[step] if isinstance(value, list) and step < len(value) else None
        if value is None:
            return []
    return [] if value is None else [value]
