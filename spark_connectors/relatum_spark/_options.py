"""The options of the source and the sink, parsed and checked: one clear error for each that is wrong."""

import difflib
import json
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from relatum.errors import InvalidInput
from relatum.limits import INTEGER_MAX, TIME_US_MAX
from relatum.reading import Broker, StreamReader
from relatum_spark._sequence import EPOCH_MAX, check_names
from relatum_spark._where import TIMEOUT_S, broker_of, database_url, open_reader

EARLIEST: Final = -2
"""The first message retained, in JSON as in Kafka's."""

LATEST: Final = -1
"""The end of the stream, in JSON as in Kafka's."""

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

_BATCH_ALONE: Final = ("endingOffsets", "endingTimestamp", "endingOffsetsByTimestamp", "key", "keyValues")

_ALIKE: Final = 0.85
"""From which likeness on an unknown option counts as one of ours misspelt: `startingOffset` does, `path` does not."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a read begins or ends in each stream: at an offset, or at a moment in milliseconds since 1970."""

    option: str
    number: int | Mapping[str, int]
    """One for all streams, or one by stream."""
    is_moment: bool = False

    def of(self, stream: str) -> int:
        """Return the offset or moment of a stream; raises `InvalidInput` where the option leaves the stream out."""
        if isinstance(self.number, int):
            return self.number
        if stream not in self.number:
            raise InvalidInput(f"option {self.option} says nothing of the stream {stream!r}")
        return self.number[stream]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What source and sink share. Can be pickled; `repr` shows no credentials."""

    broker: Broker
    database: str | None = field(default=None, repr=False)
    """None where no option needs it."""
    super_stream: str | None = None
    poll_timeout_s: float = POLL_TIMEOUT_MS / 1000

    @property
    def timeout_s(self) -> float:
        """Seconds a task waits for one answer: no longer than it may wait in all."""
        return min(TIMEOUT_S, self.poll_timeout_s)

    def open_reader(self) -> StreamReader:
        """Open a connected reader. Errors as of `StreamReader.open`."""
        return open_reader(self.broker, self.timeout_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceOptions(Options):
    """The options of a read; docs/spark.md describes each."""

    streams: tuple[str, ...] = ()
    """Empty where a super stream is given."""
    starting: Place = Place("startingOffsets", EARLIEST)
    ending: Place = Place("endingOffsets", LATEST)
    is_latest_allowed: bool = False
    """Begin at the end where nothing was written since the starting moment; else that is an error."""
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
    """Parse the options of a read, as Spark gives them.

    Raises:
        ConfigurationError: no broker or database is named, or a URL cannot be read.
        InvalidInput: an option is misspelt, its value cannot be one, or two contradict each other.
    """
    given = _Given(options)
    if streaming and (name := given.first(*_BATCH_ALONE)):
        instead = "; `relatum_spark.Enrichment` looks up in each micro-batch" if name in ("key", "keyValues") else ""
        raise InvalidInput(f"option {name}: a streaming query has none; it is a batch's alone{instead}")
    keys, key, values, database = given.names("keys"), given.text("key"), _key_values(given), given.text("database")
    streams, super_stream = _streams(given)
    parsed = SourceOptions(
        broker=broker_of(given.text("broker"), given.text("streamUrl")),
        database=database_url(database) if keys or key or database else None,
        streams=streams,
        super_stream=super_stream,
        starting=_place(given, "starting", LATEST if streaming else EARLIEST),
        ending=_place(given, "ending", LATEST),
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
        poll_timeout_s=given.number("pollTimeoutMs", POLL_TIMEOUT_MS) / 1000,
        batch_rows=given.number("batchRows", ROWS_MAX),
        batch_bytes=given.number("batchBytes", BYTES_MAX),
    )
    given.check_names()
    return parsed


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkOptions(Options):
    """The options of a write; docs/spark.md describes each."""

    stream: str | None
    """None where a super stream is given."""
    routing_key: str | None
    key_columns: tuple[str, ...]
    producer_name: str
    write_id: str
    """A random one where none is given; a streaming query uses its own id instead."""
    batch_id: int
    confirm_timeout_s: float
    in_flight_max: int


def parse_sink_options(options: Mapping[str, str], *, streaming: bool = False) -> SinkOptions:
    """Parse the options of a write. Errors as of `parse_options`."""
    given = _Given(options)
    write_id, batch_id, database = given.text("writeId"), given.text("batchId"), given.text("database")
    parsed = SinkOptions(
        broker=broker_of(given.text("broker"), given.text("streamUrl")),
        database=None if database is None else database_url(database),
        stream=given.text("stream"),
        super_stream=given.text("superStream"),
        routing_key=given.text("routingKey"),
        key_columns=given.names("keyColumns"),
        producer_name=given.text("producerName") or PRODUCER_NAME,
        write_id=write_id or str(uuid.uuid4()),
        batch_id=given.number("batchId", 0, least=0, most=EPOCH_MAX),
        confirm_timeout_s=given.number("confirmTimeoutMs", CONFIRM_TIMEOUT_MS) / 1000,
        in_flight_max=given.number("maxInFlight", IN_FLIGHT_MAX),
        poll_timeout_s=given.number("pollTimeoutMs", POLL_TIMEOUT_MS) / 1000,
    )
    given.check_names()
    if (parsed.stream is None) == (parsed.super_stream is None):
        raise InvalidInput("which stream? Give one of the options stream and superStream")
    if (parsed.super_stream is None) != (parsed.routing_key is None):
        raise InvalidInput(
            "the options superStream and routingKey come together: routingKey names the column whose value says which"
            " stream of the super stream a row goes to"
        )
    if streaming and (name := given.first("writeId", "batchId")):
        raise InvalidInput(f"option {name}: a streaming query has ids of its own")
    if write_id is None and given.has("writeId"):
        raise InvalidInput("option writeId is empty: nothing would be recognised as written before")
    if batch_id is not None and write_id is None:
        raise InvalidInput("option batchId counts the writes of one writeId: give that too")
    check_names(parsed.producer_name, parsed.write_id)
    return parsed


class _Given:
    """Options as Spark gives them, read by name in any case."""

    def __init__(self, options: Mapping[str, str]) -> None:
        self._options = {name.lower(): value for name, value in options.items()}
        self._known: dict[str, str] = {}

    def check_names(self) -> None:
        """Refuse what looks like one of the options read, misspelt. Others are passed over: Spark adds its own."""
        for name in sorted(self._options.keys() - self._known.keys()):
            if alike := difflib.get_close_matches(name, self._known, 1, _ALIKE):
                raise InvalidInput(f"there is no option {name!r}; is {self._known[alike[0]]} meant?")

    def has(self, name: str) -> bool:
        return name.lower() in self._options

    def text(self, name: str) -> str | None:
        """Return the value as it is; None where it is not given or blank."""
        self._known[name.lower()] = name
        value = self._options.get(name.lower())
        return value if value is not None and value.strip() else None

    def first(self, *names: str) -> str | None:
        """Return the first of the names that is given."""
        return next((name for name in names if self.text(name) is not None), None)

    def number(self, name: str, default: Any = None, *, least: int = 1, most: int = INTEGER_MAX) -> Any:
        """Return a whole number."""
        text = self.text(name)
        if text is None:
            return default
        if not text.strip().isdecimal() or not least <= int(text) <= most:
            raise InvalidInput(f"option {name}: {text!r} is not a whole number from {least} on")
        return int(text)

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


def _streams(given: _Given) -> tuple[tuple[str, ...], str | None]:
    """Return the streams named, or the super stream."""
    stream, streams, super_stream = given.text("stream"), given.names("streams"), given.text("superStream")
    found = [name for name in ("stream", "streams", "superStream") if given.text(name) is not None]
    if len(found) != 1:
        what = " and ".join(found) + " are both given" if found else "none is given"
        raise InvalidInput(f"which stream? Give one of the options stream, streams and superStream; {what}")
    return streams if stream is None else (stream,), super_stream


def _key_values(given: _Given) -> tuple[object, ...]:
    """Return the values of the key to look up; a composite's are tuples."""
    key, text = given.text("key"), given.text("keyValues")
    if (key is None) != (text is None):
        raise InvalidInput("the options key and keyValues come together: a key's name, and a JSON list of its values")
    if text is None:
        return ()
    values = given.json_list("keyValues")
    if not values:
        raise InvalidInput("option keyValues: the list is empty")
    return tuple(tuple(value) if isinstance(value, list) else value for value in values)


# --- where a read begins and ends -------------------------------------------------------------------------


def _place(given: _Given, side: str, default: int) -> Place:
    """Read where a read begins (`side` "starting") or ends ("ending").

    A moment for all streams goes before moments by stream, and those go before offsets, as in Kafka's source.
    """
    by_moment, by_moments, by_offset = (f"{side}{name}" for name in ("Timestamp", "OffsetsByTimestamp", "Offsets"))
    moment = given.number(by_moment, least=0, most=TIME_US_MAX // 1000)
    moments, offsets = given.text(by_moments), given.text(by_offset)
    if moment is not None:
        return Place(by_moment, moment, is_moment=True)
    if moments is not None:
        return Place(by_moments, _numbers(moments, by_moments, 0), is_moment=True)
    if offsets is None:
        return Place(by_offset, default)
    words = {"latest": LATEST} | ({"earliest": EARLIEST} if side == "starting" else {})
    if (word := offsets.strip().lower()) in words:
        return Place(by_offset, words[word])
    numbers = _numbers(offsets, by_offset, EARLIEST)
    if side == "ending" and EARLIEST in numbers.values():
        raise InvalidInput(f"option {by_offset}: {offsets!r} ends at -2, the beginning")
    return Place(by_offset, numbers)


def _numbers(text: str, option: str, least: int) -> dict[str, int]:
    """Read numbers by stream from JSON such as `{"orders": 120}`."""
    try:
        numbers = json.loads(text, object_pairs_hook=_each_once)
    except json.JSONDecodeError:
        raise InvalidInput(f'option {option}: {text!r} is none of its words, nor JSON like {{"orders": 0}}') from None
    except ValueError as error:
        raise InvalidInput(f"option {option}: {error}") from None
    if not isinstance(numbers, dict):
        raise InvalidInput(f"option {option}: {text!r} is not a JSON object of numbers by stream")
    for stream, number in numbers.items():
        if type(number) is not int or not least <= number <= INTEGER_MAX:
            raise InvalidInput(
                f"option {option}: {number!r} of the stream {stream!r} must be a whole number >= {least}"
            )
    return numbers


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a stream is named twice")
    return found
