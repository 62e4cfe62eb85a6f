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
from benchmarks._timing import in_turns, median, no_collection, per_second
from relatum.local import LocalRabbitMQ
from relatum.superstreams import StreamOptions
from relatum.tapping import Firehose, tap, tap_firehose
from tests.support.rabbitmq_tools import run_tool

GROUP: Final = "tapping"

MESSAGES: Final = 100
ROUNDS: Final = 60
WARM_UP_ROUNDS: Final = 3

KINDS: Final[dict[str, dict[str, Any]]] = {"classic": {}, "quorum": {"x-queue-type": "quorum"}}
"""The queue that is bound before the tap, by its arguments."""

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
        for kind, arguments in KINDS.items():
            yield _tapped(context, server.broker_url, database, kind, arguments)
        yield _traced(context, server.broker_url, database)


def _tapped(context: Context, url: str, database: str, kind: str, arguments: dict[str, Any]) -> Row:
    with ExitStack() as stack:
        actions: dict[str, Callable[[], None]] = {}
        for way in ("bare", "tapped"):
            channel = stack.enter_context(_channel(url))
            name = f"{way}-{kind}-{uuid.uuid4().hex[:8]}"
            channel.exchange_declare(name, "topic", durable=True)
            _declare(channel, name, arguments)
            channel.queue_bind(name, name, "#")
            if way == "tapped":
                tap(url, database, name, options=KEPT)
            actions[way] = partial(_publish, channel, name, "order.new", name)
        taken = _taken(context, actions)
    return _row(f"publish to a topic exchange with a {kind} queue, a confirm each, tapped", taken, "tapped", "bare")


def _traced(context: Context, url: str, database: str) -> Row:
    with ExitStack() as stack:
        actions: dict[str, Callable[[], None]] = {}
        for way, vhost in (("bare", ""), *zip(TRACED, TRACED, strict=True)):
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


def _publish(channel: BlockingChannel, exchange: str, key: str, name: str) -> None:
    properties = pika.BasicProperties(headers={"order_id": name}, delivery_mode=2)
    for number in range(MESSAGES):
        channel.basic_publish(exchange, key, streams.body(number), properties)


def _taken(context: Context, actions: dict[str, Callable[[], None]]) -> dict[str, list[float]]:
    in_turns(actions, WARM_UP_ROUNDS)
    with no_collection():
        return in_turns(actions, context.rounds(ROUNDS))


def _row(what: str, taken: dict[str, list[float]], ours: str, other: str, also: str = "") -> Row:
    rates = {way: MESSAGES / median(seconds) for way, seconds in taken.items()}
    note = f" ({per_second(rates[also])} with the firehose on and nothing that takes it)" if also else ""
    return Row(
        GROUP,
        what,
        per_second(rates[ours]),
        f"{per_second(rates[other])}: bare{note}",
        rates[ours] / rates[other],
        figures={
            **{f"{way}_per_s": rate for way, rate in rates.items()},
            "median_of_ratios": median([b / o for b, o in zip(taken[other], taken[ours], strict=True)]),
            "rounds": len(taken[ours]),
            "round_messages": MESSAGES,
        },
    )
