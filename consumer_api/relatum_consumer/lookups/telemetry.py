"""What is told of lookups to OpenTelemetry: a span for each."""

import threading
import time
from collections import Counter as Counts
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Final, TypeAlias

from relatum import otel
from relatum.errors import RelatumError
from relatum.keys import KeyDefinition, masked_places, units_of
from relatum.metrics import Counter, Distribution, Gauge, Histogram, Observed, reported
from relatum.otel import Description, Part
from relatum.reading import ReaderStatistics

_Told: TypeAlias = Callable[[Any], None]

NAMED_MAX: Final = 16
"""Names of streams, and of keys, that a span tells."""


def _nothing_told(_: object) -> None:
    return None


_NOTHING: Final[AbstractContextManager[_Told]] = nullcontext(_nothing_told)


def look_up(called: str, stream: str = "") -> AbstractContextManager[_Told]:
    """A span around a lookup, where somebody wants spans. The block is given what takes note of the result.

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


@reported()
@dataclass(frozen=True, slots=True)
class LookupStatistics(ReaderStatistics):
    """The connections of lookups to the broker, and what was asked.

    Attributes:
        lookup_s: Seconds that lookups took, those that ended as an error too; waiting for what is asked included.
            Iterations are not among them.
        errors: Lookups that ended as an error, by its class.
        asking: Lookups under way, besides those that wait for a message.
        awaiting: Lookups that wait for a message (`wait_related`).
    """

    lookup_s: Annotated[Observed, Distribution("relatum_lookup_seconds", "Time of one lookup")]
    errors: Annotated[
        Mapping[str, int], Counter("relatum_lookup_errors_total", "Lookups that ended as an error", by="error")
    ]
    asking: Annotated[int, Gauge("relatum_lookups_asking", "Lookups under way that do not wait for a message")]
    awaiting: Annotated[int, Gauge("relatum_lookups_awaiting", "Lookups that wait for a message")]


class LookupCounts:
    """The lookups of one object: what is counted of them. Thread-safe.

    Args:
        limit: Of its connections to the broker.
    """

    def __init__(self, limit: int) -> None:
        self.connections = ReaderStatistics.of_none(limit)
        self._lookup_s = Histogram()
        self._errors: Counts[str] = Counts()
        self._asking = self._awaiting = 0
        self._lock = threading.Lock()

    def counted(self) -> "_Counted":
        """Count what is asked in the block, and how it ends."""
        return _Counted(self)

    @contextmanager
    def awaiting(self) -> Iterator[None]:
        """Wait for a message inside: that takes no connection."""
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
        """In a child: what is under way is the parent's."""
        self._lock = threading.Lock()
        self._asking = self._awaiting = 0

    def statistics(self, connections: ReaderStatistics | None = None) -> LookupStatistics:
        """What was counted, with a reader's connections; None where there is no reader."""
        told = asdict(connections or self.connections)
        with self._lock:
            return LookupStatistics(
                **told,
                lookup_s=self._lookup_s.observed(),
                errors=dict(self._errors),
                asking=self._asking,
                awaiting=self._awaiting,
            )


class _Counted:
    """A class and not a generator: it stands on the path of every lookup."""

    __slots__ = ("_began", "_counts")

    def __init__(self, counts: LookupCounts) -> None:
        self._counts = counts

    def __enter__(self) -> None:
        self._counts._move(1, 0)
        self._began = time.perf_counter()

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        counts = self._counts
        counts._lookup_s.observe(time.perf_counter() - self._began)
        counts._move(-1, 0)
        if isinstance(error, RelatumError):
            with counts._lock:
                counts._errors[type(error).__name__] += 1
