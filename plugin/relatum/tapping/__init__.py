"""Taps: a stream gets a copy of each message of an exchange, and publishers need no change."""

from relatum.tapping._broker_side import Tap
from relatum.tapping._tapping import defined_taps, tap, untap

__all__ = ["Tap", "defined_taps", "tap", "untap"]
