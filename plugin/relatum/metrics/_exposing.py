"""The metrics as Prometheus reads them. Its client is imported here alone, by whoever asks for them."""

from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from relatum.errors import ConfigurationError
from relatum.metrics._declaring import Kind, Metric
from relatum.metrics._reporting import told

if TYPE_CHECKING:
    from prometheus_client.registry import Collector, CollectorRegistry


def collector() -> "Collector":
    """What a registry of `prometheus_client` is given: `prometheus_client.REGISTRY.register(collector())`.

    It tells of all components of this process, those that come later too. It asks no server, so that it always answers.
    """
    from prometheus_client.registry import Collector

    class Told(Collector):
        def collect(self) -> Iterator[Any]:
            return (_family(metric, values) for metric, values in told())

        def describe(self) -> list[Any]:
            # Nothing is known to collide; registering must not ask.
            return []

    return Told()


def exposition() -> str:
    """All metrics of this process in Prometheus' text format: `text/plain; version=0.0.4; charset=utf-8`."""
    from prometheus_client import generate_latest

    return generate_latest(_registry()).decode()


def _registry() -> "CollectorRegistry":
    """A registry of `prometheus_client` with nothing else in it."""
    from prometheus_client import CollectorRegistry

    made = CollectorRegistry()
    made.register(collector())
    return made


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
        server, thread = start_http_server(port, addr=host, registry=_registry())
    except OSError as error:
        raise ConfigurationError(f"no metrics can be served on {host}:{port}: {error.strerror}") from error

    def end() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return end


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
