"""Clients that Relatum does not know: a plain connection of pika's stands for them."""

import pika
import pytest

import relatum
from relatum.errors import ConfigurationError, KeyDefinitionConflict
from relatum_consumer import Relations
from tests.support.place import Place


def test_what_a_plain_client_publishes_is_recorded_here(place: Place) -> None:
    """Inside of the block, by a recorder of this process; its id is found with it."""
    headers, message_id = relatum.stamped({"order_id": "o1"})
    with relatum.recording_here(place.broker, place.database, keys=["order_id"], streams=[place.stream]):
        place.put((b"", pika.BasicProperties(headers=headers, message_id=message_id)))
        place.wait_recorded()
    with Relations(place.broker, place.database) as relations:
        (found,) = relations.find("order_id", "o1")
        assert found.properties.message_id == message_id


def test_what_cannot_be_recorded_here_is_told_at_once(place: Place) -> None:
    """No stream named, and a key that the database defines otherwise."""
    place.record(keys=["order_id"])
    other = relatum.KeyDefinition("order_id", "property:correlation_id")
    with pytest.raises(ConfigurationError, match="streams="):
        relatum.recording_here(place.amqp, place.database, streams=[]).__enter__()
    with pytest.raises(KeyDefinitionConflict):
        relatum.recording_here(place.amqp, place.database, keys=[other], streams=place.stream).__enter__()
