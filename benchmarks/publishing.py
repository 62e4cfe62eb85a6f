"""Publishing: an intercepted pika connection compared with a bare one."""

import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from typing import Final

import pika
from pika.adapters.blocking_connection import BlockingChannel

import relatum
from benchmarks import _streams as streams
from benchmarks._context import KEYS, Context
from benchmarks._published import CONFIRMED, UNCONFIRMED, WAYS, compared, headers, ids_in
from benchmarks._results import Row

GROUP: Final = "publishing"

CONFIRMED_AIM: Final = 0.97
UNCONFIRMED_AIM: Final = 0.92


def measure(context: Context) -> Iterator[Row]:
    """Yield the rows about publishing."""
    context.say("publishing by pika, bare and intercepted")
    yield _compare(context, "a confirm each", CONFIRMED, CONFIRMED_AIM, has_confirms=True)
    yield _compare(context, "no confirms", UNCONFIRMED, UNCONFIRMED_AIM, has_confirms=False)


def _compare(context: Context, how: str, sizes: tuple[int, int], aim: float, *, has_confirms: bool) -> Row:
    stream = context.empty_stream(f"published-{'with' if has_confirms else 'without'}-confirms")
    with ExitStack() as stack:
        connections = {name: stack.enter_context(streams.connected(context.broker_url)) for name in WAYS}
        relatum.intercept(connections["ours"], keys=KEYS, recorder="external")
        channels = {name: connection.channel() for name, connection in connections.items()}
        if has_confirms:
            for channel in channels.values():
                channel.confirm_delivery()
        actions = {
            name: partial(_publish, channel, stream, sizes[0], has_id=name == "by hand")
            for name, channel in channels.items()
        }

        def drain() -> None:
            # Otherwise the broker's back-pressure from one side's messages would slow the other side's next round.
            for channel in channels.values():
                channel.queue_declare(stream, passive=True)

        what = f"pika publish, {how}, 2 keys"
        return compared(context, GROUP, what, actions, ids_in(context, stream), sizes, aim, drain)


def _publish(channel: BlockingChannel, stream: str, count: int, *, has_id: bool) -> None:
    """Publish orders, optionally with an id as an intercepted connection adds it."""
    for number in range(count):
        properties = pika.BasicProperties(headers=headers(number))
        if has_id:
            properties.message_id = str(uuid.uuid4())
        channel.basic_publish("", stream, streams.body(number), properties)
