"""What is told of lookups: spans for OpenTelemetry, and each question in the log `relatum.lookups` at level DEBUG."""

import logging
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Final, TypeAlias, TypeVar

from relatum import otel
from relatum.errors import RelatumError
from relatum.keys import KeyDefinition, masked_places, units_of
from relatum.otel import Description, Part
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

_Result = TypeVar("_Result")

_Telling: TypeAlias = Callable[[_Result], _Result]

NAMED_MAX: Final = 16
"""Names of streams, and of keys, that a span tells."""


def _as_it_is(result: Any) -> Any:
    return result


_NOTHING: Final[AbstractContextManager[Callable[[Any], Any]]] = nullcontext(_as_it_is)


def look_up(steps: Generator[Any, Any, _Result], called: str = "") -> AbstractContextManager[_Telling[_Result]]:
    """A span around a look-up, where somebody wants spans. The block is given what takes note of the result.

    Args:
        steps: Its steps.
        called: Which method was called, where the steps have another name. Empty (default): theirs.
    """
    if not otel.is_on(Part.LOOKUPS):
        return _NOTHING
    return _opened(called or steps.__name__, {})  # type: ignore[attr-defined]  # typed as what any generator has


def look_up_called(called: str) -> AbstractContextManager[Callable[[Any], Any]]:
    """The same, of what has no steps of its own."""
    return _opened(called, {}) if otel.is_on(Part.LOOKUPS) else _NOTHING


def look_up_in(stream: str, called: str) -> AbstractContextManager[object]:
    """The same, about one stream."""
    return _opened(called, {"messaging.destination.name": stream}) if otel.is_on(Part.LOOKUPS) else _NOTHING


@contextmanager
def _opened(called: str, more: dict[str, str]) -> Iterator[_Telling[Any]]:
    def describe() -> Description:
        return Description(f"relatum {called}", {"messaging.system": "rabbitmq", "relatum.lookup": called} | more)

    with otel.span(Part.LOOKUPS, describe) as span:

        def told(result: Any) -> Any:
            span.tell(lambda: _came_of_it(result))
            return result

        yield told


def _came_of_it(result: Any) -> dict[str, Any]:
    """How much, and how sure that is."""
    told: dict[str, Any] = {}
    status = getattr(result, "status", None)
    if status is not None:
        told["relatum.status"] = str(status)
    if hasattr(result, "messages") and isinstance(result, Sized):
        told["messaging.batch.message_count"] = len(result)
    streams: Sequence[str] = getattr(result, "streams", ())
    if len(streams) == 1:
        told["messaging.destination.name"] = streams[0]
    elif streams:
        told["relatum.streams"] = streams[:NAMED_MAX]
    return told


def note_sought(sought: Sequence[tuple[KeyDefinition, str]], definitions: Mapping[str, KeyDefinition]) -> None:
    """Tell the span which keys are asked by; their values only as far as somebody allowed that, and never masked ones.

    Args:
        sought: The keys with the values that are sought.
        definitions: All that are in force.
    """

    def attributes() -> dict[str, Any]:
        told: dict[str, Any] = {"relatum.keys": list(dict.fromkeys(key.name for key, _ in sought))[:NAMED_MAX]}
        allowed = [(key, value) for key, value in sought if otel.shows_values_of(key.name)]
        if allowed:
            masked = masked_places(definitions.values()).keys()
            for key, value in allowed:
                if masked.isdisjoint(units_of(key.components)):
                    told.setdefault(f"relatum.key.{key.name}", []).append(value)
        return told

    otel.note(Part.LOOKUPS, attributes)


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
        return " ".join(str(request.sql).split())
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
