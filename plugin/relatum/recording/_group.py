"""The recorder of any number of streams in one process: what owns its loop, and what is called from other threads."""

import asyncio
import logging
import threading
import time
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from functools import partial
from typing import Final

from relatum import metrics
from relatum.errors import AccessRefused, NotFound, RelatumError
from relatum.following import StreamFollower
from relatum.processes import new_holder
from relatum.reading import BrokerAddress, StreamReader
from relatum.recording._committer import Committer, RecordedListener
from relatum.recording._membership import Membership
from relatum.recording._statistics import RecorderMetrics, RecorderStatistics
from relatum.recording._stream_recording import StreamRecording
from relatum.recording._streams import Streams
from relatum.recording._upkeep import Upkeep
from relatum.store.catalog import streams_named
from relatum.store.database import IDLE_S, Database
from relatum.store.members import LEASE_S, RECORDERS, Member
from relatum.store.translation import translated_errors
from relatum.waiting import ComponentLoop, Deadline, Duty, Outages, ended

logger = logging.getLogger("relatum.recorder")

STOP_S: Final = 30.0
"""How long a stop waits for the batches under way."""

DATABASE_S: Final = 3.0
"""How long they have for it at the database: one that does not answer is let go then, and nobody waits for it."""

GATHER_S: Final = 0.1
"""Seconds for which what comes of many streams is gathered; a fraction of the lag of 250 ms that is aimed at."""

GATHER_RECEIPTS_S: Final = 0.01
"""The same where publishers wait for receipts."""

DRAIN_LOOK_S: Final = 0.002
"""How often a drain looks; a batch is recorded in about that time."""

HELPERS_MAX: Final = 4
"""Questions at once: what looks after gaps and after parts may take long, and keeps nobody from opening streams."""


class RecorderGroup:
    """Records streams, with so many threads and connections, whatever their number. See docs/adr/0015 and 0052.

    `lease_database`: The lease's own connection, which nothing else can use up; None where it has none.
    """

    def __init__(
        self,
        address: BrokerAddress,
        database: Database,
        *,
        lease_database: Database | None = None,
        name: str | None = None,
        on_recorded: RecordedListener | None = None,
        holder: str | None = None,
        lease_s: float = LEASE_S,
    ) -> None:
        self._address = address
        self._stop = threading.Event()
        self._ending = Deadline(None)
        self._engine = Database(database, refusing=None, ending=self._ending, idle_s=IDLE_S).engine
        # A member that is frozen must not keep what it has locked for longer than what it has leased.
        held = partial(Database, refusing=None, ending=self._ending, idle_s=lease_s)
        commit_engine, lease_engine = held(database).engine, held(lease_database or database).engine
        self.outages = Outages(logger, stop=self._stop, broker=str(address), database=database.address.name)
        self.metrics = RecorderMetrics(self.outages)
        self._loop = ComponentLoop("relatum-recorder", logger, helpers_max=HELPERS_MAX, ending=self._ending)
        self.follower = StreamFollower(
            self._loop,
            address,
            lambda event: self._committer.told(event),
            gather_s=GATHER_S if on_recorded is None else GATHER_RECEIPTS_S,
            outages=self.outages,
            who="reading of stream {!r}".format,
        )
        member = Member(RECORDERS, name or new_holder(), lease_s=lease_s, holder=holder)
        self._membership = Membership(
            self._loop, lease_engine, member, self.follower, self.outages, lambda: self._streams.all()[0].name
        )
        self._streams = Streams(self._loop, self._engine, address.vhost, self.follower, self.outages, self._membership)
        self._committer = Committer(
            self._streams, commit_engine, self.metrics, on_recorded, self._membership.in_time, self._stop
        )
        self._upkeep = Upkeep(self._streams, self._engine, self._stop)
        self._duties: list[Duty] = []
        self._finishing: Future[None] | None = None
        self._has_begun = False
        metrics.report(self)

    def statistics(self) -> RecorderStatistics:
        """What was recorded, and how far behind each stream is."""
        return self.metrics.statistics()

    def reader(self) -> StreamReader:
        """The reader for questions, the follower's."""
        return self.follower.reader()

    def add(self, stream: str, super_stream: str | None = None) -> None:
        """Record a stream from now on; nothing happens where it is recorded already. For one thread."""
        if stream in self._streams or self._stop.is_set():
            return
        # Here and not in the loop: whoever asks what is left next is told of it.
        self._streams.add(StreamRecording(stream, super_stream, self.metrics.stream(stream)))
        if not self._has_begun:
            self._has_begun = True
            self._loop.start()
            self._loop.call(self._begin)
        self._loop.call(self._streams.seek)

    def _begin(self) -> None:
        if not self._stop.is_set():
            self._duties = [*self._streams.begin(), *self._upkeep.begin()]

    def check_broker(self) -> None:
        """See that there is something to record."""
        names = [stream.name for stream in self._streams.all()]
        with translated_errors(), self._engine.begin() as connection:
            rows = streams_named(connection, self._address.vhost, names, partitions=False)
        others = self._streams.whose(rows)
        if others and len(others) == len(names):
            raise next(iter(others.values()))

    def drop(self, name: str) -> None:
        """Take back a name that was taken for a stream's to come."""
        self._loop.call(self._streams.drop, name)
        self.metrics.streams.pop(name, None)

    # --- the end --------------------------------------------------------------------------------------------------

    def drain(self, until: float) -> None:
        """Wait until what is in the streams now is recorded, as far as this process is about to record it."""
        streams = {stream.name: stream for stream in self._streams.all()}
        try:
            # A reader of its own, which gives up in time.
            with StreamReader.open(self._address, timeout_s=max(0.1, until - time.monotonic())) as reader:
                ends = {name: _end_of(reader, name) for name in streams}
        except RelatumError as error:
            logger.info("not drained: %s", ended(error))
            return
        for name, end in ends.items():
            streams[name].progress.show(end)
        while time.monotonic() < until and any(end >= 0 and streams[name].lacks(end) for name, end in ends.items()):
            time.sleep(DRAIN_LOOK_S)

    def left(self) -> dict[str, int | None]:
        """How many messages of which streams are not recorded; None where that is not known yet. Asks nobody."""
        counts = {stream.name: stream.left for stream in self._streams.all()}
        return {name: count for name, count in counts.items() if count != 0}

    def end(self) -> None:
        """Begin nothing more; nobody waits for it."""
        self._stop.set()
        self._ending.end_in(DATABASE_S)
        self.outages.wake()
        self._loop.call(self._cancel)

    def _cancel(self) -> None:
        self._membership.duty = None
        for duty in self._duties:
            duty.cancel()

    def stop(self, timeout_s: float = STOP_S) -> None:
        """Finish the batches under way, let others have the streams and end all threads, in so many seconds at most."""
        until = time.monotonic() + timeout_s
        self._ending.end_in(timeout_s)
        self.end()
        if self._finishing is None:
            self._finishing = self._loop.run(self._finish)
        if self._finishing is None:
            # Nothing was to be recorded.
            self.follower.end()
            self.follower.close_reader()
        else:
            # Also where another thread stops it as well.
            with suppress(TimeoutError, CancelledError):
                self._finishing.result(max(0.0, until - time.monotonic()))
        self._loop.stop(max(0.0, until - time.monotonic()))
        metrics.retire(self)

    async def _finish(self) -> None:
        closing = self._loop.spawn(self.follower.close())
        await self._committer.finish()
        await self._membership.leave()
        await asyncio.wait([closing], timeout=max(0.0, self._ending.left_s()))


def _end_of(reader: StreamReader, stream: str) -> int:
    """The offset of a stream's last message; -1 where there is none, or none that may be read."""
    try:
        last = reader.bounds(stream).last
    except (NotFound, AccessRefused):
        return -1
    return -1 if last is None else last
