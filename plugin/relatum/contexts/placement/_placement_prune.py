"""Forgetting placements and moves that are over, so that the tables hold what somebody may still need."""

from collections.abc import Mapping
from typing import Final

import sqlalchemy as sa

from relatum.contexts.placement import _placement_prune_statements as statements
from relatum.contexts.placement._model import PartitionState
from relatum.errors import StreamNotFound
from relatum.limits import INTEGER_MAX
from relatum.reading import BrokerAddress, StreamBounds, StreamReader, bounds_or_error
from relatum.store import super_stream_partitions, super_streams, translated_errors

KEEP_S: Final = 3600.0
"""Seconds a released placement is remembered: longer than anybody who has it cached goes without asking for changes."""

BATCH_ROWS: Final = 10_000
"""Rows deleted in one transaction: a fraction of a second."""

MOVES: Final = 1_000
"""Moves looked at in one transaction."""


def forget_placements(
    engine: sa.Engine, broker: str | BrokerAddress, *, stream_url: str | None = None, batch_rows: int = BATCH_ROWS
) -> int:
    """Delete what is over of all super streams of a virtual host, in bounded transactions; gives the rows deleted.

    That is placements that were released an hour ago, and moves of which both ends are dropped by retention and
    written over by later moves. The last move of a context into or out of a partition is kept: what it says holds for
    whatever a publisher that slept still sends there.

    Args:
        engine: The database.
        broker: The broker's URL or address.
        stream_url: The stream protocol's URL, where it cannot be told from the broker's.
        batch_rows: Placements deleted in one transaction at most.
    """
    address = BrokerAddress.of(broker, stream_url)
    with translated_errors(), engine.connect() as connection:
        of_vhost = sa.select(super_streams.c.super_stream_id).where(super_streams.c.vhost == address.vhost)
        ids = list(connection.scalars(of_vhost))
    if not ids:
        return 0
    deleted = 0
    with StreamReader.open(address) as reader:
        for super_stream_id in ids:
            while batch := forget_released(engine, super_stream_id, most=batch_rows):
                deleted += batch
            deleted += forget_moves(engine, super_stream_id, _first_offsets(engine, super_stream_id, reader))
    return deleted


def forget_released(engine: sa.Engine, super_stream_id: int, *, older_s: float = KEEP_S, most: int = BATCH_ROWS) -> int:
    """Delete one batch of placements that were released so long ago, the oldest first; gives how many.

    Those who asked for changes last before these were released are told that everything may have changed.
    """
    wanted = {"of_super_stream": super_stream_id, "older_s": older_s, "most": most}
    with translated_errors(), engine.begin() as connection:
        return connection.execute(statements.forget_released, wanted).scalar_one_or_none() or 0


def forget_moves(engine: sa.Engine, super_stream_id: int, first_offsets: Mapping[int, int]) -> int:
    """Delete what later moves say again, where retention has dropped that, too; gives the rows deleted.

    Args:
        engine: The database.
        super_stream_id: The super stream.
        first_offsets: The first retained offset by partition id; `INTEGER_MAX` where the stream is gone. What ended or
            began in other partitions is kept.
    """
    bounds = {"partition_ids": list(first_offsets), "firsts": list(first_offsets.values())}
    deleted, after = 0, 0
    while True:
        of_page = {"of_super_stream": super_stream_id, "after": after, "most": MOVES}
        with translated_errors(), engine.begin() as connection:
            moves = list(connection.scalars(statements.ended_moves, of_page))
            if not moves:
                return deleted
            deleted += connection.execute(statements.forget_contexts, bounds | {"moves": moves}).rowcount
            deleted += connection.execute(statements.forget_moves, {"moves": moves}).rowcount
        after = moves[-1]


def _first_offsets(engine: sa.Engine, super_stream_id: int, reader: StreamReader) -> dict[int, int]:
    partitions = super_stream_partitions.c
    query = sa.select(partitions.partition_id, partitions.stream, partitions.state).where(
        partitions.super_stream_id == super_stream_id
    )
    with translated_errors(), engine.connect() as connection:
        rows = connection.execute(query).all()
    first_offsets: dict[int, int] = {}
    for row in rows:
        found = bounds_or_error(reader, row.stream)
        first = found.first if isinstance(found, StreamBounds) else None
        # Of a partition in use, it may come back; of one that cannot be read now, nothing is known.
        if isinstance(found, StreamNotFound) and row.state == PartitionState.RETIRED:
            first = INTEGER_MAX
        if first is not None:
            first_offsets[row.partition_id] = first
    return first_offsets
