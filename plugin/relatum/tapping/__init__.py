"""Taps: a copy of each message of an exchange in a stream, without a word to its publishers."""

from relatum.tapping._kept_taps import Tap, defined_taps
from relatum.tapping._tapping import tap, untap

__all__ = ["Tap", "defined_taps", "tap", "untap"]
