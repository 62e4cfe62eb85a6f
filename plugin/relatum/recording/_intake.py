"""What the follower read: keys go into batches, and what is odd is dealt with by the streams. In the loop's thread."""

import asyncio
import logging
import threading
import time
from collections import deque
from typing import Final

from relatum.errors import AccessRefused, NotFound
from relatum.following import Attached, CaughtUp, Event, Failed, Hole, Records, Replaced, StreamFollower
from relatum.reading import RecordBatch
from relatum.recording._batch import is_readable, readable, sliced
from relatum.recording._committer import Committer
from relatum.recording._stream_recording import OpenTail, StreamRecording
from relatum.recording._streams import Streams
from relatum.waiting import ComponentLoop, Outages

logger = logging.getLogger("relatum.recorder")

TURN_S: Final = 0.02
"""Seconds after which what else the loop has to do has its turn: a lease that is due most of all."""

SLICE_RECORDS: Final = 512
"""Records of which keys are extracted at once: some milliseconds' work."""

LARGE_RECORDS: Final = 512
"""Records of one batch from which on it is handed on by itself: it is committed while the next one is extracted."""

AFTER_DEFECT_S: Final = 1.0
"""Seconds between two defects of our own, so that none fills the log or a processor."""


class Intake:
    """Hands what is read to the streams."""

    def __init__(
        self,
        loop: ComponentLoop,
        follower: StreamFollower,
        streams: Streams,
        committer: Committer,
        outages: Outages,
        stop: threading.Event,
    ) -> None:
        self._loop = loop
        self._follower = follower
        self._streams = streams
        self._committer = committer
        self._outages = outages
        self._stop = stop
        self._came: deque[tuple[Event, RecordBatch | None]] = deque()
        """Events, and of records the next part of each; with its last part an event is done."""
        self._done: list[Event] = []
        self._has_turn = False

    def told(self, event: Event) -> None:
        """Take an event of the follower: it is dealt with behind all that this turn of the loop brings."""
        if not isinstance(event, Records):
            self._came.append((event, None))
        elif len(event.batch) <= SLICE_RECORDS or not is_readable(event.batch):
            self._came.append((event, event.batch))
        else:
            self._came.extend((event, part) for part in sliced(event.batch, SLICE_RECORDS))
        if not self._has_turn:
            self._has_turn = True
            asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        """Deal with what came, and give way after a while."""
        if self._stop.is_set():
            return
        try:
            self._has_turn = self._goes_on(time.perf_counter() + TURN_S)
        except Exception:
            logger.exception("taking what was read has a defect, and goes on")
            self._loop.call_later(AFTER_DEFECT_S, self._turn)
        else:
            if self._has_turn:
                asyncio.get_running_loop().call_soon(self._turn)

    def _goes_on(self, until: float) -> bool:
        """Deal with what came; True where there is more."""
        while self._came:
            event, batch = self._came.popleft()
            if isinstance(event, Records) and batch is not None:
                is_last = batch.last_offset == event.batch.last_offset
                self._put(event, batch, is_last=is_last)
                if is_last and len(event.batch) >= LARGE_RECORDS and self._hand_on():
                    return True
            elif not isinstance(event, Records):
                self._note(event)
            if time.perf_counter() >= until:
                break
        if not self._came:
            self._hand_on()
        return bool(self._came)

    def _hand_on(self) -> bool:
        """Let more come of what is done, and commit; True where that begins now."""
        done, self._done = self._done, []
        self._follower.done(*done)
        return self._committer.go_on()

    def _put(self, event: Records, batch: RecordBatch, *, is_last: bool) -> None:
        stream = self._streams.of(event.stream, event.following)
        tail = stream.tail if stream is not None and stream.is_read else None
        # Of one that is sought, or has failed just now: it is read again from where its coverage ends.
        has_room = True
        if stream is not None and tail is not None:
            try:
                self._extract(stream, tail, batch)
                has_room = tail.is_over or not tail.is_full(self._committer.busy)
            except Exception as error:  # noqa: BLE001 - a defect of one stream stops no other
                self._streams.ended(tail, error)
        if not is_last:
            return
        if has_room or tail is None:
            self._done.append(event)
        else:
            tail.held.append(event)

    def _extract(self, stream: StreamRecording, tail: OpenTail, batch: RecordBatch) -> None:
        parts: list[RecordBatch] = []
        unread: tuple[int, str] | None = None
        for part, reason in readable(batch):
            if reason is not None:
                unread = part.last_offset + 1, reason
                break
            parts.append(part)
            stream.progress.read(part.last_offset)
        if parts:
            tail.add(parts)
            self._committer.submit(tail)
        if unread is not None:
            self._streams.pass_over(stream, *unread)

    def _note(self, event: Attached | CaughtUp | Hole | Replaced | Failed) -> None:
        if event.stream is None:
            # The broker as a whole: who asks what is left does not wait for it.
            for each in self._streams.all():
                each.is_refused = each.is_refused or each.tail is None
                each.progress.stop()
            return
        stream = self._streams.of(event.stream, event.following)
        if stream is None:
            return
        match event:
            case Attached():
                self._streams.attached(stream)
            case CaughtUp():
                stream.progress.show(event.next_offset - 1)
                if stream.tail is not None and stream.tail.is_whole:
                    self._outages.over(stream.who)
            case Replaced() if not stream.is_read:
                self._streams.attached(stream)
            case Hole() | Replaced():
                self._streams.lost(stream, event)
            case Failed():
                stream.progress.stop()
                stream.progress.reconnects += 1
                if isinstance(event.error, NotFound | AccessRefused):
                    stream.progress.show(None)
                    self._streams.gone(stream, event.error)

    async def finish(self) -> None:
        """Commit what was put; nothing more is taken."""
        self._came.clear()
        await self._committer.finish()
