"""Clients that Relatum does not know: a plain connection of pika's stands for them."""

from typing import Any

import pika
import pytest
import sqlalchemy as sa

import relatum
from relatum.errors import ConfigurationError, HeadersRefused, InvalidRelationshipKey, KeyDefinitionConflict
from relatum.uuid7 import time_us_of
from relatum_consumer import Relations
from tests.support import broker_connection, record, wait_recorded


def publish(amqp_url: str, stream: str, order: str) -> str:
    """Publish by a bare client what `stamped` gives; returns the id."""
    headers, message_id = relatum.stamped({"order_id": order})
    with broker_connection(amqp_url) as connection:
        channel = connection.channel()
        channel.confirm_delivery()
        channel.basic_publish("", stream, b"", pika.BasicProperties(headers=headers, message_id=message_id))
    return message_id


def test_headers_are_copied_and_an_id_says_the_time() -> None:
    """The caller's headers stay as they are; id and time are of the same moment, unless the caller gives the time."""
    given = {"order_id": "o1"}
    headers, message_id = relatum.stamped(given)
    assert given == {"order_id": "o1"}
    assert set(headers) == {"order_id", "relatum_time"}
    assert abs(headers["relatum_time"] - time_us_of(message_id)) < 1_000_000
    assert relatum.stamped({"relatum_time": 5})[0] == {"relatum_time": 5}
    assert list(relatum.stamped()[0]) == ["relatum_time"]
    assert relatum.stamped()[1] != relatum.stamped()[1]


def test_headers_that_cannot_be_sent_are_refused() -> None:
    """A time that is none, and a bomb of headers."""
    with pytest.raises(InvalidRelationshipKey):
        relatum.stamped({"relatum_time": "now"})
    with pytest.raises(HeadersRefused):
        relatum.stamped({str(number): number for number in range(100_000)})


def test_what_a_plain_client_publishes_is_recorded_here(
    amqp_url: str, stream_url: str, database_url: str, engine: sa.Engine, stream_name: str
) -> None:
    """Inside of the block, by a recorder of this process; its id is found with it."""
    place: Any = {"streams": [stream_name], "stream_url": stream_url}
    with relatum.recording_here(amqp_url, database_url, keys=["order_id"], **place):
        message_id = publish(amqp_url, stream_name, "o1")
        assert wait_recorded(amqp_url, engine, stream_name) == 1
    with Relations(amqp_url, database_url, stream_url=stream_url) as relations:
        (found,) = relations.find("order_id", "o1")
        assert found.properties.message_id == message_id


def test_what_cannot_be_recorded_here_is_told_at_once(
    amqp_url: str, database_url: str, engine: sa.Engine, stream_name: str
) -> None:
    """No stream named, and a key that the database defines otherwise."""
    with (
        pytest.raises(ConfigurationError, match="streams="),
        relatum.recording_here(amqp_url, database_url, streams=[]),
    ):
        pass
    record(amqp_url, engine, stream_name, keys=["order_id"])
    other = relatum.KeyDefinition("order_id", "property:correlation_id")
    with (
        pytest.raises(KeyDefinitionConflict),
        relatum.recording_here(amqp_url, database_url, keys=[other], streams=stream_name),
    ):
        pass
