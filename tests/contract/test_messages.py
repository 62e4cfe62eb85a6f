"""A message is the same value through every face, and as pika delivers it, whoever published it."""

import asyncio
import contextlib
import pickle
from datetime import UTC, datetime
from urllib.parse import urlsplit

import aio_pika
import pika
import pytest
from pika.exceptions import AMQPError
from rstream import AMQPMessage, Producer

from relatum.reading import Message, Properties, StreamReader, TimeSource
from relatum.uuid7 import uuid7
from tests.contract._faces import FACES, Face, open_face
from tests.support import broker_connection, publish_plain, wait_until

MOMENT = datetime(2026, 3, 4, 5, 6, 7, tzinfo=UTC)
SECONDS = int(MOMENT.timestamp())

PIKA_MESSAGES = [
    pika.BasicProperties(),
    pika.BasicProperties(headers={}),
    pika.BasicProperties(
        content_type="application/json",
        content_encoding="utf-8",
        headers={"order_id": "o-1", "n": 42, "big": 2**40, "negative": -1, "flag": True, "off": False, "none": None},
        delivery_mode=2,
        priority=3,
        correlation_id="c-1",
        reply_to="replies/of me",
        expiration="60000",
        message_id="m-1",
        timestamp=SECONDS,
        type="t-1",
        app_id="app-1",
    ),
    pika.BasicProperties(delivery_mode=1, headers={"x-device": "d-1", "x-number": 7, "when": MOMENT}),
    pika.BasicProperties(headers={"text as bytes": b"abc", "bytes": b"\xff\x00\xfe", "long": "v" * 5000, "é": "ü€"}),
    pika.BasicProperties(message_id="00000000-0000-4000-8000-000000000001", timestamp=0),
    pika.BasicProperties(headers={"x-exchange": "a", "x-routing-key": "b", "x-stream-offset": 5, "x-basic-a": 1}),
    pika.BasicProperties(headers={"relatum_time": 1_700_000_000_123_456}, timestamp=SECONDS),
]


def delivered(amqp_url: str, stream: str, count: int) -> list[Message]:
    """The first messages of a stream, as pika delivers them."""
    messages: list[Message] = []
    # Leaving rejects what came on, over which RabbitMQ up to 3.12 closes the connection.
    with contextlib.suppress(AMQPError), broker_connection(amqp_url) as connection:
        channel = connection.channel()
        channel.basic_qos(prefetch_count=count)
        for method, properties, body in channel.consume(stream, arguments={"x-stream-offset": "first"}):
            messages.append(Message.from_amqp(stream, properties.headers["x-stream-offset"], properties, body))
            channel.basic_ack(method.delivery_tag)
            if len(messages) == count:
                break
    return messages


def through_all_faces(amqp_url: str, stream: str) -> list[Message]:
    """All messages of a stream, read by every face, and as pika delivers them; they must be the same."""
    by_face = {}
    for name in FACES:
        with open_face(name, amqp_url) as face:
            by_face[name] = face.iterate(stream)
    first = by_face[FACES[0]]
    by_face["pika"] = delivered(amqp_url, stream, len(first))
    for name, messages in by_face.items():
        for one, other in zip(first, messages, strict=True):
            assert (one.id, one.properties, dict(one.headers), one.body) == (
                other.id,
                other.properties,
                dict(other.headers),
                other.body,
            ), name
    assert all(first == messages for messages in by_face.values())
    return first


def test_pika_messages(amqp_url: str, stream_name: str) -> None:
    """Everything pika can publish comes back the same, on every version, apart from what the broker drops."""
    bodies = [str(number).encode() for number in range(len(PIKA_MESSAGES))]
    publish_plain(amqp_url, stream_name, list(zip(bodies, PIKA_MESSAGES, strict=True)))
    messages = through_all_faces(amqp_url, stream_name)
    assert [message.body for message in messages] == bodies
    assert messages[0].properties == Properties()
    assert messages[2].properties == Properties(
        content_type="application/json",
        content_encoding="utf-8",
        delivery_mode=2,
        priority=3,
        correlation_id="c-1",
        reply_to="replies/of me",
        expiration="60000",
        message_id="m-1",
        timestamp=MOMENT,
        type="t-1",
        app_id="app-1",
    )
    assert dict(messages[2].headers) == PIKA_MESSAGES[2].headers
    assert dict(messages[3].headers) == {"x-device": "d-1", "x-number": 7, "when": MOMENT}
    assert messages[4].headers["text as bytes"] == "abc"
    assert messages[4].headers["bytes"] == b"\xff\x00\xfe"
    assert dict(messages[6].headers) == {}
    assert all(type(value) is not float for message in messages for value in message.headers.values())


def test_times(amqp_url: str, stream_name: str) -> None:
    """A message's time is the microsecond header's, else the property's, else an id's of ours, else the chunk's."""
    publish_plain(
        amqp_url,
        stream_name,
        [
            (b"", PIKA_MESSAGES[7]),
            (b"", pika.BasicProperties(timestamp=SECONDS)),
            (b"", {"relatum_time": True}),
            (b"", {"relatum_time": "1"}),
            (b"", {"relatum_time": 2**62}),
            (b"", pika.BasicProperties(message_id=uuid7(1_700_000_000_123_456_789))),
            (b"", pika.BasicProperties(message_id="018bcfe5-687b-7000-8000-000000000000")),
        ],
    )
    times = [(message.time_us, message.time_source) for message in through_all_faces(amqp_url, stream_name)]
    assert times[:2] == [(1_700_000_000_123_456, TimeSource.HEADER), (SECONDS * 10**6, TimeSource.PROPERTY)]
    assert times[5] == (1_700_000_000_123_456, TimeSource.MESSAGE_ID)
    assert [source for _, source in (*times[2:5], times[6])] == [TimeSource.CHUNK] * 4


def test_aio_pika_messages(amqp_url: str, stream_name: str) -> None:
    """What aio-pika publishes comes back the same."""

    async def publish() -> None:
        connection = await aio_pika.connect(amqp_url)
        async with connection:
            channel = await connection.channel()
            for headers in ({}, {"order_id": "o", "n": 1, "small": -5, "flag": True, "when": MOMENT}):
                message = aio_pika.Message(b"body", headers=headers, type="t", message_id="m", timestamp=MOMENT)
                await channel.default_exchange.publish(message, stream_name)

    asyncio.run(publish())
    messages = through_all_faces(amqp_url, stream_name)
    assert [message.body for message in messages] == [b"body", b"body"]
    assert dict(messages[1].headers) == {"order_id": "o", "n": 1, "small": -5, "flag": True, "when": MOMENT}
    assert (messages[1].properties.type, messages[1].properties.timestamp) == ("t", MOMENT)


def publish_by_rstream(stream_url: str, stream: str, messages: list[object]) -> None:
    """Publish over the stream protocol."""
    parts = urlsplit(stream_url)

    async def publish() -> None:
        async with Producer(
            parts.hostname or "",
            port=parts.port or 5552,
            username=parts.username or "guest",
            password=parts.password or "guest",
            load_balancer_mode=True,
        ) as producer:
            for message in messages:
                await producer.send_wait(stream, message)

    asyncio.run(publish())


def test_messages_of_stream_clients(amqp_url: str, stream_url: str, stream_name: str) -> None:
    """AMQP 1.0 messages of a stream client come back the same through both readers, and as pika delivers them."""
    publish_by_rstream(
        stream_url,
        stream_name,
        [AMQPMessage(body=b"plain"), AMQPMessage(body=b"keyed", application_properties={"order_id": "o", "n": 3})],
    )
    messages = through_all_faces(amqp_url, stream_name)
    assert [(message.body, dict(message.headers)) for message in messages] == [
        (b"plain", {}),
        (b"keyed", {"order_id": "o", "n": 3}),
    ]


@pytest.mark.parametrize("raw", [b"not AMQP at all", b"", b"\x00", b"\x00\x53\x75", b"\xff" * 100])
def test_bytes_that_are_no_amqp_message(stream_url: str, stream_name: str, raw: bytes) -> None:
    """What a stream client wrote without AMQP's encoding is a message with a body and nothing else."""
    publish_by_rstream(stream_url, stream_name, [raw])
    with StreamReader.open(stream_url) as reader:
        message = reader.read(stream_name, 0)
    assert (message.is_amqp, message.body, dict(message.headers)) == (False, raw, {})
    assert message.time_source is TimeSource.CHUNK


def test_a_message_is_a_value(face: Face, amqp_url: str, stream_name: str) -> None:
    """It cannot be changed, can be hashed, compared and pickled, and shows no content when printed."""
    publish_plain(amqp_url, stream_name, [(b"secret", {"order_id": "hidden"})])
    message = wait_until(lambda: face.iterate(stream_name))[0]
    with pytest.raises(AttributeError):
        message.offset = 5  # type: ignore[misc]
    with pytest.raises(TypeError):
        message.headers["a"] = 1  # type: ignore[index]
    again = pickle.loads(pickle.dumps(message))
    assert again == message
    assert hash(again) == hash(message)
    assert repr(message) == f"<Message {stream_name}@0>"
    assert message != face.iterate
