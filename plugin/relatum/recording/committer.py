"""From the follower's events to the database: messages are added to batches, and batches are committed together."""

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

import sqlalchemy as sa

from relatum.errors import AccessRefused, CoverageConflict, DatabaseUnavailable, NotFound
from relatum.following import Attached, CaughtUp, Event, Failed, Hole, Records, Replaced
from relatum.otel import Span
from relatum.reading import RecordBatch
from relatum.recording.batch import readable
from relatum.recording.commit import commit_shares, recording
from relatum.recording.statistics import RecorderMetrics
from relatum.recording.stream_recording import OpenTail, StreamRecording
from relatum.recording.streams import Streams
from relatum.waiting import Threads

HELD_UP_S: Final = 0.05
"""Seconds before the commit of a stream is retried whose range another session had locked."""


class Committer:
    """Fills batches in the loop, and commits them in a thread of its own.

    Everything that is ready when a transaction ends goes into the next one. With one stream, that is a lone message or
    a batch; with a thousand streams, some hundred small batches, which the follower gathers. If PostgreSQL refuses a
    transaction, each stream is committed separately, so that only the streams at fault fail.

    `before_commit`: Awaited before each transaction. `on_receipts`: Called after commits that publishers wait for.
    """

    def __init__(
        self,
        streams: Streams,
        engine: sa.Engine,
        metrics: RecorderMetrics,
        before_commit: Callable[[], Awaitable[None]],
        on_receipts: Callable[[], None],
        stop: threading.Event,
    ) -> None:
        self._streams = streams
        self._loop = streams.loop
        self._threads = Threads(1, "relatum-recorder-commits")
        self._engine = engine
        self._metrics = metrics
        self._before_commit = before_commit
        self._on_receipts = on_receipts
        self._stop = stop
        self._done: list[Event] = []
        self._is_due = False
        self._ready: dict[OpenTail, None] = {}
        self._committing = 0
        self._task: asyncio.Task[None] | None = None

    # --- events of the follower ---------------------------------------------------------------------------------------

    def take(self, event: Event) -> None:
        """Handle an event of the follower. The records of one turn of the loop are committed together."""
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
        """Release the records of this turn, and commit."""
        self._is_due = False
        done, self._done = self._done, []
        self._streams.follower.done(*done)
        self._go_on()

    def _put(self, event: Records) -> None:
        stream = self._streams.of(event.stream, event.following)
        tail = stream.tail if stream is not None and stream.is_read else None
        # Drop records of a stream that is not open: it is read again from the end of its coverage.
        has_room = True
        if stream is not None and tail is not None:
            try:
                self._extract(stream, tail, event.batch)
                has_room = tail.is_over or not tail.is_full(self._busy)
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
            if tail.committing is None:
                self._ready[tail] = None
        if unread is not None:
            self._streams.pass_over(stream, *unread)

    def _note(self, event: Attached | CaughtUp | Hole | Replaced | Failed) -> None:
        if event.stream is None:
            # The broker is unavailable: a drain does not wait for it.
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
                    self._streams.outages.over(stream.log_name)
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

    # --- commits ------------------------------------------------------------------------------------------------------

    def _go_on(self) -> None:
        """Start committing, unless a task is running: it continues with what is ready."""
        if self._task is None and self._ready:
            self._task = self._loop.spawn(self._run())

    @property
    def _busy(self) -> int:
        """The number of streams that have something to commit."""
        return len(self._ready) + self._committing

    async def finish(self) -> None:
        """Commit what is ready, then end the thread."""
        self._go_on()
        if self._task is not None:
            await asyncio.wait([self._task])
        self._threads.shutdown()

    async def _run(self) -> None:
        try:
            while self._ready:
                await self._before_commit()
                ready, self._ready = self._ready, {}
                await self._commit([tail for tail in ready if not tail.is_over])
        finally:
            self._task, self._committing = None, 0

    async def _commit(self, tails: Sequence[OpenTail]) -> None:
        if not tails:
            return
        self._committing = len(tails)
        for tail in tails:
            tail.take()
            # A stream that was held up still has a batch that it filled.
            if not tail.is_full(self._busy):
                self._streams.let_more_come(tail)
        try:
            errors = await self._loop.ask(self._written, tails, threads=self._threads)
        except Exception as error:  # noqa: BLE001 - becomes the error of each stream
            errors = [error] * len(tails)
        for tail, outcome in zip(tails, errors, strict=True):
            try:
                self._settle(tail, outcome)
            except Exception as defect:  # noqa: BLE001 - a defect of one stream stops no other
                self._streams.ended(tail, defect)

    def _settle(self, tail: OpenTail, error: Exception | None) -> None:
        if error is not None:
            self._streams.ended(tail, error)
        elif tail.share.is_held_up:
            self._loop.call_later(HELD_UP_S, self._try_again, tail)
        else:
            tail.committed()
            if tail.filling.messages:
                self._ready[tail] = None
            self._streams.committed(tail)

    def _try_again(self, tail: OpenTail) -> None:
        self._ready[tail] = None
        self._go_on()

    # --- the thread that commits --------------------------------------------------------------------------------------

    def _written(self, tails: Sequence[OpenTail]) -> list[Exception | None]:
        """Commit shares; return each stream's error, or None."""
        begun = time.perf_counter()
        with recording([(tail.stream.name, tail.share.batch) for tail in tails]) as span:
            errors = self._outcomes(tails, span)
        self._metrics.batch_s.observe(time.perf_counter() - begun)
        if any(tail.share.is_committed and tail.share.batch.receipts for tail in tails):
            self._on_receipts()
        return errors

    def _outcomes(self, tails: Sequence[OpenTail], span: Span) -> list[Exception | None]:
        try:
            commit_shares(self._engine, [tail.share for tail in tails])
        except DatabaseUnavailable as error:
            span.failed(error)
            return [error] * len(tails)
        except Exception as error:  # noqa: BLE001 - becomes the error of the stream at fault
            if len(tails) > 1:
                return [outcome for tail in tails for outcome in self._outcomes([tail], span)]
            span.failed(error)
            return [error]
        errors: list[Exception | None] = []
        for tail in tails:
            share, lost = tail.share, None
            if not share.is_committed and not share.is_held_up:
                message = f"another recorder moved the coverage from {share.row.to_offset} first; nothing was written"
                lost = CoverageConflict(message, stream=tail.stream.name)
                span.failed(lost)
            errors.append(lost)
        return errors
