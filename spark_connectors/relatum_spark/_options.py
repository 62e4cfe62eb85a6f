"""Parsing and checking the options of the source and the sink, with a clear error for each invalid option."""

import difflib
import json
import uuid
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from relatum.common.limits import INTEGER_MAX, TIME_US_MAX
from relatum.errors import InvalidInput
from relatum.reading import Broker
from relatum_spark._sequence import EPOCH_MAX, check_names
from relatum_spark._servers import TIMEOUT_S, broker_of, database_url

EARLIEST: Final = -2
"""The first retained message, in JSON as for Spark's Kafka source."""

LATEST: Final = -1
"""The end of the stream, in JSON as for Spark's Kafka source."""

RECORDS_PER_PARTITION: Final = 100_000
"""Offsets in a partition: the cost of a task, about 30 ms, is small compared to reading that many."""

ROWS_MAX: Final = 10_000
"""Rows in an Arrow record batch, as in Spark's own batches; more rows are not faster."""

BYTES_MAX: Final = 4 << 20
"""Bytes of records in an Arrow record batch. Spark holds several batches; a column's limit is 2 GiB."""

POLL_TIMEOUT_MS: Final = 30_000
"""Milliseconds that a task waits for data from the broker."""

PRODUCER_NAME: Final = "relatum"
CONFIRM_TIMEOUT_MS: Final = 30_000
"""Milliseconds after which a task fails if messages are unconfirmed and no confirm arrives."""

IN_FLIGHT_MAX: Final = 10_000
"""Maximum unconfirmed messages: more are not faster, and each costs the broker memory."""

_BATCH_ONLY: Final = ("endingOffsets", "endingTimestamp", "endingOffsetsByTimestamp", "key", "keyValues")

_SIMILARITY_MIN: Final = 0.85
"""Minimum similarity at which an unknown option counts as misspelt: `startingOffset` does, `path` does not."""


@dataclass(frozen=True, slots=True)
class Place:
    """The place where a read begins or ends in each stream: an offset, or a time in milliseconds since 1970."""

    option: str
    number: int | Mapping[str, int]
    """One number for all streams, or numbers by stream."""
    is_moment: bool = False

    def check(self, streams: Collection[str]) -> None:
        """Raise `InvalidInput` unless numbers by stream are those of the streams that are read."""
        if not isinstance(self.number, int) and (wrong := self.number.keys() ^ set(streams)):
            raise InvalidInput(
                f"option {self.option} must name each stream that is read, and no other: correct "
                f"{', '.join(sorted(wrong))}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The common options of source and sink. Can be pickled; `repr` shows no credentials."""

    broker: Broker
    database: str | None = field(default=None, repr=False)
    """None if no option needs it."""
    streams: tuple[str, ...] = ()
    """Empty if a super stream is given."""
    super_stream: str | None = None
    poll_timeout_s: float = POLL_TIMEOUT_MS / 1000

    @property
    def timeout_s(self) -> float:
        """Seconds that a task waits for one answer, at most `poll_timeout_s`."""
        return min(TIMEOUT_S, self.poll_timeout_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceOptions(Options):
    """The options of a read; docs/spark.md describes each."""

    starting: Place = Place("startingOffsets", EARLIEST)
    ending: Place = Place("endingOffsets", LATEST)
    is_latest_allowed: bool = False
    """Whether a read begins at the end if no message was written since the starting time; if False, it fails."""
    fail_on_data_loss: bool = True
    max_offsets_per_trigger: int | None = None
    min_partitions: int | None = None
    max_records_per_partition: int = RECORDS_PER_PARTITION
    include_headers: bool = True
    include_value: bool = True
    keys: tuple[str, ...] = ()
    key: str | None = None
    key_values: tuple[object, ...] = ()
    batch_rows: int = ROWS_MAX
    batch_bytes: int = BYTES_MAX


def parse_options(options: Mapping[str, str], *, streaming: bool = False) -> SourceOptions:
    """Parse the options of a read; raises `InvalidInput`, or `ConfigurationError` without a valid server."""
    reader = _OptionReader(options)
    if streaming and (name := reader.first(*_BATCH_ONLY)):
        hint = "use `relatum_spark.Enrichment`" if name in ("key", "keyValues") else "leave it out"
        raise InvalidInput(f"option {name} is for batches only, not for a streaming query: {hint}")
    keys, key, values = reader.names("keys"), reader.text("key"), _key_values(reader)
    parsed = SourceOptions(
        **_common_fields(reader, "stream", "streams", "superStream", needs_database=bool(keys or key)),
        starting=_place(reader, "starting", LATEST if streaming else EARLIEST),
        ending=_place(reader, "ending", LATEST),
        is_latest_allowed=reader.one_of("startingOffsetsByTimestampStrategy", "error", "latest") == "latest",
        fail_on_data_loss=reader.flag("failOnDataLoss"),
        max_offsets_per_trigger=reader.number("maxOffsetsPerTrigger"),
        min_partitions=reader.number("minPartitions"),
        max_records_per_partition=reader.number("maxRecordsPerPartition", RECORDS_PER_PARTITION),
        include_headers=reader.flag("includeHeaders"),
        include_value=reader.flag("includeValue"),
        keys=keys,
        key=key,
        key_values=values,
        batch_rows=reader.number("batchRows", ROWS_MAX),
        batch_bytes=reader.number("batchBytes", BYTES_MAX),
    )
    reader.check_names()
    return parsed


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkOptions(Options):
    """The options of a write; docs/spark.md describes each."""

    routing_key: str | None
    key_columns: tuple[str, ...]
    producer_name: str
    write_id: str
    """Random if none is given; a streaming query uses its own id instead."""
    batch_id: int
    confirm_timeout_s: float
    in_flight_max: int


def parse_sink_options(options: Mapping[str, str], *, streaming: bool = False) -> SinkOptions:
    """Parse the options of a write, as `parse_options` does."""
    reader = _OptionReader(options)
    write_id = reader.text("writeId")
    parsed = SinkOptions(
        **_common_fields(reader, "stream", "superStream"),
        routing_key=reader.text("routingKey"),
        key_columns=reader.names("keyColumns"),
        producer_name=reader.text("producerName") or PRODUCER_NAME,
        write_id=write_id or str(uuid.uuid4()),
        batch_id=reader.number("batchId", 0, least=0, most=EPOCH_MAX),
        confirm_timeout_s=reader.number("confirmTimeoutMs", CONFIRM_TIMEOUT_MS) / 1000,
        in_flight_max=reader.number("maxInFlight", IN_FLIGHT_MAX),
    )
    reader.check_names()
    if (parsed.super_stream is None) != (parsed.routing_key is None):
        raise InvalidInput(
            "the options superStream and routingKey must be given together: routingKey names the column whose value"
            " selects each row's partition"
        )
    if streaming and (name := reader.first("writeId", "batchId")):
        raise InvalidInput(f"leave out the option {name}: a streaming query uses its own ids")
    if write_id is None and (reader.has("writeId") or reader.has("batchId")):
        raise InvalidInput("give the option writeId a text that identifies the write; batchId numbers its writes")
    check_names(parsed.producer_name, parsed.write_id)
    return parsed


class _OptionReader:
    """Options as Spark passes them, read by name, ignoring case."""

    def __init__(self, options: Mapping[str, str]) -> None:
        self._options = {name.lower(): value for name, value in options.items()}
        self._known: dict[str, str] = {}

    def check_names(self) -> None:
        """Raise `InvalidInput` for options that look misspelt. Ignore other unknown options: Spark adds its own."""
        for name in sorted(self._options.keys() - self._known.keys()):
            if similar := difflib.get_close_matches(name, self._known, 1, _SIMILARITY_MIN):
                raise InvalidInput(f"there is no option {name!r}; did you mean {self._known[similar[0]]}?")

    def has(self, name: str) -> bool:
        return name.lower() in self._options

    def text(self, name: str) -> str | None:
        """Return the value unchanged; None if it is missing or blank."""
        self._known[name.lower()] = name
        value = self._options.get(name.lower())
        return value if value is not None and value.strip() else None

    def first(self, *names: str) -> str | None:
        """Return the first name whose option is given."""
        return next((name for name in names if self.text(name) is not None), None)

    def number(self, name: str, default: Any = None, *, least: int = 1, most: int = INTEGER_MAX) -> Any:
        text = self.text(name)
        if text is None:
            return default
        if not text.strip().isdecimal() or not least <= int(text) <= most:
            raise InvalidInput(f"option {name}: {text!r} must be a whole number from {least} to {most}")
        return int(text)

    def one_of(self, name: str, *words: str) -> str:
        """Return one of the words, ignoring case; the first if the option is not given."""
        word = (self.text(name) or words[0]).strip().lower()
        if word not in words:
            raise InvalidInput(f"option {name}: {word!r} is not one of {', '.join(words)}")
        return word

    def flag(self, name: str) -> bool:
        return self.one_of(name, "true", "false") == "true"

    def names(self, option: str) -> tuple[str, ...]:
        """Return unique names, given separated by commas or as a JSON list."""
        text = self.text(option)
        if text is None:
            return ()
        is_json = text.lstrip().startswith("[")
        names = self.json(option, list, "a JSON list") if is_json else [part.strip() for part in text.split(",")]
        if not names or not all(isinstance(name, str) and name for name in names) or len(set(names)) != len(names):
            raise InvalidInput(f"option {option}: {text!r} is not a list of unique names")
        return tuple(names)

    def json(self, option: str, kind: type, description: str) -> Any:
        """Return a JSON value of a type; `description` names the type in the error."""
        text = self.text(option) or ""
        try:
            value = json.loads(text, object_pairs_hook=_unique_names)
        except ValueError as error:
            raise InvalidInput(f"option {option}: {text!r} is not {description}: {error}") from None
        if not isinstance(value, kind):
            raise InvalidInput(f"option {option}: {text!r} is not {description}")
        return value


def _unique_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name appears twice")
    return found


def _common_fields(reader: _OptionReader, *streams: str, needs_database: bool = False) -> dict[str, Any]:
    """Return the fields of `Options`; exactly one of the options in `streams` must be given."""
    found = [name for name in streams if reader.text(name) is not None]
    if len(found) != 1:
        description = " and ".join(found) + " are given" if found else "none is given"
        raise InvalidInput(f"give exactly one of the options {', '.join(streams)}; {description}")
    database, stream = reader.text("database"), reader.text("stream")
    names = reader.names("streams") if "streams" in streams else ()
    return {
        "broker": broker_of(reader.text("broker"), reader.text("streamUrl")),
        "database": database_url(database) if needs_database or database else None,
        "streams": names if stream is None else (stream,),
        "super_stream": reader.text("superStream"),
        "poll_timeout_s": reader.number("pollTimeoutMs", POLL_TIMEOUT_MS) / 1000,
    }


def _key_values(reader: _OptionReader) -> tuple[object, ...]:
    """Return the values of the key to look up; a composite key has tuples."""
    key, text = reader.text("key"), reader.text("keyValues")
    if (key is None) != (text is None):
        raise InvalidInput("the options key and keyValues (a JSON list of the key's values) must be given together")
    if text is None:
        return ()
    values: list[Any] = reader.json("keyValues", list, "a JSON list")
    if not values:
        raise InvalidInput("option keyValues is an empty list: give at least one value")
    return tuple(tuple(value) if isinstance(value, list) else value for value in values)


def _place(reader: _OptionReader, side: str, default: int) -> Place:
    """Return where a read begins (`side` "starting") or ends: by a time, else times by stream, else offsets."""
    by_moment, by_moments, by_offset = (f"{side}{name}" for name in ("Timestamp", "OffsetsByTimestamp", "Offsets"))
    moment = reader.number(by_moment, least=0, most=TIME_US_MAX // 1000)
    moments, offsets = reader.text(by_moments), reader.text(by_offset)
    if moment is not None:
        return Place(by_moment, moment, is_moment=True)
    if moments is not None:
        return Place(by_moments, _numbers(reader, by_moments, 0, TIME_US_MAX // 1000), is_moment=True)
    if offsets is None:
        return Place(by_offset, default)
    words = {"latest": LATEST} | ({"earliest": EARLIEST} if side == "starting" else {})
    if (word := offsets.strip().lower()) in words:
        return Place(by_offset, words[word])
    numbers = _numbers(reader, by_offset, EARLIEST)
    if side == "ending" and EARLIEST in numbers.values():
        raise InvalidInput(f"option {by_offset}: {offsets!r} has -2, the start: give an offset, or -1 for the end")
    return Place(by_offset, numbers)


def _numbers(reader: _OptionReader, option: str, least: int, most: int = INTEGER_MAX) -> dict[str, int]:
    """Return numbers by stream, from JSON such as `{"orders": 120}`."""
    numbers: dict[str, int] = reader.json(option, dict, 'JSON like {"orders": 0}')
    for stream, number in numbers.items():
        if type(number) is not int or not least <= number <= most:
            wanted = f"a whole number from {least} to {most}"
            raise InvalidInput(f"option {option}: {number!r} of the stream {stream!r} must be {wanted}")
    return numbers
