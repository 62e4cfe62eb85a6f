"""The options of the source and the sink, parsed and checked: one clear error for each that is wrong."""

import difflib
import json
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from relatum.errors import InvalidInput
from relatum.limits import INTEGER_MAX
from relatum_spark._offsets import EARLIEST, LATEST, Place, parse_place
from relatum_spark._sequence import EPOCH_MAX, check_names
from relatum_spark._where import Broker, database_url

_TLS: Final = {
    "tls_ca_file": "tlsCaFile",
    "tls_certificate_file": "tlsCertificateFile",
    "tls_key_file": "tlsKeyFile",
    "tls_key_password": "tlsKeyPassword",
    "auth_mechanism": "authMechanism",
}
"""The fields of `Broker`, and the options that set them."""

_BROKER: Final = ("broker", "streamUrl", *_TLS.values(), "pollTimeoutMs", "database")
_BATCH_ALONE: Final = ("endingOffsets", "endingTimestamp", "endingOffsetsByTimestamp", "key", "keyValues")
_READ: Final = (
    *_BROKER,
    *_BATCH_ALONE,
    *("stream", "streams", "superStream", "keys", "includeHeaders", "includeValue", "failOnDataLoss"),
    *("startingOffsets", "startingTimestamp", "startingOffsetsByTimestamp", "startingOffsetsByTimestampStrategy"),
    *("maxOffsetsPerTrigger", "minPartitions", "maxRecordsPerPartition", "batchRows", "batchBytes"),
)
_WRITE: Final = (
    *_BROKER,
    *("stream", "superStream", "routingKey", "keyColumns", "producerName", "writeId", "batchId"),
    *("confirmTimeoutMs", "maxInFlight"),
)

RECORDS_PER_PARTITION: Final = 100_000
"""Offsets in one partition: a task costs about 30 ms, which is little beside reading that many."""

ROWS_MAX: Final = 10_000
"""Rows of an Arrow record batch, as of Spark's own: more make it no faster."""

BYTES_MAX: Final = 4 << 20
"""Bytes of records in an Arrow record batch. Spark holds several; a column of one ends at 2 GiB."""

POLL_TIMEOUT_MS: Final = 30_000
"""Milliseconds within which a task must get something."""

PRODUCER_NAME: Final = "relatum"
CONFIRM_TIMEOUT_MS: Final = 30_000
"""Milliseconds without any confirm, while some are due, until a task fails."""

IN_FLIGHT_MAX: Final = 10_000
"""Messages sent and not confirmed: more make it no faster, and each costs the broker memory."""

_ALIKE: Final = 0.85
"""From which likeness on an unknown option counts as one of ours misspelt: `startingOffset` does, `path` does not."""

_TIMEOUT_S_MAX: Final = 10.0
"""Seconds a task waits for one answer at most; `pollTimeoutMs` shortens it, so that connecting ends in time too."""


@dataclass(frozen=True, slots=True)
class SourceOptions:
    """The options of a read; docs/spark.md describes each. Can be pickled; `repr` shows no credentials."""

    broker: Broker
    streams: tuple[str, ...]
    """Empty where a super stream is given."""
    super_stream: str | None
    starting: Place
    ending: Place
    database: str | None = field(repr=False)
    """None where no option needs it."""
    is_latest_allowed: bool
    """Begin at the end where nothing was written since the starting moment; else that is an error."""
    fail_on_data_loss: bool
    max_offsets_per_trigger: int | None
    min_partitions: int | None
    max_records_per_partition: int
    include_headers: bool
    include_value: bool
    keys: tuple[str, ...]
    key: str | None
    key_values: tuple[object, ...]
    poll_timeout_s: float
    batch_rows: int
    batch_bytes: int


def parse_options(options: Mapping[str, str], *, streaming: bool = False) -> SourceOptions:
    """Parse the options of a read, as Spark gives them.

    Raises:
        ConfigurationError: no broker or database is named, or a URL cannot be read.
        InvalidInput: an option is misspelt, its value cannot be one, or two contradict each other.
    """
    given = Given(options, _READ)
    streams, super_stream = _streams(given)
    starting = parse_place("starting", given.text, LATEST if streaming else EARLIEST)
    ending = parse_place("ending", given.text, LATEST)
    if streaming and (name := given.first(*_BATCH_ALONE)):
        instead = "; `relatum_spark.Enrichment` looks up in each micro-batch" if name in ("key", "keyValues") else ""
        raise InvalidInput(f"option {name}: a streaming query has none; it is a batch's alone{instead}")
    keys, key, values = given.names("keys"), given.text("key"), _key_values(given)
    database = given.text("database")
    return SourceOptions(
        broker=given.broker(),
        database=database_url(database) if keys or key or database else None,
        streams=streams,
        super_stream=super_stream,
        starting=starting,
        ending=ending,
        is_latest_allowed=given.one_of("startingOffsetsByTimestampStrategy", "error", "latest") == "latest",
        fail_on_data_loss=given.flag("failOnDataLoss"),
        max_offsets_per_trigger=given.number("maxOffsetsPerTrigger"),
        min_partitions=given.number("minPartitions"),
        max_records_per_partition=given.number("maxRecordsPerPartition", RECORDS_PER_PARTITION),
        include_headers=given.flag("includeHeaders"),
        include_value=given.flag("includeValue"),
        keys=keys,
        key=key,
        key_values=values,
        poll_timeout_s=given.poll_timeout_s(),
        batch_rows=given.number("batchRows", ROWS_MAX),
        batch_bytes=given.number("batchBytes", BYTES_MAX),
    )


@dataclass(frozen=True, slots=True)
class SinkOptions:
    """The options of a write; docs/spark.md describes each. Can be pickled; `repr` shows no credentials."""

    broker: Broker
    stream: str | None
    """None where a super stream is given."""
    super_stream: str | None
    routing_key: str | None
    key_columns: tuple[str, ...]
    producer_name: str
    write_id: str
    """A random one where none is given; a streaming query uses its own id instead."""
    batch_id: int
    confirm_timeout_s: float
    in_flight_max: int
    poll_timeout_s: float
    database: str | None = field(repr=False)


def parse_sink_options(options: Mapping[str, str], *, streaming: bool = False) -> SinkOptions:
    """Parse the options of a write. Errors as of `parse_options`."""
    given = Given(options, _WRITE)
    stream, super_stream, routing_key = given.text("stream"), given.text("superStream"), given.text("routingKey")
    if (stream is None) == (super_stream is None):
        raise InvalidInput("which stream? Give one of the options stream and superStream")
    if (super_stream is None) != (routing_key is None):
        raise InvalidInput(
            "the options superStream and routingKey come together: routingKey names the column whose value says which"
            " stream of the super stream a row goes to"
        )
    if streaming and (name := given.first("writeId", "batchId")):
        raise InvalidInput(f"option {name}: a streaming query has ids of its own")
    write_id, batch_id = given.text("writeId"), given.text("batchId")
    if write_id is None and given.has("writeId"):
        raise InvalidInput("option writeId is empty: nothing would be recognised as written before")
    if batch_id is not None and write_id is None:
        raise InvalidInput("option batchId counts the writes of one writeId: give that too")
    if batch_id is not None and not (batch_id.isascii() and batch_id.isdecimal() and int(batch_id) <= EPOCH_MAX):
        raise InvalidInput(f"option batchId: {batch_id!r} is not a whole number from 0 on")
    producer, write_id = given.text("producerName") or PRODUCER_NAME, write_id or str(uuid.uuid4())
    check_names(producer, write_id)
    database = given.text("database")
    return SinkOptions(
        broker=given.broker(),
        stream=stream,
        super_stream=super_stream,
        routing_key=routing_key,
        key_columns=given.names("keyColumns"),
        producer_name=producer,
        write_id=write_id,
        batch_id=int(batch_id or 0),
        confirm_timeout_s=given.number("confirmTimeoutMs", CONFIRM_TIMEOUT_MS) / 1000,
        in_flight_max=given.number("maxInFlight", IN_FLIGHT_MAX),
        poll_timeout_s=given.poll_timeout_s(),
        database=None if database is None else database_url(database),
    )


class Given:
    """Options as Spark gives them, read by name in any case.

    Options that are none of `names` are passed over, since Spark adds its own, unless they look like one misspelt.
    """

    def __init__(self, options: Mapping[str, str], names: Iterable[str]) -> None:
        self._options = {name.lower(): value for name, value in options.items()}
        known = {name.lower(): name for name in names}
        for name in sorted(self._options.keys() - known.keys()):
            if alike := difflib.get_close_matches(name, known, 1, _ALIKE):
                raise InvalidInput(f"there is no option {name!r}; is {known[alike[0]]} meant?")

    def has(self, name: str) -> bool:
        return name.lower() in self._options

    def text(self, name: str) -> str | None:
        """Return the value as it is; None where it is not given or blank."""
        value = self._options.get(name.lower())
        return value if value is not None and value.strip() else None

    def first(self, *names: str) -> str | None:
        """Return the first of the names that is given."""
        return next((name for name in names if self.text(name) is not None), None)

    def number(self, name: str, default: Any = None) -> Any:
        """Return a whole number from 1 on."""
        text = self.text(name)
        if text is None:
            return default
        try:
            number = int(text)
        except ValueError:
            number = 0
        if not 1 <= number <= INTEGER_MAX:
            raise InvalidInput(f"option {name}: {text!r} is not a whole number from 1 on")
        return number

    def one_of(self, name: str, *words: str) -> str:
        """Return one of some words, in any case; the first where it is not given."""
        word = (self.text(name) or words[0]).strip().lower()
        if word not in words:
            raise InvalidInput(f"option {name}: {word!r} is none of {', '.join(words)}")
        return word

    def flag(self, name: str) -> bool:
        """Return true or false; true where it is not given."""
        return self.one_of(name, "true", "false") == "true"

    def names(self, option: str) -> tuple[str, ...]:
        """Return names separated by commas or as a JSON list, each there once."""
        text = self.text(option)
        if text is None:
            return ()
        names = self.json_list(option) if text.lstrip().startswith("[") else [part.strip() for part in text.split(",")]
        if not names or not all(isinstance(name, str) and name for name in names) or len(set(names)) != len(names):
            raise InvalidInput(f"option {option}: {text!r} is not a list of names, each there once")
        return tuple(names)

    def json_list(self, option: str) -> list[Any]:
        text = self.text(option) or ""
        try:
            values = json.loads(text)
        except ValueError as error:
            raise InvalidInput(f"option {option}: {text!r} is not a JSON list: {error}") from None
        if not isinstance(values, list):
            raise InvalidInput(f"option {option}: {text!r} is not a JSON list")
        return values

    def broker(self) -> Broker:
        """Return the broker of the options that name one."""
        login: dict[str, Any] = {name: self.text(option) for name, option in _TLS.items()}
        named = Broker.of(self.text("broker"), self.text("streamUrl"))
        broker = replace(named, timeout_s=min(_TIMEOUT_S_MAX, self.poll_timeout_s()), **login)
        broker.logged_in()
        return broker

    def poll_timeout_s(self) -> float:
        seconds: float = self.number("pollTimeoutMs", POLL_TIMEOUT_MS) / 1000
        return seconds


def _streams(given: Given) -> tuple[tuple[str, ...], str | None]:
    """Return the streams named, or the super stream."""
    found = [name for name in ("stream", "streams", "superStream") if given.text(name) is not None]
    if len(found) != 1:
        what = " and ".join(found) + " are both given" if found else "none is given"
        raise InvalidInput(f"which stream? Give one of the options stream, streams and superStream; {what}")
    text = given.text(found[0]) or ""
    if found[0] == "superStream":
        return (), text
    return ((text,) if found[0] == "stream" else given.names("streams")), None


def _key_values(given: Given) -> tuple[object, ...]:
    """Return the values of the key to look up; a composite's are tuples."""
    if (given.text("key") is None) != (given.text("keyValues") is None):
        raise InvalidInput("the options key and keyValues come together: a key's name, and a JSON list of its values")
    if given.text("keyValues") is None:
        return ()
    values = given.json_list("keyValues")
    if not values:
        raise InvalidInput("option keyValues: the list is empty")
    return tuple(tuple(value) if isinstance(value, list) else value for value in values)
