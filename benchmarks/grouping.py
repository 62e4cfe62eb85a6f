"""Publishing groups: `MessageGroup` compared with plain publishes, both over an intercepted pika connection."""

import time
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
from relatum.membership import Membership, assess, membership
from relatum.reading import StreamReader

GROUP: Final = "grouping"

AIM: Final = 0.9

CONFIRMED: Final = (100, 100)
UNCONFIRMED: Final = (500, 120)
"""Messages in a round, and rounds, as in the group `publishing`."""

GROUP_MESSAGES: Final = 10

WARM_UP_ROUNDS: Final = 3

WAYS: Final = ("plain", "grouped", "by hand")
"""The third shows the cost of three more headers in pika and the broker."""


def measure(context: Context) -> Iterator[Row]:
    """Yield the rows about publishing groups."""
    context.say("publishing by pika, intercepted, plain and in groups")
    yield _compare(context, "a confirm each", *CONFIRMED, has_confirms=True)
    yield _compare(context, "no confirms", *UNCONFIRMED, has_confirms=False)


def _compare(context: Context, how: str, count: int, rounds: int, *, has_confirms: bool) -> Row:
    stream = context.empty_stream(f"grouped-{'with' if has_confirms else 'without'}-confirms")
    rounds = context.rounds(rounds)
    with ExitStack() as stack:
        channels = {name: _channel(context, stack, has_confirms=has_confirms) for name in WAYS}
        actions: dict[str, Callable[[], None]] = {
            "plain": partial(_publish, channels["plain"], stream, count),
            "grouped": partial(_put, channels["grouped"], stream, count),
            "by hand": partial(_publish_by_hand, channels["by hand"], stream, count),
        }

        def drain() -> None:
            # Otherwise the broker's back-pressure from one side's messages would slow the other side's next round.
            for channel in channels.values():
                channel.queue_declare(stream, passive=True)

        in_turns(actions, WARM_UP_ROUNDS, drain)
        with no_collection():
            taken = in_turns(actions, rounds, drain)
    _check(context, stream, count * (rounds + WARM_UP_ROUNDS))
    plain, grouped, by_hand = (count / median(taken[name]) for name in WAYS)
    return Row(
        GROUP,
        f"grouped pika publish, {how}, groups of {GROUP_MESSAGES}, 2 keys and the group's",
        per_second(grouped),
        f"{per_second(plain)}: intercepted, in no group ({per_second(by_hand)} with the headers added by hand)",
        grouped / plain,
        f"≥ {AIM:g} ×",
        grouped / plain >= AIM,
        figures={
            "grouped_per_s": grouped,
            "plain_per_s": plain,
            "by_hand_per_s": by_hand,
            "median_of_ratios": median([p / g for p, g in zip(taken["plain"], taken["grouped"], strict=True)]),
            "rounds": rounds,
            "round_messages": count,
        },
    )


def _channel(context: Context, stack: ExitStack, *, has_confirms: bool) -> BlockingChannel:
    connection = stack.enter_context(streams.connected(context.broker_url))
    relatum.intercept(connection, keys=[*KEYS, relatum.GROUP_KEY], recorder="external")
    channel = connection.channel()
    if has_confirms:
        channel.confirm_delivery()
    return channel


def _properties(number: int) -> pika.BasicProperties:
    return pika.BasicProperties(headers={"order_id": streams.order_id(number), "host": streams.host(number)})


def _publish(channel: BlockingChannel, stream: str, count: int) -> None:
    for number in range(count):
        channel.basic_publish("", stream, streams.body(number), _properties(number))


def _put(channel: BlockingChannel, stream: str, count: int) -> None:
    for first in range(0, count, GROUP_MESSAGES):
        with relatum.MessageGroup(channel, "", stream) as group:
            for number in range(first, first + GROUP_MESSAGES):
                is_last = number == first + GROUP_MESSAGES - 1
                group.put(streams.body(number), _properties(number), is_last)


def _publish_by_hand(channel: BlockingChannel, stream: str, count: int) -> None:
    for number in range(count):
        sequence = number % GROUP_MESSAGES + 1
        if sequence == 1:
            group_id = relatum.new_group_id()
        properties = _properties(number)
        properties.headers |= Membership(group_id, sequence, sequence == GROUP_MESSAGES).headers
        channel.basic_publish("", stream, streams.body(number), properties)


def _check(context: Context, stream: str, each: int) -> None:
    """Check that all messages were published, and that every group is complete."""
    limit = time.monotonic() + streams.SETTLE_S
    with StreamReader.open(context.broker) as reader:
        while True:
            places = [membership(message.headers) for message in reader.iterate(stream)]
            if len(places) == len(WAYS) * each:
                break
            assert time.monotonic() < limit, f"{len(places)} instead of {len(WAYS) * each} messages were published"
    groups: dict[str, list[Membership]] = {}
    for place in places:
        if place is not None:
            groups.setdefault(place.group_id, []).append(place)
    assert len(groups) == 2 * each // GROUP_MESSAGES
    assert all(assess(group_id, members).is_complete for group_id, members in groups.items())
