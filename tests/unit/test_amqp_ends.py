"""Where a stream ends, as AMQP 0.9.1 tells it: by steps alone, without a broker."""

import asyncio
from collections.abc import Generator
from typing import Any

import pika
import pytest

from relatum.errors import ConnectionLost, ReadTimeout, StreamUnavailable
from relatum.reading import BrokerAddress
from relatum.reading._aio_pika_links import AioPikaLinks
from relatum.reading._amqp_operations import AmqpOperations, Consume, Count, Delivery, Next
from relatum.reading._scan import Scan
from relatum.reading._start import beginning
from relatum.reading._turns import Use

FIRST, LAST = [Delivery(0, pika.BasicProperties(), b"a")], [Delivery(7, pika.BasicProperties(), b"h")]


def driven(steps: Generator[Any, Any, Any], answers: list[Any], count: int) -> Any:
    """What an operation gives, where a broker answers `Next` so in turn, and has so many messages."""
    answer: Any = None
    try:
        while True:
            step = steps.send(answer)
            if isinstance(step, Next):
                answer = answers.pop(0)
            else:
                answer = count if isinstance(step, Count) else None
                assert isinstance(step, Count | Consume)
    except StopIteration as end:
        return end.value


def test_a_busy_broker_is_no_end() -> None:
    """A stream that has messages is not taken for one that has none, or one only, since nothing came at once."""
    operations = AmqpOperations(10.0)
    assert driven(operations.bounds("s"), [FIRST, [], LAST, []], count=8) == (0, 7)
    with pytest.raises(ReadTimeout, match="'s'"):
        driven(operations.bounds("s"), [FIRST, [], []], count=8)
    with pytest.raises(ReadTimeout, match="'s'"):
        driven(operations.scan("s", Scan(beginning(3), None, False, 1), 10.0), [[], []], count=8)


def test_an_empty_stream_has_no_end() -> None:
    """Silence, twice, is an answer where the stream has no messages."""
    operations = AmqpOperations(10.0)
    assert driven(operations.bounds("s"), [[], []], count=0) == (None, None)
    assert driven(operations.scan("s", Scan(beginning(3), None, False, 1), 10.0), [[], []], count=0) is None


def test_a_count_of_nothing_is_no_proof() -> None:
    """A node that started just now counts no messages of a stream that has some: what comes later still counts."""
    operations = AmqpOperations(10.0)
    assert driven(operations.bounds("s"), [[], FIRST, [], LAST, []], count=0) == (0, 7)


def test_an_end_that_does_not_show() -> None:
    """A stream that has a first message is asked for its last one as long as may be; its first is not its last."""
    assert driven(AmqpOperations(10.0).bounds("s"), [FIRST, [], [], [], LAST, []], count=0) == (0, 7)
    with pytest.raises(StreamUnavailable, match="'s'"):
        driven(AmqpOperations(0.0).bounds("s"), [FIRST, [], []], count=0)


class Line:
    """A connection of aiormq's, as far as it is asked whether it ended, and ended."""

    is_closed = False

    async def close(self) -> None:
        """End it."""
        self.is_closed = True


def test_who_loses_a_connection_leaves_the_next_one_alone() -> None:
    """A task that learns late that a connection is lost does not end the one that another task has opened since."""
    lost, opened = Line(), Line()
    links = AioPikaLinks(BrokerAddress.of("amqp://127.0.0.1:1"), 1.0, 10, 4)
    links._connection = lost

    async def lose() -> None:
        async with links.link(Use.ANSWER):
            links._connection = opened
            raise ConnectionLost("it ended")

    with pytest.raises(ConnectionLost):
        asyncio.run(lose())
    assert lost.is_closed
    assert not opened.is_closed
    assert links._connection is opened
