"""A publisher of messages of contexts, as a process of its own; ends in order on SIGTERM.

Arguments: face, its name, line, broker, database, super stream, ledger, contexts, messages a second. It publishes on
the line, another way to the broker. Each message's body is `<name>/<number>`. What it is about to publish, and what it
was told, it writes into the ledger, a line each.
"""

import asyncio
import logging
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import aio_pika
import pika
from pika.exceptions import AMQPError

from relatum import AsyncContextRouter, ContextRouter
from relatum.errors import PublishOutcomeUnknown, RelatumError

AT_ONCE = 4
"""Messages under way side by side in a loop; none of one context."""

SETTLE_S = 30.0
RETRY_S = 0.1


class Ledger:
    """Writes down what was about to be published and what was told, each by one write."""

    def __init__(self, path: str, name: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._name = name
        self._number = 0

    def sending(self, context: str) -> str:
        """Note that a new message is published now; gives its name."""
        self._number += 1
        name = f"{self._name}/{self._number}"
        self._write("sending", name, context)
        return name

    def told(self, name: str, context: str) -> None:
        """Note that the router said that it is there."""
        self._write("told", name, context)

    def _write(self, kind: str, name: str, context: str) -> None:
        os.write(self._file, f"{kind} {time.monotonic()!r} {name} {context}\n".encode())


class Publisher:
    """What both faces have in common.

    Args:
        name: The publisher's name.
        line: The broker's URL to publish by.
        broker: The broker's URL.
        database: The database's URL.
        super_stream: Where to publish.
        ledger: Where to write it down.
        contexts: How many contexts there are.
        rate: Messages a second, at most.
    """

    def __init__(
        self, name: str, line: str, broker: str, database: str, super_stream: str, ledger: str, contexts: str, rate: str
    ) -> None:
        self.line = line
        self.broker = broker
        self.database = database
        self.super_stream = super_stream
        self.ledger = Ledger(ledger, name)
        self.names = [f"context-{number}" for number in range(int(contexts))]
        self.pause_s = 1 / float(rate)
        self.chance = random.Random(name)


def with_threads(publisher: Publisher) -> None:
    """Publish by `ContextRouter` until SIGTERM."""
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    with ContextRouter(publisher.super_stream, publisher.database, broker=publisher.broker) as router:
        while not stop.is_set():
            with tolerated():
                connection = pika.BlockingConnection(pika.URLParameters(publisher.line))
                channel = connection.channel()
                channel.confirm_delivery()
                while not stop.wait(publisher.pause_s):
                    publish(publisher, router, channel)
                connection.close()
            stop.wait(RETRY_S)


def publish(
    publisher: Publisher, router: ContextRouter, channel: pika.adapters.blocking_connection.BlockingChannel
) -> None:
    """Publish one message of any context."""
    context = publisher.chance.choice(publisher.names)
    name = publisher.ledger.sending(context)
    properties = pika.BasicProperties(headers={"serialization_context": context})
    try:
        router.publish(channel, name.encode(), properties)
    except PublishOutcomeUnknown as error:
        error.settle(SETTLE_S)
    publisher.ledger.told(name, context)


async def with_asyncio(publisher: Publisher) -> None:
    """Publish by `AsyncContextRouter` until SIGTERM."""
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    async with AsyncContextRouter(publisher.super_stream, publisher.database, broker=publisher.broker) as router:
        while not stop.is_set():
            with tolerated():
                connection = await aio_pika.connect(publisher.line)
                async with connection:
                    channel = await connection.channel()
                    parts = [publisher.names[start::AT_ONCE] for start in range(AT_ONCE)]
                    await asyncio.gather(*(publish_all(publisher, router, channel, part, stop) for part in parts))
            await asyncio.sleep(RETRY_S)


async def publish_all(
    publisher: Publisher,
    router: AsyncContextRouter,
    channel: aio_pika.abc.AbstractChannel,
    contexts: list[str],
    stop: asyncio.Event,
) -> None:
    """Publish messages of some contexts, one after the other."""
    while not stop.is_set():
        context = publisher.chance.choice(contexts)
        name = publisher.ledger.sending(context)
        message = aio_pika.Message(name.encode(), headers={"serialization_context": context})
        try:
            await router.publish(channel, message)
        except PublishOutcomeUnknown as error:
            await error.settle(SETTLE_S)
        publisher.ledger.told(name, context)
        await asyncio.sleep(publisher.pause_s * AT_ONCE)


@contextmanager
def tolerated() -> Iterator[None]:
    """Go on after what happens when servers are killed: the message under way was not told, that is all."""
    try:
        yield
    except (RelatumError, AMQPError, aio_pika.exceptions.AMQPError, OSError) as error:
        logging.info("%s: %s", type(error).__name__, error)


def main(face: str, *arguments: str) -> None:
    """Work until killed or told to end."""
    logging.basicConfig(format="%(asctime)s %(process)d %(levelname)s %(message)s", level=logging.ERROR)
    for name in ("pika", "aiormq", "aio_pika"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    publisher = Publisher(*arguments)
    if face == "threads":
        with_threads(publisher)
    else:
        asyncio.run(with_asyncio(publisher))


if __name__ == "__main__":
    main(*sys.argv[1:])
