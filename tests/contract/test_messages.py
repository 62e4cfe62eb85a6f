"""A message is the same value through every reader, and as pika delivers it, for every publisher."""

import asyncio
import pickle
from datetime import UTC, datetime
from typing import Any
from urllib.parse import urlsplit

import pika
import pytest
from rstream import AMQPMessage, Producer

from relatum.common.uuid7 import uuid7
from relatum.reading import Message, Properties, TimeSource
from tests.contract._clients import open_line
from tests.contract._faces import FACES, Face, open_face
from tests.support import all_plain, publish_plain, wait_until

MOMENT = datetime(2026, 3, 4, 5, 6, 7, tzinfo=UTC)
SECONDS = int(MOMENT.timestamp())

FIELDS: dict[str, Any] = {
    "content_type": "application/json",
    "content_encoding": "utf-8",
    "delivery_mode": 2,
    "priority": 3,
    "correlation_id": "c-1",
    "reply_to": "replies/of me",
    "expiration": "60000",
    "message_id": "m-1",
    "type": "t-1",
    "app_id": "app-1",
}
HEADERS = {"order_id": "o-1", "n": 42, "big": 2**40, "negative": -1, "flag": True, "off": False, "none": None}

PIKA_MESSAGES = [
    pika.BasicProperties(),
    pika.BasicProperties(headers={}),
    pika.BasicProperties(headers=HEADERS, timestamp=SECONDS, **FIELDS),
    pika.BasicProperties(delivery_mode=1, headers={"x-device": "d-1", "x-number": 7, "when": MOMENT}),
    pika.BasicProperties(headers={"text as bytes": b"abc", "bytes": b"\xff\x00\xfe", "long": "v" * 5000, "é": "ü€"}),
    pika.BasicProperties(message_id="00000000-0000-4000-8000-000000000001", timestamp=0),
    pika.BasicProperties(headers={"x-exchange": "a", "x-routing-key": "b", "x-stream-offset": 5, "x-basic-a": 1}),
    pika.BasicProperties(headers={"relatum_time": 1_700_000_000_123_456}, timestamp=SECONDS),
]


def through_all_faces(amqp_url: str, stream: str) -> list[Message]:
    """All messages of a stream, read by every face, and as pika delivers them; they must be the same."""
    by_face = {"pika": [Message.from_amqp(stream, *delivered) for delivered in all_plain(amqp_url, stream)]}
    for name in FACES:
        with open_face(name, amqp_url) as face:
            by_face[name] = face.iterate(stream)
    first = by_face[FACES[0]]
    for name, messages in by_face.items():
        assert [parts(message) for message in messages] == [parts(message) for message in first], name
        assert messages == first
    return first


def parts(message: Message) -> tuple[Any, ...]:
    return message.id, message.properties, dict(message.headers), message.body


def test_pika_messages(amqp_url: str, stream_name: str) -> None:
    """What pika can publish comes back the same, apart from what the broker drops."""
    bodies = [str(number).encode() for number in range(len(PIKA_MESSAGES))]
    publish_plain(amqp_url, stream_name, list(zip(bodies, PIKA_MESSAGES, strict=True)))
    messages = through_all_faces(amqp_url, stream_name)
    assert ([message.body for message in messages], messages[0].properties) == (bodies, Properties())
    assert messages[2].properties == Properties(timestamp=MOMENT, **FIELDS)
    assert dict(messages[2].headers) == HEADERS
    assert dict(messages[3].headers) == {"x-device": "d-1", "x-number": 7, "when": MOMENT}
    assert (messages[4].headers["text as bytes"], messages[4].headers["bytes"]) == ("abc", b"\xff\x00\xfe")
    assert dict(messages[6].headers) == {}
    assert all(type(value) is not float for message in messages for value in message.headers.values())


def test_times(amqp_url: str, stream_name: str) -> None:
    """A message's time is the microsecond header's, else the property's, else an id's of ours, else the chunk's."""
    given = [
        PIKA_MESSAGES[7],
        pika.BasicProperties(timestamp=SECONDS),
        *({"relatum_time": strange} for strange in (True, "1", 2**62)),
        pika.BasicProperties(message_id=uuid7(1_700_000_000_123_456_789)),
        pika.BasicProperties(message_id="018bcfe5-687b-7000-8000-000000000000"),
    ]
    publish_plain(amqp_url, stream_name, [(b"", each) for each in given])
    times = [(message.time_us, message.time_source) for message in through_all_faces(amqp_url, stream_name)]
    assert times[:2] == [(1_700_000_000_123_456, TimeSource.HEADER), (SECONDS * 10**6, TimeSource.PROPERTY)]
    assert times[5] == (1_700_000_000_123_456, TimeSource.MESSAGE_ID)
    assert [source for _, source in (*times[2:5], times[6])] == [TimeSource.CHUNK] * 4


def test_aio_pika_messages(amqp_url: str, stream_name: str) -> None:
    """What aio-pika publishes comes back the same."""
    given: list[dict[str, Any]] = [{}, {"order_id": "o", "n": 1, "small": -5, "flag": True, "when": MOMENT}]
    with open_line("aio-pika", amqp_url) as line:
        channel = line.channel()
        for headers in given:
            message = line.message(b"body", headers=headers, type="t", message_id="m", timestamp=MOMENT)
            line.publish(channel, message, stream_name)
    messages = through_all_faces(amqp_url, stream_name)
    assert [(message.body, dict(message.headers)) for message in messages] == [(b"body", each) for each in given]
    assert (messages[1].properties.type, messages[1].properties.timestamp) == ("t", MOMENT)


def publish_by_rstream(stream_url: str, stream: str, messages: list[object]) -> None:
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
    given: list[tuple[bytes, dict[str, Any]]] = [(b"plain", {}), (b"keyed", {"order_id": "o", "n": 3})]
    sent: list[object] = [AMQPMessage(body=body, application_properties=headers or None) for body, headers in given]
    publish_by_rstream(stream_url, stream_name, sent)
    messages = through_all_faces(amqp_url, stream_name)
    assert [(message.body, dict(message.headers)) for message in messages] == given


def test_bytes_that_are_no_amqp_message(face: Face, stream_url: str, stream_name: str) -> None:
    """What a stream client wrote without AMQP's encoding is a message with a body and nothing else."""
    raw: list[object] = [b"not AMQP at all", b"", b"\x00", b"\x00\x53\x75", b"\xff" * 100]
    publish_by_rstream(stream_url, stream_name, raw)
    messages = face.iterate(stream_name)
    assert [message.body for message in messages] == raw
    for message in messages:
        assert (message.is_amqp, dict(message.headers), message.time_source) == (False, {}, TimeSource.CHUNK)


def test_a_message_is_a_value(face: Face, amqp_url: str, stream_name: str) -> None:
    """It cannot be changed, can be hashed, compared and pickled, and shows no content when printed."""
    publish_plain(amqp_url, stream_name, [(b"secret", {"order_id": "hidden"})])
    message = wait_until(lambda: face.iterate(stream_name))[0]
    with pytest.raises(AttributeError):
        message.offset = 5  # type: ignore[misc]
    with pytest.raises(TypeError):
        message.headers["a"] = 1  # type: ignore[index]
    again = pickle.loads(pickle.dumps(message))
    assert (again, hash(again)) == (message, hash(message))
    assert repr(message) == f"<Message {stream_name}@0>"
    assert message != face.iterate
