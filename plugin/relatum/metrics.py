"""Metrics for Prometheus: one registry of the components of this process.

Each component has `statistics()`, which returns a frozen dataclass of counters and gauges. The fields' annotations name
the metrics, so nothing is declared or counted twice. A scrape calls `statistics()` of all components. Counting itself
only increments a number.

    relatum.metrics.serve(9400)                              serves http://127.0.0.1:9400/metrics
    relatum.metrics.exposition()                             the text, for the application's own server
    prometheus_client.REGISTRY.register(collector())         adds them to the application's own metrics

The other names are for Relatum's modules that declare and report metrics. docs/metrics.md lists all metrics.

Names follow Prometheus and RabbitMQ: `relatum_`, the component, the counted noun, the unit in full (`_seconds`,
`_bytes`), then `_total` for counters. Label values come from the process's own configuration, such as the streams it
records, never from the contents of messages or from names that other programs choose.
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
    """A histogram's counts by bucket, in the order of upper bounds (the last bucket has none), and the values' sum."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    sum: float

    @property
    def count(self) -> int:
        """The number of values."""
        return sum(self.counts)

    def __add__(self, other: "Observed") -> "Observed":
        counts = tuple(own + others for own, others in zip(self.counts, other.counts, strict=True))
        return Observed(self.bounds, counts, self.sum + other.sum)


class Histogram:
    """Counts values by size, in buckets whose ascending upper bounds are `bounds`. Thread-safe."""

    __slots__ = ("_bounds", "_counts", "_lock", "_sum")

    def __init__(self, bounds: Sequence[float] = SECONDS) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0
        # Reentrant: the garbage collector may end a component, and so read its counts, anywhere in any thread.
        self._lock = threading.RLock()

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
    """A metric's name and help text, as Prometheus shows them. It annotates the field with the metric's value.

    With `by`, the field is a mapping, and its keys are the values of this label. `reported` determines `labels`.
    """

    merge: ClassVar[Any] = staticmethod(add)
    """Merges the values of two components that have the same labels."""
    name: str
    meaning: str
    by: str | None = None
    labels: tuple[str, ...] = ()


class Counter(Metric):
    """A number that only increases."""


class Gauge(Metric):
    """A current number or truth value; None is not reported. Values of several components are added."""


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
    """Annotates a mapping of further statistics. The mapping's keys are the values of this label."""

    label: str


_Fields = list[tuple[tuple[str, ...], Metric]]
"""Metrics, each with the path to its field: the names of mappings, then the field's name."""

_Values = dict[tuple[Metric, tuple[str, ...]], Any]
"""Values by metric and label values."""

_Statistics = TypeVar("_Statistics", bound=type[Any])

_declared: dict[Any, tuple[str, ...]] = {}
"""Labels by class of statistics."""


def reported(*labels: str) -> Callable[[_Statistics], _Statistics]:
    """Return a decorator that declares a frozen dataclass as a component's statistics. Annotated fields are metrics.

        @reported()
        @dataclass(frozen=True, slots=True)
        class ReaderStatistics:
            in_use: Annotated[int, Gauge("relatum_reader_connections_in_use", "Connections that calls use now")]

    Pass the values of `labels` to `report` for each component.
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
            annotation = hint.__metadata__[0]
            if isinstance(annotation, PerLabel):
                # `Annotated[Mapping[str, Nested], PerLabel("label")]`
                nested = get_args(get_args(hint)[0])[1]
                found += [((name, *path), metric) for path, metric in _fields_of(nested, (*labels, annotation.label))]
            elif isinstance(annotation, Metric):
                all_labels = labels if annotation.by is None else (*labels, annotation.by)
                found.append(((name,), replace(annotation, labels=all_labels)))
    return found


def _series(value: Any, path: tuple[str, ...], labels: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the values of a field with their label values, to which the keys of mappings on the path are added."""
    if isinstance(value, Mapping):
        for key, each in value.items():
            yield from _series(each, path, (*labels, str(key)))
    elif path:
        yield from _series(getattr(value, path[0]), path[1:], labels)
    elif value is not None:
        yield labels, value if isinstance(value, Observed) else float(value)


def _merge(totals: _Values, values: _Values) -> None:
    for series, value in values.items():
        totals[series] = series[0].merge(totals[series], value) if series in totals else value


# --- the components of this process -----------------------------------------------------------------------------------


class _Entry:
    """A registered component and its last known counters."""

    def __init__(self, source: "weakref.ref[Any]", labels: Mapping[str, str]) -> None:
        self._source = source
        self._labels = labels
        self._has_failed = False
        self.counted: _Values = {}

    def values(self) -> _Values:
        """Return the component's values; its last known counters if it is gone or fails."""
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
                found |= {(metric, label_values): value for label_values, value in _series(statistics, path, given)}
        except Exception:
            # A component's error must neither hide the other components nor keep this one from closing.
            if not self._has_failed:
                logger.exception("the metrics of a %s are left out after an error", type(source).__name__)
            self._has_failed = True
            return self.counted
        self.counted = {series: value for series, value in found.items() if not isinstance(series[0], Gauge)}
        return found


class _Registry:
    """All components of this process, by identity, and the counters of components that have ended.

    `statistics()` is never called with the lock held, since a component may take its own lock.
    """

    def __init__(self) -> None:
        self._renew()
        after_fork(self, _Registry._renew)

    def _renew(self) -> None:
        """Start empty, also in a forked child: the parent continues to report its components."""
        # Reentrant: the garbage collector may end a component anywhere in any thread.
        self._lock = threading.RLock()
        self._entries: dict[int, _Entry] = {}
        self._past: _Values = {}

    def report(self, source: Any, *, owner: object | None = None, **labels: str) -> None:
        """Report a component from now on; `labels` are the values of the labels that its statistics declare.

        Its `statistics()` returns an object of a class declared with `reported`, without I/O. It is reported while it
        is referenced, or until `retire`; with an owner, until the owner is garbage-collected, and no count is lost. The
        source must not refer to its owner.
        """
        key = id(source)
        entry = _Entry(weakref.ref(source, lambda _: self._end(key)), labels)
        with self._lock:
            self._entries[key] = entry
        if owner is not None:
            # Also keeps the source alive until then, so that its final counters can be read.
            weakref.finalize(owner, self.retire, source).atexit = False

    def retire(self, source: Any) -> None:
        """Stop reporting a component that has ended, but continue to report its counters. Idempotent."""
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

    It reports all components of this process, including those created later. It does no I/O, so it never blocks.
    """
    from prometheus_client.registry import Collector

    class Reported(Collector):
        def collect(self) -> Iterator[Any]:
            by_metric: dict[Metric, dict[tuple[str, ...], Any]] = {}
            for (metric, labels), value in _registry.values().items():
                by_metric.setdefault(metric, {})[labels] = value
            return (_family(metric, by_metric[metric]) for metric in sorted(by_metric, key=lambda each: each.name))

        def describe(self) -> list[Any]:
            # Registering would otherwise collect all metrics, to compare their names.
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
        host: The address to listen on. Default: 127.0.0.1, for programs on this machine only.

    Returns:
        A function that stops the server.

    Raises:
        ConfigurationError: the address or the port cannot be bound.
    """
    from prometheus_client import start_http_server

    try:
        server, thread = start_http_server(port, addr=host, registry=_own_registry())
    # Python raises a ValueError for a host that cannot be a name, and an OverflowError for a port over 65,535.
    except (OSError, OverflowError, ValueError) as error:
        reason = getattr(error, "strerror", error)
        text = f"cannot serve metrics on {host}:{port}: {reason}; choose another host or port"
        raise ConfigurationError(text) from error

    def end() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return end


def _own_registry() -> "CollectorRegistry":
    from prometheus_client import CollectorRegistry

    registry = CollectorRegistry()
    registry.register(collector())
    return registry


def _family(metric: Metric, values: dict[tuple[str, ...], Any]) -> Any:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

    if isinstance(metric, Distribution):
        histogram = HistogramMetricFamily(metric.name, metric.meaning, labels=metric.labels)
        for labels, observed in values.items():
            ends = [*map(str, observed.bounds), "+Inf"]
            counts = accumulate(map(float, observed.counts))
            histogram.add_metric(labels, list(zip(ends, counts, strict=True)), observed.sum)
        return histogram
    family_class = CounterMetricFamily if isinstance(metric, Counter) else GaugeMetricFamily
    family = family_class(metric.name, metric.meaning, labels=metric.labels)
    for labels, value in values.items():
        family.add_metric(labels, value)
    return family
