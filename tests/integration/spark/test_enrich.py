"""Enriching the micro-batches of a streaming query, whatever is killed or run again."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, Row, SparkSession

from relatum.errors import KeyNotDefined, StreamReplaced
from relatum.keys import KeyDefinition
from relatum.recording import forget, prune
from relatum.store.catalog import add_keys, remove_key
from relatum_spark import Enrichment
from tests.support.place import Place
from tests.support.spark import uncommit

COLUMNS = "number long, order_id string, city string, timestamp timestamp"
NOON = datetime(2026, 1, 2, 12, tzinfo=UTC)


@dataclass
class Job:
    """Enriches orders with what the stream of a place holds of them, its payments."""

    spark: SparkSession
    directory: Path
    place: Place

    def enrichment(self, **options: Any) -> Enrichment:
        servers = {"broker": self.place.broker, "database": self.place.database}
        given = {"to": self.place.stream, "on": "order_id", "pending": f"file://{self.directory}/pending"}
        return Enrichment(**given | servers | options)

    def batch(self, number: int, *rows: Mapping[str, Any], **options: Any) -> list[Row]:
        """Do what `foreachBatch` does with a micro-batch of such a number; what was written of it."""
        written: list[Row] = []

        def write(df: DataFrame, _: int) -> None:
            written.extend(df.collect())

        df = self.spark.createDataFrame([{"city": None, "timestamp": None} | dict(row) for row in rows], COLUMNS)
        self.enrichment(**options).batch(write)(df, number)
        return written

    def publish(self, *orders: str, is_recorded: bool = True, **headers: Any) -> None:
        """Publish payments of orders, and have them recorded."""
        self.place.put(*((order.encode(), {"order_id": order} | headers) for order in orders))
        if is_recorded:
            self.place.record(keys=["order_id"])


@pytest.fixture
def job(spark: SparkSession, tmp_path: Path, place: Place) -> Job:
    return Job(spark, tmp_path, place)


def _order(number: int, order: str | None, **more: Any) -> dict[str, Any]:
    return {"number": number, "order_id": order} | more


def _told(rows: Sequence[Row]) -> list[tuple[int, str, str | None]]:
    return sorted(
        (row.number, row.status, None if row.related_value is None else bytes(row.related_value).decode())
        for row in rows
    )


def test_rows_come_with_their_relata_and_wait_for_those_to_come(job: Job) -> None:
    """A row comes once for each of its relata; one without any waits until a later batch finds them."""
    job.publish("a", "b", "b")
    rows = job.batch(0, _order(1, "a", city="Rome"), _order(2, "b"), _order(3, "late"))
    assert _told(rows) == [(1, "found", "a"), (2, "found", "b"), (2, "found", "b")]
    assert {row.related_offset for row in rows if row.number == 2} == {1, 2}
    (first,) = (row for row in rows if row.number == 1)
    assert (first.city, first.order_id, first.attempts, first.related_stream) == ("Rome", "a", 1, job.place.stream)
    assert first.related_headers["order_id"] == "a"
    assert first.related_timestamp is not None
    job.publish("late")
    rows = job.batch(1, _order(4, "a"))
    assert _told(rows) == [(3, "found", "late"), (4, "found", "a")]
    assert {row.number: row.attempts for row in rows} == {3: 2, 4: 1}


def test_a_row_is_given_up_when_it_was_tried_often_enough(job: Job) -> None:
    """A row comes as absent after its retries, but only where coverage proves it; one without a value at once."""
    job.publish("a")
    batches = [job.batch(0, _order(1, "none"), _order(2, None), retries=2)]
    batches += [job.batch(number, _order(2 + number, "a"), retries=2) for number in range(1, 3)]
    missing = [[row for row in rows if row.status != "found"] for rows in batches]
    assert [_told(rows) for rows in missing] == [[(2, "absent", None)], [], [(1, "absent", None)]]
    assert missing[2][0].attempts == 3
    job.publish("b", is_recorded=False)
    rows = job.batch(3, _order(5, "b"), _order(6, "a"), retries=0)
    assert _told(rows) == [(5, "not_recorded_yet", None), (6, "found", "a")]
    job.publish("c")
    rows = job.batch(4, _order(7, "b"), _order(8, "none"), retries=0)
    assert _told(rows) == [(7, "found", "b"), (8, "absent", None)]


@pytest.mark.parametrize("again", [[], ["order_id"]])
def test_a_removed_key_whose_rows_are_pruned_proves_no_absence(
    job: Job, monkeypatch: pytest.MonkeyPatch, again: list[str]
) -> None:
    """A batch fails if its key is removed, and perhaps defined anew, while it is looked up; a repetition decides."""
    job.publish("a")
    status_of_missing = Enrichment._status_of_missing

    def status_then_removal(enrichment: Enrichment) -> str | None:
        found = status_of_missing(enrichment)
        remove_key(job.place.engine, "order_id")
        add_keys(job.place.engine, again)
        prune(job.place.amqp, job.place.database)
        monkeypatch.undo()
        return found

    monkeypatch.setattr(Enrichment, "_status_of_missing", status_then_removal)
    with pytest.raises(KeyNotDefined, match="order_id"):
        job.batch(0, _order(1, "a"), retries=0)
    add_keys(job.place.engine, ["order_id"])
    assert _told(job.batch(0, _order(1, "a"), retries=0)) == [(1, "not_recorded_yet", None)]


def test_a_stream_forgotten_during_a_batch_proves_no_absence(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch fails if its stream is forgotten, and perhaps recorded anew, while it is looked up."""
    job.publish("a")
    status_of_missing = Enrichment._status_of_missing

    def status_then_forgotten(enrichment: Enrichment) -> str | None:
        found = status_of_missing(enrichment)
        forget(job.place.database, [job.place.stream])
        monkeypatch.undo()
        return found

    monkeypatch.setattr(Enrichment, "_status_of_missing", status_then_forgotten)
    with pytest.raises(StreamReplaced, match="forgotten"):
        job.batch(0, _order(1, "a"), retries=0)
    job.place.record(keys=["order_id"])
    assert _told(job.batch(0, _order(1, "a"), retries=0)) == [(1, "found", "a")]


def test_a_query_run_again_gives_the_same_rows(job: Job) -> None:
    """A batch whose write failed, or whose commit was lost, gives the same rows, whatever was recorded since."""
    written: list[tuple[int, list[Row]]] = []
    source, checkpoint = job.directory / "source", job.directory / "checkpoint"
    source.mkdir()

    def run(order: int | None = None, value: str = "", error: Exception | None = None) -> None:
        """Give the query one more order, if any, and run it until there is nothing left."""
        if order is not None:
            (source / f"{order}.json").write_text(f'{{"number": {order}, "order_id": "{value}"}}')

        def write(df: DataFrame, batch: int) -> None:
            written.append((batch, df.collect()))
            if error is not None:
                raise error

        rows = job.spark.readStream.schema(COLUMNS).json(str(source))
        query = rows.writeStream.foreachBatch(job.enrichment().batch(write)).trigger(availableNow=True)
        query.option("checkpointLocation", str(checkpoint)).start().awaitTermination(240)

    job.publish("a")
    with pytest.raises(StreamingQueryException, match="the target is away"):
        run(1, "late", RuntimeError("the target is away"))
    job.publish("late", "a")
    run()
    uncommit(checkpoint, 0)
    run()
    assert [(batch, _told(rows)) for batch, rows in written] == [(0, [])] * 3
    for _ in range(2):
        run(2, "a")
        assert (written[-1][0], _told(written[-1][1])) == (
            1,
            [(1, "found", "late"), (2, "found", "a"), (2, "found", "a")],
        )
        uncommit(checkpoint, 1)


def test_replays_lose_no_row_and_give_none_twice(job: Job, is_long: bool) -> None:
    """A batch run again gives the same rows, each row once; decisions without their mark are made again."""
    replayed = 5 if is_long else 2
    job.publish("o0")
    kept: list[Row] = []
    for number in range(replayed):
        # One whose related message exists, and one whose related message arrives before the batch is run again.
        orders = _order(number, f"o{number}"), _order(100 + number, f"o{number + 1}")
        first = job.batch(number, *orders)
        job.publish(f"o{number + 1}")
        assert _told(job.batch(number, *orders)) == _told(first)
        kept += first
    kept += job.batch(replayed, _order(replayed, "o0"))
    assert sorted(row.number for row in kept) == [*range(replayed + 1), *range(100, 100 + replayed)]
    orders = _order(1000, "o0"), _order(1001, "late")
    assert (1000, "found", "o0") in (before := _told(job.batch(replayed + 1, *orders)))
    (mark,) = (job.directory / "pending").glob(f"*/batch-{replayed + 1}/_DECIDED")
    mark.unlink()
    job.publish("late")
    assert _told(job.batch(replayed + 1, *orders)) == sorted([*before, (1001, "found", "late")])


def test_relata_can_be_narrowed(job: Job) -> None:
    """With within= by their distance in time, ends included; a limit keeps the oldest; inner leaves out other rows."""
    moments = [NOON + timedelta(seconds=seconds) for seconds in (-11, -10, 10, 11)]
    for moment in moments:
        microseconds = int(moment.timestamp()) * 1_000_000
        job.publish("a", is_recorded=moment is moments[-1], relatum_time=microseconds)
    rows = job.batch(0, _order(1, "a", timestamp=NOON), _order(2, "a"), within=timedelta(seconds=10))
    assert {(row.number, row.status, row.related_offset) for row in rows} == {
        (1, "found", 1),
        (1, "found", 2),
        (2, "absent", None),
    }
    orders = _order(1, "a"), _order(2, None), _order(3, "none")
    rows = job.batch(1, *orders, limit=2, how="inner", retries=0, value=False, headers=False)
    assert [(row.number, row.related_offset) for row in rows] == [(1, 0), (1, 1)]
    assert "related_value" not in rows[0]


def test_a_key_of_several_components(job: Job) -> None:
    """The values of a composite key come from several columns."""
    add_keys(job.place.engine, [KeyDefinition("leg", source=("order_id", "city"))])
    job.place.put((b"1", {"order_id": "a|b", "city": "Rome"}), (b"2", {"order_id": "a"}))
    job.place.record()
    orders = _order(1, "a|b", city="Rome"), _order(2, "a|b", city="Oslo"), _order(3, "a|b")
    rows = job.batch(0, *orders, on="leg", value_column=["order_id", "city"], retries=0)
    assert _told(rows) == [(1, "found", "1"), (2, "absent", None), (3, "absent", None)]
    # One column holds the whole value; PostgreSQL would refuse a NUL of anybody's message, and end the query.
    rows = job.batch(1, _order(1, "a\\|b|Rome"), _order(2, "\0|Rome"), on="leg", value_column="order_id", retries=0)
    assert _told(rows) == [(1, "found", "1"), (2, "absent", None)]


def test_a_time_is_found_in_each_form(job: Job) -> None:
    """Microseconds as the option `keys` of the source gives them, as a number, a timestamp, and ISO 8601."""
    keys = KeyDefinition("at", type="timestamp"), KeyDefinition("span", ("at", "to"), "timestamp")
    add_keys(job.place.engine, keys)
    time_us = int(NOON.timestamp()) * 1_000_000
    job.place.put_recorded((b"noon", {"at": time_us, "to": time_us}), keys=[])
    row = _order(time_us, str(time_us), city=NOON.isoformat(), timestamp=NOON)
    for number, columns in enumerate(("order_id", "number", "timestamp", "city", ["number", "timestamp"])):
        on = "at" if isinstance(columns, str) else "span"
        (found,) = job.batch(number, row, on=on, value_column=columns)
        assert (found.status, bytes(found.related_value or b"")) == ("found", b"noon"), columns


def test_a_time_without_a_zone_is_utc(job: Job) -> None:
    """As everywhere in Relatum, and whatever zone the session has: as the value of a key, and as the row's time."""
    add_keys(job.place.engine, [KeyDefinition("at", type="timestamp")])
    job.place.put_recorded((b"noon", {"at": NOON, "relatum_time": int(NOON.timestamp()) * 1_000_000}), keys=[])
    settings = {"spark.sql.timestampType": "TIMESTAMP_NTZ", "spark.sql.session.timeZone": "Europe/Berlin"}
    for name, value in settings.items():
        job.spark.conf.set(name, value)
    try:
        row = _order(1, None, timestamp=NOON.replace(tzinfo=None))
        (found,) = job.batch(0, row, on="at", value_column="timestamp", within=1)
    finally:
        for name in settings:
            job.spark.conf.unset(name)
    assert found.status == "found"
