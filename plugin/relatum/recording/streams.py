"""The streams of one process: found, shared, opened, followed and left. Everything here runs in the loop's thread."""

import logging
import math
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import sqlalchemy as sa

from relatum.errors import Conflict, StreamNotFound
from relatum.following import Hole, Replaced, StreamFollower
from relatum.recording.own_broker import OwnBroker
from relatum.recording.recorder_membership import Found, Membership
from relatum.recording.stream_recording import OpenTail, Phase, StreamRecording
from relatum.recording.tails import Opened, note_missing, open_streams, pass_hole, pass_over
from relatum.store.catalog import StreamRow
from relatum.waiting import QUESTION_S, ComponentLoop, Duty, Outages, Server, backoff, ended

logger = logging.getLogger("relatum.recorder")


class Streams:
    """All streams of a process.

    Three duties ask the servers, each for all streams that are due at once: `_seek` finds out which names are streams
    of this broker, `_share` which of them this member holds, and `_open` opens those.
    """

    def __init__(
        self,
        loop: ComponentLoop,
        engine: sa.Engine,
        vhost: str,
        follower: StreamFollower,
        outages: Outages,
        membership: Membership,
    ) -> None:
        self.broker = OwnBroker(engine, vhost, follower.reader)
        self.loop = loop
        self._engine = engine
        self.follower = follower
        self.outages = outages
        self._membership = membership
        self._by_name: dict[str, StreamRecording] = {}
        self._missing: list[StreamRow] = []
        """Streams to be stored as missing."""
        self._seeking: Duty | None = None
        self._opening: Duty | None = None

    def begin(self) -> list[Duty]:
        """Start the duties, and return them to be cancelled."""
        repeat, outages = self.loop.repeat, self.outages
        self._seeking = repeat(self._seek, "looking up streams", outages)
        self._membership.duty = repeat(self._share, "renewing the leases", outages)
        self._opening = repeat(self._open, "opening streams", outages)
        return [self._seeking, self._membership.duty, self._opening]

    # --- from any thread ----------------------------------------------------------------------------------------------

    def __contains__(self, name: str) -> bool:
        return name in self._by_name

    def add(self, stream: StreamRecording) -> None:
        """Add a stream. It is not looked up before `seek`."""
        self._by_name.setdefault(stream.name, stream)

    def all(self) -> list[StreamRecording]:
        """Return all streams in the order in which they were added."""
        return list(self._by_name.values())

    # --- what happens to one ------------------------------------------------------------------------------------------

    def seek(self) -> None:
        """Look up the streams that are due."""
        if self._seeking is not None:
            self._seeking.wake()

    def drop(self, name: str) -> None:
        """Forget a name that the broker has not confirmed to be a stream."""
        stream = self._by_name.get(name)
        if stream is not None and stream.row is None and stream.phase is Phase.SOUGHT:
            del self._by_name[name]
            self._leave(stream)

    def of(self, stream: str, following: int) -> StreamRecording | None:
        """Return the stream of a follower's event; None if the event is from an earlier following."""
        found = self._by_name.get(stream)
        return found if found is not None and found.following == following else None

    def recorded(self) -> list[tuple[StreamRecording, StreamRow, OpenTail]]:
        """Return the streams that are recorded now."""
        return [
            (stream, stream.row, stream.tail)
            for stream in self.all()
            if stream.is_read and stream.row is not None and stream.tail is not None
        ]

    def attached(self, stream: StreamRecording) -> None:
        """Handle an attach: the broker has the stream, and this user may read it."""
        if stream.phase is Phase.SOUGHT:
            self._found(stream)
        elif stream.after_commit is not None:
            stream.is_there = True
        elif stream.tail is not None:
            start = stream.tail.recorded_to + 1
            if not stream.progress.is_recording:
                stream.progress.begin(start - 1, stream.tail.unwritten)
            stream.was_missing = stream.is_refused = False
            extra = {"stream": stream.name, "from": start}
            logger.info("recording stream %r from offset %d on", stream.name, start, extra=extra)

    def _found(self, stream: StreamRecording) -> None:
        stream.is_there = True
        self._leave(stream)
        self.seek()

    def lost(self, stream: StreamRecording, what: Hole | Replaced) -> None:
        """Handle a hole, or another stream of that name."""
        row = stream.row
        if row is None:
            return  # it is being looked up again already
        if isinstance(what, Hole):
            self.close(stream, partial(self._reopen, partial(pass_hole, self._engine, row, what.to_offset)))
        else:
            self.close(stream, partial(self._reopen, partial(self.broker.is_stream_of, row)))

    def pass_over(self, stream: StreamRecording, to_offset: int, reason: str) -> None:
        """Skip messages of a stream that cannot be unpacked here."""
        if stream.row is not None:
            before = partial(pass_over, self._engine, stream.row, to_offset, reason)
            self.close(stream, partial(self._reopen, before))

    def gone(self, stream: StreamRecording, error: Exception) -> None:
        """Handle a stream that does not exist, or that this user may not read. The follower keeps trying."""
        stream.is_refused = True
        self.close(stream, partial(self._miss, error), is_followed=True)

    def close(
        self, stream: StreamRecording, then: Callable[[StreamRecording], None], *, is_followed: bool = False
    ) -> None:
        """Stop reading an open stream, commit what was read, then call `then`.

        If another member takes the stream, this overrides an earlier `then`.
        """
        if stream.tail is None or (stream.after_commit is not None and then not in (self._release, self._lose)):
            return
        was_read, stream.after_commit = stream.is_read, then
        if not was_read:
            return
        stream.is_there = False if is_followed else stream.is_there
        if not is_followed:
            self._leave(stream)
        self.committed(stream.tail)

    def committed(self, tail: OpenTail) -> None:
        """Handle the commit of a batch."""
        if tail.recorded_to >= tail.started_at:
            self.outages.over(tail.stream.log_name)
        if tail.is_whole and tail.stream.after_commit is not None:
            self.ended(tail, None)

    def ended(self, tail: OpenTail, error: Exception | None) -> None:
        """Handle the end of a tail: everything that was read is committed, or the commit failed."""
        stream = tail.stream
        if tail.is_over:
            return
        stream.progress.stop()
        stream.tail = None
        self.let_more_come(tail)
        if tail.recorded_to >= tail.started_at:
            stream.pauses = backoff(QUESTION_S)
        then, stream.after_commit = stream.after_commit, None
        if error is not None and then not in (self._release, self._lose):
            # It is read again from the end of its coverage.
            self._leave(stream)
            stream.phase, stream.before_opening = Phase.HELD, None
            self._failed(stream, error)
        elif then is not None:
            then(stream)

    def let_more_come(self, tail: OpenTail) -> None:
        """Give credit for more of a stream whose batch was full."""
        held, tail.held = tail.held, []
        self.follower.done(*held)

    def _leave(self, stream: StreamRecording) -> None:
        if stream.following:
            self.follower.leave(stream.name)
            stream.following = 0

    def _failed(self, stream: StreamRecording, error: Exception) -> None:
        """Handle an error: look up or open the stream again after a pause."""
        if isinstance(error, Conflict):
            # Nothing is wrong: another process was faster. Start over.
            logger.info("restarting the recording of stream %r: %s", stream.name, ended(error))
            stream.before_opening = None
        else:
            self.outages.failed(stream.log_name, error)
            stream.is_refused = True
        stream.progress.reconnects += 1
        self._put_off(stream)

    def _put_off(self, stream: StreamRecording) -> None:
        stream.due_at = time.monotonic() + next(stream.pauses)
        for duty in (self._seeking, self._opening):
            if duty is not None:
                duty.wake()

    # --- after the last commit ----------------------------------------------------------------------------------------

    def _reopen(self, before: Callable[[], bool | None] | None, stream: StreamRecording) -> None:
        stream.phase, stream.before_opening, stream.due_at = Phase.HELD, before, 0.0
        if self._opening is not None:
            self._opening.wake()

    def _release(self, stream: StreamRecording) -> None:
        """Release the stream to another member."""
        self._leave(stream)
        stream.phase = Phase.WANTED
        if stream.row is not None:
            self._membership.release(stream.row)

    def _lose(self, stream: StreamRecording) -> None:
        """Stop holding the stream. Without a row, it was replaced, forgotten, or belongs to another broker."""
        self._leave(stream)
        stream.phase, stream.before_opening, stream.due_at = Phase.WANTED, None, 0.0
        if stream.row is None:
            self._look_up(stream)
        self._membership.wake()

    def _miss(self, error: Exception, stream: StreamRecording) -> None:
        """Wait until the broker has the stream again."""
        if stream.row is not None:
            self._membership.release(stream.row)
            if isinstance(error, StreamNotFound) and not stream.was_missing:
                stream.was_missing = True
                self._missing.append(stream.row)
        stream.phase, stream.row, stream.due_at = Phase.SOUGHT, None, 0.0
        if stream.is_there:
            self._found(stream)
        elif not stream.following:
            stream.following = self.follower.follow(stream.name, 0)
        self.seek()

    def _look_up(self, stream: StreamRecording) -> None:
        """Look up a stream's row again."""
        stream.row, stream.is_there = None, False
        if not stream.is_mine or stream.tail is None:
            stream.phase = Phase.SOUGHT
            self.seek()

    # --- seeking ------------------------------------------------------------------------------------------------------

    async def _seek(self) -> float:
        while self._missing:
            await self.loop.ask(note_missing, self._engine, self._missing[0])
            del self._missing[0]
        due, wait_s = _due(stream for stream in self.all() if stream.phase is Phase.SOUGHT and not stream.following)
        if not due:
            return wait_s
        sought = [(each.name, each.super_stream, each.is_there) for each in due]
        try:
            rows, others = await self.loop.ask(self.broker.find, sought)
        except Exception:
            _refuse(due)
            raise
        for stream in due:
            row = rows.get(stream.name)
            if self._by_name.get(stream.name) is not stream:
                continue  # dropped in the meantime
            if stream.name in others:
                self._failed(stream, others[stream.name])
            elif row is None:
                stream.following = self.follower.follow(stream.name, 0)
            elif self.broker.is_not_of(row.broker_id):
                self._put_off(stream)
            else:
                stream.row, stream.phase, stream.due_at = row, Phase.WANTED, 0.0
                self._membership.wake()
        return wait_s

    # --- sharing ------------------------------------------------------------------------------------------------------

    async def _share(self) -> float:
        wanted = {each.row.stream_id for each in self.all() if each.row is not None and each.phase is not Phase.SOUGHT}
        try:
            found = await self._membership.renew(wanted)
        except Exception:
            _refuse(each for each in self.all() if not each.is_mine)
            raise
        for stream in self.all():
            if stream.row is not None and stream.phase is not Phase.SOUGHT:
                self._settle(stream, stream.row.stream_id, found)
        self._give(found.share.surplus)
        return self._membership.due_s

    def _settle(self, stream: StreamRecording, stream_id: int, found: Found) -> None:
        share = found.share
        # Another member may have found that it belongs to another broker.
        is_strange = self.broker.is_not_of(found.broker_ids.get(stream_id))
        if stream_id in share.held and not is_strange:
            if stream.phase is Phase.WANTED:
                stream.is_refused = stream.progress.is_standby = False
                self._reopen(None, stream)
            elif stream.tail is not None and not stream.tail.records_by(found.key_ids, found.with_time.get(stream_id)):
                self.close(stream, partial(self._reopen, None))
            return
        if stream.phase is Phase.OPEN:
            self.close(stream, self._lose)
        elif stream.phase is Phase.HELD:
            self._lose(stream)
        if is_strange or stream_id in share.missing:
            # Replaced, or forgotten.
            self._look_up(stream)
        elif stream_id in share.others and not stream.progress.is_standby:
            stream.is_refused = True
            stream.progress.stand_by()
            self.outages.over(stream.log_name)

    def _give(self, surplus: int) -> None:
        """Release this member's surplus of streams."""
        leaving = sum(stream.after_commit == self._release for stream in self.all())
        for stream in reversed(self.all()):
            if leaving >= surplus:
                return
            if stream.is_read:
                self.close(stream, self._release)
                leaving += 1

    # --- opening ------------------------------------------------------------------------------------------------------

    async def _open(self) -> float:
        due, wait_s = _due(stream for stream in self.all() if stream.phase is Phase.HELD)
        changed = [(stream, stream.before_opening) for stream in due if stream.before_opening is not None]
        try:
            await self._open_all([stream for stream in due if stream.before_opening is None])
        except Exception:
            _refuse(stream for stream in due if stream.phase is Phase.HELD)
            raise
        for stream, before in changed:
            await self._prepare(stream, before)
        return 0.0 if changed else wait_s

    async def _prepare(self, stream: StreamRecording, before: Callable[[], bool | None]) -> None:
        """Call a stream's `before_opening`."""
        try:
            is_another = await self.loop.ask(before) is False
        except Exception as error:  # noqa: BLE001 - said once, and tried again
            if stream.phase is Phase.HELD:
                self._failed(stream, error)
            return
        if stream.phase is Phase.HELD and stream.before_opening is before:
            stream.before_opening = None
            if is_another:
                stream.phase, stream.row, stream.is_there = Phase.SOUGHT, None, True
                self.seek()

    async def _open_all(self, due: Sequence[StreamRecording]) -> None:
        ready = [(stream, stream.row) for stream in due if stream.row is not None]
        if not ready:
            return
        opened = await self.loop.ask(self._opened, [row for _, row in ready])
        self.outages.answered(Server.BROKER, Server.DATABASE)
        for stream, row in ready:
            if stream.phase is not Phase.HELD or stream.row is not row:
                continue
            if stream.name in opened:
                self._follow(stream, opened[stream.name])
            else:
                logger.info("restarting the recording of stream %r: another recorder opened it", stream.name)
                self._put_off(stream)

    def _opened(self, rows: Sequence[StreamRow]) -> dict[str, Opened]:
        # Write nothing if the broker never answered.
        self.follower.reader()
        return {each.stream.name: each for each in open_streams(self._engine, rows)}

    def _follow(self, stream: StreamRecording, opened: Opened) -> None:
        stream.tail, stream.phase = OpenTail(stream, opened), Phase.OPEN
        stream.progress.lost(opened.holes)
        stream.following = self.follower.follow(stream.name, opened.tail.to_offset, known=opened.known)


def _due(streams: Iterable[StreamRecording]) -> tuple[list[StreamRecording], float]:
    """Return the streams that are due now, and the seconds until the next one is due."""
    now, due, next_at = time.monotonic(), list[StreamRecording](), math.inf
    for stream in streams:
        if stream.due_at <= now:
            due.append(stream)
        else:
            next_at = min(next_at, stream.due_at)
    return due, next_at - now


def _refuse(streams: Iterable[StreamRecording]) -> None:
    """Mark streams so that a drain does not wait for them."""
    for stream in streams:
        stream.is_refused = True
