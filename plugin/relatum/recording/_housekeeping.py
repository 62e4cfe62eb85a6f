"""What a process asks of the database while it records: leases, keys and pruning, for all its streams at once.

One transaction every other second, however many streams there are, and fewer where it only stands by.
"""

import logging
import random
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

import sqlalchemy as sa

from relatum.errors import RelatumError, StreamReplaced
from relatum.keys import KeyDefinition
from relatum.processes import new_holder
from relatum.recording._progress import Progress
from relatum.recording._prune import prune_expired, prune_receipts
from relatum.recording._writer import Writer
from relatum.store import (
    RECORDERS,
    Member,
    Share,
    StreamRow,
    current_stream,
    ensure_stream,
    key_definitions,
    streams,
    translated_errors,
)
from relatum.waiting import Outages, Server, backoff, ended

logger = logging.getLogger("relatum.recorder")

RECEIPTS_S: Final = 60.0
"""Seconds between looks for receipts that nobody waits for any more."""

PRUNE_S: Final = 0.5
"""Seconds of one round spent on deleting rows of dropped messages: the leases are renewed in between."""

_WHO: Final = "renewing the leases"


class Place:
    """One stream's place in the housekeeping of its process."""

    def __init__(self, name: str, super_stream: str | None, progress: Progress, who: str) -> None:
        self.name = name
        self.super_stream = super_stream
        self.progress = progress
        self.who = who
        """By which name its recording is told to be away."""
        self.row: StreamRow | None = None
        self.is_there = False
        """Whether the broker has said that it is a stream, and lets this user read it: only then it gets a row."""
        self.is_new = False
        """Whether the table has no row of it, so that the broker must be asked first."""
        self.is_wanted = False
        self.is_held = False
        self.is_refused = False
        """Whether another process holds the stream, or the database did not answer, the last time it was asked."""
        self.writer: Writer | None = None
        self.pruned_to = 0


class _Found(NamedTuple):
    """What one round learned."""

    rows: dict[str, StreamRow | None]
    share: Share
    definitions: list[KeyDefinition]
    with_time: dict[int, bool]


class Housekeeping:
    """Takes and renews leases, in a thread of its own.

    Args:
        engine: The database.
        vhost: The streams' virtual host.
        holder: By which name; None for one of its own.
        lease_s: How long a lease holds without renewal.
        outages: Where to tell that the database is away.
    """

    def __init__(self, engine: sa.Engine, vhost: str, holder: str | None, lease_s: float, outages: Outages) -> None:
        self._engine = engine
        self._vhost = vhost
        # By a name of its own: what it records it shares with nobody.
        self._member = Member(RECORDERS, new_holder(), lease_s=lease_s, holder=holder)
        self._lease_s = lease_s
        self._outages = outages
        self._changed = threading.Condition()
        self._places: list[Place] = []
        self._given_back: set[int] = set()
        self._is_due = False
        self._is_stopping = False
        self._receipts_at = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="relatum-leases", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def add(self, name: str, super_stream: str | None, progress: Progress, who: str) -> Place:
        """A place for a stream; nothing is asked until it is wanted."""
        place = Place(name, super_stream, progress, who)
        with self._changed:
            self._places.append(place)
        return place

    def held(self) -> list[Place]:
        """The places whose streams this process records."""
        with self._changed:
            return [place for place in self._places if place.is_held and place.row is not None]

    def take(self, place: Place, limit_s: float) -> StreamRow | None:
        """Wait until the stream's lease is ours; None where that took longer, and at the stop.

        And where the broker is to be asked for it first (`is_new`).
        """
        until = time.monotonic() + limit_s
        with self._changed:
            place.is_wanted, place.is_new = True, False
            if not place.is_held:
                self._is_due = True
                self._changed.notify_all()
            while not self._is_stopping:
                if place.is_held and place.row is not None:
                    return place.row
                left = until - time.monotonic()
                if left <= 0 or place.is_new:
                    return None
                self._changed.wait(left)
        return None

    def release(self, place: Place) -> None:
        """Let another process have the stream, soon; `take` asks for it again."""
        with self._changed:
            if place.is_held and place.row is not None:
                self._given_back.add(place.row.stream_id)
                self._is_due = True
                self._changed.notify_all()
            self._drop(place)

    def _drop(self, place: Place) -> None:
        # The row too: what comes next may be a new generation.
        place.is_wanted = place.is_held = place.is_there = False
        place.row = None

    def leave(self) -> None:
        """Let all who wait in `take` go."""
        with self._changed:
            self._is_stopping = True
            self._changed.notify_all()

    def stop(self) -> None:
        """Give all leases back and end the thread."""
        self.leave()
        self._thread.join()
        ids = {place.row.stream_id for place in self._places if place.is_held and place.row is not None}
        ids |= self._given_back
        try:
            if ids:
                with translated_errors(), self._engine.begin() as connection:
                    self._member.release(connection, ids)
                    self._member.leave(connection)
        except RelatumError as error:
            # The leases run out by themselves.
            logger.info("leases not given back: %s", ended(error))

    # --- the thread ---------------------------------------------------------------------------------------

    def _run(self) -> None:
        renewal_s = self._member.renewal_s
        failures, looks = backoff(), self._looks()
        pause_s = 0.0
        while self._wait(pause_s):
            try:
                with self._outages.asking(Server.DATABASE):
                    is_idle = self._round()
                self._prune()
            except Exception as error:  # noqa: BLE001 - said once, and tried again
                self._outages.failed(_WHO, error)
                self._refuse()
                pause_s = next(failures)
                continue
            self._outages.over(_WHO)
            failures = backoff()
            if is_idle:
                pause_s = next(looks)
            else:
                pause_s, looks = renewal_s, self._looks()

    def _wait(self, pause_s: float) -> bool:
        """Wait for the next round, or until somebody asks for one; False at the stop."""
        until = time.monotonic() + pause_s
        with self._changed:
            while not self._is_stopping:
                left = until - time.monotonic()
                is_asked = any(place.is_wanted for place in self._places) or self._given_back
                if self._is_due or (left <= 0 and is_asked):
                    self._is_due = False
                    return True
                self._changed.wait(max(0.01, left) if is_asked else None)
        return False

    def _refuse(self) -> None:
        with self._changed:
            for place in self._places:
                place.is_refused = not place.is_held

    def _round(self) -> bool:
        """Ask for everything at once; True where this process holds nothing."""
        with self._changed:
            wanted = [place for place in self._places if place.is_wanted]
            returned = set(self._given_back)
        found = self._ask(wanted, returned)
        lost: list[Writer] = []
        with self._changed:
            stood_by = {place.name for place in wanted if place.progress.is_standby}
            self._given_back -= returned
            for place in wanted:
                writer = self._settle(place, found)
                if writer is not None:
                    lost.append(writer)
            self._changed.notify_all()
            is_idle = not any(place.is_held for place in self._places)
            writers = [(place, place.writer) for place in wanted if place.is_held and place.writer is not None]
            standing_by = [place for place in wanted if place.progress.is_standby]
        for writer in lost:
            name = writer.stream
            writer.end(StreamReplaced(f"stream {name!r} is recorded by another process now", stream=name))
        for place in standing_by:
            self._outages.over(place.who)
            row = found.rows[place.name]
            if row is not None and place.name not in stood_by:
                holder = found.share.others.get(row.stream_id)
                extra = {"stream": place.name, "holder": holder}
                logger.info("standing by: %s records stream %r", holder, place.name, extra=extra)
        key_ids = [key.key_id for key in found.definitions]
        for place, writer in writers:
            if place.row is not None:
                writer.check_same(key_ids, found.with_time.get(place.row.stream_id))
        return is_idle

    def _ask(self, wanted: Iterable[Place], returned: set[int]) -> _Found:
        with translated_errors(), self._engine.begin() as connection:
            if returned:
                self._member.release(connection, returned)
            # In one order, so that two processes that see the same streams first do not wait for each other.
            rows = {
                place.name: place.row or self._row_of(connection, place)
                for place in sorted(wanted, key=lambda place: place.name)
            }
            ids = {row.stream_id for row in rows.values() if row is not None}
            share = self._member.beat(connection, ids)
            if not share.held:
                return _Found(rows, share, [], {})
            current = sa.select(streams.c.stream_id, streams.c.record_time).where(
                streams.c.stream_id == sa.any_(sa.literal(sorted(share.held), sa.ARRAY(sa.Integer)))
            )
            with_time = {row.stream_id: row.record_time for row in connection.execute(current)}
            return _Found(rows, share, key_definitions(connection), with_time)

    def _row_of(self, connection: sa.Connection, place: Place) -> StreamRow | None:
        """The stream's row; None where it has none, and the broker has not said yet that there is such a stream."""
        found = current_stream(connection, self._vhost, place.name)
        if found is None and not place.is_there:
            return None
        if found is None or place.super_stream not in (None, found.super_stream):
            return ensure_stream(connection, self._vhost, place.name, place.super_stream)
        return found

    def _settle(self, place: Place, found: _Found) -> Writer | None:
        """Say what a round found to a place; gives the writer that must end, where the stream is another's now."""
        row = found.rows[place.name]
        if not place.is_wanted:
            # Given back meanwhile: the next round says so to the database, should this one have taken it.
            if row is not None and row.stream_id in found.share.held:
                self._given_back.add(row.stream_id)
                self._is_due = True
            return None
        row = place.row or row
        if row is None:
            place.is_new = True
            return None
        if row.stream_id in found.share.held:
            place.row, place.is_held, place.is_refused = row, True, False
            place.progress.is_standby = False
            return None
        was_held, place.is_held, place.is_refused = place.is_held, False, True
        if not was_held and row.stream_id in found.share.others:
            place.progress.stand_by()
        if not was_held and row.stream_id in found.share.missing:
            place.row = None  # Replaced before it was ours.
        return place.writer if was_held else None

    # --- pruning ------------------------------------------------------------------------------------------

    def _prune(self) -> None:
        """Delete some rows of messages that retention has dropped, and old receipts."""
        until = time.monotonic() + PRUNE_S
        for place in self.held():
            writer, row = place.writer, place.row
            while writer is not None and row is not None and writer.first_offset > place.pruned_to:
                first = writer.first_offset
                if prune_expired(self._engine, row, first) == 0:
                    place.pruned_to = first
                if time.monotonic() >= until:
                    return
        if time.monotonic() - self._receipts_at >= RECEIPTS_S and self.held():
            self._receipts_at = time.monotonic()
            prune_receipts(self._engine)

    def _looks(self) -> Iterator[float]:
        """The pauses of one that stands by, in seconds: nearly the length of a lease, a part of it by chance."""
        pause_s = self._member.renewal_s
        while True:
            yield pause_s * (0.7 + 0.3 * random.random())  # noqa: S311 - spreads the looks of many, nothing secret
            pause_s = min(1.5 * pause_s, 0.9 * self._lease_s)
