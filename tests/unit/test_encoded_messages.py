"""Messages that clients have encoded: the short way stamps them as the long way does."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rabbitmq_amqp_python_client import Message
from rstream import AMQPMessage

from relatum.publishing._interception import Interception, Options
from relatum.publishing.clients import _amqp10, _encoded_messages, _rstream
from relatum.reading import Message as Read
from relatum.wire import amqp10, plain_message

names = st.text(st.characters(codec="utf-8"), max_size=300)
values = st.one_of(st.text(st.characters(codec="utf-8"), max_size=300), st.booleans(), st.integers(-(2**63), 2**63 - 1))
headers = st.one_of(st.dictionaries(names, values, max_size=5), st.just({}), st.none())


@pytest.fixture(scope="module")
def interception() -> Interception:
    """One without keys, a database or a broker."""
    return Interception(Options(None, (), "external", "raise", (), None, None, None), object(), "test")


def stamped_alike(interception: Interception, raw: bytes, short: _encoded_messages.Ready | None) -> None:
    """Both ways give the same sections, and an id."""
    long = _encoded_messages.ready(interception, raw)
    assert short is not None, "it is as plain as can be"
    one, other = (Read.from_record("", 0, each.raw) for each in (short, long))
    assert (dict(one.headers), one.body, short.body) == (dict(other.headers), other.body, long.body)
    assert one.properties.message_id == (short.stamp and short.stamp.message_id)
    assert _without_id(short.raw) == _without_id(long.raw)


def _without_id(raw: bytes) -> list[Any]:
    sections = [(code, raw[start:end]) for code, start, end in amqp10.find_sections(raw)]
    return [each for each in sections if each[0] != amqp10.PROPERTIES]


@given(headers=headers, body=st.binary(max_size=300), durable=st.booleans(), ttl=st.sampled_from([0.0, 5.0]))
def test_amqp10(interception: Interception, headers: Any, body: bytes, durable: bool, ttl: float) -> None:
    """Of the AMQP 1.0 client's own messages."""
    message = Message(body=body, application_properties=headers, durable=durable, ttl=ttl)
    raw = bytes(message.encode())
    short = _amqp10.plain_one(interception, message, raw)
    if any(name.startswith("x-") for name in headers or {}):
        assert short is None
    elif short is not None or "x-" not in "".join(headers or {}):
        stamped_alike(interception, raw, short)


@given(headers=headers, body=st.binary(min_size=1, max_size=300))
def test_rstream(interception: Interception, headers: Any, body: bytes) -> None:
    """Of rstream's own messages."""
    message = AMQPMessage(application_properties=headers, body=body)
    known = _rstream._known(message)
    if known is not None:
        stamped_alike(
            interception, bytes(message), _encoded_messages.plainly_ready(interception, bytes(message), *known)
        )
        is_text = all(type(value) is str for value in known[0].values())
        assert plain_message(*known) == (bytes(message) if is_text else None)


@pytest.mark.parametrize(
    "more",
    [{"id": "mine"}, {"subject": "s"}, {"creation_time": 1.0}, {"annotations": {"x-a": 1}}, {"instructions": {"x": 1}}],
)
def test_what_has_more_goes_the_long_way(interception: Interception, more: dict[str, Any]) -> None:
    """Properties and annotations are read before they are judged."""
    message = Message(body=b"", **more)
    assert _amqp10.plain_one(interception, message, bytes(message.encode())) is None
