"""There are spans only if a provider is set; they show no values that nobody allowed."""

import asyncio
import logging
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from opentelemetry import propagate, trace
from opentelemetry.instrumentation.utils import suppress_instrumentation
from opentelemetry.propagators.composite import CompositePropagator
from opentelemetry.propagators.textmap import TextMapPropagator
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ParentBased, Sampler

from relatum import otel
from relatum.errors import InvalidInput
from relatum.otel import Description, Part
from relatum.reading import Message
from tests.support.spans import Spans, collected_spans


@pytest.fixture
def spans() -> Iterator[Spans]:
    with collected_spans() as spans:
        yield spans
    otel.configure()


def described() -> Description:
    return Description("tried", {"relatum.tried": 1}, "consumer")


def sent(offset: int, headers: dict[str, Any], **properties: Any) -> Message:
    given = {"message_id": None, "correlation_id": None, "timestamp": None} | properties
    return Message.from_amqp("orders", offset, type("Properties", (), {"headers": headers} | given)(), b"")


def test_nothing_is_described_where_nobody_wants_spans() -> None:
    """Without a provider a span is nothing: it is not even described."""

    def describe() -> Description:
        raise AssertionError("nobody asked")

    with otel.span(Part.LOOKUPS, describe) as span:
        assert span is otel.NO_SPAN
    assert not otel.is_on(Part.LOOKUPS)
    otel.note(Part.LOOKUPS, lambda: pytest.fail("nobody asked"))


def test_parts_can_be_left_out(spans: Spans) -> None:
    """Each part by its name; a name that is none is an error, and changes nothing."""
    otel.configure(without=["recorder"])
    for part in Part:
        with otel.span(part, lambda part=part: Description(part)):
            pass
    assert spans.names == ["lookups", "collector", "serial"]
    with pytest.raises(InvalidInput, match="lookups, recorder, collector, serial"):
        otel.configure(without=["publishing"])
    assert not otel.is_on(Part.RECORDER)


def test_a_provider_that_makes_none_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disabling the SDK, or instrumentation for a block, also disables our spans."""
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", TracerProvider())
    assert not otel.is_on(Part.LOOKUPS)
    monkeypatch.delenv("OTEL_SDK_DISABLED")
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", TracerProvider())
    assert otel.is_on(Part.LOOKUPS)
    with suppress_instrumentation():
        assert not otel.is_on(Part.LOOKUPS)
    # One that is named but not installed: OpenTelemetry raises each time it is requested.
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", None)
    monkeypatch.setenv("OTEL_PYTHON_TRACER_PROVIDER", "of-another-machine")
    with otel.span(Part.LOOKUPS, described) as span:
        assert span is otel.NO_SPAN


class Broken(Exception):
    """What the application's code raises."""


def broken(*_: Any, **__: Any) -> Any:
    raise Broken("4711")


class _BrokenSampler(Sampler):
    should_sample = broken

    def get_description(self) -> str:
        return "broken"


def _with_processor(name: str) -> TracerProvider:
    processor = SpanProcessor()
    setattr(processor, name, broken)
    provider = TracerProvider()
    provider.add_span_processor(processor)
    return provider


class Whatever:
    """A tracer, or a span, of which each method raises but those that are given."""

    def __init__(self, **methods: Any) -> None:
        vars(self).update(methods)

    def __getattr__(self, name: str) -> Any:
        return broken


PROVIDERS: dict[str, Callable[[], Any]] = {
    "sampler": lambda: TracerProvider(sampler=_BrokenSampler()),
    "on_start": lambda: _with_processor("on_start"),
    "on_end": lambda: _with_processor("on_end"),
    "get_tracer": lambda: Whatever(),
    "tracer": lambda: Whatever(get_tracer=lambda *_, **__: Whatever()),
    "no span": lambda: Whatever(get_tracer=lambda *_, **__: Whatever(start_span=lambda *_, **__: None)),
    "span": lambda: Whatever(get_tracer=lambda *_, **__: Whatever(start_span=lambda *_, **__: Whatever())),
    "a text": lambda: "no provider",
}


@pytest.mark.parametrize("name", PROVIDERS)
def test_a_span_stops_no_block(name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """The block runs, once; its own error is the one that leaves it; the log says what went wrong, once."""
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", PROVIDERS[name]())
    for _ in range(3):
        done = 0
        with otel.span(Part.LOOKUPS, described) as span:
            otel.note(Part.LOOKUPS, lambda: {"relatum.more": 2})
            span.tell(lambda: {"relatum.more": 3})
            span.link(list)
            span.failed("expired")
            done += 1
        assert done == 1
        with pytest.raises(KeyError, match="ours"), otel.span(Part.RECORDER, described):
            raise KeyError("ours")
    said = [each for each in caplog.records if each.name == "relatum.otel"]
    assert len(said) <= 3
    assert all("nothing else is affected" in each.getMessage() and each.levelno == logging.WARNING for each in said)


def test_a_span_that_could_not_be_made_tells_its_neighbours_nothing(spans: Spans) -> None:
    """Notes for a span that could not be made reach neither the application's span nor another part's."""
    app = spans.provider.get_tracer("app")
    with app.start_as_current_span("request"), otel.span(Part.LOOKUPS, broken):
        otel.note(Part.LOOKUPS, lambda: {"relatum.keys": ["a"]})
    with otel.span(Part.COLLECTOR, described):
        otel.configure(without=["lookups"])
        with otel.span(Part.LOOKUPS, described):
            otel.note(Part.LOOKUPS, lambda: {"relatum.keys": ["a"]})
    assert not any("relatum.keys" in (each.attributes or {}) for each in spans.all)
    assert [each.name for each in spans.all] == ["request", "tried"]


def test_a_provider_that_is_replaced_or_shut_down(spans: Spans, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that is set now has the spans; one that was shut down is not an error."""
    with otel.span(Part.LOOKUPS, described):
        pass
    assert len(spans.ours) == 1
    other = Spans()
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", other.provider)
    with otel.span(Part.LOOKUPS, described):
        pass
    assert (len(spans.ours), len(other.ours)) == (1, 1)
    other.provider.shutdown()
    with otel.span(Part.LOOKUPS, described) as span:
        span.failed("late")


def test_parents_that_are_not_sampled_have_no_spans_below_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under an unsampled parent no span is recorded, and no attribute is computed."""
    provider = TracerProvider(sampler=ParentBased(ALWAYS_OFF))
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", provider)
    with provider.get_tracer("app").start_as_current_span("request"), otel.span(Part.LOOKUPS, described) as span:
        span.tell(lambda: pytest.fail("nobody records it"))
        span.link(lambda: pytest.fail("nobody records it"))


async def test_spans_of_tasks_and_threads_are_their_own(spans: Spans) -> None:
    """A note goes to the span of the task or thread that makes it."""
    names = [f"t{number}" for number in range(20)]

    def noted(name: str) -> None:
        with otel.span(Part.LOOKUPS, lambda: Description(name)):
            otel.note(Part.LOOKUPS, lambda: {"own": name})

    async def task(name: str) -> None:
        with otel.span(Part.LOOKUPS, lambda: Description(name)):
            await asyncio.sleep(0)
            otel.note(Part.LOOKUPS, lambda: {"own": name})
            await asyncio.sleep(0)

    await asyncio.gather(*map(task, names))
    with ThreadPoolExecutor(len(names)) as pool:
        list(pool.map(noted, names))
    found = [(each.name, each.attributes["own"]) for each in spans.ours]
    assert sorted(found) == sorted((name, name) for name in names * 2)


async def test_a_block_that_another_context_ends_ends_its_span(spans: Spans, caplog: pytest.LogCaptureFixture) -> None:
    """A span whose generator is closed in another context, as by a task that drops it, ends anyway."""

    async def reading() -> Any:
        with otel.span(Part.LOOKUPS, described):
            yield 1

    given = reading()
    assert await asyncio.create_task(anext(given)) == 1
    await given.aclose()
    assert spans.names == ["tried"]
    assert [each for each in caplog.records if each.name.startswith("relatum")] == []


class Choosy(TextMapPropagator):
    """A propagator that raises for what it does not like, and whose fields are not a set."""

    fields = ["traceparent", "odd"]  # type: ignore[assignment]  # noqa: RUF012 - as applications write them
    inject = broken

    def extract(self, carrier: Any, context: Any = None, getter: Any = None) -> Any:
        if "odd" in carrier:
            raise Broken(carrier["odd"])
        return context


@pytest.fixture
def carrier(spans: Spans, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Headers of a message that a span has sent; and an application's propagator that raises."""
    carrier: dict[str, Any] = {}
    with spans.provider.get_tracer("app").start_as_current_span("send"):
        propagate.inject(carrier)
    default = propagate.get_global_textmap()
    monkeypatch.setattr(propagate, "propagator", CompositePropagator([default, Choosy()]))
    return carrier


HOSTILE: list[dict[str, Any]] = [
    {"odd": "1"},
    {"traceparent": "00-" + "f" * 1_000_000},
    {"traceparent": b"\xff00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"},
    {"traceparent": ["00"], "tracestate": {"a": 1}},
    {"traceparent": "ff-" + "0" * 32 + "-" + "0" * 16 + "-00"},
    {"traceparent": None, "tracestate": "=,=" * 1_000},
    {"traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01,00-4bf92f3577b34da6a3ce929d0e0e4736-1-01"},
]


def test_a_message_whose_context_cannot_be_read_lacks_only_its_own_link(carrier: dict[str, Any]) -> None:
    """A message with a hostile header, or a junk record, has no link, and the other messages keep theirs."""
    messages = [sent(number, headers) for number, headers in enumerate([*HOSTILE, carrier, {"odd": "2"}, carrier])]
    offsets = [(link.attributes or {})["relatum.offset"] for link in otel.links_of(messages)]
    assert offsets == [len(HOSTILE), len(HOSTILE) + 2]
    junk = [Message.from_record("orders", 1, raw) for raw in (b"traceparent", b"\x00Sttraceparent\xff", b"\x00\x80odd")]
    assert len(otel.links_of([*junk, sent(2, carrier)])) == 1


def test_relatum_imports_no_opentelemetry_and_heeds_its_variable() -> None:
    """Relatum imports no OpenTelemetry, and OTEL_PYTHON_DISABLED_INSTRUMENTATIONS switches its spans off."""
    program = (
        "import sys, relatum, relatum.recording, relatum.collecting, relatum.contexts, relatum_consumer\n"
        "relatum_consumer.Relations, relatum.intercept\n"
        "assert not [name for name in sys.modules if name.startswith('opentelemetry')]\n"
        "from opentelemetry import trace; from opentelemetry.sdk.trace import TracerProvider\n"
        "from relatum import otel\n"
        "trace.set_tracer_provider(TracerProvider())\n"
        "assert not any(map(otel.is_on, otel.Part))"
    )
    environment = {"OTEL_PYTHON_DISABLED_INSTRUMENTATIONS": "pika, relatum", "PYTHONPATH": ":".join(sys.path)}
    subprocess.run([sys.executable, "-c", program], check=True, timeout=300, env=environment)
