"""The thread that takes what the follower read: keys go into batches, and what is odd is dealt with elsewhere."""

import logging
import threading
from typing import Final

from relatum.errors import AccessRefused, NotFound
from relatum.following import Attached, CaughtUp, Event, Failed, Follower, Hole, Records, Replaced
from relatum.reading import RecordBatch
from relatum.recording._batch import is_readable, readable
from relatum.recording._committer import Committer
from relatum.recording._track import Missing, PassOver, State, Then, Track, Tracks, Worker
from relatum.recording._writer import Writer
from relatum.waiting import Outages

logger = logging.getLogger("relatum.recorder")

IDLE_S: Final = 1.0
"""Seconds after which it looks whether it should end; it is woken when the follower is closed."""


LARGE_RECORDS: Final = 512
"""Records of one batch from which on it is handed on by itself: it is committed while the next one is extracted."""


class Intake(Worker):
    """Hands what is read to the writers of the streams."""

    def __init__(
        self, follower: Follower, tracks: Tracks, committer: Committer, outages: Outages, stop: threading.Event
    ) -> None:
        super().__init__("relatum-intake")
        self._follower = follower
        self._committer = committer
        self._done: list[Event] = []
        """What is done with, of what is taken now."""
        self._tracks = tracks
        self._outages = outages
        self._stop = stop

    def _run(self) -> None:
        while not self._stop.is_set():
            for event in self._follower.take(IDLE_S):
                self._take(event)
                if isinstance(event, Records) and len(event.batch) >= LARGE_RECORDS:
                    self._hand_on()
            self._hand_on()

    def _hand_on(self) -> None:
        done, self._done = self._done, []
        self._follower.done(*done)
        self._committer.go_on()

    def _take(self, event: Event) -> None:
        if event.stream is None:
            # The broker as a whole: who asks what is left does not wait for it.
            with self._tracks.changed:
                for each in self._tracks.all():
                    each.is_refused = each.is_refused or each.writer is None
                    each.progress.stop()
            return
        with self._tracks.changed:
            track = self._tracks.of(event.stream, event.following)
            writer = track.writer if track is not None else None
        if track is None:
            self._done.append(event)
        elif isinstance(event, Records):
            self._put(track, writer, event)
        else:
            self._note(track, event)

    def _put(self, track: Track, writer: Writer | None, event: Records) -> None:
        if writer is None:
            # Of one that is asked for, or has failed just now: it is read again from where its coverage ends.
            self._done.append(event)
        else:
            try:
                has_room = self._extract(track, writer, event)
            except Exception as error:  # noqa: BLE001 - a defect of one stream stops no other
                has_room = True
                writer.end(error)
            if has_room:
                self._done.append(event)

    def _extract(self, track: Track, writer: Writer, event: Records) -> bool:
        if is_readable(event.batch):
            track.progress.read(event.batch.last_offset)
            return writer.put(event, (event.batch,))
        parts: list[RecordBatch] = []
        for part, reason in readable(event.batch):
            if reason is not None:
                has_room = writer.put(event, parts)
                self._close(track, PassOver(part.last_offset + 1, reason))
                return has_room
            parts.append(part)
            track.progress.read(part.last_offset)
        return writer.put(event, parts)

    def _note(self, track: Track, event: Attached | CaughtUp | Hole | Replaced | Failed) -> None:
        match event:
            case Attached():
                self._attached(track)
            case CaughtUp():
                track.progress.show(event.next_offset - 1)
                if track.writer is not None and track.writer.unwritten() is None:
                    self._outages.over(track.who)
            case Hole() if track.state is State.OPEN:
                self._close(track, event)
            case Replaced() if track.state is not State.OPEN:
                self._attached(track)
            case Replaced():
                self._close(track, event)
            case Failed():
                track.progress.stop()
                track.progress.reconnects += 1
                if isinstance(event.error, NotFound | AccessRefused):
                    track.progress.show(None)
                    track.is_refused = True
                    self._close(track, Missing(event.error))

    def _attached(self, track: Track) -> None:
        with self._tracks.changed:
            if track.state is State.ASKED or isinstance(track.after, Missing):
                self._tracks.found(track)
                return
            writer = track.writer
            if writer is None or track.state is not State.OPEN:
                return
            start = writer.recorded_to + 1
            if not track.progress.is_recording:
                track.progress.begin(start - 1, None, writer.unwritten)
        track.was_missing = track.is_refused = False
        logger.info(
            "recording stream %r from offset %d on", track.name, start, extra={"stream": track.name, "from": start}
        )

    def _close(self, track: Track, after: Hole | Replaced | PassOver | Missing | Then) -> None:
        with self._tracks.changed:
            if track.state is State.OPEN:
                self._tracks.close(track, after)
