"""What a recorder tells of itself."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from relatum.metrics import Counter, Distribution, Each, Greatest, Least, Observed, reported


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedStream:
    """One stream that a recorder was told to record. What is not known now is None.

    Attributes:
        is_recording: Whether this recorder records it now: of those that share it, one does.
        recorded_offset: The last recorded offset; -1 for none.
        stream_offset: The offset of the stream's last message, as it was seen last; -1 where it is empty.
        lag_offsets: Offsets between the two.
        lag_s: Age of the oldest message that is not recorded, at most, in seconds; None where another records it.
        hole_offsets: Offsets lost to retention before they were recorded, as noticed within a day.
        messages: Messages recorded.
        rows: Rows written.
        skipped: Values that could not be recorded, by reason.
        reconnects: Sessions begun again after errors.
    """

    is_recording: Annotated[bool, Greatest("relatum_recording", "Whether this process records the stream now")]
    recorded_offset: Annotated[int | None, Greatest("relatum_recorded_offset", "Last recorded offset")]
    stream_offset: Annotated[int | None, Greatest("relatum_stream_offset", "Offset of the last message in the stream")]
    lag_offsets: Annotated[
        int | None, Greatest("relatum_lag_offsets", "Offsets between the stream's end and the last recorded")
    ]
    lag_s: Annotated[float | None, Greatest("relatum_lag_seconds", "Age of the oldest unrecorded message, at most")]
    hole_offsets: Annotated[
        int,
        Greatest(
            "relatum_hole_offsets",
            "Offsets lost to retention before they were recorded, as noticed within a day",
        ),
    ]
    messages: Annotated[int, Counter("relatum_messages_total", "Messages recorded")]
    rows: Annotated[int, Counter("relatum_rows_total", "Rows written")]
    skipped: Annotated[Mapping[str, int], Counter("relatum_skipped_values_total", "Values not recorded", by="reason")]
    reconnects: Annotated[int, Counter("relatum_reconnects_total", "Sessions begun again after errors")]


@reported("recorder")
@dataclass(frozen=True, slots=True, kw_only=True)
class RecorderStatistics:
    """What a recorder has counted, and what holds now.

    Attributes:
        streams: Each stream it was told to record, by name, from the moment it is named.
        batch_s: Seconds that transactions took.
        is_broker_up: Whether the broker answered the last time it was asked.
        is_database_up: Whether PostgreSQL answered the last time it was asked.
    """

    streams: Annotated[Mapping[str, RecordedStream], Each("stream")]
    batch_s: Annotated[Observed, Distribution("relatum_batch_seconds", "Time of one transaction")]
    is_broker_up: Annotated[bool, Least("relatum_broker_up", "Whether the broker answered the last time it was asked")]
    is_database_up: Annotated[
        bool, Least("relatum_database_up", "Whether PostgreSQL answered the last time it was asked")
    ]
