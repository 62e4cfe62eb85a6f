"""Dead letters: what was given up lies in another stream as it was, with the reason beside it."""

import pika
import pytest

from relatum.errors import BrokerUnavailable, ConfigurationError, PublishUnroutable
from relatum.publishing import DeadLetters
from relatum.reading import BrokerAddress, StreamReader
from tests.support import declare_stream, delete_stream, unique_name
from tests.support.place import Place


def test_a_dead_letter_is_the_message_and_why(place: Place, dead_stream: str) -> None:
    """Body, properties and headers are kept; reason and place are added."""
    properties = pika.BasicProperties(
        headers={"order_id": "4711", "n": 3, "ok": True},
        message_id="m-1",
        type="order",
        content_type="text/plain",
        timestamp=1_700_000_000,
        priority=4,
        delivery_mode=2,
    )
    place.put((b"first", {}), (b"second", properties))
    with StreamReader.open(place.amqp) as reader, DeadLetters(BrokerAddress.parse(place.amqp), dead_stream) as letters:
        messages = list(reader.iterate(place.stream, 0, stop=2))
        letters.publish(messages, "it cannot be read", attempts=5)
        first, second = reader.iterate(dead_stream, 0, stop=2)
    assert (first.body, second.body) == (b"first", b"second")
    assert second.properties == messages[1].properties
    assert second.headers == {
        "order_id": "4711",
        "n": 3,
        "ok": True,
        "relatum_dead_reason": "it cannot be read",
        "relatum_dead_stream": place.stream,
        "relatum_dead_offset": 1,
        "attempts": 5,
    }


def test_a_long_reason_is_cut(place: Place, dead_stream: str) -> None:
    """No reason makes a message that no stream takes."""
    place.put(b"x")
    with StreamReader.open(place.amqp) as reader, DeadLetters(BrokerAddress.parse(place.amqp), dead_stream) as letters:
        letters.publish([reader.read(place.stream, 0)], "é" * 100_000)
        assert reader.read(dead_stream, 0).headers["relatum_dead_reason"] == "é" * 1_000


def test_a_stream_that_does_not_exist_is_one_clear_error(place: Place) -> None:
    """Nothing is declared for the caller, and nothing is dropped in silence."""
    place.put(b"x")
    missing = unique_name("missing")
    with StreamReader.open(place.amqp) as reader, DeadLetters(BrokerAddress.parse(place.amqp), missing) as letters:
        message = reader.read(place.stream, 0)
        with pytest.raises(PublishUnroutable, match=missing):
            letters.publish([message], "no")
        declare_stream(place.amqp, missing)
        try:
            letters.publish([message], "no")
            assert reader.read(missing, 0).body == b"x"
        finally:
            delete_stream(place.amqp, missing)


def test_a_lost_connection_is_opened_again(place: Place, dead_stream: str) -> None:
    """A connection that ended while nothing was published costs the next message nothing."""
    place.put(b"x")
    with StreamReader.open(place.amqp) as reader, DeadLetters(BrokerAddress.parse(place.amqp), dead_stream) as letters:
        message = reader.read(place.stream, 0)
        letters.publish([message], "one")
        letters.close()
        letters.publish([message], "two")
        assert reader.read(dead_stream, 1).headers["relatum_dead_reason"] == "two"


def test_what_cannot_publish_says_so(place: Place) -> None:
    """An address without an AMQP port is refused at once, an absent broker at the first message."""
    with pytest.raises(ConfigurationError, match="amqp"):
        DeadLetters(BrokerAddress.parse("rabbitmq-stream://localhost:5552/"), "dead")
    place.put(b"x")
    with StreamReader.open(place.amqp) as reader:
        message = reader.read(place.stream, 0)
    with (
        DeadLetters(BrokerAddress.parse("amqp://user:secret@127.0.0.1:1/"), "dead") as letters,
        pytest.raises(BrokerUnavailable) as caught,
    ):
        letters.publish([message], "no")
    assert "secret" not in str(caught.value)
