"""Recorders of single streams in one process: they start and stop together, and share what costs others something."""

import logging
import threading
import time
from typing import TYPE_CHECKING, Final

import sqlalchemy as sa

from relatum import metrics
from relatum.errors import NotFound, RelatumError
from relatum.reading import BrokerAddress, StreamReader
from relatum.recording._committer import Committer
from relatum.recording._gaps import GapCloser
from relatum.recording._housekeeping import Housekeeping
from relatum.recording._metrics import RecorderMetrics
from relatum.recording._readers import SharedReader
from relatum.recording._statistics import RecorderStatistics
from relatum.recording._tail import Shared, TailRecorder
from relatum.recording._writer import RecordedListener
from relatum.store import LEASE_S, component_engine, database_name
from relatum.waiting import Deadline, Outages, ended

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

logger = logging.getLogger("relatum.recorder")

STOP_S: Final = 30.0
"""How long a stop waits for the batches under way."""

DATABASE_S: Final = 3.0
"""How long they have for it at the database: one that does not answer is let go then, and nobody waits for it."""

DRAIN_LOOK_S: Final = 0.002
"""How often a drain looks; a batch is recorded in about that time."""


class RecorderGroup:
    """Recorders of single streams, each followed in a thread of its own.

    However many there are: one thread renews all leases, one commits, and one reader is shared,
    with one connection to the broker for each stream that is followed.

    Args:
        address: The broker.
        engine: The database.
        on_recorded: Called after each commit that holds receipts.
        holder: Who takes the leases; by default a name made of host and process.
        lease_s: How long a lease holds without renewal.
    """

    def __init__(
        self,
        address: BrokerAddress,
        engine: sa.Engine,
        *,
        on_recorded: RecordedListener | None = None,
        holder: str | None = None,
        lease_s: float = LEASE_S,
    ) -> None:
        self._address = address
        self._stop = threading.Event()
        self._ending = Deadline(None)
        engine = component_engine(engine, self._ending)
        names = {"broker": str(address), "database": database_name(engine)}
        self.outages = Outages(logger, stop=self._stop, **names)
        self.metrics = RecorderMetrics(self.outages)
        self.reader = SharedReader(address)
        self._keeper = Housekeeping(engine, address.vhost, holder, lease_s, self.outages)
        self._committer = Committer(engine, self.metrics)
        self._gaps = GapCloser(engine, self.reader, self._keeper, self.outages, self._stop)
        shared = (self.reader, self._keeper, self._committer, self.outages, self.metrics, on_recorded)
        self._shared = Shared(engine, *shared)
        self._running: dict[str, tuple[TailRecorder, threading.Thread]] = {}
        metrics.report(self)

    @property
    def registry(self) -> "CollectorRegistry":
        """What Prometheus scrapes of this one."""
        return metrics.registry(self)

    def statistics(self) -> RecorderStatistics:
        """What was recorded, and how far behind each stream is."""
        return self.metrics.statistics()

    def add(self, stream: str, super_stream: str | None = None) -> None:
        """Record a stream from now on; nothing happens where it is recorded already."""
        if stream in self._running or self._stop.is_set():
            return
        if not self._running:
            self._keeper.start()
            self._gaps.start()
        recorder = TailRecorder(self._shared, stream, super_stream)
        thread = threading.Thread(target=recorder.run, args=[self._stop], name=f"relatum-{stream}", daemon=True)
        self._running[stream] = recorder, thread
        self._shared.streams = len(self._running)
        thread.start()

    def drain(self, until: float) -> None:
        """Wait until what is in the streams now is recorded, as far as these recorders are about to record it.

        Args:
            until: When to give up, by the monotonic clock.
        """
        recorders = {stream: recorder for stream, (recorder, _) in self._running.items()}
        try:
            # A reader of its own, which gives up in time.
            with StreamReader.open(self._address, timeout_s=max(0.1, until - time.monotonic())) as reader:
                ends = {stream: _end_of(reader, stream) for stream in recorders}
        except RelatumError as error:
            logger.info("not drained: %s", ended(error))
            return
        while time.monotonic() < until and any(
            end >= 0 and recorders[stream].lacks(end) for stream, end in ends.items()
        ):
            time.sleep(DRAIN_LOOK_S)

    def left(self) -> dict[str, int | None]:
        """How many messages of which streams are not recorded; None where that is not known yet. Asks nobody."""
        counts = {stream: recorder.left for stream, (recorder, _) in list(self._running.items())}
        return {stream: count for stream, count in counts.items() if count != 0}

    def end(self) -> None:
        """Tell all threads to finish the batches under way and end; none is waited for."""
        self._stop.set()
        self._ending.end_in(DATABASE_S)
        self._keeper.leave()
        self.outages.wake()

    def stop(self, timeout_s: float = STOP_S) -> None:
        """Finish the batches under way, give the leases back and end all threads, in so many seconds at most."""
        until = time.monotonic() + timeout_s
        self.end()
        for _, thread in list(self._running.values()):
            thread.join(max(0.0, until - time.monotonic()))
        self._committer.stop(max(0.0, until - time.monotonic()))
        if self._running:
            self._gaps.join(max(0.0, until - time.monotonic()))
            self._keeper.stop()
        self.reader.close()
        metrics.retire(self)


def _end_of(reader: StreamReader, stream: str) -> int:
    """The offset of a stream's last message; -1 where there is none."""
    try:
        last = reader.bounds(stream).last
    except NotFound:
        return -1
    return -1 if last is None else last
