"""Taps: a copy of each message of an exchange in a stream, without a word to its publishers."""

from relatum.tapping._broker_side import KEPT, ensure_stream
from relatum.tapping._firehose import Firehose, FirehoseCounts
from relatum.tapping._kept_taps import Tap, defined_taps
from relatum.tapping._tapping import tap, tap_firehose, untap, untap_firehose

__all__ = [
    "KEPT",
    "Firehose",
    "FirehoseCounts",
    "Tap",
    "defined_taps",
    "ensure_stream",
    "tap",
    "tap_firehose",
    "untap",
    "untap_firehose",
]
