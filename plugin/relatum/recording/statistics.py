"""The metrics of a process's recorders: progress of each stream, what was recorded, and how long it took."""

import collections
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Final

from relatum.metrics import Counter, Distribution, MaxGauge, MinGauge, Observed, PerLabel, reported
from relatum.recording.batch import Batch

LATELY_S: Final = 86_400
"""Seconds for which a hole is reported after it was noticed: a day, so that no alert is missed or stays forever."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedStream:
    """The statistics of one stream of a recorder. None means unknown.

    Attributes:
        is_recording: Whether this recorder records it now; only one of the recorders that share it does.
        recorded_offset: The last recorded offset; -1 for none.
        stream_offset: The offset of the stream's last message when last asked; -1 if it is empty.
        lag_offsets: Offsets between the two.
        lag_s: Age of the oldest unrecorded message, an upper bound, in seconds; None if another process records it.
        hole_offsets: Offsets lost to retention before they were recorded, as this process noticed within a day.
        messages: Messages recorded.
        rows: Rows written.
        skipped: Values that could not be recorded, by reason.
        reconnects: Restarts after errors.
    """

    is_recording: Annotated[bool, MaxGauge("relatum_recording", "Whether this process records the stream now")]
    recorded_offset: Annotated[int | None, MaxGauge("relatum_recorded_offset", "Last recorded offset")]
    stream_offset: Annotated[int | None, MaxGauge("relatum_stream_offset", "Offset of the last message in the stream")]
    lag_offsets: Annotated[int | None, MaxGauge("relatum_lag_offsets", "Unrecorded offsets up to the stream's end")]
    lag_s: Annotated[
        float | None, MaxGauge("relatum_lag_seconds", "Age of the oldest unrecorded message, or an upper bound")
    ]
    hole_offsets: Annotated[
        int,
        MaxGauge(
            "relatum_hole_offsets", "Offsets that retention dropped before they were recorded, noticed in the last day"
        ),
    ]
    messages: Annotated[int, Counter("relatum_messages_total", "Messages recorded")]
    rows: Annotated[int, Counter("relatum_rows_total", "Rows written")]
    skipped: Annotated[Mapping[str, int], Counter("relatum_skipped_values_total", "Values not recorded", by="reason")]
    reconnects: Annotated[int, Counter("relatum_reconnects_total", "Restarts of recording after errors")]


@reported()
@dataclass(frozen=True, slots=True, kw_only=True)
class RecorderStatistics:
    """A recorder's statistics.

    Attributes:
        streams: Each stream that it was given to record, by name.
        batch_s: Durations of transactions, in seconds.
        is_broker_up: Whether the broker answered the last time it was asked. None if there was no reason to ask yet.
        is_database_up: The same for PostgreSQL.
    """

    streams: Annotated[Mapping[str, RecordedStream], PerLabel("stream")]
    batch_s: Annotated[Observed, Distribution("relatum_batch_seconds", "Duration of a transaction")]
    is_broker_up: Annotated[bool | None, MinGauge("relatum_broker_up", "Whether the broker answered its last request")]
    is_database_up: Annotated[
        bool | None, MinGauge("relatum_database_up", "Whether PostgreSQL answered its last request")
    ]


class Progress:
    """One process's progress with one stream. Times are seconds since 1970.

    The lag is the age of the oldest message known to be unrecorded. If no such message is known, because no server
    answered or was asked, the lag counts from the last moment at which everything was recorded: an upper bound, which
    grows until more is known. Lack of knowledge alone never makes it 0.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._unwritten: Callable[[], float | None] | None = None
        self._whole_at = clock()
        """The last moment at which everything was recorded; at first, when this object was created."""
        self._lacking: tuple[int, float] | None = None
        """An unrecorded offset, and when its message was written."""
        self.is_standby = False
        """Whether another process recorded the stream when the database was last asked; that one reports the lag."""
        self.recorded: int | None = None
        """The last offset known to be recorded; -1 if there is none, None if unknown."""
        self._holes: list[tuple[float, int]] = []
        self.end: int | None = None
        """The offset of the stream's last message when last asked; -1 if it is empty."""
        self.messages = self.rows = self.reconnects = 0
        self.skipped: collections.Counter[str] = collections.Counter()

    def statistics(self) -> RecordedStream:
        """Return the stream's statistics."""
        with self._lock:
            now, recorded, end = self._clock(), self.recorded, self.end
            self._holes = [hole for hole in self._holes if hole[0] > now - LATELY_S]
            return RecordedStream(
                is_recording=self._unwritten is not None,
                recorded_offset=recorded,
                stream_offset=end,
                lag_offsets=None if self.is_standby or end is None or recorded is None else max(0, end - recorded),
                lag_s=None if self.is_standby else max(0.0, now - self._oldest(now)),
                hole_offsets=sum(offsets for _, offsets in self._holes),
                messages=self.messages,
                rows=self.rows,
                skipped=dict(self.skipped),
                reconnects=self.reconnects,
            )

    def count(self, batch: Batch) -> None:
        """Count a batch that was committed."""
        self.messages += batch.messages
        self.rows += batch.rows
        for (_, _, reason), count in batch.skips.items():
            self.skipped[reason] += count

    def begin(self, recorded: int, unwritten: Callable[[], float | None]) -> None:
        """Note that the stream is recorded; `unwritten` returns when the oldest uncommitted message was written."""
        with self._lock:
            if self._unwritten is None:
                self.is_standby, self.recorded, self._unwritten, self.end = False, recorded, unwritten, None

    def stop(self) -> None:
        """Note that recording has ended, for any reason."""
        with self._lock:
            unwritten, self._unwritten = self._unwritten, None
            oldest = unwritten() if unwritten is not None else None
            if oldest is not None and self.recorded is not None and self._lacking is None:
                self._lacking = self.recorded + 1, oldest

    def stand_by(self) -> None:
        """Note that another process records the stream, and drop what this process knew of it."""
        with self._lock:
            self.is_standby, self.recorded, self.end, self._lacking = True, None, None, None
            self._whole_at = self._clock()

    def lost(self, offsets: int) -> None:
        """Note a hole of this many offsets."""
        if offsets:
            with self._lock:
                self._holes.append((self._clock(), offsets))

    def written(self, recorded: int, at: float) -> None:
        """Note that everything up to an offset is recorded, and when its message was written."""
        with self._lock:
            self.recorded = recorded
            self._whole_at = max(self._whole_at, at)
            if self._lacking is not None and recorded >= self._lacking[0]:
                self._lacking = None

    def read(self, offset: int) -> None:
        """Note that the stream reaches an offset. Lock-free: it is called for each chunk."""
        if self.end is None or self.end < offset:
            self.end = offset

    def show(self, end: int | None) -> None:
        """Note where the stream ends now; None if it is empty or does not exist."""
        with self._lock:
            self.end = -1 if end is None else end
            if self.end <= (-1 if self.recorded is None else self.recorded):
                self._whole_at, self._lacking = self._clock(), None

    def _oldest(self, now: float) -> float:
        """Return when the oldest unrecorded message was written, or a time before that; `now` if there is none."""
        if self._lacking is not None:
            return self._lacking[1]
        if self._unwritten is None:
            return self._whole_at
        read = self._unwritten()
        if read is not None:
            return read
        is_behind = self.end is None or self.recorded is None or self.end > self.recorded
        return self._whole_at if is_behind else now
