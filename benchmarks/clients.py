"""Publishing by rstream and by AMQP 1.0: intercepted ones beside bare ones, each message or batch confirmed."""

import asyncio
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any, Final

from rabbitmq_amqp_python_client import Environment, Message
from rstream import AMQPMessage, ConfirmationStatus, Producer
from rstream._pyamqp.message import Properties  # type: ignore[attr-defined]

import relatum
from benchmarks import _streams as streams
from benchmarks._context import KEYS, Context
from benchmarks._results import Row
from benchmarks._timing import in_turns, median, no_collection, per_second
from relatum.reading import StreamReader, TimeSource

GROUP: Final = "clients"

AIM: Final = 0.95
SINGLY: Final = (100, 60)
BATCHED: Final = (500, 60)
"""Messages in a round, and rounds."""

WARM_UP_ROUNDS: Final = 3
WAYS: Final = ("bare", "ours", "by hand")
"""The third shows what the client needs for an id that somebody else adds."""

AMQP10_SINCE: Final = 4
"""RabbitMQ's version that the AMQP 1.0 client speaks to."""


def measure(context: Context) -> Iterator[Row]:
    """The rows about these clients; AMQP 1.0 where the broker is new enough."""
    context.say("publishing by rstream, bare and intercepted")
    with asyncio.Runner() as runner:
        yield _rstream(context, runner, "send_wait", *SINGLY)
        yield _rstream(context, runner, "send_batch", *BATCHED)
    with streams.connected(context.broker_url) as connection:
        version: str = connection._impl.server_properties["version"]
    if int(version.partition(".")[0]) >= AMQP10_SINCE:
        context.say("publishing by AMQP 1.0, bare and intercepted")
        yield _amqp10(context, *SINGLY)


def _rstream(context: Context, runner: asyncio.Runner, how: str, count: int, rounds: int) -> Row:
    stream = context.empty_stream(f"rstream-{how.replace('_', '-')}")
    address = context.address
    producers = {
        name: Producer(
            address.stream_host,
            port=address.stream_port or 5552,
            vhost=address.vhost,
            username=address.user,
            password=address.password,
            load_balancer_mode=True,
        )
        for name in WAYS
    }
    relatum.intercept(producers["ours"], keys=KEYS, recorder="external")
    send = _singly if how == "send_wait" else _in_a_batch

    def publish(name: str) -> None:
        runner.run(send(producers[name], stream, count, name == "by hand"))

    for producer in producers.values():
        runner.run(producer.start())
    try:
        return _compared(context, f"rstream {how}", stream, count, rounds, {n: partial(publish, n) for n in WAYS})
    finally:
        for producer in producers.values():
            runner.run(producer.close())


def _order(number: int, has_id: bool) -> Any:
    properties = Properties(message_id=str(uuid.uuid4())) if has_id else None
    return AMQPMessage(body=streams.body(number), application_properties=_headers(number), properties=properties)


async def _singly(producer: Producer, stream: str, count: int, has_id: bool) -> None:
    for number in range(count):
        await producer.send_wait(stream, _order(number, has_id), timeout=60)


async def _in_a_batch(producer: Producer, stream: str, count: int, has_id: bool) -> None:
    confirmed = 0
    done = asyncio.Event()

    def on_confirm(status: ConfirmationStatus) -> None:
        nonlocal confirmed
        confirmed += status.is_confirmed
        if confirmed == count:
            done.set()

    batch = [_order(number, has_id) for number in range(count)]
    await producer.send_batch(stream, batch, on_publish_confirm=on_confirm)
    await done.wait()


def _amqp10(context: Context, count: int, rounds: int) -> Row:
    stream = context.empty_stream("amqp10")
    with ExitStack() as stack:
        actions: dict[str, Callable[[], None]] = {}
        for name in WAYS:
            environment = stack.enter_context(Environment(uri=context.broker_url))
            connection = environment.connection()
            connection.dial()
            if name == "ours":
                relatum.intercept(connection, keys=KEYS, recorder="external")
            publisher = connection.publisher(f"/queues/{stream}")
            actions[name] = partial(_publish, publisher, count, has_id=name == "by hand")
        return _compared(context, "AMQP 1.0 publish", stream, count, rounds, actions)


def _publish(publisher: Any, count: int, *, has_id: bool) -> None:
    for number in range(count):
        message = Message(body=streams.body(number), application_properties=_headers(number))
        if has_id:
            message.id = str(uuid.uuid4())
        publisher.publish(message)


def _headers(number: int) -> dict[str, Any]:
    return {"order_id": streams.order_id(number), "host": streams.host(number)}


def _compared(
    context: Context, what: str, stream: str, count: int, rounds: int, actions: dict[str, Callable[[], None]]
) -> Row:
    rounds = context.rounds(rounds)
    in_turns(actions, WARM_UP_ROUNDS)
    with no_collection():
        taken = in_turns(actions, rounds)
    _check(context, stream, count * (rounds + WARM_UP_ROUNDS))
    bare, ours, by_hand = (count / median(taken[name]) for name in WAYS)
    return Row(
        GROUP,
        f"intercepted {what}, confirmed, 2 keys",
        per_second(ours),
        f"{per_second(bare)}: bare ({per_second(by_hand)} with an id added by hand)",
        ours / bare,
        f"≥ {AIM:g} ×",
        ours / bare >= AIM,
        figures={
            "ours_per_s": ours,
            "bare_per_s": bare,
            "by_hand_per_s": by_hand,
            "median_of_ratios": median([b / o for b, o in zip(taken["bare"], taken["ours"], strict=True)]),
            "rounds": rounds,
            "round_messages": count,
        },
    )


def _check(context: Context, stream: str, each: int) -> None:
    """All published everything, and the intercepted messages have an id that says their time."""
    limit = time.monotonic() + streams.SETTLE_S
    with StreamReader.open(context.address) as reader:
        while True:
            messages = list(reader.iterate(stream))
            if len(messages) == len(WAYS) * each:
                break
            assert time.monotonic() < limit, f"{len(messages)} instead of {len(WAYS) * each} messages were published"
    assert sum(message.time_source is TimeSource.MESSAGE_ID for message in messages) == each
