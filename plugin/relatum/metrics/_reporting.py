"""The registry: the components of this process, what those that ended had counted, and all of it for Prometheus."""

import logging
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final, Protocol

from relatum.errors import ConfigurationError
from relatum.metrics._declaring import Kind, Metric, values_in
from relatum.processes import after_fork

if TYPE_CHECKING:
    from prometheus_client.registry import Collector, CollectorRegistry

logger: Final = logging.getLogger("relatum.metrics")

PAST_MAX: Final = 100
"""Components that ended, of which values are kept one by one; those of more are merged."""

_Values = dict[tuple[Metric, tuple[str, ...]], list[Any]]
"""Values by metric and by the values of its labels."""


class Reports(Protocol):
    """What can be reported."""

    def statistics(self) -> Any:
        """What it has counted, and what holds now. It asks no server and does not fail."""
        ...


class _Entry:
    """One component, and what it had counted when it was asked last."""

    def __init__(self, source: Reports, labels: Mapping[str, str]) -> None:
        self.source = weakref.ref(source)
        self._labels = labels
        self._has_failed = False
        self.counted: _Values = {}

    def values(self) -> _Values:
        """What the component tells now; of one that is gone, or fails, what it had counted before."""
        source = self.source()
        if source is None:
            return self.counted
        found: _Values = {}
        try:
            for metric, labels, value in values_in(source.statistics(), self._labels):
                found.setdefault((metric, labels), []).append(value)
        except Exception:
            # One that cannot answer must not silence all others, nor hinder its own closing.
            if not self._has_failed:
                logger.exception("the metrics of a %s are left out: a defect", type(source).__name__)
            self._has_failed = True
            return self.counted
        self.counted = {key: values for key, values in found.items() if key[0].kind is not Kind.GAUGE}
        return found


class _Registry:
    """All components of this process. No component is asked under the lock, since it may take one of its own."""

    def __init__(self) -> None:
        self._renew()
        after_fork(self, _Registry._renew)

    def _renew(self) -> None:
        """Begin anew: in a child, what the parent's components count is the parent's to tell."""
        # One thread may come twice: the garbage collector ends a component in any of them.
        self._lock = threading.RLock()
        self._entries: dict[int, _Entry] = {}
        """By the identity of the source."""
        self._past: _Values = {}
        """What components had counted that have ended."""

    def report(self, source: Reports, labels: Mapping[str, str]) -> None:
        with self._lock:
            self._sweep()
            self._entries[id(source)] = _Entry(source, labels)

    def retire(self, source: Reports) -> None:
        entry = self._entries.get(id(source))
        if entry is not None:
            entry.values()
            self._end(id(source), entry)

    def values(self) -> _Values:
        with self._lock:
            self._sweep()
            found = {key: list(values) for key, values in list(self._past.items())}
            entries = list(self._entries.values())
        for entry in entries:
            for what, values in entry.values().items():
                found.setdefault(what, []).extend(values)
        return found

    def _end(self, key: int, entry: _Entry) -> None:
        with self._lock:
            if self._entries.get(key) is entry:
                del self._entries[key]
                for what, values in entry.counted.items():
                    self._past.setdefault(what, []).extend(values)

    def _sweep(self) -> None:
        for key, entry in list(self._entries.items()):
            if entry.source() is None:
                self._end(key, entry)
        for (metric, _), values in list(self._past.items()):
            if (count := len(values)) > PAST_MAX:
                values[:count] = [metric.merge(values[:count])]


_registry: Final = _Registry()

_listening: Final[list[Callable[[], None]]] = []


def when_reported(call: Callable[[], None]) -> None:
    """Call this whenever a component begins to be told of, which may be of a room that was imported just now."""
    _listening.append(call)


def report(source: Reports, *, owner: object | None = None, **labels: str) -> None:
    """Tell of a component from now on.

    Args:
        source: Has `statistics()`, which gives what `reported` declared.
        owner: None (default): the component is told of as long as somebody else holds it, or until `retire`. Else what
            it belongs to: it is told of until that is dropped, and all it has counted goes on being told. The source
            must not hold its owner.
        labels: The values of the labels that its statistics were declared with.
    """
    _registry.report(source, labels)
    if owner is not None:
        # It keeps the source until then, so that all it has counted is told.
        weakref.finalize(owner, retire, source).atexit = False
    for call in _listening:
        call()


def retire(source: Reports) -> None:
    """Tell no more of a component that has ended, but what it has counted. Idempotent."""
    _registry.retire(source)


def collector() -> "Collector":
    """What a registry of `prometheus_client` is given: `prometheus_client.REGISTRY.register(collector())`.

    It tells of all components of this process, those that come later too. It asks no server, so that it always answers.
    """
    from prometheus_client.registry import Collector

    class Told(Collector):
        def collect(self) -> Iterator[Any]:
            by_metric: dict[Metric, dict[tuple[str, ...], Any]] = {}
            for (metric, labels), values in _registry.values().items():
                by_metric.setdefault(metric, {})[labels] = metric.merge(values)
            return (_family(metric, by_metric[metric]) for metric in sorted(by_metric, key=lambda each: each.name))

        def describe(self) -> list[Any]:
            # Nothing is known to collide; registering must not ask.
            return []

    return Told()


def exposition() -> str:
    """All metrics of this process in Prometheus' text format: `text/plain; version=0.0.4; charset=utf-8`."""
    from prometheus_client import generate_latest

    return generate_latest(_own_registry()).decode()


def serve(port: int, host: str = "127.0.0.1") -> Callable[[], None]:
    """Serve the metrics of this process on `http://host:port/metrics`, by a thread that ends with the process.

    Args:
        port: The port.
        host: The address; by default this machine's own programs alone can ask.

    Returns:
        What ends it before.

    Raises:
        ConfigurationError: nothing can be served there.
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
    """A registry of `prometheus_client` with nothing else in it."""
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
