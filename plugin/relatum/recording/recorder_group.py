"""The recorder of any number of streams in one process. It owns the loop; other threads call it."""

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from functools import partial
from typing import Final

from relatum import metrics
from relatum.errors import AccessRefused, NotFound, RelatumError
from relatum.following import StreamFollower
from relatum.processes import new_holder
from relatum.reading import BrokerAddress, StreamReader
from relatum.recording.committer import Committer
from relatum.recording.recorder_membership import Membership
from relatum.recording.statistics import RecorderMetrics
from relatum.recording.stream_recording import StreamRecording
from relatum.recording.streams import Streams
from relatum.recording.upkeep import Upkeep
from relatum.store.database import IDLE_S, AnyDatabase, Database
from relatum.store.members import LEASE_S, RECORDERS, Member
from relatum.waiting import ComponentLoop, Deadline, Duty, Outages, ended

logger = logging.getLogger("relatum.recorder")

STOP_S: Final = 30.0
"""How long a stop waits for batches under way, in seconds."""

DATABASE_S: Final = 3.0
"""How long these batches may wait for the database during a stop, in seconds."""

GATHER_S: Final = 0.1
"""Seconds for which records of many streams are gathered: a fraction of our target lag of 250 ms."""

DRAIN_LOOK_S: Final = 0.002
"""Seconds between two checks of a drain; a batch takes about as long."""

HELPERS_MAX: Final = 4
"""Parallel blocking calls: closing gaps and maintaining parts may take long, and must not delay opening streams."""


RESERVED_FROM: Final = 3
"""From so many connections on, one is reserved for the lease: a locked table must not delay its renewal."""


class RecorderGroup:
    """Records streams with a fixed number of threads and connections. See docs/adr/0015 and 0052."""

    def __init__(
        self,
        address: BrokerAddress,
        database: AnyDatabase,
        *,
        connections_max: int,
        name: str | None = None,
        gather_s: float = GATHER_S,
        on_receipts: Callable[[], None] = lambda: None,
        holder: str | None = None,
        lease_s: float = LEASE_S,
    ) -> None:
        self._address = address
        self._stop = threading.Event()
        self._ending = Deadline(None)
        has_own = connections_max >= RESERVED_FROM and not isinstance(database, Database)
        most = connections_max - has_own
        self.database = Database(database, refusing=None, connections_max=most)
        self._of_lease = Database(database, refusing=None, connections_max=1) if has_own else self.database
        self._engine = Database(self.database, refusing=None, ending=self._ending, idle_s=IDLE_S).engine
        # A frozen member must not hold locks for longer than its lease.
        held = partial(Database, refusing=None, ending=self._ending, idle_s=lease_s)
        commit_engine, lease_engine = held(self.database).engine, held(self._of_lease).engine
        self.outages = Outages(logger, stop=self._stop, broker=str(address), database=self.database.address.name)
        self.metrics = RecorderMetrics(self.outages)
        self._loop = ComponentLoop("relatum-recorder", logger, helpers_max=HELPERS_MAX, ending=self._ending)
        self.follower = StreamFollower(
            self._loop,
            address,
            lambda event: self._committer.take(event),
            gather_s=gather_s,
            outages=self.outages,
            who="reading of stream {!r}".format,
        )
        member = Member(RECORDERS, name or new_holder(), lease_s=lease_s, holder=holder)
        self._membership = Membership(
            self._loop, lease_engine, member, self.follower, self.outages, lambda: self._streams.all()[0].name
        )
        self._streams = Streams(self._loop, self._engine, address.vhost, self.follower, self.outages, self._membership)
        self._committer = Committer(
            self._streams, commit_engine, self.metrics, self._membership.in_time, on_receipts, self._stop
        )
        self._upkeep = Upkeep(self._streams, self._engine, self._stop)
        self._duties: list[Duty] = []
        self._finishing: Future[None] | None = None
        self._has_begun = False
        metrics.report(self.metrics)

    def reader(self) -> StreamReader:
        """Return the follower's reader, for queries."""
        return self.follower.reader()

    def add(self, stream: str, super_stream: str | None = None) -> None:
        """Record a stream from now on. Idempotent; not thread-safe."""
        if stream in self._streams or self._stop.is_set():
            return
        # Here and not in the loop: `left` must include it at once.
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
        """Raise if all streams were recorded from another broker."""
        self._streams.broker.check([stream.name for stream in self._streams.all()])

    def drop(self, name: str) -> None:
        """Forget a name that turned out not to be a stream."""
        self._loop.call(self._streams.drop, name)
        self.metrics.streams.pop(name, None)

    # --- the end --------------------------------------------------------------------------------------------------

    def drain(self, until: float) -> None:
        """Wait until the streams that this process records are recorded up to their present ends."""
        streams = {stream.name: stream for stream in self._streams.all()}
        if not streams:
            return
        try:
            # A separate reader, with a time limit.
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
        """Return the numbers of messages that are not recorded, by stream; None if unknown. Asks no server."""
        counts = {stream.name: stream.left for stream in self._streams.all()}
        return {name: count for name, count in counts.items() if count != 0}

    def end(self) -> None:
        """Start no more work. Returns at once."""
        self._stop.set()
        self._ending.end_in(DATABASE_S)
        self.outages.wake()
        self._loop.call(self._cancel)

    def _cancel(self) -> None:
        self._membership.duty = None
        for duty in self._duties:
            duty.cancel()

    def stop(self, timeout_s: float = STOP_S) -> None:
        """Finish batches under way, release the streams and end all threads, within `timeout_s`."""
        until = time.monotonic() + timeout_s
        self._ending.end_in(timeout_s)
        self.end()
        if self._finishing is None:
            self._finishing = self._loop.run(self._finish)
        if self._finishing is None:
            # Nothing was ever recorded.
            self.follower.end()
            self.follower.close_reader()
        else:
            # Another thread may be stopping it, too.
            with suppress(TimeoutError, CancelledError):
                self._finishing.result(max(0.0, until - time.monotonic()))
        self._loop.stop(max(0.0, until - time.monotonic()))
        self.database.close()
        self._of_lease.close()
        metrics.retire(self.metrics)

    async def _finish(self) -> None:
        closing = self._loop.spawn(self.follower.close())
        await self._committer.finish()
        await self._membership.leave()
        await asyncio.wait([closing], timeout=max(0.0, self._ending.left_s()))


def _end_of(reader: StreamReader, stream: str) -> int:
    """Return the offset of a stream's last message; -1 if there is none, or it cannot be read."""
    try:
        last = reader.bounds(stream).last
    except (NotFound, AccessRefused):
        return -1
    return -1 if last is None else last
