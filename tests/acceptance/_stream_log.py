"""A stream read whole by bare pika: what tests of kills compare with. Nothing here is Relatum's."""

import uuid
from collections.abc import Iterator
from typing import Any, NamedTuple

import pika

UNACKNOWLEDGED = 500


class Record(NamedTuple):
    offset: int
    properties: pika.BasicProperties
    body: bytes

    @property
    def headers(self) -> dict[str, Any]:
        return self.properties.headers or {}


def read_stream(broker_url: str, stream: str) -> Iterator[Record]:
    """All messages of a stream, up to a message without headers that this publishes as its end, and does not give."""
    end = uuid.uuid4().hex
    connection = pika.BlockingConnection(pika.URLParameters(broker_url))
    channel = connection.channel()
    channel.confirm_delivery()
    channel.basic_publish("", stream, b"", pika.BasicProperties(message_id=end))
    reading = connection.channel()
    reading.basic_qos(prefetch_count=UNACKNOWLEDGED)
    for method, properties, body in reading.consume(stream, arguments={"x-stream-offset": "first"}):
        if properties.message_id == end:
            break
        if method.delivery_tag % (UNACKNOWLEDGED // 4) == 0:
            reading.basic_ack(method.delivery_tag, multiple=True)
        yield Record(properties.headers["x-stream-offset"], properties, body)
    connection.close()
