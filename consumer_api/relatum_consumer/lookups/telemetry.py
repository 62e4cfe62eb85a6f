"""Runs lookups within their time limit, with OpenTelemetry spans and counts."""

import threading
import time
from collections import Counter as Counts
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import wraps
from typing import Annotated, Any, Final, ParamSpec, TypeVar

from relatum import otel
from relatum.common.waiting import within
from relatum.errors import RelatumError
from relatum.metrics import Counter, Distribution, Gauge, Histogram, Observed, reported
from relatum.otel import Description, Part
from relatum.reading import Message, ReaderStatistics

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")

NAMED_MAX: Final = 16
"""Maximum number of streams, and of keys, that a span names."""


def _outcome(result: Any) -> dict[str, Any]:
    """Return a span's attributes for a result: the status, the number of messages, and the streams."""
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


def note_sought(names: Iterable[str]) -> None:
    """Add the names of the searched keys to the span. Values are never added."""
    otel.note(Part.LOOKUPS, lambda: {"relatum.keys": list(dict.fromkeys(names))[:NAMED_MAX]})


@reported()
@dataclass(frozen=True, slots=True)
class LookupStatistics(ReaderStatistics):
    """The broker connections of lookups, and counts of lookups.

    Attributes:
        lookup_s: Durations of lookups in seconds, including failed lookups and `wait_related`, but not iterations.
        errors: Number of failed lookups, by the error's class.
        asking: Number of running lookups, except those that wait for a message.
        awaiting: Number of lookups that wait for a message (`wait_related`).
    """

    lookup_s: Annotated[Observed, Distribution("relatum_lookup_seconds", "Duration of a lookup")]
    errors: Annotated[
        Mapping[str, int], Counter("relatum_lookup_errors_total", "Lookups that raised an error", by="error")
    ]
    asking: Annotated[int, Gauge("relatum_lookups_asking", "Running lookups that do not wait for a message")]
    awaiting: Annotated[int, Gauge("relatum_lookups_awaiting", "Lookups that wait for a message")]


class Lookups:
    """Counts and traces the lookups of one `Relations`. Thread-safe. `waits`: Lookups that wait for a message."""

    def __init__(self, timeout_s: float, connections_max: int, waits: Sized) -> None:
        self.timeout_s = timeout_s
        self._waits = waits
        self._no_connections = ReaderStatistics.of_none(connections_max)
        self._lookup_s = Histogram()
        self._errors: Counts[str] = Counts()
        self._running = 0
        # Reentrant: the garbage collector may end the owner, and so read the counts, anywhere in any thread.
        self._lock = threading.RLock()

    @contextmanager
    def counted(self, name: str, within_s: float | None) -> Iterator[Callable[[Any], None]]:
        """Run the block as a lookup. Yields a function that adds the result to the lookup's span."""

        def describe() -> Description:
            return Description(f"relatum {name}", {"messaging.system": "rabbitmq", "relatum.lookup": name})

        began = time.perf_counter()
        with self._lock:
            self._running += 1
        try:
            with within(within_s), otel.span(Part.LOOKUPS, describe) as span:
                yield lambda result: span.tell(lambda: _outcome(result))
        except RelatumError as error:
            with self._lock:
                self._errors[type(error).__name__] += 1
            raise
        finally:
            self._lookup_s.observe(time.perf_counter() - began)
            with self._lock:
                self._running -= 1

    def renew(self) -> None:
        """Reset the number of running lookups in a forked child."""
        self._lock = threading.RLock()
        self._running = 0

    def statistics(self, connections: ReaderStatistics | None = None) -> LookupStatistics:
        """Return the counts, with the reader's connections; None if no reader is open."""
        awaiting = len(self._waits)
        with self._lock:
            return LookupStatistics(
                **asdict(connections or self._no_connections),
                lookup_s=self._lookup_s.observed(),
                errors=dict(self._errors),
                asking=max(0, self._running - awaiting),
                awaiting=awaiting,
            )


def lookup(method: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Make a method a lookup: limited in time, traced and counted by its object's `_lookups`."""
    name = method.__name__.lstrip("_")

    @wraps(method)
    def run(*args: _Arguments.args, **options: _Arguments.kwargs) -> _Result:
        owner: Any = args[0]
        lookups: Lookups = owner._lookups
        with lookups.counted(name, lookups.timeout_s) as note:
            result = method(*args, **options)
            note(result)
            return result

    return run
