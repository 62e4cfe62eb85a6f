"""Recording real streams into a real database."""

import logging
import re
import threading
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pika
import pytest
import sqlalchemy as sa
from prometheus_client import CollectorRegistry

from relatum import metrics
from relatum.errors import SchemaMissing
from relatum.keys import KeyDefinition
from relatum.reading import BrokerAddress, StreamBounds, StreamReader
from relatum.recording import (
    EmbeddedRecorder,
    Extractor,
    Recorder,
    backfill,
    is_same,
    prune,
    repair,
    set_record_time,
    status,
    verify,
)
from relatum.store import (
    NewTail,
    add_keys,
    current_stream,
    ensure_stream,
    merged,
    open_tail,
    remove_key,
    tail_of,
)
from relatum.superstreams import declare_super_stream, delete_super_stream
from relatum_consumer import Relations
from tests.support import (
    broker_connection,
    declare_stream,
    delete_stream,
    in_a_try,
    new_streams,
    publish_plain,
    record,
    recorded_to,
    recording,
    rows_of,
    unique_name,
    wait_recorded,
    wait_until,
)
from tests.support._raw_publisher import RawPublisher, uncompressed
from tests.support._recording import Batch, Share, commit_shares
from tests.support.ports import free_port


def orders(count: int, start: int = 0) -> list[tuple[bytes, dict[str, Any]]]:
    """Numbered orders on three hosts."""
    return [(b"%d" % n, {"order_id": f"o{n}", "host": f"h{n % 3}"}) for n in range(start, start + count)]


def test_messages_published_before_and_after_the_start_are_recorded(
    amqp_url: str, engine: sa.Engine, stream_name: str
) -> None:
    """The recorder catches up with what is there and goes on with what comes."""
    publish_plain(amqp_url, stream_name, orders(10))
    with recording(amqp_url, engine, stream_name, keys=["order_id", "host"]):
        wait_recorded(amqp_url, engine, stream_name)
        publish_plain(amqp_url, stream_name, orders(10, start=10))
        wait_recorded(amqp_url, engine, stream_name)
    rows = rows_of(engine, stream_name)
    assert [value for key, value, _ in rows if key == "order_id"] == [f"o{n}" for n in range(20)]
    assert len(rows) == 40


def test_a_stop_commits_what_was_read_and_a_start_goes_on_there(
    amqp_url: str, engine: sa.Engine, stream_name: str
) -> None:
    """Recording twice what was recorded once never happens."""
    for start in (0, 5, 10):
        publish_plain(amqp_url, stream_name, orders(5, start))
        record(amqp_url, engine, stream_name, keys=["order_id"])
    assert len(rows_of(engine, stream_name)) == 15


def test_a_stop_right_after_the_start_is_no_outage(
    amqp_url: str, engine: sa.Engine, stream_name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing is said to wait, or to be tried again: what was asked when the stop came is just left."""
    for _ in range(10):
        with recording(amqp_url, engine, stream_name):
            wait_until(lambda: any(each.name == "relatum-keeper" for each in threading.enumerate()), what="its threads")
    assert not [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]


def test_what_is_derived_can_be_emptied_and_filled_again(amqp_url: str, engine: sa.Engine, stream_name: str) -> None:
    """The statement that the page on operations shows empties what is derived; a recorder fills it with the same."""
    page = (Path(__file__).parents[2] / "docs" / "operations.md").read_text()
    found = re.search(r"^TRUNCATE .*?;", page, re.DOTALL | re.MULTILINE)
    assert found
    publish_plain(amqp_url, stream_name, orders(20))
    record(amqp_url, engine, stream_name, keys=["order_id", "host"])
    before = rows_of(engine, stream_name)
    with engine.begin() as connection:
        connection.exec_driver_sql(found[0])
    assert not rows_of(engine, stream_name)
    record(amqp_url, engine, stream_name)
    assert rows_of(engine, stream_name) == before


def test_every_kind_of_message_is_covered_and_bad_values_are_counted(
    amqp_url: str, engine: sa.Engine, stream_name: str
) -> None:
    """Values that cannot be keys are skipped for their reason; the message is covered, the recorder goes on."""
    headers: list[dict[str, Any]] = [
        {"order_id": "good"},
        {"order_id": "x" * 1025},
        {"order_id": 1},
        {"order_id": True},
        {"order_id": None},
        {"order_id": datetime(2020, 1, 1, tzinfo=UTC)},
        {"order_id": "a\tb\\c\nd"},
        {},
    ]
    publish_plain(amqp_url, stream_name, [(b"", header) for header in headers])
    record(amqp_url, engine, stream_name, keys=["order_id"])
    assert [value for _, value, _ in rows_of(engine, stream_name)] == ["good", "1", "true", "a\tb\\c\nd"]
    (seen,) = status(amqp_url, engine.url, [stream_name])
    assert seen.skipped == {"order_id": {"too_long": 1, "unsupported_type": 1}}


def test_keys_come_from_properties_x_headers_and_composites(amqp_url: str, engine: sa.Engine, stream_name: str) -> None:
    """RabbitMQ keeps these in four different places, depending on its version; a key finds them all."""
    names = ("correlation_id", "message_id", "type", "app_id", "user_id", "reply_to")
    keys = [KeyDefinition(name, source=f"property:{name}") for name in names]
    keys += [KeyDefinition("x-device"), KeyDefinition("both", source=["x-device", "property:correlation_id"])]
    values = {name: f"the {name}" for name in names} | {"user_id": pika.URLParameters(amqp_url).credentials.username}
    properties = pika.BasicProperties(headers={"x-device": "d|1"}, **values)
    publish_plain(amqp_url, stream_name, [(b"", properties)])
    record(amqp_url, engine, stream_name, keys=keys)
    found = {key: value for key, value, _ in rows_of(engine, stream_name)}
    assert found == values | {"x-device": "d|1", "both": "d\\|1|the correlation_id"}


def test_a_key_added_while_recording_is_recorded_from_then_on_and_back_filled(
    amqp_url: str, engine: sa.Engine, stream_name: str
) -> None:
    """The coverage says where the new key begins; a back-fill covers the rest, once."""
    publish_plain(amqp_url, stream_name, orders(10))
    with recording(amqp_url, engine, stream_name, keys=["order_id"]):
        wait_recorded(amqp_url, engine, stream_name)
        add_keys(engine, ["host"])
        wait_until(lambda: _tail_keys(engine) == 2, what="the recorder takes up the new key")
        publish_plain(amqp_url, stream_name, orders(10, start=10))
        wait_recorded(amqp_url, engine, stream_name)
        assert len([row for row in rows_of(engine, stream_name) if row[0] == "host"]) == 10
        report = backfill(amqp_url, engine.url, stream_name, keys=["host"])
    assert (report.messages, report.rows) == (10, 10)
    (seen,) = status(amqp_url, engine.url, [stream_name])
    assert seen.covered["host"] == [(0, 20)]
    assert backfill(amqp_url, engine.url, stream_name).messages == 0


def _tail_keys(engine: sa.Engine) -> int:
    with engine.connect() as connection:
        query = sa.text("SELECT cardinality(key_ids) FROM relatum.coverage WHERE is_tail")
        return int(connection.execute(query).scalar_one())


def test_two_back_fills_at_once_write_each_row_once(amqp_url: str, engine: sa.Engine, stream_name: str) -> None:
    """Whoever commits first covers; the other plans anew."""
    publish_plain(amqp_url, stream_name, orders(500), confirm=False)
    add_keys(engine, ["order_id", "host"])
    names = [["order_id"], None, ["host", "order_id"]]
    threads = [
        threading.Thread(target=backfill, args=[amqp_url, engine.url, stream_name], kwargs={"keys": keys})
        for keys in names
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(90)
    assert len(rows_of(engine, stream_name)) == 1000


def test_a_recorder_continues_behind_a_back_fill_of_a_new_stream(
    amqp_url: str, engine: sa.Engine, stream_name: str
) -> None:
    """The hand-over from back-fill to recorder leaves no hole and no row twice."""
    publish_plain(amqp_url, stream_name, orders(10))
    add_keys(engine, ["order_id"])
    backfill(amqp_url, engine.url, stream_name)
    publish_plain(amqp_url, stream_name, orders(10, start=10))
    record(amqp_url, engine, stream_name)
    assert len(rows_of(engine, stream_name)) == 20


def test_two_recorders_write_each_row_once(amqp_url: str, engine: sa.Engine, stream_name: str) -> None:
    """One holds the lease; the other takes over when it is given back."""
    with recording(amqp_url, engine, stream_name, keys=["order_id"]):
        with recording(amqp_url, engine, stream_name):
            publish_plain(amqp_url, stream_name, orders(50))
            wait_recorded(amqp_url, engine, stream_name)
        publish_plain(amqp_url, stream_name, orders(50, start=50))
        wait_recorded(amqp_url, engine, stream_name)
    assert len(rows_of(engine, stream_name)) == 100


def test_a_commit_that_lost_the_race_writes_nothing(amqp_url: str, engine: sa.Engine, stream_name: str) -> None:
    """Two writers with no lease at all: the second one's transaction leaves no trace."""
    publish_plain(amqp_url, stream_name, orders(5))
    definitions = add_keys(engine, ["order_id"])
    with engine.begin() as connection:
        stream = ensure_stream(connection, "/", stream_name)
        tail = open_tail(connection, NewTail(stream.stream_id, 0, True), [definitions[0].key_id])
    batch = Batch(stream.stream_id, Extractor(definitions), with_time=True)
    with StreamReader.open(amqp_url) as reader:
        for records in reader.batches(stream_name, follow=False):
            if records is not None:
                batch.add(records)
    first, second = Share(tail, batch, None), Share(tail, batch, None)
    commit_shares(engine, [first])
    commit_shares(engine, [second])
    assert (first.is_committed, second.is_committed, second.is_held_up) == (True, False, False)
    assert len(rows_of(engine, stream_name)) == 5


def test_a_recorder_that_slept_while_another_closed_its_tail_writes_nothing(
    amqp_url: str, engine: sa.Engine, stream_name: str
) -> None:
    """A tail closed for other keys keeps its end, so the end alone does not tell that the race is lost."""
    publish_plain(amqp_url, stream_name, orders(5))
    (order_id,) = add_keys(engine, ["order_id"])
    record(amqp_url, engine, stream_name)
    with engine.begin() as connection:
        asleep = tail_of(connection, ensure_stream(connection, "/", stream_name).stream_id)
    assert asleep is not None
    publish_plain(amqp_url, stream_name, orders(5, start=5))
    record(amqp_url, engine, stream_name, keys=["host"])
    batch = Batch(asleep.stream_id, Extractor([order_id]), with_time=True)
    with StreamReader.open(amqp_url) as reader:
        for records in reader.batches(stream_name, asleep.to_offset, follow=False):
            assert records is not None
            batch.add(records)
    share = Share(asleep, batch, None)
    commit_shares(engine, [share])
    assert (share.is_committed, share.is_held_up) == (False, False)
    assert len([row for row in rows_of(engine, stream_name) if row[0] == "order_id"]) == 10


def test_a_stream_is_the_same_whatever_was_published_since_its_bounds_were_asked(
    amqp_url: str, engine: sa.Engine, stream_name: str
) -> None:
    """A position recorded meanwhile lies beyond bounds that were asked before; the stream itself tells."""
    publish_plain(amqp_url, stream_name, orders(3))
    record(amqp_url, engine, stream_name, keys=["order_id"])
    with engine.connect() as connection, StreamReader.open(amqp_url) as reader:
        tail = tail_of(connection, ensure_stream(connection, "/", stream_name).stream_id)
        assert tail is not None
        assert tail.position is not None
        assert is_same(reader, stream_name, tail.position, StreamBounds(0, 1))
        assert is_same(reader, stream_name, tail.position, StreamBounds(None, None))


def test_what_is_no_stream_is_waited_for_and_not_written(
    amqp_url: str, engine: sa.Engine, stream_name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A misspelt name and a queue are named in the log, once; the table knows neither before it is a stream."""
    missing, queue = unique_name("missing"), unique_name("queue")
    with broker_connection(amqp_url) as connection:
        connection.channel().queue_declare(queue, durable=True)

    def told(name: str) -> list[str]:
        # A stream that is just being declared has no replica yet, which is another thing to tell.
        lines = [each.getMessage() for each in caplog.records if each.name == "relatum.recorder"]
        return [line for line in lines if name in line and ("StreamNotFound" in line or "NotAStream" in line)]

    try:
        with recording(amqp_url, engine, missing, queue, stream_name, keys=["order_id"]):
            publish_plain(amqp_url, stream_name, orders(3))
            wait_recorded(amqp_url, engine, stream_name)
            wait_until(lambda: told(missing) and told(queue), what="both are named")
            assert [each.stream for each in status(amqp_url, engine.url)] == [stream_name]
            declare_stream(amqp_url, missing)
            publish_plain(amqp_url, missing, orders(3))
            wait_recorded(amqp_url, engine, missing)
            assert {each.stream: each.state for each in status(amqp_url, engine.url)} == dict.fromkeys(
                (missing, stream_name), "recording"
            )
        assert (len(told(missing)), len(told(queue))) == (1, 1)
    finally:
        delete_stream(amqp_url, missing)
        delete_stream(amqp_url, queue)


def test_nothing_is_written_while_the_broker_is_away(
    amqp_url: str, engine: sa.Engine, caplog: pytest.LogCaptureFixture
) -> None:
    """Whether a name is a stream only the broker knows: it is waited for, and the table stays empty."""
    with recording(f"amqp://guest:guest@127.0.0.1:{free_port((0, -120))}", engine, unique_name()):
        wait_until(lambda: "RabbitMQ" in caplog.text and "is away" in caplog.text, what="the outage is told")
        with engine.connect() as connection:
            assert connection.execute(sa.text("SELECT count(*) FROM relatum.streams")).scalar_one() == 0


def test_a_stream_declared_again_begins_a_new_generation(amqp_url: str, engine: sa.Engine, stream_name: str) -> None:
    """Offsets restart at 0; no row of the old stream stands for the new one."""
    publish_plain(amqp_url, stream_name, orders(10))
    with recording(amqp_url, engine, stream_name, keys=["order_id"]):
        wait_recorded(amqp_url, engine, stream_name)
        delete_stream(amqp_url, stream_name)
        declare_stream(amqp_url, stream_name)
        publish_plain(amqp_url, stream_name, orders(20, start=100))
        wait_until(lambda: recorded_to(engine, stream_name) == 20, what="the new stream is recorded")
    assert {value for _, value, _ in rows_of(engine, stream_name)} == {f"o{n}" for n in range(100, 120)}
    (seen,) = status(amqp_url, engine.url, [stream_name])
    assert (seen.generation, [event.kind for event in seen.events]) == (2, ["replaced"])
    assert prune(amqp_url, engine.url).rows[""] >= 10


@pytest.mark.parametrize("shorter", [True, False])
def test_a_stream_declared_again_while_nobody_recorded_is_noticed(
    amqp_url: str, engine: sa.Engine, stream_name: str, shorter: bool
) -> None:
    """Whether the new stream is shorter or longer than the old one: what lies at the offset tells."""
    publish_plain(amqp_url, stream_name, orders(10))
    record(amqp_url, engine, stream_name, keys=["order_id"])
    delete_stream(amqp_url, stream_name)
    declare_stream(amqp_url, stream_name)
    count = 3 if shorter else 30
    publish_plain(amqp_url, stream_name, orders(count))
    with recording(amqp_url, engine, stream_name):
        wait_until(lambda: recorded_to(engine, stream_name) == count, what="the new stream is recorded")
        wait_until(lambda: status(amqp_url, engine.url, [stream_name])[0].generation == 2, what="a new generation")
    assert len(rows_of(engine, stream_name)) == count


def test_a_stream_that_was_only_back_filled_and_declared_again_is_noticed(
    amqp_url: str, engine: sa.Engine, stream_name: str
) -> None:
    """The tail a back-fill leaves holds no message to know the stream by; what was back-filled does."""
    publish_plain(amqp_url, stream_name, orders(5))
    add_keys(engine, ["order_id"])
    assert backfill(amqp_url, engine.url, stream_name).rows == 5
    delete_stream(amqp_url, stream_name)
    declare_stream(amqp_url, stream_name)
    publish_plain(amqp_url, stream_name, orders(8, start=100))
    with recording(amqp_url, engine, stream_name):
        wait_until(lambda: len(rows_of(engine, stream_name)) == 8, what="the new stream recorded from its start")
    with Relations(amqp_url, engine.url) as relations:
        assert relations.find("order_id", "o101", streams=stream_name).ids == ((stream_name, 1),)


def test_retention_that_overtakes_the_recorder_is_recorded_as_a_hole(amqp_url: str, engine: sa.Engine) -> None:
    """RabbitMQ moves a reader forward without a word; the coverage says what was lost, and pruning forgets it."""
    name = unique_name()
    declare_stream(amqp_url, name, x_max_length_bytes=200_000, x_stream_max_segment_size_bytes=50_000)
    try:
        publish_plain(amqp_url, name, orders(10))
        lost = []
        with recording(amqp_url, engine, name, keys=["order_id"]) as recorder:
            wait_recorded(amqp_url, engine, name)
            lost.append(recorder.statistics().streams[name].hole_offsets)
        body = b"x" * 10_000
        publish_plain(amqp_url, name, [(body, {"order_id": f"big{n}"}) for n in range(100)])
        with recording(amqp_url, engine, name) as recorder:
            wait_recorded(amqp_url, engine, name)
            lost.append(recorder.statistics().streams[name].hole_offsets)
        (seen,) = status(amqp_url, engine.url, [name])
        assert seen.first is not None
        assert seen.first > 10
        # 4.x drops a segment more a moment later: before the second recorder's end, or after it.
        ((start, end),) = merged(seen.holes)
        assert start == 10 < end <= seen.first
        assert lost == [0, end - start], "none at first; the second recorder found them when it began"
        assert {event.kind for event in seen.events} == {"hole"}
        assert prune(amqp_url, engine.url, [name]).rows[name] > 0
        assert min(offset for _, _, offset in rows_of(engine, name)) >= seen.first
        assert verify(amqp_url, engine.url, [name]).ok
    finally:
        delete_stream(amqp_url, name)


def test_what_retention_had_dropped_before_recording_began_is_no_gap(amqp_url: str, engine: sa.Engine) -> None:
    """Nobody has to close it, and it is no hole that was torn while somebody recorded."""
    name = unique_name()
    declare_stream(amqp_url, name, x_max_length_bytes=200_000, x_stream_max_segment_size_bytes=50_000)
    add_keys(engine, ["order_id"])
    try:
        publish_plain(amqp_url, name, [(b"x" * 10_000, {"order_id": f"big{n}"}) for n in range(100)])
        with recording(amqp_url, engine, name) as recorder:
            wait_recorded(amqp_url, engine, name)
            assert recorder.statistics().streams[name].hole_offsets == 0
        (seen,) = status(amqp_url, engine.url, [name])
        assert seen.first is not None
        assert seen.first > 0
        with engine.connect() as connection:
            stream = current_stream(connection, "/", name)
            assert stream is not None
        assert stream.first_offset is not None
        assert (seen.gaps, seen.holes, seen.events) == ([], [], [])
    finally:
        delete_stream(amqp_url, name)


def test_times_switched_off_for_a_stream_are_not_recorded(amqp_url: str, engine: sa.Engine, stream_name: str) -> None:
    """The coverage says so too, so that nobody takes silence for an answer."""
    set_record_time(amqp_url, engine.url, stream_name, on=False)
    publish_plain(amqp_url, stream_name, orders(5))
    record(amqp_url, engine, stream_name, keys=["order_id"])
    (seen,) = status(amqp_url, engine.url, [stream_name])
    assert (seen.covered["time"], seen.covered["order_id"]) == ([], [(0, 5)])
    with engine.connect() as connection:
        assert connection.execute(sa.text("SELECT count(*) FROM relatum.time_blocks")).scalar_one() == 0


def test_a_name_that_becomes_a_super_streams_is_no_missing_stream_any_more(
    amqp_url: str, engine: sa.Engine, caplog: pytest.LogCaptureFixture
) -> None:
    """A broker that starts may know streams first: once it knows the super stream, nobody waits for such a stream."""
    name = unique_name()
    try:
        with recording(amqp_url, engine, name) as recorder:
            wait_until(lambda: f"There is no stream {name!r}" in caplog.text, what="the recorder to ask for a stream")
            declare_super_stream(amqp_url, name, 2)
            partitions = {f"{name}-0", f"{name}-1"}
            wait_until(lambda: recorder.statistics().streams.keys() == partitions, what="partitions")
            wait_until(lambda: name not in recorder._group._tracks, what="the name to be dropped")
    finally:
        delete_super_stream(amqp_url, name)


def test_the_partitions_of_a_super_stream_are_recorded(amqp_url: str, engine: sa.Engine) -> None:
    """A super stream's name stands for its partitions."""
    name = unique_name()
    partitions = [f"{name}-{n}" for n in range(2)]
    with broker_connection(amqp_url) as connection:
        channel = connection.channel()
        channel.exchange_declare(name, "direct", durable=True, arguments={"x-super-stream": True})
        for place, partition in enumerate(partitions):
            declare_stream(amqp_url, partition)
            channel.queue_bind(partition, name, str(place), arguments={"x-stream-partition-order": place})
        try:
            for partition in partitions:
                publish_plain(amqp_url, partition, orders(5))
            with recording(amqp_url, engine, name, keys=["order_id"]):
                for partition in partitions:
                    wait_recorded(amqp_url, engine, partition)
            assert [seen.super_stream for seen in status(amqp_url, engine.url, [name])] == [name, name]
        finally:
            channel.exchange_delete(name)
            for partition in partitions:
                delete_stream(amqp_url, partition)


def test_verify_finds_each_kind_of_difference_and_repair_mends_it(
    amqp_url: str, engine: sa.Engine, stream_name: str
) -> None:
    """A deleted row, an added row, a moved row, a changed value, a doubled row and a lost time are each named."""
    publish_plain(amqp_url, stream_name, orders(20))
    record(amqp_url, engine, stream_name, keys=["order_id"])
    damage = [
        "DELETE FROM relatum.relationships WHERE stream_offset = 1",
        "INSERT INTO relatum.relationships SELECT * FROM relatum.relationships WHERE stream_offset = 2",
        "UPDATE relatum.relationships SET stream_offset = 99 WHERE stream_offset = 3",
        "UPDATE relatum.relationships SET value = 'other' WHERE stream_offset = 4",
        "UPDATE relatum.relationships SET time_us = time_us + 1 WHERE stream_offset = 5",
        "DELETE FROM relatum.time_blocks",
    ]
    with engine.begin() as connection:
        for statement in damage:
            connection.execute(sa.text(statement))
    report = verify(amqp_url, engine.url, [stream_name])
    found = {(difference.kind, difference.offset) for difference in report.streams[0].differences}
    rows = {("missing", 1), ("duplicate", 2), ("missing", 3), ("unsound", 99), ("missing", 4), ("unsound", 4)}
    assert found == rows | {("missing", 5), ("unsound", 5)} | {("time_missing", n) for n in range(20)}
    planned = repair(report, engine.url)
    assert not verify(amqp_url, engine.url, [stream_name]).ok, "a dry run changes nothing"
    assert repair(report, engine.url, dry_run=False) == planned
    assert verify(amqp_url, engine.url, [stream_name]).ok


def test_verify_beside_a_back_fill_finds_no_difference(
    amqp_url: str, stream_url: str, engine: sa.Engine, stream_name: str
) -> None:
    """Rows and coverage are compared as of one moment: a repair must not delete what a back-fill writes meanwhile."""
    message = b"\0\x53\x74\xc1\x08\x02\xa1\x04host\xa1\x00" + b"\0\x53\x75\xa0\x00"
    with RawPublisher(stream_url, stream_name) as publisher:
        publisher.publish(*[uncompressed([message] * 1000)] * 21)
    record(amqp_url, engine, stream_name, keys=[])
    add_keys(engine, ["host"])
    report = verify(
        amqp_url, engine.url, [stream_name], progress=lambda _: backfill(amqp_url, engine.url, stream_name) and None
    )
    assert report.ok, report.streams[0].differences[:3]


def test_an_embedded_recorder_finds_streams_declared_after_the_first_publish(amqp_url: str, engine: sa.Engine) -> None:
    """A route that led nowhere is asked again while it is published to; partitions are known by their super stream."""
    super_stream = unique_name()
    partition = f"{super_stream}-0"
    recorder = EmbeddedRecorder(BrokerAddress.parse(amqp_url), engine.url)
    try:
        recorder.watch(super_stream, "0")
        add_keys(engine, ["order_id"])
        declare_stream(amqp_url, partition)
        with broker_connection(amqp_url) as connection:
            channel = connection.channel()
            channel.exchange_declare(super_stream, "direct", durable=True)
            channel.queue_bind(partition, super_stream, "0")
        publish_plain(amqp_url, partition, orders(3))

        def is_recorded() -> bool:
            recorder.watch(super_stream, "0")
            return recorded_to(engine, partition) == 3

        wait_until(is_recorded, what="the partition recorded")
        with Relations(amqp_url, engine.url) as relations:
            assert relations.find("order_id", "o1", streams=super_stream).ids == ((partition, 1),)
    finally:
        recorder.close()
        with broker_connection(amqp_url) as connection:
            connection.channel().exchange_delete(super_stream)
        delete_stream(amqp_url, partition)


def test_a_new_stream_does_not_wait_for_thousands_of_known_names(amqp_url: str, engine: sa.Engine) -> None:
    """Names and exchanges that are asked about again and again have their turn after one that is new."""
    recorder = EmbeddedRecorder(BrokerAddress.parse(amqp_url), engine.url)

    def is_soon_recorded(stream: str) -> bool:
        begun = time.monotonic()
        for number in range(4000):
            recorder.watch("", f"{stream}-{number}")
            recorder.watch(f"exchange-{stream}-{number}", "key")
        wait_until(lambda: not recorder.left(), what="each asked about once")
        # Those that were asked about first are asked about again by now, and so are all the others after them.
        asked = time.monotonic()
        recorder.record(stream)
        wait_until(lambda: recorded_to(engine, stream) == 1, what="the message recorded", every_s=0.01)
        return time.monotonic() - asked < (asked - begun) / 3

    try:
        with new_streams(amqp_url, 3) as streams:
            for stream in streams:
                publish_plain(amqp_url, stream, orders(1))
            left = iter(streams)
            in_a_try(lambda: is_soon_recorded(next(left)), len(streams), what="the first row of a new stream")
    finally:
        recorder.close()


def test_what_was_published_before_an_embedded_recorder_is_closed_is_recorded(
    amqp_url: str, engine: sa.Engine, stream_name: str
) -> None:
    """A publisher that lives for a moment leaves nothing to the next recorder, where two seconds are enough for it."""
    add_keys(engine, ["order_id"])
    published = 0

    def leaves_nothing() -> bool:
        nonlocal published
        recorder = EmbeddedRecorder(BrokerAddress.parse(amqp_url), engine.url)
        publish_plain(amqp_url, stream_name, orders(500, published))
        published += 500
        recorder.record(stream_name)
        recorder.close()
        return recorded_to(engine, stream_name) == published

    in_a_try(leaves_nothing, what="recorded before the end")
    assert [value for _, value, _ in rows_of(engine, stream_name)] == [f"o{n}" for n in range(published)]


def test_what_an_embedded_recorder_leaves_the_next_one_records(
    amqp_url: str, engine: sa.Engine, stream_name: str
) -> None:
    """Closed in the midst of a commit that PostgreSQL does not answer in time: nothing is lost, and nothing twice."""
    add_keys(engine, ["order_id"])
    publish_plain(amqp_url, stream_name, orders(500))
    recorder = EmbeddedRecorder(BrokerAddress.parse(amqp_url), engine.url)
    with engine.begin() as connection:
        connection.execute(sa.text("LOCK TABLE relatum.relationships IN ACCESS EXCLUSIVE MODE"))
        recorder.record(stream_name)
        waiting = sa.text("SELECT count(*) FROM pg_locks WHERE NOT granted")
        wait_until(lambda: connection.execute(waiting).scalar_one(), what="a commit under way")
        recorder.close()
        assert not recorded_to(engine, stream_name)
    record(amqp_url, engine, stream_name)
    assert [value for _, value, _ in rows_of(engine, stream_name)] == [f"o{n}" for n in range(500)]


def test_a_recorder_that_cannot_record_does_not_delay_its_end(
    amqp_url: str, engine: sa.Engine, stream_name: str
) -> None:
    """With the database away, or the stream in another's hands, closing waits for neither."""
    publish_plain(amqp_url, stream_name, orders(5))
    with recording(amqp_url, engine, stream_name, keys=["order_id"]):
        wait_recorded(amqp_url, engine, stream_name)
        for database in ("postgresql://nobody@127.0.0.1:1/none", engine.url):

            def is_closed_at_once(database: Any = database) -> bool:
                recorder = EmbeddedRecorder(BrokerAddress.parse(amqp_url), database)
                recorder.record(stream_name)
                begun = time.monotonic()
                recorder.close()
                return time.monotonic() - begun < 1.8

            in_a_try(is_closed_at_once, what="closed at once")


def test_the_metrics_tell_what_was_recorded(amqp_url: str, engine: sa.Engine, stream_name: str) -> None:
    """Prometheus sees messages, rows, skipped values and the last offset."""
    publish_plain(amqp_url, stream_name, [*orders(4), (b"", {"order_id": "x" * 2000})])
    registry = CollectorRegistry()
    registry.register(metrics.collector())
    with recording(amqp_url, engine, stream_name, keys=["order_id"]):
        wait_recorded(amqp_url, engine, stream_name)
        read, labels = registry.get_sample_value, {"stream": stream_name}
        wait_until(lambda: read("relatum_messages_total", labels) == 5, what="messages counted")
        assert read("relatum_rows_total", labels) == 4
        assert read("relatum_recorded_offset", labels) == 4
        assert read("relatum_skipped_values_total", labels | {"reason": "too_long"}) == 1
        wait_until(lambda: read("relatum_lag_offsets", labels) == 0, what="no lag")


def test_a_removed_key_is_recorded_no_more(amqp_url: str, engine: sa.Engine, stream_name: str) -> None:
    """Its rows go away with the next prune."""
    publish_plain(amqp_url, stream_name, orders(5))
    with recording(amqp_url, engine, stream_name, keys=["order_id", "host"]):
        wait_recorded(amqp_url, engine, stream_name)
        remove_key(engine, "host")
        wait_until(lambda: _tail_keys(engine) == 1, what="the recorder drops the key")
    assert {key for key, _, _ in rows_of(engine, stream_name)} == {"order_id"}
    assert prune(amqp_url, engine.url).rows[""] == 5


def test_a_database_without_the_schema_ends_the_recorder(
    amqp_url: str, empty_database_url: str, stream_name: str
) -> None:
    """Waiting would not cure it; the error says which command to run."""
    with pytest.raises(SchemaMissing, match="relatum migrate"):
        Recorder(amqp_url, empty_database_url, [stream_name]).run(threading.Event())
