"""Tapping: the cost for publishers with confirms of a stream that is bound beside their queue."""

import tempfile
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Final

import pika
from pika.adapters.blocking_connection import BlockingChannel

from benchmarks import _streams as streams
from benchmarks._context import Context
from benchmarks._results import Row
from benchmarks._timing import in_turns, median, milliseconds, no_collection, percentile
from relatum.local import LocalRabbitMQ
from relatum.superstreams import StreamOptions
from relatum.tapping import tap

GROUP: Final = "tapping"

MESSAGES: Final = 50
ROUNDS: Final = 60
WARM_UP_ROUNDS: Final = 3

KINDS: Final[dict[str, tuple[dict[str, Any], int]]] = {
    "classic queue, transient": ({}, 1),
    "classic queue, persistent": ({}, 2),
    "quorum queue, persistent": ({"x-queue-type": "quorum"}, 2),
}
"""The arguments of the queue that is bound before the tap, and the messages' delivery mode. A persistent message's
confirm waits for the queue's disk: that takes ten times as long as a tap, and varies by more than the tap."""

QUIET: Final = 0.1
"""The share of the quickest rounds, which show the cost without other load."""

KEPT: Final = StreamOptions(max_length_bytes=1_000_000_000)


def measure(context: Context) -> Iterator[Row]:
    """Yield the rows about taps, on a broker of their own."""
    context.say("publishing to exchanges, bare and tapped")
    with tempfile.TemporaryDirectory() as directory, LocalRabbitMQ(directory) as server:
        database = context.new_database()
        for kind, (arguments, mode) in KINDS.items():
            yield _tapped(context, server.broker_url, database, kind, arguments, mode)


def _tapped(context: Context, url: str, database: str, kind: str, arguments: dict[str, Any], mode: int) -> Row:
    with ExitStack() as stack:
        actions: dict[str, Callable[[], None]] = {}
        for way in ("bare", "again", "tapped"):
            channel = stack.enter_context(_channel(url))
            name = f"{way}-{uuid.uuid4().hex[:8]}"
            channel.exchange_declare(name, "topic", durable=True)
            _declare(channel, name, arguments)
            channel.queue_bind(name, name, "#")
            if way == "tapped":
                tap(url, database, name, options=KEPT)
            actions[way] = partial(_publish, channel, name, "order.new", name, mode)
        taken = _taken(context, actions)
    return _row(f"publish to a topic exchange with a {kind}, a confirm each, tapped", taken)


@contextmanager
def _channel(url: str) -> Iterator[BlockingChannel]:
    with streams.connected(url) as connection:
        channel = connection.channel()
        channel.confirm_delivery()
        yield channel


def _declare(channel: BlockingChannel, name: str, arguments: dict[str, Any]) -> None:
    # The queue drops its oldest messages, so that no side's queue grows.
    channel.queue_declare(name, durable=True, arguments={"x-max-length": 1000, **arguments})


def _publish(channel: BlockingChannel, exchange: str, key: str, name: str, mode: int = 1) -> None:
    properties = pika.BasicProperties(headers={"order_id": name}, delivery_mode=mode)
    for number in range(MESSAGES):
        channel.basic_publish(exchange, key, streams.body(number), properties)


def _taken(context: Context, actions: dict[str, Callable[[], None]]) -> dict[str, list[float]]:
    in_turns(actions, WARM_UP_ROUNDS)
    with no_collection():
        return in_turns(actions, context.rounds(ROUNDS))


def _paired(other: list[float], ours: list[float]) -> float:
    """Return the ratio of our rate to the other's in the same round, as the median of all rounds."""
    return median([theirs / own for theirs, own in zip(other, ours, strict=True)])


def _row(what: str, taken: dict[str, list[float]]) -> Row:
    quiet_s = {way: percentile(seconds, QUIET) / MESSAGES for way, seconds in taken.items()}
    paired = {way: _paired(taken["bare"], taken[way]) for way in ("tapped", "again")}
    return Row(
        GROUP,
        what,
        f"{milliseconds(quiet_s['tapped'])} a message",
        f"{milliseconds(quiet_s['bare'])}: bare",
        quiet_s["tapped"] / quiet_s["bare"],
        note=f"In the quickest tenth of the rounds; another that is bare: {quiet_s['again'] / quiet_s['bare']:.2f}. As "
        f"the median of all rounds {1 / paired['tapped']:.2f}, another that is bare {1 / paired['again']:.2f}.",
        figures={
            **{f"{way}_quiet_s": seconds for way, seconds in quiet_s.items()},
            **{f"{way}_s": median(seconds) / MESSAGES for way, seconds in taken.items()},
            "median_of_ratios": paired["tapped"],
            "median_of_ratios_again": paired["again"],
            "rounds": len(taken["tapped"]),
            "round_messages": MESSAGES,
        },
    )
