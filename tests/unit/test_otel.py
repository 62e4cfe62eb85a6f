"""Spans are there where somebody has set a provider, and only there; they tell no values that nobody allowed."""

import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry import propagate, trace
from opentelemetry.instrumentation.utils import suppress_instrumentation
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.trace import SpanKind, StatusCode

from relatum import otel
from relatum.errors import ConfigurationError, DatabaseUnavailable, InvalidInput, InvalidRelationshipKey
from relatum.keys import KeyDefinition
from relatum.otel import Description, Part
from relatum.reading import Message
from relatum_consumer.lookups import look_up_in
from relatum_consumer.lookups._telemetry import note_sought
from tests.support.spans import Spans, collected_spans


@pytest.fixture
def spans() -> Iterator[Spans]:
    """A provider that the application has set."""
    with collected_spans() as spans:
        yield spans
    otel.configure()


def described() -> Description:
    """A span."""
    return Description("tried", {"relatum.tried": 1}, "consumer")


def sent(offset: int, headers: dict[str, Any], **properties: Any) -> Message:
    """A message with such headers."""
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
    assert otel.carried(Part.MOVES, len) is len


def test_relatum_does_not_import_opentelemetry() -> None:
    """Whoever has it installed and does not use it pays for no import of it."""
    program = (
        "import sys, relatum, relatum.recording, relatum.collecting, relatum.contexts, relatum_consumer\n"
        "relatum_consumer.Relations, relatum.intercept\n"
        "assert not [name for name in sys.modules if name.startswith('opentelemetry')]"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=300)


def test_a_span_has_a_name_a_kind_and_attributes(spans: Spans) -> None:
    """As it was described, and with what is told of it later; it is the current one in its block."""
    with otel.span(Part.RECORDER, described):
        otel.note(Part.RECORDER, lambda: {"relatum.more": 2})
    (span,) = spans.ours
    assert (span.name, span.kind, span.attributes) == (
        "tried",
        SpanKind.CONSUMER,
        {"relatum.tried": 1, "relatum.more": 2},
    )
    assert span.status.status_code is StatusCode.UNSET


@pytest.mark.parametrize(
    ("error", "name", "words"),
    [
        (DatabaseUnavailable("PostgreSQL is away"), "relatum.errors.DatabaseUnavailable", "PostgreSQL is away"),
        (InvalidRelationshipKey("the value 4711 cannot be"), "relatum.errors.InvalidRelationshipKey", None),
        (ValueError("4711"), "ValueError", None),
        (subprocess.SubprocessError("4711"), "subprocess.SubprocessError", None),
    ],
)
def test_an_error_is_told_by_its_class(spans: Spans, error: Exception, name: str, words: str | None) -> None:
    """Words are told of servers that were away alone: those of others may hold what a message says."""
    with pytest.raises(type(error)), otel.span(Part.LOOKUPS, described):
        raise error
    (span,) = spans.ours
    assert span.attributes["error.type"] == name
    assert (span.status.status_code, span.status.description) == (StatusCode.ERROR, words)
    assert not span.events


def test_parts_can_be_left_out(spans: Spans) -> None:
    """Each part by its name; a name that is none is an error, and changes nothing."""
    otel.configure(without=["recorder"])
    for part in Part:
        with otel.span(part, lambda part=part: Description(part)):
            pass
    assert spans.names == ["lookups", "collector", "serial", "moves"]
    with pytest.raises(InvalidInput, match="lookups, recorder, collector, serial, moves"):
        otel.configure(without=["publishing"])
    assert not otel.is_on(Part.RECORDER)


def test_a_provider_that_makes_none_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """What switches the SDK off, or its instrumentations for a block, switches these off, too."""
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    provider = TracerProvider()
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", provider)
    assert not otel.is_on(Part.LOOKUPS)
    monkeypatch.delenv("OTEL_SDK_DISABLED")
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", TracerProvider())
    assert otel.is_on(Part.LOOKUPS)
    with suppress_instrumentation():
        assert not otel.is_on(Part.LOOKUPS)


def test_opentelemetrys_own_variable_switches_spans_off() -> None:
    """What is named in OTEL_PYTHON_DISABLED_INSTRUMENTATIONS has no spans, whoever set the provider."""
    program = (
        "from opentelemetry import trace; from opentelemetry.sdk.trace import TracerProvider\n"
        "from relatum import otel\n"
        "trace.set_tracer_provider(TracerProvider())\n"
        "assert not any(map(otel.is_on, otel.Part))"
    )
    environment = {"OTEL_PYTHON_DISABLED_INSTRUMENTATIONS": "pika, relatum", "PYTHONPATH": ":".join(sys.path)}
    subprocess.run([sys.executable, "-c", program], check=True, timeout=300, env=environment)


def test_links_lead_to_the_spans_that_sent_messages(spans: Spans) -> None:
    """By the application's propagators; what is no such header, or no text, is passed over; ids where allowed."""
    with spans.provider.get_tracer("app").start_as_current_span("send") as sender:
        carrier: dict[str, Any] = {}
        propagate.inject(carrier)
    messages = [
        sent(1, {"traceparent": "00-junk"}),
        sent(2, {"traceparent": b"\xff"}),
        sent(3, {"traceparent": carrier["traceparent"], "baggage": "a=b"}, message_id="m", correlation_id="c"),
        sent(4, {}),
        sent(5, carrier),
    ]
    (link,) = otel.links_of(messages, 4)
    assert link.context.span_id == sender.get_span_context().span_id
    assert link.attributes == {"messaging.destination.name": "orders", "relatum.offset": 3}
    otel.configure(ids=True)
    first, second = otel.links_of(messages)
    told = {"messaging.message.id": "m", "messaging.message.conversation_id": "c"}
    assert first.attributes == {"messaging.destination.name": "orders", "relatum.offset": 3} | told
    assert second.attributes == {"messaging.destination.name": "orders", "relatum.offset": 5}


def test_values_are_told_where_that_was_allowed_and_never_masked_ones(spans: Spans) -> None:
    """By default the names of keys alone; a value that a masked key has is masked under another key's name, too."""
    order = KeyDefinition("order_id")
    person = KeyDefinition("person", "property:user_id", masked=True)
    same = KeyDefinition("user", "property:user_id")
    definitions = {each.name: each for each in (order, person, same)}
    sought = [(order, "4711"), (person, "p"), (same, "p")]
    with look_up_in("orders", "read"):
        note_sought(sought, definitions)
    otel.configure(values_of=["order_id", "person", "user"])
    with look_up_in("orders", "read"):
        note_sought(sought, definitions)
    quiet, open_ = spans.ours
    assert quiet.attributes["relatum.keys"] == ("order_id", "person", "user")
    assert not [name for name in quiet.attributes if name.startswith("relatum.key.")]
    assert {name: each for name, each in open_.attributes.items() if name.startswith("relatum.key.")} == {
        "relatum.key.order_id": ("4711",)
    }


def test_a_span_is_carried_to_another_thread(spans: Spans) -> None:
    """What another thread does belongs to the span that was current where it was sent off."""

    def work() -> None:
        with otel.span(Part.MOVES, described):
            pass

    with spans.provider.get_tracer("app").start_as_current_span("request") as request:
        thread = threading.Thread(target=otel.carried(Part.MOVES, work))
    thread.start()
    thread.join(90)
    assert spans.ours[0].parent.span_id == request.get_span_context().span_id


def test_without_the_extra_metrics_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """The API is a requirement of the extra alone."""
    monkeypatch.setitem(sys.modules, "opentelemetry.metrics", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'relatum\[otel\]'"):
        otel.report_metrics()
