"""What the tasks of a collector share: its state, the threads behind it, and how they wait.

All of it is used in one event loop: what runs between two waits is not interrupted, and nothing is locked.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for_threads
from functools import partial
from typing import Any, Final, TypeVar

from relatum.collecting._bulk import Collected
from relatum.collecting._bulk_steps import Consumed
from relatum.collecting._collector_options import CollectorLimits
from relatum.collecting._collector_state import State, logger
from relatum.collecting._intake import Gathered
from relatum.collecting._ports import Store
from relatum.collecting._shared import NOT_STORED
from relatum.errors import Conflict
from relatum.waiting import Pauses, ended, may_be_mended, may_repeat

THREADS: Final = 8
"""Threads for the store beside one for each worker: one stores, one keeps the lease, followers ask now and then."""

T = TypeVar("T")


class Changed:
    """Lets tasks wait until something has changed."""

    def __init__(self) -> None:
        self._waiting: set[asyncio.Future[None]] = set()

    def notify(self) -> None:
        """Wake all who wait."""
        waiting, self._waiting = self._waiting, set()
        for future in waiting:
            if not future.done():
                future.set_result(None)

    async def wait(self, limit_s: float | None = None) -> None:
        """Wait for the next change, at most so many seconds; None for as long as it takes."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.add(future)
        try:
            await asyncio.wait([future], timeout=limit_s)
        finally:
            self._waiting.discard(future)


class AsyncShared(State):
    """The state of a running collector, as its tasks share it.

    Attributes:
        changed: Notified when core or intake changed.
        stopping: Set when nothing new is to be read.
        is_abandoned: Whether nobody waits for servers any more: the tasks are cancelled.
    """

    def __init__(self, store: Store, limits: CollectorLimits, broker: str = "") -> None:
        super().__init__(store, limits, broker)
        self.changed = Changed()
        self.stopping = asyncio.Event()
        self.is_abandoned = False
        self._threads: ThreadPoolExecutor | None = None
        self._calls: set[Future[Any]] = set()

    # --- blocking calls -------------------------------------------------------------------------------------------

    def begin_threads(self, workers: int) -> None:
        """Have threads for blocking calls: apart from the loop's own, which executors may use up."""
        self._threads = ThreadPoolExecutor(workers + THREADS, f"relatum-{self.store.name}")

    async def end_threads(self, timeout_s: float) -> None:
        """Let the threads go, waiting for the calls that are under way."""
        if self._threads is None:
            return
        self._threads.shutdown(wait=False, cancel_futures=True)
        waited = await asyncio.to_thread(wait_for_threads, set(self._calls), timeout_s)
        if not waited.not_done:
            await asyncio.to_thread(self._threads.shutdown)

    def submit(self, call: Callable[[], T]) -> "Future[T]":
        """Begin a blocking call."""
        assert self._threads is not None, "the collector was started"
        future = self._threads.submit(call)
        self._calls.add(future)
        future.add_done_callback(self._calls.discard)
        return future

    async def in_thread(self, call: Callable[[], T]) -> T:
        """Do a blocking call in a thread. Where this is cancelled, the call goes on to its end."""
        return await asyncio.wrap_future(self.submit(call))

    async def persist(self, call: Callable[[], Awaitable[T]], what: str) -> T:
        """Repeat a call until it succeeds; see `Shared.persist`, for what it raises too."""
        pauses, who = Pauses(), self.who(what)
        while True:
            try:
                done = await call()
            except BaseException as error:
                if not (may_repeat(error) or may_be_mended(error)):
                    self.outages.forget(who)
                    raise
                self.outages.failed(who, error)
                pause = pauses.after(error)
            else:
                self.outages.over(who)
                return done
            try:
                await asyncio.sleep(pause)
            except asyncio.CancelledError:
                self.outages.forget(who)
                raise

    async def persist_in_thread(self, call: Callable[[], T], what: str) -> T:
        """Repeat a blocking call until it succeeds; see `persist`."""
        return await self.persist(partial(self.in_thread, call), what)

    # --- into the store, and out of it ----------------------------------------------------------------------------

    async def store_gathered(self, gathered: Gathered) -> None:
        """Store messages, tell of them, and hand them to the core: a result is never told before `collected` is."""
        try:
            stored = await self.persist_in_thread(partial(self.add, gathered), "storing messages")
        except Conflict as error:
            logger.warning(NOT_STORED, self.store.name, len(gathered.messages), gathered.stream, ended(error))
            self.intake.lost(gathered)
            self.changed.notify()
            return
        except Exception as error:  # noqa: BLE001 - one lot must not end what stores all others
            self.not_storable(gathered, error)
            self.changed.notify()
            return
        ours = self.intake.stored(gathered, stored)
        await self.handlers.tell_async(self.collected_outcomes(ours))
        self.added(gathered, ours)
        self.changed.notify()

    async def tell_consumed(self, messages: Sequence[Collected], consumed: Consumed) -> None:
        """Tell the handlers of what has become final."""
        await self.handlers.tell_async(self.final_outcomes(messages, consumed))
