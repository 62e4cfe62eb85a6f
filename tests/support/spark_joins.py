"""Relations for the tests of joins: put into the table by hand, or recorded from streams."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import psycopg
from pyspark.sql import DataFrame, SparkSession

from tests.support._streams import publish_plain
from tests.support.place import Place

SECOND_US = 1_000_000

Headers = Mapping[str, Any]

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


def orders(*numbers: int, time: float = 0, **more: str) -> list[Headers]:
    """Headers of orders, each so many seconds after `time`."""
    return [{"order_id": f"o{n}", "relatum_time": round((time + n) * SECOND_US)} | more for n in numbers]


@dataclass(frozen=True)
class Sides:
    """Two streams to be joined, and a session."""

    spark: SparkSession
    place: Place
    left: str
    right: str

    @property
    def servers(self) -> dict[str, Any]:
        return {"database": self.place.database, "broker": self.place.amqp}

    def record(self, left: Sequence[Headers] = (), right: Sequence[Headers] = (), keys: Sequence[str] = ()) -> None:
        for stream, listed in ((self.left, left), (self.right, right)):
            messages = ((f"{stream} {number}".encode(), headers) for number, headers in enumerate(listed))
            publish_plain(self.place.amqp, stream, messages, confirm=False)
        self.place.record(self.left, self.right, keys=keys or ["order_id"])

    def frame(self, rows: Sequence[tuple[Any, ...]], more: str = "") -> DataFrame:
        return self.spark.createDataFrame(rows, f"stream string, offset long{more}")
