"""Publishing by clients other than pika: intercepted compared with bare, with confirms and with defaults."""

import asyncio
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Final

import dramatiq
from dramatiq.brokers.rabbitmq import RabbitmqBroker
from faststream.rabbit import RabbitBroker
from pika import BasicProperties

import relatum
from benchmarks import _streams as streams
from benchmarks._context import KEYS, Context
from benchmarks._published import CONFIRMED, UNCONFIRMED, WAYS, compared, headers, ids_in
from benchmarks._results import Row
from relatum.keys import preset

GROUP: Final = "clients"

CONFIRMED_AIM: Final = 0.95
UNCONFIRMED_AIM: Final = 0.92


def measure(context: Context) -> Iterator[Row]:
    """Yield the rows about these clients."""
    context.say("publishing by dramatiq, bare and intercepted")
    yield _dramatiq(context, "a confirm each", CONFIRMED, CONFIRMED_AIM, has_confirms=True)
    yield _dramatiq(context, "no confirms", UNCONFIRMED, UNCONFIRMED_AIM)
    yield _dramatiq(context, "no confirms, a copy in a stream", UNCONFIRMED, UNCONFIRMED_AIM, has_copies=True)
    with asyncio.Runner() as runner:
        context.say("publishing by FastStream, bare and intercepted")
        yield _faststream(context, runner, "a confirm each", CONFIRMED)
        yield _faststream(context, runner, "100 at once, confirmed", CONFIRMED, at_once=True)


def _dramatiq(
    context: Context,
    how: str,
    sizes: tuple[int, int],
    aim: float,
    *,
    has_confirms: bool = False,
    has_copies: bool = False,
) -> Row:
    """Compare tasks of dramatiq without a worker, which stay in their queue. "By hand" also adds the copy's header."""
    queue = f"relatum-bench-dramatiq-{uuid.uuid4().hex[:8]}"
    stream = context.empty_stream("dramatiq-copies") if has_copies else None
    with ExitStack() as stack:
        brokers = {name: stack.enter_context(_dramatiq_broker(context, queue, has_confirms)) for name in WAYS}
        relatum.intercept(brokers["ours"], keys=preset("dramatiq"), recorder="external", copy_to=stream)
        _add_by_hand(brokers["by hand"].channel, stream)

        def order(number: int, body: str) -> None:
            """The tasks' function, which is never called."""

        orders = {
            name: dramatiq.actor(order, broker=broker, queue_name=queue, actor_name=f"order_{name.replace(' ', '_')}")
            for name, broker in brokers.items()
        }

        def publish(name: str) -> None:
            for number in range(sizes[0]):
                orders[name].send(number, streams.body(number).decode())

        def drain() -> None:
            for broker in brokers.values():
                broker.channel.queue_declare(queue, passive=True)

        actions = {name: partial(publish, name) for name in WAYS}
        ids: list[Any] = []

        def ids_so_far() -> list[Any]:
            ids.extend(_ids_taken(context, queue))
            return ids

        return compared(context, GROUP, f"dramatiq send, {how}", actions, ids_so_far, sizes, aim, drain)


@contextmanager
def _dramatiq_broker(context: Context, queue: str, has_confirms: bool) -> Iterator[RabbitmqBroker]:
    """Open a broker with a queue, which is deleted at the end."""
    broker = RabbitmqBroker(url=context.broker_url, confirm_delivery=has_confirms)
    broker.declare_queue(queue, ensure=True)
    try:
        yield broker
    finally:
        for each in (queue, f"{queue}.DQ", f"{queue}.XQ"):
            broker.channel.queue_delete(each)
        broker.close()


def _add_by_hand(channel: Any, stream: str | None) -> None:
    """Make a channel of dramatiq send an id, and the header by which the broker makes a copy."""
    bare = channel.basic_publish

    def publish(*, properties: BasicProperties, **given: Any) -> None:
        properties.message_id = str(uuid.uuid4())
        if stream is not None:
            properties.headers = {"BCC": [stream]}
        bare(properties=properties, **given)

    channel.basic_publish = publish


def _ids_taken(context: Context, queue: str) -> Iterator[Any]:
    """Yield the ids of all messages in a queue, which empties it."""
    with streams.connected(context.broker_url) as connection:
        for method, properties, _ in connection.channel().consume(queue, auto_ack=True, inactivity_timeout=1.0):
            if method is None:
                return
            yield properties.message_id


def _faststream(
    context: Context, runner: asyncio.Runner, how: str, sizes: tuple[int, int], *, at_once: bool = False
) -> Row:
    stream = context.empty_stream(f"faststream-{'at-once' if at_once else 'singly'}")
    brokers = {name: RabbitBroker(context.broker_url, logger=None) for name in WAYS}
    relatum.intercept(brokers["ours"], keys=KEYS, recorder="external")

    async def publish(name: str) -> None:
        broker = brokers[name]
        for_each = [
            broker.publish(
                streams.body(number),
                stream,
                headers=headers(number),
                message_id=str(uuid.uuid4()) if name == "by hand" else None,
            )
            for number in range(sizes[0])
        ]
        if at_once:
            await asyncio.gather(*for_each)
        else:
            for each in for_each:
                await each

    for broker in brokers.values():
        runner.run(broker.start())
    try:
        actions = {name: lambda name=name: runner.run(publish(name)) for name in WAYS}
        what = f"FastStream publish, {how}, 2 keys"
        return compared(context, GROUP, what, actions, ids_in(context, stream), sizes, CONFIRMED_AIM)
    finally:
        for broker in brokers.values():
            runner.run(broker.stop())
