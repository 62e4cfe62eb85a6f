"""What a recorder tells Prometheus."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_BATCH_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)


class RecorderMetrics:
    """The metrics of one process's recorders, in a registry of their own.

    Every metric is labelled with the stream. Times are in seconds.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        stream = ["stream"]
        registry = self.registry
        self.recorded = Gauge("relatum_recorded_offset", "Last recorded offset", stream, registry=registry)
        self.end = Gauge("relatum_stream_offset", "Offset of the last message in the stream", stream, registry=registry)
        self.lag_offsets = Gauge(
            "relatum_lag_offsets", "Offsets between the stream's end and the last recorded", stream, registry=registry
        )
        self.lag_s = Gauge("relatum_lag_seconds", "Age of the oldest unrecorded message", stream, registry=registry)
        self.messages = Counter("relatum_messages", "Messages recorded", stream, registry=registry)
        self.rows = Counter("relatum_rows", "Rows written", stream, registry=registry)
        self.skipped = Counter("relatum_skipped_values", "Values not recorded", [*stream, "reason"], registry=registry)
        self.batch_s = Histogram(
            "relatum_batch_seconds", "Time of one transaction", stream, buckets=_BATCH_BUCKETS_S, registry=registry
        )
        self.reconnects = Counter("relatum_reconnects", "Sessions begun again after errors", stream, registry=registry)

    def show_end(self, stream: str, end: int, recorded: int) -> None:
        """Say how far the stream and the recording of it go: offsets of the last messages."""
        self.end.labels(stream).set(end)
        self.lag_offsets.labels(stream).set(max(0, end - recorded))
        if end <= recorded:
            self.lag_s.labels(stream).set(0.0)
