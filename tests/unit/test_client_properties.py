"""Properties that are stamped here are sent byte for byte as pika and pamqp, which aiormq uses, send them."""

from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from pamqp.commands import Basic
from pika import BasicProperties
from pika.compat import long

from relatum.publishing import OwnProperties, copy_with
from relatum.publishing._aio_pika import copy_of
from relatum.uuid7 import uuid7

texts = st.text(max_size=300) | st.sampled_from(["", "a", "\ud800", "x" * 255, "ü" * 128])
values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(2**63), 2**63 - 1).map(long)
    | texts
    | st.binary(max_size=40)
    | st.sampled_from([Decimal("1.5"), datetime(2024, 1, 1, tzinfo=UTC), 1.5, object()]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
names = texts | st.sampled_from([b"bytes", 5, None])
headers = st.none() | st.dictionaries(names, values, max_size=5) | st.dictionaries(st.just("order_id"), texts)
ids = texts | st.just(uuid7(5)) | st.just("ü" * 36) | st.sampled_from([b"id", 7])
numbers = st.none() | st.integers(-1, 256)
maybe = st.none() | texts | st.just(5)
strings = ("content_type", "content_encoding", "correlation_id", "reply_to", "expiration", "type", "user_id", "app_id")
given_properties = st.fixed_dictionaries(
    {"message_id": ids},
    optional={
        "headers": headers,
        **dict.fromkeys(("delivery_mode", "priority", "timestamp"), numbers),
        **dict.fromkeys((*strings, "cluster_id"), maybe),
    },
)


def encoded(properties: BasicProperties) -> bytes | type[BaseException]:
    """What is sent, or the kind of error there is instead."""
    try:
        return b"".join(properties.encode())
    except Exception as error:
        return type(error)


@given(given_properties)
def test_they_are_encoded_as_pika_encodes_them(fields: dict[str, Any]) -> None:
    """Whatever is in them, the same bytes, or the same error."""
    theirs = encoded(BasicProperties(**fields))
    assert encoded(OwnProperties(**fields)) == theirs
    assert encoded(OwnProperties(**fields)) == theirs, "by the names that are remembered"


@given(given_properties)
def test_a_copy_says_what_was_given(fields: dict[str, Any]) -> None:
    """A copy has all that was given, and its own headers and id."""
    properties = BasicProperties(**fields)
    ours = copy_with(properties, {"a": "b"}, "id")
    assert ours == BasicProperties(**fields | {"headers": {"a": "b"}, "message_id": "id"})
    assert properties == BasicProperties(**fields)


# --- pamqp ------------------------------------------------------------------------------------------------------------


def marshalled(properties: Basic.Properties) -> Any:
    try:
        return properties.marshal()
    except Exception as error:
        return type(error), str(error)


@given(given_properties)
def test_they_are_sent_as_pamqp_sends_them(fields: dict[str, Any]) -> None:
    """Or refused by its own error; and they are equal. Names of headers are cut where pamqp cuts them."""
    theirs = Basic.Properties()
    for name, value in fields.items():
        setattr(theirs, "message_type" if name == "type" else name, value)
    ours = copy_of(theirs)
    assert marshalled(ours) == marshalled(theirs)
    assert ours == theirs
