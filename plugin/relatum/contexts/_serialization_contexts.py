"""Serialization contexts for operators: placed, listed and moved."""

import threading
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Final

from relatum.checks import checked_count, checked_name, checked_names, checked_seconds, checked_text, shown
from relatum.closing import Closing
from relatum.contexts import _move_steps as moving
from relatum.contexts._assignments import Assignment, ContextsStatus, Plan, Progress, spread
from relatum.contexts._control_streams import ControlStreams
from relatum.contexts._move_store import MoveStore
from relatum.contexts._mover import MOVES_AT_ONCE, RETRY_S, Movers
from relatum.contexts._partitions import checked_key, retire, wait_until_read
from relatum.contexts._placement_store import PlacementStore, behind, in_parts
from relatum.contexts._placements import Move, PartitionRow, PartitionState, Placement, PlacementState, check_name
from relatum.errors import (
    ConfigurationError,
    Conflict,
    InvalidInput,
    PlacementNotFound,
    StreamNotFound,
    SuperStreamNotFound,
)
from relatum.headers import CONTEXT_HEADER
from relatum.limits import INTEGER_MAX, PARTITIONS_MAX
from relatum.processes import of_one_process
from relatum.reading import Broker, BrokerAddress
from relatum.store.database import AnyDatabase
from relatum.superstreams import Layout, add_partition, describe_super_stream, unbind_partition
from relatum.superstreams.connections import blocking_connection

LISTED_AT_ONCE: Final = 1_000
"""Placements read in one statement."""


class SerializationContexts(Closing):
    """Where the contexts of a super stream are, and how they are moved. A context manager; threads may share one.

    Every call may raise `DatabaseUnavailable`; those that move contexts or change partitions also `BrokerUnavailable`,
    once a step could not be done for `retry_s`.

    Args:
        super_stream: The super stream's name.
        database: PostgreSQL's URL, or a `Database`, which stays the caller's.
        broker: The broker's URL, or a `Broker`. Moving contexts and changing partitions needs it, looking does not.
        vhost: The super stream's virtual host; None (default): the broker's, or "/" without one.
        header: The header that names contexts; None (default): the one the super stream is used with, or
            `serialization_context` where it was not used before.
        moves_at_once: Moves performed side by side, from 1. Default: 4.
        retry_s: Seconds for which a step of a move is tried again while the broker or the database does not answer.
            Default: 30.

    Raises:
        SuperStreamNotFound: the super stream is not known to the database, and not to the broker either.
        SuperStreamConflict: it is used with another header.
        SchemaMissing: the database has no such tables; run `relatum migrate`.
    """

    def __init__(
        self,
        super_stream: str,
        database: AnyDatabase,
        *,
        broker: str | Broker | None = None,
        vhost: str | None = None,
        header: str | None = None,
        moves_at_once: int = MOVES_AT_ONCE,
        retry_s: float = RETRY_S,
    ) -> None:
        checked_name("super_stream", super_stream)
        checked_count("moves_at_once", moves_at_once)
        checked_seconds("retry_s", retry_s)
        for argument, name in (("vhost", vhost), ("header", header)):
            if name is not None:
                checked_name(argument, name)
        address: BrokerAddress | None = None
        if broker is not None:
            address = BrokerAddress.of(broker)
        self.super_stream = super_stream
        self._address = address
        self._moves_at_once = moves_at_once
        self._retry_s = retry_s
        self._lock = threading.Lock()
        self._streams: ControlStreams | None = None
        self._placements = PlacementStore(
            database, vhost or (address.vhost if address is not None else "/"), super_stream
        )
        try:
            self._open(header)
            self._moves = MoveStore(self._placements.database, self._placements.super_stream_id, super_stream)
        except BaseException:
            self._placements.close()
            raise
        of_one_process(self, "a mover of contexts")

    def _open(self, header: str | None) -> None:
        """Open the super stream's rows; those of an unknown one are made from what the broker says."""
        try:
            self._placements.open(header)
        except SuperStreamNotFound:
            if self._address is None:
                raise
            self._placements.open(header or CONTEXT_HEADER, self._described())

    # Where contexts are

    def assign(self, contexts: str | Iterable[str], partition: str) -> list[Assignment]:
        """Assign contexts to a partition before their first messages. Those that are there already stay.

        Args:
            contexts: Their names; or one name.
            partition: The partition's stream.

        Raises:
            StreamNotFound: the super stream has no such partition; nothing was assigned.
            Conflict: a context is in another partition: move it. Or the partition is retired. Nothing was assigned,
                unless somebody placed that context elsewhere just now.
        """
        names = _names("contexts", contexts)
        wanted = self._partition(checked_name("partition", partition))
        _check_in(self._placements.find(names).values(), partition)
        placed: list[Placement] = []
        for some in in_parts(names, LISTED_AT_ONCE):
            found = self._placements.place(some, lambda name, active: _chosen(active, wanted))
            _check_in(found.values(), partition)
            placed += [found[name] for name in some]
        return [Assignment.of(each) for each in placed]

    def assignment_of(self, context: str) -> Assignment:
        """Where a context is.

        Raises:
            PlacementNotFound: it is nowhere: no message of it was published yet.
        """
        check_name(context, "context")
        return Assignment.of(self._find([context])[context])

    def assignments(self, partition: str | None = None, *, after: str | None = None) -> Iterator[Assignment]:
        """Where contexts are, by name.

        Args:
            partition: Only those in this partition; None (default): all.
            after: Only those behind this name; None (default): from the first on.

        Raises:
            StreamNotFound: the super stream has no such partition.
        """
        if partition is not None:
            self._partition(checked_name("partition", partition))
        first = "" if after is None else behind(after)
        return map(Assignment.of, self._placements.placements(stream=partition, first=first))

    def status(self) -> ContextsStatus:
        """The partitions, with the number of contexts in each, and the moves that have not ended."""
        return ContextsStatus(
            self.super_stream,
            self._placements.header,
            self._placements.generation(),
            tuple(self._placements.partitions()),
            tuple(self._moves.moves()),
        )

    def _find(self, names: Collection[str]) -> dict[str, Placement]:
        """The placements of names; `PlacementNotFound` where one of them is not placed."""
        found = self._placements.find(names)
        for name in names:
            if name not in found:
                raise PlacementNotFound(f"{name!r} is nowhere: no message of it was published yet", name=name)
        return found

    # Moving

    def move(self, contexts: str | Iterable[str], to: str, *, progress: Progress | None = None) -> list[Move]:
        """Move contexts to a partition; those that are there already stay.

        Only their publishers wait while they move. Contexts of one partition move together, up to 500 at a time;
        several moves run side by side.

        Args:
            contexts: Their names; or one name.
            to: The stream they are to go to.
            progress: Called after each step.

        Returns:
            The moves, as they ended: `pause_s` of each is how long its contexts paused.

        Raises:
            PlacementNotFound: a context is nowhere; nothing was moved.
            StreamNotFound: the super stream has no such partition; nothing was moved.
            SuperStreamConflict: that partition is retired.
            MoveConflict: another move has a context. Contexts before it may have moved.
            RelatumError: what stopped a move, with its number in the field `move_id`: go on with it, or abort it. Moves
                beside it were completed, others did not begin.
        """
        checked_name("to", to)
        names = _names("contexts", contexts)
        self._find(names)
        return self._move({to: names}, progress)

    def consolidate(self, sources: str | Iterable[str], target: str, *, progress: Progress | None = None) -> list[Move]:
        """Move all contexts of some partitions to one; see `move`.

        Contexts placed in the sources during the call stay there.
        """
        checked_name("target", target)
        streams = _names("sources", sources)
        for stream in streams:
            self._partition(stream)
        names = [
            placement.name
            for stream in streams
            if stream != target
            for placement in self._placements.placements(stream=stream)
        ]
        return self._move({target: names}, progress)

    def plan(self, partitions: Iterable[str] | None = None) -> Plan:
        """Which contexts would have to move for all to be spread evenly, in proportion to the partitions' weights.

        As few as possible move. Contexts that are moving are left out.

        Args:
            partitions: The partitions to spread over; all contexts leave the others. None (default): all that are in
                use.

        Raises:
            StreamNotFound: the super stream has no such partition.
        """
        if partitions is not None:
            rows = [self._partition(stream) for stream in checked_names("partitions", partitions)]
        else:
            rows = [row for row in self._placements.partitions() if row.state is PartitionState.ACTIVE]
        placed: dict[str, list[str]] = {}
        for placement in self._placements.placements():
            if placement.state is PlacementState.OPEN:
                placed.setdefault(placement.stream, []).append(placement.name)
        return Plan(spread(placed, {row.stream: row.weight for row in rows}))

    def rebalance(self, plan: Plan | None = None, *, progress: Progress | None = None) -> list[Move]:
        """Move contexts as planned; see `move`.

        Args:
            plan: From `plan`; None (default): evenly over all partitions in use.
            progress: Called after each step.
        """
        if plan is not None and not isinstance(plan, Plan):
            raise InvalidInput(f"plan= takes what plan() gave, not {shown(plan)}")
        return self._move((plan or self.plan()).moves, progress)

    def _move(self, wanted: Mapping[str, Collection[str]], progress: Progress | None) -> list[Move]:
        for target in wanted:
            self._partition(target)
        return self._movers(progress).move_all(wanted)

    # Moves that have not ended

    def moves(self, *, latest: int | None = None) -> list[Move]:
        """The moves that have not ended, oldest first.

        Args:
            latest: Instead, so many of all moves, ended ones included, the latest first.
        """
        if latest is not None:
            checked_count("latest", latest)
        return self._moves.moves(latest=latest)

    def resume(self, move_id: int, *, progress: Progress | None = None) -> Move:
        """Complete a move, from any state and whoever began it. One that has ended stays as it is.

        Raises:
            NotFound: there is no move of that number.
            RelatumError: what stopped it.
        """
        checked_count("move_id", move_id, least=0, most=INTEGER_MAX)
        return self._movers(progress).perform(moving.go_on, move_id)

    def abort(self, move_id: int, *, reason: str | None = None, progress: Progress | None = None) -> Move:
        """Take a move back: its contexts go on in their source. One that was aborted stays so.

        Args:
            move_id: The move.
            reason: Kept with the move; None for none.
            progress: Called after each step.

        Raises:
            NotFound: there is no move of that number.
            MoveConflict: it was completed; another move brings its contexts back.
            RelatumError: what stopped it.
        """
        if reason is not None:
            checked_text("reason", reason)
        checked_count("move_id", move_id, least=0, most=INTEGER_MAX)
        return self._movers(progress).perform(moving.abort, move_id, reason=reason)

    # Partitions

    def add_partitions(self, count: int = 1, *, binding_keys: Sequence[str] | None = None) -> list[str]:
        """Add empty partitions to the super stream; gives their streams. No context moves.

        New contexts go there, too, from now on; move others with `rebalance`.

        Args:
            count: How many.
            binding_keys: A binding key for each, instead of `count`; None (default): the next numbers.

        Raises:
            SuperStreamConflict: a partition of that binding key is there, or was retired; those before it were added.
        """
        checked_count("count", count, most=PARTITIONS_MAX)
        if binding_keys is not None:
            checked_names("binding_keys", binding_keys)
        address, added = self._broker(), []
        for key in [None] * count if binding_keys is None else binding_keys:
            wanted = checked_key(self._placements.partitions(), self.super_stream, key)
            added.append(add_partition(address, self.super_stream, binding_key=wanted).stream)
            self._placements.open(None, self._described())
        return added

    def retire(self, partition: str, *, delete: bool = False, timeout_s: float = 30.0) -> None:
        """Take a partition that has no contexts out of use. Safe to repeat after an interruption.

        First nothing is placed there any more, then the broker routes nothing there any more.

        Args:
            partition: The partition's stream.
            delete: Delete the stream, too, once every serial consumer has read all that the super stream has now.
                Its messages are gone then, also for consumers of new names.
            timeout_s: With `delete`, seconds to wait for consumers. Default: 30.

        Raises:
            StreamNotFound: the super stream has no such partition.
            PartitionInUse: contexts are there, or move there or away; or it is the last one: nothing was changed. Or
                a consumer has not read all in time: the partition is retired, and not deleted.
        """
        checked_name("partition", partition)
        checked_seconds("timeout_s", timeout_s)
        self._partition(partition)
        address = self._broker()
        retire(self._moves, partition)
        if any(bound.stream == partition for bound in self._described()):
            unbind_partition(address, self.super_stream, partition)
        if delete:
            wait_until_read(self._placements, self._control_streams(), partition, timeout_s)
            with blocking_connection(address, address) as connection, connection.channel() as channel:
                channel.queue_delete(partition)

    def _partition(self, stream: str) -> PartitionRow:
        """The partition that is the stream of that name; the broker is asked for one that is new."""
        known = {row.stream: row for row in self._placements.partitions()}
        if stream not in known and self._address is not None:
            known = {row.stream: row for row in self._placements.open(None, self._described())}
        if stream not in known:
            raise StreamNotFound(f"{stream!r} is no partition of {self.super_stream!r}", stream=stream)
        return known[stream]

    def _broker(self) -> BrokerAddress:
        """The broker's address, which must have an AMQP port."""
        if self._address is None or self._address.amqp_port is None:
            raise ConfigurationError("moving contexts and changing partitions needs the broker: give its amqp:// URL")
        return self._address

    def _described(self) -> Layout:
        return describe_super_stream(self._broker(), self.super_stream)

    def _movers(self, progress: Progress | None) -> Movers:
        return Movers(
            self._placements,
            self._moves,
            self._control_streams(),
            at_once=self._moves_at_once,
            retry_s=self._retry_s,
            progress=progress,
        )

    def _control_streams(self) -> ControlStreams:
        with self._lock:
            if self._streams is None:
                streams = ControlStreams(self._broker())
                streams.reader()  # fails now if the broker is away
                self._streams = streams
            return self._streams

    def close(self) -> None:
        """Close connections."""
        with self._lock:
            if self._streams is not None:
                self._streams.close()
                self._streams = None
        self._placements.close()


def _names(argument: str, given: str | Iterable[str]) -> list[str]:
    """One name or several, each once, in their order."""
    return list(dict.fromkeys(checked_names(argument, [given] if isinstance(given, str) else given)))


def _check_in(placements: Iterable[Placement], partition: str) -> None:
    for placement in placements:
        if placement.stream != partition:
            raise Conflict(f"{placement.name!r} is in {placement.stream!r} already: move it")


def _chosen(active: Sequence[PartitionRow], wanted: PartitionRow) -> PartitionRow:
    """The partition that was asked for, among those that take new placements."""
    for row in active:
        if row.partition_id == wanted.partition_id:
            return row
    raise Conflict(f"partition {wanted.stream!r} is retired: no context can go there")
