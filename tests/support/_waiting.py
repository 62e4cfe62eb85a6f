"""Waiting on a condition, with a limit."""

import time
from collections.abc import Callable
from typing import Final, TypeVar

T = TypeVar("T")

LIMIT_S: Final = 90.0
"""What nothing here takes, however busy the machine is: only a test that fails waits for so long."""


def wait_until(condition: Callable[[], T], limit_s: float = LIMIT_S, *, what: str = "", every_s: float = 0.02) -> T:
    """Return the first true answer of `condition`; fail with `what` and the last answer after `limit_s` seconds."""
    limit = time.monotonic() + limit_s
    while True:
        answer = condition()
        if answer:
            return answer
        if time.monotonic() > limit:
            raise AssertionError(f"{what or 'the condition'} did not come true in {limit_s:g} s; last: {answer!r}")
        time.sleep(every_s)
