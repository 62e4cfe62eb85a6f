"""What the threads of a collector share: its core and intake under a lock, the store, and who is told."""

import asyncio
import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from inspect import isawaitable
from typing import Final, TypeVar

from relatum.collecting._bulk import Bulk
from relatum.collecting._collector_core import Abandoned, CollectorLimits, Core, Stored
from relatum.collecting._collector_statistics import CollectorStatistics, TypeCounts, statistics_of
from relatum.collecting._collector_store import CollectorStore
from relatum.collecting._consuming import Consumed, outcome_of
from relatum.collecting._intake import Gathered, Intake
from relatum.errors import Conflict, DatabaseUnavailable
from relatum.following import Reach
from relatum.outcomes import Outcome
from relatum.waiting import Outages, Pauses, ended, log_failure, may_be_mended, may_repeat

logger = logging.getLogger("relatum.collector")

Handler = Callable[[Outcome], object]
"""Is called with an outcome: first `collected`, later the final one. With asyncio it may be a coroutine function."""


class Handlers:
    """Result handlers. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._of_all: list[Handler] = []
        self._of_type: dict[str, list[Handler]] = {}
        self._of_message: dict[str, list[Handler]] = {}

    def register(self, handler: Handler, *, type: str | None = None, message_id: str | None = None) -> None:  # noqa: A002
        """Add a handler: of a message, of a type, or of everything. One of a message goes after its final outcome."""
        with self._lock:
            if message_id is not None:
                self._of_message.setdefault(message_id, []).append(handler)
            elif type is not None:
                self._of_type.setdefault(type, []).append(handler)
            else:
                self._of_all.append(handler)

    def is_wanted(self, type: str) -> bool:  # noqa: A002
        """Whether outcomes of a type may have a handler; cheap, so that nothing is made that nobody hears."""
        return bool(self._of_all or self._of_message or type in self._of_type)

    def tell(self, outcomes: Iterable[Outcome]) -> None:
        """Call the handlers of each outcome. One that raises is logged; the others, and all else, go on."""
        for outcome in outcomes:
            for handler in self._handlers_of(outcome):
                try:
                    handler(outcome)
                except BaseException:
                    # Exits, too: they would end the thread that stores, or a worker, and nothing else.
                    logger.exception("a result handler failed", extra={"message_id": outcome.message_id})

    async def tell_async(self, outcomes: Iterable[Outcome]) -> None:
        """Call the handlers of each outcome in the running loop; what they return is awaited where it can be.

        As for `tell`, but that an exit ends the loop, and a cancellation of this task the call.
        """
        task = asyncio.current_task()
        assert task is not None, "a task runs this"
        for outcome in outcomes:
            for handler in self._handlers_of(outcome):
                try:
                    answer = handler(outcome)
                    if isawaitable(answer):
                        await answer
                except (Exception, asyncio.CancelledError) as error:
                    if isinstance(error, asyncio.CancelledError) and task.cancelling():
                        raise
                    logger.exception("a result handler failed", extra={"message_id": outcome.message_id})

    def _handlers_of(self, outcome: Outcome) -> list[Handler]:
        with self._lock:
            of_message = self._of_message.get(outcome.message_id, [])
            if outcome.is_final:
                self._of_message.pop(outcome.message_id, None)
            return [*of_message, *self._of_type.get(outcome.type or "", ()), *self._of_all]


T = TypeVar("T")


NAMED_MAX: Final = 10
"""Messages that are named in one line of the log."""

NOT_STORED: Final = "collector %r: %d messages (of the stream %r, or given where that is None) are not stored: %s"
"""What is logged of messages that go back to where they came from."""

log_defect = partial(log_failure, logger)
"""Logs what ended some work: `log_defect(error, what)`."""


class Changed(threading.Condition):
    """Notified when core or intake has changed."""

    def __init__(self) -> None:
        super().__init__()
        self.listeners: list[Callable[[], None]] = []

    def notify_all(self) -> None:
        """Wake all who wait for a change."""
        super().notify_all()
        for listener in self.listeners:
            listener()


class Shared:
    """The state of a collector, as its threads share it."""

    def __init__(self, store: CollectorStore, limits: CollectorLimits, broker: str = "") -> None:
        self.core = Core(limits)
        self.intake = Intake(self.core)
        self.store = store
        self.handlers = Handlers()
        self.tell: Callable[[Sequence[Outcome]], None] = self.handlers.tell
        self.member = 0
        self.reach: Reach | None = None
        self.counts: defaultdict[str, TypeCounts] = defaultdict(TypeCounts)
        self.outages = Outages(logger, broker=broker, database=store.server)
        self.changed = Changed()
        self.stopping = threading.Event()
        self.input_ended = False
        self.abandoned = threading.Event()

    def statistics(self) -> CollectorStatistics:
        """What this member has counted, and what it holds. It asks nobody."""
        return statistics_of(self.core, self.intake, self.counts)

    def who(self, does: str) -> str:
        """Who does something, as the log names it where it has to wait."""
        return f"collector {self.store.name!r}, {does},"

    @property
    def is_cut_off(self) -> bool:
        """Whether it does not reach the broker, as others may: they have what it would have to read."""
        return self.reach is not None and self.reach.is_cut_off

    def notify(self) -> None:
        """Wake all who wait for a change."""
        with self.changed:
            self.changed.notify_all()

    def stop(self) -> None:
        """Take nothing more, and close all bulks."""
        self.stopping.set()
        with self.changed:
            self.core.stop()
            self.changed.notify_all()

    def abandon(self) -> None:
        """Wait for nobody any more: what is under way is left to another member, or to the next start."""
        self.stop()
        self.abandoned.set()
        self.notify()

    def persist(self, call: Callable[[], T], what: str) -> T:
        """Repeat a call until servers, and those who set them up, let it succeed."""
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

    # --- into the store -------------------------------------------------------------------------------------------

    def store_gathered(self, gathered: Gathered) -> None:
        """Store messages, tell of them, and hand them to the core: a result is never told before `collected` is."""
        try:
            stored = self.persist(partial(self._add, gathered), "storing messages")
        except (Conflict, Abandoned) as error:
            logger.warning(NOT_STORED, self.store.name, len(gathered.messages), gathered.stream, ended(error))
            self._lost(gathered, None)
            return
        except Exception as error:  # noqa: BLE001 - one lot must not end what stores all others
            places = ", ".join(str(message.place) for message in gathered.messages[:NAMED_MAX])
            what = f"collector {self.store.name!r}: {len(gathered.messages)} messages refused by the store: {places}"
            log_defect(error, what)
            # Those given are refused; a stream is followed anew later.
            self._lost(gathered, error)
            return
        with self.changed:
            ours = self.intake.stored(gathered, stored)
        wanted = self.handlers.is_wanted
        self.tell([outcome_of(self.store.name, message) for message in ours if wanted(message.type)])
        with self.changed:
            for message in ours:
                self.counts[message.type].collected += 1
            self.intake.add(gathered, ours, time.monotonic())
            self.changed.notify_all()

    def _add(self, gathered: Gathered) -> Stored:
        try:
            return self.store.add(self.member, gathered.entries, gathered.advance)
        except Conflict as error:
            if gathered.advance is not None:
                raise
            # This member is gone, and joins anew in a moment. What was given is nowhere else: it must be stored.
            raise DatabaseUnavailable(str(error)) from error

    def _lost(self, gathered: Gathered, error: Exception | None) -> None:
        with self.changed:
            self.intake.lost(gathered, error)
            self.changed.notify_all()

    # --- out of it ------------------------------------------------------------------------------------------------

    def settle(self, bulk: Bulk, consumed: Consumed, began: float) -> None:
        """Tell what has become final of a bulk that was taken at that moment, and let go of what is done with."""
        by_place = {message.place: message for message in bulk.taken}
        wanted = self.handlers.is_wanted(bulk.type)
        finals = [result for result in consumed.results if wanted and result.status.is_final]
        self.tell([outcome_of(self.store.name, by_place[each.place], each, consumed.at) for each in finals])
        with self.changed:
            now = time.monotonic()
            self.counts[bulk.type].settled(consumed.results, now - began)
            self.core.settle(bulk, consumed.results, now)
            self.changed.notify_all()
