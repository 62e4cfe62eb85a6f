"""The relationship table as a DataFrame and as a Spark SQL catalog, and snapshots of it for several reads."""

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Final

import psycopg
import sqlalchemy as sa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from relatum.common.checks import checked_count, checked_name, shown
from relatum.errors import ConfigurationError, InvalidInput
from relatum.reading import Broker
from relatum.store.catalog import check_recorded, streams_named
from relatum.store.coverage import TIME, coverage_by_stream, covered
from relatum.store.database import as_engine, at_one_moment, make_engine, sql
from relatum.store.parts import table_parts_of
from relatum.store.translation import translated_errors
from relatum_consumer import Status
from relatum_consumer.lookups.catalog import Catalog
from relatum_consumer.lookups.proof import evidence
from relatum_consumer.lookups.servers import Servers
from relatum_spark._servers import database_url, definitions_in, jdbc_options, names_of, open_reader, require_driver

COLUMNS: Final = ("key", "value", "vhost", "stream", "stream_offset", "time")

PARTITIONS_MAX: Final = 10_000

LIMIT_S: Final = 3600.0
"""Default lifetime of a snapshot, in seconds. Blocking vacuum for an hour does no harm yet."""

_CATALOG: Final = "org.apache.spark.sql.execution.datasources.v2.jdbc.JDBCTableCatalog"


def relationships(
    spark: SparkSession,
    *,
    database: str | None = None,
    streams: str | Sequence[str] | None = None,
    keys: str | Sequence[str] | None = None,
    vhost: str | None = None,
    partitions: int = 8,
    snapshot: "Snapshot | None" = None,
) -> DataFrame:
    """Return the relationship table: one row for each key of each recorded message, as in `relatum.relations`.

    Without a snapshot, the rows are those recorded at the call, whenever and however often you use the DataFrame:
    later rows are excluded by their offsets. No transaction stays open. Rows pruned later, after retention dropped
    their messages, may be missing in some tasks and not in others; a snapshot prevents that. Use the DataFrame within a
    day: later, Relatum may have moved rows of long-lived streams to another part of the table.

    Args:
        spark: The session; it needs PostgreSQL's JDBC driver (`jdbc_jar`).
        database: PostgreSQL's URL. None uses the snapshot's, or else RELATUM_DATABASE_URL.
        streams: A stream or super stream, or several. None means all. Rows of replaced streams are not read.
        keys: A key or several. None means all keys in force.
        vhost: The streams' virtual host. None means all.
        partitions: Maximum tasks, 1 to 10,000. Default: 8. Each task has its own connection, and about as many
            rows as the others, regardless of the streams' sizes and gaps.
        snapshot: The state of the database to read; the action must run inside its block.

    Returns:
        Columns key, value, vhost, stream (string), stream_offset (long), time (timestamp, null if none was
        recorded). Filters on all columns but the time run in PostgreSQL. The rows have no order.

    Raises:
        ConfigurationError: the session has no JDBC driver, or the driver cannot use the database's URL.
        StreamNotFound: a stream or super stream was never recorded.
        KeyNotDefined: a key is not in force.
        InvalidInput: an argument is wrong, or the snapshot has ended.
        DatabaseUnavailable: PostgreSQL does not answer.
    """
    checked_count("partitions", partitions, most=PARTITIONS_MAX)
    stream_names = None if streams is None else names_of("streams", streams)
    key_names = None if keys is None else dict.fromkeys(names_of("keys", keys))
    if vhost is not None:
        checked_name("vhost", vhost)
    url = database_of(database, snapshot)
    options = jdbc_options(url)
    require_driver(spark)
    with connected(url, snapshot) as connection:
        check_recorded(connection, vhost, stream_names or ())
        stream_ids = sorted(row.stream_id for row in streams_named(connection, vhost, stream_names))
        key_ids = [definition.key_id for definition in definitions_in(connection, key_names)]
        table = _table(connection, stream_ids, key_ids)
        predicates = _predicates(connection, stream_ids, key_ids, partitions, is_steady=snapshot is not None)
    # With nested loops, the planner would scan a part of the table once for each stream and key. Spark runs this in the
    # transaction of the read, so a pooler does not give the setting to other clients.
    begin = "SET LOCAL enable_nestloop = off"
    if snapshot is not None:
        level = "SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY"
        begin = f"{level}; SET TRANSACTION SNAPSHOT '{snapshot.snapshot_id}'; {begin}"
    options["sessionInitStatement"] = begin
    frame = spark.read.jdbc(options.pop("url"), table, predicates=predicates, properties=options)
    # Converted here and not in SQL, where Spark would push filters on it down as text without a time zone.
    return frame.withColumn("time", F.timestamp_micros("time_us")).select(*COLUMNS)


def catalog(spark: SparkSession, name: str = "relatum", *, database: str | None = None) -> str:
    """Make the database a catalog of the session: `SELECT key, count(*) FROM relatum.relatum.relations GROUP BY key`.

    Filters, aggregates, sorting with a limit and samples run in PostgreSQL. A query has one task; to read all rows of a
    large table, use `relationships`, which reads in parallel. Idempotent for the same database.

    Args:
        spark: The session; it needs PostgreSQL's JDBC driver (`jdbc_jar`).
        name: The catalog's name in SQL.
        database: PostgreSQL's URL. None uses RELATUM_DATABASE_URL.

    Returns:
        The full name of the view in SQL, by default `relatum.relatum.relations`.

    Raises:
        InvalidInput: the name is not allowed in SQL.
        ConfigurationError: the session has no JDBC driver, the driver cannot use the database's URL, or the session has
            a different catalog of that name: Spark keeps the one it opened first.
    """
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name) or name == "spark_catalog":
        raise InvalidInput(f"catalog name {name!r} is not allowed: use letters, digits and _, without a leading digit")
    options = jdbc_options(database_url(database))
    require_driver(spark)
    prefix = f"spark.sql.catalog.{name}"
    settings = {prefix: _CATALOG} | {f"{prefix}.{option}": value for option, value in options.items()}
    for setting in (prefix, f"{prefix}.url", f"{prefix}.user"):
        if spark.conf.get(setting, None) not in (None, settings[setting]):
            raise ConfigurationError(f"this session already has a different catalog {name!r}: choose another name")
    for setting, value in settings.items():
        spark.conf.set(setting, value)
    return f"{name}.relatum.relations"


# --- one state for several reads --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A state of the database that `snapshot` holds; pass it to `relationships` and the joins.

    Attributes:
        snapshot_id: PostgreSQL's id of the snapshot.
        database: PostgreSQL's URL.
    """

    snapshot_id: str
    database: str = field(repr=False)

    @contextmanager
    def connect(self) -> Iterator[sa.Connection]:
        """Connect, in a transaction that sees this state; raises `InvalidInput` if the snapshot has ended."""
        with as_engine(self.database) as engine, translated_errors(), engine.connect() as connection:
            connection.execution_options(isolation_level="REPEATABLE READ")
            try:
                # The id is from PostgreSQL, hexadecimal digits and dashes; the statement takes no parameters.
                connection.exec_driver_sql(f"SET TRANSACTION SNAPSHOT '{self.snapshot_id}'")
            except sa.exc.DBAPIError as error:
                if isinstance(error.orig, (psycopg.errors.UndefinedObject, psycopg.errors.InvalidParameterValue)):
                    raise InvalidInput(
                        "the snapshot has ended: read inside its `with` block, or give it a longer limit_s"
                    ) from None
                raise
            yield connection


@contextmanager
def snapshot(database: str | None = None, *, limit_s: float = LIMIT_S) -> Iterator[Snapshot]:
    """Hold one state of the database while the block runs, so that several reads and all their tasks see it.

    Spark reads when an action runs, so run actions inside the block. While a snapshot is held, PostgreSQL cannot clean
    up deleted rows anywhere in the database; do not hold one for hours.

    Args:
        database: PostgreSQL's URL. None uses RELATUM_DATABASE_URL.
        limit_s: Seconds after which PostgreSQL ends the snapshot by itself, in case the driver hangs. Tasks that start
            later fail with `snapshot "…" does not exist`; running tasks continue. 1 to 86,400. Default: 3,600.

    Raises:
        ConfigurationError: no database is named, or its URL is invalid.
        InvalidInput: `limit_s` is not between 1 and 86,400.
        DatabaseUnavailable: PostgreSQL does not answer.
    """
    if not 1 <= limit_s <= 86_400:
        raise InvalidInput(f"limit_s= takes 1 to 86,400 seconds, not {limit_s:g}")
    url = database_url(database)
    engine = make_engine(url, pool_size=1)
    with translated_errors():
        connection = engine.connect()
    try:
        with translated_errors():
            connection.execution_options(isolation_level="REPEATABLE READ")
            connection.exec_driver_sql(f"SET LOCAL idle_in_transaction_session_timeout = {int(limit_s * 1000)}")
            # VACUUM FULL and CLUSTER would move rows under readers by ctid: keep them in place until the block ends.
            connection.exec_driver_sql("LOCK TABLE relatum.relationships IN ACCESS SHARE MODE")
            snapshot_id: str = connection.exec_driver_sql("SELECT pg_export_snapshot()").scalar_one()
        yield Snapshot(snapshot_id, url)
    finally:
        # Close without a rollback, since the server may have ended the session at its limit.
        connection.invalidate()
        connection.close()
        engine.dispose()


def database_of(database: str | None, snapshot: Snapshot | None) -> str:
    """Return PostgreSQL's URL: the snapshot's if there is a snapshot."""
    if snapshot is None:
        return database_url(database)
    if not isinstance(snapshot, Snapshot):
        raise InvalidInput(f"snapshot= takes a Snapshot of `relatum_spark.snapshot`, not {shown(snapshot)}")
    if database is not None and database != snapshot.database:
        raise InvalidInput("database= names another database than the snapshot's: leave it out")
    return snapshot.database


@contextmanager
def connected(url: str, snapshot: Snapshot | None = None) -> Iterator[sa.Connection]:
    """Connect, in a transaction that sees one state: the snapshot's if there is a snapshot."""
    if snapshot is not None:
        with snapshot.connect() as connection:
            yield connection
        return
    with as_engine(url) as engine, at_one_moment(engine) as connection:
        yield connection


# --- the rows to read -------------------------------------------------------------------------------------


def status_of_missing(
    broker: Broker,
    database: str,
    names: Sequence[str],
    keys: Sequence[str],
    *,
    with_time: bool,
    snapshot: Snapshot | None = None,
) -> Status:
    """Return the status of rows without related messages in these streams; call this before you read the table.

    `ABSENT` if all retained messages are proven to be recorded for each key (and, `with_time`, for times); otherwise
    `NOT_RECORDED_YET` or `UNPROVEN`: related messages may exist. With a snapshot, its coverage counts.
    """
    with open_reader(broker) as reader, connected(database, snapshot) as connection:
        servers = Servers(lambda text, given: list(connection.execute(text, given)), reader)
        catalog = Catalog(servers, broker.vhost)
        catalog.check_names(names)
        key_ids = {catalog.definition(key).key_id for key in keys} | ({TIME} if with_time else set())
        return evidence(catalog, names, key_ids).status(Status.ABSENT, was_read=False, is_whole=True)


def _table(connection: sa.Connection, stream_ids: Sequence[int], key_ids: Sequence[int]) -> str:
    """Return the SQL of the table that Spark reads: the view's columns, and the columns of the predicates.

    It has the rows that are recorded now, which never change and are pruned with their messages. Its text has numbers,
    but no names from users. Streams and keys are joined by id, in force or not, so that a stream or key replaced
    while tasks run is not missing in only some tasks.
    """
    bounds = [
        (stream_id, key_id, *offsets)
        for stream_id, rows in coverage_by_stream(connection, stream_ids).items()
        for key_id in key_ids
        for offsets in covered(rows, key_id)
    ]
    columns = list(zip(*bounds, strict=True)) or [(), (), (), ()]
    arrays = ", ".join(
        "'{" + ",".join(map(str, column)) + "}'::" + kind + "[]"
        for column, kind in zip(columns, ("int", "smallint", "bigint", "bigint"), strict=True)
    )
    return _TABLE.format(arrays=arrays)


# Spark compares text by bytes. It pushes comparisons down, where a database's own collation would have another order.
_TABLE: Final = (
    '(SELECT k.name AS key, r.value, s.vhost COLLATE "C" AS vhost, s.name COLLATE "C" AS stream, r.stream_offset, '
    "r.time_us, r.stream_id, r.part, r.ctid AS place "
    "FROM relatum.relationships r "
    "JOIN (unnest({arrays}) c (stream_id, key_id, from_offset, to_offset) "
    "JOIN relatum.streams s ON s.stream_id = c.stream_id JOIN relatum.keys k ON k.key_id = c.key_id) "
    "ON r.stream_id = c.stream_id AND r.key_id = c.key_id "
    "AND r.stream_offset >= c.from_offset AND r.stream_offset < c.to_offset) relations"
)


# --- shares of the tasks ----------------------------------------------------------------------------------

# Neither ids nor offsets show how rows are distributed: streams differ in size, offsets have gaps, retention and prune
# leave empty pages. A sample of the pages shows the distribution.
#
# Rows are cut by their physical place (ctid), so that only one task reads a page. If they were cut by stream and
# offset, each task would read all pages with a row of its streams: the whole table if streams were recorded side by
# side. They are cut so only while PostgreSQL may move rows to another part, since streams and offsets do not change.

SAMPLE_BYTES: Final = 16 << 20
"""Bytes of the sampled pages: a third of a second."""

TASK_BYTES: Final = 256 << 10
"""Minimum bytes that a task reads, which takes less time than starting a task."""

_SAMPLE: Final = "FROM relatum.relationships TABLESAMPLE SYSTEM (:percent::real) REPEATABLE (0)"
_WANTED: Final = "stream_id = ANY (:stream_ids::int[]) AND key_id = ANY (:key_ids::smallint[])"
_BY_PAGE: Final = sql(f"""
    SELECT part, (ctid::text::point)[0]::bigint, count(*) FILTER (WHERE {_WANTED}) {_SAMPLE}
    GROUP BY 1, 2 ORDER BY 1, 2""")
_BY_OFFSET: Final = sql(f"""
    SELECT stream_id, stream_offset, count(*) {_SAMPLE} WHERE {_WANTED} GROUP BY 1, 2 ORDER BY 1, 2""")

Place = tuple[int, int]
"""A part of the table and a page in it, or a stream's id and an offset."""


def _predicates(
    connection: sa.Connection, stream_ids: Sequence[int], key_ids: Sequence[int], tasks: int, *, is_steady: bool
) -> list[str]:
    """Return at most `tasks` conditions; each row of these streams and keys meets exactly one of them.

    With `is_steady` all tasks see one snapshot, in which no row moves.
    """
    parts = [part for part in table_parts_of(connection) if part.is_opened and part.size]
    size = sum(part.size for part in parts)
    by_page = is_steady or not any(part.is_leaving for part in parts)
    percent = min(100.0, 100 * SAMPLE_BYTES / max(size, 1))
    sampling = {"percent": percent, "stream_ids": stream_ids, "key_ids": key_ids}
    rows = connection.execute(_BY_PAGE if by_page else _BY_OFFSET, sampling).all()
    # If the sample found no rows, share its pages evenly.
    is_seen = any(count for _, _, count in rows)
    seen = [((first, second), count if is_seen else 1) for first, second, count in rows]
    if by_page:
        cuts = cuts_of(seen, min(tasks, size // TASK_BYTES))
        return ranges([part.part for part in parts], cuts, "part", "place", "'({},0)'::tid")
    return ranges(sorted(stream_ids), cuts_of(seen, tasks), "stream_id", "stream_offset", "{}")


def cuts_of(seen: Sequence[tuple[Place, int]], tasks: int) -> list[Place]:
    """Return the places where the second and later tasks begin, so that all have about the same number of rows.

    `seen` has the places in order, with the number of rows at each.
    """
    before = [0, *accumulate(rows for _, rows in seen)]
    at = (bisect_left(before, before[-1] * task / tasks) for task in range(1, tasks))
    places = dict.fromkeys(seen[index][0] for index in at if index < len(seen))
    return [place for place in places if place > seen[0][0]]


def ranges(groups: Sequence[int], cuts: Sequence[Place], group: str, at: str, value: str) -> list[str]:
    """Return conditions that cut rows in the order of two columns; the first and last ranges are unbounded outwards.

    `groups` are all values of the first column, in order; `value` is the SQL format of the second column's values. A
    range within one group is a plain AND, for which PostgreSQL reads only the pages between two places.
    """
    if not cuts:
        return ["true"]
    conditions = []
    for (first, low), (last, high) in pairwise([(groups[0], None), *cuts, (groups[-1], None)]):
        alternatives = []
        for each in groups[bisect_left(groups, first) : bisect_right(groups, last)]:
            bounds = [f"{group} = {each}"]
            if each == first and low is not None:
                bounds.append(f"{at} >= {value.format(low)}")
            if each == last and high is not None:
                bounds.append(f"{at} < {value.format(high)}")
            alternatives.append(" AND ".join(bounds))
        conditions.append(" OR ".join(alternatives))
    return conditions
