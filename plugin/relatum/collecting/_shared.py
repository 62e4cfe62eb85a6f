"""What the threads of a collector share: the core under its lock, the store, the member, and how they wait."""

import logging
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final, TypeVar

from relatum.collecting._bulk import Collected
from relatum.collecting._core import Core
from relatum.collecting._handlers import Handlers
from relatum.collecting._intake import Gathered, Intake
from relatum.collecting._options import CollectorLimits
from relatum.collecting._ports import Store, Stored
from relatum.collecting._results import collected_outcome, outcome_of
from relatum.collecting._steps import Consumed
from relatum.errors import Conflict, DatabaseUnavailable, RelatumError
from relatum.recording._writer import ended

logger = logging.getLogger("relatum.collector")

BACKOFF_S: Final = (0.05, 5.0)
"""Least and most seconds before a server that is away is asked again: doubled each time, half of it by chance."""

T = TypeVar("T")


class Abandoned(Exception):
    """The collector was closed before a server came back; what was under way is left to another member."""


def backoff() -> Iterator[float]:
    """The pauses between tries."""
    pause, longest = BACKOFF_S
    while True:
        yield pause * (0.5 + random.random() / 2)  # noqa: S311 - spreads tries, nothing secret
        pause = min(pause * 2, longest)


class Shared:
    """The state of a running collector.

    Attributes:
        changed: Its lock guards `core` and `intake`; notified when either changed.
        core: What is flushed when.
        intake: What is on its way into the store.
        store: The store.
        handlers: Who is told.
        member: This member's id.
        stopping: Set when nothing new is to be read.
        abandoned: Set when nobody waits for servers any more.
    """

    def __init__(self, store: Store, limits: CollectorLimits) -> None:
        self.changed = threading.Condition()
        self.core = Core(limits)
        self.intake = Intake(self.core)
        self.store = store
        self.handlers = Handlers()
        self.member = 0
        self.stopping = threading.Event()
        self.abandoned = threading.Event()

    def persist(self, call: Callable[[], T], what: str) -> T:
        """Repeat a call until it succeeds: what it does must be done, whatever is in its way.

        Raises:
            Abandoned: The collector was closed meanwhile.
            Conflict: Another member did it first.
        """
        pauses = backoff()
        while not self.abandoned.is_set():
            try:
                return call()
            except Conflict:
                raise
            except Exception as error:  # noqa: BLE001 - logged; a defect of a moment must not lose what is under way
                log_defect(error, what)
            self.abandoned.wait(next(pauses))
        raise Abandoned

    def notify(self) -> None:
        """Wake all who wait for a change."""
        with self.changed:
            self.changed.notify_all()

    # --- into the store -------------------------------------------------------------------------------------------

    def store_gathered(self, gathered: Gathered) -> None:
        """Store messages, tell of them, and hand them to the core: a result is never told before `collected` is."""
        try:
            stored = self.persist(lambda: self._add(gathered), "messages not stored yet")
        except (Conflict, Abandoned) as error:
            logger.warning("messages not stored: %s", ended(error), extra={"stream": gathered.stream})
            with self.changed:
                self.intake.lost(gathered)
                self.changed.notify_all()
            return
        with self.changed:
            ours = self.intake.stored(gathered, stored)
        self._tell_collected(ours)
        with self.changed:
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

    def _tell_collected(self, messages: Sequence[Collected]) -> None:
        wanted = [message for message in messages if self.handlers.is_wanted(message.type)]
        self.handlers.tell(collected_outcome(self.store.name, message) for message in wanted)

    # --- out of it ------------------------------------------------------------------------------------------------

    def tell_consumed(self, messages: Sequence[Collected], consumed: Consumed) -> None:
        """Tell the handlers of what has become final."""
        by_place = {message.place: message for message in messages}
        self.handlers.tell(
            outcome_of(self.store.name, by_place[result.place], result, consumed.at)
            for result in consumed.results
            if result.status.is_final and self.handlers.is_wanted(by_place[result.place].type)
        )


def log_defect(error: BaseException, what: str) -> None:
    """Log what ended a thread's work: what Relatum raises in a line, a defect with its traceback."""
    if isinstance(error, RelatumError):
        logger.warning("%s: %s", what, ended(error))
    else:
        logger.error("%s", what, exc_info=error)
