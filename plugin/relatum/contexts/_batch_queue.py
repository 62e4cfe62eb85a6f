"""The batches of a member: waiting for them, the next partition's turn, and commits.

The loop hands batches out. The application's threads wait for them and commit them: PostgreSQL fences the commit, and
the loop learns of it afterwards. After any failure in the loop, the partition is reopened from its stored state.
"""

import asyncio
import copy
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import sqlalchemy as sa

from relatum.contexts._context_options import SerialStatistics
from relatum.contexts._partition_following import Following, Step
from relatum.contexts._serial_store import ConsumerStore, lost
from relatum.errors import AccessRefused, ConfigurationError, DatabaseUnavailable, PartitionLost
from relatum.metrics import Histogram
from relatum.store.settling import CommitInDoubt
from relatum.waiting import ComponentLoop, Duty, Outages, Pauses

if TYPE_CHECKING:
    from relatum.contexts._serial_partition import Partition

POLL_S: Final = 0.01
"""Seconds between queries whether a hold is complete; longer for old holds."""

POLL_SLOWEST_S: Final = 0.1
"""The longest such interval."""

Taken: TypeAlias = tuple[Following, Step]
"""A batch that was handed out: its partition and step."""


class Batches:
    """The batches of a member: which are due, who waits for them, and their commits."""

    loop: ComponentLoop
    returned: Callable[[], None]
    """Called when a partition to be released may have no more batch in use."""
    holds: Duty
    """Releases holds."""

    def __init__(self, store: ConsumerStore, outages: Outages, header: str | None) -> None:
        self.store = store
        self.outages = outages
        self.header = header
        """The header that names contexts; None until it is known."""
        self.partitions: dict[str, Partition] = {}
        self.leased_until = -math.inf
        """The end of the lease by `time.monotonic`; after it, other members may consume the same messages."""
        self.refused: AccessRefused | ConfigurationError | None = None
        """Why the broker refuses this member, or None."""
        self.stopping = threading.Event()
        self._waiting: deque[Future[Taken]] = deque()
        self._counting = threading.Lock()
        self._served = self._delivered = self._acknowledged = 0
        self._pause_s = Histogram()

    @property
    def followings(self) -> list[Following]:
        """The open partitions. Thread-safe."""
        found = [each.following for each in list(self.partitions.values())]
        return [following for following in found if following is not None and not following.is_over]

    def statistics(self) -> SerialStatistics:
        """The counts of this member. Thread-safe."""
        held = [following.held for following in self.followings]
        return SerialStatistics(
            partitions=len(held),
            delivered=self._delivered,
            acknowledged=self._acknowledged,
            held_messages=sum(messages for messages, _ in held),
            held_bytes=sum(bytes_ for _, bytes_ in held),
            pause_s=self._pause_s.observed(),
        )

    # --- waiting for one, in any thread -----------------------------------------------------------------------------

    def wait(self, *, at_once: bool) -> "Future[Taken]":
        """Return a future of a batch, to be ended by `taken` or `give_up`; `at_once` cancels it if none is ready."""
        waiting: Future[Taken] = Future()
        self._waiting.append(waiting)
        if self.stopping.is_set() or not self.loop.call(self._begin_wait, waiting, at_once):
            waiting.cancel()
        return waiting

    def taken(self, waiting: "Future[Taken]") -> Taken | None:
        """End a wait and return its batch, if any; raise if the broker refuses this member."""
        if waiting.cancel():
            self.loop.call(self._end_wait, waiting)
            return None
        following, step = waiting.result()
        if time.monotonic() < self.leased_until:
            return following, step
        # The lease expired in the meantime.
        self.give_back(following, step)
        return None

    def give_up(self, waiting: "Future[Taken]") -> None:
        """End a wait; if it has a batch, hand it out again."""
        with suppress(AccessRefused, ConfigurationError):
            taken = self.taken(waiting)
            if taken is not None:
                self.give_back(*taken)

    def give_back(self, following: Following, step: Step) -> None:
        self.loop.call(self._change, following, Following.give_back, step)

    def stop(self) -> None:
        """Stop handing out; pending waits end without a batch."""
        self.stopping.set()
        for waiting in list(self._waiting):
            waiting.cancel()

    # --- handing out, in the loop -----------------------------------------------------------------------------------

    def _begin_wait(self, waiting: "Future[Taken]", at_once: bool) -> None:
        self.hand_out()
        if at_once and waiting.cancel():
            self._end_wait(waiting)

    def _end_wait(self, waiting: "Future[Taken]") -> None:
        with suppress(ValueError):
            self._waiting.remove(waiting)

    def hand_out(self) -> None:
        """Complete waits with batches while the lease is valid; partitions take turns."""
        while self._waiting and (following := self._next_due()) is not None:
            with self._or_anew(following):
                step = following.take(time.monotonic())
            waiting = self._waiting.popleft()
            if not waiting.set_running_or_notify_cancel():
                following.give_back(step)
                continue
            self._delivered += step.count
            self.partitions[following.stream].wake()
            waiting.set_result((following, step))
        while self._waiting and self.refused is not None:
            waiting = self._waiting.popleft()
            if waiting.set_running_or_notify_cancel():
                error = copy.copy(self.refused)
                error.__cause__ = self.refused
                waiting.set_exception(error)

    def _next_due(self) -> Following | None:
        now = time.monotonic()
        if now >= self.leased_until:
            return None
        due = [each for each in self.partitions.values() if each.following and _is_due(each.following, now)]
        if not due:
            return None
        partition = min(due, key=lambda each: each.served)
        self._served += 1
        partition.served = self._served
        return partition.following

    def halt(self) -> bool:
        """Hand out nothing until the next lease; return whether the application has a batch."""
        self.leased_until = -math.inf
        steps = [following.outstanding for following in self.followings]
        return any(step is not None and step.count for step in steps)

    def look(self, following: Following) -> None:
        """Do what is due for a changed partition: hand out a batch, or store its position."""
        partition, now = self.partitions.get(following.stream), time.monotonic()
        if partition is None or partition.following is not following:
            return
        silent_at = following.silent_due_at()
        if silent_at is not None and silent_at <= now:
            self.loop.spawn(self._store_silent(following, following.take(now)))
            partition.wake()
            silent_at = None
        due_at = following.due_at()
        if due_at is not None and due_at <= now:
            self.hand_out()
            due_at = None
        at = min((at for at in (silent_at, due_at) if at is not None), default=partition.looks_at)
        if at != partition.looks_at:
            partition.looks_at = at
            self.loop.call_later(at - now, self._look_again, partition)

    def _look_again(self, partition: "Partition") -> None:
        partition.looks_at = 0.0
        if partition.following is not None:
            self._change(partition.following)

    def _change(self, following: Following, change: Callable[..., None] | None = None, *args: Any) -> None:
        """Change a partition, then do what is due for it."""
        with self._or_anew(following):
            if change is not None:
                change(following, *args)
            self.look(following)
        partition = self.partitions.get(following.stream)
        if partition is not None:
            partition.wake()
        if following.is_leaving:
            self.returned()

    @contextmanager
    def _or_anew(self, following: Following) -> Iterator[None]:
        try:
            yield
        except Exception:
            following.is_over = True
            if (partition := self.partitions.get(following.stream)) is not None:
                partition.wake()
            raise

    # --- storing positions and holds, in the loop --------------------------------------------------------------------

    def _committed(self, following: Following, step: Step) -> None:
        for pause_s in following.committed(step, time.monotonic()):
            self._pause_s.observe(pause_s)
        if step.is_closed:
            self.holds.wake()

    async def _store_silent(self, following: Following, step: Step) -> None:
        """Store the position of a partition that has no messages for the application."""
        who, pauses = f"storing the position in {following.stream!r}", Pauses()
        while not following.is_over:
            try:
                await self.loop.ask(self.commit, following, step)
            except PartitionLost:
                break  # another member stores it
            except Exception as error:  # noqa: BLE001 - any failure is retried
                self.outages.failed(who, error)
                await asyncio.sleep(pauses.after(error))
            else:
                self.outages.over(who)
                return
        self.outages.forget(who)

    async def release_holds(self) -> float:
        """Release complete holds; return the seconds until the next query."""
        now = time.monotonic()
        waiting = {each.partition_id: each.youngest_wait_s(now) for each in self.followings if each.waiting_holds()}
        if not waiting:
            return POLL_SLOWEST_S
        complete = await self.loop.ask(self.store.complete, list(waiting))
        for following in self.followings:
            for partition_id, move_id in complete:
                if following.partition_id == partition_id:
                    self._change(following, Following.release, move_id, time.monotonic())
        return min(POLL_SLOWEST_S, max(POLL_S, min(waiting.values()) / 200))

    # --- commits, in the application's threads ----------------------------------------------------------------------

    def check(self, following: Following, step: Step) -> None:
        """Raise `PartitionLost` if a batch can no longer be committed."""
        if following.is_over or following.outstanding is not step:
            raise lost(following.stream, self.store.name)

    def commit(self, following: Following, step: Step) -> None:
        """Store a step that was handed out. Repeat it if PostgreSQL is unavailable."""
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

    def _was_committed(self, following: Following, step: Step) -> bool:
        """Whether an earlier commit without an answer took effect; False if there was none."""
        token = following.in_doubt
        if token is None:
            return False
        was_committed = self.store.was_committed(token)
        following.in_doubt = None
        if was_committed:
            self._note(following, step)
        return was_committed

    @contextmanager
    def transaction(self, following: Following, step: Step) -> Iterator[sa.Connection]:
        """Open a transaction that stores a step when it commits; see `SerialBatch.transaction`."""
        self.check(following, step)
        if self._was_committed(following, step):
            raise lost(following.stream, self.store.name)
        try:
            with self.store.joined(following, step, stop=self.stopping) as connection:
                yield connection
        except (PartitionLost, CommitInDoubt):
            # After a commit in doubt the partition is reopened: messages that were not committed are delivered again,
            # by this member or another.
            self._drop(following)
            raise
        self._note(following, step)

    def _drop(self, following: Following) -> None:
        following.is_over = True
        self.loop.call(self._change, following)

    def _note(self, following: Following, step: Step) -> None:
        with self._counting:
            self._acknowledged += step.count
        self.loop.call(self._change, following, self._committed, step)


def _is_due(following: Following, now: float) -> bool:
    at = following.due_at()
    return at is not None and at <= now
