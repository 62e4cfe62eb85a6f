"""The span of a look-up, opened where its steps are taken: so each look-up has one, by either face."""

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence, Sized
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Final, TypeAlias, TypeVar

from relatum import otel
from relatum.keys import KeyDefinition, masked_places, units_of
from relatum.otel import Description, Part

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


def look_up_in(stream: str, called: str) -> AbstractContextManager[object]:
    """The same, of what has no steps, and one stream."""
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
