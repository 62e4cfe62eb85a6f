"""What a recorder tells Prometheus."""

import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from relatum.recording._batch import Batch
from relatum.recording._progress import Progress
from relatum.waiting import Outages, Server

_BATCH_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)

_OF_STREAMS: Final[tuple[tuple[str, str, Callable[[Progress], float | None]], ...]] = (
    ("relatum_recording", "Whether this process records the stream now", lambda each: float(each.is_recording)),
    ("relatum_recorded_offset", "Last recorded offset", lambda each: each.recorded),
    ("relatum_stream_offset", "Offset of the last message in the stream", lambda each: each.end),
    ("relatum_lag_offsets", "Offsets between the stream's end and the last recorded", lambda each: each.lag_offsets),
    (
        "relatum_hole_offsets",
        "Offsets lost to retention before they were recorded, as noticed within a day",
        lambda each: each.hole_offsets,
    ),
    ("relatum_lag_seconds", "Age of the oldest unrecorded message, at most", lambda each: each.lag_s),
)
"""Name, meaning and value of what is told of each stream; None tells nothing of one."""

_OF_SERVERS: Final = (
    ("relatum_broker_up", "Whether the broker answered the last time it was asked", Server.BROKER),
    ("relatum_database_up", "Whether PostgreSQL answered the last time it was asked", Server.DATABASE),
)


class StreamCounters:
    """What is counted of one stream. Each counter is looked up once: it is moved with every batch.

    Args:
        metrics: Where to count.
        stream: The stream.
    """

    def __init__(self, metrics: "RecorderMetrics", stream: str) -> None:
        self._stream = stream
        self._skipped = metrics.skipped
        self._messages = metrics.messages.labels(stream)
        self._rows = metrics.rows.labels(stream)
        self.reconnects = metrics.reconnects.labels(stream)

    def count(self, batch: Batch) -> None:
        """Count what was committed."""
        self._messages.inc(batch.messages)
        self._rows.inc(batch.rows)
        for (_, _, reason), count in batch.skips.items():
            self._skipped.labels(self._stream, reason).inc(count)


class RecorderMetrics:
    """The metrics of one process's recorders, in a registry of their own.

    Those of streams are labelled with the stream, and are there from the moment it is named. Times are in seconds.

    Args:
        outages: Knows what is away.
    """

    def __init__(self, outages: Outages) -> None:
        self.registry = CollectorRegistry()
        self._lock = threading.Lock()
        self._streams: dict[str, Progress] = {}
        registry, stream = self.registry, ["stream"]
        self.messages = Counter("relatum_messages", "Messages recorded", stream, registry=registry)
        self.rows = Counter("relatum_rows", "Rows written", stream, registry=registry)
        self.skipped = Counter("relatum_skipped_values", "Values not recorded", [*stream, "reason"], registry=registry)
        self.batch_s = Histogram(
            "relatum_batch_seconds", "Time of one transaction", buckets=_BATCH_BUCKETS_S, registry=registry
        )
        self.reconnects = Counter("relatum_reconnects", "Sessions begun again after errors", stream, registry=registry)
        registry.register(_Now(self, outages))

    def named(self, names: Iterable[str]) -> None:
        """Tell of names that are to be recorded, whatever they turn out to be."""
        for name in names:
            self._progress(name)

    def stream(self, name: str) -> Progress:
        """What is told of a stream from now on."""
        return self._progress(name)

    def counters(self, name: str) -> StreamCounters:
        """What is counted of a stream from now on."""
        return StreamCounters(self, name)

    def _progress(self, name: str) -> Progress:
        with self._lock:
            return self._streams.setdefault(name, Progress())

    def forget(self, name: str) -> None:
        """Tell nothing more of a name: it is no stream's."""
        with self._lock:
            self._streams.pop(name, None)

    def streams(self) -> list[tuple[str, Progress]]:
        """What is known of each."""
        with self._lock:
            return list(self._streams.items())


class _Now(Collector):
    """Tells what holds at the moment it is asked. It asks nobody, so that it always answers."""

    def __init__(self, metrics: RecorderMetrics, outages: Outages) -> None:
        self._metrics = metrics
        self._outages = outages

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """All gauges."""
        for name, meaning, server in _OF_SERVERS:
            yield GaugeMetricFamily(name, meaning, value=float(self._outages.is_up(server)))
        streams = self._metrics.streams()
        for name, meaning, value_of in _OF_STREAMS:
            family = GaugeMetricFamily(name, meaning, labels=["stream"])
            for stream, progress in streams:
                value = value_of(progress)
                if value is not None:
                    family.add_metric([stream], value)
            yield family
