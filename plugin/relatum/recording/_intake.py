"""What the follower read: keys go into batches, and what is odd is dealt with by the streams. In the loop's thread."""

import asyncio
import threading

from relatum.errors import AccessRefused, NotFound
from relatum.following import Attached, CaughtUp, Event, Failed, Hole, Records, Replaced, StreamFollower
from relatum.reading import RecordBatch
from relatum.recording._batch import readable
from relatum.recording._committer import Committer
from relatum.recording._stream_recording import OpenTail, StreamRecording
from relatum.recording._streams import Streams
from relatum.waiting import Outages


class Intake:
    """Hands what is read to the streams."""

    def __init__(
        self,
        follower: StreamFollower,
        streams: Streams,
        committer: Committer,
        outages: Outages,
        stop: threading.Event,
    ) -> None:
        self._follower = follower
        self._streams = streams
        self._committer = committer
        self._outages = outages
        self._stop = stop
        self._done: list[Event] = []
        self._is_due = False

    def told(self, event: Event) -> None:
        """Take an event of the follower; what this turn of the loop brings is committed together."""
        if self._stop.is_set():
            return
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._hand_on)
        if isinstance(event, Records):
            self._put(event)
        else:
            self._note(event)

    def _hand_on(self) -> None:
        """Let more come of what is done, and commit."""
        self._is_due = False
        done, self._done = self._done, []
        self._follower.done(*done)
        self._committer.go_on()

    def _put(self, event: Records) -> None:
        stream = self._streams.of(event.stream, event.following)
        tail = stream.tail if stream is not None and stream.is_read else None
        # Of one that is sought, or has failed just now: it is read again from where its coverage ends.
        has_room = True
        if stream is not None and tail is not None:
            try:
                self._extract(stream, tail, event.batch)
                has_room = tail.is_over or not tail.is_full(self._committer.busy)
            except Exception as error:  # noqa: BLE001 - a defect of one stream stops no other
                self._streams.ended(tail, error)
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
