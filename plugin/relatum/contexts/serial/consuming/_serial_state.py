"""What the threads of a serial consumer's member share, and what its application is handed out of it."""

import copy
import logging
import math
import threading
import time
from collections.abc import Callable
from functools import partial

from relatum.contexts._options import SerialOptions
from relatum.contexts._statistics import SerialStatistics
from relatum.contexts.serial.consuming._partition_following import Following, Step
from relatum.errors import AccessRefused, ConfigurationError
from relatum.metrics import Histogram
from relatum.waiting import Outages, log_failure

logger = logging.getLogger("relatum.serial")

log_defect = partial(log_failure, logger)
"""Logs what ended some work: `log_defect(error, what)`."""


class Shared:
    """The partitions a member has, under one lock.

    Attributes:
        changed: Notified when there may be something to be handed out; its lock is the lock of all.
        kept: Notified when the keeper has something to do at once.
        room: Set when there is something to be gone through: events, or room for more.
        stopping: Set when nothing more is to be read.
        listeners: Called, from any thread, where `changed` is notified.
        outages: What is away.
    """

    def __init__(self, options: SerialOptions, outages: Outages) -> None:
        self.options = options
        self.outages = outages
        self.changed = threading.Condition(threading.RLock())
        self.kept = threading.Condition(self.changed._lock)  # type: ignore[attr-defined]
        self.room = threading.Event()
        self.stopping = threading.Event()
        self.listeners: list[Callable[[], None]] = []
        self.holds_changed = False
        self._leased_until = -math.inf
        self._delivered = self._acknowledged = 0
        self._pause_s = Histogram()
        self._followings: dict[int, Following] = {}
        self._refused: AccessRefused | ConfigurationError | None = None

    def statistics(self) -> SerialStatistics:
        """What this member has counted, and what it has. It asks nobody."""
        with self.changed:
            held = [following.held for following in self._followings.values()]
            return SerialStatistics(
                partitions=len(held),
                delivered=self._delivered,
                acknowledged=self._acknowledged,
                held_messages=sum(messages for messages, _ in held),
                held_bytes=sum(bytes_ for _, bytes_ in held),
                pause_s=self._pause_s.observed(),
            )

    @property
    def followings(self) -> list[Following]:
        """The partitions that are open."""
        return list(self._followings.values())

    def notify(self) -> None:
        """Tell those who wait for batches; the lock is held."""
        self.changed.notify_all()
        for listener in self.listeners:
            listener()

    def refused(self, error: AccessRefused | ConfigurationError) -> None:
        """Note that the broker does not let this member in: who waits for messages is told."""
        with self.changed:
            self._refused = error
            self.notify()

    def admitted(self) -> None:
        """Note that the broker lets this member in."""
        self._refused = None

    def add(self, following: Following) -> None:
        """Open a partition."""
        with self.changed:
            before = self._followings.get(following.partition_id)
            if before is not None:
                before.is_over = True
            self._followings[following.partition_id] = following
            self._look(following)

    def drop(self, following: Following) -> None:
        """Forget a partition, with all that is not stored of it."""
        with self.changed:
            following.is_over = True
            if self._followings.get(following.partition_id) is following:
                del self._followings[following.partition_id]
            self.room.set()
            self.notify()

    def put(self, following: Following, put: Callable[[float], None]) -> None:
        """Change a partition by what was read of it."""
        with self.changed:
            put(time.monotonic())
            self._look(following)

    def _look(self, following: Following) -> None:
        """Wake those who have something to do for a partition; the lock is held."""
        if following.due_at() is not None:
            self.notify()
        silent_at = following.silent_due_at()
        if silent_at == 0.0:
            self.kept.notify_all()

    # --- steps ------------------------------------------------------------------------------------------------------

    def halt(self) -> bool:
        """Hand out nothing for now; whether the application has a batch in hand."""
        with self.changed:
            self._leased_until = -math.inf
            steps = [following.outstanding for following in self._followings.values()]
            return any(step is not None and step.count for step in steps)

    def go_on(self, leased_until: float) -> None:
        """Hand out until the lease ends. After that, others may have its partitions, and consume the same.

        `leased_until`: As of `time.monotonic`, which goes on while the process stands still.
        """
        with self.changed:
            was_leased, self._leased_until = time.monotonic() < self._leased_until, leased_until
            if not was_leased:
                self.notify()

    def take(self, now: float) -> tuple[Following, Step] | float | None:
        """A partition with the step to be handed out of it; else when to look again, None for when notified.

        Raises:
            AccessRefused, ConfigurationError: There is none, and the broker does not let this member in.
        """
        with self.changed:
            earliest: float | None = None
            for following in self._followings.values():
                due_at = following.due_at() if now < self._leased_until else None
                if due_at is not None and due_at <= now:
                    # Behind the others, so that each has its turn.
                    self._followings[following.partition_id] = self._followings.pop(following.partition_id)
                    step = following.take(now)
                    self._delivered += step.count
                    self.room.set()
                    self._look(following)
                    return following, step
                if due_at is not None:
                    earliest = due_at if earliest is None else min(earliest, due_at)
            if self._refused is not None:
                raise copy.copy(self._refused) from self._refused
            return earliest

    def take_silent(self, now: float) -> list[tuple[Following, Step]]:
        """The steps without messages that are to be stored now."""
        taken = []
        with self.changed:
            for following in self._followings.values():
                due_at = following.silent_due_at()
                if due_at is not None and due_at <= now:
                    taken.append((following, following.take(now)))
                elif following.outstanding is not None and not following.outstanding.count:
                    # PostgreSQL did not answer the last time.
                    taken.append((following, following.outstanding))
        return taken

    def committed(self, following: Following, step: Step) -> None:
        """Note that a step is stored."""
        with self.changed:
            self._acknowledged += step.count
            for pause_s in following.committed(step, time.monotonic()):
                self._pause_s.observe(pause_s)
            if step.is_closed:
                self.holds_changed = True
                self.kept.notify_all()
            self.room.set()
            self._look(following)

    def give_back(self, following: Following, step: Step) -> None:
        """Let a batch be handed out again."""
        with self.changed:
            if following.outstanding is step and not following.is_over:
                following.give_back()
                self._look(following)

    def release(self, partition_id: int, move_id: int) -> None:
        """Note that a hold is complete."""
        with self.changed:
            following = self._followings.get(partition_id)
            if following is not None:
                following.release(move_id, time.monotonic())
                self.room.set()
                self._look(following)
