"""What the routers of both faces share: their options, the placements in the database, and the steps that block."""

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from relatum import metrics
from relatum.contexts._options import RouterOptions
from relatum.contexts._statistics import RouterStatistics
from relatum.contexts.placement._controls import ControlStreams, Strays
from relatum.contexts.placement._looks import BUSY, Looks
from relatum.contexts.placement._model import PartitionRow, PartitionState, Placement, check_name
from relatum.contexts.placement._placement_store import PlacementStore
from relatum.contexts.placement._publication import WAITED_S, Publications
from relatum.contexts.placement._publication_requests import (
    Adopt,
    FindMove,
    Place,
    PublicationRequest,
    ReadChanges,
    ReadGeneration,
    Search,
    Send,
    Sent,
    TakeOver,
)
from relatum.contexts.placement._trust import elapsed_s
from relatum.contexts.serial.moving._move_store import MoveStore, logger
from relatum.contexts.serial.moving._mover import go_on_with_abandoned
from relatum.contexts.steps import run
from relatum.errors import (
    ConfigurationError,
    DatabaseUnavailable,
    PublishOutcomeUnknown,
    PublishRejected,
    RelatumError,
    UsedAfterClose,
)
from relatum.headers import PLACED_HEADER
from relatum.ids import MessageId
from relatum.reading import BrokerAddress, StreamReader
from relatum.store.database import AnyDatabase, Database
from relatum.store.members import LEASE_S
from relatum.superstreams import Candidate, describe_super_stream
from relatum.superstreams.connections import address_of
from relatum.superstreams.layout import checked_stream_name as checked_super_stream
from relatum.waiting import LEAST_S, Deadline, log_failure, within

END_S: Final = 1.0
"""Seconds for questions to the database that are under way when a router is closed."""

KNOWN_LOOK_S: Final = 1.0
"""Seconds for a look at the database of those who go on without it."""

CLOSED: Final = "the router is closed: open another"


class RouterCore:
    """The placements of one router, and the requests of its publications that block. Threads may share it."""

    def __init__(
        self,
        super_stream: str,
        database: "AnyDatabase",
        options: RouterOptions,
        *,
        broker: str | None = None,
        stream_url: str | None = None,
    ) -> None:
        self.super_stream = checked_super_stream(super_stream)
        self.options = options
        self.rule, self._unnamed_rule = options.rules()
        self.publications = Publications(
            elapsed_s,
            timeout_s=options.timeout_s,
            trust_clock=options.trust_clock,
            names_max=options.names_max,
            when_away=options.when_database_away,
        )
        self._looks = Looks(self._look_for) if options.trust_clock else None
        # Made at once: what is wrong with a URL is told where the router is made.
        self._ending = Deadline(None)
        self._database = Database(database, ending=self._ending, refusing=None, writes=True, idle_s=LEASE_S)
        self._broker = broker
        self._stream_url = stream_url
        self._lock = threading.Lock()
        self._strays: Strays | None = None
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
        self._published = self._unnamed = 0
        if broker is not None:
            address_of(broker, stream_url)
        self._performers: dict[type, Callable[[Any], Any]] = {
            ReadGeneration: lambda _request: self.store.generation(),
            ReadChanges: lambda request: self.store.changes(request.since),
            Place: self.place,
            FindMove: lambda request: self.store.fence_after(request.name, request.epoch, request.stream),
            Search: lambda request: self._stray_keeper.search(
                request.sent, request.from_offset, anywhere=request.anywhere
            ),
            Adopt: lambda request: self._stray_keeper.publish(request.stream, request.adoption),
            TakeOver: self._take_over,
        }
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
        """The placements in the database. Known after `open`.

        Raises:
            ConfigurationError: the router was closed, in the middle of what is under way.
        """
        # Taken once: another thread may close the router here.
        store = self._store
        if store is None:
            raise UsedAfterClose(CLOSED)
        return store

    @property
    def vhost(self) -> str:
        """The broker's virtual host. Known after `open`."""
        return self._stray_keeper.address.vhost

    @property
    def address(self) -> BrokerAddress:
        """The broker's address. Known after `open`."""
        return self._stray_keeper.address

    @property
    def reader(self) -> StreamReader:
        """Reads the partitions. Known after `open`; not to be closed."""
        return self._stray_keeper.reader()

    @property
    def _stray_keeper(self) -> Strays:
        strays = self._strays
        if strays is None:
            raise UsedAfterClose(CLOSED)
        return strays

    def open(self, source: Any = None, *, with_database: bool = True) -> None:
        """Ask the broker for the partitions, and have the database's rows. Idempotent.

        Raises:
            ConfigurationError: the router is closed (`UsedAfterClose`), or knows no broker.
            SuperStreamNotFound: the broker has no such super stream.
            SuperStreamConflict: its contexts, or sets, are named by another header.
            BrokerUnavailable, DatabaseUnavailable, AccessRefused, SchemaMissing: nothing was sent.
        """
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
        vhost = address_of(source, self._stream_url).vhost
        self._vhost = self._vhost or vhost
        self.check_vhost(vhost)
        layout = describe_super_stream(source, self.super_stream, stream_url=self._stream_url)
        self._candidates = [PartitionRow(0, each.stream, each.binding_key, each.place) for each in layout]
        self.has_layout = True

    def _open_store(self, source: Any) -> None:
        address = address_of(source, self._stream_url)
        if self._strays is None:
            self._strays = Strays(address, self.options.header)
        store = self._store or PlacementStore(self._database, address.vhost, self.super_stream)
        try:
            rows = store.open(self.options.header, self._candidates, idle_s=self.options.idle_s)
        except BaseException:
            store.close_store()
            raise
        self._store = store
        self._moves = MoveStore(store.database, store.super_stream_id, self.super_stream)
        self._candidates = [row for row in rows if row.state is PartitionState.ACTIVE]
        self.is_open = True

    def check_vhost(self, vhost: str) -> None:
        """Refuse a channel of another virtual host: a super stream of this name is another one there.

        Raises:
            ConfigurationError: it is not the router's; nothing was sent.
        """
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
            strays, self._strays = self._strays, None
        if store is not None:
            store.close_store()
        if strays is not None:
            strays.close()
        self._database.close()
        metrics.retire(self)

    # --- requests -------------------------------------------------------------------------------------------------

    def perform(self, request: PublicationRequest) -> Any:
        """Do what a publication asks for, but for sending and sleeping; it may block, for `timeout_s` at most."""
        seconds = self.options.timeout_s
        if self.options.when_database_away == "known" and type(request) in (ReadGeneration, ReadChanges):
            # Who goes on without the database must not wait for one that does not answer.
            seconds = min(seconds, KNOWN_LOOK_S)
        with within(max(seconds, LEAST_S)):
            return self._performers[type(request)](request)

    def published(self) -> None:
        """Note that a message of a name was published, so that the looks go on in the background."""
        with self._lock:
            self._published += 1
        if self._looks is not None:
            self._looks.want()

    def published_unnamed(self) -> None:
        """Note that a message of no name was published."""
        with self._lock:
            self._unnamed += 1

    def look(self) -> None:
        """Check what one look at the database tells to count. It blocks.

        Raises:
            DatabaseUnavailable: it is away; nothing is lost by that.
        """
        run(self.publications.look(), self.perform)

    def _look_for(self, published: int) -> None:
        """Look for the next messages of who has just published several, and for those not known to count yet."""
        if published >= BUSY or len(self.publications.unchecked):
            self.look()

    def _take_over(self, request: TakeOver) -> None:
        """Of many messages that wait, one looks at a time; what stops a move is logged, and left to others."""
        moves = self._moves
        with self._lock:
            if moves is None or time.monotonic() < self._take_over_at:
                return
            self._take_over_at = time.monotonic() + WAITED_S
        who = f"going on with abandoned moves of {self.super_stream!r}"
        with within(request.seconds) as time_left:
            try:
                go_on_with_abandoned(moves, lambda: ControlStreams(self.address))
            except Exception as error:  # noqa: BLE001 - it is logged, and the message waits on
                if time_left.has_passed:
                    # That says of no server that it is away.
                    log_failure(logger, error, who, level=logging.INFO)
                else:
                    moves.outages.failed(who, error)
            else:
                moves.outages.over(who)

    def place(self, request: Place) -> Placement:
        """The placement of a name, chosen by the rule where it is not placed yet."""

        def choose(name: str, partitions: Sequence[PartitionRow]) -> PartitionRow:
            self._candidates = partitions
            preferred = next((each for each in partitions if each.stream == request.stream), None)
            return preferred or self.chosen(name, partitions)

        options = self.options
        placed = self.store.place(
            [request.name], choose, open_sets_max=options.open_sets_max, are_new=options.names_are_new
        )
        return placed[request.name]

    def chosen(self, name: str | None, partitions: Sequence[PartitionRow]) -> PartitionRow:
        """The partition the rule chooses for a name."""
        return partitions[self.rule(name, _candidates(partitions))]

    def unnamed(self, routing_key: str) -> PartitionRow:
        """Where a message of no name goes: by its routing key where it has one. Waits for nothing."""
        partitions = self._candidates
        return partitions[self._unnamed_rule(routing_key or None, _candidates(partitions))]

    def active(self, stream: str) -> PartitionRow | None:
        """The partition that is this stream; None where it takes no new names, is none, or all are to be asked for."""
        partitions = self._candidates if self.has_layout else ()
        return next((each for each in partitions if each.stream == stream), None)

    # --- messages -------------------------------------------------------------------------------------------------

    def name_of(self, headers: Mapping[str, Any] | None) -> str | None:
        """The name a message's headers give; None for none.

        Raises:
            InvalidInput: it cannot be one; nothing was sent.
        """
        name = headers.get(self.options.header) if headers else None
        if name is None:
            return None
        return check_name(name, f"the header {self.options.header}", outcome="nothing was sent")

    def headers_for(self, send: Send, given: Mapping[str, Any] | None) -> dict[str, Any]:
        """The headers a message is sent with."""
        headers = dict(given) if given else {}
        headers[self.options.header] = send.placement.name
        headers[PLACED_HEADER] = str(send.placed)
        return headers


def _candidates(partitions: Sequence[PartitionRow]) -> list[Candidate]:
    return [Candidate(each.stream, each.weight, each.open_sets) for each in partitions]


def unsettled(name: str, cause: BaseException | None, settle: Callable[..., Any]) -> PublishOutcomeUnknown:
    """The error of a message that the broker has, while it is not known whether it counts where it lies."""
    why = f": {cause}" if isinstance(cause, RelatumError) else ""
    away = " the database is away;" if isinstance(cause, DatabaseUnavailable) else ""
    return PublishOutcomeUnknown(
        f"the broker has the message of {name!r};{away} whether it is in its context's order is not known yet: "
        f"settle it{why}",
        in_stream=None,
        settle=settle,
    )


def rejected(sent: Sent) -> PublishRejected:
    """The error of a message of unknown outcome that came to lie where its context is not any more."""
    return PublishRejected(
        f"the message of {sent.name!r} came to {sent.stream!r} after that had moved, so no serial consumer takes it "
        "there: publish it again",
        in_stream=False,
    )


Places = tuple[MessageId, ...]
"""Where a message is known to lie."""
