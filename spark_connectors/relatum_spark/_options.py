"""The options of the source, read into values: every one checked, with one clear error each."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from relatum_spark._broker import Broker


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
        push_filters: Whether filters of the query are taken over; "auto" as the session was set at `register`.
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
    max_records_per_partition: int = 100_000
    include_headers: bool = True
    include_value: bool = True
    keys: tuple[str, ...] = ()
    key: str | None = None
    key_values: tuple[object, ...] = ()
    poll_timeout_s: float = 30.0
    batch_rows: int = 10_000
    batch_bytes: int = 4 << 20
    push_filters: Literal["auto", "true", "false"] = "auto"


def broker_of(options: Mapping[str, str]) -> Broker:
    """The broker of the options `broker`, `streamUrl`, `tlsCaFile`, `tlsCertificateFile` and `tlsKeyFile`."""
    raise NotImplementedError


def parse_options(options: Mapping[str, str], *, streaming: bool = False) -> SourceOptions:
    """The options of a read."""
    raise NotImplementedError
