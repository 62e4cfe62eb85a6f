"""Recording: from streams into the relationship table, and what keeps the two equal."""

from typing import TYPE_CHECKING

from relatum.faces import imported_later
from relatum.processes import new_holder
from relatum.recording._backfill import BackfillProgress, BackfillReport, backfill
from relatum.recording._compare import Difference, StreamVerified
from relatum.recording._coverage_bar import CoveragePiece, PieceKind, coverage_bar
from relatum.recording._embedded import EmbeddedRecorder
from relatum.recording._forget import ForgottenStream, forget
from relatum.recording._overview import KeySize, RecordedEnd, RecorderMember, key_sizes, recorded_ends, recorder_list
from relatum.recording._prune import PruneReport, prune
from relatum.recording._publishers_keys import KeyWatcher
from relatum.recording._recorder import Recorder
from relatum.recording._repair import repair
from relatum.recording._statistics import RecordedStream, RecorderStatistics
from relatum.recording._status import StreamEvent, StreamStatus, status
from relatum.recording._times import set_record_time
from relatum.recording._verify import VerifyReport, verify

if TYPE_CHECKING:
    from relatum.recording._reports_shown import (
        exit_with,
        offsets_bar,
        print_backfilled,
        print_verified,
        verified_document,
    )
from relatum.recording._backfill import Plan, edges_of, plan_backfill
from relatum.recording._extract import Extractor
from relatum.recording._fill import Filler, Pace
from relatum.recording._losing import is_same
from relatum.recording._ranges import Segment, unrecorded
from relatum.recording._verify import (
    Comparison,
    Subject,
    check_any,
    checked_sample,
    chosen_windows,
    leave_out,
    plan_verification,
    verify_strays,
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
    "recorder_list",
    "repair",
    "set_record_time",
    "status",
    "unrecorded",
    "verified_document",
    "verify",
    "verify_strays",
]

# For commands alone: they write to a terminal, which recorders have no use for.
__getattr__ = imported_later(
    __name__,
    dict.fromkeys(
        ("exit_with", "offsets_bar", "print_backfilled", "print_verified", "verified_document"),
        "relatum.recording._reports_shown",
    ),
)
