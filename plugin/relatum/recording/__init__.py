"""Recording: from streams into the relationship table, and what keeps the two equal."""

from typing import TYPE_CHECKING

from relatum.faces import imported_later

if TYPE_CHECKING:
    from relatum.recording._backfill import BackfillProgress, BackfillReport, Plan, backfill, edges_of, plan_backfill
    from relatum.recording._compare import Difference, StreamVerified
    from relatum.recording._embedded import EmbeddedRecorder
    from relatum.recording._extract import Extractor
    from relatum.recording._fill import Filler, Pace
    from relatum.recording._forget import ForgottenStream, check_free, forget, forget_origin
    from relatum.recording._overview import (
        KeySize,
        RecordedEnd,
        RecorderMember,
        key_sizes,
        recorded_ends,
        recorder_list,
    )
    from relatum.recording._prune import PruneReport, prune
    from relatum.recording._publishers_keys import KeyWatcher
    from relatum.recording._ranges import Segment
    from relatum.recording._recorder import Recorder, set_record_time
    from relatum.recording._repair import repair
    from relatum.recording._statistics import RecordedStream, RecorderStatistics
    from relatum.recording._status import StreamEvent, StreamStatus, recorded_status, status
    from relatum.recording._tails import is_same
    from relatum.recording._verify import VerifyReport, meant_streams, verify

__all__ = [
    "BackfillProgress",
    "BackfillReport",
    "Difference",
    "EmbeddedRecorder",
    "Extractor",
    "Filler",
    "ForgottenStream",
    "KeySize",
    "KeyWatcher",
    "Pace",
    "Plan",
    "PruneReport",
    "RecordedEnd",
    "RecordedStream",
    "Recorder",
    "RecorderMember",
    "RecorderStatistics",
    "Segment",
    "StreamEvent",
    "StreamStatus",
    "StreamVerified",
    "VerifyReport",
    "backfill",
    "check_free",
    "edges_of",
    "forget",
    "forget_origin",
    "is_same",
    "key_sizes",
    "meant_streams",
    "plan_backfill",
    "prune",
    "recorded_ends",
    "recorded_status",
    "recorder_list",
    "repair",
    "set_record_time",
    "status",
    "verify",
]

_HOMES = {
    name: f"relatum.recording.{module}"
    for module, names in {
        "_backfill": "BackfillProgress BackfillReport Plan backfill edges_of plan_backfill",
        "_compare": "Difference StreamVerified",
        "_embedded": "EmbeddedRecorder",
        "_extract": "Extractor",
        "_fill": "Filler Pace",
        "_forget": "ForgottenStream check_free forget forget_origin",
        "_overview": "KeySize RecordedEnd RecorderMember key_sizes recorded_ends recorder_list",
        "_prune": "PruneReport prune",
        "_publishers_keys": "KeyWatcher",
        "_ranges": "Segment",
        "_recorder": "Recorder set_record_time",
        "_repair": "repair",
        "_statistics": "RecordedStream RecorderStatistics",
        "_tails": "is_same",
        "_status": "StreamEvent StreamStatus recorded_status status",
        "_verify": "VerifyReport meant_streams verify",
    }.items()
    for name in names.split()
}

# A command's help needs none of this, nor the database's driver.
__getattr__ = imported_later(__name__, _HOMES)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
