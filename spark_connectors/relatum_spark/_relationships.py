"""The relationship table as a DataFrame: balanced partitions, and one state of the table for all of them."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final, Literal

import sqlalchemy as sa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from relatum.checks import checked_count, checked_name, checked_names, shown
from relatum.errors import InvalidInput, StreamNotFound
from relatum.store import as_engine, coverage_of, covered, streams, translated_errors
from relatum_spark._cuts import Bound, offset_predicates, predicates_of
from relatum_spark._definitions import definitions_in
from relatum_spark._jdbc import jdbc_options, require_driver
from relatum_spark._snapshot import Snapshot
from relatum_spark._where import database_url

Split = Literal["blocks", "offsets"]

COLUMNS: Final = ("key", "value", "vhost", "stream", "stream_offset", "time")

PARTITIONS_MAX: Final = 10_000


def relationships(
    spark: SparkSession,
    *,
    database: str | None = None,
    streams: str | Sequence[str] | None = None,
    keys: str | Sequence[str] | None = None,
    vhost: str | None = None,
    partitions: int = 8,
    split: Split = "blocks",
    snapshot: Snapshot | None = None,
) -> DataFrame:
    """The relationship table: one row for each key of each recorded message, as in the view `relatum.relations`.

    Without a snapshot the rows are those recorded when this is called, whenever the DataFrame is used and however
    often: later ones are left out by their offsets. No transaction stays open. Rows that are pruned meanwhile, since
    retention took their messages, may be missing in some tasks and not in others; with a snapshot they are not. It is
    good for a day: by then PostgreSQL may have rows of streams that are kept for long in another part of the table.

    Args:
        spark: The session; it needs PostgreSQL's JDBC driver (`jdbc_jar`).
        database: PostgreSQL's URL; None for RELATUM_DATABASE_URL, or for the snapshot's.
        streams: A stream or super stream, or several; None for all. Rows of replaced streams are not read.
        keys: A key or several; None for all in force.
        vhost: The vhost of the streams; None for all.
        partitions: At most so many tasks read at once, each by a connection of its own. 1 to 10,000.
        split: "blocks" cuts the table by place: the fastest. "offsets" cuts it by stream and offset: each task has
            the rows of neighbouring messages. Both are balanced by rows, whatever a stream's share or gaps.
        snapshot: Read in this state of the database; the action must run inside its block.

    Returns:
        Columns key, value, vhost, stream (string), stream_offset (long), time (timestamp, null where none was
        recorded). Filters on all but the time run in PostgreSQL. Rows come in no order.

    Raises:
        ConfigurationError: The session has no JDBC driver, or the database's URL cannot be used by it.
        StreamNotFound: A stream or super stream of that name was never recorded.
        KeyNotDefined: A key of that name is not in force.
        InvalidInput: An argument is wrong, or the snapshot has ended.
        DatabaseUnavailable: PostgreSQL does not answer.
    """
    checked_count("partitions", partitions, most=PARTITIONS_MAX)
    if split not in ("blocks", "offsets"):
        raise InvalidInput(f'split must be "blocks" or "offsets", not {split!r}')
    stream_names, key_names = _names(streams, "streams"), _names(keys, "keys")
    if vhost is not None:
        checked_name("vhost", vhost)
    url = database_of(database, snapshot)
    options = jdbc_options(url)
    require_driver(spark)
    with _connection(url, snapshot) as connection:
        stream_ids = _stream_ids(connection, stream_names, vhost)
        definitions = definitions_in(connection, key_names)
        key_ids = [definition.key_id for definition in definitions]
        bounds = _bounds(connection, stream_ids, key_ids)
        if split == "blocks":
            steady = snapshot is not None
            predicates = predicates_of(connection, stream_ids, key_ids, bounds, partitions, is_steady=steady)
        else:
            predicates = offset_predicates(connection, stream_ids, key_ids, bounds, partitions)
    options["sessionInitStatement"] = "; ".join(_session_statements(snapshot))
    frame = spark.read.jdbc(options.pop("url"), _table(bounds), predicates=predicates, properties=options)
    # Made here and not in SQL: Spark would push filters on it down as text without a time zone.
    return frame.withColumn("time", F.timestamp_micros("time_us")).select(*COLUMNS)


def _names(names: str | Sequence[str] | None, argument: str) -> list[str] | None:
    if names is None:
        return None
    found = checked_names(argument, [names] if isinstance(names, str) else names, least=1)
    return list(dict.fromkeys(found))


def database_of(database: str | None, snapshot: Snapshot | None) -> str:
    """PostgreSQL's URL: the snapshot's, where there is one.

    Raises:
        ConfigurationError: none is named, or it cannot be read.
        InvalidInput: what is given is no snapshot, or one of another database.
    """
    if snapshot is None:
        return database_url(database)
    if not isinstance(snapshot, Snapshot):
        raise InvalidInput(f"snapshot= takes what `relatum_spark.snapshot` gives, not {shown(snapshot)}")
    if database is not None and database != snapshot.database:
        raise InvalidInput("the snapshot is of another database; leave out `database`")
    return snapshot.database


@contextmanager
def _connection(url: str, snapshot: Snapshot | None) -> Iterator[sa.Connection]:
    if snapshot is not None:
        with snapshot.connect() as connection:
            yield connection
        return
    with as_engine(url) as engine, translated_errors(), engine.connect() as connection:
        # One state for streams, keys and coverage.
        yield connection.execution_options(isolation_level="REPEATABLE READ")


def _stream_ids(connection: sa.Connection, names: list[str] | None, vhost: str | None) -> list[int]:
    """The ids of present streams and of the partitions of super streams."""
    query = sa.select(streams.c.stream_id, streams.c.name, streams.c.super_stream).where(
        streams.c.replaced_at.is_(None)
    )
    if vhost is not None:
        query = query.where(streams.c.vhost == vhost)
    if names is not None:
        query = query.where(streams.c.name.in_(names) | streams.c.super_stream.in_(names))
    rows = connection.execute(query.order_by(streams.c.stream_id)).all()
    known = {row.name for row in rows} | {row.super_stream for row in rows}
    for name in names or ():
        if name not in known:
            raise StreamNotFound(
                f"no stream {name!r} was recorded: see `relatum record` and `relatum backfill`", stream=name
            )
    return [row.stream_id for row in rows]


def _bounds(connection: sa.Connection, stream_ids: Sequence[int], key_ids: Sequence[int]) -> list[Bound]:
    """What is recorded now. Rows in it never change; they are only pruned, with the messages they are of."""
    rows = coverage_of(connection, stream_ids)
    by_stream = {stream_id: [row for row in rows if row.stream_id == stream_id] for stream_id in stream_ids}
    return [
        (stream_id, key_id, *offsets)
        for stream_id in stream_ids
        for key_id in key_ids
        for offsets in covered(by_stream[stream_id], key_id)
    ]


def _table(bounds: Sequence[Bound]) -> str:
    """What Spark reads from: the view's columns, and those that predicates cut by. Holds numbers, no text of users.

    Streams and keys are joined by id and not by whether they are in force, so that one that is replaced while tasks
    run is not there for some of them only.
    """
    columns = list(zip(*bounds, strict=True)) or [(), (), (), ()]
    arrays = ", ".join(
        "'{" + ",".join(map(str, column)) + "}'::" + kind + "[]"
        for column, kind in zip(columns, ("int", "smallint", "bigint", "bigint"), strict=True)
    )
    return _TABLE.format(arrays=arrays)


_TABLE: Final = (
    "(SELECT k.name AS key, r.value, s.vhost, s.name AS stream, r.stream_offset, "
    "r.time_us, r.stream_id, r.part, r.ctid AS place "
    "FROM relatum.relationships r "
    "JOIN (unnest({arrays}) c (stream_id, key_id, from_offset, to_offset) "
    "JOIN relatum.streams s ON s.stream_id = c.stream_id JOIN relatum.keys k ON k.key_id = c.key_id) "
    "ON r.stream_id = c.stream_id AND r.key_id = c.key_id "
    "AND r.stream_offset >= c.from_offset AND r.stream_offset < c.to_offset) relations"
)


def _session_statements(snapshot: Snapshot | None) -> list[str]:
    """What each connection runs first: the snapshot, and a hint.

    The small side of the join is always to be the hashed one: for nested loops the planner would scan a part of the
    table once for each stream and key.
    """
    return [*(snapshot.session_statements() if snapshot is not None else ()), "SET enable_nestloop = off"]
