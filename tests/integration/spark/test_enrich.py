"""Enriching the micro-batches of a streaming query, whatever is killed or run again."""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, Row, SparkSession

from relatum.errors import InvalidInput
from relatum.keys import KeyDefinition
from relatum.store import add_keys
from relatum_spark import Enrichment
from tests.support import publish_plain, record

COLUMNS = "number long, order_id string, city string, timestamp timestamp"
NOON = datetime(2026, 1, 2, 12, tzinfo=UTC)

Plain = Mapping[str, Any]


@dataclass
class Job:
    """A streaming query over files, one a batch, and what its `write` was given."""

    spark: SparkSession
    directory: Path
    options: dict[str, Any]
    written: list[tuple[int, list[Row]]] = field(default_factory=list)
    error: Exception | None = None
    files: int = 0

    def add(self, *rows: Plain) -> None:
        """Add a file, which the query reads as one batch."""
        source = self.directory / "source"
        source.mkdir(exist_ok=True)
        file = source / f"{self.files:03}.json"
        file.write_text("".join(json.dumps(row, default=str) + "\n" for row in rows))
        # Spark takes files in the order of their times, and several may be written in one millisecond.
        os.utime(file, (self.files, self.files))
        self.files += 1

    def run(self, **options: Any) -> list[Row]:
        """Run the query until there is nothing left; what was written meanwhile."""
        enrichment = Enrichment(**{"pending": f"file://{self.directory}/pending"} | self.options | options)
        before = len(self.written)
        source = self.spark.readStream.schema(COLUMNS).option("maxFilesPerTrigger", 1).json(f"{self.directory}/source")
        writer = source.writeStream.foreachBatch(enrichment.batch(self._write)).trigger(availableNow=True)
        query = writer.option("checkpointLocation", f"{self.directory}/checkpoint").start()
        try:
            query.awaitTermination(240)
        finally:
            query.stop()
        return [row for _, rows in self.written[before:] for row in rows]

    def _write(self, df: DataFrame, batch_id: int) -> None:
        self.written.append((batch_id, df.collect()))
        if self.error is not None:
            raise self.error

    def uncommit(self) -> None:
        """Take back that Spark committed the last batch, as a kill would have."""
        commits = sorted((self.directory / "checkpoint" / "commits").glob("[0-9]*"), key=lambda path: int(path.name))
        commits[-1].unlink()
        commits[-1].with_name(f".{commits[-1].name}.crc").unlink(missing_ok=True)


@pytest.fixture
def job(
    spark: SparkSession, tmp_path: Path, amqp_url: str, stream_url: str, database_url: str, stream_name: str
) -> Job:
    """A job that enriches orders with what the test's stream holds of them."""
    options = {"to": stream_name, "on": "order_id", "broker": amqp_url, "stream_url": stream_url}
    return Job(spark, tmp_path, options | {"database": database_url})


@pytest.fixture
def publish(amqp_url: str, engine: sa.Engine, stream_name: str) -> Callable[..., None]:
    """Publish payments of orders, and have them recorded."""

    def publish(*orders: str, is_recorded: bool = True, **headers: Any) -> None:
        messages = [(order.encode(), {"order_id": order} | headers) for order in orders]
        publish_plain(amqp_url, stream_name, messages)
        if is_recorded:
            record(amqp_url, engine, stream_name, keys=["order_id"])

    return publish


def _order(number: int, order: str | None, **more: Any) -> Plain:
    return {"number": number, "order_id": order} | more


def _told(rows: Sequence[Row]) -> list[tuple[int, str, str | None]]:
    """Of each row its number, status and relatum's body."""
    return sorted(
        (row.number, row.status, None if row.related_value is None else bytes(row.related_value).decode())
        for row in rows
    )


def test_rows_come_with_their_relata_and_wait_for_those_to_come(job: Job, publish: Callable[..., None]) -> None:
    """A row comes once for each of its relata; one without any waits until a later batch finds them."""
    publish("a", "b", "b")
    job.add(_order(1, "a", city="Rome"), _order(2, "b"), _order(3, "late"))
    rows = job.run()
    assert _told(rows) == [(1, "found", "a"), (2, "found", "b"), (2, "found", "b")]
    assert {row.related_offset for row in rows if row.number == 2} == {1, 2}
    (first,) = (row for row in rows if row.number == 1)
    assert (first.city, first.order_id, first.attempts, first.related_stream) == ("Rome", "a", 1, job.options["to"])
    assert first.related_headers["order_id"] == "a"
    assert first.related_timestamp is not None
    publish("late")
    job.add(_order(4, "a"))
    rows = job.run()
    assert _told(rows) == [(3, "found", "late"), (4, "found", "a")]
    assert {row.number: row.attempts for row in rows} == {3: 2, 4: 1}


def test_a_row_is_given_up_when_it_was_tried_often_enough(job: Job, publish: Callable[..., None]) -> None:
    """After its retries a row comes as absent where the coverage proves it; one without a value at once."""
    publish("a")
    job.add(_order(1, "none"), _order(2, None))
    for number in range(3, 7):
        job.add(_order(number, "a"))
    job.run(retries=2)
    batches = {batch: [row for row in rows if row.status != "found"] for batch, rows in job.written}
    assert {batch: _told(rows) for batch, rows in batches.items() if rows} == {
        0: [(2, "absent", None)],
        2: [(1, "absent", None)],
    }
    assert batches[2][0].attempts == 3


def test_absence_is_claimed_only_where_all_is_recorded(job: Job, publish: Callable[..., None]) -> None:
    """While a part of the stream is not recorded, a row without relata is not called absent."""
    publish("a")
    publish("b", is_recorded=False)
    job.add(_order(1, "b"), _order(2, "a"))
    assert _told(job.run(retries=0)) == [(1, "not_recorded_yet", None), (2, "found", "a")]
    publish("c")
    job.add(_order(3, "b"), _order(4, "none"))
    assert _told(job.run(retries=0)) == [(3, "found", "b"), (4, "absent", None)]


def test_a_batch_run_again_gives_the_same_rows(job: Job, publish: Callable[..., None]) -> None:
    """A batch whose write failed, or whose commit was lost, gives the same rows whatever was recorded meanwhile."""
    publish("a")
    job.add(_order(1, "a"), _order(2, "late"))
    job.error = RuntimeError("the target is away")
    with pytest.raises(StreamingQueryException, match="the target is away"):
        job.run()
    publish("late", "a")
    job.error = None
    job.run()
    job.uncommit()
    job.run()
    assert [(batch, _told(rows)) for batch, rows in job.written] == [(0, [(1, "found", "a")])] * 3
    job.add(_order(3, "none"))
    assert _told(job.run()) == [(2, "found", "late")]
    job.uncommit()
    assert _told(job.run()) == [(2, "found", "late")]


def test_replays_lose_no_row_and_give_none_twice(job: Job, publish: Callable[..., None], is_long: bool) -> None:
    """A target that keeps the first rows of each batch number holds each row once, however often batches are run."""
    replayed = 5 if is_long else 2
    publish("o0")
    for number in range(replayed):
        job.add(_order(number, f"o{number}"), _order(100 + number, f"o{number - 1}"))
        job.run(retries=3)
        job.uncommit()
        publish(f"o{number + 1}")
        job.run(retries=3)
    for number in range(replayed, replayed + 4):
        job.add(_order(number, "o0"))
        job.run(retries=3)
    kept: dict[int, list[Row]] = {}
    for batch, rows in job.written:
        assert _told(kept.setdefault(batch, rows)) == _told(rows)
    numbers = sorted(row.number for rows in kept.values() for row in rows)
    assert numbers == [*range(replayed + 4), *range(100, 100 + replayed)]


def test_a_killed_write_of_decisions_is_begun_again(job: Job, publish: Callable[..., None]) -> None:
    """Decisions without their mark, as a kill leaves them, count for nothing."""
    publish("a")
    job.add(_order(1, "a"), _order(2, "late"))
    job.run()
    job.uncommit()
    (mark,) = (job.directory / "pending").glob("*/batch-0/_DECIDED")
    mark.unlink()
    publish("late")
    assert _told(job.run()) == [(1, "found", "a"), (2, "found", "late")]


def test_within_takes_only_relata_near_in_time(job: Job, publish: Callable[..., None]) -> None:
    """With within= only relata so far from the row's time are found, ends included."""
    moments = [NOON + timedelta(seconds=seconds) for seconds in (-11, -10, 10, 11)]
    for moment in moments:
        publish("a", is_recorded=moment is moments[-1], relatum_time=int(moment.timestamp()) * 1_000_000)
    job.add(_order(1, "a", timestamp=NOON.isoformat()), _order(2, "a"))
    rows = job.run(within=timedelta(seconds=10))
    assert {(row.number, row.status, row.related_offset) for row in rows} == {
        (1, "found", 1),
        (1, "found", 2),
        (2, "absent", None),
    }


def test_limit_and_inner(job: Job, publish: Callable[..., None]) -> None:
    """A limit keeps the oldest relata; an inner enrichment leaves out rows without any."""
    publish("a", "a", "a")
    job.add(_order(1, "a"), _order(2, None), _order(3, "none"))
    rows = job.run(limit=2, how="inner", retries=0, value=False, headers=False)
    assert [(row.number, row.related_offset) for row in rows] == [(1, 0), (1, 1)]
    assert "related_value" not in rows[0]


def test_a_key_of_several_components(job: Job, amqp_url: str, engine: sa.Engine, stream_name: str) -> None:
    """The values of a composite key come from several columns."""
    add_keys(engine, [KeyDefinition("leg", source=("order_id", "city"))])
    publish_plain(amqp_url, stream_name, [(b"1", {"order_id": "a|b", "city": "Rome"}), (b"2", {"order_id": "a"})])
    record(amqp_url, engine, stream_name)
    job.add(_order(1, "a|b", city="Rome"), _order(2, "a|b", city="Oslo"), _order(3, "a|b"))
    rows = job.run(on="leg", value_column=["order_id", "city"], retries=0)
    assert _told(rows) == [(1, "found", "1"), (2, "absent", None), (3, "absent", None)]


@pytest.mark.parametrize(
    ("options", "words"),
    [({"how": "outer"}, "how="), ({"retries": -1}, "retries="), ({"limit": 0}, "limit="), ({"within": 5}, "within=")],
)
def test_wrong_arguments_are_refused(amqp_url: str, options: Mapping[str, Any], words: str) -> None:
    """A wrong argument is named when the enrichment is made."""
    with pytest.raises(InvalidInput, match=words):
        Enrichment(
            **{"to": "a", "on": "b", "pending": "c", "broker": amqp_url, "database": "postgresql:///d"} | options
        )
