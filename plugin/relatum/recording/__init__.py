"""Recording: from streams into the relationship table, and what keeps the two equal."""

from typing import TYPE_CHECKING

from relatum.faces import imported_later
from relatum.processes import new_holder

if TYPE_CHECKING:
    from relatum.recording._backfill import BackfillProgress, BackfillReport, Plan, backfill, edges_of, plan_backfill
    from relatum.recording._compare import Difference, StreamVerified
    from relatum.recording._coverage_bar import CoveragePiece, PieceKind, coverage_bar
    from relatum.recording._embedded import EmbeddedRecorder
    from relatum.recording._extract import Extractor
    from relatum.recording._fill import Filler, Pace
    from relatum.recording._forget import ForgottenStream, forget, forget_origin
    from relatum.recording._losing import is_same
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
    from relatum.recording._ranges import Segment, unrecorded
    from relatum.recording._recorder import Recorder
    from relatum.recording._repair import repair
    from relatum.recording._reports_shown import (
        exit_with,
        offsets_bar,
        print_backfilled,
        print_verified,
        verified_document,
    )
    from relatum.recording._statistics import RecordedStream, RecorderStatistics
    from relatum.recording._status import StreamEvent, StreamStatus, recorded_status, status
    from relatum.recording._strays import verify_strays
    from relatum.recording._times import set_record_time
    from relatum.recording._verify import (
        Comparison,
        Subject,
        VerifyReport,
        check_any,
        checked_sample,
        chosen_windows,
        leave_out,
        plan_verification,
        verify,
    )

__all__ = [
    "BackfillProgress",
    "BackfillReport",
    "Comparison",
    "CoveragePiece",
    "Difference",
    "EmbeddedRecorder",
    "Extractor",
    "Filler",
    "ForgottenStream",
    "KeySize",
    "KeyWatcher",
    "Pace",
    "PieceKind",
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
    "Subject",
    "VerifyReport",
    "backfill",
    "check_any",
    "checked_sample",
    "chosen_windows",
    "coverage_bar",
    "edges_of",
    "exit_with",
    "forget",
    "forget_origin",
    "is_same",
    "key_sizes",
    "leave_out",
    "new_holder",
    "offsets_bar",
    "plan_backfill",
    "plan_verification",
    "print_backfilled",
    "print_verified",
    "prune",
    "recorded_ends",
    "recorded_status",
    "recorder_list",
    "repair",
    "set_record_time",
    "status",
    "unrecorded",
    "verified_document",
    "verify",
    "verify_strays",
]

_HOMES = {
    name: f"relatum.recording.{module}"
    for module, names in {
        "_backfill": "BackfillProgress BackfillReport Plan backfill edges_of plan_backfill",
        "_compare": "Difference StreamVerified",
        "_coverage_bar": "CoveragePiece PieceKind coverage_bar",
        "_embedded": "EmbeddedRecorder",
        "_extract": "Extractor",
        "_fill": "Filler Pace",
        "_forget": "ForgottenStream forget forget_origin",
        "_losing": "is_same",
        "_overview": "KeySize RecordedEnd RecorderMember key_sizes recorded_ends recorder_list",
        "_prune": "PruneReport prune",
        "_publishers_keys": "KeyWatcher",
        "_ranges": "Segment unrecorded",
        "_recorder": "Recorder",
        "_repair": "repair",
        "_reports_shown": "exit_with offsets_bar print_backfilled print_verified verified_document",
        "_statistics": "RecordedStream RecorderStatistics",
        "_status": "StreamEvent StreamStatus recorded_status status",
        "_strays": "verify_strays",
        "_times": "set_record_time",
        "_verify": "Comparison Subject VerifyReport check_any checked_sample chosen_windows leave_out "
        "plan_verification verify",
    }.items()
    for name in names.split()
}

# A command's help needs none of this, nor the database's driver.
__getattr__ = imported_later(__name__, _HOMES)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
