"""The options of the source, read into values: every one checked, with one clear error each."""

import difflib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal, cast

from relatum.errors import InvalidInput
from relatum.limits import INTEGER_MAX, TIME_US_MAX
from relatum_spark._offsets import EARLIEST, parse_moments, parse_offsets
from relatum_spark._where import Broker, database_url

TLS_OPTIONS: Final = ("tlsCaFile", "tlsCertificateFile", "tlsKeyFile", "tlsKeyPassword", "authMechanism")

_BROKER_OPTIONS: Final = ("broker", "streamUrl", *TLS_OPTIONS, "pollTimeoutMs")
READ_OPTIONS: Final = (
    *_BROKER_OPTIONS,
    "database",
    "stream",
    "streams",
    "superStream",
    "startingOffsets",
    "endingOffsets",
    "startingTimestamp",
    "endingTimestamp",
    "startingOffsetsByTimestamp",
    "endingOffsetsByTimestamp",
    "startingOffsetsByTimestampStrategy",
    "failOnDataLoss",
    "maxOffsetsPerTrigger",
    "minPartitions",
    "maxRecordsPerPartition",
    "includeHeaders",
    "includeValue",
    "keys",
    "key",
    "keyValues",
    "batchRows",
    "batchBytes",
)
RECORDS_PER_PARTITION: Final = 100_000
"""Offsets in one partition: a task costs about 30 ms, which reading that many makes small."""

ROWS_MAX: Final = 10_000
"""Rows of an Arrow record batch, as of Spark's own: more make it no faster."""

BYTES_MAX: Final = 4 << 20
"""Bytes of records in an Arrow record batch. Spark holds several; a column of one ends at 2 GiB."""

POLL_TIMEOUT_MS: Final = 30_000
"""Milliseconds within which a task must get something."""

_BATCH_ALONE: Final = ("endingOffsets", "endingTimestamp", "endingOffsetsByTimestamp", "key", "keyValues")

_ALIKE: Final = 0.85
"""From which likeness on an unknown option counts as one of ours misspelt: `startingOffset` does, `path` does not."""

TIMEOUT_S_MAX: Final = 10.0
"""Seconds a task waits for one answer at most; `pollTimeoutMs` shortens it, so that connecting ends in time too."""


@dataclass(frozen=True, slots=True)
class Earliest:
    """The first message retained."""


@dataclass(frozen=True, slots=True)
class Latest:
    """The end of the stream when the query begins."""


@dataclass(frozen=True, slots=True)
class Offsets:
    """The next offset by stream; -2 for the first, -1 for the end."""

    by_stream: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Moment:
    """The first message written at or after a moment, milliseconds since 1970."""

    ms: int


@dataclass(frozen=True, slots=True)
class Moments:
    """The first message written at or after a moment by stream, milliseconds since 1970."""

    by_stream: Mapping[str, int]


Place = Earliest | Latest | Offsets | Moment | Moments
"""Where a read begins or ends."""


@dataclass(frozen=True, slots=True)
class SourceOptions:
    """The options of a read. Can be pickled; `repr` shows no credentials.

    Attributes:
        broker: Where the streams are.
        database: PostgreSQL's URL; None where no option needs it.
        streams: The streams named; empty where a super stream is.
        super_stream: The super stream; None where streams are named.
        starting: Where to begin; earliest for a batch, latest for a stream unless said otherwise.
        ending: Where to end; a batch's alone.
        starting_strategy: What to do where nothing was written at or after the starting moment.
        fail_on_data_loss: True ends with an error where offsets are lost; False logs and goes on.
        max_offsets_per_trigger: Offsets in one micro-batch; None for all there are.
        min_partitions: Partitions wanted at least; None for one a stream.
        max_records_per_partition: Offsets in one partition at most.
        include_headers: With the columns `headers` and `properties`.
        include_value: With the column `value`.
        keys: Names of the keys that become columns.
        key: The key to look up; None for none.
        key_values: Its values, as given.
        poll_timeout_s: Seconds within which a task must get something.
        batch_rows: Rows of one Arrow batch at most.
        batch_bytes: Bytes of records in one Arrow batch at most, unless one record is larger.
    """

    broker: Broker
    streams: tuple[str, ...]
    super_stream: str | None
    starting: Place
    ending: Place
    database: str | None = field(default=None, repr=False)
    starting_strategy: Literal["error", "latest"] = "error"
    fail_on_data_loss: bool = True
    max_offsets_per_trigger: int | None = None
    min_partitions: int | None = None
    max_records_per_partition: int = RECORDS_PER_PARTITION
    include_headers: bool = True
    include_value: bool = True
    keys: tuple[str, ...] = ()
    key: str | None = None
    key_values: tuple[object, ...] = ()
    poll_timeout_s: float = POLL_TIMEOUT_MS / 1000
    batch_rows: int = ROWS_MAX
    batch_bytes: int = BYTES_MAX


def broker_of(options: Mapping[str, str]) -> Broker:
    """The broker of `broker`, `streamUrl`, `pollTimeoutMs` and `TLS_OPTIONS`.

    Args:
        options: As Spark gives them; names in any case.

    Raises:
        ConfigurationError: no broker is named, its URL cannot be read, or has no TLS where options of TLS are given.
        InvalidInput: `pollTimeoutMs` is no time.
    """
    given = Given(options)
    broker = Broker.of(given.text("broker"), given.text("streamUrl"))
    broker = replace(
        broker,
        tls_ca_file=given.text("tlsCaFile"),
        tls_certificate_file=given.text("tlsCertificateFile"),
        tls_key_file=given.text("tlsKeyFile"),
        tls_key_password=given.text("tlsKeyPassword"),
        auth_mechanism=given.text("authMechanism"),
        timeout_s=min(TIMEOUT_S_MAX, poll_timeout_s(given)),
    )
    broker.logged_in()
    return broker


def parse_options(options: Mapping[str, str], *, streaming: bool = False) -> SourceOptions:
    """The options of a read.

    Args:
        options: As Spark gives them; names in any case. What is no option of ours is passed over, unless it looks like
            one misspelt: Spark adds its own.
        streaming: For a streaming query, which begins at the end unless told otherwise and has no end.

    Raises:
        ConfigurationError: no broker or database is named, or a URL cannot be read.
        InvalidInput: an option is misspelt, its value cannot be one, or two contradict each other.
    """
    given = Given(options)
    given.check_names(READ_OPTIONS)
    streams, super_stream = _streams(given)
    starting = _place(given, "starting", Latest() if streaming else Earliest())
    ending = _place(given, "ending", Latest())
    if streaming and (name := given.first(*_BATCH_ALONE)):
        instead = "; `relatum_spark.Enrichment` looks up in each micro-batch" if name in ("key", "keyValues") else ""
        raise InvalidInput(f"option {name}: a streaming query has none; it is a batch's alone{instead}")
    keys, key, values = names_of(given, "keys"), given.text("key"), _key_values(given)
    needs_database = bool(keys or key or given.text("database"))
    return SourceOptions(
        broker=broker_of(options),
        database=database_url(given.text("database")) if needs_database else None,
        streams=streams,
        super_stream=super_stream,
        starting=starting,
        ending=ending,
        starting_strategy=cast(
            Literal["error", "latest"],
            given.one_of("startingOffsetsByTimestampStrategy", ("error", "latest"), default="error"),
        ),
        fail_on_data_loss=given.flag("failOnDataLoss"),
        max_offsets_per_trigger=given.number("maxOffsetsPerTrigger"),
        min_partitions=given.number("minPartitions"),
        max_records_per_partition=given.number("maxRecordsPerPartition", default=RECORDS_PER_PARTITION),
        include_headers=given.flag("includeHeaders"),
        include_value=given.flag("includeValue"),
        keys=keys,
        key=key,
        key_values=values,
        poll_timeout_s=poll_timeout_s(given),
        batch_rows=given.number("batchRows", default=ROWS_MAX),
        batch_bytes=given.number("batchBytes", default=BYTES_MAX),
    )


class Given:
    """The options given, by their names in small letters."""

    def __init__(self, options: Mapping[str, str]) -> None:
        self._options = {name.lower(): value for name, value in options.items()}

    def check_names(self, names: Iterable[str]) -> None:
        """Refuse a name that is nearly one of ours.

        Args:
            names: Ours.
        """
        known = {name.lower(): name for name in names}
        for name in sorted(self._options.keys() - known.keys()):
            if alike := difflib.get_close_matches(name, known, 1, _ALIKE):
                raise InvalidInput(f"there is no option {name!r}; is {known[alike[0]]} meant?")

    def text(self, name: str) -> str | None:
        """The value as it is; None where it is not given or blank."""
        value = self._options.get(name.lower())
        return value if value is not None and value.strip() else None

    def first(self, *names: str) -> str | None:
        """The first of the names that is given."""
        return next((name for name in names if self.text(name) is not None), None)

    def number(self, name: str, *, default: Any = None) -> Any:
        """A whole number from 1 on."""
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

    def flag(self, name: str) -> bool:
        """True or false; true where it is not given."""
        return self.one_of(name, ("true", "false"), default="true") == "true"

    def one_of(self, name: str, choices: Sequence[str], *, default: str) -> str:
        """One of some words, in any case."""
        text = self.text(name)
        if text is None:
            return default
        if text.strip().lower() not in choices:
            raise InvalidInput(f"option {name}: {text!r} is none of {', '.join(choices)}")
        return text.strip().lower()


def _streams(given: Given) -> tuple[tuple[str, ...], str | None]:
    """The streams named, or the super stream."""
    found = [name for name in ("stream", "streams", "superStream") if given.text(name) is not None]
    if len(found) != 1:
        what = " and ".join(found) + " are both given" if found else "none is given"
        raise InvalidInput(f"which stream? Give one of the options stream, streams and superStream; {what}")
    text = given.text(found[0]) or ""
    if found[0] == "superStream":
        return (), text
    return ((text,) if found[0] == "stream" else names_of(given, "streams")), None


def names_of(given: Given, option: str) -> tuple[str, ...]:
    """Names, separated by commas or as a JSON list, each once."""
    text = given.text(option)
    if text is None:
        return ()
    names = _json_list(text, option) if text.lstrip().startswith("[") else [part.strip() for part in text.split(",")]
    if not names or not all(isinstance(name, str) and name for name in names) or len(set(names)) != len(names):
        raise InvalidInput(f"option {option}: {text!r} is not a list of names, each there once")
    return tuple(names)


def _json_list(text: str, option: str) -> list[Any]:
    try:
        values = json.loads(text)
    except ValueError as error:
        raise InvalidInput(f"option {option}: {text!r} is not a JSON list: {error}") from None
    if not isinstance(values, list):
        raise InvalidInput(f"option {option}: {text!r} is not a JSON list")
    return values


def _key_values(given: Given) -> tuple[object, ...]:
    """The values of the key to look up: a composite's are lists."""
    key, text = given.text("key"), given.text("keyValues")
    if (key is None) != (text is None):
        raise InvalidInput("the options key and keyValues come together: a key's name, and a JSON list of its values")
    if text is None:
        return ()
    values = _json_list(text, "keyValues")
    if not values:
        raise InvalidInput("option keyValues: the list is empty")
    return tuple(tuple(value) if isinstance(value, list) else value for value in values)


def _place(given: Given, side: Literal["starting", "ending"], default: Place) -> Place:
    """Where a read begins or ends: by moment, by moment a stream, by offset, the first of these that is given."""
    moment = f"{side}Timestamp"
    if (text := given.text(moment)) is not None:
        return Moment(_moment_ms(text, moment))
    moments = f"{side}OffsetsByTimestamp"
    if (text := given.text(moments)) is not None:
        return Moments(parse_moments(text, option=moments))
    option = f"{side}Offsets"
    text = given.text(option)
    if text is None:
        return default
    word = text.strip().lower()
    if word == "latest":
        return Latest()
    if word == "earliest" and side == "starting":
        return Earliest()
    offsets = parse_offsets(text, option=option)
    if side == "ending" and EARLIEST in offsets.values():
        raise InvalidInput(f"option {option}: {text!r} ends at -2, the beginning")
    return Offsets(offsets)


def _moment_ms(text: str, option: str) -> int:
    if not text.strip().isdecimal() or int(text) > TIME_US_MAX // 1000:
        raise InvalidInput(f"option {option}: {text!r} is not a moment in milliseconds since 1970")
    return int(text)


def poll_timeout_s(given: Given) -> float:
    """Seconds of the option `pollTimeoutMs`."""
    return cast(int, given.number("pollTimeoutMs", default=POLL_TIMEOUT_MS)) / 1000
