"""Every option of source and sink: its default, its forms, and one clear error where it cannot be."""

import pickle
from typing import Any

import pytest

from relatum import Broker
from relatum.errors import ConfigurationError, InvalidInput
from relatum_spark._options import EARLIEST, LATEST, Place, SourceOptions, parse_options, parse_sink_options

BROKER = "amqp://user:secret@localhost:5672/"
DATABASE = "postgresql://user:hidden@host/db"


def parsed(streaming: bool = False, **options: Any) -> SourceOptions:
    given = {"broker": BROKER} | ({} if {"streams", "superStream"} & options.keys() else {"stream": "orders"}) | options
    return parse_options({name: str(value) for name, value in given.items() if value is not None}, streaming=streaming)


def test_defaults() -> None:
    """A broker and a stream are enough; options of Spark itself are passed over."""
    options = parsed(path="/x", header="true", mergeSchema="false", recursiveFileLookup="true")
    assert options.streams == ("orders",)
    assert options.starting == Place("startingOffsets", EARLIEST)
    assert options.ending == Place("endingOffsets", LATEST)
    assert (options.fail_on_data_loss, options.include_headers, options.include_value) == (True, True, True)
    assert (options.max_records_per_partition, options.poll_timeout_s) == (100_000, 30.0)
    assert (options.batch_rows, options.batch_bytes) == (10_000, 4 << 20)
    assert (options.min_partitions, options.max_offsets_per_trigger, options.database) == (None, None, None)
    assert parsed(streaming=True).starting == Place("startingOffsets", LATEST)


MOMENT = Place("startingTimestamp", 5, is_moment=True)
MOMENTS = Place("startingOffsetsByTimestamp", {"orders": 5}, is_moment=True)
ENDS = Place("endingOffsetsByTimestamp", {"orders": 9}, is_moment=True)
LAST = 2**63 - 1
OFFSETS = Place("startingOffsets", {"a": LAST, "b": -2})
PAIRS = {"database": DATABASE, "key": "pair", "keyValues": '["x", 5, ["a", "b"]]'}


@pytest.mark.parametrize(
    ("options", "field", "value"),
    [
        # Spark hands names over in small letters; users write them as they like.
        ({"failondataloss": "FALSE"}, "fail_on_data_loss", False),
        ({"MaxRecordsPerPartition": "7"}, "max_records_per_partition", 7),
        ({"superStream": "s"}, "super_stream", "s"),
        ({"startingOffsets": "Latest"}, "starting", Place("startingOffsets", LATEST)),
        ({"startingOffsets": '{"orders": 5}'}, "starting", Place("startingOffsets", {"orders": 5})),
        ({"startingOffsets": f'{{"b": -2, "a": {LAST}}}'}, "starting", OFFSETS),
        ({"startingTimestamp": "5"}, "starting", MOMENT),
        ({"startingOffsetsByTimestamp": '{"orders": 5}'}, "starting", MOMENTS),
        # As in Kafka's: a moment for all overrules one a stream, which overrules offsets.
        ({"startingTimestamp": "5", "startingOffsets": "latest"}, "starting", MOMENT),
        ({"startingOffsetsByTimestamp": '{"orders": 5}', "startingOffsets": "latest"}, "starting", MOMENTS),
        ({"endingOffsets": '{"orders": -1}'}, "ending", Place("endingOffsets", {"orders": -1})),
        ({"endingTimestamp": "9"}, "ending", Place("endingTimestamp", 9, is_moment=True)),
        ({"endingOffsetsByTimestamp": '{"orders": 9}'}, "ending", ENDS),
        # Names may be separated by commas or come as JSON, in which a comma is a letter.
        ({"streams": "a, b"}, "streams", ("a", "b")),
        ({"streams": '["a,b", "c"]'}, "streams", ("a,b", "c")),
        ({"database": DATABASE, "keys": "order_id, host"}, "keys", ("order_id", "host")),
        (PAIRS, "key_values", ("x", 5, ("a", "b"))),
    ],
)
def test_forms(options: dict[str, str], field: str, value: Any) -> None:
    """Each way to say it, and which one counts."""
    assert getattr(parsed(**options), field) == value


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("startingOffsets", ["first", "{", "[]", "1", '"x"', f'{{"a": {LAST + 1}}}']),
        ("startingOffsets", [f'{{"a": {number}}}' for number in ("-3", "1.5", "true", "null", '"1"')]),
        ("startingOffsets", ['{"a": 1, "a": 2}']),
        ("endingOffsets", ["earliest", '{"orders": -2}']),
        ("startingTimestamp", ["yesterday", "-1"]),
        ("endingTimestamp", ["9" * 30]),
        ("startingOffsetsByTimestamp", ["5", '{"a": -1}']),
        ("startingOffsetsByTimestampStrategy", ["earliest"]),
        ("failOnDataLoss", ["yes"]),
        ("includeHeaders", ["1"]),
        ("includeValue", ["no"]),
        ("maxOffsetsPerTrigger", ["0"]),
        ("minPartitions", ["-1"]),
        ("maxRecordsPerPartition", ["1.5", str(LAST + 1)]),
        ("pollTimeoutMs", ["0", "30s"]),
        ("batchRows", ["many"]),
        ("batchBytes", ["4MiB"]),
        ("streams", ["a,,b", "a,a", "[1]", "[]", '["a"']),
        ("keys", ["a,"]),
    ],
)
def test_bad_values_are_refused(name: str, values: list[str]) -> None:
    """The error names the option and shows the value."""
    for value in values:
        with pytest.raises(InvalidInput, match=name) as caught:
            parsed(**{name: value})
        assert value in str(caught.value) or value.startswith("{"), "of JSON, the number and its stream"


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"stream": None}, "stream"),
        ({"stream": "a", "streams": "b"}, "streams"),
        ({"stream": "a", "superStream": "b"}, "superStream"),
        ({"key": "order_id"}, "keyValues"),
        ({"keyValues": "[1]"}, "key"),
        ({"key": "order_id", "keyValues": "[]"}, "keyValues"),
        ({"key": "order_id", "keyValues": "{}"}, "keyValues"),
        # A name that is nearly one of ours says which.
        ({"startingOffset": "latest"}, "startingOffsets"),
        ({"failOnDatalos": "latest"}, "failOnDataLoss"),
        *(
            ({"streaming": True, name: "latest"}, name)
            for name in ("endingOffsets", "endingTimestamp", "endingOffsetsByTimestamp", "key")
        ),
    ],
)
def test_contradictions_are_refused(options: dict[str, Any], named: str) -> None:
    """One place to read from, a key always with its values, no misspelt name; and a streaming query has no end."""
    with pytest.raises(InvalidInput, match=named):
        parsed(**options)


def test_servers_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an option or a variable it is said which would name one."""
    for variable in ("RELATUM_BROKER_URL", "RELATUM_STREAM_URL", "RELATUM_DATABASE_URL"):
        monkeypatch.delenv(variable, raising=False)
    with pytest.raises(ConfigurationError, match="RELATUM_BROKER_URL"):
        parse_options({"stream": "orders"})
    with pytest.raises(ConfigurationError, match="RELATUM_DATABASE_URL"):
        parsed(keys="order_id")
    monkeypatch.setenv("RELATUM_BROKER_URL", BROKER)
    monkeypatch.setenv("RELATUM_DATABASE_URL", DATABASE)
    assert parse_options({"stream": "orders"}) == parsed()
    assert parsed(keys="order_id").database == DATABASE


def test_options_hide_credentials_and_travel() -> None:
    """Options can be sent to a task and show no password; each batch write without `writeId` gets its own."""
    sink = parse_sink_options(SINK | {"DATABASE": DATABASE})
    for options in (parsed(database=DATABASE, keys="order_id"), sink):
        assert "secret" not in repr(options)
        assert "hidden" not in repr(options)
        assert pickle.loads(pickle.dumps(options)) == options
    with pytest.raises(ConfigurationError) as caught:
        parsed(broker="http://user:secret@host/")
    assert "secret" not in str(caught.value)
    assert parse_sink_options(SINK).write_id != parse_sink_options(SINK).write_id
    with pytest.raises(InvalidInput, match="writeId"):
        parse_sink_options({**SINK, "writeId": "w"}, streaming=True)


def test_broker_options() -> None:
    """The files of TLS come with the URL; a task that waits less connects within less."""
    url = "amqps://u@h?cacertfile=/ca&certfile=/c&keyfile=/k"
    options = parsed(broker=url)
    assert options.broker == Broker(url)
    assert options.timeout_s == 10.0
    assert parsed(pollTimeoutMs="2000").timeout_s == 2.0
    assert parsed(streamUrl="rabbitmq-stream://h:7").broker.stream_url == "rabbitmq-stream://h:7"


SINK = {"broker": BROKER, "stream": "s"}


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"stream": ""}, "stream"),
        ({"superStream": "x", "routingKey": "k"}, "superStream"),
        ({"routingKey": "k"}, "superStream"),
        ({"batchId": "1"}, "writeId"),
        ({"writeId": " "}, "writeId"),
        ({"writeId": "w", "batchId": "-1"}, "batchId"),
        ({"maxInFlight": "0"}, "maxInFlight"),
        ({"confirmTimeoutMs": "soon"}, "confirmTimeoutMs"),
        ({"keyColumns": "a,,b"}, "keyColumns"),
        ({"keyColumn": "a"}, "keyColumns"),
        ({"producerName": "p" * 200}, "bytes"),
    ],
)
def test_bad_options_of_a_write(options: dict[str, str], named: str) -> None:
    """Each is one error that names it."""
    with pytest.raises(InvalidInput, match=named):
        parse_sink_options(SINK | options)
