"""Moves that pause where a test wants them to, publishers that sleep, and what consumers make of it."""

import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pika
import sqlalchemy as sa
from pika.adapters.blocking_connection import BlockingChannel

from relatum.contexts import MoveProgress, SerialConsumer
from relatum.superstreams import Layout
from tests.support import LIMIT_S, broker_connection
from tests.support.leases import let_last


def of_context(name: str, **properties: Any) -> pika.BasicProperties:
    return pika.BasicProperties(headers={"serialization_context": name}, **properties)


@contextmanager
def confirming(url: str) -> Iterator[BlockingChannel]:
    with broker_connection(url) as connection:
        channel = connection.channel()
        channel.confirm_delivery()
        yield channel


def sleeping(channel: Any, meanwhile: Callable[[], None]) -> None:
    """Let the channel's next publish happen only after something else has: its publisher sleeps just before it."""
    publish = channel.basic_publish

    def publish_later(*args: Any, **kwargs: Any) -> Any:
        channel.basic_publish = publish
        meanwhile()
        return publish(*args, **kwargs)

    channel.basic_publish = publish_later


def sleeping_task(channel: Any, meanwhile: Callable[[], Awaitable[Any]]) -> None:
    get_exchange = channel.get_exchange

    async def get_sleeper(*args: Any, **kwargs: Any) -> Any:
        channel.get_exchange = get_exchange
        exchange = await get_exchange(*args, **kwargs)
        publish = exchange.publish

        async def publish_later(*args: Any, **kwargs: Any) -> Any:
            await meanwhile()
            return await publish(*args, **kwargs)

        exchange.publish = publish_later
        return exchange

    channel.get_exchange = get_sleeper


def other_than(layout: Layout, stream: str) -> str:
    return next(each.stream for each in layout if each.stream != stream)


class HeldMove(AbstractContextManager["HeldMove"]):
    """A move of contexts that stops in a state ("fencing" or "fenced") until `go`. Nobody resumes it before."""

    def __init__(self, contexts: Any, names: list[str], to: str, state: str, engine: sa.Engine) -> None:
        self._state = state
        self._engine = engine
        self._is_there = threading.Event()
        self._may_go = threading.Event()
        self._thread = threading.Thread(target=contexts.move, args=(names, to), kwargs={"progress": self._hold})

    def _hold(self, progress: MoveProgress) -> None:
        if str(progress.move.state) == self._state:
            self._is_there.set()
            assert self._may_go.wait(90)

    def begin(self) -> None:
        self._thread.start()
        assert self._is_there.wait(90), f"the move did not become {self._state}"
        let_last(self._engine)

    def go(self) -> None:
        self._may_go.set()
        if self._thread.ident is not None:
            self._thread.join(90)

    def __exit__(self, *_: object) -> None:
        self.go()


def consumed(
    super_stream: str, database_url: str, broker: str, count: int, *, name: str = "reader", **options: Any
) -> dict[str, list[bytes]]:
    """The bodies of each context in order, as a serial consumer gets `count` of them, and no more in half a second."""
    found: dict[str, list[bytes]] = {}
    total = 0
    with SerialConsumer(super_stream, name, database=database_url, broker=broker, **options) as consumer:
        while (batch := consumer.next_batch(LIMIT_S if total < count else 0.5)) is not None:
            for message in batch.messages:
                found.setdefault(batch.context_of(message) or "", []).append(message.body)
                total += 1
            batch.acknowledge()
    assert total == count, f"{total} messages were consumed, not {count}"
    return found
