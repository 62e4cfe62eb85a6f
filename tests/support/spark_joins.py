"""Relations made by hand, and by streams, for the tests of joins."""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import sqlalchemy as sa
from pyspark.sql import DataFrame, SparkSession

from relatum.store import streams_named
from tests.support._recording import recording, wait_recorded
from tests.support._streams import publish_plain
from tests.support._waiting import wait_until

SECOND_US = 1_000_000

Relation = tuple[str, str, int, int | None]
"""A key's value, a stream, an offset, a time in microseconds."""


def side(spark: SparkSession, relations: Iterable[Relation]) -> DataFrame:
    """A side's relations, as joins take them inside."""
    return spark.createDataFrame(list(relations), "key_0 string, stream string, offset long, time_us long")


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
