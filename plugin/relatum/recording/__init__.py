"""Recording: from streams into the relationship table, and what keeps the two equal."""

from relatum.recording._recorder import EmbeddedRecorder, Recorder

__all__ = ["EmbeddedRecorder", "Recorder"]
