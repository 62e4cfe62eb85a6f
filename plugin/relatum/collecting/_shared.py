"""What the threads of a collector share: its state under a lock, and how they wait."""

import threading
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

from relatum.collecting._bulk import Collected
from relatum.collecting._bulk_steps import Consumed
from relatum.collecting._collector_options import CollectorLimits
from relatum.collecting._collector_state import State, logger
from relatum.collecting._intake import Gathered
from relatum.collecting._ports import Store
from relatum.errors import Conflict
from relatum.waiting import Pauses, ended, may_be_mended, may_repeat

T = TypeVar("T")

NOT_STORED: Final = "collector %r: %d messages (of the stream %r, or given where that is None) are not stored: %s"
"""What is logged of messages that go back to where they came from."""


class Abandoned(Exception):
    """The collector was closed before a server came back; what was under way is left to another member."""


class Shared(State):
    """The state of a running collector, as its threads share it.

    Attributes:
        changed: Its lock guards `core` and `intake`; notified when either changed.
        stopping: Set when nothing new is to be read.
        abandoned: Set when nobody waits for servers any more.
    """

    def __init__(self, store: Store, limits: CollectorLimits, broker: str = "") -> None:
        super().__init__(store, limits, broker)
        self.changed = threading.Condition()
        self.stopping = threading.Event()
        self.abandoned = threading.Event()

    def persist(self, call: Callable[[], T], what: str) -> T:
        """Repeat a call until servers, and those who set them up, let it succeed.

        Args:
            call: What to do.
            what: What that is, for the log where it has to wait: "storing messages".

        Raises:
            Abandoned: The collector was closed meanwhile.
            Exception: What no waiting cures: another member did it first (`Conflict`), a value that PostgreSQL cannot
                hold, a defect. It is about what was to be done, and would be the same the next time.
        """
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

    def notify(self) -> None:
        """Wake all who wait for a change."""
        with self.changed:
            self.changed.notify_all()

    # --- into the store -------------------------------------------------------------------------------------------

    def store_gathered(self, gathered: Gathered) -> None:
        """Store messages, tell of them, and hand them to the core: a result is never told before `collected` is."""
        try:
            stored = self.persist(lambda: self.add(gathered), "storing messages")
        except (Conflict, Abandoned) as error:
            logger.warning(NOT_STORED, self.store.name, len(gathered.messages), gathered.stream, ended(error))
            with self.changed:
                self.intake.lost(gathered)
                self.changed.notify_all()
            return
        except Exception as error:  # noqa: BLE001 - one lot must not end what stores all others
            with self.changed:
                self.not_storable(gathered, error)
                self.changed.notify_all()
            return
        with self.changed:
            ours = self.intake.stored(gathered, stored)
        self.handlers.tell(self.collected_outcomes(ours))
        with self.changed:
            self.added(gathered, ours)
            self.changed.notify_all()

    # --- out of it ------------------------------------------------------------------------------------------------

    def tell_consumed(self, messages: Sequence[Collected], consumed: Consumed) -> None:
        """Tell the handlers of what has become final."""
        self.handlers.tell(self.final_outcomes(messages, consumed))
