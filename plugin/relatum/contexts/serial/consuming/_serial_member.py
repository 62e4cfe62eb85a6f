"""One member of a serial consumer: its share of the partitions, its lease, its holds. Both faces drive it."""

import logging
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final

import sqlalchemy as sa

from relatum import metrics
from relatum.contexts._options import SerialOptions
from relatum.contexts.placement._placement_store import PlacementStore
from relatum.contexts.serial.consuming._partition_following import Following, Step
from relatum.contexts.serial.consuming._partition_reading import PartitionReader, PartitionReading
from relatum.contexts.serial.consuming._serial_state import Shared, log_defect, logger
from relatum.contexts.serial.consuming._serial_store import ConsumerStore, lost
from relatum.errors import (
    DatabaseUnavailable,
    PartitionLost,
    RelatumError,
    StreamNotFound,
    SuperStreamConflict,
)
from relatum.following import Reach
from relatum.headers import CONTEXT_HEADER
from relatum.reading import BrokerAddress, StreamReader
from relatum.store.settling import CommitInDoubt
from relatum.superstreams import Layout, describe_super_stream
from relatum.waiting import Outages

LEAVE_S: Final = 1.0
"""Seconds to give partitions back, at least, however short a close may be."""

GIVE_UP_S: Final = 10.0
"""Seconds threads have to end where the start failed."""

POLL_S: Final = 0.01
"""How often the database is asked whether a hold is complete; rarer where one waits for long."""

POLL_SLOWEST_S: Final = 0.1
"""How often at least."""


class Member:
    """A running member."""

    def __init__(
        self,
        super_stream: str,
        store: ConsumerStore,
        address: BrokerAddress,
        *,
        options: SerialOptions,
    ) -> None:
        outages = Outages(logger, broker=str(address), database=store.database.address.name)
        self.shared = Shared(options, outages)
        self.store = store
        self.header = options.header
        self._super_stream = super_stream
        self._address = address
        self._options = options
        self._reading: PartitionReading | None = None
        self._readers: dict[int, PartitionReader] = {}
        self._keeper: threading.Thread | None = None
        self._poll_at = 0.0
        self._surplus = 0
        self._holder: str | None = None

    # --- its life ---------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Join, take what is free, and begin to read. Where that fails, nothing is left of it."""
        # After one that failed, or was cancelled, too.
        self.shared.stopping.clear()
        self.store.ending.begin_anew()
        try:
            self._join()
        except BaseException:
            self.close(GIVE_UP_S)
            raise

    def _join(self) -> None:
        self.header = self._agreed_header()
        self.store.ensure(self._beginnings)
        self._reading = PartitionReading(self.shared, self.store, self._address)
        self._reach = Reach(self._reading.follower, self.shared.outages, self._any_partition)
        self._tick()
        self._keeper = threading.Thread(target=self._run, name=f"relatum-{self.store.name}-keeper", daemon=True)
        self._keeper.start()

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
        if self._options.start == "first":
            # Not where retention begins: fences and markers that it has dropped count, too.
            return {}
        with StreamReader.open(self._address) as reader:
            return {stream: _end(reader, stream) for stream in streams}

    def close(self, timeout_s: float) -> bool:
        """Stop reading and let others have the partitions; False where that took too long."""
        shared, until = self.shared, time.monotonic() + timeout_s
        # Half of the time is for a database that answers; the threads wait for another no longer.
        self.store.ending.end_in(max(LEAVE_S, timeout_s / 2))
        with shared.changed:
            shared.stopping.set()
            shared.kept.notify_all()
            shared.room.set()
            shared.notify()
        for reader in list(self._readers.values()):
            reader.stop()
        threads = [self._reading.thread] if self._reading is not None else []
        threads += [self._keeper] if self._keeper is not None else []
        for thread in threads:
            thread.join(max(0.0, until - time.monotonic()))
        has_ended = not any(thread.is_alive() for thread in threads)
        if has_ended:
            self.store.dispose()
            metrics.retire(self.shared)
        return has_ended

    # --- its keeper -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        self._keep()
        self._reach.close()
        # Here, so that nobody who closes the consumer waits for a database that does not answer.
        try:
            self.store.leave()
        except Exception as error:  # noqa: BLE001 - the lease lapses by itself
            log_defect(error, f"partitions of a member of {self.store.name!r} not given back", level=logging.INFO)
        # Connections that are in use would stay open.
        if self._reading is not None:
            self._reading.thread.join()
        self.store.dispose()

    def _keep(self) -> None:
        shared, renew_s, of = self.shared, self.store.renewal_s, f"of a member of {self.store.name!r}"
        tick_at = time.monotonic() + renew_s
        while not shared.stopping.is_set():
            pause_s, does = POLL_SLOWEST_S, "keeping the lease"
            try:
                if time.monotonic() >= tick_at:
                    tick_at = time.monotonic() + renew_s
                    self._tick()
                    shared.outages.over(f"{does} {of}")
                self._store_silent()
                does = "looking at moves"
                pause_s = self._look_at_holds()
                shared.outages.over(f"{does} {of}")
                does = "giving partitions back"
                self._give_surplus()
                shared.outages.over(f"{does} {of}")
            except Exception as error:  # noqa: BLE001 - it is tried again; the lease lapses where it must
                shared.outages.failed(f"{does} {of}", error)
            with shared.changed:
                if not (shared.stopping.is_set() or shared.holds_changed or self._is_silent_due()):
                    shared.kept.wait(max(0.0, min(pause_s, tick_at - time.monotonic())))

    def _is_silent_due(self) -> bool:
        return any(following.silent_due_at() == 0.0 for following in self.shared.followings)

    def _tick(self) -> None:
        """Renew the lease; begin with partitions that were gained, and end those that were lost."""
        reach, began = self._reach, time.monotonic()
        reach.look()
        is_busy = reach.is_cut_off and self.shared.halt()
        share, partitions = self.store.share(reach, is_busy=is_busy)
        if share.holder != self._holder:
            self._holder = share.holder
            self._begin_anew()
        for partition_id, reader in list(self._readers.items()):
            if partition_id not in partitions:
                reader.stop()
                del self._readers[partition_id]
            elif reader.has_ended:
                del self._readers[partition_id]
        for partition_id, stream in partitions.items():
            if partition_id not in self._readers:
                self._begin(partition_id, stream)
        self._surplus = share.surplus
        self._choose_surplus()
        if not reach.is_cut_off:
            # Not earlier: while it was cut off, others may have taken its partitions, and consumed from them.
            self.shared.go_on(began + self._options.lease_s)

    def _any_partition(self) -> str:
        return min(self.store.partitions())

    def _begin_anew(self) -> None:
        """Our lease had expired: drop every partition, and reopen those still ours at their stored positions."""
        if self._readers:
            logger.info("the lease of a member of %r had run out: its partitions are opened anew", self.store.name)
        for reader in self._readers.values():
            reader.stop()
        self._readers.clear()

    def _begin(self, partition_id: int, stream: str) -> None:
        assert self.header is not None, "it was agreed on at the start"
        assert self._reading is not None, "it was made at the start"
        self._readers[partition_id] = self._reading.begin(partition_id, stream, self.header)

    def _choose_surplus(self) -> None:
        """Hand out no more of the partitions that others should have."""
        with self.shared.changed:
            leaving = [each for each in self.shared.followings if each.is_leaving]
            for following in reversed(self.shared.followings):
                if len(leaving) < self._surplus and not following.is_leaving:
                    following.is_leaving = True
                    leaving.append(following)
            for following in leaving[self._surplus :]:
                following.is_leaving = False

    def _give_surplus(self) -> None:
        """Let others have partitions with which the application is done.

        One of which that fails is found to be this member's again, and is given back the next time.
        """
        for following in self.shared.followings:
            if following.is_leaving and following.outstanding is None:
                reader = self._readers.pop(following.partition_id, None)
                if reader is None:
                    continue
                reader.stop()
                self._surplus = max(0, self._surplus - 1)
                self.store.release(following.partition_id)

    # --- holds ------------------------------------------------------------------------------------------------------

    def _look_at_holds(self) -> float:
        """Release the holds that are complete; gives the seconds until the next look."""
        shared, now = self.shared, time.monotonic()
        with shared.changed:
            waiting = {
                each.partition_id: each.youngest_wait_s(now) for each in shared.followings if each.waiting_holds()
            }
            if not waiting:
                shared.holds_changed = False
                return POLL_SLOWEST_S
            if not shared.holds_changed and now < self._poll_at:
                return self._poll_at - now
            shared.holds_changed = False
        complete = self.store.complete(list(waiting))
        for partition_id, move_id in complete:
            shared.release(partition_id, move_id)
        pause_s = min(POLL_SLOWEST_S, max(POLL_S, min(waiting.values()) / 200))
        self._poll_at = time.monotonic() + pause_s
        return pause_s

    def _store_silent(self) -> None:
        """Store how far partitions are that have nothing for the application."""
        for following, step in self.shared.take_silent(time.monotonic()):
            who = f"storing the position in {following.stream!r}"
            try:
                self.commit(following, step)
            except PartitionLost:
                self.shared.outages.forget(who)  # It is another member's to store.
            except RelatumError as error:
                self.shared.outages.failed(who, error)
            else:
                self.shared.outages.over(who)

    # --- steps ------------------------------------------------------------------------------------------------------

    def commit(self, following: Following, step: Step) -> None:
        """Store a step that was handed out.

        Raises:
            PartitionLost: The partition is not this member's any more, or was opened anew.
            DatabaseUnavailable: PostgreSQL is away; to be repeated.
        """
        self._check(following, step)
        if self._was_committed(following, step):
            return
        token = self.store.tokens.new()
        try:
            is_stored = self.store.commit(following, step, token)
        except DatabaseUnavailable:
            following.in_doubt = token
            raise
        if not is_stored:
            self.shared.drop(following)
            raise lost(following.stream, self.store.name)
        self.store.tokens.committed(token)
        self.shared.committed(following, step)

    def _check(self, following: Following, step: Step) -> None:
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
            self.shared.committed(following, step)
        return came_through

    @contextmanager
    def transaction(self, following: Following, step: Step) -> Iterator[sa.Connection]:
        """A transaction that stores a step at its end; see `SerialBatch.transaction`."""
        self._check(following, step)
        if self._was_committed(following, step):
            raise lost(following.stream, self.store.name)
        try:
            with self.store.joined(following, step, stop=self.shared.stopping) as connection:
                yield connection
        except (PartitionLost, CommitInDoubt):
            # One in doubt, too, is opened anew: what was committed is consumed, and what was not is delivered again,
            # by this member or another.
            self.shared.drop(following)
            raise
        self.shared.committed(following, step)


def _end(reader: StreamReader, stream: str) -> int:
    """The offset of the next message; 0 where the partition was retired and its stream is gone."""
    try:
        return reader.bounds(stream).end
    except StreamNotFound:
        return 0
