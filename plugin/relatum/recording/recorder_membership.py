"""A recorder's membership among those that share streams: its lease, its share, and whether it reaches the broker.

A renewal, every third of a lease, is one transaction of a few statements for any number of streams. It has its own
thread, and its own connection if there are enough.
"""

import asyncio
import logging
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import sqlalchemy as sa

from relatum.following import BrokerReach
from relatum.recording.stream_recording import StreamRecording
from relatum.store.catalog import StreamRow, key_definitions
from relatum.store.database import sql, transaction
from relatum.store.members import Member, Share
from relatum.waiting import Duty, Server, Threads, ended

if TYPE_CHECKING:
    from relatum.recording.recorder_group import RecorderGroup

logger = logging.getLogger("relatum.recorder")

_LET_GO: Final = sql("UPDATE relatum.streams SET lease_holder = NULL WHERE lease_holder = :holder::text")

_HELD: Final = sql("""
    SELECT stream_id, record_time, broker_id FROM relatum.streams WHERE stream_id = ANY (:stream_ids::integer[])""")


class Found(NamedTuple):
    """The result of a renewal: the share, the keys in force, and columns of the streams that this member holds."""

    share: Share
    key_ids: list[int]
    held: Mapping[int, Any]


class Membership:
    """The lease and the share. Runs in the loop; its queries run in a thread.

    `engine` has its own connection if there are enough.
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
        self._begun_at = time.monotonic()
        self._has_ended = asyncio.Event()
        self.duty: Duty | None = None

    def begin(self) -> None:
        """Start renewing the lease."""
        self.duty = self._group.repeat(self._renew, "renewing the leases")

    def wake(self) -> None:
        """Renew at once."""
        if self.duty is not None:
            self.duty.wake()

    def release(self, row: StreamRow) -> None:
        """Release a stream to other members: renew at once, and release it then."""
        self._released.add(row.stream_id)
        self.wake()

    async def in_time(self) -> None:
        """Renew first if a renewal is overdue: the process was suspended, and others may take its streams."""
        if time.monotonic() - self._begun_at > 2 * self._member.renewal_s and self.duty is not None:
            self._has_ended.clear()
            self.duty.wake()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._has_ended.wait(), self._member.renewal_s)

    async def _renew(self) -> float:
        """Renew the lease, and tell each stream whether this member holds it now."""
        self._begun_at = time.monotonic()
        self._reach.look()
        wanted = {each.row.stream_id for each in self._group.streams() if each.row is not None}
        released, self._released = self._released, set()
        try:
            with self._group.outages.asking(Server.DATABASE):
                found = await self._loop.ask(self._ask, wanted, released, threads=self._threads)
        except BaseException:
            self._released |= released
            for stream in self._group.streams():
                stream.is_refused = stream.is_refused or not stream.is_mine
            raise
        finally:
            self._has_ended.set()
        self._has_joined = True
        if self._reach.may_take or self._reach.is_cut_off:
            self._log(found.share)
        for stream in self._group.streams():
            if stream.row is not None:
                self._settle(stream, stream.row.stream_id, found)
        self._give(found.share.surplus)
        return max(0.0, self._begun_at + self._member.renewal_s - time.monotonic())

    def _settle(self, stream: StreamRecording, stream_id: int, found: Found) -> None:
        share = found.share
        # Another member may have found that it belongs to another broker.
        row = found.held.get(stream_id)
        is_strange = row is not None and self._group.broker.is_not_of(row.broker_id)
        # Streams released in the meantime are released with the next renewal.
        if row is not None and stream_id not in self._released and not is_strange:
            stream.take()
            tail = stream.tail
            if tail is not None and not tail.records_by(found.key_ids, row.record_time):
                stream.close()
            return
        stream.give_up()
        if is_strange or stream_id in share.missing:
            stream.look_up()
        elif stream_id in share.others:
            stream.stand_by()

    def _give(self, surplus: int) -> None:
        """Release this member's surplus of streams."""
        surplus -= sum(stream.tail is not None and not stream.is_mine for stream in self._group.streams())
        read = [stream for stream in reversed(self._group.streams()) if stream.is_read]
        for stream in read[: max(0, surplus)]:
            stream.give_up()

    def _ask(self, wanted: Collection[int], released: Collection[int]) -> Found:
        with transaction(self._engine) as connection:
            if not self._has_joined:
                # A killed member of the same name may have held other streams.
                connection.execute(_LET_GO, {"holder": self._member.holder})
            self._member.release(connection, released)
            # While it is cut off, this member keeps following streams that no other member takes.
            share = self._member.beat(connection, wanted, takes=self._reach.may_take, leased=not self._reach.is_cut_off)
            if not share.held:
                return Found(share, [], {})
            held = {row.stream_id: row for row in connection.execute(_HELD, {"stream_ids": sorted(share.held)})}
            return Found(share, [key.key_id for key in key_definitions(connection)], held)

    def _log(self, share: Share) -> None:
        """Log how many streams other members record when the number changes, to explain idle members."""
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
            logger.info("cannot release the streams before the lease expires: %s", ended(error))
        self._threads.shutdown()

    def _leave(self) -> None:
        with transaction(self._engine) as connection:
            self._member.leave(connection)
