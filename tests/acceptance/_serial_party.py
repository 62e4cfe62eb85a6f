"""A publisher, a member of the consumer "audit", or a mover of contexts, as a process of its own; SIGTERM ends it.

Arguments: role, face, and the fields of `Party` as JSON. Publishers write what they send and are told into a ledger,
members what they get into `consumed`, as positions move; movers move at random, resume others' moves, abort some.
"""

import asyncio
import json
import logging
import random
import signal
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aio_pika
import pika
import sqlalchemy as sa
from pika.exceptions import AMQPError

from relatum import AsyncContextRouter, AsyncSerialConsumer, Broker, ContextRouter, SerialConsumer
from relatum.contexts import AsyncSerialBatch, SerialBatch, SerializationContexts, SerialOptions
from relatum.errors import Conflict, PublishOutcomeUnknown, PublishRejected, RelatumError, Transient

AT_ONCE = 4
"""Messages under way side by side in a loop; none of one context."""

INSERT = sa.text("INSERT INTO consumed (context, name, stream, stream_offset) VALUES (:context, :name, :stream, :at)")
SETTLE_S = 30.0
RETRY_S = 0.1
PAUSE_S = 0.02
MOVED_MAX = 5
ABORTED_SHARE = 0.3
"""Of the moves that another left, this share is taken back."""

OF_AIO_PIKA = (aio_pika.exceptions.AMQPError, aio_pika.exceptions.ChannelInvalidStateError)
TOLERATED: dict[str, tuple[type[Exception], ...]] = {
    "publisher": (RelatumError, AMQPError, OSError, *OF_AIO_PIKA),
    "member": (Transient,),
    "mover": (Conflict, Transient, PublishRejected),
}
"""Errors while others are killed: the current message has no outcome, a batch comes again, or a move waits."""


@dataclass
class Party:
    """The process's role and servers. Its `name` is also the seed of its choices; `rate` is in messages a second."""

    name: str
    broker: str
    stream_url: str
    database: str
    super_stream: str
    lease_s: float
    contexts: int
    rate: float
    ledger: str
    number: int = 0
    names: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.chance = random.Random(self.name)
        self.names = [f"context-{number}" for number in range(self.contexts)]
        self.tolerated = TOLERATED[self.name.partition("-")[0]]
        self.cluster = Broker(self.broker, stream_url=self.stream_url)

    def consumer(self, kind: Any) -> Any:
        options = SerialOptions(lease_s=self.lease_s)
        return kind(self.super_stream, "audit", options, broker=self.cluster, database=self.database)

    def sending(self, contexts: list[str]) -> tuple[str, str]:
        """Note that a new message is published now; gives its context and its name."""
        self.number += 1
        context, name = self.chance.choice(contexts), f"{self.name}/{self.number}"
        self.write("sending", name, context)
        return context, name

    def write(self, kind: str, name: str, context: str) -> None:
        with Path(self.ledger).open("ab", buffering=0) as ledger:
            ledger.write(f"{kind} {time.monotonic()!r} {name} {context}\n".encode())

    @contextmanager
    def going_on(self) -> Iterator[None]:
        """Continue after what happens when servers are killed; all else ends the process."""
        try:
            yield
        except self.tolerated as error:
            logging.info("%s: %s", type(error).__name__, error)


def publish(party: Party, stop: threading.Event) -> None:
    with party.going_on(), ContextRouter(party.super_stream, party.database, broker=party.cluster) as router:
        while not stop.wait(RETRY_S):
            with party.going_on():
                connection = pika.BlockingConnection(pika.URLParameters(party.broker))
                channel = connection.channel()
                channel.confirm_delivery()
                while not stop.wait(1 / party.rate):
                    context, name = party.sending(party.names)
                    properties = pika.BasicProperties(headers={"serialization_context": context})
                    try:
                        router.publish(channel, name.encode(), properties)
                    except PublishOutcomeUnknown as error:
                        error.settle(SETTLE_S)
                    party.write("told", name, context)
                connection.close()


def rows_of(batch: Any) -> list[dict[str, Any]]:
    """What a batch adds to the table: what has a context; the test itself publishes what has none."""
    return [
        {"context": context, "name": message.body.decode(), "stream": message.stream, "at": message.offset}
        for message in batch.messages
        if (context := batch.context_of(message)) is not None
    ]


def write(batch: SerialBatch) -> None:
    with batch.transaction() as connection:
        if rows := rows_of(batch):
            connection.execute(INSERT, rows)


def consume(party: Party, stop: threading.Event) -> None:
    while not stop.wait(RETRY_S):
        with party.going_on(), party.consumer(SerialConsumer) as consumer:
            while not stop.is_set():
                with party.going_on():
                    consumer.run(write, stop)


def move(party: Party, stop: threading.Event) -> None:
    while not stop.wait(RETRY_S):
        # A server may be down when this starts, too.
        with (
            party.going_on(),
            SerializationContexts(party.super_stream, party.database, broker=party.cluster) as contexts,
        ):
            while not stop.wait(PAUSE_S):
                # Another mover may be first; a starting broker has no streams for a moment.
                with party.going_on():
                    finish_one(contexts, party.chance)
                    move_some(contexts, party.chance)


def finish_one(contexts: Any, chance: random.Random) -> None:
    left = [move for move in contexts.moves() if not move.is_attended]
    if left:
        move = chance.choice(left)
        if chance.random() < ABORTED_SHARE:
            contexts.abort(move.move_id, reason="the test")
        else:
            contexts.resume(move.move_id)


def move_some(contexts: Any, chance: random.Random) -> None:
    standing = defaultdict(list)
    for each in contexts.assignments():
        if each.move_id is None:
            standing[each.partition].append(each.context)
    if standing:
        source = chance.choice(sorted(standing))
        target = chance.choice([f"{source.rpartition('-')[0]}-{place}" for place in range(4)])
        if target != source:
            some = chance.sample(standing[source], min(len(standing[source]), chance.randint(1, MOVED_MAX)))
            contexts.move(some, target)


async def publish_in_loop(party: Party, stop: asyncio.Event) -> None:
    with party.going_on():
        async with AsyncContextRouter(party.super_stream, party.database, broker=party.cluster) as router:
            while not stop.is_set():
                with party.going_on():
                    async with await aio_pika.connect(party.broker) as connection:
                        channel = await connection.channel()
                        parts = [party.names[start::AT_ONCE] for start in range(AT_ONCE)]
                        await asyncio.gather(*(publish_part(party, router, channel, part, stop) for part in parts))
                await asyncio.sleep(RETRY_S)


async def publish_part(party: Party, router: Any, channel: Any, contexts: list[str], stop: asyncio.Event) -> None:
    while not stop.is_set():
        context, name = party.sending(contexts)
        try:
            await router.publish(channel, aio_pika.Message(name.encode(), headers={"serialization_context": context}))
        except PublishOutcomeUnknown as error:
            await error.settle(SETTLE_S)
        party.write("told", name, context)
        await asyncio.sleep(AT_ONCE / party.rate)


async def write_in_loop(batch: AsyncSerialBatch) -> None:
    async with batch.transaction() as connection:
        if rows := rows_of(batch):
            await asyncio.to_thread(connection.execute, INSERT, rows)


async def consume_in_loop(party: Party, stop: asyncio.Event) -> None:
    while not stop.is_set():
        with party.going_on():
            async with party.consumer(AsyncSerialConsumer) as consumer:
                while not stop.is_set():
                    with party.going_on():
                        await consumer.run(write_in_loop, stop)
        await asyncio.sleep(RETRY_S)


async def in_loop(work: Any, party: Party) -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    await work(party, stop)


ROLES: dict[tuple[str, str], Any] = {
    ("publisher", "threads"): publish,
    ("publisher", "asyncio"): publish_in_loop,
    ("member", "threads"): consume,
    ("member", "asyncio"): consume_in_loop,
    ("mover", "threads"): move,
}


def main(role: str, face: str, given: str) -> None:
    logging.basicConfig(format="%(asctime)s %(process)d %(levelname)s %(message)s", level=logging.ERROR)
    for name in ("pika", "aiormq", "aio_pika"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    party, work = Party(**json.loads(given)), ROLES[role, face]
    if face == "asyncio":
        asyncio.run(in_loop(work, party))
    else:
        stop = threading.Event()
        signal.signal(signal.SIGTERM, lambda *_: stop.set())
        work(party, stop)


if __name__ == "__main__":
    main(*sys.argv[1:])
