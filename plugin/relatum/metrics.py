"""Metrics for Prometheus: one registry of the components of this process.

Each component has `statistics()`, a frozen dataclass of counters and gauges. Its fields name their metrics, so nothing
else is declared, and nothing is counted twice. A scrape asks all components at that moment; until then, counting is an
addition to a number.

    relatum.metrics.serve(9400)                              http://127.0.0.1:9400/metrics
    relatum.metrics.exposition()                             the page, for a server of the application's own
    prometheus_client.REGISTRY.register(collector())         beside the application's own metrics

The other names are for modules that declare and report metrics. docs/metrics.md has the list of all metrics.

Names are as Prometheus and RabbitMQ have them: `relatum_`, the component, what is counted, the unit in full and last
(`_seconds`, `_bytes`), `_total` behind counters. Labels are what the process itself was told to work on, such as the
streams it records: never contents of messages, nor names that others choose.
"""

import logging
import threading
import weakref
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cache, reduce
from itertools import accumulate
from operator import add
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    ClassVar,
    Final,
    TypeVar,
    get_args,
    get_origin,
    get_type_hints,
)

from relatum.errors import ConfigurationError
from relatum.processes import after_fork

if TYPE_CHECKING:
    from prometheus_client.registry import Collector, CollectorRegistry

logger: Final = logging.getLogger("relatum.metrics")

# --- how long things took ---------------------------------------------------------------------------------------------

SECONDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
"""The upper ends of buckets for what takes a millisecond when all is well, and is given up after ten seconds."""


@dataclass(frozen=True, slots=True)
class Observed:
    """The counts of a histogram.

    Attributes:
        bounds: The buckets' upper ends, rising. The last bucket has none.
        counts: Values in each bucket; one more than bounds.
        sum: All values together.
    """

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
    """Counts values by size. Threads may share one.

    Args:
        bounds: The buckets' upper ends, rising. Default: for seconds, from a millisecond to ten seconds.
    """

    __slots__ = ("_bounds", "_counts", "_lock", "_sum")

    def __init__(self, bounds: Sequence[float] = SECONDS) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0
        self._lock = threading.Lock()

    def observe(self, value: float) -> None:
        """Count one value."""
        bucket = bisect_left(self._bounds, value)
        with self._lock:
            self._counts[bucket] += 1
            self._sum += value

    def observed(self) -> Observed:
        """The counts so far."""
        with self._lock:
            return Observed(self._bounds, tuple(self._counts), self._sum)


# --- which field of which statistics is which metric ------------------------------------------------------------------


class Kind(StrEnum):
    """Prometheus' types."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True)
class Metric:
    """A metric; as the annotation of a field, it marks that field.

    Args:
        name: Its name, as Prometheus shows it.
        meaning: Its meaning, in a few words.
        by: The field is a mapping, and its keys are the values of this label. None (default): it is one value.
        labels: All its labels, in order; filled in from the statistics that it is declared in.
    """

    kind: ClassVar[Kind]
    merge: ClassVar[Any] = staticmethod(lambda values: reduce(add, values))
    """How the values of several components with the same labels become one."""
    name: str
    meaning: str
    by: str | None = None
    labels: tuple[str, ...] = ()


class Counter(Metric):
    """A number that only grows."""

    kind = Kind.COUNTER


class Gauge(Metric):
    """A number, or a truth, that holds now; None is left out. Those of several components are added up."""

    kind = Kind.GAUGE


class Greatest(Gauge):
    """A gauge; of several components, the greatest is reported."""

    merge = staticmethod(max)


class Least(Gauge):
    """A gauge; of several components, the least is reported."""

    merge = staticmethod(min)


class Distribution(Metric):
    """The counts of a `Histogram`: its `observed()`."""

    kind = Kind.HISTOGRAM


@dataclass(frozen=True, slots=True)
class Each:
    """The field is a mapping to further statistics; its keys are the values of this label."""

    label: str


_Fields = list[tuple[str, "Metric | _Fields"]]
"""The fields of statistics that are metrics, by name; a mapping to further statistics has those of them."""

_Values = dict[tuple[Metric, tuple[str, ...]], list[Any]]
"""Values by metric and by the values of its labels."""

_Statistics = TypeVar("_Statistics", bound=type[Any])

_declared: dict[Any, tuple[str, ...]] = {}
"""Labels, by the class of the statistics."""


def reported(*labels: str) -> Callable[[_Statistics], _Statistics]:
    """Declare a frozen dataclass as the statistics of a component; its fields are marked by their annotations.

        @reported()
        @dataclass(frozen=True, slots=True)
        class ReaderStatistics:
            in_use: Annotated[int, Gauge("relatum_reader_connections_in_use", "Connections that calls use now")]

    Args:
        labels: The labels that `report` is given for each component.
    """

    def declare(statistics: _Statistics) -> _Statistics:
        _declared[statistics] = labels
        return statistics

    return declare


def declared() -> list[Metric]:
    """All metrics of the modules that this process has imported, by name."""

    def metrics_of(fields: _Fields) -> Iterator[Metric]:
        for _, what in fields:
            yield from [what] if isinstance(what, Metric) else metrics_of(what)

    of_all = [_fields_of(statistics, labels) for statistics, labels in list(_declared.items())]
    return sorted((metric for fields in of_all for metric in metrics_of(fields)), key=lambda metric: metric.name)


@cache
def _fields_of(statistics: Any, labels: tuple[str, ...]) -> _Fields:
    found: _Fields = []
    for name, hint in get_type_hints(statistics, include_extras=True).items():
        # An inherited field is reported by the class that has it.
        if name in vars(statistics)["__annotations__"] and get_origin(hint) is Annotated:
            mark = hint.__metadata__[0]
            if isinstance(mark, Each):
                # `Annotated[Mapping[str, Nested], Each("label")]`
                nested = get_args(get_args(hint)[0])[1]
                found.append((name, _fields_of(nested, (*labels, mark.label))))
            elif isinstance(mark, Metric):
                own = labels if mark.by is None else (*labels, mark.by)
                found.append((name, replace(mark, labels=own)))
    return found


def _values(
    statistics: Any, fields: _Fields, given: tuple[str, ...]
) -> Iterator[tuple[tuple[Metric, tuple[str, ...]], Any]]:
    for name, what in fields:
        value = getattr(statistics, name)
        if not isinstance(what, Metric):
            for key, nested in value.items():
                yield from _values(nested, what, (*given, key))
        elif what.by is not None:
            for key, number in value.items():
                yield (what, (*given, str(key))), number
        elif value is not None:
            yield (what, given), value if isinstance(value, Observed) else float(value)


# --- the components of this process -----------------------------------------------------------------------------------

PAST_MAX: Final = 100
"""Values of components that ended are kept one by one up to this number, then merged."""


class _Entry:
    """One component, and its counters when it was asked last."""

    def __init__(self, source: "weakref.ref[Any]", labels: Mapping[str, str]) -> None:
        self._source = source
        self._labels = labels
        self._has_failed = False
        self.counted: _Values = {}

    def values(self) -> _Values:
        """The component's values now; if it is gone, or fails, its last counters."""
        source = self._source()
        if source is None:
            return self.counted
        found: _Values = {}
        try:
            statistics = source.statistics()
            kind: Any = type(statistics)
            labels = _declared[kind]
            given = tuple(self._labels[label] for label in labels)
            for what, value in _values(statistics, _fields_of(kind, labels), given):
                found.setdefault(what, []).append(value)
        except Exception:
            # One that cannot answer must not silence all others, nor hinder its own closing.
            if not self._has_failed:
                logger.exception("the metrics of a %s are left out: a defect", type(source).__name__)
            self._has_failed = True
            return self.counted
        self.counted = {what: values for what, values in found.items() if what[0].kind is not Kind.GAUGE}
        return found


class _Registry:
    """All components of this process, by identity, and the counters of those that ended.

    No component is asked under the lock, since it may take one of its own.
    """

    def __init__(self) -> None:
        self._renew()
        after_fork(self, _Registry._renew)

    def _renew(self) -> None:
        """Begin anew: in a child, what the parent's components count is the parent's to report."""
        # Reentrant: the garbage collector ends a component in any thread, in the midst of anything.
        self._lock = threading.RLock()
        self._entries: dict[int, _Entry] = {}
        self._past: _Values = {}

    def report(self, source: Any, labels: Mapping[str, str]) -> None:
        key = id(source)
        entry = _Entry(weakref.ref(source, lambda _: self._end(key)), labels)
        with self._lock:
            self._entries[key] = entry

    def retire(self, source: Any) -> None:
        entry = self._entries.get(id(source))
        if entry is not None:
            entry.values()
            self._end(id(source))

    def values(self) -> _Values:
        with self._lock:
            found = {what: list(values) for what, values in list(self._past.items())}
            entries = list(self._entries.values())
        for entry in entries:
            for what, values in entry.values().items():
                found.setdefault(what, []).extend(values)
        return found

    def _end(self, key: int) -> None:
        with self._lock:
            entry = self._entries.pop(key, None)
            for what, counted in entry.counted.items() if entry is not None else ():
                values = self._past.setdefault(what, [])
                values.extend(counted)
                if (count := len(values)) > PAST_MAX:
                    values[:count] = [what[0].merge(values[:count])]


_registry: Final = _Registry()


def report(source: Any, *, owner: object | None = None, **labels: str) -> None:
    """Report a component from now on.

    Args:
        source: Has `statistics()`, which returns what `reported` declared. It asks no server and does not fail.
        owner: None (default): the component is reported while something else refers to it, or until `retire`. With an
            owner, it is reported until that is dropped, and its counters are kept in full. The source must not refer to
            its owner.
        labels: The values of the labels that its statistics were declared with.
    """
    _registry.report(source, labels)
    if owner is not None:
        # Keeps the source until then, so that its counters are read in full.
        weakref.finalize(owner, retire, source).atexit = False


def retire(source: Any) -> None:
    """Stop reporting a component that has ended, except for its counters. Idempotent."""
    _registry.retire(source)


# --- for Prometheus ---------------------------------------------------------------------------------------------------


def collector() -> "Collector":
    """A collector for a registry of `prometheus_client`: `prometheus_client.REGISTRY.register(collector())`.

    It reports all components of this process, later ones too. It asks no server, so it always answers.
    """
    from prometheus_client.registry import Collector

    class Reported(Collector):
        def collect(self) -> Iterator[Any]:
            by_metric: dict[Metric, dict[tuple[str, ...], Any]] = {}
            for (metric, labels), values in _registry.values().items():
                by_metric.setdefault(metric, {})[labels] = metric.merge(values)
            return (_family(metric, by_metric[metric]) for metric in sorted(by_metric, key=lambda each: each.name))

        def describe(self) -> list[Any]:
            # Nothing is known to collide; registering must not ask.
            return []

    return Reported()


def exposition() -> str:
    """All metrics of this process in Prometheus' text format: `text/plain; version=0.0.4; charset=utf-8`."""
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
        raise ConfigurationError(f"no metrics can be served on {host}:{port}: {error.strerror}") from error

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

    if metric.kind is Kind.HISTOGRAM:
        histogram = HistogramMetricFamily(metric.name, metric.meaning, labels=metric.labels)
        for labels, observed in values.items():
            ends = [*map(str, observed.bounds), "+Inf"]
            counts = accumulate(map(float, observed.counts))
            histogram.add_metric(labels, list(zip(ends, counts, strict=True)), observed.sum)
        return histogram
    of_kind = CounterMetricFamily if metric.kind is Kind.COUNTER else GaugeMetricFamily
    family = of_kind(metric.name, metric.meaning, labels=metric.labels)
    for labels, value in values.items():
        family.add_metric(labels, value)
    return family
