"""The metrics of a process's recorders: each stream's progress, and the durations of transactions."""

import collections
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Final

from relatum.metrics import Counter, Distribution, MaxGauge, MinGauge, Observed, PerLabel, reported
from relatum.recording.batch import Batch

HOLE_REPORT_S: Final = 86_400
"""Seconds for which a hole is reported after its detection: a day, so that an alert is seen, but does not stay."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedStream:
    """The statistics of one stream of a recorder. None means unknown.

    Attributes:
        is_recording: Whether this recorder records the stream now; of the recorders that share a stream, one does.
        recorded_offset: The last recorded offset; -1 if there is none.
        stream_offset: The last known offset of the stream's last message; -1 if the stream is empty.
        lag_offsets: `stream_offset` minus `recorded_offset`, at least 0.
        lag_s: Age of the oldest unrecorded message in seconds, or an upper bound; None if another process records it.
        hole_offsets: Offsets that retention dropped unrecorded, in holes that this process detected in the last day.
        messages: The number of messages recorded.
        rows: The number of rows written.
        skipped: The number of values that could not be recorded, by reason.
        reconnects: The number of restarts after errors.
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
        streams: The statistics of each stream to record, by name.
        batch_s: Durations of transactions, in seconds.
        is_broker_up: Whether the broker answered the last query; None before the first query, if there is no stream.
        is_database_up: Whether PostgreSQL answered the last query; None before the first query, if there is no stream.
    """

    streams: Annotated[Mapping[str, RecordedStream], PerLabel("stream")]
    batch_s: Annotated[Observed, Distribution("relatum_batch_seconds", "Duration of a transaction")]
    is_broker_up: Annotated[bool | None, MinGauge("relatum_broker_up", "Whether the broker answers requests")]
    is_database_up: Annotated[bool | None, MinGauge("relatum_database_up", "Whether PostgreSQL answers requests")]


class Progress:
    """One process's progress with one stream. Times are seconds since 1970.

    The lag is the age of the oldest message known to be unrecorded. If no such message is known, because no server
    answered or was queried, the lag counts from the last moment at which everything was recorded: an upper bound, which
    grows until a server answers. The lag is 0 only if everything is known to be recorded.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._uncommitted_since: Callable[[], float | None] | None = None
        self._complete_at = clock()
        """The last moment at which everything was recorded; initially, when this object was created."""
        self._unrecorded: tuple[int, float] | None = None
        """An unrecorded offset, and when its message was written; None if no such offset is known."""
        self.is_standby = False
        """Whether another process recorded the stream at the last query; that process reports the lag."""
        self.recorded: int | None = None
        """The last offset known to be recorded; -1 if there is none, None if unknown."""
        self._holes: list[tuple[float, int]] = []
        self.end: int | None = None
        """The last known offset of the stream's last message; -1 if the stream is empty, None if unknown."""
        self.messages = self.rows = self.reconnects = 0
        self.skipped: collections.Counter[str] = collections.Counter()

    def statistics(self) -> RecordedStream:
        """Return the stream's statistics."""
        with self._lock:
            now, recorded, end = self._clock(), self.recorded, self.end
            self._holes = [hole for hole in self._holes if hole[0] > now - HOLE_REPORT_S]
            return RecordedStream(
                is_recording=self._uncommitted_since is not None,
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
        """Count a committed batch."""
        self.messages += batch.messages
        self.rows += len(batch.lines)
        for (_, _, reason), count in batch.skips.items():
            self.skipped[reason] += count

    def begin(self, recorded: int, unwritten: Callable[[], float | None]) -> None:
        """Start after offset `recorded`. `unwritten` returns when the oldest uncommitted message was written."""
        with self._lock:
            if self._uncommitted_since is None:
                self.is_standby, self.recorded, self._uncommitted_since, self.end = False, recorded, unwritten, None

    def stop(self) -> None:
        """Stop recording, for any reason; keep the lag of messages that were read but not committed."""
        with self._lock:
            unwritten, self._uncommitted_since = self._uncommitted_since, None
            oldest = unwritten() if unwritten is not None else None
            if oldest is not None and self.recorded is not None and self._unrecorded is None:
                self._unrecorded = self.recorded + 1, oldest

    def stand_by(self) -> None:
        """Stand by, since another process records the stream; discard its offsets and lag."""
        with self._lock:
            self.is_standby, self.recorded, self.end, self._unrecorded = True, None, None, None
            self._complete_at = self._clock()

    def lost(self, offsets: int) -> None:
        """Count the offsets of a hole."""
        if offsets:
            with self._lock:
                self._holes.append((self._clock(), offsets))

    def written(self, recorded: int, at: float) -> None:
        """Store that everything up to an offset is recorded, and when its message was written."""
        with self._lock:
            self.recorded = recorded
            self._complete_at = max(self._complete_at, at)
            if self._unrecorded is not None and recorded >= self._unrecorded[0]:
                self._unrecorded = None

    def read(self, offset: int) -> None:
        """Store that the stream reaches an offset. Lock-free, since it is called for each chunk."""
        if self.end is None or self.end < offset:
            self.end = offset

    def show(self, end: int | None) -> None:
        """Store the stream's last offset; None if the stream is empty or does not exist."""
        with self._lock:
            self.end = -1 if end is None else end
            if self.end <= (-1 if self.recorded is None else self.recorded):
                self._complete_at, self._unrecorded = self._clock(), None

    def _oldest(self, now: float) -> float:
        """Return when the oldest unrecorded message was written, or an earlier time; `now` if there is none."""
        if self._unrecorded is not None:
            return self._unrecorded[1]
        if self._uncommitted_since is None:
            return self._complete_at
        read = self._uncommitted_since()
        if read is not None:
            return read
        is_behind = self.end is None or self.recorded is None or self.end > self.recorded
        return self._complete_at if is_behind else now
