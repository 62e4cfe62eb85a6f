"""The recorder of any number of streams in one process: what owns its threads, and how they hang together."""

import logging
import threading
import time
from functools import partial
from typing import Final

from relatum import metrics
from relatum.errors import AccessRefused, NotFound, RelatumError
from relatum.following import Follower, FollowerOptions
from relatum.processes import new_holder
from relatum.reading import BrokerAddress, StreamReader
from relatum.recording._broker import OwnBroker, adopt
from relatum.recording._committer import Committer
from relatum.recording._gaps import GapCloser
from relatum.recording._intake import Intake
from relatum.recording._keeper import Keeper
from relatum.recording._opener import Opener
from relatum.recording._opening import Opened
from relatum.recording._part_tender import PartTender
from relatum.recording._statistics import RecorderMetrics, RecorderStatistics
from relatum.recording._track import Missing, State, Then, Track, Tracks, Worker
from relatum.recording._writer import RecordedListener, Writer
from relatum.store.catalog import streams_named
from relatum.store.database import Database
from relatum.store.members import LEASE_S, RECORDERS, Member
from relatum.store.translation import translated_errors
from relatum.waiting import QUESTION_S, Deadline, Outages, backoff, ended

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


class RecorderGroup:
    """Records streams, with so many threads and connections, whatever their number. See docs/adr/0015."""

    def __init__(
        self,
        address: BrokerAddress,
        database: Database,
        *,
        name: str | None = None,
        on_recorded: RecordedListener | None = None,
        holder: str | None = None,
        lease_s: float = LEASE_S,
    ) -> None:
        self._address = address
        self._on_recorded = on_recorded
        self._stop = threading.Event()
        self._ending = Deadline(None)
        engine = Database(database, refusing=None, ending=self._ending).engine
        names = {"broker": str(address), "database": database.address.name}
        self.outages = Outages(logger, stop=self._stop, **names)
        self.metrics = RecorderMetrics(self.outages)
        self.follower = Follower(
            address,
            options=FollowerOptions(gather_s=GATHER_S if on_recorded is None else GATHER_RECEIPTS_S),
            outages=self.outages,
            who="reading of stream {!r}".format,
        )
        self._tracks = Tracks(self.follower)
        self._committer = Committer(engine, self.metrics)
        self._engine, self._broker = engine, OwnBroker()
        broker = self._broker
        self._opener = Opener(engine, self._tracks, self.follower, broker, self._writer_of, self.outages, self._stop)
        member = Member(RECORDERS, name or new_holder(), lease_s=lease_s, holder=holder)
        self._keeper = Keeper(
            engine, address.vhost, member, self._tracks, self.follower, self._opener, self.outages, broker
        )
        self._intake = Intake(self.follower, self._tracks, self._committer, self.outages, self._stop)
        self._gaps = GapCloser(engine, self.follower, self._tracks, self.outages, self._stop)
        self._parts = PartTender(engine, self._tracks, self.outages, self._stop)
        self._tracks.closed, self._tracks.woken = self._closed, self._keeper.wake
        self._has_begun = False
        metrics.report(self)

    def statistics(self) -> RecorderStatistics:
        """What was recorded, and how far behind each stream is."""
        return self.metrics.statistics()

    def reader(self) -> StreamReader:
        """The reader for questions, the follower's."""
        return self.follower.reader()

    def add(self, stream: str, super_stream: str | None = None) -> None:
        """Record a stream from now on; nothing happens where it is recorded already."""
        with self._tracks.changed:
            if stream in self._tracks or self._stop.is_set():
                return
            self._tracks.add(Track(stream, super_stream, self.metrics.stream(stream)))
            self._keeper.wake()
            if self._has_begun:
                return
            self._has_begun = True
        self.follower.open()
        for part in (self._intake, self._opener, self._keeper, self._gaps, self._parts):
            part.start()

    def check_broker(self) -> None:
        """See that there is something to record."""
        names = [track.name for track in self._tracks.all()]
        with translated_errors(), self._engine.begin() as connection:
            rows = streams_named(connection, self._address.vhost, names, partitions=False)
        reader = self.reader()
        others = adopt(self._engine, reader, rows, self._broker.ask(reader))
        if others and len(others) == len(names):
            raise next(iter(others.values()))

    def drop(self, name: str) -> None:
        """Take back a name that was taken for a stream's to come."""
        self._tracks.drop(name)
        self.metrics.forget(name)

    # --- writers --------------------------------------------------------------------------------------------------

    def _writer_of(self, track: Track, opened: Opened) -> Writer:
        return Writer(
            opened,
            submit=self._committer.submit,
            done=self.follower.done,
            ended=partial(self._ended, track),
            goes_on=partial(self.outages.over, track.who),
            busy=self._committer.busy,
            progress=track.progress,
            on_recorded=self._on_recorded,
        )

    def _ended(self, track: Track, writer: Writer, error: Exception | None) -> None:
        """A writer has committed all it had, or failed."""
        with self._tracks.changed:
            if track.writer is not writer:
                return
            track.progress.stop()
            track.writer = None
            if writer.recorded_to >= writer.started_at:
                track.pauses = backoff(QUESTION_S)
            if error is None:
                self._closed(track)
                return
            self.follower.leave(track.name)
            track.following = 0
            if track.state is State.OPEN or not isinstance(track.after, Then):
                # What was not committed is read again, and with it what came then.
                track.state, track.after = State.HELD, Then.OPEN
                self._opener.failed(track, error)
            else:
                self._closed(track)

    def _closed(self, track: Track) -> None:
        """What was read of a stream is committed; the lock is held."""
        after = track.after
        if after is Then.LOST:
            # Without a row it is replaced, forgotten, or another broker's.
            track.state = State.NEW if track.row is None else State.WANTED
            self._keeper.wake()
        elif after is Then.RELEASE:
            track.state = State.WANTED
            self._keeper.release(track)
        elif isinstance(after, Missing):
            self._keeper.release(track)
            if track.row is not None:
                self._opener.missing(track, track.row, after)
            track.row, track.after = None, Then.OPEN
            if track.is_there:
                self._tracks.found(track)
            elif track.following:
                track.state = State.ASKED
            else:
                self._tracks.ask(track)
        else:
            track.state = State.HELD
            self._opener.submit(track)

    # --- the end --------------------------------------------------------------------------------------------------

    def drain(self, until: float) -> None:
        """Wait until what is in the streams now is recorded, as far as this process is about to record it."""
        tracks = {track.name: track for track in self._tracks.all()}
        try:
            # A reader of its own, which gives up in time.
            with StreamReader.open(self._address, timeout_s=max(0.1, until - time.monotonic())) as reader:
                ends = {stream: _end_of(reader, stream) for stream in tracks}
        except RelatumError as error:
            logger.info("not drained: %s", ended(error))
            return
        for stream, end in ends.items():
            tracks[stream].progress.show(end)
        while time.monotonic() < until and any(end >= 0 and tracks[stream].lacks(end) for stream, end in ends.items()):
            time.sleep(DRAIN_LOOK_S)

    def left(self) -> dict[str, int | None]:
        """How many messages of which streams are not recorded; None where that is not known yet. Asks nobody."""
        counts = {track.name: track.left for track in self._tracks.all()}
        return {stream: count for stream, count in counts.items() if count != 0}

    def end(self) -> None:
        """Tell all threads to finish the batches under way and end; none is waited for."""
        self._stop.set()
        self._ending.end_in(DATABASE_S)
        self._keeper.leave()
        self.outages.wake()

    def stop(self, timeout_s: float = STOP_S) -> None:
        """Finish the batches under way, let others have the streams and end all threads, in so many seconds at most."""
        until = time.monotonic() + timeout_s
        self._ending.end_in(timeout_s)
        self.end()
        self.follower.close(timeout_s / 3)
        if self._has_begun:
            self._join(until, self._intake, self._opener)
            self._committer.stop(max(0.0, until - time.monotonic()))
            self._join(until, self._gaps, self._parts)
            self._keeper.stop(until)
        metrics.retire(self)

    def _join(self, until: float, *workers: Worker) -> None:
        for worker in workers:
            worker.join(max(0.0, until - time.monotonic()))


def _end_of(reader: StreamReader, stream: str) -> int:
    """The offset of a stream's last message; -1 where there is none, or none that may be read."""
    try:
        last = reader.bounds(stream).last
    except (NotFound, AccessRefused):
        return -1
    return -1 if last is None else last
