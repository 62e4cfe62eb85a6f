"""Affinity sets: publishing to the partition of a set's first message, compared with routing by a hash of its name."""

import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from itertools import count
from typing import Any, Final

import pika
from pika.adapters.blocking_connection import BlockingChannel

import relatum
from benchmarks import _streams as streams
from benchmarks._context import Context
from benchmarks._results import Row
from benchmarks._timing import in_turns, median, no_collection, per_second
from relatum.reading import StreamReader
from relatum.superstreams import declare_super_stream, delete_super_stream

GROUP: Final = "affinity"

AIM: Final = 0.9

PARTITIONS: Final = 3
SET_MESSAGES: Final = 20
ROUNDS: Final = (200, 60)
"""Messages in a round (ten sets of twenty), and rounds."""

UNCONFIRMED_ROUNDS: Final = (1000, 60)
WARM_UP_ROUNDS: Final = 3

KEYS: Final = ("affinity_set",)


def measure(context: Context) -> Iterator[Row]:
    """Yield the rows about affinity sets."""
    context.say("publishing affinity sets")
    name = f"relatum-bench-affinity-{uuid.uuid4().hex[:8]}"
    declare_super_stream(context.broker_url, name, PARTITIONS)
    database = context.new_database()
    try:
        yield _confirmed(context, name, database)
        yield _unconfirmed(context, name)
        _check(context, name)
    finally:
        context.drop_database(database)
        delete_super_stream(context.broker_url, name)


def _confirmed(context: Context, name: str, database: str) -> Row:
    with ExitStack() as stack:
        router = stack.enter_context(relatum.AffinityRouter(name, database))
        targets = {"hash": relatum.SuperStream(name, route_by="affinity_set"), "affinity": router}
        return _compare(context, stack, targets, "a confirm each", ROUNDS, AIM)


def _unconfirmed(context: Context, name: str) -> Row:
    with ExitStack() as stack:
        super_stream = relatum.SuperStream(name, route_by="affinity_set")
        targets = {"hash": super_stream, "affinity": super_stream}
        return _compare(context, stack, targets, "by handles, no confirms", UNCONFIRMED_ROUNDS, None)


def _compare(
    context: Context, stack: ExitStack, targets: dict[str, Any], how: str, sizes: tuple[int, int], aim: float | None
) -> Row:
    messages, rounds = sizes
    rounds = context.rounds(rounds)
    channels: dict[str, BlockingChannel] = {}
    for way in targets:
        connection = stack.enter_context(streams.connected(context.broker_url))
        relatum.intercept(connection, keys=KEYS)
        channels[way] = connection.channel()
        if aim is not None:
            channels[way].confirm_delivery()
    sets = count()
    publish = {"hash": _publish_sets, "affinity": _publish_sets if aim is not None else _publish_by_handles}
    actions: dict[str, Callable[[], None]] = {
        way: partial(publish[way], channels[way], target, sets, f"{way} {how}", messages // SET_MESSAGES)
        for way, target in targets.items()
    }

    def drain() -> None:
        for channel in channels.values():
            channel.queue_declare(f"{next(iter(targets.values())).name}-0", passive=True)

    in_turns(actions, WARM_UP_ROUNDS, drain)
    with no_collection():
        taken = in_turns(actions, rounds, drain)
    by_hash, by_affinity = (messages / median(taken[way]) for way in ("hash", "affinity"))
    return Row(
        GROUP,
        f"affinity sets of {SET_MESSAGES}, {how}",
        per_second(by_affinity),
        f"{per_second(by_hash)}: intercepted, routed by hash",
        by_affinity / by_hash,
        "" if aim is None else f"≥ {aim:g} ×",
        None if aim is None else by_affinity / by_hash >= aim,
        figures={
            "affinity_per_s": by_affinity,
            "hash_per_s": by_hash,
            "median_of_ratios": median([h / a for h, a in zip(taken["hash"], taken["affinity"], strict=True)]),
            "rounds": rounds,
            "round_messages": messages,
            "set_messages": SET_MESSAGES,
        },
    )


def _publish_sets(channel: BlockingChannel, target: Any, sets: "count[int]", prefix: str, number: int) -> None:
    for _ in range(number):
        name = f"{prefix} {next(sets)}"
        for place in range(SET_MESSAGES):
            headers = {"affinity_set": name, "affinity_last": place == SET_MESSAGES - 1}
            channel.basic_publish(target, "", streams.body(place), pika.BasicProperties(headers=headers))


def _publish_by_handles(
    channel: BlockingChannel, target: relatum.SuperStream, sets: "count[int]", prefix: str, number: int
) -> None:
    for _ in range(number):
        name = f"{prefix} {next(sets)}"
        with target.affinity() as handle:
            for place in range(SET_MESSAGES):
                headers = {"affinity_set": name, "affinity_last": place == SET_MESSAGES - 1}
                channel.basic_publish(handle, "", streams.body(place), pika.BasicProperties(headers=headers))


def _check(context: Context, name: str) -> None:
    """Check that each set is complete and in order in one partition."""
    limit = time.monotonic() + streams.SETTLE_S
    while True:
        sets = _sets_in(context, name)
        if all(len(places) == SET_MESSAGES for places in sets.values()):
            break
        assert time.monotonic() < limit, "messages of some sets are missing, or lie in several partitions"
        time.sleep(0.1)
    assert all(places == list(range(SET_MESSAGES)) for places in sets.values())


def _sets_in(context: Context, name: str) -> dict[tuple[str, str], list[int]]:
    sets: dict[tuple[str, str], list[int]] = {}
    with StreamReader.open(context.broker) as reader:
        for stream in reader.partitions(name):
            for message in reader.iterate(stream):
                sets.setdefault((stream, message.headers["affinity_set"]), []).append(int(message.body))
    return sets
