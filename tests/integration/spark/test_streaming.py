"""Streaming queries over RabbitMQ streams: each message once, whatever is replayed, limited, deleted or restarted."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pyspark
import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession
from pyspark.sql.datasource import DataSourceStreamReader
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows
from pyspark.sql.streaming.query import StreamingQuery

from pyspark_relatum import DefaultSource
from relatum import errors
from relatum.reading import StreamBounds, StreamReader
from relatum.store.catalog import add_keys
from relatum.superstreams import Layout
from tests.support import (
    broker_connection,
    declare_stream,
    delete_stream,
    new_streams,
    publish_plain,
    unique_name,
    wait_until,
)
from tests.support._raw_publisher import RawPublisher
from tests.support.place import Place
from tests.support.proxy import Proxy
from tests.support.spark import uncommit

LIMIT_S = 240
FAST = {"processingTime": "100 milliseconds"}
NOW = {"availableNow": True}

HAS_ADMISSION = tuple(map(int, pyspark.__version__.split(".")[:2])) >= (4, 2)


def bodies(begin: int, end: int) -> list[bytes]:
    return [b"%d" % number for number in range(begin, end)]


def expected(stream: str, begin: int, end: int) -> list[tuple[str, int, str]]:
    """The rows of messages published by `bodies` to an empty stream."""
    return sorted((stream, number, str(number)) for number in range(begin, end))


class Run:
    """One streaming query after another with one checkpoint, and what each wrote."""

    def __init__(self, spark: SparkSession, directory: Path, **options: Any) -> None:
        self._spark, self._options = spark, options
        self.checkpoint = directory / "checkpoint"
        self.written: list[tuple[int, list[tuple[str, int, str]]]] = []
        self.then: Callable[[int], None] = lambda batch: None
        """What is done once a batch was written."""

    def start(self, trigger: dict[str, Any], **options: Any) -> StreamingQuery:
        stream = self._spark.readStream.format("rabbitmq_streams").options(**(self._options | options)).load()
        writer = stream.select("stream", "offset", "value").writeStream.foreachBatch(self._write)
        return writer.option("checkpointLocation", str(self.checkpoint)).trigger(**trigger).start()

    def _write(self, frame: Any, batch: int) -> None:
        rows = sorted((row.stream, row.offset, bytes(row.value).decode()) for row in frame.collect())
        self.written.append((batch, rows))
        self.then(batch)

    def to_end(self, **options: Any) -> list[dict[str, Any]]:
        """Run a query that ends by itself, and return its progress."""
        query = self.start(NOW, **options)
        assert query.awaitTermination(LIMIT_S), "the query did not end"
        return [json.loads(progress.json) for progress in query.recentProgress]

    def rows(self) -> list[tuple[str, int, str]]:
        """The rows of all batches, of the last try of each."""
        return sorted(row for rows in dict(self.written).values() for row in rows)

    def forget_commit(self) -> int:
        """Make the last batch one that was not committed; return its number."""
        uncommit(self.checkpoint, last := self.written[-1][0])
        return last


@pytest.fixture
def run(spark: SparkSession, tmp_path: Path, amqp_url: str, stream_url: str, stream_name: str) -> Iterator[Run]:
    """Queries of this test; those that still run are stopped."""
    options = {"broker": amqp_url, "streamUrl": stream_url, "stream": stream_name, "startingOffsets": "earliest"}
    yield Run(spark, tmp_path, **options)
    for query in spark.streams.active:
        query.stop()


@pytest.mark.skipif(not HAS_ADMISSION, reason="Spark before 4.2 tells a source nothing of triggers")
def test_a_run_reads_what_is_there_in_batches_within_the_limit(run: Run, amqp_url: str, stream_name: str) -> None:
    """400 offsets by 100 are four batches; messages published since are the next run's; progress shows the lag."""
    publish_plain(amqp_url, stream_name, bodies(0, 400), confirm=False)

    def publish_more(batch: int) -> None:
        if batch == 0:
            publish_plain(amqp_url, stream_name, bodies(400, 450))

    run.then = publish_more
    progress = [each for each in run.to_end(maxOffsetsPerTrigger=100) if each["numInputRows"]]
    assert [each["numInputRows"] for each in progress] == [100] * 4
    source = progress[1]["sources"][0]
    assert (source["endOffset"], source["latestOffset"]) == ({stream_name: 200}, {stream_name: 450})
    assert run.rows() == expected(stream_name, 0, 400)
    run.to_end(maxOffsetsPerTrigger=100)
    assert run.rows() == expected(stream_name, 0, 450)


def test_a_batch_that_was_not_committed_is_read_again_the_same(run: Run, amqp_url: str, stream_name: str) -> None:
    """The same range comes again, then what is new; the checkpoint, not the option, says where a run begins."""
    publish_plain(amqp_url, stream_name, bodies(0, 50))
    begin = {"startingOffsets": "latest", "maxOffsetsPerTrigger": 40}
    query = run.start(FAST, **begin)
    wait_until(lambda: run.written, LIMIT_S)
    query.stop()
    assert (run.forget_commit(), run.rows()) == (0, [])
    count = 50
    for attempt in range(2):
        publish_plain(amqp_url, stream_name, bodies(count, count + 30))
        count += 30
        tried = len(run.written)
        run.to_end(**begin, maxRecordsPerPartition=9 + attempt)
        if run.rows() != expected(stream_name, 50, count):
            run.to_end(**begin)  # Spark 4.1 may end after the replayed batch
        assert run.rows() == expected(stream_name, 50, count)
        assert run.written[tried] == run.written[tried - 1], f"replay {attempt}"
        assert all(len(rows) <= 40 for _, rows in run.written)
        run.forget_commit()


def test_a_query_goes_on_when_the_broker_was_away(run: Run, amqp_url: str, stream_url: str, stream_name: str) -> None:
    """It reads on; after pollTimeoutMs it ends with an error without credentials, and a later run continues."""
    with Proxy.to(amqp_url) as amqp, Proxy.to(stream_url) as streams:

        def go(is_there: bool) -> None:
            for line in (amqp, streams):
                line.accepts = is_there
                line.cut()

        publish_plain(amqp_url, stream_name, bodies(0, 10))
        lines = {"broker": amqp.url(amqp_url), "streamUrl": streams.url(stream_url)}
        query = run.start(FAST, **lines, pollTimeoutMs=5000)
        wait_until(lambda: run.rows() == expected(stream_name, 0, 10), LIMIT_S)
        wait_until(lambda: not query.status["isDataAvailable"], LIMIT_S)
        go(False)
        publish_plain(amqp_url, stream_name, bodies(10, 20))
        wait_until(lambda: amqp.refused + streams.refused > 1, LIMIT_S)
        go(True)
        wait_until(lambda: run.rows() == expected(stream_name, 0, 20), LIMIT_S)
        assert query.isActive
        assert [batch for batch, rows in run.written if not rows] in ([], [0])
        go(False)
        with pytest.raises(StreamingQueryException, match=r"BrokerUnavailable|ConnectionLost") as raised:
            query.awaitTermination(LIMIT_S)
        assert urlsplit(amqp_url).netloc.rpartition("@")[0] not in str(raised.value)
        publish_plain(amqp_url, stream_name, bodies(20, 30))
        go(True)
        run.to_end(**lines)
        assert run.rows() == expected(stream_name, 0, 30)


class Planner:
    """The planning side of a streaming query, asked as Spark asks it."""

    def __init__(self, reader: Any) -> None:
        self.reader = reader
        self.initial: Callable[[], dict[str, int]] = reader.initialOffset
        self.freeze: Callable[[], None] = reader.prepareForTriggerAvailableNow
        self.reported: Callable[[], dict[str, int] | None] = reader.reportLatestOffset

    def latest(self, start: dict[str, int] | None, limit: int | None = None) -> Any:
        """Where a batch ends that begins there."""
        return self.reader.latestOffset(start, ReadAllAvailable() if limit is None else ReadMaxRows(limit))

    def slices(self, start: dict[str, int], end: dict[str, int]) -> list[tuple[str, int, int]]:
        """What the tasks of a batch read: stream, first offset, and the one to end before."""
        wanted = [partition.value for partition in self.reader.partitions(start, end)]
        return [(each.stream, each.start, each.stop) for each in wanted]

    def read(self, start: dict[str, int], end: dict[str, int]) -> list[dict[str, Any]]:
        batches = [batch for partition in self.reader.partitions(start, end) for batch in self.reader.read(partition)]
        return [row for batch in batches for row in batch.to_pylist()]


Make = Callable[..., Planner]


@pytest.fixture
def make(amqp_url: str, stream_url: str) -> Iterator[Make]:
    """Make planners by the options of a streaming query."""
    made: list[DataSourceStreamReader] = []

    def planner(**options: Any) -> Planner:
        given = {"broker": amqp_url, "streamUrl": stream_url, "startingOffsets": "earliest"} | options
        source = DefaultSource({name: str(value) for name, value in given.items()})
        made.append(source.streamReader(source.schema()))
        return Planner(made[-1])

    yield planner
    for each in made:
        each.stop()


@pytest.fixture
def pair(amqp_url: str) -> Iterator[tuple[str, str]]:
    with new_streams(amqp_url, 2) as (first, second):
        for name in (first, second):
            publish_plain(amqp_url, name, [b"x"] * 10)
        yield first, second


def test_streams_leave_and_enter(make: Make, pair: tuple[str, str]) -> None:
    """One no longer named keeps its place; a new one enters with nothing to read, then from its first offset."""
    first, second = pair
    both = ",".join(pair)
    end = make(stream=first).latest({first: 2, second: 4})
    assert end == {first: 10, second: 4}
    assert make(streams=both).latest(end) == {first: 10, second: 10}
    planner = make(streams=both)
    entered = planner.latest({first: 10})
    assert entered == {first: 10, second: 0}
    assert planner.slices({first: 10}, entered) == []
    assert planner.slices(entered, planner.latest(entered)) == [(second, 0, 10)]


def test_a_partition_added_later_is_read_from_its_start(make: Make, amqp_url: str, layout: Layout) -> None:
    """A running query takes up what a new partition of the super stream already holds."""
    planner = make(superStream=layout.super_stream)
    start = planner.initial()
    assert planner.latest(start) == start == {each.stream: 0 for each in layout}
    added = unique_name()
    declare_stream(amqp_url, added)
    publish_plain(amqp_url, added, [b"x"] * 20)
    with broker_connection(amqp_url) as connection:
        order = {"x-stream-partition-order": len(layout)}
        connection.channel().queue_bind(added, layout.super_stream, added, arguments=order)
    entered = planner.latest(start)
    assert len(planner.read(entered, planner.latest(entered))) == 20
    delete_stream(amqp_url, added)


def test_keys_become_columns(place: Place, make: Make) -> None:
    """The option keys works as in a batch."""
    add_keys(place.engine, ["order_id"])
    place.put((b"a", {"order_id": "o1"}), (b"b", {}))
    planner = make(stream=place.stream, keys="order_id", database=place.database, includeHeaders="false")
    rows = planner.read({place.stream: 0}, {place.stream: 2})
    assert [list(row) for row in rows] == [["stream", "offset", "timestamp", "value", "order_id"]] * 2
    assert [row["order_id"] for row in rows] == ["o1", None]


def test_the_end_is_frozen_and_the_beginning_stays(make: Make, amqp_url: str, pair: tuple[str, str]) -> None:
    """What is published after the freeze waits; the first batch of a query from the end reads nothing."""
    stream = pair[0]
    planner, at_end, running = make(stream=stream), *(make(stream=stream, startingOffsets="latest") for _ in range(2))
    planner.freeze()
    at_end.freeze()
    begin = running.initial()
    publish_plain(amqp_url, stream, [b"x"] * 5)
    assert planner.latest(planner.initial(), 7) == {stream: 7}
    assert planner.latest({stream: 7}, 7) == planner.latest({stream: 10}, 7) == {stream: 10}
    assert planner.reported() == {stream: 15}
    assert at_end.initial() == at_end.latest({stream: 10}) == {stream: 10}
    assert running.initial() == running.latest(begin) == begin == {stream: 10}
    assert running.latest(begin) == {stream: 15}
    # Replayed with a later beginning, a range goes backwards, and is empty.
    both = make(streams=",".join(pair))
    assert both.slices({stream: 15, pair[1]: 3}, {stream: 10, pair[1]: 4}) == [(pair[1], 3, 4)]


def test_where_a_query_begins(make: Make, pair: tuple[str, str]) -> None:
    """By JSON, a moment, or, where Spark gives no start, what it planned last; a missing or extra stream is refused."""
    first, second = pair
    both = {"streams": ",".join(pair)}
    assert make(**both, startingOffsets=f'{{"{first}": 3, "{second}": -1}}').initial() == {first: 3, second: 10}
    assert make(**both, startingOffsets=f'{{"{first}": -2, "{second}": 4}}').initial() == {first: 0, second: 4}
    with pytest.raises(errors.InvalidInput, match=second):
        make(**both, startingOffsets=f'{{"{first}": 3}}').initial()
    with pytest.raises(errors.InvalidInput, match=second):
        make(stream=first, startingOffsets=f'{{"{first}": 3, "{second}": 4}}').initial()
    assert make(stream=first, startingTimestamp=0).initial() == {first: 0}
    ahead = {"stream": first, "startingTimestamp": 4_000_000_000_000}
    with pytest.raises(errors.InvalidInput, match="startingOffsetsByTimestampStrategy"):
        make(**ahead).initial()
    assert make(**ahead, startingOffsetsByTimestampStrategy="latest").initial() == {first: 10}
    planner = make(stream=first)
    assert [planner.latest(None, 4), planner.latest(None, 4)] == [{first: 4}, {first: 8}]
    restarted = make(stream=first)
    assert restarted.slices({first: 5}, {first: 5}) == []
    assert restarted.latest(None, 4) == {first: 9}


def test_a_deleted_stream_is_waited_for_and_then_left_out_on_request(
    make: Make, amqp_url: str, pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is planned for it and the others are read on; one that comes back late was not lost."""
    first, second = pair
    start, both = {first: 5, second: 5}, ",".join(pair)
    delete_stream(amqp_url, second)
    with pytest.raises(errors.StreamNotFound, match=second):
        make(streams=both).latest(start)
    planner = make(streams=both, failOnDataLoss="false")
    planner.freeze()
    end = planner.latest(start)
    assert end == planner.latest(end) == {first: 10}
    # A batch may have been planned before, by this run or an earlier one.
    read = make(streams=both, failOnDataLoss="false").read(start, {first: 10, second: 10})
    assert [(row["stream"], row["offset"]) for row in read] == [(first, offset) for offset in range(5, 10)]

    def come_back() -> None:
        declare_stream(amqp_url, second)
        publish_plain(amqp_url, second, [b"x"] * 12)

    monkeypatch.setattr("relatum_spark._reading._CONFIRM_S", LIMIT_S)
    coming = threading.Timer(0.3, come_back)
    coming.start()
    (end,) = make(stream=second).latest({second: 10}).values()
    assert 10 <= end <= 12, "the last ones may not be there yet"
    coming.join()


def test_a_stream_declared_again_begins_with_its_first_message(make: Make, place: Place, pair: tuple[str, str]) -> None:
    """On request, however many messages it has by then; else it is an error."""
    stream = pair[0]
    early = make(stream=stream), make(stream=stream, failOnDataLoss="false")
    delete_stream(place.amqp, stream)
    declare_stream(place.amqp, stream)
    assert [planner.latest({stream: 10}) for planner in early] == [{stream: 10}] * 2
    late, messages = (make(stream=stream), make(stream=stream, failOnDataLoss="false")), 0
    for (strict, lenient), count in ((late, 3), (early, 15)):
        publish_plain(place.amqp, stream, [b"x"] * (count - messages))
        messages = count
        with pytest.raises(errors.StreamReplaced, match=stream):
            strict.latest({stream: 10})
        assert lenient.latest({stream: 10}) == {stream: 0}
        assert lenient.slices({stream: 10}, {stream: 0}) == []
        assert lenient.latest({stream: 0}) == {stream: count}


@pytest.mark.parametrize("last", [4, None])
def test_what_a_lagging_node_shows_is_no_replaced_stream(
    make: Make, pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch, last: int | None
) -> None:
    """While the leader does not answer, a query waits for it and repeats no row, also with failOnDataLoss=false."""
    stream = pair[0]
    planner = make(stream=stream, failOnDataLoss="false", pollTimeoutMs=300)
    with monkeypatch.context() as lagging:
        bounds = StreamBounds(None if last is None else 0, last, is_proven=False)
        lagging.setattr(StreamReader, "bounds", lambda self, stream: bounds)
        with nullcontext() if last is None else pytest.raises(errors.StreamUnavailable):
            assert planner.latest({stream: 10}) == {stream: 10}
    assert planner.latest({stream: 10}) == {stream: 10}


def test_what_is_not_there_is_an_error(make: Make, layout: Layout) -> None:
    """Not a query that reads nothing forever. A broker is asked for pollTimeoutMs; its error names no credentials."""
    with pytest.raises(errors.StreamNotFound, match="super stream 'relatum-test-none'"):
        make(superStream="relatum-test-none").initial()
    with pytest.raises(errors.StreamNotFound, match="'relatum-test-none'"):
        make(stream="relatum-test-none").initial()
    with pytest.raises(errors.StreamNotFound, match="superStream"):
        make(stream=layout.super_stream).initial()
    away = "amqp://guest:secret@127.0.0.1:1/"
    planner = make(broker=away, streamUrl="rabbitmq-stream://guest:secret@127.0.0.1:1/", stream="s", pollTimeoutMs=300)
    with pytest.raises(errors.BrokerUnavailable) as raised:
        planner.initial()
    assert "secret" not in str(raised.value)


def test_retention_that_overtakes_a_query_is_noticed(make: Make, amqp_url: str, short_stream: str) -> None:
    """What was dropped before it was read is an error with the first offset available, or is passed over."""
    publish_plain(amqp_url, short_stream, [b"%-10000d" % number for number in range(200)])
    with pytest.raises(errors.OffsetExpired) as expired:
        wait_until(lambda: make(stream=short_stream).latest({short_stream: 1}) is None, what="retention")
    planner = make(stream=short_stream, failOnDataLoss="false")
    read = planner.read({short_stream: 1}, planner.latest({short_stream: 1}))
    numbers = [int(row["value"]) for row in read]
    assert numbers == list(range(numbers[0], 200))
    assert read[0]["offset"] >= expired.value.first > 1


def test_offsets_without_messages_are_passed_over(make: Make, place: Place) -> None:
    """The broker uses offsets for itself: batches may end in such a gap, or be in it."""
    with RawPublisher(place.stream_url, place.stream) as publisher:
        for number in range(4):
            publish_plain(place.amqp, place.stream, [b"x"] * 5)
            for offset in range(6):
                publisher.store_offset("a-consumer", number * 6 + offset)
    with StreamReader.open(place.broker) as reader:
        wait_until(lambda: reader.bounds(place.stream).end > 20, what="offsets of the broker's own")
        offsets = [message.offset for message in reader.iterate(place.stream)]
    assert len(offsets) == 20
    planner, at = make(stream=place.stream, maxRecordsPerPartition=2), {place.stream: 0}
    read: list[int] = []
    while (end := planner.latest(at, 4)) != at:
        read += [row["offset"] for row in planner.read(at, end)]
        at = end
    assert read == offsets
