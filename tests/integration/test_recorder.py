"""Recording real streams into a real database."""

import re
import threading
import time
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pika
import pytest
import sqlalchemy as sa
from prometheus_client import CollectorRegistry

from relatum import metrics
from relatum.errors import ConfigurationError, SchemaMissing, UsedAfterClose
from relatum.keys import KeyDefinition
from relatum.recording import Recorder, prune, ranges, set_record_time, status, upkeep
from relatum.recording.embedded import EmbeddedRecorder
from relatum.recording.tails import open_streams
from relatum.store.catalog import add_keys, remove_key, streams_named
from relatum.store.coverage import merged
from relatum.superstreams import declare_super_stream, delete_super_stream
from relatum_consumer import Relations
from tests.support import (
    broker_connection,
    declare_stream,
    delete_stream,
    in_a_try,
    new_streams,
    publish_plain,
    recorded_to,
    recording,
    unique_name,
    wait_recorded,
    wait_until,
)
from tests.support.place import Place

BIG = [(b"x" * 10_000, {"order_id": f"big{n}"}) for n in range(100)]
"""More than a fleeting stream retains."""


def orders(count: int, start: int = 0) -> list[tuple[bytes, dict[str, Any]]]:
    return [(b"%d" % n, {"order_id": f"o{n}", "host": f"h{n % 3}"}) for n in range(start, start + count)]


def test_what_is_derived_can_be_emptied_and_filled_again(place: Place) -> None:
    """The statement of the page on troubleshooting empties what is derived, and a recorder fills it with the same."""
    page = (Path(__file__).parents[2] / "docs" / "troubleshooting.md").read_text()
    found = re.search(r"^TRUNCATE .*?;", page, re.DOTALL | re.MULTILINE)
    assert found
    place.put_recorded(*orders(20), keys=["order_id", "host"])
    before = place.rows()
    place.sql(found[0])
    assert not place.rows()
    place.record()
    assert place.rows() == before


def test_every_kind_of_message_is_covered_and_bad_values_are_counted(place: Place) -> None:
    """A value that cannot be a key is skipped and counted by its reason, and its message is covered."""
    values = ["good", "x" * 1025, 1, True, None, datetime(2020, 1, 1, tzinfo=UTC), "a\tb\\c\nd"]
    registry = CollectorRegistry()
    registry.register(metrics.collector())
    read, labels = registry.get_sample_value, {"stream": place.stream}
    place.put(*[(b"", {"order_id": value}) for value in values], b"")
    with place.recording(keys=["order_id"]):
        place.wait_recorded()
        wait_until(lambda: read("relatum_messages_total", labels) == 8, what="messages counted")
        assert [read(f"relatum_{name}", labels) for name in ("rows_total", "recorded_offset")] == [4, 7]
        assert read("relatum_skipped_values_total", labels | {"reason": "too_long"}) == 1
        wait_until(lambda: read("relatum_lag_offsets", labels) == 0, what="no lag")
    assert place.values() == ["good", "1", "true", "a\tb\\c\nd"]
    assert place.status().skipped == {"order_id": {"too_long": 1, "unsupported_type": 1}}


def test_keys_come_from_properties_x_headers_and_composites(place: Place) -> None:
    """A key finds properties, headers that begin with x-, and composites of both, in any version of RabbitMQ."""
    names = ("correlation_id", "message_id", "type", "app_id", "user_id", "reply_to")
    keys = [KeyDefinition(name, source=f"property:{name}") for name in names]
    keys += [KeyDefinition("x-device"), KeyDefinition("both", source=["x-device", "property:correlation_id"])]
    values = {name: f"the {name}" for name in names} | {"user_id": pika.URLParameters(place.amqp).credentials.username}
    properties = pika.BasicProperties(headers={"x-device": "d|1"}, **values)
    place.put_recorded((b"", properties), keys=keys)
    found = {key: value for key, value, _ in place.rows()}
    assert found == values | {"x-device": "d|1", "both": "d\\|1|the correlation_id"}


def test_a_key_added_while_recording_is_recorded_from_then_on_and_back_filled(place: Place) -> None:
    """A key added while recording is recorded from then on, back-filled once, and pruned once it is removed."""
    place.put(*orders(10))
    with place.recording(keys=["order_id"]):
        place.wait_recorded()
        add_keys(place.engine, ["host"])
        wait_until(lambda: tail_keys(place) == 2, what="the recorder takes up the new key")
        place.put(*orders(10, start=10))
        place.wait_recorded()
        assert len([row for row in place.rows() if row[0] == "host"]) == 10
        report = place.backfill(keys=["host"])
        assert (report.messages, report.rows) == (10, 10)
        assert place.status().covered["host"] == [(0, 20)]
        assert place.backfill().messages == 0
        remove_key(place.engine, "host")
        wait_until(lambda: tail_keys(place) == 1, what="the recorder drops the key")
    assert {key for key, _, _ in place.rows()} == {"order_id"}
    assert prune(place.amqp, place.database).rows[""] == 20


def test_times_switched_while_recording_are_followed(place: Place) -> None:
    """A running recorder stops recording a stream's times when they are switched off."""
    with place.recording(keys=["order_id"]):
        place.put(*orders(1))
        place.wait_recorded()
        set_record_time(place.amqp, place.database, place.stream, on=False)
        tail = "SELECT with_time FROM relatum.coverage WHERE is_tail"
        wait_until(lambda: place.sql(tail) == [(False,)], what="the recorder records no times")
    place.put_recorded(*orders(1))
    assert place.status().covered["time"] == [(0, 1)]


def test_all_receipts_that_are_too_old_are_deleted(place: Place) -> None:
    """A recorder's check deletes old receipts of any number, since a publisher may write thousands a second."""
    with place.engine.begin() as connection:
        connection.exec_driver_sql(
            "INSERT INTO relatum.receipts SELECT 'r', 1, n, now() - interval '2 hours' FROM generate_series(1, 25000) n"
        )
    place.put(*orders(1))
    with place.recording(keys=["order_id"]):
        # The next check is a minute later.
        wait_until(lambda: place.sql("SELECT count(*) FROM relatum.receipts") == [(0,)], 30.0, what="no receipt")


def test_what_is_no_stream_is_waited_for_and_not_written(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    """A missing stream and a queue are each logged once, and are in the table only once they are streams."""
    missing, queue = unique_name("missing"), unique_name("queue")
    with broker_connection(place.amqp) as connection:
        connection.channel().queue_declare(queue, durable=True)

    def told(name: str) -> list[str]:
        # A stream that is just being declared has no replica yet, which is a different report.
        lines = [each.getMessage() for each in caplog.records if each.name == "relatum.recorder"]
        return [line for line in lines if name in line and ("StreamNotFound" in line or "NotAStream" in line)]

    try:
        with place.recording(missing, queue, place.stream, keys=["order_id"]):
            place.put(*orders(3))
            place.wait_recorded()
            wait_until(lambda: told(missing) and told(queue), what="both are named")
            assert [each.stream for each in status(place.amqp, place.database)] == [place.stream]
            declare_stream(place.amqp, missing)
            place.put(*orders(3), to=missing)
            place.wait_recorded(missing)
            assert {each.stream: each.state for each in status(place.amqp, place.database)} == dict.fromkeys(
                (missing, place.stream), "recording"
            )
        assert (len(told(missing)), len(told(queue))) == (1, 1)
    finally:
        delete_stream(place.amqp, missing)
        delete_stream(place.amqp, queue)


def test_a_stream_declared_again_begins_a_new_generation(place: Place) -> None:
    """Offsets restart at 0; no row of the old stream represents the new one."""
    place.put(*orders(10))
    with place.recording(keys=["order_id"]):
        place.wait_recorded()
        place.declare_again()
        place.put(*orders(20, start=100))
        wait_until(lambda: place.recorded_to() == 20, what="the new stream is recorded")
    assert set(place.values()) == {f"o{n}" for n in range(100, 120)}
    seen = place.status()
    assert (seen.generation, [event.kind for event in seen.events]) == (2, ["replaced"])
    assert prune(place.amqp, place.database).rows[""] >= 10


@pytest.mark.parametrize(("first", "count"), [("record", 3), ("record", 30), ("backfill", 8)])
def test_a_stream_declared_again_while_nobody_recorded_is_noticed(place: Place, first: str, count: int) -> None:
    """Whether it is shorter or longer than the old one, which was recorded, or only back-filled: its messages tell."""
    place.put(*orders(10))
    add_keys(place.engine, ["order_id"])
    getattr(place, first)()
    place.declare_again()
    place.put(*orders(count, start=100))
    with place.recording():
        wait_until(lambda: place.recorded_to() == count, what="the new stream is recorded")
        wait_until(lambda: place.status().generation == 2, what="a new generation")
    assert place.values() == [f"o{n}" for n in range(100, 100 + count)]
    with Relations(place.amqp, place.database) as relations:
        assert relations.find("order_id", "o101", streams=place.stream).ids == ((place.stream, 1),)


def test_retention_that_overtakes_the_recorder_is_recorded_as_a_hole(fleeting: Place) -> None:
    """What retention drops before it is recorded is a hole in the coverage, and pruning forgets it."""
    lost = []
    for messages in (orders(10), BIG):
        fleeting.put(*messages)
        with fleeting.recording(keys=["order_id"]) as recorder:
            fleeting.wait_recorded()
            lost.append(recorder.statistics().streams[fleeting.stream].hole_offsets)
    seen = fleeting.status()
    assert seen.first is not None
    assert seen.first > 10
    # 4.x drops a segment a moment later: before the second recorder's end, or after it.
    ((start, end),) = merged(seen.holes)
    assert start == 10 < end <= seen.first
    assert lost == [0, end - start], "none at first; the second recorder found them when it began"
    assert {event.kind for event in seen.events} == {"hole"}
    assert prune(fleeting.amqp, fleeting.database, [fleeting.stream]).rows[fleeting.stream] > 0
    assert min(offset for _, _, offset in fleeting.rows()) >= seen.first
    assert fleeting.verify().ok


def test_retention_that_overtakes_what_was_back_filled_is_a_hole(fleeting: Place) -> None:
    """What retention drops between a back-fill and the first recorder is a hole, too."""
    fleeting.put(*orders(10))
    add_keys(fleeting.engine, ["order_id"])
    fleeting.backfill()
    fleeting.put(*BIG)
    with fleeting.recording() as recorder:
        fleeting.wait_recorded()
        assert recorder.statistics().streams[fleeting.stream].hole_offsets > 0
    assert {event.kind for event in fleeting.status().events} == {"hole"}


def test_what_retention_had_dropped_before_recording_began_is_no_gap(fleeting: Place) -> None:
    """What retention dropped before a stream was first recorded is neither a gap nor a hole."""
    fleeting.put(*BIG)
    with fleeting.recording(keys=["order_id"]) as recorder:
        fleeting.wait_recorded()
        assert recorder.statistics().streams[fleeting.stream].hole_offsets == 0
    seen = fleeting.status()
    assert (seen.first or 0) > 0
    assert (seen.gaps, seen.holes, seen.events) == ([], [], [])
    assert fleeting.sql("SELECT FROM relatum.streams WHERE first_offset IS NOT NULL")


def test_a_stream_declared_again_is_pruned_from_its_start(fleeting: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a recorder pruned of one generation delays no pruning of the next one."""
    monkeypatch.setattr(upkeep, "ENDS_S", 0.2)

    def pruned_to() -> int:
        found = fleeting.sql("SELECT retained_from FROM relatum.streams WHERE replaced_at IS NULL")
        return max((first or 0 for (first,) in found), default=0)

    with fleeting.recording(keys=["order_id"]):
        fleeting.put(*BIG)
        wait_until(lambda: pruned_to() >= 50, what="a prune")
        fleeting.declare_again(x_max_length_bytes=200_000, x_stream_max_segment_size_bytes=50_000)
        fleeting.put(*BIG[:40])
        wait_until(lambda: fleeting.status().generation == 2, what="the new generation")
        wait_until(lambda: pruned_to() >= 1, what="a prune")
        fleeting.wait_recorded()


def test_what_another_process_prunes_is_no_gap(fleeting: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """A recorder that has not queried the stream's first offset since takes no pruned range for a gap."""
    found: list[list[tuple[int, int]]] = []

    def look(*args: Any) -> list[tuple[int, int]]:
        found.append(ranges.gaps(*args))
        return found[-1]

    monkeypatch.setattr(upkeep, "GAP_UNCHANGED_S", 0.0)
    monkeypatch.setattr(upkeep, "gaps", look)
    fleeting.put_recorded(*orders(10), keys=["order_id"])
    add_keys(fleeting.engine, ["host"])
    with fleeting.recording():
        for _ in range(20):
            fleeting.put(*BIG[:4])
            fleeting.wait_recorded()
        assert prune(fleeting.amqp, fleeting.database, [fleeting.stream]).total
        found.clear()
        wait_until(lambda: len(found) > 1, what="two looks for gaps")
    assert found[0] == []
    assert fleeting.status().events == []


def test_what_retention_is_known_to_have_dropped_is_no_gap(place: Place) -> None:
    """A tail is opened with the first offset of the last hole or prune: older offsets are not closed as gaps."""
    place.put_recorded(*orders(3), keys=["order_id"])
    with place.engine.begin() as connection:
        (stale,) = streams_named(connection, "/", [place.stream])
    for column, first in (("first_offset", 1), ("retained_from", 2)):
        place.sql(f"UPDATE relatum.streams SET {column} = {first}")
        (opened,) = open_streams(place.engine, [stale])
        assert opened.stream.first_offset == first


def test_a_name_that_becomes_a_super_streams_is_no_missing_stream_any_more(
    amqp_url: str, engine: sa.Engine, caplog: pytest.LogCaptureFixture
) -> None:
    """The partitions of a super stream are recorded although its name was first missed as a stream."""
    name = unique_name()
    try:
        with recording(amqp_url, engine, name, keys=["order_id"]) as recorder:
            wait_until(lambda: f"There is no stream {name!r}" in caplog.text, what="the recorder to ask for a stream")
            declare_super_stream(amqp_url, name, 2)
            partitions = {f"{name}-0", f"{name}-1"}
            wait_until(lambda: recorder.statistics().streams.keys() == partitions, what="partitions")
            for partition in partitions:
                publish_plain(amqp_url, partition, orders(5))
                wait_recorded(amqp_url, engine, partition)
        assert [seen.super_stream for seen in status(amqp_url, engine.url, [name])] == [name, name]
    finally:
        delete_super_stream(amqp_url, name)


def test_an_embedded_recorder_finds_streams_declared_after_the_first_publish(amqp_url: str, engine: sa.Engine) -> None:
    """A route that led nowhere is asked for again while it is published to, and its partitions are recorded."""
    super_stream = unique_name()
    partition = f"{super_stream}-0"
    recorder = EmbeddedRecorder(amqp_url, engine.url)

    def is_recorded() -> bool:
        recorder.watch(super_stream, "0")
        return recorded_to(engine, partition) == 3

    try:
        recorder.watch(super_stream, "0")
        add_keys(engine, ["order_id"])
        declare_super_stream(amqp_url, super_stream, 1)
        publish_plain(amqp_url, partition, orders(3))
        wait_until(is_recorded, what="the partition recorded")
        with Relations(amqp_url, engine.url) as relations:
            assert relations.find("order_id", "o1", streams=super_stream).ids == ((partition, 1),)
    finally:
        recorder.close()
        delete_super_stream(amqp_url, super_stream)


def test_a_new_stream_does_not_wait_for_thousands_of_known_names(amqp_url: str, engine: sa.Engine) -> None:
    """A new stream is recorded before thousands of known names and exchanges are asked about again."""

    def is_soon_recorded(stream: str) -> bool:
        begun = time.monotonic()
        for number in range(2000):
            recorder.watch("", f"{stream}-{number}")
            recorder.watch(f"exchange-{stream}-{number}", "key")
        wait_until(lambda: not recorder.left(), what="each asked about once")
        # The first subjects have been asked about again by now, and all the others after them.
        asked = time.monotonic()
        recorder.watch("", stream)
        wait_until(lambda: recorded_to(engine, stream) == 1, what="the message recorded", every_s=0.01)
        return time.monotonic() - asked < (asked - begun) / 3

    with new_streams(amqp_url, 3) as streams, closing(EmbeddedRecorder(amqp_url, engine.url)) as recorder:
        for stream in streams:
            publish_plain(amqp_url, stream, orders(1))
        left = iter(streams)
        in_a_try(lambda: is_soon_recorded(next(left)), len(streams), what="the first row of a new stream")


def test_nothing_is_left_when_waits_for_a_receipt_are_told(place: Place) -> None:
    """A process that ends once it has its receipt is not warned of messages that it leaves."""
    left = list[dict[str, int | None]]()

    class Waits:
        def poll_soon(self) -> None:
            left.append(recorder.left())

    with closing(EmbeddedRecorder(place.amqp, place.database)) as recorder:
        waits: Any = Waits()
        recorder.poll_soon(waits)
        recorder.watch("", place.stream)
        place.put((b"", {"relatum_receipt": "r1"}))
        wait_until(lambda: left, what="the receipt")
    assert left == [{}]


def test_a_recorder_that_cannot_record_does_not_delay_its_end(place: Place) -> None:
    """An embedded recorder closes at once with the database away, or the stream in another's hands."""
    place.put(*orders(5))
    with place.recording(keys=["order_id"]):
        place.wait_recorded()
        for database in ("postgresql://nobody@127.0.0.1:1/none", place.database):

            def is_closed_at_once(database: Any = database) -> bool:
                recorder = EmbeddedRecorder(place.amqp, database)
                recorder.watch("", place.stream)
                begun = time.monotonic()
                recorder.close()
                return time.monotonic() - begun < 1.8

            in_a_try(is_closed_at_once, what="closed at once")


def tail_keys(place: Place) -> int:
    ((count,),) = place.sql("SELECT cardinality(key_ids) FROM relatum.coverage WHERE is_tail")
    return int(count)


def test_a_recorder_runs_once(place: Place) -> None:
    """A recorder that has stopped refuses to run again: it would record nothing."""
    recorder, stop = Recorder(place.amqp, place.database, [place.stream]), threading.Event()
    stop.set()
    recorder.run(stop)
    with pytest.raises(UsedAfterClose):
        recorder.run(threading.Event())


def test_a_database_without_the_schema_ends_the_recorder(amqp_url: str, empty_database_url: str) -> None:
    """A recorder without the schema ends with the command to run, and one that may have no connection is refused."""
    with pytest.raises(SchemaMissing, match="relatum migrate"):
        Recorder(amqp_url, empty_database_url, ["orders"]).run(threading.Event())
    with pytest.raises(ConfigurationError, match="connection"):
        Recorder(amqp_url, empty_database_url, ["orders"], database_connections_max=0)
