"""Bytes of table and index: of a row, and of a message's time, in the sparse index or in a row for each message."""

from collections.abc import Iterator
from typing import Any, Final

import pika
import psycopg

import relatum
from benchmarks import _streams as streams
from benchmarks._context import KEYS, Context
from benchmarks._recorder import catch_up, number_of
from benchmarks._results import Row

GROUP: Final = "sizes"

SIZE: Final = "SELECT sum(pg_relation_size('relatum.relationships_' || part || '{}')) FROM relatum.table_parts"
"""Bytes of all parts of the table, or of one of their indexes."""

STAMPED_MESSAGES: Final = 50_000
"""Intercepted messages with times indexed both ways. The times are microseconds apart, as with real publishers."""


def measure(context: Context) -> Iterator[Row]:
    """Yield the rows about sizes."""
    table = context.table(context.messages)
    with psycopg.connect(table.database_url) as connection:
        yield _row_bytes(connection)
    yield _time_bytes(context)


def _row_bytes(connection: psycopg.Connection[Any]) -> Row:
    rows = number_of(connection, "SELECT count(*) FROM relatum.relationships")
    heap, index, ranges = (number_of(connection, SIZE.format(kind)) / rows for kind in ("", "_lookup", "_offsets"))
    return Row(
        GROUP,
        f"bytes a row, {rows:,} rows",
        f"table {heap:.1f}, lookup index {index:.1f}, offset ranges {ranges:.3f}",
        aim="reported",
        figures={"table_bytes": heap, "index_bytes": index, "ranges_bytes": ranges, "rows": rows},
    )


def _time_bytes(context: Context) -> Row:
    context.say("weighing the time index")
    count = STAMPED_MESSAGES
    stream = context.stream(f"stamped-{count}", lambda name: _write_stamped(context, name, count), count)
    database = context.new_database()
    catch_up(context.broker_url, context.stream_url, database, stream, count)
    with psycopg.connect(database) as connection:
        sparse = number_of(connection, "SELECT pg_total_relation_size('relatum.time_blocks')") / count
        blocks = number_of(connection, "SELECT count(*) FROM relatum.time_blocks")
        dense = _dense_bytes(connection, count)
    context.drop_database(database)
    return Row(
        GROUP,
        f"bytes a message of the time index, {count:,} intercepted messages",
        f"{sparse:.1f} (sparse, {count / blocks:.0f} messages a block)",
        f"{dense:.1f}: a row for each message",
        sparse / dense,
        "reported",
        figures={"sparse_bytes": sparse, "dense_bytes": dense, "blocks": blocks, "messages": count},
    )


def _write_stamped(context: Context, stream: str, count: int) -> None:
    with streams.connected(context.broker_url) as connection:
        relatum.intercept(connection, keys=KEYS, recorder="external")
        channel = connection.channel()
        for number in range(count):
            headers = {"order_id": streams.order_id(number), "host": streams.host(number)}
            channel.basic_publish("", stream, streams.body(number), pika.BasicProperties(headers=headers))


def _dense_bytes(connection: psycopg.Connection[Any], count: int) -> float:
    """Return the bytes of a row and an index entry for each message's time, inserted in the stream's order."""
    connection.execute(
        "CREATE TABLE relatum.dense (time_us bigint NOT NULL, stream_offset bigint NOT NULL, stream_id int NOT NULL)"
    )
    connection.execute("CREATE INDEX dense_lookup ON relatum.dense (stream_id, time_us, stream_offset)")
    connection.execute(
        "INSERT INTO relatum.dense SELECT time_us, stream_offset, stream_id FROM relatum.relationships "
        "JOIN relatum.keys USING (key_id) WHERE name = 'order_id' ORDER BY stream_offset"
    )
    assert number_of(connection, "SELECT count(*) FROM relatum.dense") == count
    return float(number_of(connection, "SELECT pg_total_relation_size('relatum.dense')")) / count
