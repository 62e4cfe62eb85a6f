"""Values as JSON, in the one form that commands, the page's API and tools share."""

import json
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

import pytest

from relatum.documents import document
from relatum.errors import InvalidInput
from relatum.ids import MessageId


class _Colour(StrEnum):
    RED = "red"


@dataclass(frozen=True)
class _Part:
    where: MessageId | None
    parts: tuple["_Part", ...] = ()


VALUES: list[tuple[Any, Any]] = [
    ("text", "text"),
    (_Colour.RED, "red"),
    (None, None),
    (True, True),
    (2**63, 2**63),
    (datetime(2026, 11, 23, 9, 30, tzinfo=UTC), "2026-11-23T09:30:00+00:00"),
    (b"a\xff", "a\\xff"),
    ({"b", "a"}, ["a", "b"]),
    ((0, 7), [0, 7]),
    ({_Colour.RED: MessageId("orders", 1)}, {"red": {"stream": "orders", "offset": 1}}),
    (InvalidInput("no"), "no"),
    (
        _Part(None, (_Part(MessageId("orders", 1)),)),
        {"where": None, "parts": [{"where": {"stream": "orders", "offset": 1}, "parts": []}]},
    ),
]


@pytest.mark.parametrize(("value", "expected"), VALUES)
def test_values_have_one_form(value: Any, expected: Any) -> None:
    """Dataclasses and named tuples by their fields, times as ISO 8601, errors as their words; all of it is JSON."""
    found = document(value)
    assert found == expected
    assert json.loads(json.dumps(found)) == expected


def test_texts_can_be_changed_wherever_they_are() -> None:
    """Names, too: whoever shows them may have to show what cannot be seen."""
    assert document({"a": [_Colour.RED, b"x"]}, str.upper) == {"A": ["RED", "X"]}
