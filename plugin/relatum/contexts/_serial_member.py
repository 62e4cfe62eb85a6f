"""One member of a serial consumer: its lease, its share of the partitions, and its batches, in one event loop.

A process that was frozen, or slept with its machine, for longer than its lease delivers nothing before it has renewed
the lease, whichever timer fires first. PostgreSQL refuses its writes until then.
"""

import asyncio
import copy
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Final, TypeAlias

from relatum import metrics
from relatum.common.headers import CONTEXT_HEADER
from relatum.common.ids import MessageId
from relatum.common.waiting import ComponentLoop, Outages, RepeatedTask, Threads, log_failure
from relatum.contexts._context_options import SerialOptions, SerialStatistics
from relatum.contexts._partition_following import Following, Step
from relatum.contexts._placement_store import PlacementStore
from relatum.contexts._publication import elapsed_s
from relatum.contexts._serial_partition import Partition, logger, reading_of
from relatum.contexts._serial_store import ConsumerStore
from relatum.errors import AccessRefused, ConfigurationError, StreamNotFound
from relatum.metrics import Histogram
from relatum.reading import BrokerAddress, Message, Position, StreamReader, position_of
from relatum.reading.following import BrokerReach, Event, Failed, StreamFollower
from relatum.store.members import Share

LEAVE_S: Final = 1.0
"""The minimum seconds to release partitions, even with a shorter time limit of `close`."""

CLEAN_UP_S: Final = 10.0
"""Seconds that a failed start has to clean up."""

BROKER_QUERIES_MAX: Final = 3
"""How many partitions query the broker at the same time; calls of PostgreSQL have other threads."""

POLL_S: Final = 0.01
"""Seconds between two queries whether holds are complete; more for old holds."""

POLL_S_MAX: Final = 0.1
"""The most seconds between two such queries."""

Taken: TypeAlias = tuple[Partition, Step]
"""A batch that was handed out."""


class Member:
    surplus: RepeatedTask
    """Releases partitions above this member's share."""
    holds: RepeatedTask
    """Releases the messages of complete holds."""

    def __init__(
        self, super_stream: str, store: ConsumerStore, address: BrokerAddress, *, options: SerialOptions
    ) -> None:
        self.outages = Outages(logger, broker=str(address), database=store.database.address.name)
        self.store = store
        self.options = options
        self.header = options.header or CONTEXT_HEADER
        """The header that names contexts; the stored one after the start."""
        self.refused: AccessRefused | ConfigurationError | None = None
        """Why the broker refuses this member, or None."""
        self.stopping = threading.Event()
        self._super_stream = super_stream
        self._address = address
        self._partitions: dict[str, Partition] = {}
        self._waiting: deque[Future[Taken]] = deque()
        self._count_lock = threading.Lock()
        self._served = self._delivered = self._acknowledged = 0
        self.pause_s = Histogram()
        self._log_name = f"of a member of {store.name!r}"
        self._streams: set[str] = set()
        self._begin()

    def _begin(self) -> None:
        name = f"relatum-{self.store.name}"
        self.loop = ComponentLoop(name, logger, ending=self.store.ending)
        # The lease has its own thread and connection, so that a renewal never queues.
        self._lease_thread = Threads(1, f"{name}-lease")
        self._broker_threads = Threads(BROKER_QUERIES_MAX, f"{name}-reads")
        self._call_for_lease = partial(self.loop.ask, threads=self._lease_thread)
        self.ask_broker = partial(self.loop.ask, threads=self._broker_threads)
        self._ended = threading.Event()
        self._duties: list[RepeatedTask] = []
        self._partitions.clear()
        self._holder: str | None = None
        self._leased_until = self._renew_at = -math.inf
        metrics.report(self, super_stream=self._super_stream, consumer=self.store.name)

    def start(self) -> None:
        """Join, take free partitions, and start to read. A failed start releases everything."""
        if self.stopping.is_set():
            self._begin()
        self.stopping.clear()
        self.store.reopen()
        try:
            self._placements = PlacementStore(self.store.database, self._address.vhost, self._super_stream)
            self._placements.open_or_add(self.options.header, self._address)
            self.header = self._placements.header
            self.store.ensure(self._placements.super_stream_id, self._read_ends)
            self._streams = {row.stream for row in self._placements.partitions()}
            self.loop.start()
            joined = self.loop.run(self._join)
            if joined is not None:
                joined.result()
        except BaseException:
            self.close(CLEAN_UP_S)
            raise

    def _read_ends(self, streams: Sequence[str]) -> Mapping[str, tuple[int, Position | None]]:
        """Return where a new consumer starts, by stream: the offset, and the message before it."""
        if self.options.start == "first":
            # The start is 0, not the first retained offset: dropped fences and markers also count.
            return {}
        lasts: list[MessageId] = []
        with StreamReader.open(self._address) as reader:
            for stream in streams:
                # The stream of a retired partition may have been deleted.
                with suppress(StreamNotFound):
                    last = reader.bounds(stream).last
                    if last is not None:
                        lasts.append(MessageId(stream, last))
            found = list(reader.read_many(lasts))
        known = [position_of(each) if isinstance(each, Message) else None for each in found]
        return {stream: (last + 1, position) for (stream, last), position in zip(lasts, known, strict=True)}

    async def _join(self) -> None:
        self._share_lock = asyncio.Lock()
        self.follower = StreamFollower(
            self.loop,
            self._address,
            self._receive,
            outages=self.outages,
            name=f"consuming by {self.store.name!r}",
            who=reading_of,
        )
        self._reach = BrokerReach(self.follower, self.outages, lambda: min(self._streams))
        repeat = partial(self.loop.repeat, outages=self.outages)
        self.surplus = repeat(self._give_surplus, f"releasing partitions {self._log_name}")
        self.holds = repeat(self._release_holds, f"checking holds {self._log_name}")
        self._duties += self.surplus, self.holds
        await self._keep_lease()
        lease = repeat(self._keep_lease, f"keeping the lease {self._log_name}", longest_s=self.store.renewal_s)
        self._duties.append(lease)

    def close(self, timeout_s: float) -> bool:
        """Stop reading and release the partitions. Returns False if this took too long."""
        until = time.monotonic() + timeout_s
        # Calls of the database get half of the time. After it, the threads stop waiting.
        self.store.ending.end_in(max(LEAVE_S, timeout_s / 2))
        self.stopping.set()
        for waiting in list(self._waiting):
            waiting.cancel()
        if self.loop.run(self._end) is None:
            self._dispose()
        has_ended = self._ended.wait(timeout_s) and self.loop.stop(max(0.0, until - time.monotonic()))
        if has_ended:
            metrics.retire(self)
        return has_ended

    async def _end(self) -> None:
        """End the membership. This runs in the loop: closing must not wait for an unavailable database."""
        try:
            for duty in self._duties:
                duty.cancel()
            for each in list(self._partitions.values()):
                self.leave(each)
            try:
                await self._call_for_lease(self.store.leave)
            except Exception as error:  # noqa: BLE001 - without a release, the lease expires
                what = f"partitions {self._log_name} were not released; others take them when the lease expires"
                log_failure(logger, error, what, level=logging.INFO)
            closing = self.loop.spawn(self.follower.close())
            await asyncio.wait([closing], timeout=max(0.0, self.store.ending.left_s()))
        finally:
            self._dispose()
            self.loop.stop(0.0)

    def _dispose(self) -> None:
        self._lease_thread.shutdown()
        self._broker_threads.shutdown()
        self.store.dispose()
        self._ended.set()

    async def _keep_lease(self) -> float:
        """Renew the lease; open new partitions, and drop lost ones. Returns the seconds until the next renewal."""
        if (early_s := self._renew_at - time.monotonic()) > 0:
            return early_s
        reach = self._reach
        # Do not release partitions while the database's holders are being read.
        async with self._share_lock:
            reach.look()
            began = elapsed_s()
            is_busy = reach.is_cut_off and self._stop_delivery()
            share, partitions = await self._call_for_lease(partial(self.store.share, reach, is_busy=is_busy))
            self._apply_share(share, partitions)
        if not reach.is_cut_off:
            # Extend the lease only now: while this member was cut off, others may have consumed its partitions.
            self._leased_until = began + self.options.lease_s
            self.hand_out()
        self._renew_at = time.monotonic() + self.store.renewal_s
        return self.store.renewal_s

    def _apply_share(self, share: Share, partitions: Mapping[int, str]) -> None:
        # If the lease had expired, drop all partitions, and reopen the remaining ones at their stored positions.
        has_expired = share.holder != self._holder
        if has_expired and self._partitions:
            logger.info("the lease of a member of %r expired: its partitions are reopened", self.store.name)
        for each in list(self._partitions.values()):
            if has_expired or each.partition_id not in partitions:
                self.leave(each)
        # Only now: if leaving fails, the next attempt must see the expiry again.
        self._holder = share.holder
        for partition_id, stream in partitions.items():
            if stream not in self._partitions:
                self._partitions[stream] = Partition(self, partition_id, stream)
        # Surplus partitions hand out no batches. Prefer those that are already leaving, then the last ones.
        ranked = sorted(self.followings, key=lambda each: each.is_leaving)
        for place, following in enumerate(ranked):
            following.is_leaving = place >= len(ranked) - share.surplus
        self.surplus.wake()

    def leave(self, partition: Partition) -> None:
        partition.stop()
        if self._partitions.get(partition.stream) is partition:
            del self._partitions[partition.stream]

    async def _give_surplus(self) -> float:
        """Release surplus partitions without an unacknowledged batch. After a failure, this is tried again."""
        async with self._share_lock:
            for partition in list(self._partitions.values()):
                following = partition.following
                if following is not None and following.is_leaving and following.outstanding is None:
                    self.leave(partition)
                    await self._call_for_lease(self.store.release, partition.partition_id)
        return math.inf

    def is_partition(self, stream: str) -> bool:
        """Return whether a stream is or was a partition of this super stream. Thread-safe; may query the database."""
        if stream not in self._streams:
            self._streams = {row.stream for row in self._placements.partitions()}
        return stream in self._streams

    def _receive(self, event: Event) -> None:
        """Pass an event to its partition. The follower repeats an event if this fails."""
        if event.stream is not None:
            self.refused = None
        elif isinstance(event, Failed) and isinstance(event.error, AccessRefused | ConfigurationError):
            # Calls that wait for a batch raise this error.
            self.refused = event.error
            self.hand_out()
        partition = self._partitions.get(event.stream or "")
        if partition is not None and partition.subscription == event.following:
            partition.receive(event)
        else:
            self.follower.done(event)

    # --- batches: waits, in any thread ------------------------------------------------------------------------------

    def wait(self, *, at_once: bool) -> "Future[Taken]":
        """Return a future of a batch; end the wait by `taken` or `give_up`. `at_once`: do not wait for a batch."""
        waiting: Future[Taken] = Future()
        self._waiting.append(waiting)
        if self.stopping.is_set() or not self.loop.call(self._begin_wait, waiting, at_once):
            waiting.cancel()
        return waiting

    def taken(self, waiting: "Future[Taken]") -> Taken | None:
        """End a wait and return its batch or None. Raises the error if the broker refuses this member."""
        if waiting.cancel():
            self.loop.call(self._end_wait, waiting)
            return None
        partition, step = waiting.result()
        if elapsed_s() < self._leased_until:
            return partition, step
        # The lease has expired since the batch was handed out.
        partition.give_back(step)
        return None

    def give_up(self, waiting: "Future[Taken]") -> None:
        """End a wait, and give its batch back if it has one."""
        with suppress(AccessRefused, ConfigurationError):
            taken = self.taken(waiting)
            if taken is not None:
                partition, step = taken
                partition.give_back(step)

    def acknowledged(self, step: Step) -> None:
        with self._count_lock:
            self._acknowledged += step.count

    def statistics(self) -> SerialStatistics:
        held = [following.held for following in self.followings]
        return SerialStatistics(
            partitions=len(held),
            delivered=self._delivered,
            acknowledged=self._acknowledged,
            held_messages=sum(messages for messages, _ in held),
            held_bytes=sum(bytes_ for _, bytes_ in held),
            pause_s=self.pause_s.observed(),
        )

    @property
    def followings(self) -> list[Following]:
        """The open partitions. Thread-safe."""
        found = [each.following for each in list(self._partitions.values())]
        return [following for following in found if following is not None and not following.is_over]

    # --- batches: delivery, in the loop -----------------------------------------------------------------------------

    def _begin_wait(self, waiting: "Future[Taken]", at_once: bool) -> None:
        self.hand_out()
        if at_once and waiting.cancel():
            self._end_wait(waiting)

    def _end_wait(self, waiting: "Future[Taken]") -> None:
        with suppress(ValueError):
            self._waiting.remove(waiting)

    def hand_out(self) -> None:
        """Complete waits with batches if the lease is valid. Partitions take turns."""
        while self._waiting and (partition := self._next_partition()) is not None:
            step = partition.take()
            waiting = self._waiting.popleft()
            if not waiting.set_running_or_notify_cancel():
                partition.give_back(step)
                continue
            self._delivered += step.count
            waiting.set_result((partition, step))
        while self._waiting and self.refused is not None:
            waiting = self._waiting.popleft()
            if waiting.set_running_or_notify_cancel():
                error = copy.copy(self.refused)
                error.__cause__ = self.refused
                waiting.set_exception(error)

    def _next_partition(self) -> Partition | None:
        if elapsed_s() >= self._leased_until:
            return None
        now = time.monotonic()
        due = [each for each in self._partitions.values() if each.is_due(now)]
        partition = min(due, key=lambda each: each.served, default=None)
        if partition is not None:
            self._served += 1
            partition.served = self._served
        return partition

    def _stop_delivery(self) -> bool:
        """Stop delivery until the next renewal; return whether the application has an unacknowledged batch."""
        self._leased_until = -math.inf
        steps = [following.outstanding for following in self.followings]
        return any(step is not None and step.count for step in steps)

    async def _release_holds(self) -> float:
        """Release complete holds. Returns the seconds until the next query."""
        now = time.monotonic()
        waiting = {each.partition_id: each.youngest_wait_s(now) for each in self.followings if each.waiting_holds()}
        if not waiting:
            return POLL_S_MAX
        complete = await self.loop.ask(self.store.complete, list(waiting))
        for partition in list(self._partitions.values()):
            for partition_id, move_id in complete:
                if partition.partition_id == partition_id:
                    partition.change(Following.release, move_id, time.monotonic())
        return min(POLL_S_MAX, max(POLL_S, min(waiting.values()) / 200))
