"""What a recorder tells Prometheus."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_BATCH_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)


class RecorderMetrics:
    """The metrics of one process's recorders, in a registry of their own.

    Every metric is labelled with the stream. Times are in seconds.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        labels = ["stream"]
        self.recorded = Gauge(
            "relatum_recorded_offset", "Offset of the last recorded message", labels, registry=self.registry
        )
        self.end = Gauge(
            "relatum_stream_offset", "Offset of the last message in the stream", labels, registry=self.registry
        )
        self.lag_offsets = Gauge(
            "relatum_lag_offsets",
            "Offsets between the stream's end and the last recorded",
            labels,
            registry=self.registry,
        )
        self.lag_s = Gauge(
            "relatum_lag_seconds", "Age of the oldest message not recorded yet", labels, registry=self.registry
        )
        self.messages = Counter("relatum_messages", "Messages recorded", labels, registry=self.registry)
        self.rows = Counter("relatum_rows", "Rows written", labels, registry=self.registry)
        self.skipped = Counter(
            "relatum_skipped_values", "Values not recorded", [*labels, "reason"], registry=self.registry
        )
        self.batch_s = Histogram(
            "relatum_batch_seconds",
            "Time of one transaction",
            labels,
            buckets=_BATCH_BUCKETS_S,
            registry=self.registry,
        )
        self.reconnects = Counter(
            "relatum_reconnects", "Sessions begun again after an error", labels, registry=self.registry
        )
