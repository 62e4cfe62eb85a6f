"""An id and headers added to encoded messages: those are there, and all else is as it was."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rstream import AMQPMessage
from rstream._pyamqp.message import Header, Properties  # type: ignore[attr-defined]

from relatum.reading import Message
from relatum.uuid7 import uuid7
from relatum.wire import amqp10, id_section, with_added

ID = uuid7(1_700_000_000_123_456_789)

TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=300)
SIMPLE = st.one_of(TEXTS, st.integers(-(2**63), 2**63 - 1), st.booleans(), st.none())
NAMES = st.text("abcdefgh-_", min_size=1, max_size=8)
MESSAGES = st.fixed_dictionaries(
    {},
    optional={
        "header": st.booleans().map(lambda durable: Header(durable=durable, priority=3)),
        "message_annotations": st.dictionaries(NAMES.map("x-{}".format), TEXTS, max_size=3),
        "properties": st.tuples(st.none() | TEXTS, TEXTS).map(
            lambda texts: Properties(correlation_id=texts[0], subject=texts[1])
        ),
        "application_properties": st.dictionaries(NAMES, SIMPLE, max_size=150),
        "body": st.binary(max_size=300),
        "footer": st.dictionaries(NAMES, TEXTS, max_size=2),
    },
).map(lambda sections: AMQPMessage(**sections))
ADDED = st.dictionaries(NAMES.map("added {}".format), TEXTS | st.booleans() | st.integers(-(2**63), 2**63 - 1))


@given(MESSAGES, ADDED)
def test_what_is_added_is_there_and_all_else_as_it_was(given: Any, added: dict[str, Any]) -> None:
    """Whatever sections a message has, and of whatever size."""
    raw = bytes(given)
    sections = amqp10.find_sections(raw) if raw else []
    before, after = Message.from_record("", 0, raw), Message.from_record("", 0, with_added(raw, sections, ID, added))
    assert after.is_amqp
    assert after.properties.message_id == ID
    assert dict(after.headers) == dict(before.headers) | added
    assert after.body == before.body
    assert after.properties.correlation_id == before.properties.correlation_id
    found = {code: after.raw[start:end] for code, start, end in amqp10.find_sections(after.raw or b"")}  # type: ignore[index]
    for code, start, end in sections:
        if code not in (amqp10.PROPERTIES, amqp10.APPLICATION_PROPERTIES):
            assert found[code] == raw[start:end]
    # In the order that the specification has.
    assert [code for code in found if code >= amqp10.PROPERTIES] == sorted(
        code for code in found if code >= amqp10.PROPERTIES
    )


@pytest.mark.parametrize("message", [AMQPMessage(), AMQPMessage(properties=Properties(subject="s"))])
def test_a_message_without_a_body_gets_an_empty_one(message: AMQPMessage) -> None:
    """RabbitMQ cannot hand a message without a body to AMQP 0.9.1, and ends the connection."""
    raw = bytes(message)
    out = with_added(raw, amqp10.find_sections(raw) if raw else [], ID, {})
    assert [code for code, _, _ in amqp10.find_sections(out)] == [amqp10.PROPERTIES, amqp10.DATA]
    assert Message.from_record("", 0, out).body == b""


def test_an_id_comes_before_what_has_no_properties() -> None:
    """In the same bytes as where the sections are looked at."""
    raw = bytes(AMQPMessage(body=b"body", application_properties={"a": "b"}))
    assert id_section(ID) + raw == with_added(raw, amqp10.find_sections(raw), ID, {})
