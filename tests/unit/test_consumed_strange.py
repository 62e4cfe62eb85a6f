"""What is handed to look-ups in place of a message: one clear error, never a message that nobody sent."""

from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import aio_pika
import pika
import pytest
import rstream

from relatum.errors import InvalidInput
from relatum_consumer.lookups.consumed import given_message

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
    """Of one kind, whatever is wrong; it shows nothing of what the message says."""
    with pytest.raises(InvalidInput, match="pika") as told:
        given_message(STRANGE[what])
    assert "4711" not in str(told.value)


def test_nothing_in_hand_asks_whether_anything_was_found() -> None:
    """`relations.find(…).first` is None where nothing was found: the error says where to look."""
    with pytest.raises(InvalidInput, match=r"did `find` find nothing.*status and explanation"):
        given_message(None)  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="the queue was empty"):
        given_message((None, None, None))


def is_same(one: Any, other: Any) -> bool:
    """Whether a look-up takes them for the same message, at whatever offset."""
    is_copy = given_message(one).is_copy
    assert is_copy is not None
    return is_copy(given_message(other).message)


def test_a_message_that_holds_no_number_is_its_own_copy() -> None:
    """Such a header equals nothing, not even itself."""
    given = [(METHOD, properties(headers={"rate": float("nan"), "order_id": 1}), b"x") for _ in range(2)]
    assert is_same(*given)


def test_an_offset_is_not_taken_of_what_basic_get_gave() -> None:
    """It gives of queues alone: a publisher copied the header from a message that it had consumed of a stream."""
    headers = {"x-stream-offset": 5}
    queue, stream = ((method, properties(headers=headers), b"x") for method in (GOT, METHOD))
    assert is_same(queue, stream)
    assert not is_same(stream, queue)


def test_properties_are_what_the_broker_had() -> None:
    """aio-pika tells an expiration in seconds; AMQP, and so a recorder, has a text of milliseconds."""
    fields = dict.fromkeys(("content_type", "content_encoding", "headers", "delivery_mode", "priority"))
    fields |= dict.fromkeys(("correlation_id", "reply_to", "message_id", "timestamp", "message_type"))
    fields |= dict.fromkeys(("user_id", "app_id", "cluster_id"))
    header = SimpleNamespace(properties=SimpleNamespace(expiration="60000", **fields))
    places = dict.fromkeys(("consumer_tag", "delivery_tag", "exchange", "message_count", "redelivered"))
    delivered = SimpleNamespace(channel=None, body=b"x", header=header, routing_key=None, delivery=None, **places)
    message = aio_pika.IncomingMessage(delivered, no_ack=True)  # type: ignore[arg-type]
    assert message.expiration == 60
    assert given_message(message).message.properties.expiration == "60000"


def test_an_empty_id_names_no_message() -> None:
    """Two messages of one body whose publishers set an empty id are two: only a copy has the same headers, too."""
    first, copy, other = (
        (METHOD, properties(message_id="", headers={"order_id": order}), b"") for order in ("o1", "o1", "o2")
    )
    assert is_same(first, copy)
    assert not is_same(first, other)
