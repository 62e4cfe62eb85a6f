"""Messages of AMQP deliveries, as clients give them, and what is refused in place of one."""

import sys
from collections.abc import Callable
from types import FrameType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import aio_pika
import pika
import pytest
import rstream

from relatum.errors import InvalidInput
from relatum.reading import Message
from relatum_consumer.lookups.arguments import given_message
from tests.support.amqp import encode, section


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview], ids=["bytes", "bytearray", "memoryview"])
def test_a_body_and_headers_are_bytes_of_any_type(kind: Callable[[bytes], bytes]) -> None:
    """Any bytes type is accepted as body or header value, by compiled and plain modules."""
    properties = pika.BasicProperties(headers={"text": bytearray(b"late"), "binary": bytearray(b"\xff")})
    message = Message.from_amqp("orders", 1, properties, kind(b"body"))
    assert (message.body, dict(message.headers)) == (b"body", {"text": "late", "binary": b"\xff"})


def test_threads_may_decode_a_delivery_at_once() -> None:
    """Threads that decode a delivery at once each get the whole message, wherever they interleave."""

    def decoded_with_another_at(step: int) -> int:
        """Decode a message as if another thread did between two steps; gives how many steps there were."""
        message = Message.from_amqp("orders", 1, pika.BasicProperties(message_id="m1"), b"body")
        steps = 0

        def trace(frame: FrameType, event: str, _: Any) -> Any:
            nonlocal steps
            if frame.f_code is not Message._parts.__code__:
                return None
            frame.f_trace_opcodes = True
            steps += event == "opcode"
            if event == "opcode" and steps == step:
                sys.settrace(None)
                assert message.properties.message_id == "m1"
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            body = message.body
        finally:
            sys.settrace(before)
        assert body == b"body"
        return steps

    steps = decoded_with_another_at(0)
    assert steps > 10
    for step in range(1, steps + 1):
        decoded_with_another_at(step)


METHOD = pika.spec.Basic.Deliver("tag", 1, False, "", "orders")
GOT = pika.spec.Basic.GetOk(1, False, "", "orders", 0)
SECRET = b"card 4711"


def lying(stream: Any = "orders", offset: Any = 3, timestamp: Any = 0) -> SimpleNamespace:
    return SimpleNamespace(stream=stream, offset=offset, timestamp=timestamp)


def properties(**values: Any) -> pika.BasicProperties:
    return pika.BasicProperties(**values)


def itself() -> dict[str, Any]:
    table: dict[str, Any] = {}
    table["x-own"] = table
    return table


STRANGE: dict[str, Any] = {
    "headers are a text": (METHOD, properties(headers="abc"), SECRET),
    "headers are a list": (METHOD, properties(headers=[1]), SECRET),
    "a name is no text": (METHOD, properties(headers={1: 2, b"a": 3}), SECRET),
    "a table holds itself": (METHOD, properties(headers=itself()), SECRET),
    "the body is a text": (METHOD, properties(), "card 4711"),
    "no body": (METHOD, properties(), None),
    "what a callback gets": (None, METHOD, properties(headers={"card": "4711"}), SECRET),
    "a number": 7,
    "bodies alone": (b"a", b"b", b"c"),
    "properties alone": properties(),
    "a list": [METHOD, properties(), SECRET],
    "rstream: a number": (5, lying()),
    "rstream: numbers": ([1, 2], lying()),
    "rstream: a table": ({1: 2}, lying()),
    "rstream: a text": ("card 4711", lying()),
    "rstream: nothing": (None, lying()),
    "rstream: no offset": (SECRET, lying(offset=None)),
    "rstream: a truth": (SECRET, lying(offset=True)),
    "rstream: before the first": (SECRET, lying(offset=-1)),
    "rstream: none can be so far": (SECRET, lying(offset=2**64)),
    "rstream: no stream": (SECRET, lying(stream="")),
    "rstream: cannot be encoded": (rstream.AMQPMessage(body=object()), lying()),
    "to be sent": aio_pika.Message(SECRET),
    "a class": aio_pika.IncomingMessage,
    "a mock of one": MagicMock(spec=aio_pika.IncomingMessage),
}


@pytest.mark.parametrize("what", STRANGE)
def test_what_no_client_gives_is_an_error_that_says_what_is_taken(what: str) -> None:
    """What no client delivers is refused with the accepted forms, and without the message's content."""
    with pytest.raises(InvalidInput, match="pika") as told:
        given_message(STRANGE[what])
    assert "4711" not in str(told.value)


def test_nothing_in_hand_asks_whether_anything_was_found() -> None:
    """None in place of a message is refused with a hint that the lookup or the queue had none."""
    with pytest.raises(InvalidInput, match=r"did `find` find nothing.*status and explanation"):
        given_message(None)  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="the queue was empty"):
        given_message((None, None, None))


def is_same(one: Any, other: Any) -> bool:
    is_copy = given_message(one).is_copy
    assert is_copy is not None
    return is_copy(given_message(other).message)


def test_a_message_that_holds_no_number_is_its_own_copy() -> None:
    """A message with a NaN in its headers is equal to its own copy."""
    given = [(METHOD, properties(headers={"rate": float("nan"), "order_id": 1}), b"x") for _ in range(2)]
    assert is_same(*given)


@pytest.mark.parametrize("delivered", [1, 1.5], ids=["pika", "aio-pika"])
def test_a_message_with_a_floating_point_header_is_its_own_copy(delivered: float) -> None:
    """The stream's copy counts as the message itself, although pika cuts floating-point headers to integers."""
    is_copy = given_message((METHOD, properties(headers={"rate": delivered}), b"x")).is_copy
    assert is_copy is not None
    stored = [
        Message.from_record("orders", 1, section(0x74, encode({"rate": rate})) + section(0x75, encode(b"x")))
        for rate in (1.5, 2.5, float("inf"))
    ]
    assert [is_copy(each) for each in stored] == [True, False, False]


def test_an_offset_is_not_taken_of_what_basic_get_gave() -> None:
    """An offset header is ignored in a message of `basic_get`, which reads no streams."""
    headers = {"x-stream-offset": 5}
    queue, stream = ((method, properties(headers=headers), b"x") for method in (GOT, METHOD))
    assert is_same(queue, stream)
    assert not is_same(stream, queue)


def test_properties_are_what_the_broker_had() -> None:
    """An expiration that aio-pika shows in seconds is the broker's text of milliseconds."""
    fields = dict.fromkeys(("content_type", "content_encoding", "headers", "delivery_mode", "priority"))
    fields |= dict.fromkeys(("correlation_id", "reply_to", "message_id", "timestamp", "message_type"))
    fields |= dict.fromkeys(("user_id", "app_id", "cluster_id"))
    header = SimpleNamespace(properties=SimpleNamespace(expiration="60000", **fields))
    places = dict.fromkeys(("consumer_tag", "delivery_tag", "exchange", "message_count", "redelivered"))
    delivered = SimpleNamespace(channel=None, body=b"x", header=header, routing_key=None, delivery=None, **places)
    message = aio_pika.IncomingMessage(delivered, no_ack=True)  # type: ignore[arg-type]
    assert message.expiration == 60
    assert given_message(message).message.properties.expiration == "60000"


@pytest.mark.parametrize("name", ["message_id", "correlation_id"])
def test_an_id_that_the_broker_shows_as_a_header_is_the_id(name: str) -> None:
    """A binary or long AMQP 1.0 id, for which AMQP 0.9.1 has no property, is read as the stream's reader reads it."""
    header = f"x-{name.replace('_', '-')}"
    for shown, text in [(b"o1", "o1"), (b"\xff", None), ("o" * 256, "o" * 256)]:
        message = Message.from_amqp("orders", 1, properties(headers={header: shown}), b"")
        assert (getattr(message.properties, name), dict(message.headers)) == (text, {})
    own = Message.from_amqp("orders", 1, properties(headers={header: "o1"}), b"")
    assert (getattr(own.properties, name), dict(own.headers)) == (None, {header: "o1"})


def test_an_empty_id_names_no_message() -> None:
    """Messages with an empty id are copies only if their headers are equal, too."""
    first, copy, other = (
        (METHOD, properties(message_id="", headers={"order_id": order}), b"") for order in ("o1", "o1", "o2")
    )
    assert is_same(first, copy)
    assert not is_same(first, other)
