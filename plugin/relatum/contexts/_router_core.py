"""The state of a router, blocking or asyncio, and its calls of the database and the broker."""

import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Final

from relatum import metrics
from relatum.common.closing import PeriodicThread
from relatum.common.waiting import LEAST_S, Deadline, Outages, ended, has_passed, log_failure, pause, within
from relatum.contexts._context_options import RouterOptions, RouterStatistics
from relatum.contexts._control_streams import ControlStreams
from relatum.contexts._move_store import MoveStore, logger
from relatum.contexts._mover import resume_abandoned
from relatum.contexts._partition_log import Adoption
from relatum.contexts._placement_cache import Sent
from relatum.contexts._placements import Move, PartitionRow, PartitionState, Placement, check_name
from relatum.contexts._publication import AWAY_S, TAKE_OVER_S, Publications, elapsed_s
from relatum.errors import (
    ConfigurationError,
    DatabaseUnavailable,
    PublishOutcomeUnknown,
    RelatumError,
    Transient,
    UsedAfterClose,
)
from relatum.reading import Broker
from relatum.store.database import AnyDatabase, Database
from relatum.store.members import LEASE_S
from relatum.superstreams import Candidate, describe_super_stream
from relatum.superstreams.connections import address_of
from relatum.superstreams.layout import checked_stream_name as checked_super_stream

END_S: Final = 1.0
"""Seconds that running database calls get when a router is closed."""

OPTIONAL_REFRESH_S: Final = 1.0
"""Seconds for a refresh that publishing can continue without."""

REFRESH_TURN_S: Final = 0.1
"""Seconds to wait for a running refresh before another one starts."""

CLOSED: Final = "the router is closed: create another"

REFRESHING: Final = "refreshing placements"
"""The refresh thread's task in the log."""

LOOK_EVERY_S: Final = 0.05
"""Seconds between two refreshes of the thread: a quarter of their validity, so that some may fail or be late."""

RESTS_AFTER_S: Final = 5.0
"""Seconds without messages after which the refresh thread ends."""

BUSY_MESSAGES: Final = 2
"""Messages between two refreshes from which a background refresh saves time."""


class RouterCore:
    """The placements of one router, and the calls that its publications make. Thread-safe."""

    store: MoveStore
    """The placements and moves in the database. Set by `open`."""
    control_streams: ControlStreams
    """Reads partitions, and publishes control messages. Set by `open`."""

    def __init__(
        self,
        super_stream: str,
        database: "AnyDatabase",
        options: RouterOptions,
        *,
        broker: str | Broker | None = None,
    ) -> None:
        self.super_stream = checked_super_stream(super_stream)
        self.options = options
        self.rule, self._unnamed_rule = options.rules()
        self.publications = Publications(self, elapsed_s, options)
        self._refresher: PeriodicThread | None = None
        self._away_until = self._idle_at = 0.0
        self._outages = Outages(logger)
        # Created here: the constructor raises the error of a wrong URL.
        self._ending = Deadline(None)
        self._database = Database(database, ending=self._ending, refusing=CLOSED, writes=True, idle_s=LEASE_S)
        self._broker = broker
        self._lock = threading.Lock()
        # Event loops take this lock, so it is never held during I/O.
        self._count_lock = threading.Lock()
        self._vhost: str | None = None
        self.is_open = False
        """Whether messages with a name can be published."""
        self._is_closed = False
        self._candidates: Sequence[PartitionRow] = ()
        self.has_layout = False
        """Whether messages without a name can be published. False: the next one first reads the layout (again)."""
        self._take_over_at = 0.0
        self._refresh_lock = threading.Lock()
        self._tickets = itertools.count(1)
        self._last_refresh: tuple[int, tuple[int, Sequence[Placement] | None]] = 0, (0, None)
        self._published = self._published_at_refresh = self._unnamed = 0
        if broker is not None:
            address_of(broker)
        metrics.report(self, super_stream=self.super_stream, kind=options.kind)

    def statistics(self) -> RouterStatistics:
        publications = self.publications
        return RouterStatistics(
            published=self._published,
            unnamed=self._unnamed,
            asked=publications.asked,
            adopted=publications.adopted,
            move_wait_s=publications.move_wait_s.observed(),
            known_names=len(publications.cache),
            unchecked=len(publications.unchecked),
        )

    def open(self, source: Any = None, *, with_database: bool = True) -> None:
        """Read the partitions from the broker, and open the rows in the database; see `Router.open`. Idempotent."""
        with self._lock:
            if self._is_closed:
                raise UsedAfterClose(CLOSED)
            source = self._broker if self._broker is not None else source
            if source is None:
                raise ConfigurationError("the router has no broker: pass broker=, or a connection or channel to open()")
            needs_database = with_database and not self.is_open
            if self.has_layout and not needs_database:
                return
            address = address_of(source)
            self._vhost = self._vhost or address.vhost
            self.check_vhost(address.vhost)
            layout = describe_super_stream(source, self.super_stream)
            # The broker does not know the weights: keep those that were read from the database.
            weights = {row.stream: row.weight for row in self._candidates}
            self._candidates = [
                PartitionRow(0, each.stream, each.binding_key, each.place, weight=weights.get(each.stream, 1.0))
                for each in layout
            ]
            self.has_layout = True
            if needs_database:
                self.control_streams = ControlStreams(address, self.options.header)
                self.store = MoveStore(self._database, address.vhost, self.super_stream)
                with within(max(self.options.timeout_s, LEAST_S)):
                    rows = self.store.open(self.options.header, layout, idle_s=self.options.idle_s)
                self._candidates = [row for row in rows if row.state is PartitionState.ACTIVE]
                self.is_open = True

    def check_vhost(self, vhost: str) -> None:
        """Refuse a channel of another virtual host: its super stream of this name is a different one."""
        if vhost != self._vhost:
            raise ConfigurationError(
                f"the router publishes in the virtual host {self._vhost!r}, but the channel is in {vhost!r}: create "
                "another router for it; nothing was sent"
            )

    def close(self) -> None:
        self._ending.end_in(END_S)
        with self._lock, self._count_lock:
            was_open, self._is_closed = self.is_open, True
            self.is_open = self.has_layout = False
            looks, self._refresher = self._refresher, None
        if looks is not None:
            looks.end()
        if was_open:
            self.control_streams.close()
        self._database.close()
        metrics.retire(self)

    def changes(self, since: int | None) -> tuple[int, Sequence[Placement] | None]:
        """Refresh; see `PlacementStore.changes`. One query serves all calls that were made before it began."""
        ticket = next(self._tickets)
        has_lock = self._refresh_lock.acquire(timeout=REFRESH_TURN_S)
        try:
            # Without the lock, an earlier refresh that ends late may replace `_last_refresh` at any time.
            began, found = self._last_refresh
            if began < ticket:
                began = next(self._tickets)
                with self.in_time(is_refresh=True):
                    found = self.store.changes(since)
                self._last_refresh = began, found
            return found
        finally:
            if has_lock:
                self._refresh_lock.release()

    def place(self, name: str, stream: str | None) -> Placement:
        """Return the placement of a name, open or moving. A new name is placed in `stream`, or by the balance rule."""

        def choose(name: str, partitions: Sequence[PartitionRow]) -> PartitionRow:
            self._candidates = partitions
            preferred = next((each for each in partitions if each.stream == stream), None)
            return preferred or partitions[self.rule(name, _candidates(partitions))]

        # An affinity set that is not cached is usually new.
        are_new, most = self.options.kind == "affinity", self.options.open_sets_max
        with self.in_time():
            return self.store.place([name], choose, open_sets_max=most, are_new=are_new)[name]

    def fence_after(self, name: str, epoch: int, stream: str) -> Move | None:
        with self.in_time():
            return self.store.fence_after(name, epoch, stream)

    def search(self, sent: Sent, from_offset: int, anywhere: bool) -> int | None:
        return self.control_streams.search(sent, from_offset, anywhere)

    def adopt(self, stream: str, adoption: Adoption) -> None:
        """Publish an adoption with its own time limit, so that a cancelled call still completes it."""
        self._database.check_open()
        with within(Deadline(max(self.options.timeout_s, LEAST_S))):
            self.control_streams.publish(stream, adoption)

    def take_over(self, seconds: float) -> None:
        """Complete abandoned moves for at most this many seconds, in one thread at a time. Errors are logged."""
        with self._count_lock:
            if time.monotonic() < self._take_over_at:
                return
            self._take_over_at = time.monotonic() + TAKE_OVER_S
        task = f"resuming abandoned moves of {self.super_stream!r}"
        with within(seconds) as time_left:
            try:
                resume_abandoned(self.store, self.control_streams)
            except Exception as error:  # noqa: BLE001 - it is logged, and the message keeps waiting
                if time_left.has_passed:
                    # The time was over: the error does not mean that a server is unavailable.
                    log_failure(logger, error, task, level=logging.INFO)
                else:
                    self.store.outages.failed(task, error)
            else:
                self.store.outages.over(task)

    def sleep(self, seconds: float) -> None:
        """Sleep. Raises `Transient` if the call was cancelled or its time is over."""
        pause(seconds)
        if has_passed():
            raise Transient("the call was cancelled or timed out while it waited for a move or a server")

    def in_time(self, *, is_refresh: bool = False) -> within:
        seconds = self.options.timeout_s
        if is_refresh and self.options.when_database_away == "known":
            # If publishing can continue without the database, it must not wait for the database.
            seconds = min(seconds, OPTIONAL_REFRESH_S)
        return within(max(seconds, LEAST_S))

    def published(self) -> None:
        """Count a message with a name. The first message, and the first after a pause, starts the refresh thread."""
        with self._count_lock:
            self._published += 1
            if self._refresher is None and self.options.trust_clock and not self._is_closed:
                # From Python 3.12 on, no thread can start at interpreter shutdown. The message was published anyway.
                with suppress(RuntimeError):
                    self._refresher = PeriodicThread(
                        self, RouterCore._refresh, every_s=LOOK_EVERY_S, name="relatum refresh"
                    )

    def published_unnamed(self) -> None:
        with self._count_lock:
            self._unnamed += 1

    def _refresh(self) -> None:
        """Refresh if several messages were published or some are unchecked: this saves the next ones a round trip."""
        now, unchecked = time.monotonic(), len(self.publications.unchecked)
        published, self._published_at_refresh = self._published - self._published_at_refresh, self._published
        if published or unchecked:
            self._idle_at = now + RESTS_AFTER_S
        elif now >= self._idle_at:
            with self._count_lock:
                if self._refresher is not None and self._published == self._published_at_refresh:
                    self._refresher.end()
                    self._refresher = None
        if (published < BUSY_MESSAGES and not unchecked) or now < self._away_until:
            return
        try:
            self.publications.look()
        except Exception as error:  # noqa: BLE001 it is logged, and the thread continues
            self._away_until = time.monotonic() + AWAY_S
            if isinstance(error, DatabaseUnavailable):
                logger.debug("cannot refresh placements: %s", ended(error))  # Publishers get the same error.
            elif not self._is_closed:
                self._outages.failed(REFRESHING, error)
        else:
            self._outages.over(REFRESHING)

    def unnamed(self, routing_key: str) -> PartitionRow:
        """Choose the partition of a message without a name, by its routing key if it has one. No I/O."""
        partitions = self._candidates
        return partitions[self._unnamed_rule(routing_key or None, _candidates(partitions))]

    def active(self, stream: str) -> PartitionRow | None:
        """Return the partition of a stream; None if it is retired or unknown, or the layout must be read again."""
        partitions = self._candidates if self.has_layout else ()
        return next((each for each in partitions if each.stream == stream), None)

    def name_of(self, headers: Mapping[str, Any] | None) -> str | None:
        name = headers.get(self.options.header) if headers else None
        if name is None:
            return None
        return check_name(name, f"the header {self.options.header}", outcome="nothing was sent")


def _candidates(partitions: Sequence[PartitionRow]) -> list[Candidate]:
    return [Candidate(each.stream, each.weight, each.open_sets) for each in partitions]


@contextmanager
def outcome_unknown(name: str, settle: Callable[..., Any]) -> Iterator[None]:
    """Raise errors after a message's confirm as `PublishOutcomeUnknown`; its `settle` finds the outcome."""
    try:
        yield
    except RelatumError as error:
        away = " while PostgreSQL is unavailable" if isinstance(error, DatabaseUnavailable) else ""
        raise PublishOutcomeUnknown(
            f"the broker confirmed the message of {name!r}, but its order is unknown{away}; call the error's settle(): "
            f"{error}",
            in_stream=None,
            settle=settle,
        ) from error
