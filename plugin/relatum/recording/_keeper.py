"""What a member asks of the database while it records: its lease, its share, the keys in force, and pruning.

A transaction of a few statements for each third of a lease, however many streams there are.
"""

import logging
import time
from collections.abc import Sequence
from typing import Final, NamedTuple
from uuid import UUID

import sqlalchemy as sa

from relatum.errors import RelatumError
from relatum.following import Follower, Reach
from relatum.recording._broker import OwnBroker
from relatum.recording._opener import Opener
from relatum.recording._prune import prune_expired, prune_receipts
from relatum.recording._track import State, Then, Track, Tracks, Worker
from relatum.store.catalog import StreamRow, ensure_streams, key_definitions, streams_named
from relatum.store.database import sql
from relatum.store.members import Member, Share
from relatum.store.parts import retain_from, table_parts_of
from relatum.store.translation import translated_errors
from relatum.waiting import Outages, Server, backoff, ended

logger = logging.getLogger("relatum.recorder")

RECEIPTS_S: Final = 60.0
"""Seconds between looks for receipts that nobody waits for any more."""

PRUNE_S: Final = 0.5
"""Seconds of one round spent on deleting rows of dropped messages: the lease is renewed in between."""

_WHO: Final = "renewing the leases"

_LET_GO: Final = sql("UPDATE relatum.streams SET lease_holder = NULL WHERE lease_holder = :holder::text")

_HELD: Final = sql("""
    SELECT stream_id, record_time, broker_id FROM relatum.streams WHERE stream_id = ANY (:stream_ids::integer[])""")


class _Found(NamedTuple):
    """What one round learned."""

    rows: dict[str, StreamRow]
    share: Share
    key_ids: list[int]
    with_time: dict[int, bool]
    broker_ids: dict[int, UUID | None]


class Keeper(Worker):
    """Keeps this member's lease and its share of the streams, in a thread of its own."""

    def __init__(
        self,
        engine: sa.Engine,
        vhost: str,
        member: Member,
        tracks: Tracks,
        follower: Follower,
        opener: Opener,
        outages: Outages,
        broker: OwnBroker,
    ) -> None:
        super().__init__("relatum-keeper")
        self._broker = broker
        self._engine = engine
        self._vhost = vhost
        self._member = member
        self._tracks = tracks
        self._opener = opener
        self._outages = outages
        self._released: set[int] = set()
        self._is_due = self._is_stopping = self._has_joined = False
        self._told: tuple[int, int] | None = None
        self._receipts_at = time.monotonic()
        self._reach = Reach(follower, outages, lambda: tracks.all()[0].name)

    def release(self, track: Track) -> None:
        """Let another member have a stream, soon; the lock is held."""
        if track.row is not None:
            self._released.add(track.row.stream_id)
        self.wake()

    def wake(self) -> None:
        """Look at once; the lock is held."""
        self._is_due = True
        self._tracks.changed.notify_all()

    def leave(self) -> None:
        """Let the thread end."""
        with self._tracks.changed:
            self._is_stopping = True
            self._tracks.changed.notify_all()

    def stop(self, until: float) -> None:
        """End the thread, which has until then by the monotonic clock, and let others have all."""
        self.leave()
        self.join(max(0.0, until - time.monotonic()))
        self._reach.close()
        try:
            with translated_errors(), self._engine.begin() as connection:
                self._member.leave(connection)
        except RelatumError as error:
            # The lease runs out by itself.
            logger.info("streams not given back: %s", ended(error))

    # --- the thread -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        failures, pause_s = backoff(), 0.0
        while self._wait(pause_s):
            try:
                self._reach.look()
                with self._outages.asking(Server.DATABASE):
                    self._round()
                self._prune()
            except Exception as error:  # noqa: BLE001 - said once, and tried again
                if self._is_stopping:
                    return
                self._outages.failed(_WHO, error)
                self._refuse()
                pause_s = next(failures)
                continue
            self._outages.over(_WHO)
            failures, pause_s = backoff(), self._member.renewal_s

    def _wait(self, pause_s: float) -> bool:
        """Wait for the next round, or until somebody asks for one; False at the stop."""
        until = time.monotonic() + pause_s
        with self._tracks.changed:
            while not self._is_stopping:
                left = until - time.monotonic()
                if self._is_due or left <= 0:
                    self._is_due = False
                    return True
                self._tracks.changed.wait(left)
        return False

    def _refuse(self) -> None:
        with self._tracks.changed:
            for track in self._tracks.all():
                track.is_refused = track.is_refused or not track.is_mine

    def _round(self) -> None:
        with self._tracks.changed:
            new = [track for track in self._tracks.all() if track.state is State.NEW]
            ids = {track.row.stream_id for track in self._tracks.all() if track.row is not None and _is_shared(track)}
            released, self._released = self._released, set()
        try:
            found = self._ask(new, ids, released)
            self._has_joined = True
        except BaseException:
            with self._tracks.changed:
                self._released |= released
            raise
        with self._tracks.changed:
            for track in new:
                self._settle_new(track, found.rows.get(track.name))
            for track in self._tracks.all():
                if track.row is not None and _is_shared(track):
                    self._settle(track, track.row.stream_id, found)
            self._give_surplus(found.share.surplus)
        if not self._reach.is_returning:
            self._tell(found.share)

    def _ask(self, new: Sequence[Track], ids: set[int], released: set[int]) -> _Found:
        with translated_errors(), self._engine.begin() as connection:
            rows = {}
            if new:
                rows = {row.name: row for row in self._rows_of(connection, new)}
            if not self._has_joined:
                # One of the same name may have recorded others, and been killed.
                connection.execute(_LET_GO, {"holder": self._member.holder})
            self._member.release(connection, released)
            if self._reach.is_cut_off or self._reach.is_returning:
                # What nobody takes is followed on.
                share = self._member.hold_on(connection, ids, leased=self._reach.is_returning)
            else:
                mine = {track.name for track in new if self._is_ours(track, rows.get(track.name))}
                share = self._member.beat(connection, ids | {rows[name].stream_id for name in mine})
            if not share.held:
                return _Found(rows, share, [], {}, {})
            held = connection.execute(_HELD, {"stream_ids": sorted(share.held)}).all()
            with_time = {row.stream_id: row.record_time for row in held}
            key_ids = [key.key_id for key in key_definitions(connection)]
            return _Found(rows, share, key_ids, with_time, {row.stream_id: row.broker_id for row in held})

    def _is_ours(self, track: Track, row: StreamRow | None) -> bool:
        """Whether a stream may be recorded: it was seen to be this broker's, and nobody has said otherwise since."""
        if row is None or self._broker.is_not_of(row.broker_id):
            return False
        return track.is_ours or (row.broker_id is not None and row.broker_id == self._broker.identity.broker_id)

    def _rows_of(self, connection: sa.Connection, new: Sequence[Track]) -> list[StreamRow]:
        """The rows of new streams; of those that have none, one is made where the broker has said that they are."""
        found = streams_named(connection, self._vhost, [track.name for track in new], partitions=False)
        have_one = {row.name for row in found}
        ours = {track.name: track.super_stream for track in new if track.is_there or track.name in have_one}
        return ensure_streams(connection, self._vhost, ours)

    def _settle_new(self, track: Track, row: StreamRow | None) -> None:
        if track.state is not State.NEW:
            return
        track.row = row
        if row is None:
            self._tracks.ask(track)
        elif self._is_ours(track, row):
            track.state = State.WANTED
        else:
            track.state, track.is_ours = State.DOUBTED, False
            self._opener.submit(track)

    def _settle(self, track: Track, stream_id: int, found: _Found) -> None:
        share = found.share
        if self._broker.is_not_of(found.broker_ids.get(stream_id)):
            # Somebody else has found that it is not.
            if track.is_mine:
                self._tracks.close(track, Then.LOST)
            self._forget_row(track)
            return
        if stream_id in share.held:
            if track.state is State.WANTED:
                track.state, track.is_refused, track.progress.is_standby = State.HELD, False, False
                self._opener.submit(track)
            elif track.writer is not None and not track.writer.is_as(found.key_ids, found.with_time.get(stream_id)):
                self._tracks.close(track, Then.OPEN)
            return
        if track.is_mine:
            self._tracks.close(track, Then.LOST)
        if stream_id in share.missing:
            # Replaced, or forgotten.
            self._forget_row(track)
        elif stream_id in share.others and not track.progress.is_standby:
            track.is_refused = True
            track.progress.stand_by()
            self._outages.over(track.who)

    def _forget_row(self, track: Track) -> None:
        """Look for a stream's row anew."""
        track.row, track.is_there, track.is_ours = None, False, False
        if track.state is State.WANTED:
            track.state = State.NEW
            self._is_due = True

    def _give_surplus(self, surplus: int) -> None:
        """Finish some streams that others should have."""
        leaving = sum(track.state is State.CLOSING and track.after is Then.RELEASE for track in self._tracks.all())
        for track in reversed(self._tracks.all()):
            if leaving >= surplus:
                return
            if track.state is State.OPEN:
                self._tracks.close(track, Then.RELEASE)
                leaving += 1

    def _tell(self, share: Share) -> None:
        """Say how many streams others record, when that changes: who looks at a silent log knows why."""
        now = (len(share.held), len(share.others))
        if now == self._told or (self._told is None and not share.others):
            return
        self._told = now
        holders = ", ".join(sorted(set(share.others.values()))[:3])
        extra = {"held": now[0], "others": now[1]}
        if not share.held and share.others:
            logger.info("standing by: all %d streams are recorded by %s", now[1], holders, extra=extra)
        elif share.others:
            logger.info("recording %d streams; %d are recorded by %s", now[0], now[1], holders, extra=extra)
        else:
            logger.info("recording all %d streams", now[0], extra=extra)

    # --- pruning --------------------------------------------------------------------------------------------------

    def _prune(self) -> None:
        """Delete some rows of messages that retention has dropped, and old receipts."""
        until = time.monotonic() + PRUNE_S
        recorded = self._tracks.recorded()
        due = [(track, row, writer.retained_from) for track, row, writer in recorded]
        due = [(track, row, first) for track, row, first in due if first > track.pruned_to]
        parts = self._retain(due) if due else []
        for track, row, first in due:
            while prune_expired(self._engine, row, first, parts=parts):
                if time.monotonic() >= until:
                    return
            track.pruned_to = first
            if time.monotonic() >= until:
                return
        if time.monotonic() - self._receipts_at >= RECEIPTS_S and recorded:
            self._receipts_at = time.monotonic()
            prune_receipts(self._engine)

    def _retain(self, due: Sequence[tuple[Track, StreamRow, int]]) -> list[int]:
        """Say what is retained, by which closed parts are dropped whole; gives the parts that are not closed."""
        with translated_errors(), self._engine.begin() as connection:
            retain_from(connection, {row.stream_id: first for _, row, first in due})
            return [part.part for part in table_parts_of(connection) if part.is_opened and not part.is_closed]


def _is_shared(track: Track) -> bool:
    """Whether a member wants its share of it: not before the broker has said that it can be read, and is its own."""
    return track.state not in (State.NEW, State.DOUBTED, State.ASKED)
