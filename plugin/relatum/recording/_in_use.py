"""Whether somebody still needs a stream: its recorder, or who keeps what refers to it and cannot be rebuilt."""

from collections.abc import Sequence

import sqlalchemy as sa

from relatum.store import (
    RECORDERS,
    StreamRow,
    collected_messages,
    collector_members,
    collector_sources,
    collectors,
    group_consumers,
    group_states,
    holders_of,
    holds,
    super_stream_partitions,
    super_streams,
)


def reason_of(connection: sa.Connection, rows: Sequence[StreamRow]) -> str | None:
    """Why a stream is needed, as a person reads it and with what to do; None where nobody needs it."""
    for ask in (_recorder, _super_stream, _collector, _group_consumer, _groups):
        reason = ask(connection, rows)
        if reason is not None:
            return reason
    return None


def _recorder(connection: sa.Connection, rows: Sequence[StreamRow]) -> str | None:
    holder = next(iter(holders_of(connection, RECORDERS, [row.stream_id for row in rows]).values()), None)
    return None if holder is None else f"the recorder {holder} records it; stop that one first"


def _super_stream(connection: sa.Connection, rows: Sequence[StreamRow]) -> str | None:
    partitions = super_stream_partitions.c
    query = (
        sa.select(super_streams.c.name)
        .join(super_stream_partitions, partitions.super_stream_id == super_streams.c.super_stream_id)
        .where(super_streams.c.vhost == rows[0].vhost, partitions.stream == rows[0].name, partitions.state == "active")
    )
    name = connection.execute(query).scalar()
    if name is None:
        return None
    return f"contexts or affinity sets of {name!r} are placed in it; retire the partition first"


def _collector(connection: sa.Connection, rows: Sequence[StreamRow]) -> str | None:
    sources = collector_sources.c
    is_followed = sa.exists().where(
        collector_members.c.member_id == sources.member_id,
        holds(collector_members.c.lease_expires_at),
    )
    has_work = sa.exists().where(
        collected_messages.c.source_id == sources.source_id, collected_messages.c.finished_at.is_(None)
    )
    query = (
        sa.select(collectors.c.name)
        .join(collector_sources, sources.collector_id == collectors.c.collector_id)
        .where(collectors.c.vhost == rows[0].vhost, sources.stream == rows[0].name, is_followed | has_work)
    )
    name = connection.execute(query).scalar()
    return None if name is None else f"the collector {name!r} follows it, or has messages of it that are not finished"


def _group_consumer(connection: sa.Connection, rows: Sequence[StreamRow]) -> str | None:
    names = sorted({name for row in rows for name in (row.name, row.super_stream) if name is not None})
    wanted = group_consumers.c.streams.op("&&")(sa.literal(names, sa.ARRAY(sa.Text)))
    query = sa.select(group_consumers.c.name).where(group_consumers.c.vhost == rows[0].vhost, wanted)
    name = connection.execute(query).scalar()
    return None if name is None else f"the consumer {name!r} of groups reads it by name; remove that one first"


def _groups(connection: sa.Connection, rows: Sequence[StreamRow]) -> str | None:
    query = (
        sa.select(group_consumers.c.name)
        .join(group_states, group_states.c.consumer_id == group_consumers.c.consumer_id)
        .where(
            group_states.c.stream_id.in_([row.stream_id for row in rows]),
            group_states.c.state.in_(["ready", "claimed"]),
        )
    )
    name = connection.execute(query.limit(1)).scalar()
    return None if name is None else f"the consumer {name!r} has not finished groups that began in it"
