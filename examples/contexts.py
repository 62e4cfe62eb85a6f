"""Move a serialization context to a new partition: its messages stay in order, and no other context waits.

Set RELATUM_BROKER_URL and RELATUM_DATABASE_URL (`relatum up` prints both), then: python examples/contexts.py
"""

import os

import pika

import relatum
from relatum.contexts import SerializationContexts
from relatum.superstreams import declare_super_stream

broker, database = os.environ["RELATUM_BROKER_URL"], os.environ["RELATUM_DATABASE_URL"]
connection = pika.BlockingConnection(pika.URLParameters(broker))
declare_super_stream(connection, "flights", partitions=2)
channel = connection.channel()
channel.confirm_delivery()


def publish_legs(plane: str, *legs: bytes) -> None:
    """Publish the legs of a plane's flights, in order."""
    for leg in legs:
        properties = pika.BasicProperties(headers={"serialization_context": plane})
        router.publish(channel, leg, properties)


with relatum.ContextRouter("flights", database) as router:
    publish_legs("N14228", b"EWR IAH", b"IAH DEN")
    with SerializationContexts("flights", database, broker=broker) as contexts:
        [added] = contexts.add_partitions()
        [move] = contexts.move("N14228", to=added)
        print(f"moved from {move.source} to {move.target}, and no other context waited")
    publish_legs("N14228", b"DEN SFO", b"SFO EWR")
with relatum.SerialConsumer("flights", "tower", database=database, broker=broker) as consumer:
    remaining = 4
    while remaining > 0:  # a service would use: for message in consumer.messages()
        batch = consumer.next_batch()
        for message in batch.messages:
            print(message.stream, message.body.decode())
        batch.acknowledge()
        remaining -= len(batch.messages)
connection.close()
