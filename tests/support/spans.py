"""OpenTelemetry in a test: providers that are the application's for as long as the test lasts."""

from collections.abc import Iterator
from contextlib import contextmanager

from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.util._once import Once


class Spans:
    """The spans that ended while `provider` was the application's."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self._exporter))

    @property
    def all(self) -> list[ReadableSpan]:
        return list(self._exporter.get_finished_spans())

    @property
    def ours(self) -> list[ReadableSpan]:
        return [each for each in self.all if each.instrumentation_scope.name == "relatum"]

    @property
    def names(self) -> list[str]:
        return [each.name for each in self.ours]

    def clear(self) -> None:
        self._exporter.clear()


@contextmanager
def collected_spans() -> Iterator[Spans]:
    spans = Spans()
    # The API sets it once for a process: the next test has its own.
    trace.set_tracer_provider(spans.provider)
    try:
        yield spans
    finally:
        trace._TRACER_PROVIDER, trace._TRACER_PROVIDER_SET_ONCE = None, Once()
        spans.provider.shutdown()
