"""Serialization contexts: publishing with a check of each message, compared with routing by a hash of the name."""

import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any, Final

import pika
from pika.adapters.blocking_connection import BlockingChannel

import relatum
from benchmarks import _streams as streams
from benchmarks._context import Context
from benchmarks._results import Row
from benchmarks._timing import in_turns, median, no_collection, per_second
from relatum.contexts import ContextOptions
from relatum.reading import StreamReader
from relatum.superstreams import declare_super_stream, delete_super_stream

GROUP: Final = "contexts"

PARTITIONS: Final = 3
CONTEXTS: Final = 50
ROUNDS: Final = (200, 60)
"""Messages in a round, and rounds."""
WARM_UP_ROUNDS: Final = 3

AIM: Final = 0.9

KEYS: Final = ("serialization_context",)


def measure(context: Context) -> Iterator[Row]:
    """Yield the rows about publishing to contexts."""
    context.say("publishing to serialization contexts")
    name = f"relatum-bench-contexts-{uuid.uuid4().hex[:8]}"
    declare_super_stream(context.broker_url, name, PARTITIONS)
    database = context.new_database()
    try:
        yield from _compare(context, name, database)
        _check(context, name)
    finally:
        context.drop_database(database)
        delete_super_stream(context.broker_url, name)


def _compare(context: Context, name: str, database: str) -> Iterator[Row]:
    messages = ROUNDS[0]
    rounds = context.rounds(ROUNDS[1])
    with ExitStack() as stack:
        targets = {
            "hash": relatum.SuperStream(name, route_by="serialization_context"),
            "trust": stack.enter_context(relatum.ContextRouter(name, database)),
            "each": stack.enter_context(relatum.ContextRouter(name, database, ContextOptions(trust_clock=False))),
        }
        actions: dict[str, Callable[[], None]] = {
            way: partial(_publish, _channel(context, stack), target, way, messages) for way, target in targets.items()
        }
        in_turns(actions, WARM_UP_ROUNDS)
        with no_collection():
            taken = in_turns(actions, rounds)
    yield _row(taken, "trust", "by the router's clock", rounds, AIM)
    yield _row(taken, "each", "each checked after its confirm", rounds, None)


def _channel(context: Context, stack: ExitStack) -> BlockingChannel:
    connection = stack.enter_context(streams.connected(context.broker_url))
    channel: BlockingChannel = relatum.intercept(connection, keys=KEYS).channel()
    channel.confirm_delivery()
    return channel


def _publish(channel: BlockingChannel, target: Any, prefix: str, number: int) -> None:
    for place in range(number):
        headers = {"serialization_context": f"{prefix} {place % CONTEXTS}"}
        channel.basic_publish(target, "", streams.body(place), pika.BasicProperties(headers=headers))


def _row(taken: dict[str, list[float]], way: str, how: str, rounds: int, aim: float | None) -> Row:
    by_hash, by_context = (ROUNDS[0] / median(taken[each]) for each in ("hash", way))
    return Row(
        GROUP,
        f"messages of {CONTEXTS} contexts, a confirm each, {how}",
        per_second(by_context),
        f"{per_second(by_hash)}: intercepted, routed by hash",
        by_context / by_hash,
        "" if aim is None else f"≥ {aim:g} ×",
        None if aim is None else by_context / by_hash >= aim,
        figures={
            "contexts_per_s": by_context,
            "hash_per_s": by_hash,
            "median_of_ratios": median([h / c for h, c in zip(taken["hash"], taken[way], strict=True)]),
            "check_us": 1e6 / by_context - 1e6 / by_hash,
            "rounds": rounds,
            "round_messages": ROUNDS[0],
        },
    )


def _check(context: Context, name: str) -> None:
    """Check that each context is in one partition."""
    where: dict[str, set[str]] = {}
    with StreamReader.open(context.broker) as reader:
        for stream in reader.partitions(name):
            for message in reader.iterate(stream):
                where.setdefault(message.headers["serialization_context"], set()).add(stream)
    assert len(where) == 3 * CONTEXTS
    assert all(len(found) == 1 for found in where.values())
