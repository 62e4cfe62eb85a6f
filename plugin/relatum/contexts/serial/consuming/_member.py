"""One member of a serial consumer: its share of the partitions, its lease, its holds. Both faces drive it.

All that a member knows is touched by its loop. The application's threads do two things: they wait for a batch, which
the loop gives them, and they commit it. What they commit is fenced in PostgreSQL, and the loop hears of it afterwards.

A process that stood still longer than its lease hands nothing out before the lease is renewed, whatever of its timers
is due first; what it writes meanwhile is fenced.
"""

import asyncio
import copy
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, Final, TypeAlias, TypeVar

import sqlalchemy as sa

from relatum import metrics
from relatum.contexts._options import SerialOptions
from relatum.contexts._statistics import SerialStatistics
from relatum.contexts.placement._placement_store import PlacementStore
from relatum.contexts.serial.consuming._partition import Partition, logger, reading_of
from relatum.contexts.serial.consuming._partition_following import Following, Step
from relatum.contexts.serial.consuming._serial_store import ConsumerStore, lost
from relatum.errors import (
    AccessRefused,
    ConfigurationError,
    DatabaseUnavailable,
    PartitionLost,
    StreamNotFound,
    SuperStreamConflict,
)
from relatum.following import Event, Failed, Follower, Reach
from relatum.headers import CONTEXT_HEADER
from relatum.metrics import Histogram
from relatum.reading import BrokerAddress, StreamReader
from relatum.store.members import Share
from relatum.store.settling import CommitInDoubt
from relatum.superstreams import Layout, describe_super_stream
from relatum.waiting import ComponentLoop, Duty, Outages, Pauses, Threads, log_failure

LEAVE_S: Final = 1.0
"""Seconds to give partitions back, at least, however short a close may be."""

GIVE_UP_S: Final = 10.0
"""Seconds a start that failed has to end what it began."""

POLL_S: Final = 0.01
"""How often the database is asked whether a hold is complete; rarer where one waits for long."""

POLL_SLOWEST_S: Final = 0.1
"""How often at least."""

BROKER_ASKS_MAX: Final = 3
"""Partitions that ask the broker at once: one that waits for a frozen node stops no other, nor what asks PostgreSQL."""

AFTER_DEFECT_S: Final = 1.0
"""Seconds after which events are taken again where taking them failed."""

Taken: TypeAlias = tuple[Following, Step]
"""A batch that was handed out."""

_Result = TypeVar("_Result")


class Member:
    """A running member.

    Attributes:
        partitions: What it has, by stream.
        leased_until: When its lease ends, as `time.monotonic` counts, which goes on while the process stands still:
            after that, others may have its partitions, and consume the same.
        stopping: Set when nothing more is to be read.
    """

    def __init__(
        self, super_stream: str, store: ConsumerStore, address: BrokerAddress, *, options: SerialOptions
    ) -> None:
        self.outages = Outages(logger, broker=str(address), database=store.database.address.name)
        self.store = store
        self.options = options
        self.header = options.header
        self.partitions: dict[str, Partition] = {}
        self.leased_until = -math.inf
        self.stopping = threading.Event()
        self._super_stream = super_stream
        self._address = address
        self._of = f"of a member of {store.name!r}"
        self._streams: frozenset[str] = frozenset()
        self._waiting: deque[Future[Taken]] = deque()
        self._refused: AccessRefused | ConfigurationError | None = None
        self._holder: str | None = None
        self._surplus = 0
        self._renews_at = -math.inf
        self._counting = threading.Lock()
        self._served = self._delivered = self._acknowledged = 0
        self._pause_s = Histogram()
        self._begin()

    def _begin(self) -> None:
        """Make what runs; again after a start that failed."""
        name = f"relatum-{self.store.name}"
        self.loop = ComponentLoop(name, logger, ending=self.store.ending)
        self._lease_thread = Threads(1, f"{name}-lease")
        self._broker_threads = Threads(BROKER_ASKS_MAX, f"{name}-reads")
        self._ended = threading.Event()
        self._reach: Reach | None = None
        self._duties: list[Duty] = []

    # --- its life ---------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Join, take what is free, and begin to read. Where that fails, nothing is left of it."""
        if self.stopping.is_set():
            self._begin()
        self.stopping.clear()
        self.store.ending.begin_anew()
        try:
            self.header = self._agreed_header()
            self.store.ensure(self._beginnings)
            self._streams = self.store.partitions()
            self.loop.start()
            joined = self.loop.run(self._join)
            if joined is not None:
                joined.result()
        except BaseException:
            self.close(GIVE_UP_S)
            raise

    def _agreed_header(self) -> str:
        """The header that names contexts. Where nobody has placed anything yet, this member says it first."""
        stored = self.store.find_header()
        if stored is None:
            stored = self.header or CONTEXT_HEADER
            with PlacementStore(self.store.database, self._address.vhost, self._super_stream) as placements:
                placements.open(stored, self._layout())
        if self.header not in (None, stored):
            reason = f"its contexts are named by the header {stored!r}, not by {self.header!r}"
            raise SuperStreamConflict(
                f"super stream {self._super_stream!r} is another one: {reason}",
                super_stream=self._super_stream,
                reason=reason,
            )
        return stored

    def _layout(self) -> Layout:
        """The partitions as the broker has them."""
        return describe_super_stream(self._address, self._super_stream)

    def _beginnings(self, streams: Sequence[str]) -> Mapping[str, int]:
        if self.options.start == "first":
            # Not where retention begins: fences and markers that it has dropped count, too.
            return {}
        with StreamReader.open(self._address) as reader:
            return {stream: _end(reader, stream) for stream in streams}

    async def _join(self) -> None:
        self._sharing = asyncio.Lock()
        self.follower = Follower(
            self._address,
            outages=self.outages,
            name=f"consuming by {self.store.name!r}",
            who=reading_of,
            ready=self._ready,
        ).open()
        self._reach = Reach(self.follower, self.outages, lambda: min(self._streams))
        await self._keep_lease()
        repeat = partial(self.loop.repeat, outages=self.outages)
        self._surplus_duty = repeat(self._give_surplus, f"giving partitions back {self._of}")
        self._holds_duty = repeat(self._release_holds, f"looking at moves {self._of}")
        lease_duty = repeat(self._keep_lease, f"keeping the lease {self._of}")
        self._duties = [lease_duty, self._surplus_duty, self._holds_duty]

    def close(self, timeout_s: float) -> bool:
        """Stop reading and let others have the partitions; False where that took too long."""
        until = time.monotonic() + timeout_s
        # Half of the time is for a database that answers; the threads wait for another no longer.
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
        """Leave, here, so that nobody who closes the consumer waits for a database that does not answer."""
        try:
            for duty in self._duties:
                duty.cancel()
            for each in list(self.partitions.values()):
                self.leave(each)
            try:
                await self._ask_for_lease(self.store.leave)
            except Exception as error:  # noqa: BLE001 - the lease lapses by itself
                what = f"partitions {self._of} not given back"
                log_failure(logger, error, what, level=logging.INFO)
            if self._reach is not None:
                self._reach.close()
                await self.ask_broker(self.follower.close)
        finally:
            self._dispose()
            self.loop.stop(0.0)

    def _dispose(self) -> None:
        self._lease_thread.shutdown()
        self._broker_threads.shutdown()
        self.store.dispose()
        self._ended.set()

    # --- its lease --------------------------------------------------------------------------------------------------

    async def _ask_for_lease(self, function: Callable[..., _Result], *args: Any) -> _Result:
        """Ask PostgreSQL in the thread that nothing but the lease uses, one question after the other."""
        return await self.loop.ask(function, *args, threads=self._lease_thread)

    async def ask_broker(self, function: Callable[..., _Result], *args: Any) -> _Result:
        """Ask the broker in one of the threads for that."""
        return await self.loop.ask(function, *args, threads=self._broker_threads)

    async def _keep_lease(self) -> float:
        """Renew the lease; begin with partitions that were gained, and end those that were lost."""
        if (early_s := self._renews_at - time.monotonic()) > 0:
            return early_s
        reach = self._reach
        assert reach is not None, "it was made at the start"
        # A partition must not be given back while it is looked whose it is.
        async with self._sharing:
            reach.look()
            began = time.monotonic()
            is_busy = reach.is_cut_off and self._halt()
            share, partitions = await self._ask_for_lease(partial(self.store.share, reach, is_busy=is_busy))
            self._has(share, partitions)
        if not reach.is_cut_off:
            # Not earlier: while it was cut off, others may have taken its partitions, and consumed from them.
            self.leased_until = began + self.options.lease_s
            self._hand_out()
        self._renews_at = time.monotonic() + self.store.renewal_s
        return self.store.renewal_s

    def _halt(self) -> bool:
        """Hand out nothing for now; whether the application has a batch in hand."""
        self.leased_until = -math.inf
        steps = [following.outstanding for following in self.followings]
        return any(step is not None and step.count for step in steps)

    def _has(self, share: Share, partitions: Mapping[int, str]) -> None:
        """Begin, and end, what the lease says."""
        if share.holder != self._holder and self.partitions:
            # It had expired: drop every partition, and reopen those still ours at their stored positions.
            logger.info("the lease of a member of %r had run out: its partitions are opened anew", self.store.name)
            for each in list(self.partitions.values()):
                self.leave(each)
        self._holder = share.holder
        for each in list(self.partitions.values()):
            if each.partition_id not in partitions:
                self.leave(each)
        for partition_id, stream in partitions.items():
            if stream not in self.partitions:
                self.partitions[stream] = Partition(self, partition_id, stream)
        self._surplus = share.surplus
        self._choose_surplus()

    def leave(self, partition: Partition) -> None:
        """Have a partition no more."""
        partition.stop()
        if self.partitions.get(partition.stream) is partition:
            del self.partitions[partition.stream]

    def _choose_surplus(self) -> None:
        """Hand out no more of the partitions that others should have."""
        leaving = [each for each in self.followings if each.is_leaving]
        for following in reversed(self.followings):
            if len(leaving) < self._surplus and not following.is_leaving:
                following.is_leaving = True
                leaving.append(following)
        for following in leaving[self._surplus :]:
            following.is_leaving = False
        if leaving and self._duties:
            self._surplus_duty.wake()

    async def _give_surplus(self) -> float:
        """Let others have partitions with which the application is done.

        One of which that fails is found to be this member's again, and is given back the next time.
        """
        async with self._sharing:
            for partition in list(self.partitions.values()):
                following = partition.following
                if following is not None and following.is_leaving and following.outstanding is None:
                    self.leave(partition)
                    self._surplus = max(0, self._surplus - 1)
                    await self._ask_for_lease(self.store.release, partition.partition_id)
        return math.inf

    def is_partition(self, stream: str) -> bool:
        """Whether a stream is, or was, one of this super stream's partitions. From any thread; it may ask."""
        if stream not in self._streams:
            self._streams = self.store.partitions()
        return stream in self._streams

    # --- what is read -----------------------------------------------------------------------------------------------

    def _ready(self) -> None:
        # In the thread that reads.
        self.loop.call(self._take_events)

    def _take_events(self) -> None:
        """Give what has come to its partitions."""
        try:
            events = self.follower.take(0.0)
            for event in events:
                self._told(event)
        except Exception:
            self.loop.call_later(AFTER_DEFECT_S, self._take_events)
            raise
        if events:
            asyncio.get_running_loop().call_soon(self._take_events)

    def _told(self, event: Event) -> None:
        if event.stream is not None:
            self._refused = None
        elif isinstance(event, Failed) and isinstance(event.error, AccessRefused | ConfigurationError):
            # Told to those who wait for messages, too.
            self._refused = event.error
            self._hand_out()
        partition = self.partitions.get(event.stream or "")
        if partition is not None and partition.number == event.following:
            partition.told(event)
        else:
            self.follower.done(event)

    # --- batches ----------------------------------------------------------------------------------------------------

    @property
    def followings(self) -> list[Following]:
        """The partitions that are open. From any thread."""
        found = [each.following for each in list(self.partitions.values())]
        return [following for following in found if following is not None and not following.is_over]

    def look(self, partition: Partition) -> None:
        """Do what is due for a partition that has changed: hand a batch out, store how far it is."""
        following, now = partition.following, time.monotonic()
        if following is None:
            return
        silent_at = following.silent_due_at()
        if silent_at is not None and silent_at <= now:
            self.loop.spawn(self._store_silent(following, following.take(now)))
            partition.wake()
            silent_at = None
        due_at = following.due_at()
        if due_at is not None and due_at <= now:
            self._hand_out()
            due_at = None
        at = min((at for at in (silent_at, due_at) if at is not None), default=partition.looks_at)
        if at != partition.looks_at:
            partition.looks_at = at
            self.loop.call_later(at - now, self.look, partition)

    def wait(self, *, at_once: bool) -> "Future[Taken]":
        """Wait for a batch: a future that is to be ended by `taken` or `give_up`. From any thread.

        `at_once`: Whether the future is cancelled where there is none now.
        """
        waiting: Future[Taken] = Future()
        self._waiting.append(waiting)
        if self.stopping.is_set() or not self.loop.call(self._begin_to_wait, waiting, at_once):
            waiting.cancel()
        return waiting

    def _begin_to_wait(self, waiting: "Future[Taken]", at_once: bool) -> None:
        self._hand_out()
        if at_once and waiting.cancel():
            self._end_wait(waiting)

    def _end_wait(self, waiting: "Future[Taken]") -> None:
        with suppress(ValueError):
            self._waiting.remove(waiting)

    def taken(self, waiting: "Future[Taken]") -> Taken | None:
        """What a wait has come to, which is over now; None for nothing. From any thread.

        Raises:
            AccessRefused, ConfigurationError: There is none, and the broker does not let this member in.
        """
        if waiting.cancel():
            self.loop.call(self._end_wait, waiting)
            return None
        taken = waiting.result()
        if time.monotonic() < self.leased_until:
            return taken
        # Its lease ran out on the way here.
        self.give_back(*taken)
        return None

    def give_up(self, waiting: "Future[Taken]") -> None:
        """End a wait; what it has come to is handed out again. From any thread."""
        with suppress(AccessRefused, ConfigurationError):
            taken = self.taken(waiting)
            if taken is not None:
                self.give_back(*taken)

    def _hand_out(self) -> None:
        """Give batches to those who wait for one, while the lease holds; each partition has its turn."""
        while self._waiting and (partition := self._first_due()) is not None:
            following, waiting = partition.following, self._waiting.popleft()
            if following is not None and waiting.set_running_or_notify_cancel():
                self._served += 1
                partition.served = self._served
                step = following.take(time.monotonic())
                self._delivered += step.count
                partition.wake()
                waiting.set_result((following, step))
        while self._waiting and self._refused is not None:
            waiting = self._waiting.popleft()
            if waiting.set_running_or_notify_cancel():
                error = copy.copy(self._refused)
                error.__cause__ = self._refused
                waiting.set_exception(error)

    def _first_due(self) -> Partition | None:
        now = time.monotonic()
        if now >= self.leased_until:
            return None
        due = [each for each in self.partitions.values() if each.following and _is_due(each.following, now)]
        return min(due, key=lambda each: each.served, default=None)

    def give_back(self, following: Following, step: Step) -> None:
        """Let a batch be handed out again. From any thread."""
        self.loop.call(self._given_back, following, step)

    def _given_back(self, following: Following, step: Step) -> None:
        if following.outstanding is step and not following.is_over:
            following.give_back()
            self._changed(following)

    def _changed(self, following: Following) -> None:
        partition = self.partitions.get(following.stream)
        if partition is not None and partition.following is following:
            partition.wake()
            self.look(partition)
        if following.is_leaving:
            self._surplus_duty.wake()

    def statistics(self) -> SerialStatistics:
        """What this member has counted, and what it has. It asks nobody. From any thread."""
        held = [following.held for following in self.followings]
        return SerialStatistics(
            partitions=len(held),
            delivered=self._delivered,
            acknowledged=self._acknowledged,
            held_messages=sum(messages for messages, _ in held),
            held_bytes=sum(bytes_ for _, bytes_ in held),
            pause_s=self._pause_s.observed(),
        )

    # --- holds ------------------------------------------------------------------------------------------------------

    async def _release_holds(self) -> float:
        """Release the holds that are complete; gives the seconds until the next look."""
        now = time.monotonic()
        waiting = {each.partition_id: each.youngest_wait_s(now) for each in self.followings if each.waiting_holds()}
        if not waiting:
            return POLL_SLOWEST_S
        for partition_id, move_id in await self.loop.ask(self.store.complete, list(waiting)):
            for following in self.followings:
                if following.partition_id == partition_id:
                    following.release(move_id, time.monotonic())
                    self._changed(following)
        return min(POLL_SLOWEST_S, max(POLL_S, min(waiting.values()) / 200))

    async def _store_silent(self, following: Following, step: Step) -> None:
        """Store how far a partition is that has nothing for the application."""
        who, pauses = f"storing the position in {following.stream!r}", Pauses()
        while not following.is_over:
            try:
                await self.loop.ask(self.commit, following, step)
            except PartitionLost:
                break  # It is another member's to store.
            except Exception as error:  # noqa: BLE001 - whatever it was, it is tried again
                self.outages.failed(who, error)
                await asyncio.sleep(pauses.after(error))
            else:
                self.outages.over(who)
                return
        self.outages.forget(who)

    # --- commits, in the threads of who commits ---------------------------------------------------------------------

    def commit(self, following: Following, step: Step) -> None:
        """Store a step that was handed out.

        Raises:
            PartitionLost: The partition is not this member's any more, or was opened anew.
            DatabaseUnavailable: PostgreSQL is away; to be repeated.
        """
        self.check(following, step)
        if self._was_committed(following, step):
            return
        token = self.store.tokens.new()
        try:
            is_stored = self.store.commit(following, step, token)
        except DatabaseUnavailable:
            following.in_doubt = token
            raise
        if not is_stored:
            self._drop(following)
            raise lost(following.stream, self.store.name)
        self.store.tokens.committed(token)
        self._note(following, step)

    def check(self, following: Following, step: Step) -> None:
        """Raise `PartitionLost` where a batch cannot be committed any more."""
        if following.is_over or following.outstanding is not step:
            raise lost(following.stream, self.store.name)

    def _was_committed(self, following: Following, step: Step) -> bool:
        """Whether an earlier try came through whose commit nobody answered; False where there was none.

        Raises:
            DatabaseUnavailable: There was no answer.
        """
        token = following.in_doubt
        if token is None:
            return False
        came_through = self.store.came_through(token)
        following.in_doubt = None
        if came_through:
            self._note(following, step)
        return came_through

    @contextmanager
    def transaction(self, following: Following, step: Step) -> Iterator[sa.Connection]:
        """A transaction that stores a step at its end; see `SerialBatch.transaction`."""
        self.check(following, step)
        if self._was_committed(following, step):
            raise lost(following.stream, self.store.name)
        try:
            with self.store.joined(following, step, stop=self.stopping) as connection:
                yield connection
        except (PartitionLost, CommitInDoubt):
            # One in doubt, too, is opened anew: what was committed is consumed, and what was not is delivered again,
            # by this member or another.
            self._drop(following)
            raise
        self._note(following, step)

    def _drop(self, following: Following) -> None:
        """Forget a partition, with all that is not stored of it."""
        following.is_over = True
        self.loop.call(self._changed, following)

    def _note(self, following: Following, step: Step) -> None:
        """Note that a step is stored."""
        with self._counting:
            self._acknowledged += step.count
        self.loop.call(self._committed, following, step)

    def _committed(self, following: Following, step: Step) -> None:
        for pause_s in following.committed(step, time.monotonic()):
            self._pause_s.observe(pause_s)
        if step.is_closed:
            self._holds_duty.wake()
        self._changed(following)


def _is_due(following: Following, now: float) -> bool:
    at = following.due_at()
    return at is not None and at <= now


def _end(reader: StreamReader, stream: str) -> int:
    """The offset of the next message; 0 where the partition was retired and its stream is gone."""
    try:
        return reader.bounds(stream).end
    except StreamNotFound:
        return 0
