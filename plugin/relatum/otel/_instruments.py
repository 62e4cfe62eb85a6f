"""The metrics as OpenTelemetry reads them: an observable instrument for each series, asked when somebody collects."""

import threading
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from relatum.errors import ConfigurationError
from relatum.metrics import Kind, Metric, collector, declared, when_reported
from relatum.otel._spans import Part, configure, harmless
from relatum.processes import after_fork

if TYPE_CHECKING:
    from opentelemetry.metrics import CallbackOptions, MeterProvider, Observation

_UNITS: Final = {"seconds": "s", "bytes": "By", "": ""}
"""Units in UCUM, as OpenTelemetry writes them. A plain number has none: of "1", Prometheus would make a ratio."""


class _Instruments:
    """The instruments of one meter. All are asked one after the other: who is asked first asks all components."""

    def __init__(self, provider: "MeterProvider") -> None:
        self._meter = provider.get_meter("relatum")
        self._made: set[str] = set()
        self._renew()
        after_fork(self, _Instruments._renew)

    def _renew(self) -> None:
        self._making = threading.Lock()
        self._lock = threading.Lock()
        self._left: dict[str, list[Observation]] = {}

    def make(self) -> None:
        """Make the instruments of all metrics that are declared by now."""
        with self._making:
            for metric in declared():
                if metric.name not in self._made:
                    self._made.add(metric.name)
                    self._make(metric)

    @harmless("some metrics are left out")
    def make_later(self) -> None:
        """The same, where something is reported that may be new.

        In a thread of its own: the caller may hold the lock that `statistics()` takes, and a collection calls that
        under the lock that a new instrument waits for.
        """
        if any(metric.name not in self._made for metric in declared()):
            make = harmless("some metrics are left out")(self.make)
            threading.Thread(target=make, name="relatum-instruments", daemon=True).start()

    def _make(self, metric: Metric) -> None:
        meter = self._meter
        is_gauge = metric.kind is Kind.GAUGE
        make: Callable[..., Any] = meter.create_observable_gauge if is_gauge else meter.create_observable_counter
        for name in metric.series:
            unit = "" if name.endswith(("_bucket", "_count")) else _UNITS[metric.unit]
            make(name, [partial(self._observe, name)], unit, metric.meaning)

    def _observe(self, name: str, options: "CallbackOptions") -> "Iterable[Observation]":
        with self._lock:
            if name not in self._left:
                # One that was taken already, or is new: somebody collects anew.
                self._left = _observations()
            return self._left.pop(name, ())


def _observations() -> "dict[str, list[Observation]]":
    """What all instruments observe now, by their names: a histogram is observed as the series that Prometheus has."""
    from opentelemetry.metrics import Observation

    found: dict[str, list[Observation]] = {name: [] for metric in declared() for name in metric.series}
    for family in collector().collect():
        for sample in family.samples:
            found.setdefault(sample.name, []).append(Observation(sample.value, sample.labels))
    return found


_told_to: "Final[dict[MeterProvider | None, _Instruments]]" = {}
"""By what `report_metrics` was given."""


def report_metrics(meter_provider: "MeterProvider | None" = None) -> None:
    """Have OpenTelemetry collect all metrics of this process: those in docs/metrics.md, by the same names.

    Components and rooms that come later are collected, too. A second call changes nothing.

    Args:
        meter_provider: Who collects. None (default): the application's, also where it is set later.

    Raises:
        ConfigurationError: the OpenTelemetry API is not installed: `pip install 'relatum[otel]'`.
    """
    try:
        from opentelemetry.metrics import get_meter_provider
    except ImportError as error:
        raise ConfigurationError("there is no OpenTelemetry API: pip install 'relatum[otel]'") from error
    if meter_provider not in _told_to:
        made = _told_to[meter_provider] = _Instruments(meter_provider or get_meter_provider())
        when_reported(made.make_later)
        made.make()


class Instrumentor:
    """What `opentelemetry-instrument` finds as `relatum`: it has metrics reported. Spans are there without it."""

    def instrument(self, **_: Any) -> None:
        """Report metrics to the provider that was set."""
        report_metrics()

    def uninstrument(self, **_: Any) -> None:
        """Make no spans any more. Metrics stay: OpenTelemetry lets no instrument go."""
        configure(without=Part)
