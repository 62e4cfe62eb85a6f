"""Deletes placements and moves that are no longer needed."""

from collections.abc import Mapping
from typing import Final

import sqlalchemy as sa

from relatum.common.limits import INTEGER_MAX
from relatum.contexts._placements import PartitionState
from relatum.contexts._super_stream_rows import OF_VHOST, partitions_in
from relatum.errors import StreamNotFound
from relatum.reading import Broker, BrokerAddress, StreamBounds, StreamReader, bounds_or_error
from relatum.store.database import sql, transaction

KEEP_S: Final = 3600.0
"""Seconds until a released placement is deleted: longer than a router may use its cache without a refresh."""

BATCH_ROWS: Final = 10_000
"""Rows deleted in one transaction, so that it takes a fraction of a second."""

MOVES: Final = 1_000
"""Moves examined in one transaction."""

_IS_FORGOTTEN: Final = """super_stream_id = :super_stream_id::integer AND state = 'released'
            AND released_at < now() - make_interval(secs => :older_s::double precision)"""

# The DELETE repeats the row's condition: the name may have been placed again since the row was chosen.
FORGET_RELEASED: Final = sql(f"""
    WITH deleted AS (
        DELETE FROM relatum.placements
        WHERE placement_id = ANY (ARRAY (
            SELECT placement_id FROM relatum.placements
            WHERE {_IS_FORGOTTEN}
            ORDER BY released_at LIMIT :most::integer))
            AND {_IS_FORGOTTEN}
        RETURNING generation)
    UPDATE relatum.super_streams SET floor = greatest(floor, (SELECT max(generation) FROM deleted))
    WHERE super_stream_id = :super_stream_id::integer AND (SELECT count(*) FROM deleted) > 0
    RETURNING (SELECT count(*) FROM deleted)""")
"""Deletes the oldest released placements, and raises `floor`: earlier changes are not stored. Returns the row count."""

# A consumer whose hold begins now has read a retained marker, and so needs none of the deleted moves.
ENDED_MOVES: Final = sql("""
    SELECT move_id FROM relatum.context_moves m
    WHERE super_stream_id = :super_stream_id::integer AND move_id > :after::bigint AND ended_at IS NOT NULL
        AND NOT EXISTS (SELECT FROM relatum.serial_holds h WHERE h.move_id = m.move_id)
    ORDER BY move_id LIMIT :most::integer""")
"""A page of ended moves without holds, in order."""


def _superseded(end: str) -> str:
    """Return a condition: retention has dropped the fence or marker of a later move of the context in this partition.

    `end`: the column with the partition's id. The condition is also true if the partition's stream was deleted.
    """
    return f"""(
            EXISTS (
                SELECT FROM unnest(:partition_ids::integer[], :firsts::bigint[]) AS gone(partition_id, first)
                WHERE gone.partition_id = {end} AND gone.first = {INTEGER_MAX})
            OR EXISTS (
                SELECT FROM relatum.moved_contexts also
                JOIN relatum.context_moves later ON later.move_id = also.move_id
                JOIN unnest(:partition_ids::integer[], :firsts::bigint[]) AS retained(partition_id, first)
                    ON retained.partition_id = {end}
                WHERE also.name = c.name AND later.super_stream_id = m.super_stream_id
                    AND later.fence_epoch > m.epoch AND later.ended_at IS NOT NULL
                    AND (later.source_id = {end} AND later.fence_offset < retained.first
                        OR later.target_id = {end} AND later.marker_offset < retained.first)))"""


# The moves are listed twice: otherwise the join would read all moves.
FORGET_CONTEXTS: Final = sql(f"""
    DELETE FROM relatum.moved_contexts c USING relatum.context_moves m
    WHERE c.move_id = m.move_id AND c.move_id = ANY (:moves::bigint[]) AND m.move_id = ANY (:moves::bigint[])
        AND {_superseded("m.source_id")}
        AND {_superseded("m.target_id")}
    RETURNING c.move_id""")
"""Deletes the contexts of ended moves that later moves of the same contexts supersede."""

FORGET_MOVES: Final = sql("""
    DELETE FROM relatum.context_moves m
    WHERE move_id = ANY (:moves::bigint[])
        AND NOT EXISTS (SELECT FROM relatum.moved_contexts c WHERE c.move_id = m.move_id)""")
"""Deletes moves that have no context left."""


def forget_placements(engine: sa.Engine, broker: str | Broker, *, batch_rows: int = BATCH_ROWS) -> int:
    """Delete old placements and moves of a virtual host's super streams, in bounded transactions; return the row count.

    This deletes placements that were released over an hour ago, and moves that later moves supersede, once retention
    has dropped the fences and markers of both moves. It keeps the last move of a context into or out of a partition: a
    suspended publisher may still send messages there, and that move decides whether they are valid.

    Args:
        engine: The database's engine.
        broker: The broker's URL, or a `Broker`.
        batch_rows: Maximum placements deleted in one transaction. Default: 10,000.
    """
    address = BrokerAddress.of(broker)
    with transaction(engine) as connection:
        ids = list(connection.scalars(OF_VHOST, {"vhost": address.vhost}))
    if not ids:
        return 0
    deleted = 0
    with StreamReader.open(address) as reader:
        for super_stream_id in ids:
            while batch := forget_released(engine, super_stream_id, most=batch_rows):
                deleted += batch
            deleted += forget_moves(engine, super_stream_id, _first_offsets(engine, super_stream_id, reader))
    return deleted


def forget_released(engine: sa.Engine, super_stream_id: int, *, most: int = BATCH_ROWS) -> int:
    """Delete one batch of placements that were released over `KEEP_S` ago, oldest first; return their number."""
    wanted = {"super_stream_id": super_stream_id, "older_s": KEEP_S, "most": most}
    with transaction(engine) as connection:
        return connection.execute(FORGET_RELEASED, wanted).scalar_one_or_none() or 0


def forget_moves(engine: sa.Engine, super_stream_id: int, first_offsets: Mapping[int, int]) -> int:
    """Delete moves that later moves supersede, once retention has dropped what both wrote; return the row count."""
    bounds = {"partition_ids": list(first_offsets), "firsts": list(first_offsets.values())}
    deleted, after = 0, 0
    while True:
        of_page = {"super_stream_id": super_stream_id, "after": after, "most": MOVES}
        with transaction(engine) as connection:
            moves = list(connection.scalars(ENDED_MOVES, of_page))
            if not moves:
                return deleted
            deleted += connection.execute(FORGET_CONTEXTS, bounds | {"moves": moves}).rowcount
            deleted += connection.execute(FORGET_MOVES, {"moves": moves}).rowcount
        after = moves[-1]


def _first_offsets(engine: sa.Engine, super_stream_id: int, reader: StreamReader) -> dict[int, int]:
    """Return the first retained offsets of partitions; `INTEGER_MAX`: the stream was deleted."""
    with transaction(engine) as connection:
        rows = partitions_in(connection, super_stream_id)
    first_offsets: dict[int, int] = {}
    for row in rows:
        found = bounds_or_error(reader, row.stream)
        # Another node may have dropped messages that the leader retains.
        first = found.first if isinstance(found, StreamBounds) and found.is_proven else None
        # The stream of an active partition may be declared again. Nothing is known about an unreadable stream.
        if isinstance(found, StreamNotFound) and row.state is PartitionState.RETIRED:
            first = INTEGER_MAX
        if first is not None:
            first_offsets[row.partition_id] = first
    return first_offsets
