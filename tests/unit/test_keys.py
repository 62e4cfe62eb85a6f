"""Key definitions, the canonical form of their values, and the presets of libraries."""

import json
import pickle
from datetime import UTC, datetime, timedelta, timezone
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relatum import errors
from relatum.common.limits import INTEGER_MAX, INTEGER_MIN, KEY_VALUE_BYTES_MAX, TIME_US_MAX, TIME_US_MIN
from relatum.errors import InvalidInput
from relatum.keys import (
    PRESETS,
    InvalidValue,
    KeyDefinition,
    KeyType,
    SkipReason,
    as_definitions,
    bases,
    canonical,
    join_components,
    microseconds,
    moment,
    preset,
    timestamp_us,
)
from relatum.publishing import Stamper
from tests.support.raising import raising

TEXT, INTEGER, TIMESTAMP = KeyType.TEXT, KeyType.INTEGER, KeyType.TIMESTAMP


@pytest.mark.parametrize(
    ("value", "key_type", "expected"),
    [
        *((text, TEXT, text) for text in ("o-17", " Ö ", "", "42", "x" * KEY_VALUE_BYTES_MAX)),
        (42, TEXT, "42"),
        (True, TEXT, "true"),
        (False, TEXT, "false"),
        (b"abc", TEXT, "abc"),
        *((number, INTEGER, "42") for number in (42, "042", b"42")),
        ("-7", INTEGER, "-7"),
        (INTEGER_MAX, INTEGER, "9223372036854775807"),
        (INTEGER_MIN, INTEGER, "-9223372036854775808"),
        (datetime(1970, 1, 1, 0, 0, 1, tzinfo=UTC), TIMESTAMP, "1000000"),
        (datetime(1970, 1, 1, 0, 0, 1), TIMESTAMP, "1000000"),
        (datetime(1970, 1, 1, 2, tzinfo=timezone(timedelta(hours=2))), TIMESTAMP, "0"),
        ("1970-01-01T00:00:00.000001Z", TIMESTAMP, "1"),
        (1_000_001, TIMESTAMP, "1000001"),
        (TIME_US_MAX, TIMESTAMP, str(TIME_US_MAX)),
    ],
)
def test_equal_values_have_one_canonical_form(value: Any, key_type: KeyType, expected: str) -> None:
    """Values that the documentation calls equal have one canonical text."""
    assert canonical(value, key_type) == expected


@pytest.mark.parametrize(
    ("value", "key_type", "reason"),
    [
        (1.5, TEXT, SkipReason.FLOAT),
        (Decimal(1), TEXT, SkipReason.DECIMAL),
        *((value, TEXT, SkipReason.NESTED) for value in ({"a": 1}, [1])),
        ("a\0b", TEXT, SkipReason.NUL),
        *((value, TEXT, SkipReason.NOT_UNICODE) for value in ("\ud800", b"\xff")),
        ("x" * (KEY_VALUE_BYTES_MAX + 1), TEXT, SkipReason.TOO_LONG),
        ("ö" * (KEY_VALUE_BYTES_MAX // 2 + 1), TEXT, SkipReason.TOO_LONG),
        (datetime(2020, 1, 1, tzinfo=UTC), TEXT, SkipReason.UNSUPPORTED),
        (object(), TEXT, SkipReason.UNSUPPORTED),
        (INTEGER_MAX + 1, TEXT, SkipReason.OUT_OF_RANGE),
        *((value, INTEGER, SkipReason.NOT_INTEGER) for value in (True, "4 2", "٤")),
        *((value, INTEGER, SkipReason.OUT_OF_RANGE) for value in (INTEGER_MAX + 1, INTEGER_MIN - 1)),
        (1.0, INTEGER, SkipReason.FLOAT),
        *((value, TIMESTAMP, SkipReason.OUT_OF_RANGE) for value in (TIME_US_MAX + 1, TIME_US_MIN - 1)),
        *((value, TIMESTAMP, SkipReason.NOT_TIMESTAMP) for value in ("2020-01-01T00:00:00", "yesterday", True)),
    ],
)
def test_values_that_cannot_be_keys_are_refused_by_reason(value: Any, key_type: KeyType, reason: SkipReason) -> None:
    """Each kind of bad value has its own reason, which the publisher's error names together with the key."""
    with raising(InvalidValue, reason=reason):
        canonical(value, key_type)
    stamper = Stamper(as_definitions([KeyDefinition("order_id", type=key_type)]))
    with raising(errors.InvalidRelationshipKey, key="order_id", reason=reason):
        stamper.stamp({"order_id": value}, "m", 1, None, b"")
    stamper.stamp({"other": value}, "m", 1, None, b"")


@given(st.text())
def test_text_is_compared_code_point_for_code_point(text: str) -> None:
    """A text's canonical form is the text, or a refusal; never another text."""
    encoded = text.encode("utf-8", "surrogatepass")
    if "\0" in text or len(encoded) > KEY_VALUE_BYTES_MAX or any("\ud800" <= char <= "\udfff" for char in text):
        with pytest.raises(InvalidValue):
            canonical(text, TEXT)
    else:
        assert canonical(text, TEXT) == text


@given(st.datetimes(timezones=st.just(UTC)))
def test_moments_survive_to_the_microsecond(when: datetime) -> None:
    """A timestamp's canonical form gives the moment back."""
    assert moment(int(canonical(when, TIMESTAMP))) == when
    assert timestamp_us(when) == microseconds(when)


@given(st.lists(st.text(st.sampled_from("ab|\\"), max_size=4), min_size=2, max_size=3), st.data())
def test_composites_are_equal_only_where_their_components_are(parts: list[str], data: st.DataObject) -> None:
    """Escaping keeps ("a|", "b") and ("a", "|b") apart."""
    others = data.draw(
        st.lists(st.text(st.sampled_from("ab|\\"), max_size=4), min_size=len(parts), max_size=len(parts))
    )
    assert (join_components(parts) == join_components(others)) == (parts == others)


def test_a_definition_takes_headers_properties_and_composites() -> None:
    """A value is found wherever the definition says, and only where every component is there."""
    key = KeyDefinition("k", source=["header:host", "property:correlation_id"])
    properties = {"correlation_id": "c|1"}
    assert key.read(bases({"host": "h"}, properties.get, bytes)) == (["h|c\\|1"], [])
    assert key.read(bases({}, properties.get, bytes)) == ([], [])
    assert key.canonical_query(("h", "c|1")) == "h|c\\|1"


@pytest.mark.parametrize("value", ["-1", "0", "1795442400000000"])
@pytest.mark.parametrize("key_type", list(KeyType))
def test_a_canonical_value_can_be_searched_for(key_type: KeyType, value: str) -> None:
    """What lists of values, the page and SQL show finds its messages; in a message, digits are not a timestamp."""
    key = KeyDefinition("k", type=key_type)
    assert key.canonical_query(value) == value
    read, _ = key.read(bases({"k": value}, {}.get, bytes))
    assert read == ([] if key_type is KeyType.TIMESTAMP else [value])


@pytest.mark.parametrize(
    "make",
    [
        lambda: KeyDefinition("x" * 256),
        lambda: KeyDefinition("k", source="property:timestamp"),
        lambda: as_definitions([KeyDefinition("k"), KeyDefinition("k", type="integer")]),
        lambda: KeyDefinition("k", source=["a", "b"]).canonical_query("a"),
        # A key of one part takes one value.
        *(partial(KeyDefinition("k").canonical_query, values) for values in (("4711", "4712"), ["4711"], ())),
        lambda: as_definitions([KeyDefinition("k"), KeyDefinition("k", names="id")]),
    ],
)
def test_definitions_that_cannot_be_are_refused(make: Any) -> None:
    """A bad definition is one clear error that names the key."""
    with pytest.raises(errors.InvalidKeyDefinition) as caught:
        make()
    assert caught.value.key is not None


def test_errors_keep_their_fields_through_pickle() -> None:
    """Spark and process pools move errors between processes; one about a whole stream has no offset."""
    error = errors.OffsetExpired("gone", stream="s", offset=3, first=7)
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), copy.args, copy.stream, copy.offset, copy.first) == (type(error), error.args, "s", 3, 7)
    assert errors.StreamNotHere("no replica", stream="orders").offset is None


@pytest.mark.parametrize(
    ("definition", "code", "hint"),
    [
        (KeyDefinition("order_id"), "KeyDefinition('order_id', source='header:order_id')", False),
        (KeyDefinition("message_id"), "KeyDefinition('message_id', source='header:message_id')", True),
        (KeyDefinition("id", source="type"), "KeyDefinition('id', source='header:type')", True),
        (KeyDefinition("id", source="header:type"), "KeyDefinition('id', source='header:type')", False),
        (KeyDefinition("type", source="property:type"), "KeyDefinition('type', source='property:type')", False),
        (
            KeyDefinition("n", source=("a", "property:type"), type="integer"),
            "KeyDefinition('n', source=('header:a', 'property:type'), type='integer')",
            False,
        ),
        (KeyDefinition("id", source="propety:type"), "KeyDefinition('id', source='header:propety:type')", True),
        (KeyDefinition("type", source=len), "KeyDefinition('type', source='header:type')", False),
        (
            KeyDefinition("cause", source="cause_id", names="id"),
            "KeyDefinition('cause', source='header:cause_id', names='id')",
            False,
        ),
    ],
)
def test_a_definition_is_code_and_hints_at_properties(definition: KeyDefinition, code: str, hint: bool) -> None:
    """The code means the same; a hint comes where a bare name became a header's and a property has it."""
    assert definition.code == code
    same = eval(code, {"KeyDefinition": KeyDefinition})
    assert (same.sources, same.names) == (definition.sources, definition.names)
    assert bool(definition.hint) is hint
    assert not hint or f"--source property:{definition.places[0].name.rpartition(':')[2]}" in definition.hint


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
    """The page lists the presets' keys in order, each with its source and what it names."""
    _, _, text = (Path(__file__).parents[2] / "docs" / "keys.md").read_text().partition("\n## Presets\n")
    lines = [line for line in text.splitlines() if line.startswith("| `")]
    rows = [tuple(cell.strip(" `") for cell in line.strip("|").split("|")) for line in lines]
    assert rows == [
        (name, key.name, key.sources[0], key.names or "–") for name, keys in PRESETS.items() for key in keys
    ]
