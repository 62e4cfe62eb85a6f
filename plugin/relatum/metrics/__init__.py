"""What Relatum tells Prometheus: one registry of what all components of this process count.

Each component has `statistics()`, a frozen dataclass: what it has counted, and what holds now. Its fields name the
metrics they are, so there is nothing else to declare, and nothing is counted twice. Whoever wants the metrics asks all
components at that moment; until then counting is an addition to a number.

    relatum.metrics.serve(9400)                              http://127.0.0.1:9400/metrics
    relatum.metrics.exposition()                             the page, for a server of the application's own
    prometheus_client.REGISTRY.register(collector())         beside the application's own metrics

The other names are for the rooms that declare and report metrics. docs/metrics.md has the list of all metrics.
"""

from relatum.metrics._declaring import (
    Counter,
    Distribution,
    Each,
    Gauge,
    Greatest,
    Kind,
    Least,
    Metric,
    declared,
    reported,
)
from relatum.metrics._histogram import Histogram, Observed
from relatum.metrics._reporting import collector, exposition, report, retire, serve, when_reported

__all__ = [
    "Counter",
    "Distribution",
    "Each",
    "Gauge",
    "Greatest",
    "Histogram",
    "Kind",
    "Least",
    "Metric",
    "Observed",
    "collector",
    "declared",
    "exposition",
    "report",
    "reported",
    "retire",
    "serve",
    "when_reported",
]
