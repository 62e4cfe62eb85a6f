"""Publishing: an intercepted pika connection beside a bare one."""

import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Final

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


def measure(context: Context) -> Iterator[Row]:
    """The rows about publishing."""
    context.say("publishing by pika, bare and intercepted")
    yield _compare(context, "a confirm each", *CONFIRMED, CONFIRMED_AIM, has_confirms=True)
    yield _compare(context, "no confirms", *UNCONFIRMED, UNCONFIRMED_AIM, has_confirms=False)


def _compare(context: Context, how: str, count: int, rounds: int, aim: float, *, has_confirms: bool) -> Row:
    stream = context.empty_stream(f"published-{'with' if has_confirms else 'without'}-confirms")
    rounds = context.rounds(rounds)
    with ExitStack() as stack:
        connections = {name: stack.enter_context(streams.connected(context.broker_url)) for name in WAYS}
        relatum.intercept(connections["ours"], keys=KEYS, recorder="external")
        channels = {name: connection.channel() for name, connection in connections.items()}
        if has_confirms:
            for channel in channels.values():
                channel.confirm_delivery()
        actions: dict[str, Callable[[], None]] = {
            name: partial(_publish, channel, stream, count, is_stamped=name == "by hand")
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
        f"intercepted pika publish, {how}, 2 keys",
        per_second(ours),
        f"{per_second(bare)}: bare pika ({per_second(by_hand)} with an id added by hand)",
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


def _publish(channel: BlockingChannel, stream: str, count: int, *, is_stamped: bool) -> None:
    """Publish orders; stamped ones with an id, as an intercepted connection adds it."""
    for number in range(count):
        headers: dict[str, object] = {"order_id": streams.order_id(number), "host": streams.host(number)}
        properties = pika.BasicProperties(headers=headers)
        if is_stamped:
            properties.message_id = str(uuid.uuid4())
        channel.basic_publish("", stream, streams.body(number), properties)


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
