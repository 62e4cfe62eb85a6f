"""Verification by Spark finds what the kernel's finds."""

from collections.abc import Sequence
from typing import Any

import pytest
import sqlalchemy as sa
from pyspark.sql import SparkSession

import relatum_spark
from relatum.errors import InvalidInput, StreamNotFound
from relatum.recording import StreamVerified, VerifyReport, backfill, repair, verify
from relatum.store import add_keys
from relatum_spark.recording._verify import into_runs
from tests.support import declare_stream, delete_stream, publish_plain, unique_name

CHANGES = [
    "DELETE FROM relatum.relationships WHERE stream_offset = 17 OR stream_offset = 20007 AND value LIKE 'o%'",
    "UPDATE relatum.relationships SET value = 'nobody' WHERE stream_offset = 300 AND value LIKE 'o%'",
    "INSERT INTO relatum.relationships SELECT * FROM relatum.relationships WHERE stream_offset IN (5, 20001)",
    "DELETE FROM relatum.time_blocks WHERE first_offset BETWEEN 600 AND 900",
    "INSERT INTO relatum.relationships SELECT stream_offset + 100000, time_us, stream_id, key_id, value "
    "FROM relatum.relationships WHERE stream_offset = 8",
]


def orders(count: int, start: int = 0) -> list[tuple[bytes, dict[str, Any]]]:
    """Numbered orders on three hosts."""
    return [(b"", {"order_id": f"o{n}", "host": f"h{n % 3}"}) for n in range(start, start + count)]


def compare(
    spark: SparkSession, streams: str | Sequence[str], amqp_url: str, database_url: str, **options: Any
) -> VerifyReport:
    """Compare by Spark."""
    return relatum_spark.verify(spark, streams, broker=amqp_url, database=database_url, **options)


@pytest.mark.differs
def test_it_finds_what_the_kernel_finds(
    spark: SparkSession, amqp_url: str, engine: sa.Engine, database_url: str, stream_name: str
) -> None:
    """Rows missing, wrong, double, behind the coverage, and lost times, over two windows, equal in every field."""
    publish_plain(amqp_url, stream_name, orders(20_010), confirm=False)
    add_keys(engine, ["order_id", "host"])
    backfill(amqp_url, engine.url, stream_name)
    clean = compare(spark, stream_name, amqp_url, database_url)
    assert clean.ok
    assert clean.exact
    assert (clean.streams[0].messages, clean.streams[0].rows) == (20_010, 40_020)
    with engine.begin() as connection:
        for change in CHANGES:
            connection.execute(sa.text(change))
    told: list[StreamVerified] = []
    found = compare(spark, stream_name, amqp_url, database_url, progress=told.append)
    assert found == verify(amqp_url, engine.url, [stream_name])
    assert not found.ok
    assert {difference.kind for difference in found.streams[0].differences} == {
        "missing",
        "unsound",
        "duplicate",
        "time_missing",
    }
    assert told == found.streams
    repair(found, engine.url, dry_run=False)
    assert compare(spark, stream_name, amqp_url, database_url).ok


@pytest.mark.differs
def test_more_differences_than_are_listed_are_counted(
    spark: SparkSession, amqp_url: str, engine: sa.Engine, database_url: str, stream_name: str
) -> None:
    """Each task may list a thousand; a stream's result still lists the first thousand, as the kernel's does."""
    publish_plain(amqp_url, stream_name, orders(22_000), confirm=False)
    add_keys(engine, ["order_id"])
    backfill(amqp_url, engine.url, stream_name)
    with engine.begin() as connection:
        connection.execute(sa.text("DELETE FROM relatum.relationships WHERE stream_offset % 10 = 0"))
    found = compare(spark, stream_name, amqp_url, database_url)
    assert found.streams[0].difference_count == 2200
    assert found == verify(amqp_url, engine.url, [stream_name])


@pytest.mark.differs
def test_streams_replaced_empty_and_never_recorded(
    spark: SparkSession, amqp_url: str, engine: sa.Engine, database_url: str, stream_name: str
) -> None:
    """A replaced stream is one difference; one that was never recorded, or holds nothing, has nothing to compare."""
    empty = unique_name()
    declare_stream(amqp_url, empty)
    try:
        publish_plain(amqp_url, stream_name, orders(10))
        add_keys(engine, ["order_id"])
        backfill(amqp_url, engine.url, stream_name)
        delete_stream(amqp_url, stream_name)
        declare_stream(amqp_url, stream_name)
        found = compare(spark, [stream_name, empty], amqp_url, database_url)
        assert [difference.kind for difference in found.streams[0].differences] == ["replaced"]
        assert found == verify(amqp_url, engine.url, [stream_name, empty])
        assert compare(spark, empty, amqp_url, database_url).ok
    finally:
        delete_stream(amqp_url, empty)


def test_a_sample_is_not_exact_and_wrong_input_is_refused(
    spark: SparkSession, amqp_url: str, engine: sa.Engine, database_url: str, stream_name: str
) -> None:
    """However small, a sample reads something, chosen by its seed; a share beyond 1 and unknown streams are errors."""
    publish_plain(amqp_url, stream_name, orders(10))
    add_keys(engine, ["order_id"])
    backfill(amqp_url, engine.url, stream_name)
    least = compare(spark, stream_name, amqp_url, database_url, sample=0)
    assert (least.exact, least.streams[0].windows, least.streams[0].messages) == (False, 1, 10)
    assert least == verify(amqp_url, engine.url, [stream_name], sample=0, seed=least.seed)
    assert compare(spark, stream_name, amqp_url, database_url, sample=1.0).streams[0].messages == 10
    with pytest.raises(InvalidInput, match="sample"):
        compare(spark, stream_name, amqp_url, database_url, sample=1.5)
    with pytest.raises(StreamNotFound):
        compare(spark, unique_name(), amqp_url, database_url)


def test_runs_hold_every_window_once_and_in_order() -> None:
    """However many windows and tasks there are."""
    chosen = {"a": tuple((n, n + 1) for n in range(7)), "b": (), "c": tuple((n, n + 1) for n in range(450))}
    for at_once in (1, 2, 16, 1000):
        runs = into_runs(chosen, at_once=at_once)
        for name, windows in chosen.items():
            assert tuple(window for run in runs if run.stream == name for window in run.windows) == windows
        assert all(len(run.windows) <= 50 for run in runs)
