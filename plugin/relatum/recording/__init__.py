"""Recording: writes keys from streams into the relationship table, and keeps the table equal to the streams."""

from relatum.recording.backfilling import BackfillProgress, BackfillReport, backfill
from relatum.recording.comparing import Difference, StreamVerified, VerifyReport
from relatum.recording.forgetting import ForgottenStream, forget, forget_origin
from relatum.recording.overview import StreamEvent, StreamStatus, status
from relatum.recording.pruning import PruneReport, prune
from relatum.recording.recorder import Recorder, set_record_time
from relatum.recording.statistics import RecordedStream, RecorderStatistics
from relatum.recording.verifying import repair, verify

__all__ = [
    "BackfillProgress",
    "BackfillReport",
    "Difference",
    "ForgottenStream",
    "PruneReport",
    "RecordedStream",
    "Recorder",
    "RecorderStatistics",
    "StreamEvent",
    "StreamStatus",
    "StreamVerified",
    "VerifyReport",
    "backfill",
    "forget",
    "forget_origin",
    "prune",
    "repair",
    "set_record_time",
    "status",
    "verify",
]
