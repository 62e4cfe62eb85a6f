"""Tapping: what publishers with confirms pay for a stream that is bound beside their queue, and for the firehose."""

import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Final
from urllib.parse import urlsplit

import pika
from pika.adapters.blocking_connection import BlockingChannel

from benchmarks import _streams as streams
from benchmarks._context import Context
from benchmarks._results import Row
from benchmarks._timing import in_turns, median, milliseconds, no_collection, percentile
from relatum.local import LocalRabbitMQ
from relatum.superstreams import StreamOptions
from relatum.tapping import Firehose, tap, tap_firehose
from tests.support.rabbitmq_tools import run_tool

GROUP: Final = "tapping"

MESSAGES: Final = 50
ROUNDS: Final = 60
WARM_UP_ROUNDS: Final = 3

KINDS: Final[dict[str, tuple[dict[str, Any], int]]] = {
    "classic queue, transient": ({}, 1),
    "classic queue, persistent": ({}, 2),
    "quorum queue, persistent": ({"x-queue-type": "quorum"}, 2),
}
"""The queue that is bound before the tap, by its arguments, and the delivery mode of what is published. A persistent
message's confirm waits for the queue's disk: ten times what a tap takes, and it varies by more than that."""

QUIET: Final = 0.1
"""Of the rounds, the quickest share: what it takes where nothing else was in the way."""

KEPT: Final = StreamOptions(max_length_bytes=1_000_000_000)
TRACED: Final = "traced", "carried"
"""Virtual hosts whose firehose is on: by itself, and with a carrier."""


def measure(context: Context) -> Iterator[Row]:
    """The rows about taps: a broker of their own, since the firehose is an operator's to turn on."""
    context.say("publishing to exchanges and to the default exchange, bare, tapped and traced")
    with tempfile.TemporaryDirectory() as directory, LocalRabbitMQ(directory) as server:
        for name in TRACED:
            run_tool(server, "rabbitmqctl", "add_vhost", name)
            user = urlsplit(server.broker_url).username or ""
            run_tool(server, "rabbitmqctl", "set_permissions", "-p", name, user, ".*", ".*", ".*")
            run_tool(server, "rabbitmqctl", "trace_on", "-p", name)
        database = context.new_database()
        for kind, (arguments, mode) in KINDS.items():
            yield _tapped(context, server.broker_url, database, kind, arguments, mode)
        yield _traced(context, server.broker_url, database)


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
    return _row(f"publish to a topic exchange with a {kind}, a confirm each, tapped", taken, "tapped", "bare")


def _traced(context: Context, url: str, database: str) -> Row:
    with ExitStack() as stack:
        actions: dict[str, Callable[[], None]] = {}
        for way, vhost in (("bare", ""), ("again", ""), *zip(TRACED, TRACED, strict=True)):
            of_vhost = urlsplit(url)._replace(path=f"/{vhost}").geturl()
            channel = stack.enter_context(_channel(of_vhost))
            name = f"{way}-{uuid.uuid4().hex[:8]}"
            _declare(channel, name, {})
            if way == "carried":
                tap_firehose(of_vhost, database, options=KEPT)
                stack.enter_context(_carrying(of_vhost))
            actions[way] = partial(_publish, channel, "", name, name)
        taken = _taken(context, actions)
    row = "publish to the default exchange with a classic queue, a confirm each, firehose carried"
    return _row(row, taken, "carried", "bare", also="traced")


@contextmanager
def _channel(url: str) -> Iterator[BlockingChannel]:
    with streams.connected(url) as connection:
        channel = connection.channel()
        channel.confirm_delivery()
        yield channel


@contextmanager
def _carrying(url: str) -> Iterator[None]:
    stop = threading.Event()
    thread = threading.Thread(target=Firehose(url, "tap.firehose").run, args=(stop,))
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _declare(channel: BlockingChannel, name: str, arguments: dict[str, Any]) -> None:
    # It drops the oldest, so that no side's queue grows.
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
    """The rate against the other's in the same round, as the median of all rounds."""
    return median([theirs / own for theirs, own in zip(other, ours, strict=True)])


def _row(what: str, taken: dict[str, list[float]], ours: str, other: str, also: str = "") -> Row:
    quiet_s = {way: percentile(seconds, QUIET) / MESSAGES for way, seconds in taken.items()}
    paired = {way: _paired(taken[other], taken[way]) for way in (ours, "again")}
    note = f" ({milliseconds(quiet_s[also])} with the firehose on and nothing that takes it)" if also else ""
    return Row(
        GROUP,
        what,
        f"{milliseconds(quiet_s[ours])} a message",
        f"{milliseconds(quiet_s[other])}: bare{note}",
        quiet_s[ours] / quiet_s[other],
        note=f"In the quickest tenth of the rounds; another that is bare: {quiet_s['again'] / quiet_s[other]:.2f}. As "
        f"the median of all rounds {1 / paired[ours]:.2f}, another that is bare {1 / paired['again']:.2f}.",
        figures={
            **{f"{way}_quiet_s": seconds for way, seconds in quiet_s.items()},
            **{f"{way}_s": median(seconds) / MESSAGES for way, seconds in taken.items()},
            "median_of_ratios": paired[ours],
            "median_of_ratios_again": paired["again"],
            "rounds": len(taken[ours]),
            "round_messages": MESSAGES,
        },
    )
