"""Options of source and sink, and arguments of functions: defaults, forms, and one clear error where one cannot be."""

import math
import pickle
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

import relatum_spark
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
    assert (options.streams, options.starting) == (("orders",), Place("startingOffsets", EARLIEST))
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
        # Spark passes names in lower case; users write them as they like.
        ({"failondataloss": "FALSE"}, "fail_on_data_loss", False),
        ({"MaxRecordsPerPartition": "7"}, "max_records_per_partition", 7),
        ({"superStream": "s"}, "super_stream", "s"),
        ({"startingOffsets": "Latest"}, "starting", Place("startingOffsets", LATEST)),
        ({"startingOffsets": '{"orders": 5}'}, "starting", Place("startingOffsets", {"orders": 5})),
        ({"startingOffsets": f'{{"b": -2, "a": {LAST}}}'}, "starting", OFFSETS),
        ({"startingTimestamp": "5"}, "starting", MOMENT),
        ({"startingOffsetsByTimestamp": '{"orders": 5}'}, "starting", MOMENTS),
        # As in Kafka's source: a time for all streams overrides times by stream, which override offsets.
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
        ("startingOffsetsByTimestamp", ["5", '{"a": -1}', f'{{"a": {LAST}}}']),
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
        # The error for a name that is nearly one of ours suggests it.
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
    assert (options.broker, options.timeout_s) == (Broker(url), 10.0)
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


NOWHERE = "postgresql://127.0.0.1:1/x"
AWAY = "amqp://127.0.0.1:1"
"""Nobody listens there; nothing that is refused gets so far."""


class Session:
    """A session that must not be asked."""

    def __getattr__(self, name: str) -> NoReturn:
        raise AssertionError(f"{name} was asked of the session")


SIDES = {"spark": Session(), "left": "a", "right": "b", "on": "k", "database": NOWHERE, "broker": AWAY}
STREAMS = {"spark": Session(), "streams": "a", "partitions": 1, "database": NOWHERE, "broker": AWAY}
TABLE = {"spark": Session(), "database": NOWHERE}
NAMES: list[Any] = [True, 1.5, b"x", [], [1], [""], "", object()]
COUNTS: list[Any] = ["1", True, 1.5, math.nan, 0, -1, [], object()]
OTHERS: list[Any] = ["x", True, 1.5, [], object()]

SPANS: list[Any] = [-1, -1e-9, timedelta(microseconds=-1), math.nan, math.inf, True, "1"]
NO_SIDES: list[Any] = ["", [], [""], None, 7, ["orders", None], {"orders": 1}]
NO_KEYS: list[Any] = ["", [], [""], 7, ["a", "a"]]

JOINS = (relatum_spark.related_pairs, relatum_spark.as_of, relatum_spark.unmatched)
CONVERSATIONS = {"spark": Session(), "keys": "k", "database": NOWHERE}
ENRICHMENT = {"to": "a", "on": "b", "pending": "c", "broker": AWAY, "database": NOWHERE}

CASES: list[tuple[Callable[..., Any], dict[str, Any], str, list[Any]]] = [
    *((join, SIDES, side, NO_SIDES) for join in JOINS for side in ("left", "right")),
    *((join, SIDES, "on", NO_KEYS) for join in JOINS),
    *((join, SIDES, "partitions", COUNTS) for join in JOINS),
    *((join, SIDES, "snapshot", OTHERS) for join in JOINS),
    *((join, SIDES, span, SPANS) for join in (JOINS[0], JOINS[2]) for span in ("within", "before", "after")),
    (relatum_spark.related_pairs, SIDES | {"before": 1}, "within", [1]),
    (relatum_spark.unmatched, SIDES, "older_than", SPANS),
    (relatum_spark.as_of, SIDES, "tolerance", SPANS),
    (relatum_spark.as_of, SIDES, "direction", ["sideways", None]),
    (relatum_spark.conversations, CONVERSATIONS, "keys", [*NO_KEYS, None]),
    (relatum_spark.conversations, CONVERSATIONS, "streams", ["", [], [1]]),
    (relatum_spark.conversations, CONVERSATIONS, "max_value_size", [0, -1, 1.5, True]),
    (relatum_spark.backfill, STREAMS, "streams", NAMES),
    (relatum_spark.backfill, STREAMS, "keys", [each for each in NAMES if each != []]),
    (relatum_spark.backfill, STREAMS, "partitions", COUNTS),
    (relatum_spark.backfill, STREAMS, "slice_offsets", COUNTS),
    (relatum_spark.backfill, STREAMS, "messages_per_s", [each for each in COUNTS if each != 1.5]),
    (relatum_spark.relationships, TABLE, "streams", NAMES),
    (relatum_spark.relationships, TABLE, "keys", NAMES),
    (relatum_spark.relationships, TABLE, "vhost", [True, 1.5, b"x", "", []]),
    (relatum_spark.relationships, TABLE, "partitions", COUNTS),
    (relatum_spark.relationships, TABLE, "snapshot", OTHERS),
    (relatum_spark.resolve, {"df": None, "broker": AWAY}, "df", [None, *OTHERS]),
    (relatum_spark.Enrichment, ENRICHMENT, "to", [[], [1]]),
    (relatum_spark.Enrichment, ENRICHMENT, "how", ["outer"]),
    (relatum_spark.Enrichment, ENRICHMENT, "retries", [-1, "1"]),
    (relatum_spark.Enrichment, ENRICHMENT, "limit", [0]),
    (relatum_spark.Enrichment, ENRICHMENT, "within", SPANS),
    (relatum_spark.Enrichment, ENRICHMENT, "wait", SPANS),
]


@pytest.mark.parametrize(
    ("function", "given", "argument", "refused"), CASES, ids=lambda each: getattr(each, "__name__", None)
)
def test_wrong_arguments_are_named(function: Any, given: dict[str, Any], argument: str, refused: list[Any]) -> None:
    """Neither Python's own errors, nor a question to a server."""
    for value in refused:
        with pytest.raises(InvalidInput, match=argument):
            function(**(given | {argument: value}))


@pytest.mark.parametrize("join", JOINS)
def test_a_misspelt_argument_of_a_join_is_refused(join: Callable[..., Any]) -> None:
    """What all joins take is checked by name, too."""
    with pytest.raises(TypeError, match="databse"):
        join(**SIDES, databse=NOWHERE)


def jdbc_options(url: str) -> dict[str, str]:
    settings: dict[str, str] = {}
    conf = SimpleNamespace(get=settings.get, set=settings.__setitem__)
    session: Any = SimpleNamespace(schema=None, conf=conf, sql=lambda _query: session)  # it has the driver
    relatum_spark.catalog(session, "c", database=url)
    prefix = "spark.sql.catalog.c."
    return {name.removeprefix(prefix): value for name, value in settings.items() if name.startswith(prefix)}


@pytest.mark.parametrize(
    ("url", "place"),
    [
        ("postgresql://user:pw@db:5433/name", "db:5433/name"),
        ("postgresql+psycopg://user@db/name", "db:5432/name"),
        ("postgres://user@db/na%20me", "db:5432/na%20me"),
        ("postgresql://user@db", "db:5432/user"),
        ("postgresql://user@[::1]:5433/name", "[::1]:5433/name"),
        ("postgresql://user:pw@h1:5433,h2/name?sslmode=require", "h1:5433,h2:5432/name"),
        ("postgresql://user@h1,[::1]:5433/name", "h1:5432,[::1]:5433/name"),
        ("postgresql://user@/name?host=h1,h2&port=1,2", "h1:1,h2:2/name"),
    ],
)
def test_a_url_becomes_the_drivers(url: str, place: str) -> None:
    """Hosts, ports and the database's name go into the JDBC URL; no credentials do."""
    options = jdbc_options(url)
    assert (options["url"], options["user"]) == (f"jdbc:postgresql://{place}", "user")
    assert options["driver"] == "org.postgresql.Driver"
    # As Relatum's own connections: a standby may lack rows that the primary's coverage names.
    assert options.get("targetServerType") == ("primary" if "," in place else None)
    assert int(options["fetchsize"]) > 0


VERIFIED = "sslmode=verify-full&sslrootcert=/ca.pem&sslcert=/c.pem&sslkey=/k.pk8"


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        # A password with any characters reaches the driver unchanged.
        ("postgresql://us%40er:p%2Fw%3F%20@db/n", {"user": "us@er", "password": "p/w? "}),
        # As for every client of PostgreSQL.
        ("postgresql://db/n", {"user": "someone", "password": "secret"}),
        (f"postgresql://u@db/n?{VERIFIED}", dict(part.split("=") for part in VERIFIED.split("&"))),
        # The driver may use another name for an option of libpq's, or have no need for it.
        ("postgresql://u@db/n?connect_timeout=3", {"connectTimeout": "3"}),
        ("postgresql://u@db/n?target_session_attrs=read-write", {"targetServerType": "primary"}),
        ("postgresql://u@db/n?keepalives_idle=5", {"keepalives_idle": None}),
    ],
)
def test_the_rest_is_properties(url: str, expected: dict[str, str | None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Credentials, of the URL or of PGUSER and PGPASSWORD, and options of TLS and of connecting."""
    monkeypatch.setenv("PGUSER", "someone")
    monkeypatch.setenv("PGPASSWORD", "secret")
    options = jdbc_options(url)
    assert {name: options.get(name) for name in expected} == expected
    assert options["url"] == "jdbc:postgresql://db:5432/n"


@pytest.mark.parametrize(
    ("url", "named"),
    [
        ("postgresql:///name", "Unix socket"),
        ("postgresql://user:secret@/name?host=/run/postgresql", "Unix socket"),
        ("mysql://user:secret@db/name", "mysql"),
        ("postgresql://user:secret@db/name?krbsrvname=x", "krbsrvname"),
        ("postgresql://user:secret@db/name?target_session_attrs=x", "target_session_attrs"),
    ],
)
def test_what_the_driver_cannot_use_is_refused(url: str, named: str) -> None:
    """One clear error, without the URL."""
    with pytest.raises(ConfigurationError, match=named) as refused:
        jdbc_options(url)
    assert "secret" not in str(refused.value)


def test_the_jar_is_the_one_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """RELATUM_JDBC_JAR goes before the system's package, and is never passed over in silence."""
    jar = tmp_path / "driver.jar"
    monkeypatch.setenv("RELATUM_JDBC_JAR", str(jar))
    with pytest.raises(ConfigurationError, match=r"driver\.jar"):
        relatum_spark.jdbc_jar()
    jar.touch()
    assert relatum_spark.jdbc_jar() == str(jar)
