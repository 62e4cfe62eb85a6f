"""Taps: a copy of each message of an exchange in a stream, without a word to its publishers."""

from relatum.tapping._firehose import Firehose, FirehoseCounts
from relatum.tapping._kept_taps import Tap, defined_taps
from relatum.tapping._tapping import tap, tap_firehose, untap, untap_firehose

__all__ = [
    "Firehose",
    "FirehoseCounts",
    "Tap",
    "defined_taps",
    "tap",
    "tap_firehose",
    "untap",
    "untap_firehose",
]
