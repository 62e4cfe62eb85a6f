"""What would make keys: told by samples of streams."""

from relatum_consumer.suggesting._fields import SAMPLE_MESSAGES, Field, Sample, sample
from relatum_consumer.suggesting._ranking import Found, Suggestion, suggest

__all__ = ["SAMPLE_MESSAGES", "Field", "Found", "Sample", "Suggestion", "sample", "suggest"]
