"""What work that goes on for ever does about failures: which may be repeated, how they are logged, and when.

Whatever repeats an action asks `may_repeat` and, where an operator's mend is to be waited for, `may_be_mended`. All
other errors are final for the message they are about: it is named, counted and passed on. docs/retries.md lists every
loop that repeats something.
"""

import logging
import random
from collections.abc import Iterator, Mapping
from typing import Final

from relatum.errors import (
    AccessRefused,
    ConfigurationError,
    NotAStream,
    PublishNacked,
    PublishUnroutable,
    RelatumError,
    StreamNotFound,
    Transient,
)

BACKOFF_S: Final = (0.05, 5.0)
"""Least and most seconds before a server that is away is tried again: doubled each time, half of it by chance."""

QUESTION_S: Final = 60.0
"""Most seconds before a question is asked again that was refused: half of it by chance, so 30 at least in the end.

It also is the longest pause before something is tried again that waits for an operator's mend.
"""


def may_repeat(error: BaseException) -> bool:
    """Whether what raised an error may be done again as it is: time alone may cure it.

    Not so: defects (what is no error of Relatum's), bad input, data that cannot be read or written, conflicts, and
    what only a person mends (`may_be_mended`).
    """
    return isinstance(error, Transient)


def may_be_mended(error: BaseException) -> bool:
    """Whether an error is about no message, but about how servers are set up: a person mends it, or nobody does.

    A user without a permission, a schema or a stream that is not there, a queue that takes nothing more: each next
    message would fail of the same. What runs for ever may wait for it, with pauses up to `QUESTION_S` and a line in the
    log; what somebody waits for raises it.
    """
    # A broker's nack says nothing about the message: a queue is full, or a stream has no leader.
    mended = (AccessRefused, ConfigurationError, NotAStream, PublishNacked, PublishUnroutable, StreamNotFound)
    return isinstance(error, mended)


def backoff(longest_s: float = BACKOFF_S[1]) -> Iterator[float]:
    """The pauses between tries, in seconds.

    Args:
        longest_s: The longest pause; `QUESTION_S` for questions that were refused, by default that for servers away.
    """
    pause = BACKOFF_S[0]
    while True:
        yield pause * (0.5 + random.random() / 2)  # noqa: S311 - spreads tries, nothing secret
        pause = min(pause * 2, longest_s)


class Pauses:
    """The pauses of one loop that repeats: short after what passes by itself, longer and longer after all else."""

    def __init__(self) -> None:
        self._passing = backoff()
        self._mended = backoff(QUESTION_S)

    def after(self, error: BaseException) -> float:
        """Seconds to wait after an error."""
        return next(self._passing if may_repeat(error) else self._mended)


def ended(error: BaseException) -> str:
    """What to log of an error that ends some work: its class and message, without a traceback."""
    kind = "" if isinstance(error, RelatumError) else " (unexpected)"
    return f"{type(error).__name__}{kind}: {error}"


def log_failure(
    logger: logging.Logger,
    error: BaseException,
    what: str,
    *,
    level: int = logging.WARNING,
    extra: Mapping[str, object] | None = None,
) -> None:
    """Log what ended some work: what Relatum raises in a line, a defect with its traceback.

    What is repeated is told to `Outages` instead, which says it once.

    - `what`: What that was, with the name of what it was about.
    - `level`: Of what Relatum raises; INFO where nobody need do anything.
    - `extra`: Fields for logs that have some.
    """
    if isinstance(error, RelatumError):
        logger.log(level, "%s: %s", what, ended(error), extra=extra)
    else:
        logger.error("%s", what, exc_info=error, extra=extra)
