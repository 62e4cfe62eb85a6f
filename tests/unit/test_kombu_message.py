"""Messages that are stamped here are sent byte for byte as py-amqp sends them."""

from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

from amqp.basic_message import Message
from hypothesis import given
from hypothesis import strategies as st

from relatum.publishing.clients._kombu_message import OwnMessage

texts = st.text(max_size=300) | st.sampled_from(["", "a", "\ud800", "x" * 255, "ü" * 128])
edges = st.sampled_from([edge + step for edge in (2**31, -(2**31), 2**63, -(2**63)) for step in (-1, 0, 1)])
values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | edges
    | texts
    | st.binary(max_size=40)
    | st.sampled_from([Decimal("1.5"), datetime(2024, 1, 1, tzinfo=UTC), 1.5, object()]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.tuples(inner, inner) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)
names = texts | st.sampled_from([b"bytes", 5, None])
maybe = st.none() | texts | st.sampled_from([5, b"bytes", ["a"]])
numbers = st.none() | st.booleans() | st.integers(-1, 256) | st.just("2")
given_properties = st.fixed_dictionaries(
    {},
    optional={
        "application_headers": st.none() | st.dictionaries(names, values, max_size=5) | st.just("none"),
        "content_type": maybe,
        "content_encoding": maybe,
        "delivery_mode": numbers,
        "priority": numbers,
        "correlation_id": maybe,
        "reply_to": maybe,
        "expiration": maybe,
        "message_id": maybe,
        "timestamp": numbers,
        "type": maybe,
        "app_id": maybe,
        "no_property": maybe,
    },
)


def encoded(message: Message) -> bytes | type[BaseException]:
    """What is sent, or the kind of error there is instead."""
    try:
        sent: bytes = message._serialize_properties()
    except Exception as error:
        return type(error)
    return sent


@given(given_properties)
def test_they_are_encoded_as_py_amqp_encodes_them(properties: dict[str, Any]) -> None:
    """Whatever is in them, the same bytes, or the same error; only what is encoded may have been sent."""
    theirs = encoded(Message("body", **properties))
    for _again in range(2):
        ours = OwnMessage("body", **properties)
        assert encoded(ours) == theirs
        assert ours.is_encoded is isinstance(theirs, bytes)
