"""A publisher that forks workers, as pre-fork servers do: all of them publish with receipts. SIGTERM ends it.

Arguments: name, number of workers, AMQP, stream protocol, database, directory of ledgers, streams. Each process writes
lines into a ledger of its own: `sending NAME`, then `confirmed NAME` (a receipt), `at NAME STREAM OFFSET`,
`absent NAME` (it is in no stream) or `unknown NAME`.
"""

import ctypes
import itertools
import logging
import os
import random
import signal
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import pika
from pika.exceptions import AMQPError

import relatum
from relatum import Broker
from relatum.errors import PublishOutcomeUnknown, PublishRejected, RelatumError, Transient

KEYS = ("host", "order_id")
RATE_S = 0.05
RETRY_S = 0.2
HEARTBEAT_S = 5
"""Three of them after a connection was lost, nothing of it can arrive any more."""

SETTLE_S = 40.0
RECEIPT_S = 30.0
WAITED_FOR = 4
"""Of so many messages the place of one is waited for."""

_PR_SET_PDEATHSIG = 1


class Publisher:
    def __init__(self, name: str, amqp: str, stream_url: str, database: str, ledgers: str, streams: list[str]) -> None:
        self.stop = threading.Event()
        self._name, self._amqp, self._streams, self._ledgers = name, amqp, streams, Path(ledgers)
        broker = Broker(amqp, stream_url=stream_url)
        self._options: dict[str, Any] = {"broker": broker, "database": database, "keys": KEYS}
        self._begin()

    def _begin(self) -> None:
        self._id = f"{self._name}.{os.getpid()}"
        self._chance = random.Random(self._id)
        self._numbers = itertools.count(1)
        self._ledger = os.open(self._ledgers / f"{self._id}.ledger", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._workers: set[int] = set()

    def run(self, workers: int) -> None:
        while not self.stop.wait(RETRY_S):
            try:
                parameters = pika.URLParameters(self._amqp)
                parameters.heartbeat = HEARTBEAT_S
                connection = pika.BlockingConnection(parameters)
                relatum.intercept(connection, **self._options)
                try:
                    self._publish_over(connection.channel(), workers)
                finally:
                    relatum.release(connection)
                connection.close()
            except (AMQPError, OSError, RelatumError) as error:
                logging.info("%s: %s", type(error).__name__, error)
        for pid in self._workers:
            os.kill(pid, signal.SIGTERM)
        for pid in self._workers:
            os.waitpid(pid, 0)

    def _publish_over(self, channel: Any, workers: int) -> None:
        while not self.stop.wait(RATE_S):
            self._publish(channel)
            self._keep(workers)

    def _keep(self, workers: int) -> None:
        self._workers -= {pid for pid in self._workers if os.waitpid(pid, os.WNOHANG)[0]}
        while len(self._workers) < workers:
            child = os.fork()
            if child == 0:
                ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
                self._begin()
                self.run(workers=0)
                # The objects on the stack belong to the parent.
                os._exit(0)
            self._workers.add(child)

    def _publish(self, channel: Any) -> None:
        name, stream = f"{self._id}/{next(self._numbers)}", self._chance.choice(self._streams)
        properties = pika.BasicProperties(headers={"order_id": name, "host": self._id})
        self._write("sending", name)
        try:
            receipt = relatum.publish(channel, "", stream, name.encode(), properties)
        except PublishOutcomeUnknown as error:
            self._settle(name, error)
            raise
        except (AMQPError, RelatumError):
            # Refused, or an error of the client or of Relatum from before anything was sent.
            self._write("absent", name)
            raise
        self._write("confirmed", name)
        if self._chance.randrange(WAITED_FOR) == 0:
            with suppress(Transient):
                self._write_places(name, receipt.wait(RECEIPT_S))

    def _settle(self, name: str, error: PublishOutcomeUnknown) -> None:
        try:
            self._write_places(name, error.settle(SETTLE_S))
        except PublishRejected:
            self._write("absent", name)
        except RelatumError as still:
            self._write("unknown", name, type(still).__name__)

    def _write_places(self, name: str, places: Any) -> None:
        for place in places:
            self._write("at", name, place.stream, place.offset)

    def _write(self, *words: object) -> None:
        os.write(self._ledger, (" ".join(map(str, words)) + "\n").encode())


def main(name: str, workers: str, amqp: str, stream_url: str, database: str, ledgers: str, *streams: str) -> None:
    logging.basicConfig(format="%(asctime)s %(process)d %(levelname)s %(message)s", level=logging.WARNING)
    logging.getLogger("pika").setLevel(logging.CRITICAL)
    publisher = Publisher(name, amqp, stream_url, database, ledgers, list(streams))
    signal.signal(signal.SIGTERM, lambda *_: publisher.stop.set())
    publisher.run(int(workers))


if __name__ == "__main__":
    main(*sys.argv[1:])
