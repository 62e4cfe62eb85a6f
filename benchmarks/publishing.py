"""Publishing: an intercepted connection of pika, and one of kombu, beside a bare one."""

import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any, Final

import kombu
import pika
from pika.adapters.blocking_connection import BlockingChannel

import relatum
from benchmarks import _streams as streams
from benchmarks._context import KEYS, Context
from benchmarks._results import Row
from benchmarks._timing import in_turns, median, no_collection, per_second
from relatum.reading import StreamReader, TimeSource

GROUP: Final = "publishing"

CONFIRMED_AIM: Final = 0.97
UNCONFIRMED_AIM: Final = 0.92

CONFIRMED: Final = (100, 100)
UNCONFIRMED: Final = (500, 120)
"""Messages in a round, and rounds: small ones, so that noise meets both sides, and many, so that it averages out."""

WARM_UP_ROUNDS: Final = 3

WAYS: Final = ("bare", "ours", "by hand")
"""The third shows what the broker and pika need for one more field, whoever adds it."""


CLIENTS: Final = ("pika", "kombu")


def measure(context: Context) -> Iterator[Row]:
    """The rows about publishing."""
    for client in CLIENTS:
        context.say(f"publishing by {client}, bare and intercepted")
        yield _compare(context, client, "a confirm each", *CONFIRMED, CONFIRMED_AIM, has_confirms=True)
        yield _compare(context, client, "no confirms", *UNCONFIRMED, UNCONFIRMED_AIM, has_confirms=False)


def _compare(
    context: Context, client: str, how: str, count: int, rounds: int, aim: float, *, has_confirms: bool
) -> Row:
    stream = context.empty_stream(f"published-by-{client}-{'with' if has_confirms else 'without'}-confirms")
    rounds = context.rounds(rounds)
    with ExitStack() as stack:
        connections = {name: stack.enter_context(_connected(context, client, has_confirms)) for name in WAYS}
        relatum.intercept(connections["ours"], keys=KEYS, recorder="external")
        channels = {name: connection.channel() for name, connection in connections.items()}
        if has_confirms and client == "pika":
            for channel in channels.values():
                channel.confirm_delivery()
        publish = _by_pika if client == "pika" else _by_kombu
        actions: dict[str, Callable[[], None]] = {
            name: partial(publish, channel, stream, count, is_stamped=name == "by hand")
            for name, channel in channels.items()
        }

        def drain() -> None:
            # Else the broker's back-pressure for one side's messages would slow the other side's next round.
            for channel in channels.values():
                channel.queue_declare(stream, passive=True)

        in_turns(actions, WARM_UP_ROUNDS, drain)
        with no_collection():
            taken = in_turns(actions, rounds, drain)
    _check(context, stream, count * (rounds + WARM_UP_ROUNDS))
    bare, ours, by_hand = (count / median(taken[name]) for name in WAYS)
    return Row(
        GROUP,
        f"intercepted {client} publish, {how}, 2 keys",
        per_second(ours),
        f"{per_second(bare)}: bare {client} ({per_second(by_hand)} with an id added by hand)",
        ours / bare,
        f"≥ {aim:g} ×",
        ours / bare >= aim,
        figures={
            "ours_per_s": ours,
            "bare_per_s": bare,
            "by_hand_per_s": by_hand,
            "median_of_ratios": median([b / o for b, o in zip(taken["bare"], taken["ours"], strict=True)]),
            "rounds": rounds,
            "round_messages": count,
        },
    )


def _connected(context: Context, client: str, has_confirms: bool) -> AbstractContextManager[Any]:
    if client == "pika":
        return streams.connected(context.broker_url)
    return kombu.Connection(context.broker_url, transport_options={"confirm_publish": has_confirms})


def _headers(number: int) -> dict[str, object]:
    return {"order_id": streams.order_id(number), "host": streams.host(number)}


def _by_pika(channel: BlockingChannel, stream: str, count: int, *, is_stamped: bool) -> None:
    """Publish orders; stamped ones with an id, as an intercepted connection adds it."""
    for number in range(count):
        properties = pika.BasicProperties(headers=_headers(number))
        if is_stamped:
            properties.message_id = str(uuid.uuid4())
        channel.basic_publish("", stream, streams.body(number), properties)


def _by_kombu(channel: Any, stream: str, count: int, *, is_stamped: bool) -> None:
    """The same by a producer, which encodes no body."""
    producer = kombu.Producer(channel)
    for number in range(count):
        options: dict[str, Any] = {"headers": _headers(number), "content_type": "application/octet-stream"}
        if is_stamped:
            options["message_id"] = str(uuid.uuid4())
        producer.publish(streams.body(number), routing_key=stream, **options)


def _check(context: Context, stream: str, each: int) -> None:
    """All published everything, and the intercepted messages have an id like those stamped by hand, and a time."""
    limit = time.monotonic() + streams.SETTLE_S
    with StreamReader.open(context.address) as reader:
        while True:
            messages = list(reader.iterate(stream))
            if len(messages) == len(WAYS) * each:
                break
            assert time.monotonic() < limit, f"{len(messages)} instead of {len(WAYS) * each} messages were published"
    assert sum(message.properties.message_id is not None for message in messages) == 2 * each
    assert sum(message.time_source is TimeSource.MESSAGE_ID for message in messages) == each
