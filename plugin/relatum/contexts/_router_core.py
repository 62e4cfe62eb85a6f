"""What blocking and asyncio routers share: their options, and the placements in the database."""

import itertools
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from relatum import metrics
from relatum.contexts._context_options import RouterOptions, RouterStatistics
from relatum.contexts._control_streams import ControlStreams
from relatum.contexts._entries import Adoption
from relatum.contexts._looks import BUSY, Looks
from relatum.contexts._move_store import MoveStore, logger
from relatum.contexts._mover import go_on_with_abandoned
from relatum.contexts._placement_cache import Sent
from relatum.contexts._placement_store import PlacementStore
from relatum.contexts._placements import Move, PartitionRow, PartitionState, Placement, check_name
from relatum.contexts._publication import WAITED_S, Publications, elapsed_s
from relatum.errors import (
    ConfigurationError,
    DatabaseUnavailable,
    PublishOutcomeUnknown,
    PublishRejected,
    RelatumError,
    Transient,
    UsedAfterClose,
)
from relatum.headers import PLACED_HEADER
from relatum.ids import MessageId
from relatum.reading import Broker
from relatum.store.database import AnyDatabase, Database
from relatum.store.members import LEASE_S
from relatum.superstreams import Candidate, describe_super_stream
from relatum.superstreams.connections import address_of
from relatum.superstreams.layout import checked_stream_name as checked_super_stream
from relatum.waiting import LEAST_S, Deadline, has_passed, log_failure, pause, within

END_S: Final = 1.0
"""Seconds for questions to the database that are under way when a router is closed."""

KNOWN_LOOK_S: Final = 1.0
"""Seconds for a look at the database where publishing goes on without it."""

TURN_S: Final = 0.1
"""Seconds to wait for a look that is under way; then another one is begun beside it."""

CLOSED: Final = "the router is closed: open another"


class RouterCore:
    """The placements of one router: the `World` of its publications. Threads may share it."""

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
        self.publications = Publications(
            self,
            elapsed_s,
            timeout_s=options.timeout_s,
            trust_clock=options.trust_clock,
            names_max=options.names_max,
            when_away=options.when_database_away,
        )
        self._looks = Looks(self._look_for) if options.trust_clock else None
        # Made at once: a wrong URL is an error of the constructor.
        self._ending = Deadline(None)
        self._database = Database(database, ending=self._ending, refusing=None, writes=True, idle_s=LEASE_S)
        self._broker = broker
        self._lock = threading.Lock()
        self._streams: ControlStreams | None = None
        self._store: PlacementStore | None = None
        self._vhost: str | None = None
        self.is_open = False
        """Whether messages with a name can be published."""
        self._is_closed = False
        self._candidates: Sequence[PartitionRow] = ()
        self.has_layout = False
        """Whether messages of no name can be published."""
        self._moves: MoveStore | None = None
        self._take_over_at = 0.0
        self._reading = threading.Lock()
        self._asked = itertools.count(1)
        self._read: tuple[int, tuple[int, Sequence[Placement] | None]] = 0, (0, None)
        self._published = self._unnamed = 0
        if broker is not None:
            address_of(broker)
        metrics.report(self, super_stream=self.super_stream, kind=options.kind)

    def statistics(self) -> RouterStatistics:
        """What was published, and what is remembered. It asks nobody."""
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

    # --- opening --------------------------------------------------------------------------------------------------

    @property
    def store(self) -> PlacementStore:
        """The placements in the database. Known after `open`."""
        # Taken once: another thread may close the router here.
        store = self._store
        if store is None:
            raise UsedAfterClose(CLOSED)
        return store

    @property
    def control_streams(self) -> ControlStreams:
        """Reads the partitions, and publishes control messages to them. Known after `open`; not to be closed."""
        streams = self._streams
        if streams is None:
            raise UsedAfterClose(CLOSED)
        return streams

    def open(self, source: Any = None, *, with_database: bool = True) -> None:
        """Ask the broker for the partitions, and open the database's rows; see `Router.open`. Idempotent."""
        with self._lock:
            if self._is_closed:
                raise UsedAfterClose(CLOSED)
            source = self._broker if self._broker is not None else source
            if source is None:
                raise ConfigurationError("give the router broker=URL, or publish with it first")
            if not self.has_layout or (with_database and not self.is_open):
                self._describe(source)
            if with_database and not self.is_open:
                with within(max(self.options.timeout_s, LEAST_S)):
                    self._open_store(source)

    def _describe(self, source: Any) -> None:
        vhost = address_of(source).vhost
        self._vhost = self._vhost or vhost
        self.check_vhost(vhost)
        layout = describe_super_stream(source, self.super_stream)
        self._candidates = [PartitionRow(0, each.stream, each.binding_key, each.place) for each in layout]
        self.has_layout = True

    def _open_store(self, source: Any) -> None:
        address = address_of(source)
        if self._streams is None:
            self._streams = ControlStreams(address, self.options.header)
        store = self._store or PlacementStore(self._database, address.vhost, self.super_stream)
        try:
            rows = store.open(self.options.header, self._candidates, idle_s=self.options.idle_s)
        except BaseException:
            store.close()
            raise
        self._store = store
        self._moves = MoveStore(store.database, store.super_stream_id, self.super_stream)
        self._candidates = [row for row in rows if row.state is PartitionState.ACTIVE]
        self.is_open = True

    def check_vhost(self, vhost: str) -> None:
        """Refuse a channel of another virtual host: a super stream of this name is another one there."""
        if vhost != self._vhost:
            raise ConfigurationError(
                f"the router publishes in the virtual host {self._vhost!r}, and the channel is in {vhost!r}: open "
                "another router for it; nothing was sent"
            )

    def forget_layout(self) -> None:
        """Ask the broker again before the next message of no name: a partition was not there."""
        # The partitions stay until then, for other threads that are about to choose among them.
        self.has_layout = False

    def close(self) -> None:
        """Give the connections back."""
        self._ending.end_in(END_S)
        if self._looks is not None:
            self._looks.close()
        with self._lock:
            self._is_closed = True
            self.is_open = self.has_layout = False
            store, self._store = self._store, None
            streams, self._streams = self._streams, None
        if store is not None:
            store.close()
        if streams is not None:
            streams.close()
        self._database.close()
        metrics.retire(self)

    # --- what publications ask for --------------------------------------------------------------------------------

    def changes(self, since: int | None) -> tuple[int, Sequence[Placement] | None]:
        """The generation, and what changed since another; a read serves all who asked before it began."""
        asked = next(self._asked)
        has_turn = self._reading.acquire(timeout=TURN_S)
        try:
            if self._read[0] < asked:
                began = next(self._asked)
                with self._in_time(is_look=True):
                    self._read = began, self.store.changes(since)
            return self._read[1]
        finally:
            if has_turn:
                self._reading.release()

    def place(self, name: str, stream: str | None) -> Placement:
        """The placement of a name, chosen by the rule where it is not placed yet."""

        def choose(name: str, partitions: Sequence[PartitionRow]) -> PartitionRow:
            self._candidates = partitions
            preferred = next((each for each in partitions if each.stream == stream), None)
            return preferred or partitions[self.rule(name, _candidates(partitions))]

        options = self.options
        with self._in_time():
            placed = self.store.place(
                [name], choose, open_sets_max=options.open_sets_max, are_new=options.names_are_new
            )
        return placed[name]

    def fence_after(self, name: str, epoch: int, stream: str) -> Move | None:
        """The first move of a name out of or into a stream whose fence or marker has a higher epoch."""
        with self._in_time():
            return self.store.fence_after(name, epoch, stream)

    def search(self, sent: Sent, from_offset: int, anywhere: bool) -> int | None:
        """The offset of something sent that is behind a fence or marker of its name."""
        with self._in_time():
            return self.control_streams.search(sent, from_offset, anywhere)

    def adopt(self, stream: str, adoption: Adoption) -> None:
        """Publish an adoption, within a time of its own: also of a call that is cancelled it is not left half done."""
        with within(Deadline(max(self.options.timeout_s, LEAST_S))):
            self.control_streams.publish(stream, adoption)

    def take_over(self, seconds: float) -> None:
        """One waiting message looks at a time; an error that stops a move is logged, and others may go on with it."""
        moves = self._moves
        with self._lock:
            if moves is None or time.monotonic() < self._take_over_at:
                return
            self._take_over_at = time.monotonic() + WAITED_S
        who = f"going on with abandoned moves of {self.super_stream!r}"
        with within(seconds) as time_left:
            try:
                go_on_with_abandoned(moves, self.control_streams)
            except Exception as error:  # noqa: BLE001 - it is logged, and the message waits on
                if time_left.has_passed:
                    # That says of no server that it is away.
                    log_failure(logger, error, who, level=logging.INFO)
                else:
                    moves.outages.failed(who, error)
            else:
                moves.outages.over(who)

    def sleep(self, seconds: float) -> None:
        """Let time pass, unless the task that waits for this was cancelled."""
        pause(seconds)
        if has_passed():
            raise Transient("what was waited for is not wanted any more")

    def _in_time(self, *, is_look: bool = False) -> within:
        """Limit a question to `timeout_s`."""
        seconds = self.options.timeout_s
        if is_look and self.options.when_database_away == "known":
            # Publishing that goes on without the database must not wait for one that does not answer.
            seconds = min(seconds, KNOWN_LOOK_S)
        return within(max(seconds, LEAST_S))

    # --- messages -------------------------------------------------------------------------------------------------

    def published(self) -> None:
        """Count a message of a name, and keep the background looks going."""
        with self._lock:
            self._published += 1
        if self._looks is not None:
            self._looks.want()

    def published_unnamed(self) -> None:
        """Count a message of no name."""
        with self._lock:
            self._unnamed += 1

    def _look_for(self, published: int) -> None:
        """Look after several messages, for those that follow, and while some are not known to count."""
        if published >= BUSY or len(self.publications.unchecked):
            self.publications.look()

    def unnamed(self, routing_key: str) -> PartitionRow:
        """Where a message of no name goes: by its routing key where it has one. Waits for nothing."""
        partitions = self._candidates
        return partitions[self._unnamed_rule(routing_key or None, _candidates(partitions))]

    def active(self, stream: str) -> PartitionRow | None:
        """The partition that is this stream; None where it takes no new names, is none, or all are to be asked for."""
        partitions = self._candidates if self.has_layout else ()
        return next((each for each in partitions if each.stream == stream), None)

    def name_of(self, headers: Mapping[str, Any] | None) -> str | None:
        """The name a message's headers give; None for none."""
        name = headers.get(self.options.header) if headers else None
        if name is None:
            return None
        return check_name(name, f"the header {self.options.header}", outcome="nothing was sent")

    def headers_for(self, sent: Sent, given: Mapping[str, Any] | None) -> dict[str, Any]:
        """The headers a message is sent with."""
        headers = dict(given) if given else {}
        headers[self.options.header] = sent.name
        headers[PLACED_HEADER] = str(sent.wanted)
        return headers


def _candidates(partitions: Sequence[PartitionRow]) -> list[Candidate]:
    return [Candidate(each.stream, each.weight, each.open_sets) for each in partitions]


def unsettled(name: str, cause: BaseException | None, settle: Callable[..., Any]) -> PublishOutcomeUnknown:
    """The error of a message that the broker has, while it is not known whether it counts in its place."""
    why = f": {cause}" if isinstance(cause, RelatumError) else ""
    away = " the database is away;" if isinstance(cause, DatabaseUnavailable) else ""
    return PublishOutcomeUnknown(
        f"the broker has the message of {name!r};{away} whether it is in its context's order is not known yet: "
        f"settle it{why}",
        in_stream=None,
        settle=settle,
    )


def rejected(sent: Sent) -> PublishRejected:
    """The error of a message of unknown outcome that arrived where its context is no longer."""
    return PublishRejected(
        f"the message of {sent.name!r} came to {sent.stream!r} after that had moved, so no serial consumer takes it "
        "there: publish it again",
        in_stream=False,
    )


Places = tuple[MessageId, ...]
"""Where a message is known to be."""
