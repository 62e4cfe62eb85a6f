"""What work that goes on for ever does about failures: how they are logged, and when it is tried again."""

import logging
import random
from collections.abc import Iterator
from typing import Final

from relatum.errors import RelatumError

BACKOFF_S: Final = (0.05, 5.0)
"""Least and most seconds before a server that is away is asked again: doubled each time, half of it by chance."""


def backoff() -> Iterator[float]:
    """The pauses between tries, in seconds."""
    pause, longest = BACKOFF_S
    while True:
        yield pause * (0.5 + random.random() / 2)  # noqa: S311 - spreads tries, nothing secret
        pause = min(pause * 2, longest)


def ended(error: BaseException) -> str:
    """What to log of an error that ends some work: its class and message, without a traceback."""
    kind = "" if isinstance(error, RelatumError) else " (unexpected)"
    return f"{type(error).__name__}{kind}: {error}"


def log_failure(logger: logging.Logger, error: BaseException, what: str) -> None:
    """Log what ended some work: what Relatum raises in a line, a defect with its traceback."""
    if isinstance(error, RelatumError):
        logger.warning("%s: %s", what, ended(error))
    else:
        logger.error("%s", what, exc_info=error)
