"""Runs lookups within their time limit, with OpenTelemetry spans and counts."""

import threading
import time
from collections import Counter as Counts
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Final, ParamSpec, TypeAlias, TypeVar

from relatum import otel
from relatum.errors import RelatumError
from relatum.keys import KeyDefinition, masked_places, units_of
from relatum.metrics import Counter, Distribution, Gauge, Histogram, Observed, reported
from relatum.otel import Description, Part
from relatum.reading import Message, ReaderStatistics
from relatum.waiting import within

_NoteResult: TypeAlias = Callable[[Any], None]
_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")

NAMED_MAX: Final = 16
"""The most streams, and the most keys, that a span names."""


def _outcome(result: Any) -> dict[str, Any]:
    """Describe how many messages were found, and the status."""
    attributes: dict[str, Any] = {}
    status = getattr(result, "status", None)
    if status is not None:
        attributes["relatum.status"] = str(status)
    if hasattr(result, "messages") and isinstance(result, Sized):
        attributes["messaging.batch.message_count"] = len(result)
    streams: Sequence[str] = (result.stream,) if isinstance(result, Message) else getattr(result, "streams", ())
    if len(streams) == 1:
        attributes["messaging.destination.name"] = streams[0]
    elif streams:
        attributes["relatum.streams"] = streams[:NAMED_MAX]
    return attributes


def note_sought(sought: Sequence[tuple[KeyDefinition, str]], definitions: Mapping[str, KeyDefinition]) -> None:
    """Note the searched keys in the span; values only as far as they may be shown, and never masked ones.

    Args:
        sought: The keys with the searched values.
        definitions: All definitions in force.
    """

    def describe() -> dict[str, Any]:
        attributes: dict[str, Any] = {"relatum.keys": list(dict.fromkeys(key.name for key, _ in sought))[:NAMED_MAX]}
        allowed = [(key, value) for key, value in sought if otel.shows_values_of(key.name)]
        if allowed:
            masked = masked_places(definitions.values()).keys()
            for key, value in allowed:
                if masked.isdisjoint(units_of(key.components)):
                    attributes.setdefault(f"relatum.key.{key.name}", []).append(value)
        return attributes

    otel.note(Part.LOOKUPS, describe)


@reported()
@dataclass(frozen=True, slots=True)
class LookupStatistics(ReaderStatistics):
    """The broker connections of lookups, and counts of lookups.

    Attributes:
        lookup_s: Durations of lookups in seconds, failed ones and waiting for messages included, iterations not.
        errors: Numbers of failed lookups, by the error's class.
        asking: Running lookups, except those that wait for a message.
        awaiting: Lookups that wait for a message (`wait_related`).
    """

    lookup_s: Annotated[Observed, Distribution("relatum_lookup_seconds", "Time of one lookup")]
    errors: Annotated[
        Mapping[str, int], Counter("relatum_lookup_errors_total", "Lookups that ended as an error", by="error")
    ]
    asking: Annotated[int, Gauge("relatum_lookups_asking", "Lookups under way that do not wait for a message")]
    awaiting: Annotated[int, Gauge("relatum_lookups_awaiting", "Lookups that wait for a message")]


class Lookups:
    """Runs the lookups of one `Relations` within its time limit, traced and counted. Thread-safe.

    Args:
        timeout_s: The limit of a lookup, in seconds.
        connections_max: The limit of its broker connections.
    """

    def __init__(self, timeout_s: float, connections_max: int) -> None:
        self.timeout_s = timeout_s
        self._no_connections = ReaderStatistics.of_none(connections_max)
        self._lookup_s = Histogram()
        self._errors: Counts[str] = Counts()
        self._asking = self._awaiting = 0
        self._lock = threading.Lock()

    def run(
        self,
        called: str,
        function: Callable[_Arguments, _Result],
        *args: _Arguments.args,
        **options: _Arguments.kwargs,
    ) -> _Result:
        """Return what a function returns that was called as the method `called`."""
        with self.counted(called, self.timeout_s) as note:
            result = function(*args, **options)
            note(result)
            return result

    @contextmanager
    def counted(self, called: str, within_s: float | None) -> Iterator[_NoteResult]:
        """Run the block as a lookup. It gets a function that notes the result in the lookup's span."""

        def describe() -> Description:
            return Description(f"relatum {called}", {"messaging.system": "rabbitmq", "relatum.lookup": called})

        began = time.perf_counter()
        self._move(1, 0)
        try:
            with within(within_s), otel.span(Part.LOOKUPS, describe) as span:
                yield lambda result: span.tell(lambda: _outcome(result))
        except RelatumError as error:
            with self._lock:
                self._errors[type(error).__name__] += 1
            raise
        finally:
            self._lookup_s.observe(time.perf_counter() - began)
            self._move(-1, 0)

    @contextmanager
    def awaiting(self) -> Iterator[None]:
        """Count the block as waiting for a message, which takes no connection."""
        self._move(-1, 1)
        try:
            yield
        finally:
            self._move(1, -1)

    def _move(self, asking: int, awaiting: int) -> None:
        with self._lock:
            self._asking += asking
            self._awaiting += awaiting

    def renew(self) -> None:
        """Reset the running lookups in a forked child."""
        self._lock = threading.Lock()
        self._asking = self._awaiting = 0

    def statistics(self, connections: ReaderStatistics | None = None) -> LookupStatistics:
        """Return the counts with the reader's connections; None if there is no reader."""
        with self._lock:
            return LookupStatistics(
                **asdict(connections or self._no_connections),
                lookup_s=self._lookup_s.observed(),
                errors=dict(self._errors),
                asking=self._asking,
                awaiting=self._awaiting,
            )
