"""The streams of one process: how each is found, shared, opened, followed and left. All in the loop's thread."""

import logging
import math
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Final

import sqlalchemy as sa

from relatum.errors import Conflict, RelatumError, StreamNotFound
from relatum.following import Hole, Replaced, StreamFollower
from relatum.reading import StreamBounds
from relatum.recording._broker import OwnBroker, adopt
from relatum.recording._membership import Found, Membership
from relatum.recording._stream_recording import LOOK_S, OpenTail, Phase, StreamRecording
from relatum.recording._tails import Opened, after_loss, note_missing, open_streams, pass_hole, pass_over
from relatum.store.catalog import StreamRow, ensure_streams, streams_named
from relatum.store.translation import translated_errors
from relatum.waiting import QUESTION_S, ComponentLoop, Duty, Outages, Server, backoff, ended, within

logger = logging.getLogger("relatum.recorder")

LOOK_TIME_S: Final = 2.0
"""Seconds that a look at a stream's ends may take: the other streams wait for theirs."""


class Streams:
    """All streams of a process.

    What has to wait for a server is asked by four duties, of all streams that are due at once: `_seek` finds out which
    names are streams of this broker's, `_share` which of them are this member's, `_open` opens those, and `_look` asks
    where they end.
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
        self.broker = OwnBroker()
        self.loop = loop
        self._engine = engine
        self._vhost = vhost
        self.follower = follower
        self.outages = outages
        self._membership = membership
        self._by_name: dict[str, StreamRecording] = {}
        self._missing: list[StreamRow] = []
        """What is to be written down as missing."""
        self._seeking: Duty | None = None
        self._opening: Duty | None = None

    def begin(self) -> list[Duty]:
        """Begin; gives what goes on until it is cancelled."""
        repeat, outages = self.loop.repeat, self.outages
        self._seeking = repeat(self._seek, "looking up streams", outages)
        self._membership.duty = repeat(self._share, "renewing the leases", outages)
        self._opening = repeat(self._open, "opening streams", outages)
        return [self._seeking, self._membership.duty, self._opening, repeat(self._look, "looking at ends", outages)]

    # --- from any thread ----------------------------------------------------------------------------------------------

    def __contains__(self, name: str) -> bool:
        return name in self._by_name

    def add(self, stream: StreamRecording) -> None:
        """One more, of which `left` tells from now on; it begins with `seek`."""
        self._by_name.setdefault(stream.name, stream)

    def all(self) -> list[StreamRecording]:
        """All of them, as they were added."""
        return list(self._by_name.values())

    # --- what happens to one ------------------------------------------------------------------------------------------

    def seek(self) -> None:
        """Look up what is sought and due."""
        if self._seeking is not None:
            self._seeking.wake()

    def drop(self, name: str) -> None:
        """Forget a name that the broker has said nothing of; a stream's stays."""
        stream = self._by_name.get(name)
        if stream is not None and stream.row is None and stream.phase is Phase.SOUGHT:
            del self._by_name[name]
            self._leave(stream)

    def of(self, stream: str, following: int) -> StreamRecording | None:
        """The stream that a follower's event is about; None where the event is of an earlier following."""
        found = self._by_name.get(stream)
        return found if found is not None and found.following == following else None

    def recorded(self) -> list[tuple[StreamRecording, StreamRow, OpenTail]]:
        """Those that are recorded now."""
        return [
            (stream, stream.row, stream.tail)
            for stream in self.all()
            if stream.is_read and stream.row is not None and stream.tail is not None
        ]

    def attached(self, stream: StreamRecording) -> None:
        """The broker has the stream, and lets this user read it."""
        if stream.phase is Phase.SOUGHT:
            self._found(stream)
        elif stream.then is not None:
            stream.is_there = True
        elif stream.tail is not None:
            start = stream.tail.recorded_to + 1
            if not stream.progress.is_recording:
                stream.progress.begin(start - 1, None, stream.tail.unwritten)
            stream.was_missing = stream.is_refused = False
            extra = {"stream": stream.name, "from": start}
            logger.info("recording stream %r from offset %d on", stream.name, start, extra=extra)

    def _found(self, stream: StreamRecording) -> None:
        stream.is_there = True
        self._leave(stream)
        self.seek()

    def lost(self, stream: StreamRecording, what: Hole | Replaced) -> None:
        """The follower does not go on with a stream as it was."""
        row = stream.row
        if row is None:
            return  # it is looked up anew already
        if isinstance(what, Hole):
            self.close(stream, partial(self._reopen, partial(pass_hole, self._engine, row, what.to_offset)))
        else:
            self.close(stream, partial(self._reopen, partial(self._is_same, row)))

    def pass_over(self, stream: StreamRecording, to_offset: int, reason: str) -> None:
        """What a stream has next cannot be unpacked here: go on behind it."""
        if stream.row is not None:
            before = partial(pass_over, self._engine, stream.row, to_offset, reason)
            self.close(stream, partial(self._reopen, before))

    def gone(self, stream: StreamRecording, error: Exception) -> None:
        """The broker has no such stream, says the error, or it is not to be read: the follower asks until it is."""
        stream.is_refused = True
        self.close(stream, partial(self._miss, error), is_followed=True)

    def close(
        self, stream: StreamRecording, then: Callable[[StreamRecording], None], *, is_followed: bool = False
    ) -> None:
        """Read no more of an open stream, commit what was read, and then go on.

        That another member has the stream comes before whatever else was to come.
        """
        if stream.tail is None or (stream.then is not None and then not in (self._release, self._lose)):
            return
        was_read, stream.then = stream.is_read, then
        if not was_read:
            return
        stream.is_there = False if is_followed else stream.is_there
        if not is_followed:
            self._leave(stream)
        self.committed(stream.tail)

    def committed(self, tail: OpenTail) -> None:
        """Some of what came is committed, or all."""
        if tail.recorded_to >= tail.started_at:
            self.outages.over(tail.stream.who)
        if tail.is_whole and tail.stream.then is not None:
            self.ended(tail, None)

    def ended(self, tail: OpenTail, error: Exception | None) -> None:
        """All that came of a stream is committed, or could not be."""
        stream = tail.stream
        if tail.is_over:
            return
        stream.progress.stop()
        stream.tail = None
        self.let_more_come(tail)
        if tail.recorded_to >= tail.started_at:
            stream.pauses = backoff(QUESTION_S)
        then, stream.then = stream.then, None
        if error is not None and then not in (self._release, self._lose):
            # What was not committed is read again, and with it what came then.
            self._leave(stream)
            stream.phase, stream.before_opening = Phase.HELD, None
            self._failed(stream, error)
        elif then is not None:
            then(stream)

    def let_more_come(self, tail: OpenTail) -> None:
        """What was held, since there was no room for more, is done with."""
        held, tail.held = tail.held, []
        self.follower.done(*held)

    def _leave(self, stream: StreamRecording) -> None:
        if stream.following:
            self.follower.leave(stream.name)
            stream.following = 0

    def _failed(self, stream: StreamRecording, error: Exception) -> None:
        """Seek or open a stream again after a pause, since something went wrong with it."""
        if isinstance(error, Conflict):
            # Nothing is wrong: another process is, or was, at it. What is to be done is seen anew.
            logger.info("recording of stream %r begins anew: %s", stream.name, ended(error))
            stream.before_opening = None
        else:
            self.outages.failed(stream.who, error)
            stream.is_refused = True
        stream.progress.reconnects += 1
        self._put_off(stream)

    def _put_off(self, stream: StreamRecording) -> None:
        stream.due_at = time.monotonic() + next(stream.pauses)
        for duty in (self._seeking, self._opening):
            if duty is not None:
                duty.wake()

    # --- what comes when what was read is committed -------------------------------------------------------------------

    def _reopen(self, before: Callable[[], bool | None] | None, stream: StreamRecording) -> None:
        stream.phase, stream.before_opening, stream.due_at = Phase.HELD, before, 0.0
        if self._opening is not None:
            self._opening.wake()

    def _release(self, stream: StreamRecording) -> None:
        """Let another member have it."""
        self._leave(stream)
        stream.phase = Phase.WANTED
        if stream.row is not None:
            self._membership.release(stream.row)

    def _lose(self, stream: StreamRecording) -> None:
        """Another member has it; or without a row it is replaced, forgotten, or another broker's."""
        self._leave(stream)
        stream.phase, stream.before_opening, stream.due_at = Phase.WANTED, None, 0.0
        if stream.row is None:
            self._look_up(stream)
        self._membership.wake()

    def _miss(self, error: Exception, stream: StreamRecording) -> None:
        """Wait for the broker to have it again."""
        if stream.row is not None:
            self._membership.release(stream.row)
            if isinstance(error, StreamNotFound) and not stream.was_missing:
                stream.was_missing = True
                self._missing.append(stream.row)
        stream.phase, stream.row, stream.due_at = Phase.SOUGHT, None, 0.0
        if stream.is_there:
            self._found(stream)
        elif not stream.following:
            self._ask_broker(stream)
        self.seek()

    def _look_up(self, stream: StreamRecording) -> None:
        """Look for a stream's row anew."""
        stream.row, stream.is_there = None, False
        if not stream.is_mine or stream.tail is None:
            stream.phase = Phase.SOUGHT
            self.seek()

    def _ask_broker(self, stream: StreamRecording) -> None:
        stream.following = self.follower.follow(stream.name, 0)

    # --- seeking ------------------------------------------------------------------------------------------------------

    async def _seek(self) -> float:
        while self._missing:
            await self.loop.ask(note_missing, self._engine, self._missing[0])
            del self._missing[0]
        sought = [stream for stream in self.all() if stream.phase is Phase.SOUGHT and not stream.following]
        due, wait_s = _due(sought)
        try:
            await self._look_for(due)
        except Exception:
            _refuse(due)
            raise
        return wait_s

    async def _look_for(self, due: Sequence[StreamRecording]) -> None:
        if not due:
            return
        rows, others = await self.loop.ask(self._find, [(each.name, each.super_stream, each.is_there) for each in due])
        for stream in self._still(due):
            row = rows.get(stream.name)
            if stream.name in others:
                self._failed(stream, others[stream.name])
            elif row is None:
                self._ask_broker(stream)
            elif self.broker.is_not_of(row.broker_id):
                self._put_off(stream)
            else:
                stream.row, stream.phase, stream.due_at = row, Phase.WANTED, 0.0
                self._membership.wake()

    def _still(self, sought: Iterable[StreamRecording]) -> list[StreamRecording]:
        """Those that are sought still: some may be dropped."""
        return [
            each
            for each in sought
            if each.phase is Phase.SOUGHT and not each.following and self._by_name.get(each.name) is each
        ]

    def _find(
        self, sought: Sequence[tuple[str, str | None, bool]]
    ) -> tuple[dict[str, StreamRow], dict[str, RelatumError]]:
        """The rows of streams, and why some are not this broker's.

        Of those that have no row, one is made where the broker has said that they are there.
        """
        names = [name for name, _, _ in sought]
        with translated_errors(), self._engine.begin() as connection:
            have_one = {row.name for row in streams_named(connection, self._vhost, names, partitions=False)}
            ours = {name: super_stream for name, super_stream, is_there in sought if is_there or name in have_one}
            rows = ensure_streams(connection, self._vhost, ours)
        mine = self.broker.identity.broker_id
        doubted = [row for row in rows if row.broker_id is None or row.broker_id != mine]
        others: dict[str, RelatumError] = {}
        if doubted:
            others = self.whose(doubted)
            with translated_errors(), self._engine.begin() as connection:
                rows = streams_named(connection, self._vhost, list(ours), partitions=False)
        return {row.name: row for row in rows}, others

    def whose(self, rows: Sequence[StreamRow]) -> dict[str, RelatumError]:
        """Which of these streams are another broker's, and which is that. It waits for both servers."""
        reader = self.follower.reader()
        return adopt(self._engine, reader, rows, self.broker.ask(reader))

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
        # Somebody else may have found that it is another broker's.
        is_strange = self.broker.is_not_of(found.broker_ids.get(stream_id))
        if stream_id in share.held and not is_strange:
            if stream.phase is Phase.WANTED:
                stream.is_refused = stream.progress.is_standby = False
                self._reopen(None, stream)
            elif stream.tail is not None and not stream.tail.is_as(found.key_ids, found.with_time.get(stream_id)):
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
            self.outages.over(stream.who)

    def _give(self, surplus: int) -> None:
        """Finish some streams that others should have."""
        leaving = sum(stream.then == self._release for stream in self.all())
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
        """Do what comes before a stream is opened again."""
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
                logger.info("recording of stream %r begins anew: another recorder opened it", stream.name)
                self._put_off(stream)

    def _opened(self, rows: Sequence[StreamRow]) -> dict[str, Opened]:
        # Nothing is written for a broker that never answered.
        self.follower.reader()
        return {each.stream.name: each for each in open_streams(self._engine, rows)}

    def _follow(self, stream: StreamRecording, opened: Opened) -> None:
        stream.tail, stream.phase = OpenTail(stream, opened), Phase.OPEN
        stream.progress.lost(opened.holes)
        stream.following = self.follower.follow(stream.name, opened.tail.to_offset, known=opened.known)

    def _is_same(self, row: StreamRow) -> bool:
        """Cut back what a stream has lost; False where it is another one."""
        self.broker.ask_anew(self.follower.reader())
        return not self.broker.is_not_of(row.broker_id) and after_loss(self._engine, self.follower.reader(), row)

    # --- looks --------------------------------------------------------------------------------------------------------

    async def _look(self) -> float:
        """See where one stream begins and ends now: the lag of those that others record is theirs to tell."""
        looked_at = [
            each
            for each in self.all()
            if each.then is None
            and not each.progress.is_standby
            and not (each.phase is Phase.SOUGHT and each.following)
        ]
        stream = min(looked_at, key=lambda each: each.look_at, default=None)
        if stream is None or stream.look_at > time.monotonic():
            return min(LOOK_S / 2, stream.look_at - time.monotonic()) if stream is not None else LOOK_S / 2
        stream.look_soon()
        tail = stream.tail
        is_known = tail is not None and tail.is_known
        try:
            bounds = await self.loop.ask(self._bounds, stream.name)
        except StreamNotFound:
            stream.progress.show(None)
        except RelatumError as error:
            # The follower says what is away.
            logger.debug("where stream %r ends is not known now: %s", stream.name, ended(error))
        else:
            stream.progress.show(bounds.last)
            if tail is not None and bounds.first is not None:
                tail.first_offset = bounds.first
                if is_known:
                    tail.retained_from = bounds.first
        return 0.0

    def _bounds(self, name: str) -> StreamBounds:
        with within(LOOK_TIME_S):
            return self.follower.reader().bounds(name)


def _due(streams: Iterable[StreamRecording]) -> tuple[list[StreamRecording], float]:
    """Those that are due now, and in how many seconds others are."""
    now, due, next_at = time.monotonic(), list[StreamRecording](), math.inf
    for stream in streams:
        if stream.due_at <= now:
            due.append(stream)
        else:
            next_at = min(next_at, stream.due_at)
    return due, next_at - now


def _refuse(streams: Iterable[StreamRecording]) -> None:
    """Nobody waits for these."""
    for stream in streams:
        stream.is_refused = True
