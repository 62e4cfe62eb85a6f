"""Every option of source and sink: its default, its forms, and one clear error where it cannot be."""

import pickle
from typing import Any

import pytest

from relatum.errors import ConfigurationError, InvalidInput
from relatum_spark._options import EARLIEST, LATEST, Place, SourceOptions, parse_options, parse_sink_options

BROKER = "amqp://user:secret@localhost:5672/"


def parsed(streaming: bool = False, **options: Any) -> SourceOptions:
    """Options with a broker and a stream, where these are not given."""
    given = {"broker": BROKER} | ({} if {"streams", "superStream"} & options.keys() else {"stream": "orders"}) | options
    return parse_options({name: str(value) for name, value in given.items() if value is not None}, streaming=streaming)


def test_defaults() -> None:
    """A broker and a stream are enough."""
    options = parsed()
    assert options.streams == ("orders",)
    assert options.starting == Place("startingOffsets", EARLIEST)
    assert options.ending == Place("endingOffsets", LATEST)
    assert (options.fail_on_data_loss, options.include_headers, options.include_value) == (True, True, True)
    assert (options.max_records_per_partition, options.poll_timeout_s) == (100_000, 30.0)
    assert (options.batch_rows, options.batch_bytes) == (10_000, 4 << 20)
    assert (options.min_partitions, options.max_offsets_per_trigger, options.database) == (None, None, None)
    assert parsed(streaming=True).starting == Place("startingOffsets", LATEST)


def test_names_in_any_case() -> None:
    """Spark hands names over in small letters; users write them as they like."""
    options = parse_options(
        {"BROKER": BROKER, "SUPERSTREAM": "s", "failondataloss": "FALSE", "MaxRecordsPerPartition": "7"}
    )
    assert (options.super_stream, options.fail_on_data_loss, options.max_records_per_partition) == ("s", False, 7)


LAST = 2**63 - 1
MOMENT = Place("startingTimestamp", 5, is_moment=True)
MOMENTS = Place("startingOffsetsByTimestamp", {"orders": 5}, is_moment=True)


@pytest.mark.parametrize(
    ("options", "place"),
    [
        ({"startingOffsets": "Latest"}, Place("startingOffsets", LATEST)),
        ({"startingOffsets": '{"orders": 5}'}, Place("startingOffsets", {"orders": 5})),
        (
            {"startingOffsets": '{"b": -2, "a": 9223372036854775807}'},
            Place("startingOffsets", {"a": 2**63 - 1, "b": -2}),
        ),
        ({"startingTimestamp": "5"}, MOMENT),
        ({"startingOffsetsByTimestamp": '{"orders": 5}'}, MOMENTS),
        # As in Kafka's: a moment for all overrules one a stream, which overrules offsets.
        ({"startingTimestamp": "5", "startingOffsets": "latest"}, MOMENT),
        ({"startingOffsetsByTimestamp": '{"orders": 5}', "startingOffsets": "latest"}, MOMENTS),
    ],
)
def test_where_a_read_begins(options: dict[str, str], place: Place) -> None:
    """Each way to say it, and which one counts."""
    assert parsed(**options).starting == place


def test_where_a_read_ends() -> None:
    """The same forms, for a batch."""
    assert parsed(endingOffsets='{"orders": -1}').ending == Place("endingOffsets", {"orders": -1})
    assert parsed(endingTimestamp="9").ending == Place("endingTimestamp", 9, is_moment=True)
    by_stream = parsed(endingOffsetsByTimestamp='{"orders": 9}').ending
    assert by_stream == Place("endingOffsetsByTimestamp", {"orders": 9}, is_moment=True)


def test_lists() -> None:
    """Names may be separated by commas or come as JSON, in which a comma is a letter."""
    assert parsed(streams="a, b").streams == ("a", "b")
    assert parsed(streams='["a,b", "c"]').streams == ("a,b", "c")
    options = parsed(database="postgresql://u@h/d", keys="order_id, host", key="pair", keyValues='["x", 5, ["a", "b"]]')
    assert (options.keys, options.key, options.key_values) == (("order_id", "host"), "pair", ("x", 5, ("a", "b")))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("startingOffsets", "first"),
        *(
            ("startingOffsets", text)
            for text in (
                *("{", "[]", "1", '"x"', '{"a": -3}', '{"a": 1.5}', '{"a": true}', '{"a": null}', '{"a": "1"}'),
                '{"a": 9223372036854775808}',
            )
        ),
        ("endingOffsets", "earliest"),
        ("endingOffsets", '{"orders": -2}'),
        ("startingTimestamp", "yesterday"),
        ("startingTimestamp", "-1"),
        ("endingTimestamp", "9" * 30),
        ("startingOffsetsByTimestamp", "5"),
        ("startingOffsetsByTimestamp", '{"a": -1}'),
        ("startingOffsetsByTimestampStrategy", "earliest"),
        ("failOnDataLoss", "yes"),
        ("includeHeaders", "1"),
        ("includeValue", "no"),
        ("maxOffsetsPerTrigger", "0"),
        ("minPartitions", "-1"),
        ("maxRecordsPerPartition", "1.5"),
        ("maxRecordsPerPartition", str(2**63)),
        ("pollTimeoutMs", "0"),
        ("pollTimeoutMs", "30s"),
        ("batchRows", "many"),
        ("batchBytes", "4MiB"),
        ("streams", "a,,b"),
        ("streams", "a,a"),
        ("streams", "[1]"),
        ("streams", "[]"),
        ("streams", '["a"'),
        ("keys", "a,"),
    ],
)
def test_bad_values_are_refused(name: str, value: str) -> None:
    """The error names the option and shows the value."""
    with pytest.raises(InvalidInput) as caught:
        parsed(**{name: value})
    assert name in str(caught.value)
    assert value in str(caught.value) or value.startswith("{"), "of JSON, the number and its stream"


def test_a_stream_named_twice_is_refused() -> None:
    """JSON would take the last silently."""
    with pytest.raises(InvalidInput, match="twice"):
        parsed(startingOffsets='{"a": 1, "a": 2}')


@pytest.mark.parametrize(
    "options",
    [
        {"stream": None},
        {"stream": "a", "streams": "b"},
        {"stream": "a", "superStream": "b"},
        {"key": "order_id"},
        {"keyValues": "[1]"},
        {"key": "order_id", "keyValues": "[]"},
        {"key": "order_id", "keyValues": "{}"},
    ],
)
def test_contradictions_are_refused(options: dict[str, str]) -> None:
    """One place to read from, and a key always with its values."""
    with pytest.raises(InvalidInput):
        parsed(**options)


@pytest.mark.parametrize("name", ["endingOffsets", "endingTimestamp", "endingOffsetsByTimestamp", "key"])
def test_a_streaming_query_has_no_end(name: str) -> None:
    """What is a batch's alone is refused, and named."""
    with pytest.raises(InvalidInput, match=name):
        parsed(streaming=True, **{name: "latest"})


@pytest.mark.parametrize(
    ("name", "meant"), [("startingOffset", "startingOffsets"), ("failOnDatalos", "failOnDataLoss")]
)
def test_misspelt_names_are_refused(name: str, meant: str) -> None:
    """A name that is nearly one of ours says which."""
    with pytest.raises(InvalidInput, match=meant):
        parsed(**{name: "latest"})


def test_names_of_others_are_passed_over() -> None:
    """Spark adds options of its own."""
    assert parsed(path="/x", header="true", mergeSchema="false", recursiveFileLookup="true") == parsed()


def test_no_broker_is_a_configuration_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is said which option and which variable would name one; the variable serves."""
    monkeypatch.delenv("RELATUM_BROKER_URL", raising=False)
    monkeypatch.delenv("RELATUM_STREAM_URL", raising=False)
    with pytest.raises(ConfigurationError, match="RELATUM_BROKER_URL"):
        parse_options({"stream": "orders"})
    monkeypatch.setenv("RELATUM_BROKER_URL", BROKER)
    assert parse_options({"stream": "orders"}) == parsed()


def test_keys_need_a_database(monkeypatch: pytest.MonkeyPatch) -> None:
    """Definitions and rows are there; the variable serves."""
    monkeypatch.delenv("RELATUM_DATABASE_URL", raising=False)
    with pytest.raises(ConfigurationError, match="RELATUM_DATABASE_URL"):
        parsed(keys="order_id")
    monkeypatch.setenv("RELATUM_DATABASE_URL", "postgresql://u@h/d")
    assert parsed(keys="order_id").database == "postgresql://u@h/d"


def test_credentials_are_not_shown() -> None:
    """Neither in a representation nor in an error; and options can be sent to a task."""
    options = parsed(database="postgresql://user:hidden@host/db", keys="order_id")
    assert "secret" not in repr(options)
    assert "hidden" not in repr(options)
    assert pickle.loads(pickle.dumps(options)) == options
    with pytest.raises(ConfigurationError) as caught:
        parsed(broker="http://user:secret@host/")
    assert "secret" not in str(caught.value)


def test_broker_options() -> None:
    """The files of TLS and the patience of connecting; a task that waits less connects within less."""
    broker = parsed(broker="amqps://u@h", tlsCaFile="/ca", tlsCertificateFile="/c", tlsKeyFile="/k").broker
    assert (broker.tls_ca_file, broker.tls_certificate_file, broker.tls_key_file) == ("/ca", "/c", "/k")
    assert broker.timeout_s == 10.0
    assert parsed(pollTimeoutMs="2000").broker.timeout_s == 2.0
    assert parsed(streamUrl="rabbitmq-stream://h:7").broker.address.stream_port == 7


# --- the sink ---------------------------------------------------------------------------------------------

SINK = {"broker": BROKER, "stream": "s"}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"stream": ""}, "which stream"),
        ({"superStream": "x", "routingKey": "k"}, "which stream"),
        ({"routingKey": "k"}, "come together"),
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
def test_bad_options_of_a_write(options: dict[str, str], words: str) -> None:
    """Each is one error that names it."""
    with pytest.raises(InvalidInput, match=words):
        parse_sink_options(SINK | options)


def test_options_of_a_write_hide_credentials_and_travel() -> None:
    """They can be pickled; a write without `writeId` gets one of its own; `repr` shows no password."""
    options = parse_sink_options({**SINK, "DATABASE": "postgresql://u:hidden@h/d"})
    assert pickle.loads(pickle.dumps(options)) == options
    assert "hidden" not in repr(options)
    assert "secret" not in repr(options)
    assert options.write_id != parse_sink_options(SINK).write_id
    with pytest.raises(InvalidInput, match="ids of its own"):
        parse_sink_options({**SINK, "writeId": "w"}, streaming=True)
