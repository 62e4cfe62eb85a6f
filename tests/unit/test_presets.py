"""The keys of libraries whose messages are made here by their documented formats."""

import json
from pathlib import Path
from typing import Any

import pytest

from relatum.errors import InvalidInput
from relatum.keys import PRESETS, as_definitions, bases, preset

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = f"00-{TRACE}-00f067aa0ba902b7-01"
ENVELOPE = {
    "messageId": "181c0000-6393-3630-36a4-08daf4e7c6da",
    "requestId": "181c0000-6393-3630-3ad0-08daf4e7c6da",
    "correlationId": "f00d0000-6393-3630-36a4-08daf4e7c6da",
    "conversationId": "181c0000-6393-3630-398b-08daf4e7c6da",
    "initiatorId": "beef0000-6393-3630-36a4-08daf4e7c6da",
    "sourceAddress": "rabbitmq://localhost/endpoint",
    "destinationAddress": "rabbitmq://localhost/Orders:SubmitOrder",
    "messageType": ["urn:message:Orders:SubmitOrder"],
    "message": {"orderId": "o1"},
    "sentTime": "2026-11-23T05:00:00Z",
    "headers": {},
    "host": {"machineName": "vm", "massTransitVersion": "8.3.0"},
}
EVENT = {"specversion": "1.0", "type": "com.example", "source": "/mine", "id": "A234-1234", "subject": "o1"}
LINKS = {"causationid": "A234-0", "correlationid": "order-7"}
OF_EVENT = {"id": "A234-1234", "cause": "A234-0", "correlation": "order-7", "subject": "o1"}
OF_ENVELOPE = {key: ENVELOPE[f"{key}Id"] for key in ("conversation", "correlation", "initiator", "request")}
REQUEST = {"messageId": "q", "requestId": "r", "correlationId": None, "conversationId": "v", "initiatorId": None}
OF_COMMAND = {"id": "2f3c", "conversation": "9a1b", "related": "1e2d", "correlation": "2f3c"}
COMMAND = {
    "NServiceBus.MessageId": "2f3c",
    "NServiceBus.ConversationId": "9a1b",
    "NServiceBus.RelatedTo": "1e2d",
    "NServiceBus.CorrelationId": "2f3c",
    "NServiceBus.MessageIntent": "Send",
}
RETURNED = {"spring_listener_return_correlation": "of the channel", "spring_returned_message_correlation": "d-1"}
JSON = {"content_type": "application/json"}
MASSTRANSIT = {"content_type": "application/vnd.masstransit+json"}
CLOUD_EVENT = {"content_type": "application/cloudevents+json; charset=utf-8"}
OF_TRACE = {"trace_id": TRACE}


def prefixed(prefix: str) -> dict[str, Any]:
    return {f"{prefix}{name}": value for name, value in (EVENT | LINKS).items()}


@pytest.mark.parametrize(
    ("name", "headers", "properties", "body", "expected"),
    [
        ("masstransit", {"publishId": "1"}, MASSTRANSIT, ENVELOPE, OF_ENVELOPE | {"id": ENVELOPE["messageId"]}),
        ("masstransit", {}, JSON, ENVELOPE, {}),
        ("masstransit", {}, MASSTRANSIT, REQUEST, {"id": "q", "conversation": "v", "correlation": "r", "request": "r"}),
        ("nservicebus", COMMAND, JSON | {"message_id": "2f3c"}, {"OrderId": "o1"}, OF_COMMAND),
        ("cloudevents", prefixed("cloudEvents:"), JSON, {"id": "other"}, OF_EVENT),
        ("cloudevents", prefixed("cloudEvents_"), {"content_type": "text/xml"}, None, OF_EVENT),
        ("cloudevents", {}, CLOUD_EVENT, EVENT | LINKS, OF_EVENT),
        ("cloudevents", {}, JSON, {"id": "no event"}, {}),
        ("traceparent", {"traceparent": PARENT, "tracestate": "a=b"}, {}, None, OF_TRACE),
        ("traceparent", {"cloudEvents:traceparent": PARENT}, {}, None, OF_TRACE),
        ("traceparent", {}, CLOUD_EVENT, EVENT | {"traceparent": PARENT}, OF_TRACE),
        ("traceparent", {}, {"content_type": "application/cloudevents+json"}, EVENT | {"traceparent": None}, {}),
        ("traceparent", {}, JSON, {"traceparent": PARENT}, {}),
        ("traceparent", {"b3": f"{TRACE}-00f067aa0ba902b7-1"}, {}, None, OF_TRACE),
        ("traceparent", {"X-B3-TraceId": TRACE, "X-B3-SpanId": "00f067aa0ba902b7"}, {}, None, OF_TRACE),
        (
            "spring",
            {"traceparent": PARENT, "__TypeId__": "com.example.Order"},
            JSON | {"message_id": "m-1", "correlation_id": "c-1"},
            {"id": 1},
            OF_TRACE | {"id": "m-1", "correlation": "c-1"},
        ),
        ("spring", {}, {"correlation_id": "1"}, None, {"correlation": "1"}),
        ("spring", {}, {"message_id": "m-2"}, None, {"id": "m-2", "correlation": "m-2"}),
        ("spring", RETURNED, {}, None, {"id": "d-1"}),
    ],
)
def test_a_preset_reads_the_documented_format(
    name: str, headers: dict[str, Any], properties: dict[str, Any], body: Any, expected: dict[str, str]
) -> None:
    """Each key has what the format says, and of other messages nothing."""
    base_of = bases(headers, properties.get, lambda: b"" if body is None else json.dumps(body).encode())
    found = {key.name: key.read(base_of) for key in preset(name)}
    assert {key.removeprefix(f"{name}_"): values[0] for key, (values, _) in found.items() if values} == expected
    assert not any(reasons for _, reasons in found.values())


def test_all_presets_go_together() -> None:
    """No two mean different things by one name, and what a key names is defined with it."""
    keys = {key.name: key for key in as_definitions([key for name in PRESETS for key in preset(name)])}
    assert {key.names for key in keys.values()} - {None} <= keys.keys()
    with pytest.raises(InvalidInput, match="did you mean 'celery'"):
        preset("celry")


def test_the_page_lists_every_key_of_every_preset() -> None:
    """In the order of the presets, with where it comes from and what it names."""
    _, _, text = (Path(__file__).parents[2] / "docs" / "keys.md").read_text().partition("\n## Presets\n")
    lines = [line for line in text.splitlines() if line.startswith("| `")]
    rows = [tuple(cell.strip(" `") for cell in line.strip("|").split("|")) for line in lines]
    assert rows == [
        (name, key.name, key.sources[0], key.names or "–") for name, keys in PRESETS.items() for key in keys
    ]
