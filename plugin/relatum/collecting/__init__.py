"""The message collector: messages of a type go to its executor in bulks, and what became of each can be asked."""

from relatum.collecting._bulk import Bulk, Collected, Failure, FlushReason
from relatum.collecting._collector import MessageCollector
from relatum.collecting._outcome import Outcome, OutcomeStatus

__all__ = ["Bulk", "Collected", "Failure", "FlushReason", "MessageCollector", "Outcome", "OutcomeStatus"]
