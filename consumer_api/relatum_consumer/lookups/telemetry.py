"""What is told of lookups to OpenTelemetry: a span for each."""

from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Final, TypeAlias

from relatum import otel
from relatum.keys import KeyDefinition, masked_places, units_of
from relatum.otel import Description, Part

_Told: TypeAlias = Callable[[Any], None]

NAMED_MAX: Final = 16
"""Names of streams, and of keys, that a span tells."""


def _nothing_told(_: object) -> None:
    return None


_NOTHING: Final[AbstractContextManager[_Told]] = nullcontext(_nothing_told)


def look_up(called: str, stream: str = "") -> AbstractContextManager[_Told]:
    """A span around a look-up, where somebody wants spans. The block is given what takes note of the result.

    Args:
        called: The method that was called.
        stream: The stream it is about, where it is about one.
    """
    if not otel.is_on(Part.LOOKUPS):
        return _NOTHING
    return _opened(called, {"messaging.destination.name": stream} if stream else {})


@contextmanager
def _opened(called: str, more: dict[str, str]) -> Iterator[_Told]:
    def describe() -> Description:
        return Description(f"relatum {called}", {"messaging.system": "rabbitmq", "relatum.lookup": called} | more)

    with otel.span(Part.LOOKUPS, describe) as span:
        yield lambda result: span.tell(lambda: _came_of_it(result))


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
