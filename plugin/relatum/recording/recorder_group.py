"""Records any number of streams in one process, with one event loop. Other threads call it."""

import asyncio
import logging
import math
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from functools import partial
from typing import Final, Generic, TypeVar

from relatum import metrics
from relatum.common.processes import new_holder
from relatum.common.waiting import ComponentLoop, Deadline, Outages, RepeatedTask, Server, ended, within
from relatum.errors import CoverageConflict, RelatumError
from relatum.reading import BrokerAddress, StreamBounds, bounds_or_error
from relatum.reading.following import Attached, CaughtUp, Failed, Hole, Replaced, StreamFollower
from relatum.recording.commit import Committer
from relatum.recording.own_broker import OwnBroker
from relatum.recording.statistics import Progress, RecorderStatistics
from relatum.recording.stream_recording import OpenTail, StreamRecording
from relatum.recording.tails import Opened, open_streams
from relatum.recording.upkeep import Membership, Upkeep
from relatum.store.catalog import StreamRow
from relatum.store.database import IDLE_S, AnyDatabase, Database
from relatum.store.members import LEASE_S, RECORDERS, Member

logger = logging.getLogger("relatum.recorder")

STOP_S: Final = 30.0
"""Maximum seconds that a stop waits for the commit of messages that were read."""

DATABASE_S: Final = 3.0
"""Maximum seconds that these commits wait for the database during a stop."""

GATHER_S: Final = 0.1
"""Seconds for which records of many streams are gathered: a fraction of the target lag, 250 ms."""

DRAIN_CHECK_S: Final = 0.002
"""Seconds between two checks of a drain; a batch takes about as long."""

HELPERS_MAX: Final = 5
"""Maximum parallel blocking calls. Closing gaps and maintaining parts take long, but must not delay opening streams."""

LEASE_CONNECTION_FROM: Final = 3
"""With this many connections or more, one is reserved for the lease: a locked table must not delay its renewal."""

_Answer = TypeVar("_Answer")


class SharedQuery(Generic[_Answer]):
    """One query for all streams that wait for its answer, retried until the servers answer. For the loop's thread.

    So 1,000 streams do not query a server 1,000 times when it is available again. `call` runs in a thread; it returns
    an answer or an error for each stream.
    """

    def __init__(
        self,
        group: "RecorderGroup",
        call: Callable[[Sequence[StreamRecording]], Mapping[StreamRecording, _Answer | RelatumError]],
        what: str,
    ) -> None:
        self._group = group
        self._call = call
        self._what = what
        self._waiting: dict[StreamRecording, asyncio.Future[_Answer]] = {}
        self._duty: RepeatedTask | None = None

    async def answer(self, stream: StreamRecording) -> _Answer:
        """Query for a stream, and wait for its answer."""
        answer: asyncio.Future[_Answer] = asyncio.get_running_loop().create_future()
        self._waiting[stream] = answer
        if self._duty is None:
            self._duty = self._group.repeat(self._query, self._what)
        self._duty.wake()
        return await answer

    async def _query(self) -> float:
        waiting, self._waiting = self._waiting, {}
        try:
            answers = await self._group.loop.ask(self._call, list(waiting)) if waiting else {}
        except Exception:
            self._waiting = waiting | self._waiting
            for stream in waiting:
                stream.is_refused = True
            raise
        for stream, answer in answers.items():
            if isinstance(answer, RelatumError):
                waiting[stream].set_exception(answer)
            else:
                waiting[stream].set_result(answer)
        return math.inf


class RecorderGroup:
    """Records streams with a fixed number of threads and connections. See docs/adr/0015 and 0052.

    Its attributes are for the objects that it creates. `find` looks up the rows of streams, and `open` opens their
    tails, in a few statements for all streams that wait.
    """

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
        self.stopping = threading.Event()
        self._ending = Deadline(None)
        is_reserved = connections_max >= LEASE_CONNECTION_FROM and not isinstance(database, Database)
        shared_connections = connections_max - is_reserved
        self.database = Database(database, refusing=None, connections_max=shared_connections)
        self._lease_database = Database(database, refusing=None, connections_max=1) if is_reserved else self.database
        self.engine = Database(self.database, refusing=None, ending=self._ending, idle_s=IDLE_S).engine
        # A suspended member must not hold locks for longer than its lease.
        held = partial(Database, refusing=None, ending=self._ending, idle_s=lease_s)
        commit_engine, lease_engine = held(self.database).engine, held(self._lease_database).engine
        self.outages = Outages(logger, stop=self.stopping, broker=str(address), database=self.database.address.name)
        self.progress: dict[str, Progress] = {}
        """The progress of each stream in the statistics, including those that cannot be recorded yet."""
        self.batch_s = metrics.Histogram()
        self.loop = ComponentLoop("relatum-recorder", logger, helpers_max=HELPERS_MAX, ending=self._ending)
        self.follower = StreamFollower(
            self.loop,
            address,
            lambda event: self._committer.on_event(event),
            gather_s=gather_s,
            outages=self.outages,
            who="reading of stream {!r}".format,
        )
        self.broker = OwnBroker(self.engine, address.vhost, self.follower.reader)
        self.find: SharedQuery[StreamRow | None] = SharedQuery(self, self.broker.find, "looking up streams")
        self.open: SharedQuery[Opened] = SharedQuery(self, self._open, "opening streams")
        member = Member(RECORDERS, name or new_holder(), lease_s=lease_s, holder=holder)
        self.membership = Membership(self, lease_engine, member)
        self._committer = Committer(self, commit_engine, on_receipts)
        self._upkeep = Upkeep(self)
        self._by_name: dict[str, StreamRecording] = {}
        self._duties: list[RepeatedTask] = []
        self._finishing: Future[None] | None = None
        self._has_begun = False
        metrics.report(self)

    # --- from any thread ----------------------------------------------------------------------------------------------

    def progress_of(self, stream: str) -> Progress:
        """Return the progress of a stream, which is in the statistics from now on."""
        return self.progress.setdefault(stream, Progress())

    def statistics(self) -> RecorderStatistics:
        """Return the numbers of recorded messages and the lag of each stream. Queries no server."""
        return RecorderStatistics(
            streams={name: progress.statistics() for name, progress in list(self.progress.items())},
            batch_s=self.batch_s.observed(),
            is_broker_up=self._is_up(Server.BROKER),
            is_database_up=self._is_up(Server.DATABASE),
        )

    def _is_up(self, server: Server) -> bool | None:
        # Without streams, no server may have been queried yet: an idle publisher is not an outage.
        is_up = self.outages.is_up(server)
        return bool(is_up) if self.progress else is_up

    def streams(self) -> list[StreamRecording]:
        """Return all streams in the order in which they were added."""
        return list(self._by_name.values())

    def add(self, stream: str, super_stream: str | None = None) -> None:
        """Record a stream from now on. Idempotent; not thread-safe."""
        if stream in self._by_name or self.stopping.is_set():
            return
        # Not in the loop's thread: `left` must include the stream immediately.
        added = self._by_name[stream] = StreamRecording(stream, super_stream, self.progress_of(stream), self)
        if not self._has_begun:
            self._has_begun = True
            self.loop.start()
            self.loop.call(self.membership.begin)
            self.loop.call(self._upkeep.begin)
        self.loop.call(lambda: self.loop.spawn(added.run()))

    # --- in the loop --------------------------------------------------------------------------------------------------

    def repeat(self, call: Callable[[], Awaitable[float]], what: str) -> RepeatedTask:
        """Repeat a call until the end; see `ComponentLoop.repeat`."""
        duty = self.loop.repeat(call, what, self.outages)
        self._duties.append(duty)
        if self.stopping.is_set():
            duty.cancel()
        return duty

    def stream_of(self, stream: str, following: int) -> StreamRecording | None:
        """Return the stream of a follower's event; None if the stream has been left or followed anew since."""
        found = self._by_name.get(stream)
        return found if found is not None and found.following == following else None

    def open_tails(self) -> list[OpenTail]:
        """Return the tails that are recorded now."""
        return [stream.tail for stream in self.streams() if stream.tail is not None and stream.is_read]

    def on_event(self, event: Attached | CaughtUp | Hole | Replaced | Failed) -> None:
        """Handle an event of the follower that holds no records."""
        if event.stream is None:
            # The broker is unavailable: a drain must not wait for these streams.
            for each in self.streams():
                each.is_refused = each.is_refused or each.tail is None
                each.progress.stop()
        elif (stream := self.stream_of(event.stream, event.following)) is not None:
            stream.on_event(event)

    # --- in a thread --------------------------------------------------------------------------------------------------

    def _open(self, streams: Sequence[StreamRecording]) -> Mapping[StreamRecording, Opened | RelatumError]:
        opened = open_streams(self.engine, [each.row for each in streams if each.row is not None])
        self.outages.answered(Server.DATABASE)
        by_name: dict[str, Opened] = {each.stream.name: each for each in opened}
        lost = CoverageConflict("another recorder opened the stream, or it was replaced or forgotten", stream="")
        return {each: by_name.get(each.name, lost) for each in streams}

    # --- the end --------------------------------------------------------------------------------------------------

    def drain(self, until: float) -> None:
        """Wait until the streams that this process records are recorded up to their current ends."""
        try:
            with within(max(0.1, until - time.monotonic())):
                found = {stream: bounds_or_error(self.follower.reader, stream.name) for stream in self.streams()}
        except RelatumError as error:
            logger.info("not drained: %s", ended(error))
            return
        ends = {stream: bounds.last for stream, bounds in found.items() if isinstance(bounds, StreamBounds)}
        for stream, end in ends.items():
            stream.progress.show(end)
        while time.monotonic() < until and any(end is not None and each.lacks(end) for each, end in ends.items()):
            time.sleep(DRAIN_CHECK_S)

    def left(self) -> dict[str, int | None]:
        """Return the number of unrecorded messages by stream; None if unknown. Queries no server."""
        found = {
            stream.name: stream.progress.statistics() for stream in self.streams() if not stream.progress.is_standby
        }
        # -1 is the end of an empty or missing stream.
        counts = {name: 0 if each.stream_offset == -1 else each.lag_offsets for name, each in found.items()}
        return {name: count for name, count in counts.items() if count != 0}

    def end(self) -> None:
        """Start no more work. Does not block."""
        self.stopping.set()
        self._ending.end_in(DATABASE_S)
        self.loop.call(self._cancel)

    def _cancel(self) -> None:
        for duty in self._duties:
            duty.cancel()

    def stop(self, timeout_s: float = STOP_S) -> None:
        """Commit the messages that were read, release the streams and end all threads, within `timeout_s` seconds."""
        until = time.monotonic() + timeout_s
        self._ending.end_in(timeout_s)
        self.end()
        if self._finishing is None:
            self._finishing = self.loop.run(self._finish)
        if self._finishing is None:
            # The loop never ran.
            self.follower.end()
            self.follower.reader.close()
        else:
            # Another thread may be calling `stop`, too.
            with suppress(TimeoutError, CancelledError):
                self._finishing.result(max(0.0, until - time.monotonic()))
        self.loop.stop(max(0.0, until - time.monotonic()))
        self.database.close()
        self._lease_database.close()
        metrics.retire(self)

    async def _finish(self) -> None:
        closing = self.loop.spawn(self.follower.close())
        await self._committer.finish()
        if self._has_begun:
            await self.membership.leave()
        await asyncio.wait([closing], timeout=max(0.0, self._ending.left_s()))
