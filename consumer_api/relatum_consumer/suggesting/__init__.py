"""What would make keys: told by samples of streams."""

from relatum_consumer.suggesting._fields import Field, Sample
from relatum_consumer.suggesting._ranking import Found, Suggestion, suggest
from relatum_consumer.suggesting._sampling import SAMPLE_MESSAGES, sample

__all__ = ["SAMPLE_MESSAGES", "Field", "Found", "Sample", "Suggestion", "sample", "suggest"]
