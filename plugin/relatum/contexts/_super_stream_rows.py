"""Creates or checks the rows of a super stream with placements and of its partitions, and retires partitions."""

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

USED_EVERY_S: Final = 15.0
"""Seconds between two writes of a router about the sets it used."""

IDLE_S_MIN: Final = 4 * USED_EVERY_S
"""The minimum of `idle_s`: a router that misses some rounds does not lose its sets."""

KEEP_COMMITS: Final = """
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

_SET_IDLE: Final = """
    UPDATE relatum.super_streams SET idle_s = :idle_s::double precision
    WHERE super_stream_id = :super_stream_id::integer"""

SET_IDLE: Final = sql(_SET_IDLE)
_SET_FIRST_IDLE: Final = sql(f"{_SET_IDLE} AND idle_s IS NULL")

GENERATION: Final = sql("""
    SELECT generation FROM relatum.super_streams WHERE super_stream_id = :super_stream_id::integer""")

RAISE_GENERATION: Final = sql("""
    UPDATE relatum.super_streams SET generation = generation + 1
    WHERE super_stream_id = :super_stream_id::integer
    RETURNING generation""")
"""Locks the super stream's row until the transaction ends, and returns the generation for the changes."""

_FORGET_CHANGES: Final = sql("""
    UPDATE relatum.super_streams SET generation = generation + 1, floor = generation + 1
    WHERE super_stream_id = :super_stream_id::integer""")
"""Invalidates all caches."""

PARTITIONS: Final = sql("""
    SELECT partition_id, stream, binding_key, place, state, weight, open_sets
    FROM relatum.super_stream_partitions
    WHERE super_stream_id = :super_stream_id::integer
    ORDER BY place, partition_id""")
"""The columns of `PartitionRow`, in order."""

_ADD_PARTITION: Final = sql("""
    INSERT INTO relatum.super_stream_partitions (super_stream_id, stream, binding_key, place)
    VALUES (:super_stream_id::integer, :stream::text, :binding_key::text, :place::integer)
    ON CONFLICT DO NOTHING""")

_CHANGE_PARTITION: Final = sql("""
    UPDATE relatum.super_stream_partitions SET binding_key = :binding_key::text, place = :place::integer
    WHERE super_stream_id = :super_stream_id::integer AND stream = :stream::text""")

# Partitions are locked by id, as everywhere.
SET_WEIGHTS: Final = sql("""
    WITH locked AS (
        SELECT partition_id, weights.weight FROM relatum.super_stream_partitions s
        JOIN unnest(:streams::text[], :weights::double precision[]) AS weights(stream, weight)
            ON weights.stream = s.stream
        WHERE s.super_stream_id = :super_stream_id::integer
        ORDER BY s.partition_id FOR NO KEY UPDATE OF s)
    UPDATE relatum.super_stream_partitions s SET weight = locked.weight
    FROM locked WHERE s.partition_id = locked.partition_id""")

LOOK_S: Final = 0.1
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

_UNREAD: Final = sql("""
    (SELECT c.name, s.stream
    FROM relatum.serial_consumers c
    JOIN relatum.serial_positions p ON p.consumer_id = c.consumer_id
    JOIN unnest(:partition_ids::integer[], :ends::bigint[]) AS needed(partition_id, "end")
        ON p.partition_id = needed.partition_id
    JOIN relatum.super_stream_partitions s ON s.partition_id = needed.partition_id
    WHERE c.super_stream_id = :super_stream_id::integer AND p.position < needed."end"
    LIMIT 1)
    UNION ALL
    (SELECT c.name, NULL FROM relatum.serial_consumers c JOIN relatum.serial_holds h ON h.consumer_id = c.consumer_id
    WHERE c.super_stream_id = :super_stream_id::integer
        AND (h.partition_id = :partition_id::integer OR h.source_id = :partition_id::integer)
    LIMIT 1)""")
"""A consumer that has not read a partition to its end, or holds messages because of the retired one."""

OF_VHOST: Final = sql("""
    SELECT super_stream_id, name FROM relatum.super_streams WHERE vhost = :vhost::text ORDER BY name""")


Ask: TypeAlias = Callable[..., Any]
"""Runs a statement in a transaction, with its parameters by name, and returns its result."""


def asking(connection: sa.Connection, **given: Any) -> Ask:
    """Return a function that runs statements in a transaction; `given` are parameters of all of them."""
    return lambda statement, **more: connection.execute(statement, {**given, **more})


def placed_super_streams(database: AnyDatabase, *, vhost: str = "/") -> list[str]:
    """Return the names of the super streams with serialization contexts or affinity sets, ordered.

    Args:
        database: PostgreSQL's URL, or a `Database`.
        vhost: Their virtual host.

    Raises:
        DatabaseUnavailable: PostgreSQL does not answer.
    """
    checked_name("vhost", vhost)
    with closing(Database(database, refusing=None, statement_s=ONCE_STATEMENT_S)) as shared:
        return [row.name for row in shared.rows(OF_VHOST, {"vhost": vhost})]


def open_super_stream(
    connection: sa.Connection,
    whose: tuple[str, str],
    header: str | None,
    wanted: Layout | None,
    idle_s: float | None = None,
) -> tuple[int, str, list[PartitionRow]]:
    """Create the rows of a super stream; see `PlacementStore.open`. Return its id, its header and its partitions."""
    vhost, name = whose
    found = connection.execute(FIND_SUPER_STREAM, {"vhost": vhost, "name": name}).one_or_none()
    if found is None:
        if header is None or wanted is None:
            raise not_found(name)
        connection.execute(_ADD_SUPER_STREAM, {"vhost": vhost, "name": name, "header": header})
        found = connection.execute(FIND_SUPER_STREAM, {"vhost": vhost, "name": name}).one()
    if header not in (None, found.header):
        raise SuperStreamConflict(
            f"the sets of super stream {name!r} are named by the header {found.header!r}, not by {header!r}",
            super_stream=name,
            reason=f"its header is {found.header!r}",
        )
    ask = asking(connection, super_stream_id=found.super_stream_id)
    if idle_s is not None:
        _agree_on_idle(ask, name, float(idle_s), stored=found.idle_s)
    known = partitions_in(connection, found.super_stream_id)
    if wanted is not None and _synced(ask, known, wanted):
        known = partitions_in(connection, found.super_stream_id)
    return found.super_stream_id, found.header, known


def _agree_on_idle(ask: Ask, name: str, idle_s: float, *, stored: float | None) -> None:
    if stored is None:
        ask(_SET_FIRST_IDLE, idle_s=idle_s)
        # Another router may have stored it first, while this one waited.
        stored = ask(IDLE_S).scalar_one()
    if stored != idle_s:
        raise SuperStreamConflict(
            f"the sets of super stream {name!r} are closed after {seconds_text(stored)} without use, not after "
            f"{seconds_text(idle_s)}: all routers share this value; `AffinitySets.set_idle` changes it",
            super_stream=name,
            reason=f"its idle_s is {stored:g}",
        )


def not_found(name: str) -> SuperStreamNotFound:
    return SuperStreamNotFound(
        f"the database does not know super stream {name!r}: open a router for it first",
        super_stream=name,
    )


def partitions_in(connection: sa.Connection, super_stream_id: int) -> list[PartitionRow]:
    rows = connection.execute(PARTITIONS, {"super_stream_id": super_stream_id}).all()
    return [partition_of(row) for row in rows]


def partition_of(row: Any) -> PartitionRow:
    return replace(PartitionRow(*row), state=PartitionState(row.state))


def _synced(ask: Ask, known: Sequence[PartitionRow], wanted: Layout) -> bool:
    by_stream = {row.stream: row for row in known}
    has_changed = False
    for partition in wanted:
        row = by_stream.get(partition.stream)
        if row is not None and (row.binding_key, row.place) == (partition.binding_key, partition.place):
            continue
        if row is not None:
            ask(_FORGET_CHANGES)
        statement = _ADD_PARTITION if row is None else _CHANGE_PARTITION
        ask(statement, stream=partition.stream, binding_key=partition.binding_key, place=partition.place)
        has_changed = True
    return has_changed


def checked_key(rows: Sequence[PartitionRow], super_stream: str, key: str | None) -> str | None:
    """Return the binding key of a new partition: the given key, or the next number. Keys of retired ones are refused.

    None lets the broker choose the number, which does not know of deleted partitions.
    """
    retired = {row.stream for row in rows if row.state is PartitionState.RETIRED}
    if key is None:
        numbers = [row.stream.removeprefix(f"{super_stream}-") for row in rows]
        taken = [int(number) for number in numbers if number.isascii() and number.isdecimal()]
        return str(1 + max(taken, default=-1)) if retired else None
    if f"{super_stream}-{key}" in retired:
        raise SuperStreamConflict(
            f"partition '{super_stream}-{key}' was retired, and its name cannot be reused: choose another binding key",
            super_stream=super_stream,
            reason="the partition was retired",
        )
    return key


def retire(store: "MoveStore", stream: str) -> None:
    """Retire a partition: from then on, nothing is placed in it or moved to it. Idempotent.

    Raises:
        StreamNotFound, PartitionInUse: nothing was changed.
    """
    with store.kept() as ask:
        ask(_LOCK_SUPER_STREAM)
        rows = ask(PARTITIONS).all()
        row = next((row for row in rows if row.stream == stream), None)
        if row is None:
            raise StreamNotFound(f"the super stream has no partition {stream!r}", stream=stream)
        if not any(row.stream != stream and row.state == PartitionState.ACTIVE for row in rows):
            raise PartitionInUse(f"{stream!r} is the last partition", stream=stream, reason="it is the last one")
        # First, as it locks the row: names that are placed there now are seen, and later ones find it retired.
        ask(_RETIRE, partition_id=row.partition_id)
        move_id = ask(MOVES_OF, partition_id=row.partition_id).scalar()
        if move_id is not None:
            reason = f"move {move_id} has not ended"
            raise PartitionInUse(f"{stream!r} cannot be retired: {reason}", stream=stream, reason=reason)
        context = ask(PLACED_IN, partition_id=row.partition_id).scalar()
        if context is not None:
            reason = f"{context!r} is placed there, and perhaps others"
            raise PartitionInUse(f"{stream!r} cannot be retired: {reason}; move them", stream=stream, reason=reason)


def wait_until_read(store: "MoveStore", streams: "ControlStreams", retired: str, timeout_s: float) -> None:
    """Wait until every consumer has read all present messages of the super stream.

    This includes other partitions: an adoption there may replace a message in the retired partition.

    Raises:
        PartitionInUse: a consumer did not finish in time.
    """
    rows, ends = store.partitions(), dict[int, int]()
    for row in rows:
        with suppress(StreamNotFound):  # one that was retired and deleted before
            ends[row.partition_id] = streams.end_of(row.stream)
    wanted = {
        "super_stream_id": store.super_stream_id,
        "partition_ids": list(ends),
        "ends": list(ends.values()),
        "partition_id": next(row.partition_id for row in rows if row.stream == retired),
    }
    give_up_at = time.monotonic() + timeout_s
    while found := store.database.rows(_UNREAD, wanted):
        if time.monotonic() >= give_up_at:
            name, stream = found[0]
            reason = (
                f"consumer {name!r} holds back messages that come after it"
                if stream is None
                else f"consumer {name!r} has not read all of {stream!r}"
            )
            raise PartitionInUse(
                f"{retired!r} is retired, but was not deleted: {reason}", stream=retired, reason=reason
            )
        time.sleep(LOOK_S)
