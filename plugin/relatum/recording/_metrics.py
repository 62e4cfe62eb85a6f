"""What a process's recorders tell of their streams."""

import threading
from collections.abc import Iterable

from relatum.metrics import Histogram
from relatum.recording._progress import Progress
from relatum.recording._statistics import RecorderStatistics
from relatum.waiting import Outages, Server


class RecorderMetrics:
    """The progress of one recorder with each of its streams, which is told from the moment the stream is named."""

    def __init__(self, outages: Outages) -> None:
        self._outages = outages
        self._lock = threading.Lock()
        self._streams: dict[str, Progress] = {}
        self.batch_s = Histogram()

    def named(self, names: Iterable[str]) -> None:
        """Tell of names that are to be recorded, whatever they turn out to be."""
        for name in names:
            self.stream(name)

    def stream(self, name: str) -> Progress:
        """What is told of a stream from now on."""
        with self._lock:
            return self._streams.setdefault(name, Progress())

    def forget(self, name: str) -> None:
        """Tell nothing more of a name: it is no stream's."""
        with self._lock:
            self._streams.pop(name, None)

    def statistics(self) -> RecorderStatistics:
        """What is known of all. It asks nobody, so that it always answers."""
        with self._lock:
            streams = list(self._streams.items())
        return RecorderStatistics(
            streams={name: progress.statistics() for name, progress in streams},
            batch_s=self.batch_s.observed(),
            is_broker_up=self._outages.is_up(Server.BROKER),
            is_database_up=self._outages.is_up(Server.DATABASE),
        )
