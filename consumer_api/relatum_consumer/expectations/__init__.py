"""Missing steps: which messages of a stream were not followed, in time, by one of another that shares a key's value.

The methods are those of `Relations` and `AsyncRelations`: `missing`, `watch_missing`, `expectations`. What is expected
is an `Expectation`, defined in the database by `add_expectations`.
"""

from relatum_consumer.expectations._definitions import add_expectations, defined_expectations, remove_expectation
from relatum_consumer.expectations._expectation import (
    Expectation,
    ExpectationResult,
    MissingReport,
    Reason,
    UnmetExpectation,
)
from relatum_consumer.expectations._expectation_limits import GRACE_S, POLL_S, UNMET_MAX
from relatum_consumer.expectations._expectation_methods import ExpectationMethods
from relatum_consumer.expectations._following import ExpectationStatistics

__all__ = [
    "GRACE_S",
    "POLL_S",
    "UNMET_MAX",
    "Expectation",
    "ExpectationMethods",
    "ExpectationResult",
    "ExpectationStatistics",
    "MissingReport",
    "Reason",
    "UnmetExpectation",
    "add_expectations",
    "defined_expectations",
    "remove_expectation",
]
