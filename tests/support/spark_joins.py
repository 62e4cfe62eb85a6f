"""Relations for the tests of joins: put into the table by hand, or recorded from streams."""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import psycopg
import sqlalchemy as sa

from relatum.store import streams_named
from tests.support._recording import recording, wait_recorded
from tests.support._streams import publish_plain
from tests.support._waiting import wait_until

SECOND_US = 1_000_000

Relation = tuple[str, str, str, int, int | None]
"""A key, its value, a stream, an offset, a time in microseconds."""


def fill(database: str, relations: Iterable[Relation]) -> None:
    """Put relations into an empty table, with streams that are recorded to their ends."""
    rows = list(relations)
    keys, streams = (sorted({row[at] for row in rows}) for at in (0, 2))
    with psycopg.connect(database) as connection:
        for key in keys:
            connection.execute("INSERT INTO relatum.keys (name, sources, type) VALUES (%s, %s, 'text')", [key, [key]])
        for stream in streams:
            connection.execute("INSERT INTO relatum.streams (name) VALUES (%s)", [stream])
        connection.execute(
            "INSERT INTO relatum.coverage (stream_id, from_offset, to_offset, key_ids, with_time, is_tail) "
            "SELECT stream_id, 0, %s, ARRAY(SELECT key_id FROM relatum.keys), true, true FROM relatum.streams",
            [max((row[3] for row in rows), default=0) + 1],
        )
        ids: list[dict[str, int]] = []
        for table, name in (("keys", "key_id"), ("streams", "stream_id")):
            found = connection.execute(f"SELECT name, {name} FROM relatum.{table}".encode()).fetchall()
            ids.append(dict(found))
        copy = "COPY relatum.relationships (stream_offset, time_us, stream_id, key_id, value) FROM STDIN"
        with connection.cursor() as cursor, cursor.copy(copy) as lines:
            for key, value, stream, offset, time_us in rows:
                lines.write_row((offset, time_us, ids[1][stream], ids[0][key], value))


def record(
    amqp_url: str, engine: sa.Engine, streams: Mapping[str, Sequence[Mapping[str, Any]]], keys: Sequence[str]
) -> None:
    """Publish one message for each of the headers to each stream, and record them for the keys."""
    for stream, headers in streams.items():
        messages = ((f"{stream} {number}".encode(), each) for number, each in enumerate(headers))
        publish_plain(amqp_url, stream, messages, confirm=False)
    with recording(amqp_url, engine, *streams, keys=keys):
        for stream in streams:
            wait_until(partial(_is_known, engine, stream), what=f"the stream {stream} in the table")
            wait_recorded(amqp_url, engine, stream)


def _is_known(engine: sa.Engine, stream: str) -> bool:
    """Whether the recorder has begun with the stream: an empty one shows nothing else."""
    with engine.connect() as connection:
        return bool(streams_named(connection, "/", [stream]))
