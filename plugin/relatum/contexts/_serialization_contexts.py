"""Serialization contexts for operators: assign, list and move them."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from relatum.common.checks import checked_count, checked_name, checked_names, checked_seconds, checked_text, shown
from relatum.common.closing import Closing
from relatum.common.limits import INTEGER_MAX, PARTITIONS_MAX
from relatum.common.processes import refuse_in_child
from relatum.contexts import _mover as moving
from relatum.contexts._control_streams import ControlStreams
from relatum.contexts._move_store import MoveStore
from relatum.contexts._mover import MOVES_AT_ONCE, RETRY_S, Movers
from relatum.contexts._placement_store import PAGE
from relatum.contexts._placements import (
    Assignment,
    ContextsStatus,
    Move,
    PartitionRow,
    PartitionState,
    Placement,
    PlacementState,
    Plan,
    Progress,
    check_name,
    checked_contexts,
    chunked,
    next_name,
    spread,
)
from relatum.contexts._super_stream_rows import checked_key, retire, wait_until_consumed
from relatum.errors import (
    ConfigurationError,
    Conflict,
    InvalidInput,
    PlacementNotFound,
    StreamNotFound,
)
from relatum.reading import Broker, BrokerAddress
from relatum.store.database import AnyDatabase, Database
from relatum.store.members import LEASE_S
from relatum.superstreams import Layout, add_partition, describe_super_stream, unbind_partition
from relatum.superstreams.connections import blocking_connection


class SerializationContexts(Closing):
    """Assigns, lists and moves the contexts of a super stream. A context manager; threads may share one.

    A serialization context is a set of messages that are consumed in order; it has nothing to do with pickling. Every
    call may raise `DatabaseUnavailable`. Calls that move contexts or change partitions may also raise
    `BrokerUnavailable`: a move begins only if a broker answers, and then retries each step for `retry_s`.

    Args:
        super_stream: The super stream's name.
        database: PostgreSQL's URL, or a `Database`, which the caller closes.
        broker: The broker's URL, or a `Broker`. Needed to move contexts and to change partitions, not to list them.
        vhost: The super stream's virtual host; None (default): the broker's, or "/" without a broker.
        header: The header that names contexts; None (default): the stored one, or `serialization_context` if the super
            stream is new to the database.
        moves_at_once: How many moves run at the same time, from 1. Default: 4.
        retry_s: Seconds for which each step of a move is retried while the broker or the database is unavailable.
            Default: 30.

    Raises:
        SuperStreamNotFound: neither the database nor the broker has the super stream.
        SuperStreamConflict: the super stream is used with another header.
        SchemaMissing: the database has no schema; run `relatum migrate`.
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
        address = None if broker is None else BrokerAddress.of(broker)
        self.super_stream = super_stream
        self._moves_at_once = moves_at_once
        self._retry_s = retry_s
        self._streams = ControlStreams(address) if address is not None and address.amqp_port is not None else None
        self._database = Database(database, writes=True, idle_s=LEASE_S)
        vhost = vhost or (address.vhost if address is not None else "/")
        self._store = MoveStore(self._database, vhost, super_stream)
        try:
            self._open(header)
        except BaseException:
            self._database.close()
            raise
        refuse_in_child(self, "a mover of contexts")

    def _open(self, header: str | None) -> None:
        if self._streams is None:
            self._store.open(header)
        else:
            self._store.open_or_add(header, self._streams.address)

    def assign(self, contexts: str | Iterable[str], partition: str) -> list[Assignment]:
        """Assign contexts to a partition before their first messages; return the assignments in order. Idempotent.

        Args:
            contexts: The contexts' names; or one name.
            partition: The partition's stream.

        Raises:
            StreamNotFound: the super stream has no such partition; nothing was assigned.
            Conflict: a context is in another partition (move it), or the partition is retired. Nothing was assigned,
                unless another process placed the context during the call.
        """
        names = _names("contexts", contexts, checked_contexts)
        wanted = self._partition(checked_name("partition", partition))
        _check_placed_in(self._store.find(names).values(), partition)
        placed: list[Placement] = []
        for page in chunked(names, PAGE):
            found = self._store.place(page, lambda name, active: _partition_in(active, wanted))
            _check_placed_in(found.values(), partition)
            placed += [found[name] for name in page]
        return [Assignment.of(each) for each in placed]

    def assignment_of(self, context: str) -> Assignment:
        """Return the assignment of a context.

        Raises:
            PlacementNotFound: no message of the context was published yet, and the context was not assigned.
        """
        check_name(context, "context")
        return Assignment.of(self._find([context])[context])

    def assignments(self, partition: str | None = None, *, after: str | None = None) -> Iterator[Assignment]:
        """Iterate over the assignments of contexts, ordered by the contexts' names.

        Args:
            partition: Only contexts in this partition; None (default): all.
            after: Only contexts with names that sort after this name; None (default): all.

        Raises:
            StreamNotFound: the super stream has no such partition.
        """
        if partition is not None:
            self._partition(checked_name("partition", partition))
        first = "" if after is None else next_name(after)
        return map(Assignment.of, self._store.placements(stream=partition, first=first))

    def status(self) -> ContextsStatus:
        """Return the partitions with their numbers of contexts, and the moves that have not ended."""
        return ContextsStatus(
            self.super_stream,
            self._store.header,
            self._store.generation(),
            tuple(self._store.partitions()),
            tuple(self._store.moves()),
        )

    def _find(self, names: Collection[str]) -> dict[str, Placement]:
        """Return the placements of names, or raise `PlacementNotFound`."""
        found = self._store.find(names)
        for name in names:
            if name not in found:
                raise PlacementNotFound(f"{name!r} has no placement: publish a message of it, or assign it", name=name)
        return found

    def move(self, contexts: str | Iterable[str], to: str, *, progress: Progress | None = None) -> list[Move]:
        """Move contexts to a partition. Contexts that are already in it do not move.

        During a move, only the publishers of its contexts wait. Contexts of one partition move together, up to 500 at a
        time, and several moves run at the same time.

        Args:
            contexts: The contexts' names; or one name.
            to: The target partition's stream.
            progress: Called after each step.

        Returns:
            The ended moves. `pause_s` of a move is the time for which its contexts paused.

        Raises:
            PlacementNotFound: a context has no placement; nothing was moved.
            StreamNotFound: the super stream has no such partition; nothing was moved.
            SuperStreamConflict: the target partition is retired.
            MoveConflict: a context is part of another move. Other contexts of the call may have moved.
            RelatumError: a move stopped. `resume` or `abort` it; the field `move_id` has its number. Moves that ran at
                the same time were completed; the remaining moves did not begin.
        """
        checked_name("to", to)
        names = _names("contexts", contexts, checked_contexts)
        self._find(names)
        return self._move({to: names}, progress)

    def consolidate(self, sources: str | Iterable[str], target: str, *, progress: Progress | None = None) -> list[Move]:
        """Move all contexts of some partitions to one partition; see `move`.

        Contexts that routers first place in the sources during the call stay there.
        """
        checked_name("target", target)
        streams = _names("sources", sources, checked_names)
        for stream in streams:
            self._partition(stream)
        names = [
            placement.name
            for stream in streams
            if stream != target
            for placement in self._store.placements(stream=stream)
        ]
        return self._move({target: names}, progress)

    def plan(self, partitions: Iterable[str] | None = None) -> Plan:
        """Return the fewest moves that distribute the contexts in proportion to the partitions' weights.

        The plan excludes contexts that are already moving.

        Args:
            partitions: The partitions that get contexts; all contexts leave the others. None (default): all partitions
                that are not retired.

        Raises:
            StreamNotFound: the super stream has no such partition.
        """
        if partitions is not None:
            rows = [self._partition(stream) for stream in checked_names("partitions", partitions)]
        else:
            rows = [row for row in self._store.partitions() if row.state is PartitionState.ACTIVE]
        placed: dict[str, list[str]] = {}
        for placement in self._store.placements():
            if placement.state is PlacementState.OPEN:
                placed.setdefault(placement.stream, []).append(placement.name)
        return Plan(spread(placed, {row.stream: row.weight for row in rows}))

    def rebalance(self, plan: Plan | None = None, *, progress: Progress | None = None) -> list[Move]:
        """Move contexts as planned; see `move`.

        Args:
            plan: The result of `plan`; None (default): a new plan for all partitions that are not retired.
            progress: Called after each step.
        """
        if plan is not None and not isinstance(plan, Plan):
            raise InvalidInput(f"plan= takes the result of plan(), not {shown(plan)}")
        return self._move((plan or self.plan()).moves, progress)

    def _move(self, wanted: Mapping[str, Collection[str]], progress: Progress | None) -> list[Move]:
        for target in wanted:
            self._partition(target)
        # A move retries its steps; without a broker, none begins.
        self._control_streams().reader.missing([])
        return self._movers(progress).move_all(wanted)

    def moves(self, *, latest: int | None = None) -> list[Move]:
        """Return the moves that have not ended, oldest first.

        Args:
            latest: Return this many of all moves instead, including ended ones, newest first. None (default): only
                moves that have not ended.
        """
        if latest is not None:
            checked_count("latest", latest)
        return self._store.moves(latest=latest)

    def resume(self, move_id: int, *, progress: Progress | None = None) -> Move:
        """Complete a move that any process began, and return it. Idempotent: an ended move is returned unchanged.

        Raises:
            NotFound: there is no move of that number.
            RelatumError: the move stopped again; call `resume` or `abort`.
        """
        checked_count("move_id", move_id, least=0, most=INTEGER_MAX)
        return self._movers(progress).perform(moving.go_on, move_id)

    def abort(self, move_id: int, *, reason: str | None = None, progress: Progress | None = None) -> Move:
        """Abort a move, and return it: its contexts stay in their source partition. Idempotent.

        Args:
            move_id: The move's number.
            reason: Text stored with the move; None (default): no reason.
            progress: Called after each step.

        Raises:
            NotFound: there is no move of that number.
            MoveConflict: the move is complete; move its contexts back instead.
            RelatumError: the abort stopped; repeat it.
        """
        if reason is not None:
            checked_text("reason", reason)
        checked_count("move_id", move_id, least=0, most=INTEGER_MAX)
        return self._movers(progress).perform(moving.abort, move_id, reason)

    def add_partitions(self, count: int = 1, *, binding_keys: Sequence[str] | None = None) -> list[str]:
        """Add empty partitions to the super stream, and return their streams.

        Existing contexts do not move: use `rebalance`. Routers may place new contexts in the new partitions.

        Args:
            count: How many partitions to add. Default: 1.
            binding_keys: The partitions' binding keys; they replace `count`. None (default): the next numbers.

        Raises:
            SuperStreamConflict: a partition with one of the keys exists or was retired; those before it were added.
        """
        checked_count("count", count, most=PARTITIONS_MAX)
        if binding_keys is not None:
            checked_names("binding_keys", binding_keys)
        address, added = self._control_streams().address, []
        for key in [None] * count if binding_keys is None else binding_keys:
            wanted = checked_key(self._store.partitions(), self.super_stream, key)
            added.append(add_partition(address, self.super_stream, binding_key=wanted).stream)
            self._store.open(None, self._layout())
        return added

    def retire(self, partition: str, *, delete: bool = False, timeout_s: float = 30.0) -> None:
        """Retire a partition that has no contexts. Safe to repeat after an interruption.

        Routers place no context in a retired partition, and the broker routes no messages to it.

        Args:
            partition: The partition's stream.
            delete: Also delete the stream, after every serial consumer has consumed all messages that the super stream
                has now. Consumers with new names then cannot read the stream's messages. Default: False.
            timeout_s: With `delete`, seconds to wait for consumers. Default: 30.

        Raises:
            StreamNotFound: the super stream has no such partition.
            PartitionInUse: the partition has contexts, is part of a move, or is the last one; nothing was changed. Or
                consumers did not finish in time: the partition is retired, but not deleted. Call `retire` again.
            StreamUnavailable: with `delete`, a partition's leader does not tell its end; not deleted. Call `retire`
                again.
        """
        checked_name("partition", partition)
        checked_seconds("timeout_s", timeout_s)
        self._partition(partition)
        streams = self._control_streams()
        retire(self._store, partition)
        if any(bound.stream == partition for bound in self._layout()):
            unbind_partition(streams.address, self.super_stream, partition)
        if delete:
            wait_until_consumed(self._store, streams, partition, timeout_s)
            with blocking_connection(streams.address, streams.address) as connection, connection.channel() as channel:
                channel.queue_delete(partition)

    def _partition(self, stream: str) -> PartitionRow:
        """Return the partition of a stream. If it is unknown, read the broker's layout again."""
        known = {row.stream: row for row in self._store.partitions()}
        if stream not in known and self._streams is not None:
            known = {row.stream: row for row in self._store.open(None, self._layout())}
        if stream not in known:
            raise StreamNotFound(f"{stream!r} is not a partition of {self.super_stream!r}", stream=stream)
        return known[stream]

    def _control_streams(self) -> ControlStreams:
        """Return the broker's streams, or raise `ConfigurationError`: they need an address with an AMQP port."""
        if self._streams is None:
            raise ConfigurationError("moves and partition changes need the broker: pass its amqp:// URL as broker=")
        return self._streams

    def _layout(self) -> Layout:
        return describe_super_stream(self._control_streams().address, self.super_stream)

    def _movers(self, progress: Progress | None) -> Movers:
        streams = self._control_streams()
        return Movers(self._store, streams, at_once=self._moves_at_once, retry_s=self._retry_s, progress=progress)

    def close(self) -> None:
        """Close the connections to the broker and the database."""
        if self._streams is not None:
            self._streams.close()
        self._database.close()


def _names(argument: str, names: str | Iterable[str], checked: Callable[[str, Any], tuple[str, ...]]) -> list[str]:
    """Return one or more names as a list, in order, without duplicates."""
    return list(dict.fromkeys(checked(argument, [names] if isinstance(names, str) else names)))


def _check_placed_in(placements: Iterable[Placement], partition: str) -> None:
    for placement in placements:
        if placement.stream != partition:
            raise Conflict(f"{placement.name!r} is already in {placement.stream!r}: move it instead")


def _partition_in(active: Sequence[PartitionRow], wanted: PartitionRow) -> PartitionRow:
    for row in active:
        if row.partition_id == wanted.partition_id:
            return row
    raise Conflict(f"partition {wanted.stream!r} is retired and takes no contexts: choose another")
