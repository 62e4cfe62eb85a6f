"""The options of the sink, and the columns it takes, checked before any job runs."""

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from pyspark.sql.types import (
    BinaryType,
    BooleanType,
    ByteType,
    DataType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    MapType,
    ShortType,
    StringType,
    StructType,
    TimestampType,
)

from relatum.errors import InvalidInput, InvalidRelationshipKey
from relatum.headers import RECEIPT_HEADER, TIME_HEADER
from relatum.keys import SkipReason
from relatum_spark._options import TLS_OPTIONS, Given, broker_of, names_of, poll_timeout_s
from relatum_spark._schema import PROPERTIES
from relatum_spark._sequence import EPOCH_MAX, check_names
from relatum_spark._where import Broker, database_url

WRITE_OPTIONS: Final = (
    *("broker", "streamUrl", *TLS_OPTIONS, "pollTimeoutMs", "database"),
    *("stream", "superStream", "routingKey", "keyColumns"),
    *("producerName", "writeId", "batchId", "confirmTimeoutMs", "maxInFlight"),
)

PRODUCER_NAME: Final = "relatum"
CONFIRM_TIMEOUT_MS: Final = 30_000
"""Milliseconds without any confirm, while some are due, until a task fails."""

IN_FLIGHT_MAX: Final = 10_000
"""Messages sent and not confirmed: more make it no faster, and each costs the broker memory."""

_INTEGERS: Final = (ByteType, ShortType, IntegerType, LongType)
_KEY_TYPES: Final = (StringType, BinaryType, BooleanType, TimestampType, *_INTEGERS)
_HEADER_TYPES: Final = (*_KEY_TYPES, FloatType, DoubleType)
_ROUTING_TYPES: Final = (StringType, BinaryType, *_INTEGERS)
_OWN_COLUMNS: Final = ("value", "headers", "properties", "timestamp")


@dataclass(frozen=True, slots=True)
class SinkOptions:
    """The options of a write. Can be pickled; `repr` shows no credentials.

    Attributes:
        broker: Where the streams are.
        stream: The stream written to; None where a super stream is.
        super_stream: The super stream written to; None where a stream is.
        routing_key: The column whose value says which stream of a super stream a row goes to.
        key_columns: Columns that become headers of their names.
        producer_name: The first part of the producers' references.
        write_id: The batch's own name; a random one where none is given. Not used by streaming queries.
        batch_id: The number of the write among those of one `write_id`.
        confirm_timeout_s: Seconds without any confirm until a task fails.
        poll_timeout_s: Seconds for which a streaming query asks again, before a batch, while the broker is away.
        in_flight_max: Messages sent and not confirmed at most, by each task.
        database: PostgreSQL's URL, whose key definitions the rows are checked against; None for none.
    """

    broker: Broker
    stream: str | None
    super_stream: str | None
    routing_key: str | None
    key_columns: tuple[str, ...]
    producer_name: str
    write_id: str
    batch_id: int
    confirm_timeout_s: float
    in_flight_max: int
    poll_timeout_s: float
    database: str | None = field(default=None, repr=False)


def parse_sink_options(options: Mapping[str, str], *, streaming: bool = False) -> SinkOptions:
    """The options of a write.

    Args:
        options: As Spark gives them; names in any case.
        streaming: For a streaming query, whose micro-batches have ids of their own.

    Raises:
        ConfigurationError: no broker is named, or a URL cannot be read.
        InvalidInput: an option is misspelt, its value cannot be one, or two contradict each other.
    """
    given = Given(options)
    given.check_names(WRITE_OPTIONS)
    stream, super_stream, routing_key = given.text("stream"), given.text("superStream"), given.text("routingKey")
    if (stream is None) == (super_stream is None):
        raise InvalidInput("which stream? Give one of the options stream and superStream")
    if (super_stream is None) != (routing_key is None):
        raise InvalidInput(
            "the options superStream and routingKey come together: routingKey names the column whose value says which"
            " stream of the super stream a row goes to"
        )
    write_id, batch_id = given.text("writeId"), _batch_id(given.text("batchId"))
    if streaming and (name := given.first("writeId", "batchId")):
        raise InvalidInput(f"option {name}: a streaming query has ids of its own")
    if write_id is None and any(name.lower() == "writeid" for name in options):
        raise InvalidInput("option writeId is empty: nothing would be recognised as written before")
    if batch_id is not None and write_id is None:
        raise InvalidInput("option batchId counts the writes of one writeId: give that too")
    producer = given.text("producerName") or PRODUCER_NAME
    check_names(producer, write_id or str(uuid.UUID(int=0)))
    database = given.text("database")
    return SinkOptions(
        broker=broker_of(options),
        stream=stream,
        super_stream=super_stream,
        routing_key=routing_key,
        key_columns=names_of(given, "keyColumns"),
        producer_name=producer,
        write_id=write_id or str(uuid.uuid4()),
        batch_id=batch_id or 0,
        confirm_timeout_s=given.number("confirmTimeoutMs", default=CONFIRM_TIMEOUT_MS) / 1000,
        in_flight_max=given.number("maxInFlight", default=IN_FLIGHT_MAX),
        poll_timeout_s=poll_timeout_s(given),
        database=None if database is None else database_url(database),
    )


def _batch_id(text: str | None) -> int | None:
    if text is None:
        return None
    if not (text.isascii() and text.isdecimal() and int(text) <= EPOCH_MAX):
        raise InvalidInput(f"option batchId: {text!r} is not a whole number from 0 on")
    return int(text)


def check_columns(schema: StructType, options: SinkOptions) -> None:
    """Refuse columns that cannot be written.

    Raises:
        InvalidInput: one is missing, unknown or of a type it cannot have (`InvalidRelationshipKey`: a key's column).
    """
    types = {each.name: each.dataType for each in schema.fields}
    _check(types, "value", (StringType, BinaryType), needed=True)
    _check(types, "timestamp", (TimestampType,))
    if isinstance(headers := types.get("headers"), MapType):
        _check({"headers": headers.valueType}, "headers", _HEADER_TYPES)
        _check({"headers": headers.keyType}, "headers", (StringType,))
    else:
        _check(types, "headers", (MapType,))
    _check_properties(types.get("properties"))
    if options.routing_key is not None:
        _check(types, options.routing_key, _ROUTING_TYPES, needed=True)
    for name in options.key_columns:
        _check_key(types, name)
    unknown = types.keys() - {*_OWN_COLUMNS, *options.key_columns, options.routing_key}
    if unknown:
        raise InvalidInput(
            f"the columns {', '.join(sorted(unknown))} have no place in a message: a row has value, headers, properties"
            " and timestamp. Drop them, or name those that are relationship keys in the option keyColumns"
        )


def _check(types: Mapping[str, DataType], name: str, kinds: Sequence[Any], *, needed: bool = False) -> None:
    kind = types.get(name)
    if kind is None:
        if needed:
            raise InvalidInput(f"there is no column {name!r} to write")
    elif not isinstance(kind, tuple(kinds)):
        names = ", ".join(each.typeName() for each in kinds)
        raise InvalidInput(f"the column {name!r} is {kind.simpleString()}; it must be one of {names}")


def _check_properties(kind: DataType | None) -> None:
    if kind is None:
        return
    if not isinstance(kind, StructType):
        raise InvalidInput(f"the column 'properties' is {kind.simpleString()}; it must be a struct")
    types = {each.name: each.dataType for each in PROPERTIES.fields}
    for each in kind.fields:
        wanted = types.get(each.name)
        if wanted is None:
            raise InvalidInput(f"there is no property {each.name!r}; there are {', '.join(types)}")
        wanted_kinds = _INTEGERS if isinstance(wanted, IntegerType) else (type(wanted),)
        _check({f"properties.{each.name}": each.dataType}, f"properties.{each.name}", wanted_kinds)


def _check_key(types: Mapping[str, DataType], name: str) -> None:
    if name in (*_OWN_COLUMNS, TIME_HEADER, RECEIPT_HEADER):
        raise InvalidInput(f"option keyColumns: {name!r} is no column for a key")
    kind = types.get(name)
    if kind is None:
        raise InvalidInput(f"option keyColumns: there is no column {name!r}")
    if not isinstance(kind, _KEY_TYPES):
        reason = {"double": SkipReason.FLOAT, "float": SkipReason.FLOAT, "decimal": SkipReason.DECIMAL}.get(
            kind.typeName(), SkipReason.NESTED if isinstance(kind, StructType | MapType) else SkipReason.UNSUPPORTED
        )
        raise InvalidRelationshipKey(
            f"the column {name!r} is {kind.simpleString()}, which no key can be: {reason}; cast it to a text, a whole"
            " number or a timestamp",
            key=name,
            reason=str(reason),
        )
