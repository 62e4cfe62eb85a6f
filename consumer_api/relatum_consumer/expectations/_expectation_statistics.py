"""What a follower of an expectation tells of itself."""

import time
from collections import Counter as Counts
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

from relatum.metrics import Counter, Greatest, reported


@reported("expectation", "expectation")
@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectationStatistics:
    """What one follower has counted.

    Attributes:
        checked: Messages looked at that have a value of the key.
        unmet: Messages told of, by what is known of them: late, missing, not_known.
        lag_s: Age of the moment up to which all is known; what was due before it was told of.
    """

    checked: Annotated[int, Counter("relatum_expectation_checked_total", "Messages that were due and looked at")]
    unmet: Annotated[
        Mapping[str, int],
        Counter("relatum_expectation_unmet_total", "Messages that nothing followed in time", by="finding"),
    ]
    lag_s: Annotated[
        float,
        Greatest("relatum_expectation_lag_seconds", "Age of the moment up to which is known what came"),
    ]


@dataclass(slots=True, weakref_slot=True, eq=False)
class ExpectationCounts:
    """What is counted; whoever counts is the one that iterates."""

    checked: int = 0
    unmet: Counts[str] = field(default_factory=Counts)
    known_us: int = field(default_factory=lambda: time.time_ns() // 1_000)

    def statistics(self) -> ExpectationStatistics:
        """What was counted. It asks nobody."""
        lag_s = max(0.0, time.time() - self.known_us / 1_000_000)
        return ExpectationStatistics(checked=self.checked, unmet=dict(self.unmet), lag_s=lag_s)
