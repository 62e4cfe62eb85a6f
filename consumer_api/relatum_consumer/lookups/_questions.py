"""What look-ups ask of servers, in the log `relatum.lookups` at level DEBUG."""

import logging
import time
from collections.abc import Iterable
from typing import Any, Final

from relatum.errors import RelatumError
from relatum_consumer.lookups._requests import (
    Agree,
    AllBounds,
    Bounds,
    LookupRequest,
    Missing,
    Partitions,
    Read,
    Select,
    Sift,
)

logger: Final = logging.getLogger("relatum.lookups")


def are_logged() -> bool:
    """Whether somebody wants to see questions."""
    return logger.isEnabledFor(logging.DEBUG)


def log_question(request: LookupRequest, answer: Any, began: float) -> None:
    """Log what was asked since a moment, as of `time.perf_counter`: its name, about what, rows of the answer, ms."""
    question = {
        "name": type(request).__name__.lower(),
        "about": _about(request),
        "rows": _rows(answer),
        "ms": (time.perf_counter() - began) * 1e3,
    }
    logger.debug("%(name)s (%(about)s): %(rows)d rows, %(ms).2f ms", question)


def _rows(answer: Any) -> int:
    if isinstance(answer, list | dict):
        return sum(not isinstance(each, RelatumError) for each in answer)
    return int(answer is not None)


def _about(request: LookupRequest) -> str:
    """The statement, or the streams."""
    if isinstance(request, Select):
        # Of one that has two forms, the one that says what is asked for.
        return " ".join((request.sql if isinstance(request.sql, str) else request.sql.prepared).split())
    streams: Iterable[str]
    match request:
        case Read():
            streams = {where.stream for where in request.ids}
        case AllBounds() | Missing():
            streams = request.streams
        case Agree():
            streams = request.positions
        case Partitions():
            streams = [request.super_stream]
        case Bounds():
            streams = [request.stream]
        case Sift():
            streams = [f"{request.stream} from {request.start} to {request.stop - 1}"]
        case _:
            streams = []
    return ", ".join(sorted(streams))
