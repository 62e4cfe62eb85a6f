"""A member of a serial consumer, as a process of its own; ends in order on SIGTERM.

Arguments: face, broker, stream protocol, database, super stream, consumer name. Each message's context, body and place
become a row of the table `consumed`, in the transaction that moves the positions.
"""

import asyncio
import logging
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import sqlalchemy as sa

from relatum import AsyncSerialConsumer, SerialConsumer
from relatum.contexts import AsyncSerialBatch, SerialBatch
from relatum.errors import Transient

INSERT = sa.text("INSERT INTO consumed (context, name, stream, stream_offset) VALUES (:context, :name, :stream, :at)")
RETRY_S = 0.1


def rows_of(batch: Any) -> list[dict[str, Any]]:
    """What a batch adds to the table: what has a context; the test itself publishes what has none."""
    return [
        {"context": context, "name": message.body.decode(), "stream": message.stream, "at": message.offset}
        for message in batch.messages
        if (context := batch.context_of(message)) is not None
    ]


def write(batch: SerialBatch) -> None:
    """Consume a batch: each message exactly once."""
    with batch.transaction() as connection:
        if rows := rows_of(batch):
            connection.execute(INSERT, rows)


async def write_from_loop(batch: AsyncSerialBatch) -> None:
    """The same from a loop."""
    async with batch.transaction() as connection:
        if rows := rows_of(batch):
            await asyncio.to_thread(connection.execute, INSERT, rows)


def with_threads(super_stream: str, name: str, options: dict[str, Any]) -> None:
    """Consume by `SerialConsumer` until SIGTERM."""
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    while not stop.is_set():
        with tolerated(), SerialConsumer(super_stream, name, **options) as consumer:
            while not stop.is_set():
                with tolerated():
                    consumer.run(write, stop)
        stop.wait(RETRY_S)


async def with_asyncio(super_stream: str, name: str, options: dict[str, Any]) -> None:
    """Consume by `AsyncSerialConsumer` until SIGTERM."""
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    while not stop.is_set():
        with tolerated():
            async with AsyncSerialConsumer(super_stream, name, **options) as consumer:
                while not stop.is_set():
                    with tolerated():
                        await consumer.run(write_from_loop, stop)
        await asyncio.sleep(RETRY_S)


@contextmanager
def tolerated() -> Iterator[None]:
    """Go on after what happens when servers are killed; all else ends the process."""
    try:
        yield
    except Transient as error:
        logging.info("%s: %s", type(error).__name__, error)


def main(face: str, broker: str, stream_url: str, database: str, super_stream: str, name: str) -> None:
    """Work until killed or told to end."""
    logging.basicConfig(format="%(asctime)s %(process)d %(levelname)s %(message)s", level=logging.ERROR)
    logging.getLogger("pika").setLevel(logging.CRITICAL)
    options = {"database": database, "broker": broker, "stream_url": stream_url}
    if face == "threads":
        with_threads(super_stream, name, options)
    else:
        asyncio.run(with_asyncio(super_stream, name, options))


if __name__ == "__main__":
    main(*sys.argv[1:])
