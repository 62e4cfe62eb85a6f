"""Reading the relationship table over JDBC: the evenness of its partitions."""

import time
from collections.abc import Iterator
from typing import Final

import psycopg
from pyspark.sql import functions as F

import relatum_spark
from benchmarks._context import Context
from benchmarks._results import Row
from benchmarks._timing import per_second
from benchmarks.spark._session import session

GROUP: Final = "table"

PARTITIONS: Final = 8
EVEN_AIM: Final = 1.2
HOT_SHARE: Final = 10
"""One row in this many is in one of the quiet streams."""

QUIET_STREAMS: Final = 9

HOLE: Final = 1_000_000_000
"""Distance of the offsets of the two halves."""


def measure(context: Context) -> Iterator[Row]:
    """Yield the row about the JDBC read."""
    database, rows = context.new_database(), context.messages
    _fill(database, rows)
    context.say(f"reading {rows:,} rows over JDBC in {PARTITIONS} partitions")
    frame = relatum_spark.relationships(session(), database=database, partitions=PARTITIONS)
    started = time.perf_counter()
    sizes = [row["count"] for row in frame.groupBy(F.spark_partition_id()).count().collect()]
    taken = time.perf_counter() - started
    assert sum(sizes) == rows, f"{sum(sizes)} of {rows} rows"
    assert len(sizes) == PARTITIONS, f"{len(sizes)} partitions hold rows"
    spread = max(sizes) / min(sizes)
    yield Row(
        GROUP,
        f"JDBC read in {PARTITIONS} partitions, 90 % of the rows in one stream, a hole in the offsets",
        f"{max(sizes):,} rows in the largest",
        f"{min(sizes):,} in the smallest",
        spread,
        f"≤ {EVEN_AIM:g}",
        spread <= EVEN_AIM,
        note=f"Counting them took {taken:.1f} s: {per_second(rows / taken).replace('messages', 'rows')}.",
        figures={"rows": sizes, "seconds": taken},
    )


def _fill(database: str, rows: int) -> None:
    """Write rows as a recorder does: one stream has nine tenths, and its offsets have a gap."""
    with psycopg.connect(database) as connection:
        connection.execute(
            "INSERT INTO relatum.streams (name) SELECT 'stream-' || n FROM generate_series(0, %s) n", [QUIET_STREAMS]
        )
        connection.execute(
            "INSERT INTO relatum.coverage (stream_id, from_offset, to_offset, key_ids, with_time, is_tail) "
            "SELECT stream_id, 0, %s, ARRAY(SELECT key_id FROM relatum.keys), true, true FROM relatum.streams",
            [HOLE + rows + 1],
        )
        connection.execute(
            """
            INSERT INTO relatum.relationships (stream_offset, time_us, stream_id, key_id, value)
            SELECT n + CASE WHEN n > %(rows)s / 2 THEN %(hole)s ELSE 0 END, n,
                   (SELECT stream_id FROM relatum.streams WHERE name = 'stream-' ||
                       CASE WHEN n %% %(share)s = 0 THEN 1 + n / %(share)s %% %(quiet)s ELSE 0 END),
                   (SELECT min(key_id) FROM relatum.keys), 'o' || n
            FROM generate_series(1, %(rows)s) n
            """,
            {"rows": rows, "hole": HOLE, "share": HOT_SHARE, "quiet": QUIET_STREAMS},
        )
        connection.commit()
        connection.autocommit = True
        connection.execute("VACUUM ANALYZE relatum.relationships")
