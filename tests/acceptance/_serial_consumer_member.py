"""A member of the serial consumer "kills", as a process of its own, until it is killed.

Arguments: face, broker, database, super stream. Each message is written to the table `consumed`, in the transaction
that stores the position.
"""

import asyncio
import sys
import time
from typing import Any

import sqlalchemy as sa

from relatum import AsyncSerialConsumer, SerialConsumer
from relatum.contexts import AsyncSerialBatch, SerialBatch, SerialOptions

OPTIONS = SerialOptions(lease_s=1.0, batch_messages=20)
WRITE = sa.text("INSERT INTO consumed (message) VALUES (:message)")

WORK_S = 0.1
"""Seconds a batch takes: the longer, the more often it is interrupted."""


def write(connection: sa.Connection, batch: SerialBatch | AsyncSerialBatch) -> None:
    """Write a batch's messages, in order."""
    connection.execute(WRITE, [{"message": message.body.decode()} for message in batch])
    time.sleep(WORK_S)


def consume(super_stream: str, **options: Any) -> None:
    """Consume with threads."""
    with SerialConsumer(super_stream, "kills", OPTIONS, **options) as consumer:
        for batch in consumer.batches():
            try:
                with batch.transaction() as connection:
                    write(connection, batch)
            except Exception as error:
                print(type(error).__name__, error, file=sys.stderr, flush=True)


async def consume_in_loop(super_stream: str, **options: Any) -> None:
    """Consume with asyncio."""
    async with AsyncSerialConsumer(super_stream, "kills", OPTIONS, **options) as consumer:
        async for batch in consumer.batches():
            try:
                async with batch.transaction() as connection:
                    await asyncio.to_thread(write, connection, batch)
            except Exception as error:
                print(type(error).__name__, error, file=sys.stderr, flush=True)


if __name__ == "__main__":
    face, broker, database, name = sys.argv[1:]
    told: dict[str, Any] = {"broker": broker, "database": database}
    if face == "asyncio":
        asyncio.run(consume_in_loop(name, **told))
    else:
        consume(name, **told)
