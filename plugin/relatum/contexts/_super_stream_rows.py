"""Creates and checks the rows of a super stream with placements and of its partitions, and retires partitions."""

import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import sqlalchemy as sa

from relatum.common.checks import checked_name, seconds_text
from relatum.contexts._placements import PartitionRow, PartitionState
from relatum.errors import PartitionInUse, StreamNotFound, SuperStreamConflict, SuperStreamNotFound
from relatum.store.database import ONCE_STATEMENT_S, AnyDatabase, Database, sql
from relatum.superstreams import Layout

if TYPE_CHECKING:
    from relatum.contexts._control_streams import ControlStreams
    from relatum.contexts._move_store import MoveStore

USE_REPORT_S: Final = 15.0
"""Seconds between two reports of a router to the database about the sets it used."""

IDLE_S_MIN: Final = 4 * USE_REPORT_S
"""The minimum of `idle_s`: a router that misses some reports does not lose its sets."""

DURABLE_COMMIT: Final = """
    CASE WHEN current_setting('synchronous_commit') = 'off'
         THEN set_config('synchronous_commit', 'on', true) END AS kept"""
"""Makes the commit wait for the disk, regardless of `synchronous_commit`.

If a crash of PostgreSQL undid a placement with messages, the name could be placed again elsewhere.
"""

FIND_SUPER_STREAM: Final = sql("""
    SELECT super_stream_id, header, idle_s FROM relatum.super_streams
    WHERE vhost = :vhost::text AND name = :name::text""")

_ADD_SUPER_STREAM: Final = sql("""
    INSERT INTO relatum.super_streams (vhost, name, header) VALUES (:vhost::text, :name::text, :header::text)
    ON CONFLICT DO NOTHING""")

IDLE_S: Final = sql("SELECT idle_s FROM relatum.super_streams WHERE super_stream_id = :super_stream_id::integer")

SET_IDLE: Final = sql("""
    UPDATE relatum.super_streams SET idle_s = :idle_s::double precision
    WHERE super_stream_id = :super_stream_id::integer""")

# Another router may have stored its value since this one read the row.
_SET_FIRST_IDLE: Final = sql("""
    UPDATE relatum.super_streams SET idle_s = coalesce(idle_s, :idle_s::double precision)
    WHERE super_stream_id = :super_stream_id::integer
    RETURNING idle_s""")

GENERATION: Final = sql("""
    SELECT generation FROM relatum.super_streams WHERE super_stream_id = :super_stream_id::integer""")

RAISE_GENERATION: Final = sql("""
    UPDATE relatum.super_streams SET generation = generation + 1
    WHERE super_stream_id = :super_stream_id::integer
    RETURNING generation""")
"""Locks the super stream's row until the transaction ends, and returns the generation for the changes."""

_INVALIDATE_CACHES: Final = sql("""
    UPDATE relatum.super_streams SET generation = generation + 1, floor = generation + 1
    WHERE super_stream_id = :super_stream_id::integer""")

PARTITIONS: Final = sql("""
    SELECT partition_id, stream, binding_key, place, state, weight, open_sets
    FROM relatum.super_stream_partitions
    WHERE super_stream_id = :super_stream_id::integer
    ORDER BY place, partition_id""")
"""The columns of `PartitionRow`, in order."""

_PUT_PARTITION: Final = sql("""
    INSERT INTO relatum.super_stream_partitions (super_stream_id, stream, binding_key, place)
    VALUES (:super_stream_id::integer, :stream::text, :binding_key::text, :place::integer)
    ON CONFLICT (super_stream_id, stream) DO UPDATE SET binding_key = excluded.binding_key, place = excluded.place""")

# All statements lock partitions in the order of their ids.
SET_WEIGHTS: Final = sql("""
    WITH locked AS (
        SELECT partition_id, weights.weight FROM relatum.super_stream_partitions s
        JOIN unnest(:streams::text[], :weights::double precision[]) AS weights(stream, weight)
            ON weights.stream = s.stream
        WHERE s.super_stream_id = :super_stream_id::integer
        ORDER BY s.partition_id FOR NO KEY UPDATE OF s)
    UPDATE relatum.super_stream_partitions s SET weight = locked.weight
    FROM locked WHERE s.partition_id = locked.partition_id""")

_POLL_S: Final = 0.1
"""Seconds between two checks of the consumers' positions."""

_LOCK_SUPER_STREAM: Final = sql("""
    SELECT 1 FROM relatum.super_streams WHERE super_stream_id = :super_stream_id::integer FOR UPDATE""")

MOVES_OF: Final = sql("""
    SELECT move_id FROM relatum.context_moves
    WHERE super_stream_id = :super_stream_id::integer AND ended_at IS NULL
        AND (source_id = :partition_id::integer OR target_id = :partition_id::integer)
    LIMIT 1""")

PLACED_IN: Final = sql("""
    SELECT name FROM relatum.placements WHERE partition_id = :partition_id::integer AND state <> 'released' LIMIT 1""")

_RETIRE: Final = sql("""
    UPDATE relatum.super_stream_partitions SET state = 'retired' WHERE partition_id = :partition_id::integer""")

# A partition that was added while no member ran has no position yet.
_UNREAD: Final = sql("""
    SELECT c.name, s.stream
    FROM relatum.serial_consumers c
    CROSS JOIN unnest(:partition_ids::integer[], :ends::bigint[]) AS needed(partition_id, "end")
    JOIN relatum.super_stream_partitions s ON s.partition_id = needed.partition_id
    LEFT JOIN relatum.serial_positions p ON p.consumer_id = c.consumer_id AND p.partition_id = needed.partition_id
    WHERE c.super_stream_id = :super_stream_id::integer
        AND (coalesce(p.position, 0) < needed."end" OR EXISTS (
            SELECT FROM relatum.serial_holds h
            WHERE h.consumer_id = c.consumer_id AND h.partition_id = needed.partition_id
                AND h.marker_offset < needed."end"))
    LIMIT 1""")
"""One consumer that has not consumed a partition up to its end: it has not read so far, or holds back messages."""

OF_VHOST: Final = sql("""
    SELECT super_stream_id, name FROM relatum.super_streams WHERE vhost = :vhost::text ORDER BY name""")


Execute: TypeAlias = Callable[..., Any]
"""Runs a statement in a transaction, with its parameters as keywords, and returns its result."""


def execute_in(connection: sa.Connection, **common: Any) -> Execute:
    """Return a function that runs statements in a transaction. `common`: parameters of all statements."""
    return lambda statement, **more: connection.execute(statement, {**common, **more})


def placed_super_streams(database: AnyDatabase, *, vhost: str = "/") -> list[str]:
    """Return the names of the super streams that have serialization contexts or affinity sets, ordered.

    Args:
        database: PostgreSQL's URL, or a `Database`.
        vhost: The super streams' virtual host. Default: "/".

    Raises:
        DatabaseUnavailable: PostgreSQL does not answer.
    """
    checked_name("vhost", vhost)
    with closing(Database(database, refusing=None, statement_s=ONCE_STATEMENT_S)) as shared:
        return [row.name for row in shared.rows(OF_VHOST, {"vhost": vhost})]


def open_super_stream(
    connection: sa.Connection,
    super_stream: tuple[str, str],
    header: str | None,
    layout: Layout | None,
    idle_s: float | None = None,
) -> tuple[int, str, list[PartitionRow]]:
    """Create missing rows of a super stream; see `PlacementStore.open`. Return its id, header and partitions."""
    vhost, name = super_stream
    found = connection.execute(FIND_SUPER_STREAM, {"vhost": vhost, "name": name}).one_or_none()
    if found is None:
        if header is None or layout is None:
            raise not_found(name)
        connection.execute(_ADD_SUPER_STREAM, {"vhost": vhost, "name": name, "header": header})
        found = connection.execute(FIND_SUPER_STREAM, {"vhost": vhost, "name": name}).one()
    if header not in (None, found.header):
        raise SuperStreamConflict(
            f"super stream {name!r} was opened with the header {found.header!r}, not {header!r}: pass {found.header!r}",
            super_stream=name,
            reason=f"its header is {found.header!r}",
        )
    execute = execute_in(connection, super_stream_id=found.super_stream_id)
    if idle_s is not None:
        _agree_on_idle(execute, name, float(idle_s), stored=found.idle_s)
    known = partitions_in(connection, found.super_stream_id)
    if layout is not None and _sync_partitions(execute, known, layout):
        known = partitions_in(connection, found.super_stream_id)
    return found.super_stream_id, found.header, known


def _agree_on_idle(execute: Execute, name: str, idle_s: float, *, stored: float | None) -> None:
    if stored is None:
        stored = execute(_SET_FIRST_IDLE, idle_s=idle_s).scalar_one()
    if stored != idle_s:
        raise SuperStreamConflict(
            f"the sets of super stream {name!r} close after {seconds_text(stored)} without use, not after "
            f"{seconds_text(idle_s)}: all routers share this value; `AffinitySets.set_idle` changes it",
            super_stream=name,
            reason=f"its idle_s is {stored:g}",
        )


def not_found(name: str) -> SuperStreamNotFound:
    return SuperStreamNotFound(
        f"super stream {name!r} is not in the database: open a router for it first",
        super_stream=name,
    )


def partitions_in(connection: sa.Connection, super_stream_id: int) -> list[PartitionRow]:
    rows = connection.execute(PARTITIONS, {"super_stream_id": super_stream_id}).all()
    return [partition_of(row) for row in rows]


def partition_of(row: Any) -> PartitionRow:
    return replace(PartitionRow(*row), state=PartitionState(row.state))


def _sync_partitions(execute: Execute, known: Sequence[PartitionRow], layout: Layout) -> bool:
    places = {row.stream: (row.binding_key, row.place) for row in known}
    changed = [each for each in layout if places.get(each.stream) != (each.binding_key, each.place)]
    if changed:
        # Also for new partitions: another process may have added them with other keys since `known` was read.
        execute(_INVALIDATE_CACHES)
    for each in changed:
        execute(_PUT_PARTITION, stream=each.stream, binding_key=each.binding_key, place=each.place)
    return bool(changed)


def checked_key(rows: Sequence[PartitionRow], super_stream: str, key: str | None) -> str | None:
    """Return a new partition's binding key; None: the broker's next number. Refuses those of retired partitions."""
    retired = {row.stream for row in rows if row.state is PartitionState.RETIRED}
    if key is None:
        numbers = [row.stream.removeprefix(f"{super_stream}-") for row in rows]
        taken = [int(number) for number in numbers if number.isascii() and number.isdecimal()]
        return str(1 + max(taken, default=-1)) if retired else None
    if f"{super_stream}-{key}" in retired:
        raise SuperStreamConflict(
            f"partition '{super_stream}-{key}' was retired, and its name cannot be reused: pass another binding key",
            super_stream=super_stream,
            reason="the partition was retired",
        )
    return key


def retire(store: "MoveStore", stream: str) -> None:
    """Retire a partition: no name can be placed in it or moved to it any more. Idempotent."""
    with store.durable_transaction() as execute:
        execute(_LOCK_SUPER_STREAM)
        row = store.partition(execute, stream)
        if not any(each.stream != stream and each.state == PartitionState.ACTIVE for each in execute(PARTITIONS)):
            raise PartitionInUse(
                f"{stream!r} is the last active partition: add one first", stream=stream, reason="it is the last one"
            )
        # Retiring locks the row: the checks below then see all earlier placements, and later ones see it retired.
        execute(_RETIRE, partition_id=row.partition_id)
        move_id = execute(MOVES_OF, partition_id=row.partition_id).scalar()
        if move_id is not None:
            reason = f"move {move_id} has not ended"
            why = f"{stream!r} cannot be retired: {reason}; resume or abort it"
            raise PartitionInUse(why, stream=stream, reason=reason)
        context = execute(PLACED_IN, partition_id=row.partition_id).scalar()
        if context is not None:
            reason = f"it has the placement of {context!r}, and perhaps others"
            raise PartitionInUse(f"{stream!r} cannot be retired: {reason}; move them", stream=stream, reason=reason)


def wait_until_consumed(store: "MoveStore", streams: "ControlStreams", retired: str, timeout_s: float) -> None:
    """Wait until every consumer has consumed all messages that the super stream has now.

    All partitions count: an adoption in another one may refer to a message in the retired partition.
    """
    rows, ends = store.partitions(), dict[int, int]()
    for row in rows:
        with suppress(StreamNotFound):  # The partition was retired and deleted before.
            ends[row.partition_id] = streams.proven_end_of(row.stream)
    parameters = {
        "super_stream_id": store.super_stream_id,
        "partition_ids": list(ends),
        "ends": list(ends.values()),
    }
    give_up_at = time.monotonic() + timeout_s
    while found := store.database.rows(_UNREAD, parameters):
        if time.monotonic() >= give_up_at:
            name, stream = found[0]
            reason = f"consumer {name!r} has not consumed all of {stream!r}, or holds back messages there"
            raise PartitionInUse(
                f"{retired!r} is retired, but was not deleted: {reason}; retire it again later",
                stream=retired,
                reason=reason,
            )
        time.sleep(_POLL_S)
