"""Messages of AMQP 0.9.1 deliveries, with bytes of whatever type a client gives."""

from collections.abc import Callable

import pika
import pytest

from relatum.reading import Message


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview], ids=["bytes", "bytearray", "memoryview"])
def test_a_body_and_headers_are_bytes_of_any_type(kind: Callable[[bytes], bytes]) -> None:
    """Whether the modules that decode run compiled, which is strict of types, or not."""
    properties = pika.BasicProperties(headers={"text": bytearray(b"late"), "binary": bytearray(b"\xff")})
    message = Message.from_amqp("orders", 1, properties, kind(b"body"))
    assert (message.body, dict(message.headers)) == (b"body", {"text": "late", "binary": b"\xff"})
