"""A copy of the firehose's becomes the message it is of, byte by byte, whatever is in it; all else is none."""

import struct
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pamqp import decode, encode
from pika import BasicProperties

from relatum.tapping._unwrapping import unwrapped


def raw_of(properties: BasicProperties) -> bytes:
    """Properties as pika writes them."""
    return b"".join(properties.encode())


def copy_of(wrapped: dict[str, Any], *, keys: Any = ("orders",), **more: Any) -> bytes:
    """The properties of a copy, as the firehose writes them."""
    headers = {"exchange_name": "", "routing_keys": list(keys), "properties": wrapped, "node": "rabbit@a", **more}
    return raw_of(BasicProperties(headers=headers))


def read(raw: bytes) -> BasicProperties:
    """Properties as pika reads them."""
    found = BasicProperties()
    found.decode(raw)
    return found


def test_every_property_is_moved_but_the_user() -> None:
    """Each is where AMQP 0.9.1 has it; `user_id` is left out, since only its user may send it."""
    given_ = {
        "content_type": "application/json",
        "content_encoding": "gzip",
        "headers": {"order": "7", "table": {"a": [1, {"b": None}]}},
        "delivery_mode": 2,
        "priority": 3,
        "correlation_id": "c",
        "reply_to": "r",
        "expiration": "60000",
        "message_id": "é" * 120,
        "timestamp": 1_790_000_000,
        "type": "t",
        "app_id": "a",
    }
    found = unwrapped(copy_of({**given_, "user_id": "u", "cluster_id": "k"}))
    assert found is not None
    assert found.routing_key == "orders"
    assert read(found.properties) == BasicProperties(**given_)
    assert unwrapped(copy_of({}, keys=())) == ("", b"\0\0")


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.text(max_size=40)
    | st.binary(max_size=9).map(bytearray),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=12,
)


@given(st.dictionaries(st.text(max_size=8), VALUES, max_size=5))
def test_headers_are_moved_as_they_are(headers: dict[str, Any]) -> None:
    """Their bytes are the publisher's, whatever types they have."""
    table = encode.field_table(headers)
    wrapped = encode.field_table({"headers": headers, "message_id": "m"})
    copied = b"\x20\0" + _table({b"properties": b"F" + wrapped, b"routing_keys": b"A" + encode.field_array(["k"])})
    found = unwrapped(copied)
    assert found is not None
    assert found.properties == b"\x20\x80" + table + b"\x01m"


def test_doubles_keep_their_bits_and_decimals_become_texts() -> None:
    """No number is rounded; those whose publisher a stream would disconnect are told as they are written."""
    double = struct.pack(">cd", b"d", 0.1)
    decimal = struct.pack(">cBi", b"D", 2, -150)
    inner = _table({b"price": decimal, b"all": b"A" + struct.pack(">I", len(decimal)) + decimal, b"rate": double})
    headers = b"F" + _table({b"in": b"F" + inner, b"price": decimal, b"rate": double})
    wrapped = _table({b"headers": headers})
    found = unwrapped(b"\x20\0" + _table({b"properties": b"F" + wrapped, b"routing_keys": b"A\0\0\0\0"}))
    assert found is not None
    _, table = decode.field_table(found.properties[2:])
    assert table == {"in": {"price": "-1.50", "all": ["-1.50"], "rate": 0.1}, "price": "-1.50", "rate": 0.1}


def _table(fields: dict[bytes, bytes]) -> bytes:
    content = b"".join(bytes((len(name),)) + name + value for name, value in fields.items())
    return struct.pack(">I", len(content)) + content


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\0\0",
        raw_of(BasicProperties(headers={"a": 1})),
        raw_of(BasicProperties(headers={"properties": "x", "routing_keys": ["a"]})),
        raw_of(BasicProperties(headers={"properties": {}, "routing_keys": [1]})),
        raw_of(BasicProperties(headers={"properties": {}, "routing_keys": Decimal(1)})),
    ],
)
def test_what_is_no_copy_is_none(raw: bytes) -> None:
    """Somebody else's message in the queue is none of the firehose's."""
    assert unwrapped(raw) is None


@given(st.binary(max_size=200), st.integers(0, 300), st.integers(0, 255))
def test_bytes_that_are_broken_raise_nothing(junk: bytes, place: int, byte: int) -> None:
    """Whatever is in the queue, and wherever it is cut off."""
    whole = copy_of({"headers": {"a": [1, {"b": "c"}]}, "message_id": "m"})
    unwrapped(junk)
    unwrapped(whole[:place])
    changed = bytearray(whole)
    changed[place % len(whole)] = byte
    unwrapped(bytes(changed))
