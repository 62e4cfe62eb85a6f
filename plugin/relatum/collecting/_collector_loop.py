"""A collector's event loop: its thread owns all state, and helper threads run the calls that wait for a server."""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Final, TypeVar

from relatum import metrics
from relatum.collecting._bulk import Bulk, Collected
from relatum.collecting._collector_core import Abandoned, Core, Lot, Stored, Verdict
from relatum.collecting._collector_status import CollectorStatistics
from relatum.collecting._collector_store import CollectorStore
from relatum.collecting._consuming import NAMED_MAX, BulkConsumer
from relatum.collecting._following import TAKE_MESSAGES, Following, NamedStreams
from relatum.collecting._handlers import Handlers, collector_call, logger, outcome_of
from relatum.common.ids import MessageId
from relatum.common.waiting import (
    LOOK_S,
    ComponentLoop,
    Outages,
    Pauses,
    RepeatedTask,
    Threads,
    in_thread,
    log_failure,
    may_repeat,
    needs_operator,
)
from relatum.errors import Conflict, DatabaseUnavailable, RelatumError, RowRefused
from relatum.outcomes import Outcome
from relatum.store.members import renewal_s

TAKE_OVER_S: Final = 1.0
"""Seconds between searches for messages of dead members."""

TAKE_OVER_MESSAGES: Final = 1000
"""Maximum messages taken over in one transaction."""

GATHER_S: Final = 0.02
"""Seconds that a transaction with few messages waits for more while the workers are busy."""

END_S: Final = 5.0
"""Maximum seconds of the last calls to PostgreSQL and the broker, after the executors. Then connections are dropped."""

T = TypeVar("T")


class CollectorLoop:
    """The state of a collector. Any thread may call `persist`, `notify_handlers` and methods that only read.

    Every change ends with `notify`, which hands closed bulks to workers and wakes the tasks that wait in `changed`.
    """

    def __init__(self, store: CollectorStore, core: Core, streams: NamedStreams, lease_s: float) -> None:
        name = f"relatum-{store.name}"
        self.core = core
        self.store = store
        self.streams = streams
        self.handlers = Handlers()
        self.notify_handlers: Callable[[Sequence[Outcome]], None] = self.handlers.notify
        self.member = 0
        self.outages = Outages(logger, broker=str(streams.address or ""), database=store.server)
        self.loop = ComponentLoop(name, logger, ending=store.ending)
        self.workers: dict[str, BulkConsumer] = {}
        self.following: Following | None = None
        self.refused = 0
        self.in_time = False
        self.abandoned = threading.Event()
        self.on_abandon: Callable[[], None] | None = None
        """Cancels executors in an application's event loop."""
        self.lease_s = lease_s
        # Separate threads: renewals never wait, and storing never waits for an unavailable broker. One more thread than
        # concurrent calls, since a thread becomes free only a moment after its call has ended.
        self._lease_threads = Threads(3, f"{name}-lease")
        self._store_threads = Threads(2, f"{name}-stores")
        self._changed = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._collected = Lot()
        self._lots: set[Lot] = set()  # waiting to be stored, or being stored
        self._store_lock = asyncio.Lock()
        self._renewal: RepeatedTask | None = None
        self._closing: asyncio.Task[None] | None = None

    # --- for any thread -----------------------------------------------------------------------------------------------

    def statistics(self) -> CollectorStatistics:
        core = self.core
        return CollectorStatistics(
            types={name: each.counts.statistics(core.waiting_bulks(name)) for name, each in list(self.workers.items())},
            held_messages=len(core.held),
            held_bytes=core.held_bytes,
            passed_over=core.passed_over,
            refused=self.refused,
        )

    def label(self, action: str) -> str:
        return f"collector {self.store.name!r}, {action},"

    def persist(self, call: Callable[[], T], what: str) -> T:
        """Repeat a blocking call after transient errors until it succeeds. Raises `Abandoned` after the close."""
        pauses, label = Pauses(), self.label(what)
        while not self.abandoned.is_set():
            try:
                done = call()
            except Exception as error:
                if not (may_repeat(error) or needs_operator(error)):
                    self.outages.forget(label)
                    raise
                self.outages.failed(label, error)
                pause = pauses.after(error)
            else:
                self.outages.over(label)
                return done
            self.abandoned.wait(pause)
        self.outages.forget(label)
        raise Abandoned

    # --- changes ------------------------------------------------------------------------------------------------------

    def notify(self) -> None:
        """Give closed bulks to free workers, and wake the tasks that wait for a change."""
        if not self.abandoned.is_set():
            for type_, worker in self.workers.items():
                while (bulk := self.core.take(type_)) is not None:
                    self.loop.spawn(self._consume(worker, bulk))
            # The timer is for bulks to close by age or idleness, and for due retries.
            if self._timer is not None:
                self._timer.cancel()
            self._timer, due_at = None, self.core.deadline()
            if due_at is not None:
                self._timer = self.loop.call_later(max(0.0, due_at - time.monotonic()), self._tick)
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def changed(self, until: float | None = None) -> bool:
        """Wait for the next change; return False if it did not come in time."""
        with suppress(TimeoutError):
            async with asyncio.timeout(None if until is None else max(0.0, until - time.monotonic())):
                return await self._changed.wait()
        return False

    async def _until(self, condition: Callable[[], bool], until: float) -> None:
        while not condition() and await self.changed(until):
            pass

    def _tick(self) -> None:
        self.core.tick(time.monotonic())
        self.notify()

    # --- start --------------------------------------------------------------------------------------------------------

    def begin(self, names: Sequence[str]) -> None:
        rest_s = min(TAKE_OVER_S, renewal_s(self.lease_s))
        self._renewal = self.loop.repeat(self._renew, self.label("renewing its lease"), self.outages, rest_s)
        if self.streams.address is not None:
            # Without a broker, this member could not read the bodies of messages taken over.
            self.loop.repeat(self._take_over, self.label("taking over from dead members"), self.outages, rest_s)
        self.loop.repeat(self._forget, self.label("deleting finished messages"), self.outages)
        if self.following is not None:
            self.following.open(names)
        self.notify()

    async def _renew(self) -> float:
        if not await self.loop.ask(self.store.renew, self.member, threads=self._lease_threads):
            # Another member took all messages over. The store ignores results of messages this member no longer owns.
            logger.info("collector %r: the lease had lapsed, joining as a new member", self.store.name)
            self.member = await self.loop.ask(self.store.open, self.workers, self.lease_s, threads=self._lease_threads)
            self._wake_streams()
        return renewal_s(self.lease_s)

    async def _forget(self) -> float:
        # Separate from the renewal: a deletion may wait for locks longer than the lease lasts.
        await self.loop.ask(self.store.forget)
        return renewal_s(self.lease_s)

    async def _take_over(self) -> float:
        """Take over unfinished messages of dead members while there is room."""
        while self.following is None or not self.following.is_cut_off:
            room, types = self.core.room_for_others(TAKE_OVER_MESSAGES)
            if not (room and types):
                break
            take_over = partial(self.store.take_over, self.member, types, room, held=self.core.held)
            found, lost = await self.loop.ask(take_over, threads=self._lease_threads)
            # During the takeover, a message at the same place may have been read: it cannot be stored.
            held = self.core.adopt(found, time.monotonic())
            if held:
                await self._leave_to_others(held)
            if lost:
                self.core.lose(lost)
            self.notify()
            if not found:
                break
            text = "collector %r: took over %d messages of dead members"
            logger.info(text, self.store.name, len(found), extra={"messages": len(found)})
        return min(TAKE_OVER_S, renewal_s(self.lease_s))

    def _wake_streams(self) -> None:
        """Make each stream check whether this member may still read it."""
        if self.following is not None:
            self.following.wake()
        self.notify()

    # --- messages in --------------------------------------------------------------------------------------------------

    async def collect(self, messages: Sequence[Collected], timeout_s: float | None) -> list[bool]:
        """Take messages in order, waiting for room; refuse messages if there is no room in time."""
        until = None if timeout_s is None else time.monotonic() + timeout_s
        taken: list[bool] = []
        for message in messages:
            while (verdict := self.core.admit(message)) is Verdict.WAIT:
                if not await self.changed(until):
                    verdict = Verdict.REFUSED
                    break
            if verdict is Verdict.TAKEN:
                if not self._collected.messages:
                    self._lots.add(self._collected)
                    self.loop.spawn(self._store_collected())
                self._collected.messages.append(message)
            self.refused += verdict is Verdict.REFUSED
            taken.append(verdict in (Verdict.TAKEN, Verdict.KNOWN))
        return taken

    async def flush(self, type_: str | None, waits: bool) -> None:
        """Close bulks. With `waits`, first wait until all messages taken so far are stored and in bulks."""
        lots = set(self._lots)
        while waits and not self._lots.isdisjoint(lots) and not self.abandoned.is_set():
            await self.changed()
        self.core.flush(type_)
        self.notify()

    # --- storing ------------------------------------------------------------------------------------------------------

    async def _store_collected(self) -> None:
        """Store the messages of `collect` that have arrived when the previous transaction ends."""
        async with self._store_lock:
            await self.gather(len(self._collected.messages))
            lot, self._collected = self._collected, Lot()
            try:
                await self.store_lot(lot)
            except Abandoned:
                pass
            except Exception:  # noqa: BLE001 - it was logged
                self.refused += len(lot.messages)

    async def gather(self, count: int) -> None:
        """Wait a moment for more messages if there are few and the workers are busy. `count`: the messages so far."""
        are_busy = any(map(self.core.waiting_bulks, self.workers))
        if count < TAKE_MESSAGES and are_busy and not self.core.is_stopping:
            await asyncio.sleep(GATHER_S)

    async def store_lot(self, lot: Lot) -> None:
        """Store messages, call the handlers of `collected`, and put the messages into bulks, in this order.

        Stores nothing after the close (`Abandoned`), or if another member follows, or has followed, the stream
        (`Conflict`).
        """
        self._lots.add(lot)
        try:
            stored = await in_thread(self._store_threads, self.persist, partial(self._add, lot), "storing messages")
        except (Exception, Abandoned) as error:
            self.core.cancel(lot.messages)
            places = ", ".join(str(message.place) for message in lot.messages[:NAMED_MAX])
            what = f"collector {self.store.name!r}: could not store {len(lot.messages)} messages: {places}"
            if isinstance(error, Abandoned):
                logger.warning("%s: the collector was closed before PostgreSQL answered", what)
            else:
                log_failure(logger, error, what)
            if isinstance(error, Conflict | RowRefused):
                # Some messages may be stored: those of a commit whose answer was lost before another member followed
                # the stream, or those of streams stored before one was refused.
                await self._leave_to_others([message.place for message in lot.messages])
            raise
        else:
            owned = [message for message in lot.messages if message.place in stored.places]
            if len(owned) < len(lot.messages):
                self.core.cancel(message for message in lot.messages if message.place not in stored.places)
            for message in owned:
                message._note(collected_at=stored.at)
                self.workers[message.type].counts.collected += 1
            if owned and self.handlers:
                outcomes = [outcome_of(self.store.name, message) for message in owned]
                await in_thread(self._store_threads, self._notify_collected, outcomes)
            self.core.add(owned, time.monotonic())
        finally:
            self._lots.discard(lot)
            self.notify()

    async def _leave_to_others(self, places: Sequence[MessageId]) -> None:
        """Release messages that this member may have stored but does not hold: any member can take them over."""
        leave = partial(self.store.leave_to_others, self.member, places)
        with suppress(Abandoned):
            await in_thread(self._store_threads, self.persist, leave, "leaving messages to others")

    def _add(self, lot: Lot) -> Stored:
        try:
            return self.store.add(self.member, lot.messages, lot.advance)
        except Conflict as error:
            if lot.advance is not None:
                raise
            # This member was removed, and rejoins soon. No other member has these messages: repeat until stored.
            raise DatabaseUnavailable(str(error)) from error

    def _notify_collected(self, outcomes: Sequence[Outcome]) -> None:
        with collector_call(self, is_storing=True):
            self.notify_handlers(outcomes)

    # --- consuming ----------------------------------------------------------------------------------------------------

    async def _consume(self, worker: BulkConsumer, bulk: Bulk) -> None:
        began = time.monotonic()
        results = await in_thread(worker.threads, worker.take, bulk)
        now = time.monotonic()
        worker.counts.settled(results, now - began)
        self.core.settle(bulk, results, now)
        self.notify()

    # --- end ----------------------------------------------------------------------------------------------------------

    def stop(self) -> None:
        self.core.stop()
        self._wake_streams()

    def abandon(self) -> None:
        """Stop waiting for servers and executors; another member, or the next start, takes over unfinished messages."""
        if self.abandoned.is_set():
            return
        self.abandoned.set()
        self.store.ending.end_in(END_S)
        if self.on_abandon is not None:
            self.on_abandon()
        self.stop()

    async def close(self, timeout_s: float) -> None:
        """Stop in order, once for all callers. Sets `in_time`: whether all bulks were consumed in time."""
        if self._closing is None:
            self._closing = self.loop.spawn(self._close(timeout_s))
        await asyncio.shield(self._closing)

    async def _close(self, timeout_s: float) -> None:
        until, following, over = time.monotonic() + timeout_s, self.following, self.abandoned.is_set
        self.stop()
        if following is not None:
            await self._until(lambda: over() or all(each.task.done() for each in following.streams.values()), until)
        await self._until(lambda: over() or (not self._lots and self.core.is_idle), until)
        in_time = not (over() or self._lots) and self.core.is_idle
        self.abandon()
        await self._until(
            lambda: not self.core.is_running, time.monotonic() + (0.0 if self.on_abandon is None else END_S)
        )
        try:
            # A call ends, and is logged, up to `LOOK_S` after its deadline.
            await self._until(lambda: not self._lots, time.monotonic() + END_S + 2 * LOOK_S)
            if following is not None:
                await asyncio.wait([self.loop.spawn(following.follower.close())], timeout=END_S)
            if self._renewal is not None:
                self._renewal.cancel()
            # `abandon` has given its database calls a deadline.
            await in_thread(self._lease_threads, self.leave)
        finally:
            self.in_time = in_time
            for threads in (self._lease_threads, self._store_threads):
                threads.shutdown()
            for worker in self.workers.values():
                worker.threads.shutdown()
            self.loop.stop(0.0)

    def leave(self) -> None:
        """End the lease, and close all connections. Blocks."""
        try:
            self.store.close(self.member)
        except RelatumError as error:
            # The lease will lapse without this.
            log_failure(logger, error, self.label("leaving") + " could not release its lease", level=logging.INFO)
        self.streams.close()
        self.store.dispose()
        metrics.retire(self)

    def joined(self, timeout_s: float) -> None:
        """Wait until the threads have ended, except those of executors. Do not call this from one of them."""
        self.loop.stop(timeout_s)
        for threads in (self._lease_threads, self._store_threads, self.loop.threads):
            threads.join(timeout_s)
