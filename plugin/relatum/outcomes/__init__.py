"""The outcomes of collected messages, by message id, for example from a publisher's receipt.

Collectors (`relatum.collecting`) store outcomes. This package only reads them, and does not depend on collectors.
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
