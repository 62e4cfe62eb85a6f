"""A recorder's membership among those that share streams: its lease, its share, and whether it reaches the broker.

A renewal, every third of a lease, is one transaction of a few statements for any number of streams. It has its own
thread, and its own connection if there are enough.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import replace
from typing import Final, NamedTuple
from uuid import UUID

import sqlalchemy as sa

from relatum.following import Reach, StreamFollower
from relatum.store.catalog import StreamRow, key_definitions
from relatum.store.database import sql, transaction
from relatum.store.members import Member, Share
from relatum.waiting import ComponentLoop, Duty, Outages, Server, Threads, ended

logger = logging.getLogger("relatum.recorder")

_LET_GO: Final = sql("UPDATE relatum.streams SET lease_holder = NULL WHERE lease_holder = :holder::text")

_HELD: Final = sql("""
    SELECT stream_id, record_time, broker_id FROM relatum.streams WHERE stream_id = ANY (:stream_ids::integer[])""")


class Found(NamedTuple):
    """The result of a renewal: the share, the keys in force, and columns of the streams that this member holds."""

    share: Share
    key_ids: list[int]
    with_time: dict[int, bool]
    broker_ids: dict[int, UUID | None]


class Membership:
    """The lease and the share. Runs in the loop; its queries run in a thread.

    `engine` has its own connection if there are enough; `stream` is as in `Reach`.
    """

    def __init__(
        self,
        loop: ComponentLoop,
        engine: sa.Engine,
        member: Member,
        follower: StreamFollower,
        outages: Outages,
        stream: Callable[[], str],
    ) -> None:
        self._loop = loop
        self._threads = Threads(1, "relatum-recorder-lease")
        self._engine = engine
        self._member = member
        self._outages = outages
        self._reach = Reach(follower, outages, stream)
        self._released: set[int] = set()
        self._has_joined = False
        self._logged: tuple[int, int] | None = None
        self._begun_at = time.monotonic()
        self._has_ended = asyncio.Event()
        self.duty: Duty | None = None

    @property
    def due_s(self) -> float:
        """Seconds until the next renewal, counted from the start of the last one."""
        return max(0.0, self._begun_at + self._member.renewal_s - time.monotonic())

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

    async def renew(self, wanted: Collection[int]) -> Found:
        """Renew the lease, and return which of the streams this member holds now."""
        self._begun_at = time.monotonic()
        self._reach.look()
        released, self._released = self._released, set()
        try:
            with self._outages.asking(Server.DATABASE):
                found = await self._loop.ask(self._ask, wanted, released, threads=self._threads)
        except BaseException:
            self._released |= released
            raise
        finally:
            self._has_ended.set()
        self._has_joined = True
        if not self._reach.is_returning:
            self._log(found.share)
        # Streams released in the meantime are released with the next renewal.
        return found._replace(share=replace(found.share, held=found.share.held - self._released))

    def _ask(self, wanted: Collection[int], released: Collection[int]) -> Found:
        with transaction(self._engine) as connection:
            if not self._has_joined:
                # A killed member of the same name may have held other streams.
                connection.execute(_LET_GO, {"holder": self._member.holder})
            self._member.release(connection, released)
            if self._reach.is_cut_off or self._reach.is_returning:
                # This member keeps following streams that no other member takes.
                share = self._member.hold_on(connection, wanted, leased=self._reach.is_returning)
            else:
                share = self._member.beat(connection, wanted)
            if not share.held:
                return Found(share, [], {}, {})
            held = connection.execute(_HELD, {"stream_ids": sorted(share.held)}).all()
            with_time = {row.stream_id: row.record_time for row in held}
            key_ids = [key.key_id for key in key_definitions(connection)]
            return Found(share, key_ids, with_time, {row.stream_id: row.broker_id for row in held})

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
        self._reach.close()
        try:
            await self._loop.ask(self._leave, threads=self._threads)
        except Exception as error:  # noqa: BLE001 - the lease expires by itself
            logger.info("cannot release the streams before the lease expires: %s", ended(error))
        self._threads.shutdown()

    def _leave(self) -> None:
        with transaction(self._engine) as connection:
            self._member.leave(connection)
