"""Waiting on a condition, with a limit."""

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def wait_until(condition: Callable[[], T], limit_s: float = 10.0, *, what: str = "", every_s: float = 0.02) -> T:
    """Return the first true answer of `condition`; fail with `what` and the last answer after `limit_s` seconds."""
    limit = time.monotonic() + limit_s
    while True:
        answer = condition()
        if answer:
            return answer
        if time.monotonic() > limit:
            raise AssertionError(f"{what or 'the condition'} did not come true in {limit_s:g} s; last: {answer!r}")
        time.sleep(every_s)
