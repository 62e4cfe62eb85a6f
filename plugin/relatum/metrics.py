"""Metrics for Prometheus: one registry of the components of this process.

Each component has `statistics()`, which returns a frozen dataclass of counters and gauges. The fields' annotations name
the metrics, so nothing is declared or counted twice. A scrape calls `statistics()` of all components; until then,
counting only increments a number.

    relatum.metrics.serve(9400)                              http://127.0.0.1:9400/metrics
    relatum.metrics.exposition()                             the page, for the application's own server
    prometheus_client.REGISTRY.register(collector())         beside the application's own metrics

The other names are for modules that declare and report metrics. docs/metrics.md lists all metrics.

Names follow Prometheus and RabbitMQ: `relatum_`, the component, the counted thing, the unit in full (`_seconds`,
`_bytes`), then `_total` for counters. Label values come from the process's own configuration, such as the streams it
records, never from contents of messages or names that others choose.
"""

import logging
import threading
import weakref
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate
from operator import add
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, TypeVar, get_args, get_origin, get_type_hints

from relatum.common.processes import after_fork
from relatum.errors import ConfigurationError

if TYPE_CHECKING:
    from prometheus_client.registry import Collector, CollectorRegistry

logger: Final = logging.getLogger("relatum.metrics")

# --- histograms -------------------------------------------------------------------------------------------------------

SECONDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
"""The buckets' upper bounds in seconds, for calls that normally take a millisecond and time out after ten seconds."""


@dataclass(frozen=True, slots=True)
class Observed:
    """The counts of a histogram: values by bucket, by ascending upper bound (the last has none), and their sum."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    sum: float

    @property
    def count(self) -> int:
        """The number of values."""
        return sum(self.counts)

    def __add__(self, other: "Observed") -> "Observed":
        counts = tuple(mine + theirs for mine, theirs in zip(self.counts, other.counts, strict=True))
        return Observed(self.bounds, counts, self.sum + other.sum)


class Histogram:
    """Counts values by size, in buckets with these ascending upper bounds. Thread-safe."""

    __slots__ = ("_bounds", "_counts", "_lock", "_sum")

    def __init__(self, bounds: Sequence[float] = SECONDS) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0
        self._lock = threading.Lock()

    def observe(self, value: float) -> None:
        """Count a value."""
        bucket = bisect_left(self._bounds, value)
        with self._lock:
            self._counts[bucket] += 1
            self._sum += value

    def observed(self) -> Observed:
        """Return the counts so far."""
        with self._lock:
            return Observed(self._bounds, tuple(self._counts), self._sum)


# --- declaring fields of statistics as metrics ------------------------------------------------------------------------


@dataclass(frozen=True)
class Metric:
    """A metric: its name and help text, as Prometheus shows them. It annotates the field of statistics that it reports.

    With `by`, the field is a mapping whose keys are the values of this label. `labels` are taken from the statistics.
    """

    merge: ClassVar[Any] = staticmethod(add)
    """Merges the values of two components with the same labels."""
    name: str
    meaning: str
    by: str | None = None
    labels: tuple[str, ...] = ()


class Counter(Metric):
    """A number that only increases."""


class Gauge(Metric):
    """A current number or truth value. None is left out. Values of several components are added."""


class MaxGauge(Gauge):
    """A gauge that reports the greatest value of several components."""

    merge = staticmethod(max)


class MinGauge(Gauge):
    """A gauge that reports the least value of several components."""

    merge = staticmethod(min)


class Distribution(Metric):
    """A histogram: the field is an `Observed`, from `Histogram.observed()`."""


@dataclass(frozen=True, slots=True)
class PerLabel:
    """Annotates a mapping to further statistics, whose keys are the values of this label."""

    label: str


_Fields = list[tuple[tuple[str, ...], Metric]]
"""Metrics by the name of their field, after the names of the mappings to the statistics that have it."""

_Values = dict[tuple[Metric, tuple[str, ...]], Any]
"""Values by metric and label values."""

_Statistics = TypeVar("_Statistics", bound=type[Any])

_declared: dict[Any, tuple[str, ...]] = {}
"""Labels by class of statistics."""


def reported(*labels: str) -> Callable[[_Statistics], _Statistics]:
    """Declare a frozen dataclass as a component's statistics. Annotated fields are metrics.

        @reported()
        @dataclass(frozen=True, slots=True)
        class ReaderStatistics:
            in_use: Annotated[int, Gauge("relatum_reader_connections_in_use", "Connections that calls use now")]

    `report` gets the values of `labels` for each component.
    """

    def declare(statistics: _Statistics) -> _Statistics:
        _declared[statistics] = labels
        return statistics

    return declare


def declared() -> list[Metric]:
    """Return all metrics of the modules imported in this process, ordered by name."""
    of_all = [_fields_of(statistics, labels) for statistics, labels in list(_declared.items())]
    return sorted((metric for fields in of_all for _, metric in fields), key=lambda metric: metric.name)


@cache
def _fields_of(statistics: Any, labels: tuple[str, ...]) -> _Fields:
    found: _Fields = []
    for name, hint in get_type_hints(statistics, include_extras=True).items():
        # The class that defines an inherited field reports it.
        if name in vars(statistics)["__annotations__"] and get_origin(hint) is Annotated:
            mark = hint.__metadata__[0]
            if isinstance(mark, PerLabel):
                # `Annotated[Mapping[str, Nested], Each("label")]`
                nested = get_args(get_args(hint)[0])[1]
                found += [((name, *path), metric) for path, metric in _fields_of(nested, (*labels, mark.label))]
            elif isinstance(mark, Metric):
                own = labels if mark.by is None else (*labels, mark.by)
                found.append(((name,), replace(mark, labels=own)))
    return found


def _series(value: Any, path: tuple[str, ...], labels: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the values of a field with their labels; the keys of each mapping on the way are labels."""
    if isinstance(value, Mapping):
        for key, each in value.items():
            yield from _series(each, path, (*labels, str(key)))
    elif path:
        yield from _series(getattr(value, path[0]), path[1:], labels)
    elif value is not None:
        yield labels, value if isinstance(value, Observed) else float(value)


def _merge(found: _Values, more: _Values) -> None:
    for what, value in more.items():
        found[what] = what[0].merge(found[what], value) if what in found else value


# --- the components of this process -----------------------------------------------------------------------------------


class _Entry:
    """A component and its last known counters."""

    def __init__(self, source: "weakref.ref[Any]", labels: Mapping[str, str]) -> None:
        self._source = source
        self._labels = labels
        self._has_failed = False
        self.counted: _Values = {}

    def values(self) -> _Values:
        """Return the component's values; if it is gone or fails, its last known counters."""
        source = self._source()
        if source is None:
            return self.counted
        found: _Values = {}
        try:
            statistics = source.statistics()
            kind: Any = type(statistics)
            labels = _declared[kind]
            given = tuple(self._labels[label] for label in labels)
            for path, metric in _fields_of(kind, labels):
                found |= {(metric, its_labels): value for its_labels, value in _series(statistics, path, given)}
        except Exception:
            # A failing component must not hide the others, nor prevent its own closing.
            if not self._has_failed:
                logger.exception("the metrics of a %s are left out after an error", type(source).__name__)
            self._has_failed = True
            return self.counted
        self.counted = {what: value for what, value in found.items() if not isinstance(what[0], Gauge)}
        return found


class _Registry:
    """All components of this process, by identity, and the counters of ended ones.

    `statistics()` is never called under the lock, since a component may take its own lock.
    """

    def __init__(self) -> None:
        self._renew()
        after_fork(self, _Registry._renew)

    def _renew(self) -> None:
        """Start empty: in a forked child, the parent reports its own components."""
        # Reentrant: the garbage collector may end a component at any point of any thread.
        self._lock = threading.RLock()
        self._entries: dict[int, _Entry] = {}
        self._past: _Values = {}

    def report(self, source: Any, *, owner: object | None = None, **labels: str) -> None:
        """Report a component from now on.

        Args:
            source: The component. Its `statistics()` returns a class declared with `reported`, without I/O or errors.
            owner: None (default): the component is reported while it is referenced, or until `retire`. With an owner,
                it is reported until the owner is garbage-collected, and no count is lost. The source must not refer to
                its owner.
            labels: The values of the labels that the statistics declare.
        """
        key = id(source)
        entry = _Entry(weakref.ref(source, lambda _: self._end(key)), labels)
        with self._lock:
            self._entries[key] = entry
        if owner is not None:
            # Keeps the source alive until then, so that its final counters are read.
            weakref.finalize(owner, self.retire, source).atexit = False

    def retire(self, source: Any) -> None:
        """Stop reporting a component that has ended. Its counters are kept. Idempotent."""
        entry = self._entries.get(id(source))
        if entry is not None:
            entry.values()
            self._end(id(source))

    def values(self) -> _Values:
        with self._lock:
            found = self._past.copy()
            entries = list(self._entries.values())
        for entry in entries:
            _merge(found, entry.values())
        return found

    def _end(self, key: int) -> None:
        with self._lock:
            if entry := self._entries.pop(key, None):
                _merge(self._past, entry.counted)


_registry: Final = _Registry()
report: Final = _registry.report
retire: Final = _registry.retire


# --- for Prometheus ---------------------------------------------------------------------------------------------------


def collector() -> "Collector":
    """Return a collector for `prometheus_client`: `prometheus_client.REGISTRY.register(collector())`.

    It reports all components of this process, including later ones. It does no I/O, so it always answers.
    """
    from prometheus_client.registry import Collector

    class Reported(Collector):
        def collect(self) -> Iterator[Any]:
            by_metric: dict[Metric, dict[tuple[str, ...], Any]] = {}
            for (metric, labels), value in _registry.values().items():
                by_metric.setdefault(metric, {})[labels] = value
            return (_family(metric, by_metric[metric]) for metric in sorted(by_metric, key=lambda each: each.name))

        def describe(self) -> list[Any]:
            # No names collide; registering must not collect.
            return []

    return Reported()


def exposition() -> str:
    """Return all metrics of this process in Prometheus' text format: `text/plain; version=0.0.4; charset=utf-8`."""
    from prometheus_client import generate_latest

    return generate_latest(_own_registry()).decode()


def serve(port: int, host: str = "127.0.0.1") -> Callable[[], None]:
    """Serve the metrics of this process on `http://host:port/metrics`, in a daemon thread.

    Args:
        port: The port.
        host: The address; by default only programs on this machine can connect.

    Returns:
        A function that stops the server.

    Raises:
        ConfigurationError: the address cannot be bound.
    """
    from prometheus_client import start_http_server

    try:
        server, thread = start_http_server(port, addr=host, registry=_own_registry())
    except OSError as error:
        raise ConfigurationError(f"cannot serve metrics on {host}:{port}: {error.strerror}") from error

    def end() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return end


def _own_registry() -> "CollectorRegistry":
    from prometheus_client import CollectorRegistry

    made = CollectorRegistry()
    made.register(collector())
    return made


def _family(metric: Metric, values: dict[tuple[str, ...], Any]) -> Any:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

    if isinstance(metric, Distribution):
        histogram = HistogramMetricFamily(metric.name, metric.meaning, labels=metric.labels)
        for labels, observed in values.items():
            ends = [*map(str, observed.bounds), "+Inf"]
            counts = accumulate(map(float, observed.counts))
            histogram.add_metric(labels, list(zip(ends, counts, strict=True)), observed.sum)
        return histogram
    of_kind = CounterMetricFamily if isinstance(metric, Counter) else GaugeMetricFamily
    family = of_kind(metric.name, metric.meaning, labels=metric.labels)
    for labels, value in values.items():
        family.add_metric(labels, value)
    return family
