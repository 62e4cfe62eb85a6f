"""What an application set for spans may raise: that is said once, and what the span is of goes on."""

import logging
from collections.abc import Callable
from typing import Final, TypeVar, TypeVarTuple

_Given = TypeVarTuple("_Given")
_Result = TypeVar("_Result")

logger = logging.getLogger("relatum.otel")

_TOLD_MAX: Final = 100
"""Kinds of errors that are told of in a process."""

_told: Final[set[tuple[str, type[Exception]]]] = set()


def attempt(without: str, call: Callable[[*_Given], _Result], *given: *_Given) -> _Result | None:
    """Call it; None where that fails, which is said in the log, once of each kind of error.

    Args:
        without: What is not there then, for the log.
        call: What is the application's, or calls that.
        given: What it is called with.
    """
    try:
        return call(*given)
    except Exception as error:
        # Whatever it is: no answer and no row depends on it.
        kind = without, type(error)
        if kind not in _told and len(_told) < _TOLD_MAX:
            _told.add(kind)
            logger.warning("%s, all else goes on: %s (said once)", without, type(error).__qualname__, exc_info=error)
        return None
