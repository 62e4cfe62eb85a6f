"""A member of a collector, as a process of its own; ends in order on SIGTERM.

Arguments: face, broker, stream protocol, database, port of the ledger, streams. "joined" messages are booked in the
joined transaction, "plain" ones sent to the ledger; one in 50 fails at first, and one in 97 for good.
"""

import asyncio
import logging
import signal
import socket
import sys
import threading
import time
from functools import partial
from typing import Any

import sqlalchemy as sa

from relatum import AsyncMessageCollector, Broker, MessageCollector
from relatum.collecting import Bulk, Collected, ExecutorOptions, Failure

BOOK = sa.text("INSERT INTO booked VALUES (:id)")
BULKS: dict[str, Any] = {"bulk_messages": 40, "max_age_s": 0.05, "workers": 2, "attempts": 12, "backoff_s": 0.05}

WORK_S = 0.02
"""Seconds an executor takes: the longer, the more often it is interrupted."""


def failure_of(message: Collected) -> Failure | None:
    number = int(message.message_id.rpartition("-")[2])
    if number % 97 == 0:
        return Failure("never", retry=False)
    return Failure("not yet") if number % 50 == 0 and message.attempts == 1 else None


def book(bulk: Bulk) -> list[Failure | None]:
    assert bulk.connection is not None
    results = [failure_of(each) for each in bulk.messages]
    booked = [{"id": each.message_id} for each, result in zip(bulk.messages, results, strict=True) if result is None]
    if booked:
        bulk.connection.execute(BOOK, booked)
        time.sleep(WORK_S)
    return results


def note(port: int, bulk: Bulk) -> list[Failure | None]:
    """Have the ledger write down what succeeds; what it does not answer for failed."""
    results = [failure_of(each) for each in bulk.messages]
    ids = [each.message_id for each, result in zip(bulk.messages, results, strict=True) if result is None]
    line = " ".join(ids).encode() + b"\n"
    time.sleep(WORK_S)
    with socket.create_connection(("127.0.0.1", port), 60) as connection, connection.makefile("rwb") as ledger:
        ledger.write(line)
        ledger.flush()
        if ledger.readline() != line:
            raise ConnectionError("the ledger ended")
    return results


def registered(collector: Any, joined: Any, plain: Any) -> Any:
    collector.register_executor("joined", joined, ExecutorOptions(joins_transaction=True, **BULKS))
    collector.register_executor("plain", plain, ExecutorOptions(**BULKS))
    return collector


async def with_asyncio(port: int, options: dict[str, Any]) -> None:
    async def write(bulk: Bulk) -> list[Failure | None]:
        return await asyncio.to_thread(book, bulk)

    async def send(bulk: Bulk) -> list[Failure | None]:
        return await asyncio.to_thread(note, port, bulk)

    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    await registered(AsyncMessageCollector("billing", **options), write, send).run(stop)


def main(face: str, broker: str, stream_url: str, database: str, port: str, *streams: str) -> None:
    logging.basicConfig(format="%(asctime)s %(process)d %(levelname)s %(message)s", level=logging.WARNING)
    logging.getLogger("pika").setLevel(logging.CRITICAL)
    servers = {"broker": Broker(broker, stream_url=stream_url), "database": database}
    options = {**servers, "streams": streams, "lease_s": 1.0}
    if face == "threads":
        stop = threading.Event()
        signal.signal(signal.SIGTERM, lambda *_: stop.set())
        registered(MessageCollector("billing", **options), book, partial(note, int(port))).run(stop)
    else:
        asyncio.run(with_asyncio(int(port), options))


if __name__ == "__main__":
    main(*sys.argv[1:])
