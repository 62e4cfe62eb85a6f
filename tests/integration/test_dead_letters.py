"""Dead letters: what was given up lies in another stream as it was, with the reason beside it."""

import pika
import pytest

from relatum.errors import BrokerUnavailable, ConfigurationError, PublishUnroutable
from relatum.publishing import DeadLetters
from relatum.reading import BrokerAddress
from tests.support import declare_stream, delete_stream, unique_name
from tests.support.place import Place

ADDED = ("relatum_dead_reason", "relatum_dead_stream", "relatum_dead_offset", "attempts")


def test_a_dead_letter_is_the_message_and_why(place: Place, dead_stream: str) -> None:
    """Body, properties and headers are kept; reason and place are added."""
    headers = {"order_id": "4711", "n": 3, "ok": True}
    given = {"type": "order", "content_type": "text/plain", "timestamp": 1_700_000_000, "priority": 4}
    properties = pika.BasicProperties(headers=headers, message_id="m-1", delivery_mode=2, **given)
    place.put((b"first", {}), (b"second", properties))
    messages = place.messages()
    with DeadLetters(BrokerAddress.parse(place.amqp), dead_stream) as letters:
        letters.publish(messages, "it cannot be read", attempts=5)
    first, second = place.messages(dead_stream)
    assert (first.body, second.body) == (b"first", b"second")
    assert second.properties == messages[1].properties
    added = dict(zip(ADDED, ("it cannot be read", place.stream, 1, 5), strict=True))
    assert second.headers == headers | added


def test_a_long_reason_is_cut_and_a_lost_connection_is_opened_again(place: Place, dead_stream: str) -> None:
    """No reason makes a message that no stream takes; a connection that ended costs the next message nothing."""
    place.put(b"x")
    with DeadLetters(BrokerAddress.parse(place.amqp), dead_stream) as letters:
        letters.publish(place.messages(), "é" * 100_000)
        letters.close()
        letters.publish(place.messages(), "two")
    assert [each.headers["relatum_dead_reason"] for each in place.messages(dead_stream)] == ["é" * 1_000, "two"]


def test_a_stream_that_does_not_exist_is_one_clear_error(place: Place) -> None:
    """Nothing is declared for the caller, and nothing is dropped in silence."""
    place.put(b"x")
    missing = unique_name("missing")
    with DeadLetters(BrokerAddress.parse(place.amqp), missing) as letters:
        with pytest.raises(PublishUnroutable, match=missing):
            letters.publish(place.messages(), "no")
        declare_stream(place.amqp, missing)
        try:
            letters.publish(place.messages(), "no")
            assert [each.body for each in place.messages(missing)] == [b"x"]
        finally:
            delete_stream(place.amqp, missing)


def test_what_cannot_publish_says_so(place: Place) -> None:
    """An address without an AMQP port is refused at once, an absent broker at the first message."""
    with pytest.raises(ConfigurationError, match="amqp"):
        DeadLetters(BrokerAddress.parse("rabbitmq-stream://localhost:5552/"), "dead")
    place.put(b"x")
    away = BrokerAddress.parse("amqp://user:secret@127.0.0.1:1/")
    with DeadLetters(away, "dead") as letters, pytest.raises(BrokerUnavailable) as caught:
        letters.publish(place.messages(), "no")
    assert "secret" not in str(caught.value)
