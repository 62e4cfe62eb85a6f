"""What became of messages that collectors took: asked by whoever has their ids, a publisher's receipt among them.

Collectors write it (`relatum.collecting`); here it is only read, so that who asks needs nothing of theirs.
"""

from relatum.outcomes._outcome_values import Outcome, OutcomeStatus, read_outcomes
from relatum.outcomes._outcomes import AsyncOutcomes, Outcomes, not_finished, outcome_in_task

__all__ = [
    "AsyncOutcomes",
    "Outcome",
    "OutcomeStatus",
    "Outcomes",
    "not_finished",
    "outcome_in_task",
    "read_outcomes",
]
