"""Publishing straight to a stream, where the broker stops to answer."""

import pytest
from pika import BasicProperties

from relatum.errors import BrokerUnavailable
from relatum.publishing import DirectPublisher
from relatum.reading import BrokerAddress, StreamReader
from tests.support import until_answered
from tests.support.proxy import Proxy


def test_a_broker_that_does_not_answer_counts_as_away(amqp_url: str, stream_name: str) -> None:
    """Where no confirm comes, publishing ends in time; where the broker answers again, so does the publisher."""
    with Proxy.to(amqp_url) as proxy:
        address = BrokerAddress.parse(proxy.url(amqp_url))
        with DirectPublisher(address, "a test message", timeout_s=2.0) as publisher:
            until_answered(lambda: publisher.publish(stream_name, b"0", BasicProperties()))
            proxy.mode = "blackhole"
            with pytest.raises(BrokerUnavailable, match="no answer within"):
                publisher.publish(stream_name, b"lost", BasicProperties())
            with pytest.raises(BrokerUnavailable):
                publisher.publish(stream_name, b"lost", BasicProperties())
            proxy.mode = "pass"
            until_answered(lambda: publisher.publish(stream_name, b"1", BasicProperties()))
    with StreamReader.open(amqp_url) as reader:
        # What was answered too late was published again.
        assert list(dict.fromkeys(message.body for message in reader.iterate(stream_name))) == [b"0", b"1"]


def test_closing_does_not_wait_for_a_broker_that_does_not_answer(amqp_url: str, stream_name: str) -> None:
    """A publisher whose broker stopped to answer is closed all the same."""
    with Proxy.to(amqp_url) as proxy, DirectPublisher(BrokerAddress.parse(proxy.url(amqp_url)), "x") as publisher:
        publisher.publish(stream_name, b"0", BasicProperties())
        proxy.mode = "blackhole"
