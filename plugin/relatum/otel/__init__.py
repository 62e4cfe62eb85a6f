"""OpenTelemetry: spans of what Relatum does, and its metrics as instruments. The one room that knows it.

Spans are there once the application has set a provider of them (`opentelemetry.trace.set_tracer_provider`), without a
call to Relatum. Nothing here imports OpenTelemetry for that: who has set a provider has imported it, so without it a
span costs a look into `sys.modules`. Metrics take one call, `report_metrics()`; `opentelemetry-instrument` makes it.

    otel.configure(without=["recorder"])        no spans of a recorder's transactions
    otel.configure(values_of=["order_id"])      spans of look-ups tell values of this key, unless it is masked
    otel.report_metrics()                       all metrics of this process, by the OpenTelemetry API

The other names are for the rooms that make spans. What is decided, and why, is in docs/adr/0037-opentelemetry.md.
"""

from relatum.otel._instruments import Instrumentor, report_metrics
from relatum.otel._spans import (
    LINKS_MAX,
    NO_SPAN,
    Description,
    Link,
    Part,
    Span,
    carried,
    configure,
    is_on,
    links_of,
    note,
    shows_values_of,
    span,
)

__all__ = [
    "LINKS_MAX",
    "NO_SPAN",
    "Description",
    "Instrumentor",
    "Link",
    "Part",
    "Span",
    "carried",
    "configure",
    "is_on",
    "links_of",
    "note",
    "report_metrics",
    "shows_values_of",
    "span",
]
