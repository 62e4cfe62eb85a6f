"""Where micro-batches begin and end, planned without Spark."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from pyspark.sql.datasource import DataSourceStreamReader
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows

from pyspark_relatum import DefaultSource
from relatum.errors import BrokerUnavailable, InvalidInput, OffsetExpired, StreamNotFound, StreamReplaced
from relatum.reading import BrokerAddress, StreamReader
from tests.support import declare_stream, delete_stream, publish_plain, unique_name, wait_until
from tests.support._raw_publisher import RawPublisher


class Planner:
    """The planning side of a streaming query, asked as Spark asks it."""

    def __init__(self, reader: Any) -> None:
        self.reader = reader
        self.initial: Callable[[], dict[str, int]] = reader.initialOffset
        self.freeze: Callable[[], None] = reader.prepareForTriggerAvailableNow
        self.reported: Callable[[], dict[str, int] | None] = reader.reportLatestOffset

    def latest(self, start: dict[str, int] | None, limit: int | None) -> Any:
        """Where a batch ends that begins there."""
        return self.reader.latestOffset(start, ReadAllAvailable() if limit is None else ReadMaxRows(limit))

    def slices(self, start: dict[str, int], end: dict[str, int]) -> list[tuple[str, int, int]]:
        """What the tasks of a batch read: stream, first offset, and the one to end before."""
        wanted = [partition.value.wanted for partition in self.reader.partitions(start, end)]
        return [(each.stream, each.start, each.stop) for each in wanted]

    def read(self, start: dict[str, int], end: dict[str, int]) -> list[dict[str, Any]]:
        """The rows that the tasks of a batch read."""
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
    """Two streams with ten messages each."""
    names = (unique_name(), unique_name())
    for name in names:
        declare_stream(amqp_url, name)
        publish_plain(amqp_url, name, [b"x"] * 10)
    yield names
    for name in names:
        delete_stream(amqp_url, name)


def test_a_stream_no_longer_named_keeps_its_place(make: Make, pair: tuple[str, str]) -> None:
    """It is not read, and goes on from there when it is named again."""
    first, second = pair
    start = {first: 2, second: 4}
    end = make(stream=first).latest(start, None)
    assert end == {first: 10, second: 4}
    assert make(streams=",".join(pair)).latest(end, None) == {first: 10, second: 10}


def test_a_new_stream_enters_with_nothing_to_read(make: Make, pair: tuple[str, str]) -> None:
    """So the batch it enters by reads the same when it is replayed; the next one reads it from its first offset."""
    first, second = pair
    planner = make(streams=",".join(pair))
    entered = planner.latest({first: 10}, None)
    assert entered == {first: 10, second: 0}
    assert planner.slices({first: 10}, entered) == []
    end = planner.latest(entered, None)
    assert planner.slices(entered, end) == [(second, 0, 10)]


def test_a_range_that_goes_backwards_is_empty(make: Make, pair: tuple[str, str]) -> None:
    """The first batch of a query that begins at the end is replayed with a later beginning."""
    assert make(streams=",".join(pair)).slices({pair[0]: 9, pair[1]: 3}, {pair[0]: 5, pair[1]: 4}) == [(pair[1], 3, 4)]


def test_the_end_is_frozen(make: Make, amqp_url: str, pair: tuple[str, str]) -> None:
    """What is published after the freeze waits, and what is reported is the end as it is."""
    stream = pair[0]
    planner = make(stream=stream)
    planner.freeze()
    publish_plain(amqp_url, stream, [b"x"] * 5)
    assert planner.latest(planner.initial(), 7) == {stream: 7}
    assert planner.latest({stream: 7}, 7) == {stream: 10}
    assert planner.latest({stream: 10}, 7) == {stream: 10}
    assert planner.reported() == {stream: 15}


def test_a_query_that_begins_at_the_end_freezes_there(make: Make, amqp_url: str, pair: tuple[str, str]) -> None:
    """What is published between the freeze and the beginning belongs to the next run."""
    stream = pair[0]
    planner = make(stream=stream, startingOffsets="latest")
    planner.freeze()
    publish_plain(amqp_url, stream, [b"x"] * 5)
    assert planner.initial() == {stream: 10}
    assert planner.latest({stream: 10}, None) == {stream: 10}


def test_where_spark_gives_no_start_planning_goes_on_where_it_was(make: Make, pair: tuple[str, str]) -> None:
    """From the beginning, from the last end, or from what Spark planned with last, as 4.1 does after a restart."""
    stream = pair[0]
    planner = make(stream=stream)
    assert planner.latest(None, 4) == {stream: 4}
    assert planner.latest(None, 4) == {stream: 8}
    restarted = make(stream=stream)
    assert restarted.slices({stream: 5}, {stream: 5}) == []
    assert restarted.latest(None, 4) == {stream: 9}


def test_the_beginning_does_not_move(make: Make, amqp_url: str, pair: tuple[str, str]) -> None:
    """Spark asks for it more than once; the first batch reads nothing of a stream that begins at its end."""
    stream = pair[0]
    planner = make(stream=stream, startingOffsets="latest")
    begin = planner.initial()
    publish_plain(amqp_url, stream, [b"x"] * 5)
    assert planner.initial() == begin == {stream: 10}
    assert planner.latest(begin, None) == begin
    assert planner.latest(begin, None) == {stream: 15}


def test_offsets_by_stream(make: Make, pair: tuple[str, str]) -> None:
    """JSON gives each stream its beginning; one that is missing or too many is refused."""
    first, second = pair
    both = {"streams": ",".join(pair)}
    assert make(**both, startingOffsets=f'{{"{first}": 3, "{second}": -1}}').initial() == {first: 3, second: 10}
    assert make(**both, startingOffsets=f'{{"{first}": -2, "{second}": 4}}').initial() == {first: 0, second: 4}
    with pytest.raises(InvalidInput, match=second):
        make(**both, startingOffsets=f'{{"{first}": 3}}').initial()
    with pytest.raises(InvalidInput, match=second):
        make(stream=first, startingOffsets=f'{{"{first}": 3, "{second}": 4}}').initial()


def test_a_named_stream_that_was_deleted_is_left_out_on_request(
    make: Make, amqp_url: str, pair: tuple[str, str]
) -> None:
    """It is no longer in the checkpoint, nothing is planned for it, and the others are read on."""
    first, second = pair
    start = {first: 5, second: 5}
    delete_stream(amqp_url, second)
    with pytest.raises(StreamNotFound, match=second):
        make(streams=",".join(pair)).latest(start, None)
    planner = make(streams=",".join(pair), failOnDataLoss="false")
    planner.freeze()
    end = planner.latest(start, None)
    assert end == planner.latest(end, None) == {first: 10}
    replayed = make(streams=",".join(pair), failOnDataLoss="false")
    assert replayed.slices(start, {first: 10, second: 10}) == [(first, 5, 10)]


def test_a_stream_declared_again_begins_with_its_first_message(
    make: Make, amqp_url: str, pair: tuple[str, str]
) -> None:
    """On request: the batch that notices reads nothing of it."""
    stream = pair[0]
    delete_stream(amqp_url, stream)
    declare_stream(amqp_url, stream)
    publish_plain(amqp_url, stream, [b"x"] * 3)
    with pytest.raises(StreamReplaced, match=stream):
        make(stream=stream).latest({stream: 10}, None)
    planner = make(stream=stream, failOnDataLoss="false")
    assert planner.latest({stream: 10}, None) == {stream: 0}
    assert planner.slices({stream: 10}, {stream: 0}) == []
    assert planner.latest({stream: 0}, None) == {stream: 3}


def test_a_stream_seen_empty_is_known_to_begin_anew(make: Make, amqp_url: str, pair: tuple[str, str]) -> None:
    """However many messages it has when it is looked at next: more than were read of the old one, too."""
    stream = pair[0]
    strict, lenient = make(stream=stream), make(stream=stream, failOnDataLoss="false")
    delete_stream(amqp_url, stream)
    declare_stream(amqp_url, stream)
    assert strict.latest({stream: 10}, None) == lenient.latest({stream: 10}, None) == {stream: 10}
    publish_plain(amqp_url, stream, [b"x"] * 15)
    with pytest.raises(StreamReplaced, match="read up to 9, but now has offsets 0 to 14"):
        strict.latest({stream: 10}, None)
    assert lenient.latest({stream: 10}, None) == {stream: 0}
    assert lenient.latest({stream: 0}, None) == {stream: 15}


def test_a_super_stream_that_is_not_there_is_an_error(make: Make) -> None:
    """Not a query that reads nothing for ever; nor is a stream that nobody declared."""
    with pytest.raises(StreamNotFound, match="super stream 'relatum-test-none'"):
        make(superStream="relatum-test-none").initial()
    with pytest.raises(StreamNotFound, match="no stream 'relatum-test-none'"):
        make(stream="relatum-test-none").initial()


def test_a_broker_that_is_not_there_is_asked_for_a_bounded_time(make: Make) -> None:
    """The error comes after pollTimeoutMs, and names no credentials."""
    away = "amqp://guest:secret@127.0.0.1:1/"
    planner = make(broker=away, streamUrl="rabbitmq-stream://guest:secret@127.0.0.1:1/", stream="s", pollTimeoutMs=300)
    with pytest.raises(BrokerUnavailable) as raised:
        planner.initial()
    assert "secret" not in str(raised.value)


def test_a_limit_is_shared_out_by_lag(make: Make, amqp_url: str, pair: tuple[str, str]) -> None:
    """Of two streams, one with nine times as much, each batch reads nine times as much from it."""
    first = pair[0]
    publish_plain(amqp_url, first, [b"x"] * 80)
    planner = make(streams=",".join(pair))
    end = planner.latest(planner.initial(), 20)
    assert abs(end[first] - 18) <= 1
    assert sum(end.values()) == 20


def test_moments(make: Make, pair: tuple[str, str]) -> None:
    """A moment before all messages begins with the first; one ahead is refused, or the end of the stream."""
    stream = pair[0]
    assert make(stream=stream, startingTimestamp=0).initial() == {stream: 0}
    ahead = {"stream": stream, "startingTimestamp": 4_000_000_000_000}
    with pytest.raises(InvalidInput, match="startingOffsetsByTimestampStrategy"):
        make(**ahead).initial()
    assert make(**ahead, startingOffsetsByTimestampStrategy="latest").initial() == {stream: 10}


def test_retention_that_overtakes_a_query_is_noticed(make: Make, amqp_url: str) -> None:
    """What was dropped before it was read is an error with the first offset available, or is passed over."""
    stream = unique_name()
    declare_stream(amqp_url, stream, x_max_length_bytes=200_000, x_stream_max_segment_size_bytes=50_000)
    try:
        publish_plain(amqp_url, stream, [b"%-10000d" % number for number in range(200)])
        with pytest.raises(OffsetExpired, match="the first one available is") as expired:
            wait_until(lambda: make(stream=stream).latest({stream: 1}, None) is None, what="retention")
        planner = make(stream=stream, failOnDataLoss="false")
        read = planner.read({stream: 1}, planner.latest({stream: 1}, None))
        numbers = [int(row["value"]) for row in read]
        assert numbers == list(range(numbers[0], 200))
        assert read[0]["offset"] >= expired.value.first > 1
    finally:
        delete_stream(amqp_url, stream)


def test_offsets_without_messages_are_passed_over(make: Make, amqp_url: str, stream_url: str, stream_name: str) -> None:
    """The broker uses offsets for itself: batches may end in such a gap, or lie in it."""
    with RawPublisher(stream_url, stream_name) as publisher:
        for number in range(4):
            publish_plain(amqp_url, stream_name, [b"x"] * 5)
            for offset in range(6):
                publisher.store_offset("a-consumer", number * 6 + offset)
    with StreamReader.open(BrokerAddress.parse(amqp_url, stream_url)) as reader:
        wait_until(lambda: reader.bounds(stream_name).end > 20, what="offsets of the broker's own")
        offsets = [message.offset for message in reader.iterate(stream_name)]
    assert len(offsets) == 20
    planner, at = make(stream=stream_name, maxRecordsPerPartition=2), {stream_name: 0}
    read: list[int] = []
    while (end := planner.latest(at, 4)) != at:
        read += [row["offset"] for row in planner.read(at, end)]
        at = end
    assert read == offsets


@pytest.mark.parametrize(("option", "value"), [("maxOffsetsPerTrigger", "0"), ("startingOffset", "latest")])
def test_a_bad_option_is_refused_before_anything_runs(make: Make, option: str, value: str) -> None:
    """A limit of nothing and a misspelt name are one clear error."""
    with pytest.raises(InvalidInput, match=option):
        make(stream="s", **{option: value})
