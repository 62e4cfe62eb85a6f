"""Errors that a test expects, by their class and fields."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest


@contextmanager
def raising(kind: type[BaseException], match: str | None = None, **fields: Any) -> Iterator[pytest.ExceptionInfo[Any]]:
    """Expect an error of this class in the block, whose fields have these values; others of its fields may differ."""
    with pytest.raises(kind, match=match) as caught:
        yield caught
    assert {name: getattr(caught.value, name) for name in fields} == fields
