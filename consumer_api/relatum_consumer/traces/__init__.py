"""From one message, or one key's value, to all that is connected: hop by hop, bounded, and honest about every step.

`relatum_consumer.Relations.trace` and `AsyncRelations.trace` are the faces. See docs/adr/0027.
"""

from relatum_consumer.traces._trace import Edge, Shared, Step, Stop, StopReason, Trace
from relatum_consumer.traces._tracing import FAN_OUT_MAX, HOPS_MAX, Start, trace

__all__ = ["FAN_OUT_MAX", "HOPS_MAX", "Edge", "Shared", "Start", "Step", "Stop", "StopReason", "Trace", "trace"]
