"""How long a reader may take: what the call around it has left (`relatum.waiting`)."""

from typing import Final

from relatum.errors import ReadTimeout
from relatum.waiting import current, has_passed, left_s

CONNECT_S_MIN: Final = 0.5
"""Seconds a port has to answer at least, however much of the time-out others have taken before."""

CONNECT_S_LEAST: Final = 0.01
"""Seconds for connecting where a call has none left: 0 would mean something else to sockets."""


def check_time() -> None:
    """Raise `ReadTimeout` where the call has no time left: before anything is asked, and between what comes."""
    if has_passed():
        raise ReadTimeout(f"The time of the call is over ({current()}).")


def connect_left_s(most_s: float) -> float:
    """Seconds for connecting: so many, or what the call has left."""
    return max(CONNECT_S_LEAST, left_s(most_s))
