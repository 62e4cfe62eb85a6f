"""Publishing: an intercepted pika connection beside a bare one."""

import time
from collections.abc import Iterator
from typing import Final

import pika
from pika.adapters.blocking_connection import BlockingChannel

import relatum
from benchmarks import _streams as streams
from benchmarks._context import KEYS, Context
from benchmarks._results import Row
from benchmarks._timing import in_turns, median, no_collection, per_second
from relatum.reading import StreamReader

GROUP: Final = "publishing"

CONFIRMED_AIM: Final = 0.95
UNCONFIRMED_AIM: Final = 0.85

CONFIRMED: Final = (100, 100)
UNCONFIRMED: Final = (500, 120)
"""Messages in a round, and rounds: small ones, so that noise meets both sides, and many, so that it averages out."""

WARM_UP_ROUNDS: Final = 4


def measure(context: Context) -> Iterator[Row]:
    """The rows about publishing."""
    context.say("publishing by pika, bare and intercepted")
    yield _compare(context, "a confirm each", *CONFIRMED, CONFIRMED_AIM, has_confirms=True)
    yield _compare(context, "no confirms", *UNCONFIRMED, UNCONFIRMED_AIM, has_confirms=False)


def _compare(context: Context, how: str, count: int, rounds: int, aim: float, *, has_confirms: bool) -> Row:
    stream = context.empty_stream(f"published-{'with' if has_confirms else 'without'}-confirms")
    rounds = context.rounds(rounds)
    with streams.connected(context.broker_url) as plain, streams.connected(context.broker_url) as intercepted:
        relatum.intercept(intercepted, keys=KEYS, recorder="external")
        channels = [plain.channel(), intercepted.channel()]
        for channel in channels:
            if has_confirms:
                channel.confirm_delivery()
        actions = {
            name: lambda channel=channel: _publish(channel, stream, count)
            for name, channel in zip(("bare", "ours"), channels, strict=True)
        }

        def drain() -> None:
            # Else the broker's back-pressure for one side's messages would slow the other side's next round.
            for channel in channels:
                channel.queue_declare(stream, passive=True)

        in_turns(actions, WARM_UP_ROUNDS, drain)
        with no_collection():
            taken = in_turns(actions, rounds, drain)
    _check(context, stream, count * (rounds + WARM_UP_ROUNDS))
    bare, ours = (count / median(taken[name]) for name in ("bare", "ours"))
    return Row(
        GROUP,
        f"intercepted pika publish, {how}, 2 keys",
        per_second(ours),
        f"{per_second(bare)}: bare pika",
        ours / bare,
        f"≥ {aim:g} ×",
        ours / bare >= aim,
        figures={
            "ours_per_s": ours,
            "bare_per_s": bare,
            "median_of_ratios": median([b / o for b, o in zip(taken["bare"], taken["ours"], strict=True)]),
            "rounds": rounds,
            "round_messages": count,
        },
    )


def _publish(channel: BlockingChannel, stream: str, count: int) -> None:
    for number in range(count):
        headers = {"order_id": streams.order_id(number), "host": streams.host(number)}
        channel.basic_publish("", stream, streams.body(number), pika.BasicProperties(headers=headers))


def _check(context: Context, stream: str, each: int) -> None:
    """Both sides published everything, and the intercepted side's messages have a time and an id."""
    limit = time.monotonic() + streams.SETTLE_S
    with StreamReader.open(context.address) as reader:
        while True:
            messages = list(reader.iterate(stream))
            if len(messages) == 2 * each:
                break
            assert time.monotonic() < limit, f"{len(messages)} instead of {2 * each} messages were published"
    stamped = [message for message in messages if "relatum_time" in message.headers]
    assert len(stamped) == each
    assert all(message.properties.message_id for message in stamped)
