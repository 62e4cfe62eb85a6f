"""The thread that does what has to wait for an answer: opening streams, following them anew, asking where they end."""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

import sqlalchemy as sa

from relatum.errors import Conflict, RelatumError, StreamNotFound
from relatum.following import Follower, Hole, Replaced
from relatum.recording._broker import OwnBroker, adopt
from relatum.recording._losing import after_loss, note_missing, pass_hole, pass_over
from relatum.recording._opening import Opened, open_streams
from relatum.recording._track import LOOK_S, Missing, PassOver, State, Then, Track, Tracks, Worker, next_look
from relatum.recording._writer import Writer
from relatum.store.catalog import StreamRow
from relatum.waiting import Outages, Server, backoff, ended, within

logger = logging.getLogger("relatum.recorder")

LOOK_TIME_S: Final = 2.0
"""Seconds such a look may take: streams that are to be opened wait for it."""

_WHO: Final = "opening streams"


class Opener(Worker):
    """Opens the streams that this member has, all that are due at once."""

    def __init__(
        self,
        engine: sa.Engine,
        tracks: Tracks,
        follower: Follower,
        broker: OwnBroker,
        writer_of: Callable[[Track, Opened], Writer],
        outages: Outages,
        stop: threading.Event,
    ) -> None:
        super().__init__("relatum-opener")
        self._engine = engine
        self._tracks = tracks
        self._follower = follower
        self._broker = broker
        self._writer_of = writer_of
        self._outages = outages
        self._stop = stop
        self._due: dict[Track, float] = {}
        self._missing: list[StreamRow] = []
        self._pauses = backoff()

    def submit(self, track: Track, pause_s: float = 0.0) -> None:
        """Open a stream, after a pause; the lock is held."""
        self._due[track] = time.monotonic() + pause_s
        self._tracks.changed.notify_all()

    # --- the thread -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stop.is_set():
            tracks = self._next()
            try:
                while self._missing:
                    note_missing(self._engine, self._missing[0])
                    del self._missing[0]
                if tracks:
                    self._see_whose([track for track in tracks if track.state is State.DOUBTED])
                    self._open([track for track in tracks if track.state is State.HELD])
                else:
                    self._look()
            except Exception as error:  # noqa: BLE001 - said once, and tried again
                if self._stop.is_set():
                    return
                self._outages.failed(_WHO, error)
                self._put_off(tracks, next(self._pauses))
            else:
                if tracks:
                    self._pauses = backoff()
                    self._outages.over(_WHO)

    def _put_off(self, tracks: Sequence[Track], pause_s: float) -> None:
        """Try again later; meanwhile it is seen where the streams end."""
        with self._tracks.changed:
            for track in tracks:
                if track.state in (State.DOUBTED, State.HELD):
                    track.is_refused = True
                    self.submit(track, pause_s)
        if not tracks:
            self._outages.wait(pause_s)

    def _next(self) -> list[Track]:
        """The streams that are due; none where one is to be asked for its ends, and at the stop."""
        with self._tracks.changed:
            while not self._stop.is_set():
                now = time.monotonic()
                due = [track for track, at in self._due.items() if at <= now]
                if due:
                    for track in due:
                        del self._due[track]
                    return [
                        track
                        for track in due
                        if track.state is State.DOUBTED or (track.state is State.HELD and track.row is not None)
                    ]
                look_at = min(
                    (each.look_at for each in self._tracks.all() if _is_looked_at(each)), default=now + LOOK_S
                )
                if look_at <= now or self._missing:
                    return []
                self._tracks.changed.wait(min([look_at, *self._due.values()]) - now)
        return []

    def _see_whose(self, tracks: Sequence[Track]) -> None:
        """See whether streams are this broker's. The keeper goes on with those that are not known to be another's."""
        rows = [track.row for track in tracks if track.row is not None]
        others: dict[str, RelatumError] = {}
        if rows:
            reader = self._follower.reader()
            others = adopt(self._engine, reader, rows, self._broker.ask(reader))
        with self._tracks.changed:
            for track in tracks:
                if track.state is State.DOUBTED and track.name in others:
                    # Looked up anew the next time: it may be forgotten by then.
                    track.row = None
                    self.failed(track, others[track.name])
                elif track.state is State.DOUBTED:
                    track.state, track.is_ours = State.NEW, track.row is not None
                    self._tracks.woken()

    def _open(self, tracks: Sequence[Track]) -> None:
        ready = [track for track in tracks if self._has_prepared(track)]
        rows = [track.row for track in ready if track.row is not None]
        if not rows:
            return
        # Nothing is written for a broker that never answered.
        self._follower.reader()
        self._outages.answered(Server.BROKER)
        opened = {each.stream.name: each for each in open_streams(self._engine, rows)}
        self._outages.answered(Server.DATABASE)
        with self._tracks.changed:
            for track in ready:
                if track.state is not State.HELD:
                    continue
                if track.name in opened:
                    self._follow(track, opened[track.name])
                else:
                    logger.info("recording of stream %r begins anew: another recorder opened it", track.name)
                    self.submit(track, next(track.pauses))

    def _follow(self, track: Track, opened: Opened) -> None:
        tail = opened.tail
        track.writer = self._writer_of(track, opened)
        track.state, track.after = State.OPEN, Then.OPEN
        track.progress.lost(opened.holes)
        track.following = self._follower.follow(track.name, tail.to_offset, known=opened.known)

    def _has_prepared(self, track: Track) -> bool:
        """Do what comes before a stream is opened again; False where that failed, or it is another stream now."""
        row, after = track.row, track.after
        if row is None or after is Then.OPEN:
            return row is not None
        try:
            is_same = self._prepare(row, after)
        except Exception as error:  # noqa: BLE001 - said once, and tried again
            with self._tracks.changed:
                self.failed(track, error)
            return False
        with self._tracks.changed:
            track.after = Then.OPEN
            if not is_same and track.state is State.HELD:
                track.state, track.row, track.is_there, track.is_ours = State.NEW, None, True, False
                self._tracks.woken()
        return is_same

    def _prepare(self, row: StreamRow, after: object) -> bool:
        if isinstance(after, Hole):
            pass_hole(self._engine, row, after.to_offset)
        elif isinstance(after, PassOver):
            pass_over(self._engine, row, after.to_offset, after.reason)
        elif isinstance(after, Replaced):
            self._broker.ask_anew(self._follower.reader())
            if self._broker.is_not_of(row.broker_id):
                return False
            return after_loss(self._engine, self._follower.reader(), row)
        return True

    def failed(self, track: Track, error: Exception) -> None:
        """Open a stream again after a pause, since something went wrong with it; the lock is held."""
        if isinstance(error, Conflict):
            # Nothing is wrong: another process is, or was, at it. What is to be done is seen anew.
            logger.info("recording of stream %r begins anew: %s", track.name, ended(error))
            track.after = Then.OPEN
        else:
            self._outages.failed(track.who, error)
            track.is_refused = True
        track.progress.reconnects += 1
        self.submit(track, next(track.pauses))

    def missing(self, track: Track, row: StreamRow, missing: Missing) -> None:
        """Write down once that the broker has a stream no more, soon; the lock is held."""
        if isinstance(missing.error, StreamNotFound) and not track.was_missing:
            track.was_missing = True
            self._missing.append(row)
            self._tracks.changed.notify_all()

    # --- looks ----------------------------------------------------------------------------------------------------

    def _look(self) -> None:
        """See where one stream begins and ends now."""
        now = time.monotonic()
        with self._tracks.changed:
            due = [track for track in self._tracks.all() if _is_looked_at(track) and track.look_at <= now]
            if not due or self._stop.is_set():
                return
            track = min(due, key=lambda each: each.look_at)
            track.look_at = next_look()
            writer = track.writer
            is_known = writer is not None and writer.is_known
        try:
            with within(LOOK_TIME_S):
                bounds = self._follower.reader().bounds(track.name)
        except StreamNotFound:
            track.progress.show(None)
            return
        except RelatumError as error:
            # The follower says what is away.
            logger.debug("where stream %r ends is not known now: %s", track.name, ended(error))
            return
        track.progress.show(bounds.last)
        if writer is not None and bounds.first is not None:
            writer.first_offset = bounds.first
            if is_known:
                writer.retained_from = bounds.first


def _is_looked_at(track: Track) -> bool:
    """Of streams that others record, they tell the lag; those that are asked for have none to tell."""
    return track.state not in (State.ASKED, State.CLOSING) and not track.progress.is_standby
