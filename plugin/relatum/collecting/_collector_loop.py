"""The loop of a collector: all that it knows, touched in one thread; what waits for servers is asked beside it."""

import asyncio
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Final, TypeVar

from relatum.collecting._bulk import Bulk, Collected
from relatum.collecting._collector_core import Abandoned, Core, Result, Stored, Verdict
from relatum.collecting._collector_status import CollectorStatistics, TypeCounts, statistics_of
from relatum.collecting._collector_store import CollectorStore
from relatum.collecting._consuming import NAMED_MAX, BulkConsumer, log_defect, outcome_of
from relatum.collecting._handlers import Handlers, inside, logger
from relatum.collecting._intake import Gathered, Intake
from relatum.errors import Conflict, DatabaseUnavailable
from relatum.outcomes import Outcome
from relatum.store.members import renewal_s
from relatum.waiting import (
    ComponentLoop,
    Outages,
    Pauses,
    Threads,
    ended,
    in_thread,
    may_be_mended,
    may_repeat,
)

if TYPE_CHECKING:
    from relatum.collecting._following import Following

TAKE_OVER_S: Final = 1.0
"""How often messages of members that died are looked for."""

TAKE_OVER_MESSAGES: Final = 1000
"""Messages taken over in one transaction."""

GATHER_MESSAGES: Final = 500
"""Messages that are stored in one transaction, where workers have bulks in the meantime."""

GATHER_S: Final = 0.02
"""How long they are waited for, at most."""

AFTER_DEFECT_S: Final = 1.0
"""Seconds between two defects of our own, so that none fills the log or a processor."""

END_S: Final = 5.0
"""Seconds to leave, once nobody is waited for: a database that does not answer is let go."""

T = TypeVar("T")


class CollectorLoop:
    """The state of a collector. `persist`, `tell` and what only reads are for any thread, all else for the loop's.

    Whatever changes something says so by `stir`: bulks that are closed go to workers, and who waits for a change looks.
    """

    def __init__(self, store: CollectorStore, core: Core, *, lease_s: float, broker: str) -> None:
        name = f"relatum-{store.name}"
        self.core = core
        self.intake = Intake(core)
        self.store = store
        self.handlers = Handlers()
        self.tell: Callable[[Sequence[Outcome]], None] = self.handlers.tell
        self.member = 0
        self.counts: defaultdict[str, TypeCounts] = defaultdict(TypeCounts)
        self.outages = Outages(logger, broker=broker, database=store.server)
        self.loop = ComponentLoop(name, logger, ending=store.ending)
        self.workers: dict[str, BulkConsumer] = {}
        self.following: Following | None = None
        self.is_stopping = self.in_time = False
        self.abandoned = threading.Event()
        self.on_abandon: Callable[[], None] = lambda: None
        self.lease_s = lease_s
        # Each its own: the lease waits behind nothing, and what is stored behind no broker that does not answer. One
        # more than calls at once where they follow each other: a thread is free a moment after its call has ended.
        self._keeping = Threads(1, f"{name}-lease")
        self._taking_over = Threads(2, f"{name}-others")
        self._storing = Threads(2, f"{name}-stores")
        self._leaving = Threads(1, f"{name}-leaves")
        self._threads = self._keeping, self._taking_over, self._storing, self._leaving
        self._changed = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._tick_at: float | None = None
        self._storer: asyncio.Task[None] | None = None
        self._end: asyncio.Task[None] | None = None

    # --- asked by any thread ------------------------------------------------------------------------------------------

    def statistics(self) -> CollectorStatistics:
        """What this member has counted, and what it holds. It asks nobody."""
        return statistics_of(self.core, self.intake, self.counts)

    def who(self, does: str) -> str:
        """Who does something, as the log names it where it has to wait."""
        return f"collector {self.store.name!r}, {does},"

    @property
    def is_cut_off(self) -> bool:
        """Whether it does not reach the broker, as others may: they have what it would have to read."""
        return self.following is not None and self.following.reach.is_cut_off

    def persist(self, call: Callable[[], T], what: str) -> T:
        """Repeat a call until servers, and those who set them up, let it succeed. It blocks: not in the loop."""
        pauses, who = Pauses(), self.who(what)
        while not self.abandoned.is_set():
            try:
                done = call()
            except Exception as error:
                if not (may_repeat(error) or may_be_mended(error)):
                    self.outages.forget(who)
                    raise
                self.outages.failed(who, error)
                pause = pauses.after(error)
            else:
                self.outages.over(who)
                return done
            self.abandoned.wait(pause)
        self.outages.forget(who)
        raise Abandoned

    # --- what has changed ---------------------------------------------------------------------------------------------

    def stir(self) -> None:
        """Go on with what a change allows."""
        if not self.abandoned.is_set():
            for type_, worker in self.workers.items():
                while (bulk := self.core.take(type_)) is not None:
                    self.loop.spawn(self._consume(worker, bulk))
            self._set_timer()
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def changed(self, until: float | None = None) -> bool:
        """Wait for the next change; False where the time was over before."""
        changed = self._changed
        if until is None:
            return await changed.wait()
        with suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, until - time.monotonic())):
                return await changed.wait()
        return False

    async def _until(self, condition: Callable[[], bool], until: float) -> bool:
        """Wait until a condition holds, or time is over, or the collector is abandoned; whether it holds."""
        while not condition():
            if self.abandoned.is_set() or not await self.changed(until):
                return condition()
        return True

    def _set_timer(self) -> None:
        """Have bulks closed when their time has come, and retries begun."""
        tick_at = self.core.deadline()
        if tick_at == self._tick_at:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._tick_at = tick_at
        if tick_at is not None:
            self._timer = self.loop.call_later(max(0.0, tick_at - time.monotonic()), self._tick)

    def _tick(self) -> None:
        self._tick_at = None
        self.core.tick(time.monotonic())
        self.stir()

    # --- its beginning ------------------------------------------------------------------------------------------------

    def begin(self, names: Sequence[str]) -> None:
        """Begin to follow streams, to store, to hand bulks on, and to keep the lease."""
        rest_s = min(TAKE_OVER_S, renewal_s(self.lease_s))
        self._storer = self.loop.spawn(self._store_on())
        self.loop.repeat(self._renew, self.who("keeping its lease"), self.outages, rest_s)
        self.loop.repeat(self._look_after_others, self.who("looking after other members"), self.outages, rest_s)
        if self.following is not None:
            self.following.open(names)
        self.stir()

    async def _renew(self) -> float:
        if not await self.loop.ask(self.store.renew, self.member, threads=self._keeping):
            # Another member took all there was. What is still in memory is found to be another's when it is stored.
            logger.info("collector %r: the lease had run out, joining anew", self.store.name)
            self.member = await self.loop.ask(self.store.open, self.core.types, self.lease_s, threads=self._keeping)
            self._wake_streams()
        return renewal_s(self.lease_s)

    async def _look_after_others(self) -> float:
        """Take over what members that died have left, as far as there is room."""
        while True:
            was_cut_off = self.is_cut_off
            if self.following is not None:
                self.following.reach.look()
            if self.is_cut_off != was_cut_off:
                self._wake_streams()
            if self.is_cut_off:
                break
            room, types = self.core.room_for_others(TAKE_OVER_MESSAGES), self.core.types_with_room()
            if not (room and types):
                break
            found = await self.loop.ask(self.store.take_over, self.member, types, room, threads=self._taking_over)
            if not found:
                break
            text = "collector %r: %d messages of members that ended are taken over"
            logger.info(text, self.store.name, len(found), extra={"messages": len(found)})
            self.core.adopt(found, time.monotonic())
            self.stir()
        return min(TAKE_OVER_S, renewal_s(self.lease_s))

    def _wake_streams(self) -> None:
        """Have all streams look whether they are still this member's to read."""
        if self.following is not None:
            self.following.wake()
        self.stir()

    # --- messages in --------------------------------------------------------------------------------------------------

    async def collect(self, messages: Sequence[Collected], timeout_s: float | None) -> list[bool]:
        """Take messages as there is room, in order; those for which there was none in time are refused."""
        until = None if timeout_s is None else time.monotonic() + timeout_s
        taken: list[bool] = []
        said = 0
        for message in messages:
            while (verdict := self.intake.collect(message)) is Verdict.WAIT:
                if said < len(taken):
                    # What was taken before makes room as it is consumed.
                    said = len(taken)
                    self.stir()
                if not await self.changed(until):
                    verdict = Verdict.REFUSED
                    self.intake.refused += 1
                    break
            taken.append(verdict in (Verdict.TAKEN, Verdict.KNOWN))
        self.stir()
        return taken

    async def flush(self, type_: str | None, waits: bool) -> None:
        """Close bulks, with all in them that was taken before: it waits until that is stored."""
        mark = self.intake.mark()
        while waits and not self.intake.is_stored_to(mark) and not self.abandoned.is_set():
            await self.changed()
        self.core.flush(type_)
        self.stir()

    # --- into the store -----------------------------------------------------------------------------------------------

    async def _store_on(self) -> None:
        """Store what is gathered, again and again: while one lot is committed, the next one is gathered."""
        while not self.abandoned.is_set():
            try:
                if self.intake.is_anything_gathered:
                    await self._let_gather()
                    for gathered in self.intake.next():
                        await self._store(gathered)
                else:
                    await self.changed()
            except Exception as error:  # noqa: BLE001 - no defect may end it for all that comes
                log_defect(error, self.who("storing messages"))
                await asyncio.sleep(AFTER_DEFECT_S)

    async def _let_gather(self) -> None:
        """Let more come into one transaction while no worker waits for it."""
        until = time.monotonic() + GATHER_S
        while self.core.has_waiting_bulks and self.intake.gathered < GATHER_MESSAGES and not self.is_stopping:
            if not await self.changed(until):
                return

    async def _store(self, gathered: Gathered) -> None:
        """Store messages, tell of them, and hand them to the core: a result is never told before `collected` is."""
        try:
            stored = await in_thread(self._storing, self.persist, partial(self._add, gathered), "storing messages")
            ours = self.intake.stored(gathered, stored)
        except (Conflict, Abandoned) as error:
            # They go back to where they came from.
            text = "collector %r: %d messages (of the stream %r, or given where that is empty) are not stored: %s"
            logger.warning(text, self.store.name, len(gathered.messages), gathered.stream, ended(error))
            self._lost(gathered, None)
            return
        except Exception as error:  # noqa: BLE001 - one lot must not end what stores all others
            places = ", ".join(str(message.place) for message in gathered.messages[:NAMED_MAX])
            what = f"collector {self.store.name!r}: {len(gathered.messages)} messages refused by the store: {places}"
            log_defect(error, what)
            # Those given are refused; a stream is followed anew later.
            self._lost(gathered, error)
            return
        wanted = self.handlers.is_wanted
        outcomes = [outcome_of(self.store.name, message) for message in ours if wanted(message.type)]
        if outcomes:
            await in_thread(self._storing, self._tell_collected, outcomes)
        for message in ours:
            self.counts[message.type].collected += 1
        self.intake.add(gathered, ours, time.monotonic())
        self.stir()

    def _add(self, gathered: Gathered) -> Stored:
        try:
            return self.store.add(self.member, gathered.messages, gathered.advance)
        except Conflict as error:
            if gathered.stream:
                raise
            # This member is gone, and joins anew in a moment. What was given is nowhere else: it must be stored.
            raise DatabaseUnavailable(str(error)) from error

    def _tell_collected(self, outcomes: Sequence[Outcome]) -> None:
        with inside(self, is_storing=True):
            self.tell(outcomes)

    def _lost(self, gathered: Gathered, error: Exception | None) -> None:
        self.intake.lost(gathered, error)
        if gathered.stream and self.following is not None:
            self.following.lost(gathered.stream, error)
        self.stir()

    # --- out of it ----------------------------------------------------------------------------------------------------

    async def _consume(self, worker: BulkConsumer, bulk: Bulk) -> None:
        began, results = time.monotonic(), list[Result]()
        try:
            results = await in_thread(worker.threads, worker.take, bulk)
        except Exception as error:  # noqa: BLE001 - one bulk must not end what consumes all others
            log_defect(error, self.who(f"a bulk of type {bulk.type!r}") + " not consumed")
        now = time.monotonic()
        self.counts[bulk.type].settled(results, now - began)
        self.core.settle(bulk, results, now)
        self.stir()

    # --- its end ------------------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Take nothing more, and close all bulks."""
        self.is_stopping = True
        self.core.stop()
        self._wake_streams()

    def abandon(self) -> None:
        """Wait for nobody any more: what is under way is left to another member, or to the next start."""
        if self.abandoned.is_set():
            return
        self.abandoned.set()
        self.store.end_in(END_S)
        self.on_abandon()
        self.stop()

    async def close(self, timeout_s: float, unwinding_s: float, leave: Callable[[], None]) -> None:
        """Stop in order: once, whoever asks. `in_time` says then whether all was done in time.

        Executors that were not have `unwinding_s` more to end; `leave` leaves all servers.
        """
        if self._end is None:
            self._end = self.loop.spawn(self._close(timeout_s, unwinding_s, leave))
        await asyncio.shield(self._end)

    async def _close(self, timeout_s: float, unwinding_s: float, leave: Callable[[], None]) -> None:
        until, following = time.monotonic() + timeout_s, self.following
        self.stop()
        if following is not None:
            await self._until(lambda: not following.is_following, until)
        is_done = await self._until(lambda: self.intake.is_empty and self.core.is_idle, until)
        in_time = is_done and not self.abandoned.is_set()
        self.abandon()
        unwound = time.monotonic() + unwinding_s
        while self.core.is_running and await self.changed(unwound):
            pass
        try:
            if self._storer is not None:
                await asyncio.wait([self._storer], timeout=END_S)
            if following is not None:
                await asyncio.wait([self.loop.spawn(following.close())], timeout=END_S)
            # In a thread that nothing else can hold; what it asks of a server has an end of its own.
            await in_thread(self._leaving, leave)
        finally:
            self.in_time = in_time
            for threads in self._threads:
                threads.shutdown()
            for worker in self.workers.values():
                worker.threads.shutdown()
            self.loop.stop(0.0)

    def joined(self, timeout_s: float) -> None:
        """Wait until its threads have ended, beside those of executors that go on. Not in one of them."""
        self.loop.stop(timeout_s)
        for threads in (*self._threads, self.loop.threads):
            threads.join(timeout_s)
