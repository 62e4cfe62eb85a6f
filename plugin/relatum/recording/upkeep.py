"""A recorder's background tasks: renewing its lease, querying ends, closing gaps, and maintaining the table.

Gaps come from interrupted back-fills, and from batches that could not be unpacked when they were read. Offsets that
release 0.4 recorded over AMQP 0.9.1 are recorded again with the stream protocol.
"""

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Final, NamedTuple

import sqlalchemy as sa

from relatum.common.waiting import QUESTION_S, RepeatedTask, Server, Threads, backoff, ended, within
from relatum.errors import (
    BrokerUnavailable,
    CoverageConflict,
    DatabaseUnavailable,
    RelatumError,
    StreamNotFound,
    StreamUnavailable,
    Transient,
)
from relatum.reading import StreamBounds
from relatum.reading.following import BrokerReach, Replaced
from relatum.recording.filler import TURN_S, Filler
from relatum.recording.own_broker import check_broker
from relatum.recording.pruning import prune_expired, prune_receipts
from relatum.recording.ranges import gaps
from relatum.recording.stream_recording import OpenTail, StreamRecording
from relatum.store.catalog import StreamRow, key_definitions, present_streams
from relatum.store.coverage import Range, coverage_by_stream
from relatum.store.database import sql, transaction
from relatum.store.members import Member, Share
from relatum.store.parts import (
    PART_BYTES,
    advance_parts,
    close_parts,
    drop_parts,
    empty_parts,
    retain_from,
    table_parts_of,
)

if TYPE_CHECKING:
    from relatum.recording.recorder_group import RecorderGroup

logger = logging.getLogger("relatum.recorder")

# --- the lease and the share ------------------------------------------------------------------------------------------

_RELEASE_HOLDER: Final = sql("UPDATE relatum.streams SET lease_holder = NULL WHERE lease_holder = :holder::text")


class Renewal(NamedTuple):
    """The result of a renewal: the share, the keys in force, and the rows that still belong to the wanted streams."""

    share: Share
    key_ids: tuple[int, ...]
    rows: Mapping[int, StreamRow]


class Membership:
    """A recorder's membership in the group that shares its streams: lease, share, and whether it reaches the broker.

    A renewal, every third of a lease, is one transaction of a few statements for any number of streams. Renewals have
    a thread and, of three or more connections, one that no other work uses.
    """

    def __init__(self, group: "RecorderGroup", engine: sa.Engine, member: Member) -> None:
        self._group = group
        self._loop = group.loop
        self._threads = Threads(1, "relatum-recorder-lease")
        self._engine = engine
        self._member = member
        self._reach = BrokerReach(group.follower, group.outages, lambda: group.streams()[0].name)
        self._released: set[int] = set()
        self._has_joined = False
        self._logged: tuple[int, int] | None = None
        self._duty: RepeatedTask | None = None

    def begin(self) -> None:
        """Start renewing the lease."""
        self._duty = self._group.repeat(self._renew, "renewing the leases")

    def wake(self) -> None:
        """Renew immediately."""
        if self._duty is not None:
            self._duty.wake()

    def release(self, row: StreamRow) -> None:
        """Release a stream to other members, in a renewal that starts immediately."""
        self._released.add(row.stream_id)
        self.wake()

    async def _renew(self) -> float:
        """Renew the lease; start the streams that this member holds now, and stop the others."""
        begun_at = time.monotonic()
        self._reach.look()
        wanted = {row.stream_id: (row.vhost, row.name) for each in self._group.streams() if (row := each.row)}
        released, self._released = self._released, set()
        try:
            with self._group.outages.asking(Server.DATABASE):
                found = await self._loop.ask(self._renew_lease, wanted, released, threads=self._threads)
        except BaseException:
            self._released |= released
            for stream in self._group.streams():
                stream.is_refused = stream.is_refused or not stream.is_held
            raise
        self._has_joined = True
        if self._reach.may_take or self._reach.is_cut_off:
            self._log(found.share)
        for stream in self._group.streams():
            if stream.row is not None and stream.row.stream_id in wanted:
                self._apply(stream, stream.row.stream_id, found)
        self._release_surplus(found.share.surplus)
        return max(0.0, begun_at + self._member.renewal_s - time.monotonic())

    def _apply(self, stream: StreamRecording, stream_id: int, found: Renewal) -> None:
        share, row = found.share, found.rows.get(stream_id)
        # After a failover that lost commits, two streams may have one id until the first is looked up again.
        is_other = row is not None and (row.name != stream.name or self._group.broker.is_other(row.broker_id))
        if row is None or is_other or stream_id in share.missing:
            stream.give_up()
            stream.drop_row()
        elif stream_id in share.held and stream_id not in self._released:
            stream.take()
            tail = stream.tail
            if tail is not None and (tail.row.key_ids, tail.row.with_time) != (found.key_ids, row.record_time):
                stream.close()
        else:
            # The next renewal releases the streams that were released during this one.
            stream.give_up()
            if stream_id in share.others:
                stream.stand_by()

    def _release_surplus(self, surplus: int) -> None:
        surplus -= sum(stream.tail is not None and not stream.is_held for stream in self._group.streams())
        read = [stream for stream in reversed(self._group.streams()) if stream.is_read]
        for stream in read[: max(0, surplus)]:
            stream.give_up()

    def _renew_lease(self, wanted: Mapping[int, tuple[str, str]], released: Collection[int]) -> Renewal:
        with transaction(self._engine) as connection:
            if not self._has_joined:
                # A killed member with the same holder name may have held other streams.
                connection.execute(_RELEASE_HOLDER, {"holder": self._member.holder})
            self._member.release(connection, released)
            # A standby that was promoted without the last commits may have assigned a row's id to another stream.
            found = present_streams(connection, wanted).items()
            rows = {stream_id: row for stream_id, row in found if (row.vhost, row.name) == wanted[stream_id]}
            # While it is cut off, this member keeps following streams that no other member takes.
            share = self._member.beat(connection, rows, takes=self._reach.may_take, leased=not self._reach.is_cut_off)
            key_ids = tuple(key.key_id for key in key_definitions(connection))
            return Renewal(share, key_ids, rows)

    def _log(self, share: Share) -> None:
        """Log the numbers of streams that this and other members record, if they changed: they explain idle members."""
        now = (len(share.held), len(share.others))
        if now == self._logged or (self._logged is None and not share.others):
            return
        self._logged = now
        holders = ", ".join(sorted(set(share.others.values()))[:3])
        extra = {"held": now[0], "others": now[1]}
        if not share.held and share.others:
            logger.info("standing by: all %d streams are recorded by %s", now[1], holders, extra=extra)
        elif share.others:
            logger.info("recording %d streams; %d are recorded by %s", now[0], now[1], holders, extra=extra)
        else:
            logger.info("recording all %d streams", now[0], extra=extra)

    async def leave(self) -> None:
        """Release all streams and end the membership."""
        try:
            await self._loop.ask(self._leave, threads=self._threads)
        except Exception as error:  # noqa: BLE001 - the lease expires by itself
            logger.info("other recorders get the streams only when the lease expires: %s", ended(error))
        self._threads.shutdown()

    def _leave(self) -> None:
        with transaction(self._engine) as connection:
            self._member.leave(connection)


# --- ends, gaps and the table -----------------------------------------------------------------------------------------

ENDS_S: Final = 30.0
"""Seconds between two queries of a stream's ends: for metrics, and to prune what retention dropped."""

ENDS_QUERY_S: Final = 2.0
"""Maximum seconds of a query of one stream's ends: the queries of other streams wait for it."""

GAP_UNCHANGED_S: Final = 5.0
"""Seconds for which a gap must be unchanged before it is closed: a running back-fill changes it all the time."""

PRUNE_PAUSE_S: Final = 2.0
"""Seconds between two rounds of deleting rows of messages that retention dropped."""

PRUNE_ROUND_S: Final = 0.5
"""Maximum seconds of one such round."""

MAINTAIN_S: Final = 60.0
"""Seconds between two checks of closed parts and old receipts. A check that has to wait delays lookups by 50 ms."""


class Upkeep:
    """Three background tasks; each makes one blocking call at a time, in a thread."""

    def __init__(self, group: "RecorderGroup") -> None:
        self._group = group
        self._loop = group.loop
        self._engine = group.engine
        self._stop = group.stopping
        self._pauses = backoff(QUESTION_S)
        self._seen: dict[tuple[int, Range], float] = {}
        self._turn_at = self._check_at = 0.0
        self._query_count = 0

    def begin(self) -> None:
        """Start the tasks."""
        self._group.repeat(self._query_ends, "asking for the ends of streams")
        self._group.repeat(self._close_gaps, "closing of gaps")
        self._group.repeat(self._maintain, "maintaining the table")

    async def _close_gaps(self) -> float:
        recorded = self._group.open_tails()
        has_work = await self._loop.ask(self._close_unchanged, recorded) if recorded else False
        if has_work:
            self._pauses = backoff(QUESTION_S)
        return next(self._pauses)

    # --- the table ----------------------------------------------------------------------------------------------------

    async def _maintain(self) -> float:
        if recorded := self._group.open_tails():
            await self._loop.ask(self._maintain_table, recorded)
        return min(PRUNE_PAUSE_S, TURN_S)

    def _maintain_table(self, recorded: Sequence[OpenTail]) -> None:
        """Maintain the table's parts, and delete old rows. Every recorder does this. See docs/adr/0023."""
        now = time.monotonic()
        if now >= self._turn_at:
            # Open the next part ahead of time.
            self._turn_at = now + TURN_S
            found = advance_parts(self._engine, PART_BYTES)
            if now >= self._check_at:
                self._check_at = now + MAINTAIN_S
                close_parts(self._engine, found)
                empty_parts(self._engine)
                if rows := sum(drop_parts(self._engine).values()):
                    logger.info("dropped %d rows of messages that are no longer retained", rows, extra={"rows": rows})
                until = time.monotonic() + PRUNE_ROUND_S
                for _ in prune_receipts(self._engine):
                    if time.monotonic() >= until:
                        break
        # Without a recorded message, the stream could be another one of the same name.
        firsts = {tail: tail.first_offset for tail in recorded if tail.is_known}
        if firsts_to_prune := {tail: first for tail, first in firsts.items() if first > tail.stream.pruned_to}:
            self._prune(firsts_to_prune)

    def _prune(self, firsts: Mapping[OpenTail, int]) -> None:
        """Delete some rows of messages that retention dropped, in parts that are still written."""
        until = time.monotonic() + PRUNE_ROUND_S
        with transaction(self._engine) as connection:
            retain_from(connection, {tail.row.stream_id: first for tail, first in firsts.items()})
            parts = [part.part for part in table_parts_of(connection) if part.is_opened and not part.is_closed]
        for tail, first in firsts.items():
            for _ in prune_expired(self._engine, tail.opened.stream, parts=parts):
                if time.monotonic() >= until:
                    return
            tail.stream.pruned_to = first

    # --- ends ---------------------------------------------------------------------------------------------------------

    async def _query_ends(self) -> float:
        """Query the ends of the next stream that no other process records."""
        candidates = [
            each
            for each in self._group.streams()
            if not each.progress.is_standby
            and not (each.tail is not None and each.tail.is_closing)
            and not (each.row is None and each.following)
        ]
        self._query_count += 1
        if not candidates or self._query_count == 1:
            # Not at the start, when the broker has many other queries to answer.
            return ENDS_S / 2
        stream = candidates[self._query_count % len(candidates)]
        tail = stream.tail
        is_known = tail is not None and tail.is_known
        try:
            bounds = await self._loop.ask(self._bounds, stream.name, tail)
        except StreamNotFound:
            stream.progress.show(None)
        except RelatumError as error:
            # The follower reports outages.
            logger.debug("the end of stream %r is unknown now: %s", stream.name, ended(error))
        else:
            stream.progress.show(bounds.last)
            # A replica may have dropped messages that the leader retains.
            if tail is None or bounds.first is None or bounds.last is None or not bounds.is_proven:
                pass
            elif is_known:
                tail.first_offset = bounds.first
            elif tail is stream.tail and not tail.is_known and bounds.last < tail.recorded_to:
                # The follower waits for the tail's offset, and has no message to compare.
                stream.on_event(Replaced(stream.name, stream.following))
        return ENDS_S / len(candidates)

    def _bounds(self, name: str, tail: OpenTail | None) -> StreamBounds:
        with within(ENDS_QUERY_S):
            reader = self._group.follower.reader
            bounds = reader.bounds(name)
            if tail is not None and (bounds.first or 0) > tail.first_offset:
                # Another broker may have this address now: its first offset must not prune this stream.
                try:
                    check_broker(self._engine, reader, tail.opened.stream)
                except Transient:
                    return StreamBounds(*bounds)  # Not proven.
            return bounds

    # --- gaps ---------------------------------------------------------------------------------------------------------

    def _close_unchanged(self, recorded: Sequence[OpenTail]) -> bool:
        """Close gaps that were unchanged for long enough; return True if some were closed, or can be closed soon."""
        with transaction(self._engine) as connection:
            definitions = key_definitions(connection)
            stream_ids = [tail.row.stream_id for tail in recorded]
            ranges = coverage_by_stream(connection, stream_ids)
            # After the ranges: another process that prunes them stores this first.
            present = present_streams(connection, stream_ids)
        now, seen = time.monotonic(), self._seen
        self._seen = {}
        has_work = False
        failed: Exception | None = None
        for tail in recorded:
            row = tail.opened.stream
            first = max(tail.first_offset, present.get(row.stream_id, row).first_offset or 0)
            found = gaps(ranges[row.stream_id], first)
            self._seen |= {(row.stream_id, gap): seen.get((row.stream_id, gap), now) for gap in found}
            closable = [gap for gap in found if now - self._seen[row.stream_id, gap] >= GAP_UNCHANGED_S]
            has_work |= len(closable) < len(found)
            over_amqp = [
                (each.from_offset, each.to_offset)
                for each in ranges[row.stream_id]
                if each.over_amqp and not each.is_tail and each.to_offset > max(first, each.from_offset)
            ]
            if self._stop.is_set() or not (closable or over_amqp):
                continue
            filler = Filler(self._engine, self._group.follower.reader, row, definitions, stop=self._stop)
            try:
                for record, parts in ((filler.fill, closable), (filler.record_again, over_amqp)):
                    for part in parts:
                        has_work |= self._record_offsets(row, record, part)
            except Exception as error:
                is_of_stream = isinstance(error, StreamUnavailable)
                if isinstance(error, BrokerUnavailable | DatabaseUnavailable) and not is_of_stream:
                    raise
                failed = error  # An error of one stream stops no other.
            finally:
                tail.stream.progress.lost(filler.lost_offsets)
        if failed is not None:
            raise failed
        return has_work

    def _record_offsets(self, row: StreamRow, fill: Callable[[Range], bool], part: Range) -> bool:
        """Record some offsets; return False if this is not possible now."""
        if self._stop.is_set():
            return False
        extra = {"stream": row.name, "from": part[0], "to": part[1]}
        logger.info("recording remaining offsets %d to %d of stream %r", part[0], part[1] - 1, row.name, extra=extra)
        with suppress(CoverageConflict, StreamNotFound):
            # Another process records the offsets, or the stream was replaced, which the follower detects.
            return fill(part)
        return False
