"""Messages of AMQP 0.9.1 deliveries, with bytes of whatever type a client gives."""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pika
import pytest

from relatum.reading import Message


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview], ids=["bytes", "bytearray", "memoryview"])
def test_a_body_and_headers_are_bytes_of_any_type(kind: Callable[[bytes], bytes]) -> None:
    """Whether the modules that decode run compiled, which is strict of types, or not."""
    properties = pika.BasicProperties(headers={"text": bytearray(b"late"), "binary": bytearray(b"\xff")})
    message = Message.from_amqp("orders", 1, properties, kind(b"body"))
    assert (message.body, dict(message.headers)) == (b"body", {"text": "late", "binary": b"\xff"})


def test_threads_may_decode_a_delivery_at_once() -> None:
    """Wherever in its decoding one thread is when another has done it, both have all of the message."""

    def decoded_with_another_at(step: int) -> int:
        """Decode a message as if another thread did between two steps; gives how many steps there were."""
        message = Message.from_amqp("orders", 1, pika.BasicProperties(message_id="m1"), b"body")
        steps = 0

        def trace(frame: FrameType, event: str, _: Any) -> Any:
            nonlocal steps
            if frame.f_code is not Message._parts.__code__:
                return None
            frame.f_trace_opcodes = True
            steps += event == "opcode"
            if event == "opcode" and steps == step:
                sys.settrace(None)
                assert message.properties.message_id == "m1"
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            body = message.body
        finally:
            sys.settrace(before)
        assert body == b"body"
        return steps

    steps = decoded_with_another_at(0)
    assert steps > 10
    for step in range(1, steps + 1):
        decoded_with_another_at(step)
