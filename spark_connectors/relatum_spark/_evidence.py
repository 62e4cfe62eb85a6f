"""Whether everything in some streams is recorded for some keys: the proof of look-ups, asked from Spark's driver."""

import time
from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa

from relatum.reading import StreamReader, agreements
from relatum.steps import run
from relatum.store.coverage import TIME
from relatum_consumer import Status
from relatum_consumer.lookups import (
    Agree,
    AllBounds,
    Bounds,
    Catalog,
    Identify,
    LookupRequest,
    Partitions,
    Pause,
    Select,
    Steps,
    evidence,
)


def status_of_missing(
    reader: StreamReader,
    connection: sa.Connection,
    vhost: str,
    names: Sequence[str],
    keys: Sequence[str],
    *,
    with_time: bool,
) -> Status:
    """What may be said of a row without relata in these streams. To be asked before the table is read.

    Args:
        reader: Where the streams end.
        connection: What is recorded; in a snapshot, what was recorded then.
        vhost: The virtual host of the streams.
        names: Streams and super streams.
        keys: Names of keys.
        with_time: Whether times must be recorded as well.

    Returns:
        `ABSENT` where it is proven that all they retain is recorded for each of the keys; else `NOT_RECORDED_YET` or
        `UNPROVEN`: there may be one.

    Raises:
        KeyNotDefined: a key is not in force.
        StreamNotFound: a stream is unknown to the database and to the broker, or was deleted.
        StreamReplaced: what lies at a stream's last recorded offset is not what was recorded there.
    """
    steps = _status(Catalog(vhost), names, keys, with_time)
    return run(steps, lambda request: _carry_out(request, reader, connection))


def _status(catalog: Catalog, names: Sequence[str], keys: Sequence[str], with_time: bool) -> Steps[Status]:
    yield from catalog.check_names(names)
    key_ids = {TIME} if with_time else set()
    for key in keys:
        definition = yield from catalog.definition(key)
        key_ids.add(definition.key_id)
    known = yield from evidence(catalog, names, key_ids)
    return known.status(is_found=False, was_read=False, is_whole=True)


def _carry_out(request: LookupRequest, reader: StreamReader, connection: sa.Connection) -> Any:
    if isinstance(request, Select):
        assert isinstance(request.sql, sa.TextClause), "the proof asks for no values"
        return connection.execute(request.sql, request.parameters).fetchall()
    if isinstance(request, Bounds):
        return reader.bounds(request.stream)
    if isinstance(request, AllBounds):
        return reader.all_bounds(request.streams, request.kept, request.lasts)
    if isinstance(request, Partitions):
        return reader.partitions(request.super_stream)
    if isinstance(request, Pause):
        return time.sleep(request.seconds)
    assert isinstance(request, Agree | Identify), "the proof asks for nothing else"
    return reader.identity() if isinstance(request, Identify) else agreements(reader, request.positions, request.kept)
